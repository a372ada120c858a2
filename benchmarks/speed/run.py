"""All measurements of speed by one command, and what is told of them.

    python benchmarks/speed/run.py [--only NAME,NAME] [--quick] [--from-stored] [--into FOLDER]

Every module runs in a process of its own and leaves `results/NAME.json`; RESULTS.md, results.csv
and results.png are made of all that is stored, so that one module can be measured again on its own.
A rehearsal (`--quick`) goes into a temporary folder unless one is named. All of it takes some
thirty-five minutes on two idle cores, a rehearsal some four; make the peers' environments before
(`python benchmarks/speed/simulators.py --prepare`). What README.md and docs/ say of these
measurements stands between marks there, and is written anew with them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from publish import GPU, MODULES, publish

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only",
        default=",".join(MODULES),
        help=f"some of {', '.join(MODULES)}, separated by commas",
    )
    parser.add_argument("--quick", action="store_true", help="a rehearsal on tiny sizes")
    parser.add_argument(
        "--from-stored", action="store_true", help="measure nothing, write all files again"
    )
    parser.add_argument(
        "--into", type=Path, help="the folder to write to; by default the one of this script"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.one, given.quick), default=_plain))
        return 0
    folder = given.into or (Path(tempfile.mkdtemp(prefix="speed-")) if given.quick else HERE)
    names = [] if given.from_stored else [name for name in given.only.split(",") if name]
    unknown = sorted(set(names) - set(MODULES))
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(MODULES)}")
    begun = time.perf_counter()
    failed = [name for name in names if name != GPU and not stored(name, given.quick, folder)]
    publish(folder)
    print(
        f"Written after {time.perf_counter() - begun:.0f} s: {folder / 'RESULTS.md'}",
        file=sys.stderr,
    )
    return 1 if failed else 0


def stored(name: str, quick: bool, folder: Path) -> bool:
    """Measure in another process and store; what was stored before stays where that fails."""
    if not (HERE / f"{name}.py").exists():
        print(f"{name}: skipped, there is no {name}.py.", file=sys.stderr)
        return True
    print(f"{name}: begun", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--one", name, *(["--quick"] if quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(f"{name}: failed with exit status {done.returncode}.", file=sys.stderr)
        return False
    found = json.loads(done.stdout.strip().splitlines()[-1])
    file = folder / "results" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{name}: {found['seconds']:.0f} s", file=sys.stderr, flush=True)
    return True


def one(name: str, quick: bool) -> dict[str, Any]:
    """One module's findings."""
    module = importlib.import_module(name)
    begun = time.perf_counter()
    rows = module.measure(quick)
    seconds = round(time.perf_counter() - begun, 1)
    return {
        "title": module.TITLE,
        "docstring": module.__doc__,
        "sentences": module.sentences(rows),
        "rows": rows,
        "seconds": seconds,
        "quick": quick,
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """What it was measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [
            line
            for line in info.read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ]
        cpu = lines[0].split(":", 1)[1].strip() if lines else cpu
    versions = {name: metadata.version(name) for name in ("torch", "numpy")}
    return {"CPU": cpu, "cores": os.cpu_count(), "Python": platform.python_version(), **versions}


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's."""
    return value.item()


if __name__ == "__main__":
    sys.exit(main())

"""How many local steps of clients a simulator makes in a second: FedAvg of softmax regression, the
same for everyone.

The problem is in `peers/workload.py`, a candidate in `peers/run_NAME.py`. Each is a process of its
own and takes its turn with the others; a ratio is one of seconds within a turn. Nobody's number of
threads is set from outside. A candidate that is not installed is a row that says so, and one that
learns worse than the plain loop is a row without a speed. `--prepare` makes their environments
beforehand, so that measuring installs nothing (`peers/README.md`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import Row, Timing, table

TITLE = "Simulators: local steps of clients per second, FedAvg on digits (N = 20, J = 50, minibatches of 32)"

PEERS = Path(__file__).with_name("peers")
CANDIDATES = {
    "scaffpd": "scaffpd",
    "loop": "plain PyTorch loop",
    "numpy": "NumPy, batched",
    "numpy_tuned": "NumPy, batched and tuned for this problem",
    "jax": "JAX by hand (scan, vmap)",
    "fedjax": "FedJAX",
    "flower": "Flower (Ray)",
    "fedlab": "FedLab",
    "pfl": "pfl",
}
REHEARSED = ("scaffpd", "loop", "numpy")  # what needs nothing but scaffpd's own dependencies
SHORTFALL = 0.02  # by how much a candidate's accuracy may fall below the plain loop's
PATIENCE = 600  # seconds
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# rounds of later turns, where the first one took so many seconds
FEWER = 5
LONG = 30
CACHE = Path.home() / ".cache" / "scaffpd" / "peers"
OLD_JAX = "jax==0.4.30 jaxlib==0.4.30 dm-haiku==0.0.12 optax==0.2.3 chex==0.1.86"
ENVIRONMENTS = {  # what each peer needs, in the order in which it is installed
    "jax": ["jax scikit-learn"],
    "fedjax": [f"fedjax==0.0.17 {OLD_JAX} numpy<2 scipy<1.14 scikit-learn"],
    "flower": ["flwr[simulation]==1.41.0"],
    "fedlab": [
        "pynvml pillow pandas munch tqdm requests",
        "--no-deps fedlab==1.3.0 torchvision==0.15.2",
    ],
    "pfl": [
        "multiprocess attrs absl-py dm-tree mpmath packaging<26",
        "--no-deps pfl==0.6.0 dp-accounting>=0.4,<0.6 prv-accountant<0.3",
    ],
}
SHARED = ("flower", "fedlab", "pfl")  # these use this interpreter's PyTorch

Answer = dict[str, Any] | str  # a candidate's line, or why there is none


def measure(quick: bool, pythons: Mapping[str, str] | None = None) -> list[Row]:
    """A row per candidate; `pythons` names interpreters."""
    names = REHEARSED if quick else tuple(CANDIDATES)
    found = turns(names, 1 if quick else 3, 2 if quick else 20, pythons or {})
    return judged(found)


def prepare(folder: Path) -> list[str]:
    """Make the environment of every peer, where there is none; return those that could not be made."""
    missing = []
    for name, steps in ENVIRONMENTS.items():
        home = folder / name
        done = folder / name / "complete"
        if done.exists():
            continue
        venv.create(home, clear=True, with_pip=True)
        if name in SHARED:
            paths = {key: str(home) for key in ("base", "platbase")}
            own = Path(sysconfig.get_path("purelib", "venv", vars=paths))
            (own / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        commands = [
            [str(home / "bin" / "python"), "-m", "pip", "install", "-q", *step.split()]
            for step in steps
        ]
        if all(subprocess.run(command, check=False).returncode == 0 for command in commands):
            done.touch()
        else:
            missing.append(name)
    return missing


def turns(
    names: tuple[str, ...], count: int, rounds: int, pythons: Mapping[str, str]
) -> dict[str, list[Answer]]:
    """Every candidate in every turn, in changing order; one that is not there is asked once.

    One that takes long makes fewer rounds in later turns: it has shown what it learns in the first
    (see `problem`).
    """
    found: dict[str, list[Answer]] = {name: [] for name in names}
    wanted = dict.fromkeys(names, rounds)
    for turn in range(count):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if any(isinstance(answer, str) for answer in found[name]):
                continue
            begun = time.perf_counter()
            found[name].append(ask(name, interpreter(name, pythons), wanted[name]))
            if time.perf_counter() - begun > LONG:
                wanted[name] = min(rounds, FEWER)
    return found


def interpreter(name: str, pythons: Mapping[str, str]) -> str:
    """The one given, else that of an environment in the folder SCAFFPD_PEERS, else this one."""
    own = Path(os.environ.get("SCAFFPD_PEERS", CACHE), name, "bin", "python")
    return pythons.get(name) or (str(own) if own.exists() else sys.executable)


def ask(name: str, python: str, rounds: int, folder: Path = PEERS) -> Answer:
    """What a candidate makes of digits."""
    return said(name, python, "--rounds", str(rounds), folder=folder)


def said(name: str, python: str, *arguments: str, folder: Path = PEERS) -> Answer:
    """What a candidate's script prints, or the last thing that it complains about."""
    free = {key: value for key, value in os.environ.items() if key not in THREADS}
    command = [python, str(folder / f"run_{name}.py"), *arguments]
    try:
        done = subprocess.run(
            command, env=free, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return f"failed: not done after {PATIENCE} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        return dict(json.loads(lines[-1]))
    complaint = (done.stderr.strip() or "no answer").splitlines()[-1]
    return f"{'not installed' if 'ModuleNotFoundError' in complaint else 'failed'}: {complaint}"


def judged(found: Mapping[str, list[Answer]]) -> list[Row]:
    """Answers as rows: with speeds and ratios where there is an answer in every turn, and it is
    good enough.
    """
    problems = {name: problem(answers, found["loop"]) for name, answers in found.items()}
    for name in ("scaffpd", "loop"):
        if problems[name]:
            raise RuntimeError(f"{CANDIDATES[name]}: {problems[name]}")
    good = {name: answers for name, answers in found.items() if not problems[name]}
    timing = Timing(
        {
            name: [1 / answer["steps_per_second"] for answer in answers]
            for name, answers in good.items()
        }
    )
    return [row(name, answers, problems[name], timing) for name, answers in found.items()]


def problem(answers: list[Answer], loop: list[Answer]) -> str:
    """Why a candidate's answers do not count; empty if they do.

    Every turn has to learn as well as the loop does; of one with another number of rounds than the
    loop's, all that can be said is whether it has an accuracy at all.
    """
    for answer, other in zip(answers, loop, strict=False):
        if isinstance(answer, str):
            return answer
        if isinstance(other, str):
            continue  # the loop has no answer: that is said of the loop
        least = other["accuracy"] - SHORTFALL if answer["rounds"] == other["rounds"] else 0.0
        if not answer["accuracy"] >= least:
            return f"failed: accuracy {answer['accuracy']:.3f}, the plain loop's is {other['accuracy']:.3f}"
    return ""


def row(name: str, answers: list[Answer], problem: str, timing: Timing) -> Row:
    """One candidate's line of the table."""
    said = [answer for answer in answers if isinstance(answer, dict)]
    ratio = (None, None, None) if problem else timing.ratio(name, to="scaffpd")
    return {
        "candidate": CANDIDATES.get(name, name),
        "version": said[-1]["version"] if said else None,
        "steps/s": None if problem else 1 / timing.median(name),
        "time ÷ scaffpd's": ratio[0],
        "from": ratio[1],
        "to": ratio[2],
        "accuracy": said[0]["accuracy"] if said else None,
        "training accuracy": said[0]["train_accuracy"] if said else None,
        "start-up, s": middle(said, "startup_seconds"),
        "note": problem or ", ".join(sorted({answer["setting"] for answer in said})),
    }


def middle(said: list[dict[str, Any]], key: str) -> float | None:
    """The median over turns."""
    return statistics.median(answer[key] for answer in said) if said else None


def sentences(rows: list[Row]) -> list[str]:
    """Who is how much faster than whom."""
    ours = next(row for row in rows if row["candidate"] == "scaffpd")
    said = [
        f"scaffpd makes {ours['steps/s']:,.0f} local steps of clients a second (accuracy "
        f"{ours['accuracy']:.3f})."
    ]
    for row in rows:
        name = f"{row['candidate']} {row['version'] or ''}".strip()
        ratio = row["time ÷ scaffpd's"]
        if row is ours:
            continue
        if ratio is None:
            said.append(f"{name} has no speed here: {row['note']}.")
        elif ratio >= 1:
            said.append(
                f"scaffpd is {ratio:.3g}× as fast as {name} ({row['from']:.3g} to {row['to']:.3g})."
            )
        else:
            low = 1 / row["to"]
            high = 1 / row["from"]
            said.append(f"{name} is {1 / ratio:.3g}× as fast as scaffpd ({low:.3g} to {high:.3g}).")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument(
        "--quick", action="store_true", help="a rehearsal: one turn of what needs no other library"
    )
    parser.add_argument(
        "--prepare", action="store_true", help="make the peers' environments, and measure nothing"
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="a candidate's interpreter",
    )
    given = parser.parse_args()
    if given.prepare:
        missing = prepare(Path(os.environ.get("SCAFFPD_PEERS", CACHE)))
        sys.exit(f"No environment for {', '.join(missing)}." if missing else 0)
    rows = measure(given.quick, dict(pair.split("=", 1) for pair in given.python))
    print(table(rows), "", *sentences(rows), sep="\n")


if __name__ == "__main__":
    main()

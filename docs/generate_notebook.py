"""Runs the cells of examples/quickstart.ipynb and stores what they print and draw.

python docs/generate_notebook.py            runs the cells and writes the notebook
python docs/generate_notebook.py --check    says whether it prints what is stored, and changes
nothing
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"
NUMBER = re.compile(r"[+−-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def run(cells: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The outputs of all code cells, run one after the other."""
    os.environ.setdefault("MPLBACKEND", "agg")
    from matplotlib import pyplot

    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for cell in cells:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
        found: list[dict[str, Any]] = []
        if printed.getvalue():
            text = printed.getvalue().splitlines(keepends=True)
            found.append({"name": "stdout", "output_type": "stream", "text": text})
        for figure in map(pyplot.figure, pyplot.get_fignums()):
            picture = io.BytesIO()
            figure.savefig(
                picture, format="png", dpi=110, bbox_inches="tight", metadata={"Software": None}
            )
            data = {
                "image/png": base64.b64encode(picture.getvalue()).decode(),
                "text/plain": ["<Figure>"],
            }
            found.append({"data": data, "metadata": {}, "output_type": "display_data"})
        pyplot.close("all")
        outputs.append(found)
    return outputs


def texts(outputs: list[dict[str, Any]]) -> str:
    """What a cell prints, with numbers to two digits: the last ones differ between machines."""
    whole = "".join(
        line for output in outputs if output["output_type"] == "stream" for line in output["text"]
    )
    return NUMBER.sub(lambda found: f"{float(found[0].replace('−', '-')):.2g}", whole)


def main(check: bool) -> int:
    """Write the notebook, or say whether it is up to date."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    outputs = run(cells)
    if check:
        old = [
            k + 1
            for k, (cell, new) in enumerate(zip(cells, outputs, strict=True))
            if texts(cell["outputs"]) != texts(new)
        ]
        sys.stdout.write(
            f"{NOTEBOOK.name}: {f'cells {old} print something else' if old else 'up to date'}.\n"
        )
        return int(bool(old))
    for k, (cell, new) in enumerate(zip(cells, outputs, strict=True)):
        cell["outputs"] = new
        cell["execution_count"] = k + 1
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))

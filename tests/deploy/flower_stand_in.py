"""A silo and a coordinator that are simple enough to test an engine with; also what a real process loads instead.

A folder made by `stand_in` on PYTHONPATH makes every Python that starts there use these for `scaffpd.deploy.silo` and
`scaffpd.deploy.coordinate`.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import random
import sys
import time
from pathlib import Path

SITE = """\
import sys
sys.path.insert(0, {here!r})
import flower_stand_in
flower_stand_in.install()
"""


class Silo:
    """Answers with its name, its process, how many answers its site has given so far, and the question itself."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0

    @classmethod
    def open(cls, path: Path) -> Silo:
        return cls(Path(path).read_text(encoding="utf-8").strip())

    def answer(self, question: bytes) -> bytes:
        self.count += 1
        if question.startswith(b"sleep "):
            time.sleep(float(question.split()[1]))
        head = {"name": self.name, "pid": os.getpid(), "count": self.count}
        return json.dumps(head).encode() + b"\n" + question

    def kept(self) -> bytes:
        return str(self.count).encode()

    def restore(self, kept: bytes) -> None:
        self.count = int(kept)


def coordinate(file, transport):
    """Carry out the steps of a JSON file: what is asked, of how many sites, for how long; note what came back."""
    plan = json.loads(Path(file).read_text(encoding="utf-8"))
    out = Path(plan["out"])
    for step in plan["steps"]:
        while len(sites := transport.sites()) < step.get("sites", 1):
            time.sleep(0.1)
        question = step["ask"].encode() + random.Random(1).randbytes(step.get("bytes", 0))
        for _ in range(step.get("times", 1)):
            start = time.time()
            replies = transport.ask(dict.fromkeys(sites, question), step["timeout"])
            seen = {
                "start": start,
                "seconds": time.time() - start,
                "replies": [note(r, question) for r in replies.values()],
            }
            with out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(seen) + "\n")


def note(reply, question):
    if not isinstance(reply, bytes):
        return {"failure": reply.reason}
    head, _, rest = reply.partition(b"\n")
    return {**json.loads(head), "same": rest == question}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    NAMES = ("scaffpd.deploy.silo.silo", "scaffpd.deploy.coordinate")

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name in self.NAMES else None

    def exec_module(self, module):
        module.Silo = Silo
        module.coordinate = coordinate


def install() -> None:
    sys.meta_path.insert(0, Finder())


def stand_in(folder: Path) -> str:
    """Write the folder that PYTHONPATH has to start with."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(
        SITE.format(here=str(Path(__file__).parent)), encoding="utf-8"
    )
    return str(folder)

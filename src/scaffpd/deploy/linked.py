"""Lines of JSON in a chain: each has a link, the SHA-256 of the link before and of the line.

Changing, removing or inserting a line changes all later links, and a link that was noted down
elsewhere proves that the end was not cut off.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from scaffpd.deploy.messages import Json, JsonMapping
from scaffpd.files import JsonLines

LINK = "link"


class LinkedLines:
    """A file of such lines, to append to and to read.

    Args:
        file: its path.
        first: the link before the first line.
    """

    def __init__(self, file: Path, first: str = "") -> None:
        self.file = file
        self.first = first
        self._lines = JsonLines(file)

    def lock(self) -> AbstractContextManager[None]:
        return self._lines.lock()

    def append(self, line: JsonMapping) -> str:
        """Append a line, flush it to disk, and return its link."""
        link = link_of(self.last(), line)
        self._lines.append({**line, LINK: link})
        return link

    def last(self) -> str:
        return str(self._lines.last({LINK: self.first})[LINK])

    def read(self) -> Iterator[Json]:
        """Yield all lines; a line that is none, or has a wrong link, raises a ValueError."""
        link = self.first
        for line in JsonLines(self.file).read():
            if not isinstance(line, dict):
                raise ValueError
            link = link_of(link, {name: part for name, part in line.items() if name != LINK})
            if line.get(LINK) != link:
                raise ValueError
            yield line


def link_of(before: str, line: JsonMapping) -> str:
    content = json.dumps(line, sort_keys=True)
    return hashlib.sha256(f"{before}{content}".encode()).hexdigest()

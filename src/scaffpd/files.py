"""Files that survive crashes: atomic writes, appended lines of JSON, locks, secrets, and CSV."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from scaffpd.errors import InputError

# errors of the machine, which no other argument would mend
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENFILE, errno.EMFILE)
DRAFT = ".scaffpd-draft"  # how names of temporary files end
LOCK_NAME = "lock"
SECRET_BYTES = 32
FORMULA = re.compile(r"'*[=+\-@\t\r](?![\d.]+([eE][+-]?\d+)?$)")  # spreadsheets compute such texts


@contextmanager
def atomic_write(target: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Write a temporary file beside the target, flush it to disk, then rename it over the target.

    `mode` is that of a new file, less what this user's umask takes away.
    """
    folder = target.resolve().parent
    draft = folder / f".{target.name}.{secrets.token_hex(8)}{DRAFT}"
    handle = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """Let the names of new files survive a power failure, too."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def clear_drafts(folder: Path) -> None:
    """Remove the temporary files that killed processes have left of `atomic_write`."""
    for draft in folder.glob(f".*{DRAFT}"):
        draft.unlink(missing_ok=True)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically, or refuse; a full disk is not the user's mistake."""
    try:
        with atomic_write(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise InputError(
            "file-not-writable", f"Cannot write {str(path)!r}: {error.strerror}."
        ) from None


def make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a file" if folder.is_file() else error.strerror
        raise InputError(
            "folder-not-writable", f"Cannot write to the folder {str(folder)!r}: {why}."
        ) from None
    return folder


def lock_folder(folder: Path, busy: str, seconds: float = 0.0) -> AbstractContextManager[None]:
    """Hold the lock of a folder, or refuse after `seconds` with the sentence `busy`.

    The lock ends with the process, so that a crash leaves none behind.
    """
    refused = f"Cannot write to the folder {str(folder)!r}"
    return _locked(folder / LOCK_NAME, refused, busy, seconds)


def lock_file(path: Path) -> AbstractContextManager[None]:
    """Hold a lock file; wait until it is free."""
    return _locked(path, f"Cannot write {str(path)!r}")


@contextmanager
def _locked(path: Path, refused: str, busy: str = "", seconds: float = -1) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=seconds)
    try:
        lock.acquire()
    except Timeout:
        raise InputError("locked", busy) from None
    except OSError as error:
        raise InputError("locked", f"{refused}: {error.strerror}.") from None
    try:
        yield
    finally:
        lock.release()


def load_or_create(path: Path, new: bytes | None = None) -> bytes:
    """Return the 32 random bytes of a file, written as hexadecimal digits; create it if missing.

    `new` are the bytes of a file that is created.
    """
    try:
        if not path.exists():
            _make_secret(path, new or secrets.token_bytes(SECRET_BYTES))
        open_to_others = os.name == "posix" and path.stat().st_mode & 0o077 != 0
        secret = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        open_to_others = False
        secret = b""
    if open_to_others:
        raise InputError(
            "secret-readable-by-others",
            f"The secret in {str(path)!r} is a file that others can read: chmod 600 it.",
        )
    if len(secret) != SECRET_BYTES:
        raise InputError(
            "secret-unreadable", f"The secret in {str(path)!r} cannot be read or written."
        )
    return secret


def _make_secret(path: Path, secret: bytes) -> None:
    """Write a complete file or none, for its owner only, and never over another process's."""
    draft = path.resolve().parent / f".{path.name}.{secrets.token_hex(8)}{DRAFT}"
    with atomic_write(draft, 0o600) as file:
        file.write(secret.hex().encode() + b"\n")
    try:
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


class JsonLines:
    """A file with an entry of JSON per line, which several processes append to and read.

    An entry is on disk before `append` returns. If a crash or a full disk has cut off the last
    line, nobody relies on it yet: reading leaves it out, and the next `append` removes it.

    Args:
        file: its path.
        mode: the permissions of a new file.
    """

    def __init__(self, file: Path, mode: int = 0o600) -> None:
        self.file = file
        self.mode = mode
        self.place = 0  # where `read` goes on

    def lock(self) -> AbstractContextManager[None]:
        return lock_file(self.file.with_suffix(".lock"))

    def append(self, entry: object) -> None:
        handle = os.open(self.file, os.O_RDWR | os.O_APPEND | os.O_CREAT, self.mode)
        with os.fdopen(handle, "r+b") as file:
            whole = file.truncate(_line_start(file, file.seek(0, os.SEEK_END)))
            file.write(f"{json.dumps(entry)}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        if not whole:
            _sync_folder(self.file.resolve().parent)

    def read(self) -> Iterator[Any]:
        """Yield the entries since the last call; a line that is not JSON raises a ValueError."""
        if self.file.exists():
            with self.file.open("rb") as lines:
                lines.seek(self.place)
                for line in lines:
                    if not line.endswith(b"\n"):
                        return  # its rest may come while we read, and is no line of its own
                    yield json.loads(line)
                    self.place += len(line)

    def skip(self) -> None:
        """Pass over the entries so far."""
        if self.file.exists():
            with self.file.open("rb") as file:
                self.place = _line_start(file, file.seek(0, os.SEEK_END))

    def last(self, default: Any = None) -> Any:
        """Skip to the end and return the last entry, or `default` if there is none."""
        self.skip()
        if not self.place:
            return default
        with self.file.open("rb") as file:
            file.seek(_line_start(file, self.place - 1))
            return json.loads(file.readline())


def _line_start(file: IO[bytes], end: int) -> int:
    """Return where the line begins that `end` is in, after the last newline before it."""
    while end > 0:
        start = file.seek(max(0, end - 2**16))
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def csv_text(rows: Sequence[Mapping[str, object]], columns: Sequence[str] = ()) -> str:
    """Write rows with the same keys as CSV, NaN as an empty cell.

    `columns` names them if there may be no rows. A text that spreadsheets would take for a
    formula, which a hostile silo may have written, gets an apostrophe.
    """
    text = io.StringIO(newline="")
    names = list(columns or rows[0])
    writer = csv.writer(text)
    writer.writerow(map(_plain_cell, names))
    writer.writerows([_plain_cell(row.get(name, "")) for name in names] for row in rows)
    return text.getvalue()


def _plain_cell(cell: object) -> object:
    if cell != cell:
        return ""
    return f"'{cell}" if isinstance(cell, str) and FORMULA.match(cell) else cell

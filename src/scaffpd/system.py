"""The machine of a run: cores, memory, versions, locks, secrets, atomic writes, logs, and a progress bar."""

from __future__ import annotations

import csv
import errno
import io
import json
import logging
import math
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from importlib import metadata
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import scaffpd
from scaffpd.errors import InputError

if TYPE_CHECKING:
    import torch


UMASK = os.umask(0o077)
os.umask(UMASK)

FULL = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EIO,
    errno.ENFILE,
    errno.EMFILE,
)  # errors of the machine
FORMULA = re.compile(
    r"'*[=+\-@\t\r](?![\d.]+([eE][+-]?\d+)?$)"
)  # texts that spreadsheets compute, and not numbers


def cores() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


ASSUMED_FREE = 4 * 2**30  # bytes assumed free if the system does not say
# limits of containers, and our own group
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
CGROUP_FILES = {  # limit, use and reclaimable page cache, in versions 2 and 1 of control groups
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}


def free_memory(device: torch.device) -> int:
    """Return the free bytes: on a GPU with torch's unused ones, in a container within its limit."""
    if device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    return min([_of_machine(), *_of_containers()])


def _of_machine() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # includes reclaimable page cache
            return 1024 * next(
                int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")
            )
    except (OSError, ValueError, StopIteration):
        pass
    return _pages("SC_AVPHYS_PAGES") or ASSUMED_FREE


def _of_containers() -> Iterator[int]:
    """Yield limit - use + page cache of every control group around us whose limit is below physical memory."""
    for kind, (limit, use, cached) in CGROUP_FILES.items():
        for folder in _groups(kind):
            most = _number(folder / limit)
            used = _number(folder / use)
            if most is not None and used is not None and most < (physical_memory() or float("inf")):
                yield max(0, most - max(0, used - _cache(folder, cached)))


def _groups(kind: str) -> Iterator[Path]:
    """Yield the folders of this process's own group and of those around it, of one version."""
    root = CGROUPS / kind
    yield root
    try:
        lines = OWN_CGROUP.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if kind in controllers.split(","):  # a line of version 2 names none
            own = root / path.strip("/")
            yield from (
                folder
                for folder in (own, *own.parents)
                if folder != root and folder.is_relative_to(root)
            )


def _number(file: Path) -> int | None:
    """Return the number in a file; None for "max" and for no file."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _cache(folder: Path, names: tuple[str, ...]) -> int:
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        return sum(
            int(line.split()[1]) for line in lines if line.split()[:1] and line.split()[0] in names
        )
    except (OSError, ValueError, IndexError):
        return 0


def format_bytes(size: float) -> str:
    """Return a number of bytes as text, such as 6 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "B" else f"{int(size)} B"
        size /= 1000
    return f"{size:.3g} TB"


PACKAGES = (  # packages whose version is recorded if installed, without importing them
    *(
        "torch",
        "numpy",
        "scipy",
        "scikit-learn",
        "safetensors",
        "threadpoolctl",
        "matplotlib",
        "pillow",
    ),
    *(
        "vl-convert-python",
        "rich",
        "typer",
        "click",
        "pandas",
        "pyarrow",
        "nvflare",
        "flwr",
        "tensorboard",
    ),
    *(
        "mlflow",
        "mlflow-skinny",
        "pydantic",
        "tomli-w",
        "filelock",
        "jinja2",
        "cryptography",
        "dp-accounting",
    ),
)


def environment() -> dict[str, Any]:
    """Return names and plain values, ready for JSON; packages that are not installed are left out.

    `threads` are those of PyTorch, `cores` those that this process may use, `memory` is the machine's
    in bytes (None if the system does not say), `gpus` has a name and bytes of memory for each.
    """
    threads, gpus = _torch()
    return {
        "scaffpd": scaffpd.__version__,
        "python": platform.python_version(),
        **versions(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": cores(),
        "threads": threads,
        "memory": physical_memory(),
        "gpus": gpus,
    }


def versions() -> dict[str, str]:
    """Return the version of every installed package in `PACKAGES`."""
    found = ((name, version(name)) for name in PACKAGES)
    return {name: number for name, number in found if number is not None}


def version(package: str) -> str | None:
    """Return the installed version, without importing anything."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def physical_memory() -> int | None:
    """Return the machine's bytes of memory."""
    return _pages("SC_PHYS_PAGES")


def _pages(name: str) -> int | None:
    try:
        return int(os.sysconf(name)) * int(os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return None


def _torch() -> tuple[int | None, list[dict[str, Any]]]:
    """Return PyTorch's threads and GPUs; None and none if it cannot be loaded."""
    try:
        import torch
    except (ImportError, OSError):  # missing, or a library that it needs is
        return None, []
    return torch.get_num_threads(), _gpus()


def _gpus() -> list[dict[str, Any]]:
    import torch

    try:
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except RuntimeError:  # an incompatible driver
        return []
    return [{"name": gpu.name, "memory": int(gpu.total_memory)} for gpu in found]


LOCK_NAME = "lock"
LONGEST_MESSAGE = 2000  # characters of a line of a log


@contextmanager
def lock_folder(folder: Path | None, busy: str, seconds: float = 0.0) -> Iterator[None]:
    """Hold the lock of a folder, or refuse after `seconds` with the sentence `busy`; it ends with the process."""
    if folder is None:
        yield
        return
    with _locked(folder / LOCK_NAME, f"Cannot write to the folder {str(folder)!r}", busy, seconds):
        yield


def lock_file(path: Path) -> AbstractContextManager[None]:
    """Hold a lock file; wait until it is free."""
    return _locked(path, f"Cannot write {str(path)!r}")


@contextmanager
def _locked(
    path: Path, refused: str, busy: str | None = None, seconds: float = -1
) -> Iterator[None]:
    try:
        from filelock import FileLock, Timeout
    except ImportError:  # only the numerics are installed
        yield
        return
    lock = FileLock(path, timeout=seconds)
    try:
        lock.acquire()
    except Timeout:
        raise InputError("locked", busy or refused) from None
    except OSError as error:
        raise InputError("locked", f"{refused}: {error.strerror}.") from None
    try:
        yield
    finally:
        lock.release()


SECRET_BYTES = 32


def load_or_create(path: Path) -> bytes:
    """Return the 32 random bytes of a file, written as hexadecimal digits; create it if missing."""
    try:
        if not path.exists():
            _make_secret(path)
        open_to_others = os.name == "posix" and path.stat().st_mode & 0o077 != 0
        secret = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        open_to_others = False
        secret = b""
    if open_to_others:
        raise InputError(
            "secret-file-others",
            f"The secret in {str(path)!r} is a file that others can read: chmod 600 it.",
        )
    if len(secret) != SECRET_BYTES:
        raise InputError(
            "secret-read-written", f"The secret in {str(path)!r} cannot be read or written."
        )
    return secret


def _make_secret(path: Path) -> None:
    """Write a complete file or none, and never over another process's."""
    handle, name = tempfile.mkstemp(dir=path.resolve().parent)  # for its owner only
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(os.urandom(SECRET_BYTES).hex() + "\n")
        with suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)


DRAFT = ".scaffpd-draft"  # how names of temporary files end


@contextmanager
def atomic_write(target: Path) -> Iterator[IO[bytes]]:
    """Write a temporary file beside the target, flush it to disk, then rename it over the target."""
    folder = target.resolve().parent
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".{target.name}.", suffix=DRAFT)
    try:
        with os.fdopen(handle, "wb") as file:
            os.chmod(name, 0o666 & ~UMASK)  # with this user's usual permissions
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
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
    """Remove the temporary files that killed processes have left of `atomic_write`, and no other file."""
    for draft in folder.glob(f".*{DRAFT}"):
        draft.unlink(missing_ok=True)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically, or refuse in one sentence; a full disk is not the user's mistake."""
    try:
        with atomic_write(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise InputError(
            "write-write-file", f"Cannot write {str(path)!r}: {error.strerror}."
        ) from None


class JsonLines:
    """A file with an entry of JSON per line, which several processes append to and read.

    An entry is on disk before `append` returns. So if a crash or a full disk has cut off the last line, nobody relies
    on it yet: reading leaves it out, and the next `append` removes it.
    """

    def __init__(self, file: Path, mode: int = 0o600) -> None:
        # the permissions of a new file; where `read` goes on
        self.file = file
        self.mode = mode
        self.place = 0

    def lock(self) -> AbstractContextManager[None]:
        """Hold the lock of the file."""
        return lock_file(self.file.with_suffix(".lock"))

    def append(self, entry: Any) -> None:
        """Append an entry and flush it to disk."""
        with os.fdopen(
            os.open(self.file, os.O_RDWR | os.O_APPEND | os.O_CREAT, self.mode), "r+b"
        ) as file:
            whole = file.truncate(_line_start(file, file.seek(0, os.SEEK_END)))
            file.write(f"{json.dumps(entry)}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        if not whole:
            _sync_folder(self.file.resolve().parent)

    def read(self) -> Iterator[Any]:
        """Yield the entries since the last call; a line that is not JSON raises a ValueError, every time."""
        if self.file.exists():
            with self.file.open("rb") as lines:
                lines.seek(self.place)
                for line in lines:
                    if line.endswith(b"\n"):
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
        if (found := file.read(end - start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0


def make_folder(folder: Path) -> Path:
    """Make a folder, or refuse in one sentence."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a file" if folder.is_file() else error.strerror
        raise InputError(
            "write-folder", f"Cannot write to the folder {str(folder)!r}: {why}."
        ) from None
    return folder


def csv_text(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Write rows with the same keys as CSV, NaN as an empty cell; `columns` names them if there may be no rows.

    A text that spreadsheets would take for a formula, which a hostile silo may have written, gets an apostrophe;
    `csv_cell` takes it away.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(columns or rows[0]))
    writer.writeheader()
    writer.writerows({name: _plain_cell(cell) for name, cell in row.items()} for row in rows)
    return text.getvalue()


def _plain_cell(cell: Any) -> Any:
    if cell != cell:
        return ""
    return f"'{cell}" if isinstance(cell, str) and FORMULA.match(cell) else cell


def csv_cell(cell: str) -> str:
    """Return the text that `csv_text` was given."""
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell


class _LogFile(RotatingFileHandler):
    """Log file that only its owner reads; several processes may write to it, each line under a lock."""

    def _open(self) -> Any:
        return open(
            self.baseFilename,
            "a",
            encoding="utf-8",
            opener=lambda path, flags: os.open(path, flags, 0o600),
        )

    def emit(self, record: logging.LogRecord) -> None:
        """Append a line to the current file: another process may have started a new one."""
        try:
            with lock_file(Path(f"{self.baseFilename}.lock")):
                super().emit(record)
                self.close()
        except InputError:
            self.handleError(record)  # on standard error: a log that cannot be written ends no run


class RunLog:
    """Log of a coordinator or a silo: lines of JSON with time, level, run, round, silo and message.

    It records the sentences that the other side gets too, and never an unexpected exception's text, a value or a key.
    """

    def __init__(self, settings: Any) -> None:
        self.run = ""
        self._handler = None
        if settings is not None:
            size = settings.size_mb * 2**20
            level = settings.level.upper()
            self._handler = _LogFile(
                settings.file, maxBytes=size, backupCount=settings.keep, delay=True
            )
            self._handler.setLevel(level)

    def note(
        self, level: str, message: str, silo: str | None = None, number: int | None = None
    ) -> None:
        """Write a line, if there is a log; `number` is that of the round, if known."""
        if self._handler is None:
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "level": level,
            "run": self.run or None,
            "round": number,
            "silo": silo,
            "message": message[:LONGEST_MESSAGE],
        }
        record = logging.makeLogRecord(
            {"levelno": getattr(logging, level.upper()), "msg": json.dumps(line)}
        )
        if record.levelno >= self._handler.level:
            self._handler.handle(record)


class Tally(AbstractContextManager["Tally"]):
    """Progress bar that counts runs; silent without a terminal or without Rich.

    If the output is not a terminal but a bar was requested, Rich prints its last state as one plain line.
    """

    def __init__(self, wanted: bool | None, total: int, what: str = "run") -> None:
        self.bar = _bar(what) if (sys.stderr.isatty() if wanted is None else wanted) else None
        self.task = None if self.bar is None else self.bar.add_task("starting", total=total)

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def expect(self, runs: int) -> None:
        """Add `runs` to the total."""
        if self.bar is not None:
            self.bar.update(self.task, total=self.bar.tasks[0].total + runs)

    def advance(self, text: str, runs: int = 1) -> None:
        """Redraw after `runs` more runs, the last of which was of `text`."""
        if self.bar is not None:
            self.bar.update(self.task, advance=runs, description=text)


class Progress(Tally):
    """Progress bar of rounds, with the certificate on its way to tol."""

    def __init__(self, wanted: bool | None, rounds: int, tol: float | None) -> None:
        super().__init__(wanted, rounds, "round")
        self.tol = tol

    def show(self, info: Any) -> None:
        """Redraw after a round."""
        if self.bar is None:
            return
        state = info.state
        goal = "" if self.tol is None else f" → {self.tol:.0e}"
        text = f"gap ≤ {state.certificate:.1e}{goal}"
        worst = float(state.losses.max())
        text += "" if math.isnan(worst) else f"  worst loss {worst:.4g}"  # it was not computed
        self.bar.update(self.task, completed=info.rounds, description=text)


def _bar(what: str) -> Any:
    try:
        from rich import console, progress
    except ImportError:
        return None
    columns = (
        progress.TextColumn(f"{what} {{task.completed}}/{{task.total}}"),
        progress.BarColumn(bar_width=24),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.description}"),
    )
    return progress.Progress(*columns, console=console.Console(stderr=True))

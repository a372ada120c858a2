"""Runs in this process, or in others that are started afresh and have one thread each: the numbers are the same.

A worker waits for jobs on a pipe of its own, so that one whose parent is gone reads the end of the pipe and ends.
"""

from __future__ import annotations

import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch

from scaffpd.comparison.runs import Bench, Job, Run
from scaffpd.comparison.setting import Setting
from scaffpd.errors import InputError

READY = "ready"
NO_START = (
    "A worker process could not start: in a script that defines what it compares, keep what it does under "
    '`if __name__ == "__main__":`, or use processes=1.'
)
KILLED = "A worker process was killed, perhaps for want of memory; with `out`, the same call goes on where it stopped."


@contextmanager
def one_thread() -> Iterator[None]:
    """Matrices as small as these gain nothing from threads, and on a busy machine lose their time waiting."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Pool:
    """Workers for one setting; a single process needs none."""

    def __init__(self, setting: Setting, processes: int) -> None:
        self.processes = processes
        self.payload = _packed(setting) if processes > 1 else b""
        self.bench = Bench(setting)
        self.workers: dict[Connection, Any] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, worker in self.workers.items():
            worker.terminate()
            worker.join()
            pipe.close()

    def work(self, jobs: Sequence[Job]) -> Iterator[Run]:
        """The runs of these jobs, in whatever order they are done."""
        if min(self.processes, len(jobs)) <= 1:
            for job in jobs:
                with one_thread():
                    run = self.bench.carry_out(job)
                yield run
            return
        self._hire(min(self.processes, len(jobs)))
        waiting, running = list(reversed(jobs)), dict.fromkeys(self.workers, False)
        for pipe in self.workers:
            running[pipe] = _hand(pipe, waiting)
        while any(running.values()):
            for pipe in [p for p in connection.wait([p for p in running if running[p]]) if isinstance(p, Connection)]:
                run = _answer(pipe, RuntimeError(KILLED))
                running[pipe] = _hand(pipe, waiting)
                yield run

    def _hire(self, wanted: int) -> None:
        """Start processes until there are `wanted`, all at once, and wait until each has said that it is ready."""
        context, fresh = get_context("spawn"), []
        for _ in range(wanted - len(self.workers)):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(theirs, self.payload), daemon=True)
            with _deaf(), nullcontext() if b"__main__" in self.payload else _hidden_main():
                worker.start()
            theirs.close()
            self.workers[ours] = worker
            fresh.append(ours)
        for pipe in fresh:
            _answer(pipe, InputError(NO_START))


class _Failure:
    """An exception of a worker, as text."""

    def __init__(self, text: str) -> None:
        self.text = text


def _answer(pipe: Connection, otherwise: Exception) -> Any:
    """What a worker says; where it has gone without a word, `otherwise` is raised."""
    try:
        answer = pipe.recv()
    except (EOFError, ConnectionError):
        raise otherwise from None
    if isinstance(answer, _Failure):
        raise RuntimeError(f"A run failed in another process:\n{answer.text}")
    return answer


def _hand(pipe: Connection, waiting: list[Job]) -> bool:
    if waiting:
        pipe.send(waiting.pop())
        return True
    return False


def _serve(pipe: Connection, payload: bytes) -> None:
    """The life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        bench = Bench(pickle.loads(payload))
        pipe.send(READY)
        while True:
            pipe.send(bench.carry_out(pipe.recv()))
    except (EOFError, ConnectionError):  # nobody is there any more
        return
    except Exception:
        pipe.send(_Failure(traceback.format_exc()))


def _packed(setting: Setting) -> bytes:
    try:
        return pickle.dumps(setting)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"The problem {setting.problem.name!r} or a method cannot be sent to other processes ({error}): "
            "use functions at the top level of a module, or processes=1."
        ) from None


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that start meanwhile never hear Ctrl-C, which reaches everybody; it is the parent that sees to it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if handler is None else handler)


@contextmanager
def _hidden_main() -> Iterator[None]:
    """A spawned process runs the caller's script again unless it cannot see it; nothing here needs what is in there."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main

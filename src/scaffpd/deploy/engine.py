"""What `scaffpd deploy local` and the tests need of an engine: real processes on loopback that can be hurt."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from scaffpd.errors import not_installed, unknown

ENGINES = {"flare": "FlareEngine", "flower": "FlowerEngine"}


class Engine(Protocol):
    """A server, and a process (tree) for every silo."""

    def start(self) -> None:
        """Everything up and connected."""

    def submit(self) -> None:
        """Start the federation's job, or start it again."""

    def running(self) -> bool:
        """Whether the job that was submitted last is still going."""

    def abort(self) -> None:
        """End the job, leave the processes up."""

    def connected(self) -> set[str]:
        """The silos that the server sees now."""

    def outside(self) -> set[str]:
        """Those of them that have no part in the running job, and can get one only by starting it again."""

    def kill_silo(self, name: str) -> None:
        """SIGKILL all of a silo."""

    def kill_job(self, name: str) -> None:
        """SIGKILL the process in which a silo answers, not the silo itself."""

    def kill_server(self) -> None:
        """SIGKILL all of the server."""

    def start_silo(self, name: str) -> None:
        """Bring a silo back, as who it was."""

    def start_server(self) -> None:
        """Bring the server back."""

    def pause_silo(self, name: str) -> None:
        """SIGSTOP: it hangs."""

    def wake_silo(self, name: str) -> None:
        """SIGCONT."""

    def logs(self) -> dict[str, Path]:
        """Every process's log."""

    def pids(self) -> set[int]:
        """Everything alive that belongs to the engine."""

    def stop(self) -> None:
        """Everything down, whatever state it is in."""


def engine_named(kind: str, federation: Path, silos: Mapping[str, Path], work: Path, tls: bool = True) -> Engine:
    """An engine by its name, or a sentence where it is not installed."""
    if kind not in ENGINES:
        raise unknown("engine", kind, ENGINES)
    made: Engine = getattr(engine_module(kind, "local"), ENGINES[kind])(federation, silos, work, tls)
    return made


def engine_module(kind: str, name: str) -> Any:
    """A module of an engine, or a sentence where the engine is not installed."""
    try:
        return import_module(f"scaffpd.deploy.{kind}.{name}")
    except ModuleNotFoundError as error:
        raise not_installed(str(error.name).partition(".")[0], kind) from None

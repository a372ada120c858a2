r"""Flower on one machine: a SuperLink and one SuperNode per silo as real processes, with TLS and node keys.

What happens on Flower 1.41.0 (measured here, four silos):

- A killed SuperNode: the SuperLink holds it for online until 60 seconds after its last heartbeat (so 38 to 60 seconds
  from now) and then answers for it with error 5, in its own name. The interval (30 seconds, two may be missed) is a
  constant of Flower; what bounds the wait is the timeout of the question. A stopped (hanging) SuperNode looks the same.
- A killed SuperNode that starts again at once, with the same key, is refused ("Failed to activate", exit code 305) as
  long as the SuperLink holds the old one for online. `start_silo` says goodbye for it first, signed with its key; an
  operator lets a supervisor start it until it stays. Its node id is the same, what `Context.state` held is lost.
- A killed ClientApp: its SuperNode answers with error 8 after 60 seconds without the ClientApp's heartbeat, and takes
  no other question before that.
- A killed SuperLink: with `--database` nodes, keys and runs are there when it comes back (without, by its source, it
  knows none of its nodes and they end). SuperNodes try again by themselves, with pauses of up to 20 seconds, and keep
  their ids. The run is not gone on with (its ServerApp is dead): `start_server` ends it and `submit` starts the next.
- A dead ServerApp: its run counts as running until 60 seconds after its last heartbeat (by its source).
- A SuperNode that has nothing to do looks for questions every 3 seconds, a constant of Flower: the least that an
  exchange costs. On top of that come, for every message and silo, 0.1 seconds of a core for a warm ClientApp with
  nothing to do (Flower's own imports Flower and torch first: 2 to 5) and 0.5 for the SuperLink and its being asked.
  41 MB in either direction add some 6 seconds and are 1.002 times as much on the wire.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import psutil

from scaffpd.deploy.flower.control import Control
from scaffpd.deploy.flower.layout import SERVER, Layout, part_of
from scaffpd.deploy.flower.server_app import FEDERATION
from scaffpd.deploy.processes import Processes
from scaffpd.errors import InputError

_PATIENCE = 120.0
_NEXT = 10.0
_LOOK = 1.0  # seconds between two questions to the SuperLink whether a run has ended


class FlowerEngine:
    """A federation of real processes on loopback.

    Args:
        federation: the coordinator's federation.toml.
        silos: name of a silo -> its silo.toml.
        work: an empty folder for everything that the engine writes.
        tls: certificates and authenticated nodes; plaintext without.
        warm: ClientApps are forks of a process that has loaded torch already (`scaffpd.deploy.flower.warm`); without,
            Flower's own SuperExec starts a new Python for every message.
    """

    def __init__(
        self, federation: Path, silos: Mapping[str, Path], work: Path, tls: bool = True, warm: bool = True
    ) -> None:
        self._federation = Path(federation).resolve()
        self._silos = {name: Path(path).resolve() for name, path in silos.items()}
        self._tls, self._warm = tls, warm
        self._layout = Layout(Path(work).resolve(), self._silos, tls, warm)
        self._processes = Processes()
        self._control = Control(self._layout.address, self._layout.authority)
        self._run: int | None = None
        self._going, self._looked = False, 0.0
        self._nodes: dict[str, int] = {}
        self._starts: dict[str, int] = {}

    @property
    def port(self) -> int:
        """Where the SuperLink listens, on loopback."""
        return self._layout.ports[SERVER]

    def start(self) -> None:
        """Bring everything up and wait until all silos are connected."""
        self._layout.write(self._federation)
        self.start_server()
        if self._tls:
            for name in self._silos:
                self._control.register(name, self._layout.keys / f"{part_of(name)}.pub")
        for name in self._silos:
            self.start_silo(name)
        self._wait(lambda: self.connected() == set(self._silos), "The silos do not connect to the SuperLink")

    def submit(self) -> None:
        """Start the federation's run."""
        self._run = self._control.start(self._layout.app, {FEDERATION: str(self._federation)})
        self._going, self._looked = True, time.monotonic()

    def running(self) -> bool:
        """Whether the run that was submitted last is still going."""
        if self._run is None or not self._processes.alive(SERVER):
            return False
        if time.monotonic() - self._looked > _LOOK:
            try:
                self._going = not self._control.finished(self._run)
            except httpx.HTTPError:
                return False
            self._looked = time.monotonic()
        return self._going

    def abort(self) -> None:
        """End the run; the SuperLink and the SuperNodes stay."""
        if self._run is not None and self.running():
            self._control.stop(self._run)
            self._looked = 0.0
        for process in self._processes.members(SERVER):
            with contextlib.suppress(psutil.Error):
                if "flwr-serverapp" in " ".join(process.cmdline()):
                    process.kill()

    def start_server(self) -> None:
        """Start the SuperLink and wait until it answers; SuperNodes that are up find it again by themselves.

        A run that a killed SuperLink has left behind is ended: Flower does not go on with it, `submit` does.
        """
        self._processes.kill(SERVER)
        self._start(SERVER, self._layout.superlink())
        self._wait(self._control.ready, "The SuperLink does not start")
        if self._run is not None:
            self._control.stop(self._run)
            self._run = None

    def start_silo(self, name: str) -> None:
        """Start a silo's SuperNode, under the same key as ever and with the same node id."""
        part = part_of(name)
        self._processes.kill(part)
        if self._tls and self._nodes.get(name):
            with contextlib.suppress(httpx.HTTPError):
                self._control.release(self._nodes[name], self._layout.keys / f"{part}.key")
        log = self._layout.log(part)
        self._starts[part] = log.stat().st_size if log.exists() else 0
        parent = self._start(part, self._layout.supernode(part, self._silos[name]))
        if self._warm:
            self._start(part, self._layout.executor(part, parent))

    def kill_server(self) -> None:
        """SIGKILL the SuperLink and all that it has started."""
        self._processes.kill(SERVER)

    def kill_silo(self, name: str) -> None:
        """SIGKILL a silo's SuperNode and all that belongs to it."""
        self._processes.kill(part_of(name))

    def kill_job(self, name: str) -> None:
        """SIGKILL the ClientApp that a silo is running; there is one only while it answers, so wait for the next."""
        end = time.monotonic() + _NEXT
        while not (jobs := self._jobs(name)) and time.monotonic() < end:
            time.sleep(0.02)
        for process in jobs:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def pause_silo(self, name: str) -> None:
        """SIGSTOP all of a silo: it hangs."""
        self._processes.signal(part_of(name), signal.SIGSTOP)

    def wake_silo(self, name: str) -> None:
        """SIGCONT all of a silo."""
        self._processes.signal(part_of(name), signal.SIGCONT)

    def connected(self) -> set[str]:
        """The silos whose processes are alive and whose nodes the SuperLink holds for online."""
        try:
            online = self._control.online()
        except httpx.HTTPError:
            return set()
        return {name for name in self._silos if self._processes.alive(part_of(name)) and self._node(name) in online}

    def outside(self) -> set[str]:
        """Nobody: a silo that is back is part of the run at once."""
        return set()

    def logs(self) -> dict[str, Path]:
        """Where the output of each part goes."""
        return {part: self._layout.log(part) for part in (SERVER, *map(part_of, self._silos))}

    def pids(self) -> set[int]:
        """Everything alive that belongs to us."""
        return self._processes.pids()

    def stop(self) -> None:
        """Everything down, whatever state it is in."""
        self._processes.kill()

    def _start(self, part: str, command: list[str]) -> int:
        return self._processes.start(part, command, self._layout.log(part), self._layout.environment(part))

    def _jobs(self, name: str) -> list[psutil.Process]:
        """The ClientApps of a silo: forks of the warm process, or Flower's own command."""
        jobs = []
        for process in self._processes.members(part_of(name)):
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                parent = process.parent()
                fork = parent is not None and "deploy.flower.warm" in " ".join(parent.cmdline())
                if "flwr-clientapp" in words or ("deploy.flower.warm" in words and fork):
                    jobs.append(process)
        return jobs

    def _node(self, name: str) -> int | None:
        """The node id that the silo's SuperNode has reported since it was started."""
        log = self._layout.log(part_of(name))
        text = log.read_bytes()[self._starts.get(part_of(name), 0) :] if log.exists() else b""
        found = re.search(rb"SuperNode ID: (\d+)", text)
        if found:
            self._nodes[name] = int(found[1])
        return int(found[1]) if found else None

    def _wait(self, done: Callable[[], bool], sentence: str) -> None:
        end = time.monotonic() + _PATIENCE
        while not done():
            dead = [part for part in self._processes.parts() if not self._processes.alive(part)]
            if dead:
                raise InputError(f"{sentence}: {dead[0]} has ended at once, see {self._layout.log(dead[0])}.")
            if time.monotonic() > end:
                raise InputError(f"{sentence} within {_PATIENCE:g} seconds: see the logs in {self._layout.work}.")
            time.sleep(0.2)

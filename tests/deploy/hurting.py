"""What happens to engines: their silos, job processes and servers are killed, stopped and woken."""

from __future__ import annotations

import contextlib
import signal
import time

import psutil

FORKS = "deploy.flower.fork_executor"


def kill_server(engine):
    """SIGKILL all of the server."""
    engine.processes.kill("server")


def kill_silo(engine, name):
    """SIGKILL all of a silo."""
    engine.processes.kill(_part(engine, name))


def pause_silo(engine, name):
    """SIGSTOP all of a silo: it hangs."""
    _send(engine.processes.members(_part(engine, name)), signal.SIGSTOP)


def wake_silo(engine, name):
    """SIGCONT."""
    _send(engine.processes.members(_part(engine, name)), signal.SIGCONT)


def kill_job(engine, name, seconds=10.0):
    """SIGKILL the process in which a silo answers, not the silo itself; Flower has one only while it answers."""
    end = time.monotonic() + seconds
    while not (jobs := _jobs(engine, name)) and time.monotonic() < end:
        time.sleep(0.02)
    _send(jobs, signal.SIGKILL)


def _part(engine, name):
    return f"silo-{name}" if type(engine).__name__ == "FlowerEngine" else name


def _send(processes, number):
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _jobs(engine, name):
    part = _part(engine, name)
    members = engine.processes.members(part)
    if type(engine).__name__ != "FlowerEngine":
        own = {process.pid for process in engine.processes.started.get(part, [])}
        return [process for process in members if process.pid not in own]
    return [process for process in members if _is_a_fork(process)]


def _is_a_fork(process):
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        return parent is not None and all(FORKS in " ".join(p.cmdline()) for p in (process, parent))
    return False

"""What happens to engines: their silos, job processes and servers are killed, stopped, woken and started again."""

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


def restart_server(engine):
    """Start a killed server; Flower does not continue its run, which is stopped for another to be submitted."""
    engine.start_server()
    if _is_flower(engine) and engine._run is not None:
        engine._api.stop(engine._run)
        engine._run = None


def restart_silo(engine, name):
    """Start a killed silo, in Flower under the key and the node that it had, with a new log."""
    if _is_flower(engine):
        import httpx

        log = engine.log(_part(engine, name))
        nodes = vars(engine).setdefault("nodes", {})
        nodes[name] = engine._node(name) or nodes.get(name)
        with contextlib.suppress(httpx.HTTPError):
            _release(engine, nodes[name], engine._keys / f"{_part(engine, name)}.key")
        log.rename(log.with_suffix(".earlier"))
        engine.processes.kill(_part(engine, name))
    engine.start_silo(name)


def _release(engine, node, private_key):
    """Report, as the site that holds the key, that its node has ended.

    A killed SuperNode does not report it: the SuperLink then lists it as online for up to a minute and refuses another
    one with the same key, which exits with code 305.
    """
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    key = load_ssh_private_key(private_key.read_bytes(), None)
    authority = (engine._keys / "ca.pem").read_bytes()
    signs = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(key, key.public_key()),
    ]
    address = f"127.0.0.1:{engine.port}"
    with FleetHttpClient.from_server_address(
        address, False, authority, interceptors=signs
    ) as client:
        client.DeactivateNode(DeactivateNodeRequest(node_id=node))


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
    return f"silo-{name}" if _is_flower(engine) else name


def _is_flower(engine):
    return type(engine).__name__ == "FlowerEngine"


def _send(processes, number):
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _jobs(engine, name):
    part = _part(engine, name)
    members = engine.processes.members(part)
    if not _is_flower(engine):
        own = {process.pid for process in engine.processes.started.get(part, [])}
        return [process for process in members if process.pid not in own]
    return [process for process in members if _is_a_fork(process)]


def _is_a_fork(process):
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        return parent is not None and all(FORKS in " ".join(p.cmdline()) for p in (process, parent))
    return False

"""A SuperExec that is warm: Python, Flower and torch are loaded once and every ClientApp is a fork of that.

`flower-supernode --isolation process` leaves starting ClientApp processes to a SuperExec that the operator runs.
Flower's own (`flower-superexec`) starts a new Python for every message: 2 to 5 seconds of one core. This one is
Flower's `run_superexec` with another `Executor`, which forks; messages still have a process each. Nothing but modules
is loaded beforehand: no data, no silo, no threads.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from flwr.supercore.auth import load_superexec_auth_secret
from flwr.supercore.constant import TaskType
from flwr.supercore.exit.exit_handler import registered_exit_handlers
from flwr.supercore.superexec import run_superexec as superexec
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult
from flwr.supernode.runtime.run_clientapp import run_clientapp


class ForkExecutor:
    """Flower's `Executor` protocol, by forks of this process."""

    def __init__(self) -> None:
        self._children: set[int] = set()

    def get_eligible_capacity(
        self, supported_task_types: set[TaskType], *, insecure: bool = False, root_certificates_path: str | None = None
    ) -> tuple[set[TaskType], set[str]]:
        """Only ClientApps, any number of them."""
        return supported_task_types & {TaskType.CLIENT_APP}, set()

    def wait_for_capacity(
        self,
        task_type: TaskType | None = None,
        *,
        fab_hash: str | None = None,
        insecure: bool = False,
        root_certificates_path: str | None = None,
    ) -> None:
        """There is always room."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Fork a ClientApp."""
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _be_client_app(spec)
        self._children.add(child)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Collect the children that have ended."""
        self._children = {child for child in self._children if os.waitpid(child, os.WNOHANG)[0] == 0}

    def close(self) -> None:
        """End what is still running."""
        for child in self._children:
            os.kill(child, signal.SIGKILL)
        self._children.clear()


def _be_client_app(spec: ExecutionSpec) -> None:
    """Run one ClientApp in this process, which is a fork, and end it whatever happens."""
    status = 1
    try:
        registered_exit_handlers.clear()  # the warm process's own: they would end our siblings
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        root = spec.root_certificates_path
        run_clientapp(
            runtime_api_address=spec.runtime_api_address,
            token=spec.token,
            insecure=spec.insecure,
            certificates=Path(root).read_bytes() if root else None,
            parent_pid=spec.parent_pid,
            runtime_dependency_install=False,
        )
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _load() -> None:
    """Import what a ClientApp needs; what is not there is missed when a message comes."""
    for name in ("torch", "scaffpd.deploy.flower.apps", "scaffpd.deploy.silo.silo"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve one SuperNode until it ends."""
    parser = argparse.ArgumentParser(prog="python -m scaffpd.deploy.flower.fork_executor", description=__doc__)
    parser.add_argument("--runtime-api-address", required=True, help="the SuperNode's --host and --port")
    parser.add_argument(
        "--insecure", action="store_true", help="the SuperNode's runtime API has no TLS (loopback only)"
    )
    parser.add_argument("--root-certificates", help="the CA of the SuperNode's runtime API")
    parser.add_argument("--superexec-auth-secret-file", help="the secret that the SuperNode was started with")
    parser.add_argument("--parent-pid", type=int, help="end when this process has ended")
    given = parser.parse_args(arguments)
    secret = given.superexec_auth_secret_file
    _load()
    executor = ForkExecutor()
    vars(superexec)["get_executor"] = lambda *_, **__: executor
    superexec.run_superexec(
        runtime_api_address=given.runtime_api_address,
        insecure=given.insecure,
        root_certificates_path=given.root_certificates,
        superexec_auth_secret=load_superexec_auth_secret(secret_file=secret) if secret else None,
        parent_pid=given.parent_pid,
        runtime_dependency_install=False,
    )


if __name__ == "__main__":
    main()

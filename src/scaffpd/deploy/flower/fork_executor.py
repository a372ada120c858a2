"""A SuperExec that forks: it loads Python, Flower and torch once, and forks for every ClientApp.

With `flower-supernode --isolation process` a SuperExec, which the operator runs, starts the ClientApp processes.
Flower's own (`flower-superexec`) starts a new Python for every message: 2 to 5 seconds of one core. This one is
Flower's `run_superexec` with an `Executor` that forks; every message still has its own process. Only modules are
loaded before the fork: no data, no silo, no threads.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from flwr.supercore.cli import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.exit.exit_handler import registered_exit_handlers
from flwr.supercore.superexec import run_superexec as superexec
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult
from flwr.supernode.runtime.run_clientapp import run_clientapp


class ForkExecutor:
    """Implement Flower's `Executor` protocol by forks of this process."""

    def __init__(self) -> None:
        self._children: set[int] = set()

    def get_eligible_capacity(
        self, supported: set[TaskType], **_: Any
    ) -> tuple[set[TaskType], set[str]]:
        """Accept any number of ClientApps and nothing else."""
        return supported & {TaskType.CLIENT_APP}, set()

    def wait_for_capacity(self, *_: Any, **__: Any) -> None:
        """Return at once: the capacity is unlimited."""

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
        self._children = {
            child for child in self._children if os.waitpid(child, os.WNOHANG)[0] == 0
        }

    def close(self) -> None:
        """End the children that are still running."""
        for child in self._children:
            os.kill(child, signal.SIGKILL)
        self._children.clear()


def _be_client_app(spec: ExecutionSpec) -> None:
    """Run one ClientApp in this forked process, then exit in any case."""
    status = 1
    try:
        registered_exit_handlers.clear()  # the parent's handlers would end our siblings
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


def main() -> None:
    """Serve one SuperNode until it ends; the options are those of `flower-superexec`."""
    for name in ("torch", "scaffpd.deploy.flower.apps", "scaffpd.deploy.silo.silo"):
        with contextlib.suppress(ImportError):  # the first message reports what is missing
            importlib.import_module(name)
    executor = ForkExecutor()
    vars(superexec)["get_executor"] = lambda *_, **__: executor
    flower_superexec()


if __name__ == "__main__":
    main()

"""The federation's job on a FLARE server, as an administrator sees it."""

from __future__ import annotations

from pathlib import Path

from scaffpd.deploy.flare.admin import FINISHED
from scaffpd.deploy.flare.session import Admin, LostError
from scaffpd.errors import InputError


class Deployment:
    """One job, handed in as often as need be.

    Args:
        admin: the administrator's session.
        job: the job's folder.
    """

    def __init__(self, admin: Admin, job: Path) -> None:
        self.admin, self.job = admin, job.resolve()
        self.current: str | None = None

    def adopt(self) -> bool:
        """Take over a job of the same name that the server has not finished; whether there is one."""
        going = self.admin.call("unfinished", self.job.name)
        self.current = going[-1] if going else self.current
        return bool(going)

    def submit(self) -> None:
        """Hand in the job."""
        try:
            self.current = str(self.admin.call("submit", str(self.job)))
        except LostError as problem:
            raise InputError(f"FLARE did not take the job: {problem}") from problem

    def running(self) -> bool:
        """Whether the job that was handed in last has not come to its end; so too while the server does not answer."""
        if self.current is None:
            return False
        try:
            return not str(self.admin.call("status", self.current)).startswith(FINISHED)
        except LostError:
            return True

    def abort(self) -> None:
        """Tell the job to end."""
        try:
            if self.running():
                self.admin.call("abort", str(self.current))
        except LostError:
            return

    def connected(self) -> set[str]:
        """The sites that the server takes for connected; none while it does not answer."""
        try:
            return set(self.admin.call("sites"))
        except LostError:
            return set()

    def outside(self) -> set[str]:
        """The connected sites that have no part in the running job."""
        try:
            return set(self.admin.call("outside", self.current)) if self.current else set()
        except LostError:
            return set()

"""A federation in production on FLARE, supervised by an administrator: what works round FLARE's failures.

What nvflare 2.9.0 does, with the settings of `rules` and `local` (two busy cores, three sites):

- A site's *job process* is killed: the site reports it and FLARE ends the whole job, whatever `min_clients` says,
  within about 8 seconds. The site itself stays. Cure: hand the job in again.
- A *site* is killed: the job goes on, every call to the site takes its full timeout, and FLARE lists the site as
  connected until `dead_after` has passed. When it is started again it is connected after 3 seconds, but gets no part in
  the running job. Cure: abort the job (6 to 10 seconds) and hand it in again. Who has no part is told by FLARE's
  `check_status client`.
- A *site hangs* (SIGSTOP): like a killed one. When it wakes, its job process is still there and answers again: no cure
  is needed, and the supervisor leaves the job alone.
- The *server* is killed: its job is lost. Started again with the same kit, it is found by the sites without help: after
  6 seconds in the one run with `maint_msg_timeout` at 3, after 29 in the one with FLARE's default of 30. The sites' old
  job processes were still there then; a new job ran beside them. Cure: hand the job in again.
- A job is handed in while a dead site is still listed as connected: FLARE left it out and started with the others.
- Seconds, with other work on the machine all the time (load 6 to 13 on two cores), so upper bounds: start-up with
  provisioning 8 to 24; from submission to the first call 13 to 34 with three sites (every process imports torch, about
  3 seconds of processor time each); a call of ten numbers to three sites 0.03 to 0.2; one of 5 million doubles each way
  3 to 7 (5 seconds of processor time in all); from the coordinator's end until FLARE calls the job finished 6 to 9, for
  which nobody has to wait.
- From the source, not tried: FLARE holds a finished job open for a site whose end it has not heard of, up to
  `client_outcome_wait_timeout` (900 seconds unless the server's environment has NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from scaffpd.deploy.coordinator.coordinate import Outcome, finished
from scaffpd.deploy.coordinator.federation_file import FederationFile
from scaffpd.deploy.coordinator.run_folder import RunFolder
from scaffpd.deploy.flare.deployment import Deployment
from scaffpd.deploy.flare.session import Admin
from scaffpd.deploy.supervise import Limits, Supervisor


def resume(
    kit: Path,
    job: Path,
    file: FederationFile,
    seconds: float = float("inf"),
    say: Callable[[str], object] = lambda sentence: None,
    look: Callable[[], object] = lambda: None,
) -> Outcome:
    """See a run through as the administrator to whom the startup kit belongs, on the machine with the run's folder.

    A job that is still running there is taken over; otherwise it is handed in.
    """
    folder = RunFolder(file.folder)
    if (done := finished(file, folder)) is not None:
        say("This run had ended before: nothing was trained.")
        return done
    limits = Limits(quorum=file.policy.quorum, waiting=file.policy.start_timeout, seconds=seconds)
    admin = Admin(kit, folder.path / "admin.log")
    try:
        deployment = Deployment(admin, job.resolve())
        if deployment.adopt():
            say("The job is running already.")
        Supervisor(deployment, folder, limits, say, look).run()
    finally:
        admin.close()
    return Outcome.of(folder)

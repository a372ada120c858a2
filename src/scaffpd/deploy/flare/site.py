"""Run FLARE's site with nothing that a run does not need; a module to start, in place of FLARE's.

A server may be anybody's who has the coordinator's keys. FLARE asks a site's rights only where the
server's message says so, and has shell commands that read files; it allows any code to a user with
the role "super", whom the owner of the root can make. So a site hears the few requests of a run,
and takes one job: ours, to the letter.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from nvflare.apis.app_validation import AppValidator

from scaffpd.deploy.flare.workspace import SITE_CLASSES

FLARE = "nvflare.private.fed.app.client.client_train"
REQUESTS = (
    "CheckResourceProcessor",
    "CancelResourceProcessor",
    "DeployProcessor",
    "StartJobProcessor",
    "AbortAppProcessor",
    "NotifyJobStatusProcessor",
)
CONFIG = "config/config_fed_client.json"
SIGNED = (".__nvfl_sig.json", ".__nvfl_submitter.crt")
FILES = {"config", CONFIG, "config/config_fed_server.json", *SIGNED}
FILES |= {f"config/{name}" for name in SIGNED}
LARGEST = 2**16  # bytes of a job's configuration
SILO, EXECUTOR = SITE_CLASSES
# What FLARE's recipe makes of our classes (`provision.write_job`).
JOB = {
    "format_version": 2,
    "executors": [
        {
            "tasks": ["*"],
            "executor": {
                "path": EXECUTOR,
                "args": {
                    "client_obj_id": "_client",
                    "collab_obj_ids": [],
                    "props": {},
                    "max_inbound_call_threads": 100,
                    "max_outbound_call_threads": 100,
                },
            },
        }
    ],
    "components": [{"id": "_client", "path": SILO, "args": {}}],
    "task_data_filters": [],
    "task_result_filters": [],
    "task_check_interval": 0.5,
    "get_task_timeout": 10.0,
}


class OnlyOurJob(AppValidator):  # type: ignore[misc]
    """Refuse every job but ours; FLARE asks before it starts one."""

    def validate(self, app_folder: str) -> tuple[str, dict[str, object]]:
        """Return why FLARE must not run what the server has sent; empty if it may."""
        folder = Path(app_folder)
        found = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
        if more := sorted(found - FILES):
            return f"This silo takes no code and no files: {more[0]!r} is no part of its job.", {}
        try:
            with (folder / CONFIG).open("rb") as stream:
                job = json.loads(stream.read(LARGEST))
        except (OSError, ValueError, RecursionError):
            job = None
        if job != JOB:
            return "This silo runs the job of its own package, and the server's is another.", {}
        return "", {}


def main() -> None:
    """Run FLARE's site, which hears the requests of a run and no others."""
    from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

    heard = ClientRequestProcessors.request_processors
    heard[:] = [one for one in heard if type(one).__name__ in REQUESTS]
    runpy.run_module(FLARE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

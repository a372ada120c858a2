"""A builder for FLARE's provisioner: what a server and a site are allowed to run, written into their startup kits.

FLARE's default lets a project's administrator bring any code to every site and streams the sites' error logs to the
server. Here a site runs two installed classes and nothing else, and sends no logs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nvflare.lighter.spec import Builder

from scaffpd.deploy.flare.job import SERVER_CLASSES, SITE_CLASSES

EVERYDAY = ("submit_job", "clone_job", "manage_job", "download_job", "view", "operate")
# What a site or the server grants to the roles of FLARE's users: no code from outside, no shell commands.
RIGHTS = {
    "format_version": "1.0",
    "permissions": {
        "project_admin": dict.fromkeys(EVERYDAY, "any") | {"shell_commands": "none", "byoc": "none"},
        "org_admin": {"view": "any", "operate": "o:site", "manage_job": "o:submitter"},
        "lead": {"submit_job": "any", "manage_job": "n:submitter", "view": "any"},
        "member": {"view": "any"},
    },
}


class SiteRules(Builder):  # type: ignore[misc]
    """Name it in project.yml after FLARE's own StaticFileBuilder.

    Args:
        dead_after: seconds without a heartbeat after which the server takes a site for dead.
        schedule_every: least seconds between two attempts to start a job.
        patience: seconds that a site waits for the server's reply to a heartbeat.
        store: absolute path of a folder on the server for submitted jobs; FLARE's own choice if empty.
    """

    def __init__(
        self, dead_after: float = 60.0, schedule_every: float = 1.0, store: str = "", patience: float = 10.0
    ) -> None:
        self.patience = patience
        self.store = store
        self.dead_after = dead_after
        self.schedule_every = schedule_every

    def build(self, project: Any, ctx: Any) -> None:
        """Write `local/resources.json` and `local/authorization.json` for the server and every site."""
        server = project.get_server()
        self._write(Path(ctx.get_local_dir(server)), self._server)
        for site in project.get_clients():
            self._write(Path(ctx.get_local_dir(site)), self._site)

    def _write(self, local: Path, change: Any) -> None:
        resources = json.loads((local / "resources.json.default").read_text())
        change(resources)
        (local / "resources.json").write_text(json.dumps(resources, indent=2))
        (local / "authorization.json").write_text(json.dumps(RIGHTS, indent=2))
        log = json.loads((local / "log_config.json.default").read_text())
        log["loggers"]["root"]["handlers"] = ["logFileHandler"]
        (local / "log_config.json").write_text(json.dumps(log, indent=2))

    def _server(self, resources: dict[str, Any]) -> None:
        resources["class_allow_list"] = list(SERVER_CLASSES)
        resources["servers"][0] |= {"heart_beat_timeout": self.dead_after, "check_engine_frequency": 0.5}
        parts = {part["id"]: part for part in resources["components"]}
        if self.store:
            resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = f"{self.store}/snapshots"
            parts["job_manager"]["args"]["uri_root"] = f"{self.store}/jobs"
        parts["job_scheduler"]["args"] |= {
            "max_jobs": 1,
            "max_schedule_count": 1000,
            "min_schedule_interval": self.schedule_every,
            "max_schedule_interval": 10 * self.schedule_every,
        }
        resources["components"] = [part for name, part in parts.items() if name != "log_receiver"]

    def _site(self, resources: dict[str, Any]) -> None:
        resources["class_allow_list"] = list(SITE_CLASSES)
        resources["allow_log_streaming"] = False
        # A heartbeat that a dead server never answers holds up the next one, and with it the way back.
        resources["client"] |= {"maint_msg_timeout": self.patience}
        resources["components"] = [part for part in resources["components"] if part["id"] != "site_log_streamer"]

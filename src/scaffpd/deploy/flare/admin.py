"""An administrator's session with FLARE in a process of its own, spoken to in lines of JSON.

FLARE's session starts threads that it never ends, writes to the console and cannot be used again once the server was
away. In its own process none of that reaches the caller: it is killed and started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

FINISHED = "FINISHED"


def serve(kit: Path) -> None:
    """Answer requests from standard input on standard output until it is closed."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever FLARE prints goes to the log
    session: Any = None
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            session = session or connect(kit)
            reply = {"value": COMMANDS[command](session, *arguments)}
        except Exception as problem:
            reply = {"error": f"{type(problem).__name__}: {problem}"}
            with contextlib.suppress(Exception):
                session.close()
            session = None
        replies.write(json.dumps(reply) + "\n")
    with contextlib.suppress(Exception):
        session.close()
    os._exit(0)  # FLARE's threads would keep the process for a while


def connect(kit: Path) -> Any:
    """A session as the user to whom the startup kit belongs."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    user = json.loads((kit / "startup" / "fed_admin.json").read_text())["admin"]["username"]
    return new_secure_session(user, str(kit), timeout=5.0, auto_login_max_tries=1)


def sites(session: Any) -> list[str]:
    """The sites that the server knows as connected."""
    return sorted(str(client.name) for client in session.get_connected_client_list())


def status(session: Any, job: str) -> str:
    """A job's status in FLARE's words."""
    return str(session.get_job_status(job))


def outside(session: Any, job: str) -> list[str]:
    """The connected sites that have no process for the job: FLARE lets nobody into a running one."""
    rows = session.get_client_job_status() or []
    inside = {row["client_name"] for row in rows if row.get("job_id") == job}
    return sorted({str(row["client_name"]) for row in rows} - inside)


def unfinished(session: Any, name: str) -> list[str]:
    """The jobs of that name that are waiting or running, oldest first."""
    jobs = session.list_jobs()
    going = [job for job in jobs if not str(job.get("status", "")).startswith(FINISHED) and job.get("job_name") == name]
    return [str(job["job_id"]) for job in sorted(going, key=lambda job: str(job.get("submit_time", "")))]


COMMANDS: dict[str, Any] = {
    "submit": lambda session, job: str(session.submit_job(job)),
    "status": status,
    "abort": lambda session, job: session.abort_job(job) and None,
    "sites": sites,
    "outside": outside,
    "unfinished": unfinished,
    "ping": lambda session: None,
}

if __name__ == "__main__":
    serve(Path(sys.argv[1]))

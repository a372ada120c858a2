"""Run FLARE's site with nothing that a run does not need; a module to start, in place of FLARE's.

A server may be anybody's who has the coordinator's keys. FLARE asks a site's rights only where the
server's message says so, and has shell commands that read files; it allows any code to a user with
the role "super", whom the owner of the root can make; and it parses what a job brings, with
includes of files and addresses. So a site hears the few requests of a run, and takes one job, the
package's own, before FLARE unpacks it.
"""

from __future__ import annotations

import io
import json
import runpy
import uuid
import zipfile
import zlib

from nvflare.private.admin_defs import Message, error_reply
from nvflare.private.defs import RequestHeader
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.client.training_cmds import DeployProcessor

from scaffpd.deploy.flare.workspace import document

FLARE = "nvflare.private.fed.app.client.client_train"
REQUESTS = (
    "CheckResourceProcessor",
    "CancelResourceProcessor",
    "StartJobProcessor",
    "AbortAppProcessor",
    "NotifyJobStatusProcessor",
)
CONFIG = "config/config_fed_client.json"
SIGNED = (".__nvfl_sig.json", ".__nvfl_submitter.crt")
FILES = {CONFIG, "config/config_fed_server.json", *SIGNED, *(f"config/{name}" for name in SIGNED)}
FOLDERS = {"config/"}
LARGEST = 2**16  # bytes of a file
# What FLARE's recipe makes of our classes (`provision.write_job`).
JOB: object = json.loads(document("job"))


class OnlyOurJob(DeployProcessor):  # type: ignore[misc]
    """Take our job from a server; refuse every other one before anything of it is unpacked."""

    def process(self, req: Message, app_ctx: object) -> Message:
        why = foreign(str(req.get_header(RequestHeader.JOB_ID)), req.body)
        return error_reply(why) if why else super().process(req, app_ctx)


def foreign(name: str, packed: bytes) -> str:
    """Return why this package does not run a packed job; empty if it is its own."""
    try:
        if str(uuid.UUID(name)) != name:  # a folder's name, too
            raise ValueError
        with zipfile.ZipFile(io.BytesIO(packed)) as files:
            names = [entry.filename for entry in files.infolist() if entry.file_size <= LARGEST]
            if len({*names}) != len(files.infolist()) or {*names} - FILES - FOLDERS:
                return "This silo takes no code and no files with a job."
            job = json.loads(files.read(CONFIG))
    except (ValueError, LookupError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return "This silo cannot read the job."
    return "" if job == JOB else "This silo runs the job of its own package, and no other."


def main() -> None:
    heard = ClientRequestProcessors.request_processors
    heard[:] = [one for one in heard if type(one).__name__ in REQUESTS]
    heard.append(OnlyOurJob())
    runpy.run_module(FLARE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

"""The job: which installed classes the server and the sites run. It carries no code and no data."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

from nvflare.collab import CollabRecipe

from scaffpd.deploy.flare.client import SiloClient
from scaffpd.deploy.flare.server import Coordinator

SERVER_CLASSES = ("scaffpd.deploy.flare.server.Coordinator", "nvflare.collab.runtime.controller.CollabController")
SITE_CLASSES = ("scaffpd.deploy.flare.client.SiloClient", "nvflare.collab.runtime.executor.CollabExecutor")


def recipe(name: str, quorum: int = 1, federation: str = "") -> CollabRecipe:
    """FLARE's recipe for the federation.

    Args:
        name: of the job.
        quorum: with fewer sites than this FLARE does not start the job.
        federation: path of federation.toml for the server, if it is not where the server expects it.
    """
    built = CollabRecipe(job_name=name, server=Coordinator(federation), client=SiloClient(), min_clients=quorum)
    built.add_server_config({"server": {"task_request_interval": 0.5}})
    built.add_client_config({"task_check_interval": 0.5, "get_task_timeout": 10.0})
    return built


def write_job(name: str, folder: Path, quorum: int = 1, federation: str = "") -> Path:
    """Write the job under `folder`; the job's own folder.

    FLARE would send along the source of our classes. It is taken out again: then the job needs no right to bring its
    own code, and every site decides by its list of allowed classes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recipe(name, quorum, federation).export(str(folder))
    job = (folder / name).resolve()
    for code in job.glob("*/custom"):
        shutil.rmtree(code)
    return job

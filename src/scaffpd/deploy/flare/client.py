"""Run at a site on FLARE: one published method, bytes in, bytes out.

The class is part of the installed package and its job carries no code: a site runs only what its
operator installed. The site alone says where the silo's file is, never the job.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from nvflare.collab import collab

from scaffpd.deploy.flare.serving import SITE_FILE
from scaffpd.deploy.messages import REFUSED, Message, encode
from scaffpd.errors import InputError

if TYPE_CHECKING:
    from scaffpd.deploy.silo import Silo

UNUSABLE = "The silo's own file or data cannot be used; the site's log says why."
log = logging.getLogger(__name__)


class SiloClient:
    """The object that FLARE runs at a site during a job; startup kits name its path."""

    def __init__(self) -> None:
        self._silo: Silo | None = None
        self._lock = threading.Lock()

    @collab.publish  # type: ignore[untyped-decorator]
    def answer(self, question: bytes) -> bytes:
        """Return the silo's reply; never raise: FLARE would send the traceback to the server."""
        try:
            with self._lock:
                if self._silo is None:
                    self._silo = open_silo(str(collab.site_name), Path(os.environ[SITE_FILE]))
                return self._silo.answer(question)
        except InputError as mistake:
            log.error("The silo does not answer: %s", mistake)
        except Exception:
            log.exception("The silo does not answer.")
        return encode(Message(REFUSED, {"sentence": UNUSABLE}))


def open_silo(site: str, file: Path) -> Silo:
    """Open the silo of a file; refuse if its name is not that of FLARE's certificate."""
    from scaffpd.deploy.silo import Silo

    silo = Silo.open(file)
    if silo.name != site:
        raise InputError(
            "silo-of-another-name",
            f"{str(file)!r} is silo {silo.name!r}, but FLARE knows this site as {site!r}: use its "
            "file.",
        )
    return silo

"""What runs at a site: a Flower `ClientApp` that hands every question to the site's `Silo`.

Flower starts a process for every message. What the silo wants to remember (agreements, vectors, secrets of open sums;
no rows) is kept in Flower's `Context.state`, which lives in the memory of the SuperNode: gone after a restart of it,
which does no harm.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from scaffpd.deploy.flower.payload import get, pack, put, unpack
from scaffpd.errors import InputError

if TYPE_CHECKING:
    from scaffpd.deploy.protocol.transport import Answering

QUESTION = "query.scaffpd"
SETTING = "silo"
VARIABLE = "SCAFFPD_SILO"
_KEPT = "scaffpd.kept"

log = logging.getLogger("scaffpd.silo")
app = ClientApp()


def silo_file(context: Context) -> Path:
    """Where this site's silo.toml is: the SuperNode's own `--node-config` or environment, never the coordinator."""
    path = context.node_config.get(SETTING) or os.environ.get(VARIABLE)
    if not path:
        raise InputError(
            f"This SuperNode does not know its silo: start it with --node-config '{SETTING}=\"/path/to/silo.toml\"' "
            f"or set {VARIABLE}."
        )
    return Path(str(path))


def open_silo(path: Path) -> Answering:
    """The silo that answers; imported here so that everything else of this module stays light."""
    from scaffpd.deploy.silo.silo import Silo

    return Silo.open(path)


@app.query("scaffpd")
def reply(message: Message, context: Context) -> Message:
    """Answer one question; what goes wrong is said in the site's log, for Flower would send it to the coordinator."""
    try:
        silo = open_silo(silo_file(context))
        before = get(context.state, _KEPT)
        if before is not None:
            silo.restore(before)
        answer = silo.answer(unpack(message.content))
        put(context.state, _KEPT, silo.kept())
    except Exception:
        log.exception("the silo cannot answer")
        raise InputError("This site's silo cannot answer; its log says why.") from None
    return Message(pack(answer), reply_to=message)

"""Flower's apps: a `ClientApp` at every site, a `ServerApp` at the coordinator, and bytes in Flower's records.

Flower starts a process for every message. A silo's state (agreements, vectors, secrets of open sums; no rows) is in
Flower's `Context.state`, in the memory of the SuperNode; a restart loses it without harm.

Flower sends every record of a message as a separate object, with a call for each at every hop. So a small payload is
one `ConfigRecord`: three objects a message. A large one is the buffer of an `Array`, which Flower cuts into pieces of
5 MB: its size is not limited, and equal pieces for several sites (a broadcast x) go to the SuperLink once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from scaffpd.errors import InputError

if TYPE_CHECKING:
    from scaffpd.deploy.messages import Failure
    from scaffpd.deploy.silo.silo import Silo


QUESTION = "query.scaffpd"
SETTING = "silo"
VARIABLE = "SCAFFPD_SILO"
FEDERATION = "federation"
_RECORD = "scaffpd"
_KEY = "bytes"
_KIND = "scaffpd.bytes"
_KEPT = "scaffpd.kept"
_SMALL = 2**20  # bytes of a payload that is one record
_POLL = 0.3  # seconds; a poll costs the SuperLink some 15 ms of a core
_SKEW = 60.0  # seconds that a site's clock may be ahead: it computes its deadline from the question's age
_GONE = {5: "the SuperLink has had no heartbeat from the site"}  # flwr's ErrorCode.NODE_UNAVAILABLE

log = logging.getLogger("scaffpd.silo")
client_app = ClientApp()
server_app = ServerApp()


def pack(data: bytes) -> RecordDict:
    """Return `data` as the content of a message."""
    content = RecordDict()
    put(content, _RECORD, data)
    return content


def unpack(content: RecordDict) -> bytes:
    """Return what `pack` packed; raise a `ValueError` for anything else."""
    data = get(content, _RECORD)
    if data is None:
        raise ValueError("the message does not hold one array of bytes")
    return data


def put(records: RecordDict, name: str, data: bytes) -> None:
    """Store `data` under a name."""
    if len(data) <= _SMALL:
        records[name] = ConfigRecord({_KEY: data})
    else:
        records[name] = ArrayRecord({_KEY: Array("uint8", (len(data),), _KIND, data)})


def get(records: RecordDict, name: str) -> bytes | None:
    """Return the data stored under a name, or `None`."""
    record = records.get(name)
    if not isinstance(record, (ArrayRecord, ConfigRecord)) or list(record) != [_KEY]:
        return None
    value = record[_KEY]
    if isinstance(value, Array):
        return (
            bytes(value.data)
            if value.stype == _KIND and value.shape == (len(value.data),)
            else None
        )
    return value if isinstance(value, bytes) else None


def silo_file(context: Context) -> Path:
    """Return the silo.toml named by the SuperNode's own `--node-config` or environment, never by the coordinator."""
    path = context.node_config.get(SETTING) or os.environ.get(VARIABLE)
    if not path:
        raise InputError(
            "supernode-know-silo",
            f"This SuperNode does not know its silo: start it with --node-config '{SETTING}=\"/path/to/silo.toml\"' "
            f"or set {VARIABLE}.",
        )
    return Path(str(path))


def open_silo(path: Path) -> Silo:
    """Open the silo, with a late import that keeps this module light."""
    from scaffpd.deploy.silo.silo import Silo

    return Silo.open(path)


@client_app.query("scaffpd")
def reply(message: Message, context: Context) -> Message:
    """Answer one question; write errors to the site's log, since Flower would send them to the coordinator."""
    try:
        silo = open_silo(silo_file(context))
        before = get(context.state, _KEPT)
        if before is not None:
            silo.restore(before)
        answer = silo.answer(unpack(message.content))
        put(context.state, _KEPT, silo.kept())
    except Exception:
        log.exception("the silo cannot answer")
        raise InputError(
            "site-silo-answer", "This site's silo cannot answer; its log says why."
        ) from None
    return Message(pack(answer), reply_to=message)


class GridTransport:
    """Sites over a Flower `Grid`, polled in our own loop, since `send_and_receive` polls every three seconds.

    A site's name is its node id. A reply counts only for its own message; after the timeout messages are forgotten, and
    late replies are ignored. Flower drops a question that a site has not fetched within a further minute.
    """

    def __init__(self, grid: Grid, poll: float = _POLL) -> None:
        from scaffpd.deploy.messages import Failure  # loads torch, which a site's app does not need

        self._grid = grid
        self._poll = poll
        self._failure = Failure

    def sites(self) -> tuple[str, ...]:
        """Return the nodes that the SuperLink lists as online, sorted."""
        return tuple(sorted(str(node) for node in self._grid.get_node_ids()))

    def ask(self, questions: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        """Send every site its own question and wait for all replies, `timeout` seconds at most."""
        end = time.monotonic() + timeout
        replies: dict[str, bytes | Failure] = {}
        waiting = self._send(questions, timeout, replies)
        while waiting:
            for message in self._grid.pull_messages(list(waiting)):
                site = waiting.pop(message.metadata.reply_to_message_id, None)
                if site is not None:
                    replies[site] = self._read(message)
            if time.monotonic() >= end:
                break
            if waiting:
                time.sleep(self._poll)
        late = self._failure(f"no reply within {timeout:g} seconds")
        replies.update(dict.fromkeys(waiting.values(), late))
        return {site: replies[site] for site in questions}

    def _send(
        self, questions: Mapping[str, bytes], timeout: float, replies: dict[str, bytes | Failure]
    ) -> dict[str, str]:
        """Push all questions; return {message id: site} of those that were sent."""
        online = set(self.sites())
        sites = [site for site in questions if site in online]
        replies.update(
            dict.fromkeys(set(questions) - online, self._failure("the site is not connected"))
        )
        messages = [
            Message(pack(questions[site]), int(site), QUESTION, ttl=timeout + _SKEW)
            for site in sites
        ]
        keys = list(self._grid.push_messages(messages)) if messages else []
        taken = (
            {key: site for key, site in zip(keys, sites, strict=True) if key}
            if len(keys) == len(sites)
            else {}
        )
        refused = self._failure("the SuperLink did not accept the question")
        replies.update(dict.fromkeys(set(sites) - set(taken.values()), refused))
        return taken

    def _read(self, message: Message) -> bytes | Failure:
        """Return the bytes of a reply, or a `Failure`."""
        if message.has_error():
            error = message.error
            return self._failure(
                _GONE.get(error.code, f"Flower reports error {error.code}: {error.reason}")
            )
        try:
            return unpack(message.content)
        except ValueError as error:
            return self._failure(str(error))


def federation_file(config: Mapping[str, object]) -> Path:
    """Return the federation.toml that the run config names."""
    path = config.get(FEDERATION)
    if not isinstance(path, str) or not path:
        raise InputError(
            "name-coordinator-file",
            f"Name the coordinator's file: flwr run -c '{FEDERATION}=\"/path/federation.toml\"'.",
        )
    return Path(path)


@server_app.main()
def run(grid: Grid, context: Context) -> None:
    """Run the federation that the run config names."""
    from scaffpd.deploy.coordinate import coordinate

    coordinate(federation_file(context.run_config), GridTransport(grid))

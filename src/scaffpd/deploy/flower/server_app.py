"""What runs at the coordinator: a Flower `ServerApp` with a `Transport` over Flower's `Grid`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from scaffpd.deploy.flower.client_app import QUESTION
from scaffpd.deploy.flower.payload import pack, unpack
from scaffpd.deploy.protocol.transport import Failure
from scaffpd.errors import InputError

if TYPE_CHECKING:
    from scaffpd.deploy.coordinator.coordinate import Outcome

FEDERATION = "federation"
_POLL = 0.3  # seconds; a look costs the SuperLink some 15 ms of a core
_SKEW = 60.0  # seconds that a site's clock may be ahead: it computes from the question's age until when it may reply
_GONE = {5: "the SuperLink has had no heartbeat from the site"}  # flwr's ErrorCode.NODE_UNAVAILABLE

app = ServerApp()


class GridTransport:
    """Sites over a Flower `Grid`: own loop of push and pull, since `send_and_receive` looks only every three seconds.

    A site's name is its node id. A reply counts only for the message that it replies to; when the time is up the
    messages are forgotten, so that a late reply finds nobody who asks for it. Flower drops a question that a site has
    not fetched a minute later.
    """

    def __init__(self, grid: Grid, poll: float = _POLL) -> None:
        self._grid = grid
        self._poll = poll

    def sites(self) -> tuple[str, ...]:
        """The nodes that the SuperLink holds for online, sorted."""
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
                    replies[site] = _read(message)
            if time.monotonic() >= end:
                break
            if waiting:
                time.sleep(self._poll)
        late = Failure(f"no reply within {timeout:g} seconds")
        replies.update(dict.fromkeys(waiting.values(), late))
        return {site: replies[site] for site in questions}

    def _send(
        self, questions: Mapping[str, bytes], timeout: float, replies: dict[str, bytes | Failure]
    ) -> dict[str, str]:
        """Push all questions; message id -> site for those that are on their way."""
        online = set(self.sites())
        sites = [site for site in questions if site in online]
        replies.update(
            {site: Failure("the site is not connected", gone=True) for site in questions if site not in online}
        )
        messages = [Message(pack(questions[site]), int(site), QUESTION, ttl=timeout + _SKEW) for site in sites]
        waiting: dict[str, str] = {}
        for site, key in zip(sites, self._push(messages), strict=True):
            if key:
                waiting[key] = site
            else:
                replies[site] = Failure("the SuperLink did not take the question", gone=True)
        return waiting

    def _push(self, messages: list[Message]) -> list[str]:
        """One id per message, "" for a message that was not taken."""
        keys = list(self._grid.push_messages(messages)) if messages else []
        return [key or "" for key in keys] if len(keys) == len(messages) else [""] * len(messages)


def _read(message: Message) -> bytes | Failure:
    """The bytes of a reply, or why there are none."""
    if message.has_error():
        error = message.error
        known = _GONE.get(error.code)
        return Failure(known or f"Flower reports error {error.code}: {error.reason}", gone=known is not None)
    try:
        return unpack(message.content)
    except ValueError as error:
        return Failure(str(error))


def federation_file(config: Mapping[str, object]) -> Path:
    """The federation.toml that the run config names."""
    path = config.get(FEDERATION)
    if not isinstance(path, str) or not path:
        raise InputError(
            f"The run config must name the coordinator's file: flwr run -c '{FEDERATION}=\"/path/federation.toml\"'."
        )
    return Path(path)


def run(grid: Grid, context: Context) -> Outcome:
    """Run the federation that the run config names."""
    from scaffpd.deploy.coordinator.coordinate import coordinate

    return coordinate(federation_file(context.run_config), GridTransport(grid))


@app.main()
def main(grid: Grid, context: Context) -> None:
    """What Flower calls."""
    run(grid, context)

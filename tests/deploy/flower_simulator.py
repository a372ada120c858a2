"""Flower without processes: the same ClientApp and ServerApp over a `Grid` of this process.

Every message, reply and context is written to Flower's protobuf bytes and read back, as between processes; each
message finds a silo that has just been opened, as in a fresh process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
)
from flwr.proto.message_pb2 import Context as ProtoContext
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from scaffpd.deploy.flower import apps

_RUN = 1
_FIRST = 101


class InProcessGrid(Grid):
    """Silos in this process; node ids are 101, 102, ... in the order of the names.

    Args:
        silos: name of a silo -> its silo.toml.
    """

    def __init__(self, silos: Mapping[str, Path]) -> None:
        TaskIdentity.run_id = _RUN
        TaskIdentity.node_id = SUPERLINK_NODE_ID
        TaskIdentity.task_id = 1
        self.nodes = {name: _FIRST + place for place, name in enumerate(silos)}
        self.away: set[str] = set()
        self._contexts = {
            node: Context(
                _RUN, node, {apps.SETTING: str(Path(silos[name]).resolve())}, RecordDict(), {}
            )
            for name, node in self.nodes.items()
        }
        self._waiting: dict[str, Message] = {}
        self._run = Run.create_empty(_RUN)
        self.sent = 0
        self.received = 0

    def restart(self, name: str) -> None:
        """What a silo had kept in Flower's state is lost."""
        self._contexts[self.nodes[name]].state = RecordDict()

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message, the way Flower used to make them."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """The nodes of the silos that are not away."""
        return [node for name, node in self.nodes.items() if name not in self.away]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take messages."""
        keys = []
        for message in messages:
            key = message.object_id
            message.metadata.__dict__["_message_id"] = key
            data = message_to_proto(message).SerializeToString()
            self.sent += len(data)
            self._waiting[key] = message_from_proto(ProtoMessage.FromString(data))
            keys.append(key)
        return keys

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Let the silos answer the messages that have not been answered yet."""
        return [self._reply(self._waiting.pop(key)) for key in message_ids if key in self._waiting]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push and pull."""
        return self.pull_messages(self.push_messages(messages))

    def _reply(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if node not in self.get_node_ids():
            return Message(Error(ErrorCode.NODE_UNAVAILABLE, "away"), reply_to=message)
        context = self._contexts[node]
        try:
            reply = apps.client_app(message, context)
        except Exception as error:
            return Message(
                Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<'{error}'>"),
                reply_to=message,
            )
        stored = context_to_proto(context).SerializeToString()
        self._contexts[node] = context_from_proto(ProtoContext.FromString(stored))
        data = message_to_proto(reply).SerializeToString()
        self.received += len(data)
        return message_from_proto(ProtoMessage.FromString(data))


def simulate(federation: Path, silos: Mapping[str, Path]) -> None:
    """Run a federation in this process; the run folder is what `coordinate` writes."""
    context = Context(
        _RUN,
        SUPERLINK_NODE_ID,
        {},
        RecordDict(),
        {apps.FEDERATION: str(Path(federation).resolve())},
    )
    apps.run(InProcessGrid(silos), context)

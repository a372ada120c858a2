"""Flower's control API, as the `flwr` command uses it: register sites, start and stop a run, look."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import Status
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
)
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.supercore.constant import NodeStatus
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor


class Control:
    """A SuperLink's control API; `authority` is the CA's certificate, None for plaintext."""

    def __init__(self, address: str, authority: Path | None) -> None:
        self._address = address
        self._authority = authority

    def ready(self) -> bool:
        """Whether the SuperLink answers."""
        try:
            self.online()
        except httpx.TransportError:
            return False
        return True

    def online(self) -> set[int]:
        """The nodes that the SuperLink has heard from of late."""
        with self._client() as client:
            found = client.ListNodes(ListNodesRequest())
        return {node.node_id for node in found.nodes_info if node.status == NodeStatus.ONLINE}

    def register(self, name: str, public_key: Path) -> int:
        """Admit the site that holds the private key; its node id."""
        key = load_ssh_public_key(public_key.read_bytes())
        assert isinstance(key, ec.EllipticCurvePublicKey)
        with self._client() as client:
            request = RegisterNodeRequest(public_key=public_key_to_bytes(key), name=name)
            return int(client.RegisterNode(request).node_id)

    def release(self, node: int, private_key: Path) -> None:
        """Say, as the site that holds the key, that its node has ended, so that it may be started again at once.

        A SuperNode says so itself unless it was killed; then the SuperLink holds it for online for up to a minute and
        refuses another one with the same key, which ends with exit code 305.
        """
        key = load_ssh_private_key(private_key.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
        signature = NodeAuthHttpInterceptor(key, key.public_key())
        with FleetHttpClient.from_server_address(
            self._address, self._authority is None, self._certificate(), interceptors=[version, signature]
        ) as client:
            client.DeactivateNode(DeactivateNodeRequest(node_id=node))

    def start(self, app: Path, config: dict[str, str]) -> int:
        """Submit an app; the run's id."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # flwr 1.41 uses a name that pathspec 1 has deprecated
            content = build_fab_from_disk(app)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        request = StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto(dict(config)))
        with self._client() as client:
            return int(client.StartRun(request).run_id)

    def stop(self, run: int) -> None:
        """End a run."""
        with self._client() as client:
            client.StopRun(StopRunRequest(run_id=run))

    def finished(self, run: int) -> bool:
        """Whether a run has ended, one way or another."""
        with self._client() as client:
            runs = client.ListRuns(ListRunsRequest(run_id=run)).run_dict
        return run not in runs or runs[run].status.status == Status.FINISHED

    def _client(self) -> ControlHttpClient:
        return ControlHttpClient.from_server_address(
            server_address=self._address,
            insecure=self._authority is None,
            root_certificates=self._certificate(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        )

    def _certificate(self) -> bytes | None:
        return self._authority.read_bytes() if self._authority else None

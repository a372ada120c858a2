"""`federation.toml`: everything that a coordinator has to say, in one file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from scaffpd.algorithms import ALGORITHMS, Algorithm
from scaffpd.config.errors import NAME, Section
from scaffpd.config.objects import algorithm_of
from scaffpd.deploy.membership import DROP, PAUSE, Policy
from scaffpd.deploy.messages import FORMATS, LINEAR, linear
from scaffpd.errors import InputError, unknown
from scaffpd.privacy import Private
from scaffpd.privacy.private import LOCAL_STEPS, LOSS_SHARE, ROUNDS

SILO = {"data": "a silo's silo.toml; a coordinator's federation.toml is needed"}
TABLES = ("model", "features", "algorithm", "objective", "training", "secure", "privacy", "faults", "server")
LIMITS = {"colluding": 1, "leaving": 0}  # the least of both in [secure]
OPTIONAL = ("radius", "smoothness")
PRIVACY_KEYS = ("epsilon", "delta", "clip", "loss_clip", "loss_share", *OPTIONAL)


@dataclass(frozen=True)
class Server:
    """Where silos reach the coordinator.

    Attributes:
        host: its name or address.
        port: of the engine's own protocol.
        admin_port: for administrators (FLARE).
    """

    host: str = "localhost"
    port: int = 8002
    admin_port: int = 8003


@dataclass(frozen=True)
class FederationFile:
    """A coordinator's settings.

    Attributes:
        path: the file itself.
        name: of the federation.
        silos: who belongs to it, in the order of the results.
        folder: where the run is kept: checkpoints, tables, the model.
        model: the loss and its settings, or a name under which silos know a network.
        features: whether columns are standardised, and the number format.
        algorithm: what is run.
        rounds: the most rounds.
        tol: the certified gap to stop at.
        seed: of all randomness.
        policy: what happens when silos do not answer.
        secure: how vectors are masked; empty where they are not.
        privacy: ε, δ and clips; empty where there is no noise.
        server: where silos reach it.
    """

    path: Path
    name: str
    silos: tuple[str, ...]
    folder: Path
    model: Mapping[str, Any]
    features: Mapping[str, Any]
    algorithm: Any
    rounds: int
    tol: float | None
    seed: int
    policy: Policy
    secure: Mapping[str, Any] = field(default_factory=dict)
    privacy: Mapping[str, Any] = field(default_factory=dict)
    server: Server = field(default_factory=Server)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> FederationFile:
        """Read and check a `federation.toml`."""
        top = Section.read(Path(path).absolute(), ("name", "silos", "folder", *TABLES), SILO)
        silos = top.texts("silos")
        if silos is None or not all(NAME.fullmatch(name) for name in silos):
            raise top.refusal("silos", 'the names of all silos (letters, digits, - and _), such as ["north", "south"],')
        training = top.section("training", ("rounds", "tol", "seed"))
        algorithm = algorithm_of(top)
        privacy = _privacy(top, algorithm)
        if privacy and hasattr(algorithm, "local_steps") and "local_steps" not in top.values.get("algorithm", {}):
            algorithm = replace(algorithm, local_steps=LOCAL_STEPS)
        certified = algorithm.proves and not privacy
        tol = training.number("tol", 1e-6 * certified, "a number >= 0 (0: make all rounds)", 0, float("inf"))
        if tol and not certified:
            kind = "A run with noise" if privacy else type(algorithm).__name__
            raise InputError(f"{kind} certifies nothing: leave training.tol out of {top.file.name!r}.")
        folder = top.file.parent / Path(top.text("folder", "run")).expanduser()
        secure = _secure(top, len(silos), algorithm)
        return cls(
            top.file, top.text("name", "federation"), silos, folder, _model(top), _features(top), algorithm,
            training.whole("rounds", ROUNDS if privacy else 1000, 1), tol or None, training.whole("seed", 0),
            _policy(top, len(silos), _fewest(secure, len(silos))), secure, privacy, _server(top),
        )  # fmt: skip

    def identity(self) -> dict[str, Any]:
        """What makes a run another run: everything but how long it goes and what it does about faults."""
        about: dict[str, Any] = {
            "algorithm or objective": repr(self.algorithm), "model": dict(self.model), "features": dict(self.features),
            "seed": self.seed, "list of silos": list(self.silos),
        }  # fmt: skip
        more = {"way of masking": dict(self.secure), "budget of privacy": dict(self.privacy)}
        return about | {name: part for name, part in more.items() if part}


def _model(top: Section) -> dict[str, Any]:
    given = top.values.get("model", {})
    if isinstance(given, dict) and given.get("kind", "linear") != "linear":
        section = top.section("model", ("kind",))
        return {"kind": section.text("kind")}
    section = top.section("model", ("kind", *LINEAR))
    values = {"kind": "linear", "loss": "logistic", "l2": 1e-3, "intercept": True, **section.values}
    try:
        linear(values)
    except InputError as error:
        raise InputError(f"[model] of {top.file.name!r}: {error}") from None
    return values


def _features(top: Section) -> dict[str, Any]:
    section = top.section("features", ("standardise", "numbers"))
    numbers = section.maybe("numbers")
    if numbers is not None and numbers not in FORMATS:
        raise unknown(f"features.numbers in {top.file.name!r},", numbers, FORMATS)
    return {"standardise": section.boolean("standardise", True), "numbers": numbers or ""}


def _secure(top: Section, silos: int, algorithm: Algorithm) -> dict[str, Any]:
    """What [secure] has, complete; empty where there is no such table."""
    if "secure" not in top:
        return {}
    section = top.section("secure", ("colluding", "leaving", "projections"))
    if algorithm.sees_vectors or algorithm.keeps_vectors:
        raise InputError(
            f"{type(algorithm).__name__} looks at every silo's own vectors, or keeps them: take [secure] out of "
            f"{top.file.name!r}, or use another algorithm, such as ScaffPD."
        )
    numbers = {name: section.whole(name, None, least) for name, least in LIMITS.items() if name in section}
    found = {"colluding": None, "leaving": None, **numbers, "projections": section.boolean("projections", False)}
    if (why := _unbearable(found, silos)) is not None:
        raise InputError(f"[secure] of {top.file.name!r}: {why}")
    return found


def _privacy(top: Section, algorithm: Any) -> dict[str, Any]:
    """What [privacy] has, complete; empty where there is no such table."""
    if "privacy" not in top:
        return {}
    section, most = top.section("privacy", PRIVACY_KEYS), float("inf")
    if not algorithm.asks_losses:
        able = ", ".join(name for name, kind in ALGORITHMS.items() if kind.asks_losses)
        raise InputError(
            f"[privacy] of {top.file.name!r} needs a method that asks for losses itself, for nothing else may leave "
            f"silos: {able}, not {type(algorithm).__name__}."
        )
    values = {"epsilon": section.number("epsilon", None, "the ε that a run may cost, a number > 0,", 1e-9, most)}
    values["delta"] = section.number("delta", Private.delta, "a number between 0 and 1", 1e-300, 1)
    for name, usual in (("clip", Private.clip), ("loss_clip", Private.loss_clip), ("loss_share", LOSS_SHARE)):
        values[name] = section.number(name, usual, "a number > 0", 1e-12, most)
    more = {name: section.number(name, None, "a number > 0", 1e-12, most) for name in OPTIONAL if name in section}
    return values | more


def _unbearable(secure: Mapping[str, Any], silos: int) -> str | None:
    """Why so few silos cannot make secure sums, or `None`."""
    from scaffpd.masking import Terms  # needs a package that plain sums do not

    try:
        Terms.usual("", [str(i) for i in range(silos)], secure["colluding"], secure["leaving"])
    except InputError as error:
        return str(error)
    return None


def _fewest(secure: Mapping[str, Any], silos: int) -> int:
    """How many silos there have to be at any time."""
    while secure and _unbearable(secure, silos - 1) is None:
        silos -= 1
    return silos if secure else 1


def _policy(top: Section, silos: int, fewest: int) -> Policy:
    section = top.section("faults", [item.name for item in fields(Policy)])
    usual = {"quorum": max(1, silos - 1), "missing": PAUSE if fewest > 1 else DROP}  # a silo that leaves masked sums
    policy = Policy(**{**usual, **section.values})  # shows its vector by the sums without it: they wait for it
    policy = replace(policy, quorum=max(policy.quorum, fewest))
    if policy.quorum > silos:
        raise InputError(f"{top.file.name!r} has a quorum of {policy.quorum}, but only {silos} silos.")
    return policy


def _server(top: Section) -> Server:
    section = top.section("server", ("host", "port", "admin_port"))
    ports = [section.whole(name, getattr(Server, name), 1, 65535) for name in ("port", "admin_port")]
    if ports[0] == ports[1]:
        raise InputError(f"{top.file.name!r} has the same server.port and server.admin_port: FLARE needs two.")
    return Server(section.text("host", Server.host), *ports)

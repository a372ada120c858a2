r"""`Agreement`: one document and one hash of all that silos agree on before a run.

It has the terms of federation.toml (columns, model, method, objective, rounds, tolerance, seed, ε),
the noise that follows from them, the members' keys and the version of the software. A silo decides
from it alone: nothing that comes later can ask for more, as every silo runs the method itself.

It is data: names of the package's methods, objectives and losses, and numbers in ranges. A name
that is not the package's is looked up in the silo's own file, and only after a person has agreed is
that class loaded; what depends on it is checked then.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from scaffpd import __version__
from scaffpd.data.tabular.agree import width
from scaffpd.deploy.announcing import phases
from scaffpd.deploy.messages import PROTOCOL
from scaffpd.deploy.refusals import AWAITED, refusal
from scaffpd.deploy.transcript import NEAR, close_values
from scaffpd.errors import InputError
from scaffpd.fields import Json, plain_name, validated
from scaffpd.models import Linear
from scaffpd.objectives.floored import Floored, largest_share
from scaffpd.privacy import Private
from scaffpd.privacy.counts import MOST, CountNoise, spent_on_counts
from scaffpd.secure.aggregation import colluding_of, most_weightings
from scaffpd.secure.keys import Card
from scaffpd.secure.ring import BYTES
from scaffpd.settings.federation import check
from scaffpd.settings.methods import entries
from scaffpd.settings.silo import ALWAYS, SiloFile
from scaffpd.settings.terms import FederationTerms

# Further rounds that the noise allows for, enough for three stops. A stop may cost almost three:
# the round under way, the one before where a silo lacks its state, and what a method asks first.
SPARE = 8
LONGEST = 2**16  # bytes of a document
DEEPEST = 6  # tables and lists in one another
NOISE = 12  # numbers that noise has at most
SAFE = 5  # honest silos from which on the sums of a point leave single losses open
EPSILON = 1e-9  # of a share
LARGEST = 2**26  # bytes of all posts of an exchange; a network of 10⁶ parameters at four silos
CHANGED = (
    "If rows of a single silo have changed since an earlier run, everybody can compute what the "
    "change adds to its gradient at the model's own start: the difference of two sums."
)
EACH = "Shown to all, silo by silo"
TABLES = (
    "All two-way tables of the columns become known to all, over all silos together: of every two "
    "categories how many rows have both, even if that is one row; of a category and a number, and "
    "of two numbers, the sum of products. They can be worked out from {words}."
)
RARE = (
    'Your categories of fewer than {cell} training rows are made "other" or unknown before '
    "anything is added up."
)
UNKNOWN = (
    "What leaves is decided by {names}, code of this silo's own file that is loaded once you have "
    "agreed: it may ask for all that follows."
)


@dataclass(frozen=True)
class Agreement:
    """The document of a run."""

    values: Json

    @classmethod
    def made(
        cls, terms: FederationTerms, cards: Mapping[str, Card], noise: Json | None = None
    ) -> Agreement:
        """Complete the terms of a federation; `noise` is given where it is not known yet."""
        keys = {name: cards[name].digits for name in terms.silos}
        if noise is None:
            noise = {} if terms.privacy is None else _noise(terms)
        values = {
            "version": __version__,
            "protocol": PROTOCOL,
            "terms": terms.terms(),
            "keys": keys,
            "noise": noise,
        }
        return cls(json.loads(_text(values)))

    @classmethod
    def of(cls, values: object, path: Path) -> Agreement:
        """Read a document that came from outside; `path` is the silo's own file.

        Nothing is imported. Noise that an own method determines is only checked by `settled`.
        """
        _text(values)
        if not isinstance(values, dict) or not isinstance(values.get("keys"), dict):
            raise InputError("agreement-unusable", "The agreement cannot be read.")
        if (values.get("version"), values.get("protocol")) != (__version__, PROTOCOL):
            raise InputError(
                "other-version",
                f"The agreement was made by scaffpd {str(values.get('version'))[:20]}, but this is "
                f"{__version__}: install the same version everywhere.",
            )
        found = cls(values)
        terms = found.terms(path)
        found._as_made(terms, None if terms.settled else _some_noise(terms, values.get("noise")))
        return found

    def _as_made(self, terms: FederationTerms, noise: Json | None = None) -> None:
        made = self.made(terms, self.cards, noise)
        if not close_values(made.values, self.values, NEAR):
            raise InputError("agreement-unusable", "The agreement says more than its terms.")

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).digest()

    @cached_property
    def cards(self) -> dict[str, Card]:
        names = self.values["terms"].get("silos")
        keys = self.values["keys"]
        if not isinstance(names, list) or sorted(map(str, names)) != sorted(keys):
            raise InputError("agreement-unusable", "The agreement has other keys than members.")
        return {str(name): Card.of(keys[name]) for name in names}

    def terms(self, path: Path) -> FederationTerms:
        """Return the terms, checked as far as that takes no code but the package's."""
        given = self.values.get("terms")
        if not isinstance(given, dict):
            raise InputError("agreement-unusable", "The agreement has no terms.")
        terms = validated(FederationTerms, given, path.with_name("the agreement"))
        check(terms)
        return terms

    def settled(self, file: SiloFile) -> FederationTerms:
        """Return the terms with the code that this silo's own file lists, and check what depends
        on it: an operator has agreed, and no row was read yet.
        """
        terms = self.terms(file.path)
        network = terms.model.network
        if network is not None and network not in file.models:
            raise _not_listed("model", network)
        for what, name in terms.own.items():
            if name not in entries(file)[what]:
                raise _not_listed(what, name)
        if not terms.settled:
            terms.settle(file, file.path.parent)
            check(terms)
            self._as_made(terms)
            _check_share(terms, file.limits.share)
        return terms

    def check(self, file: SiloFile, card: Card) -> None:
        terms = self.terms(file.path)
        names = list(self.cards)
        if self.cards.get(file.name) != card:
            raise InputError(
                "key-differs",
                f"The agreement has a key for silo {file.name!r} that is not its own.",
            )
        for name, own in self.cards.items():
            pin = file.members.get(name, own.fingerprint)
            if own.fingerprint != pin or (file.members and name not in (*file.members, file.name)):
                raise InputError(
                    "member-unknown",
                    f"The agreement has a key of silo {name!r} that [members] of this silo's file "
                    "does not have.",
                )
        if len({own.digits for own in self.cards.values()}) < len(names):
            raise refusal("key-twice")
        colluding_of(len(names), terms.colluding)
        if terms.batch is not None and terms.batch < file.limits.rows:
            raise InputError(
                "minibatch-too-small",
                f"The agreement asks about {terms.batch} rows at a time, and limits.rows of this "
                f"silo's file is {file.limits.rows}.",
            )
        if terms.settled:
            _check_share(terms, file.limits.share)
        if file.limits.epsilon is not None:
            if terms.privacy is None:
                raise refusal("run-without-noise")
            if terms.privacy.epsilon > file.limits.epsilon:
                raise InputError(
                    "epsilon-too-large",
                    f"The agreement may cost ε = {terms.privacy.epsilon:g}, more than the "
                    f"{file.limits.epsilon:g} that this silo's file allows.",
                )

    def with_others(self, earlier: Mapping[str, Json]) -> list[str]:
        """Say whose gradient this run shows together with one that had other members."""
        if self.values["noise"]:
            return []
        now = self.values["keys"]
        lines = []
        for digest, document in earlier.items():
            before = document["keys"]
            others = [
                f"{name!r} (with another key)" if name in before and name in now else repr(name)
                for name in {**before, **now}
                if before.get(name) != now.get(name)
            ]
            if not others or document["noise"]:
                continue
            had = "other members"
            whose = f"the gradient of silo {others[0]}"
            if len(others) > 1:
                whose = f"the gradients of {', '.join(others)}, added up,"
            why = ", the difference of two sums"
            if _weighing(document) != _weighing(self.values):
                had = "other members, and another objective"
                whose = "every single gradient, this silo's included,"
                why = ": sums with other weights can be solved for it"
            lines.append(
                f"Agreement {digest[:12]} had {had}: whoever took part in both can compute {whose} "
                f"at the model's own start{why}."
            )
        return lines

    def summary(self, file: SiloFile, earlier: Mapping[str, Json]) -> Json:
        """Return what an operator decides about, as words; `earlier` runs were with these rows."""
        terms = self.terms(file.path)
        private = terms.privacy
        method, objective = _methods(terms)
        changed = [CHANGED] if earlier.keys() - {self.digest.hex()} and private is None else []
        rare = [RARE.format(cell=file.limits.cell)] if private is None else []
        return {
            "federation": terms.name,
            "silos": {name: card.fingerprint for name, card in self.cards.items()},
            "columns": _columns(terms),
            "model": ", ".join(f"{key} = {value}" for key, value in terms.linear().items()),
            "method": method,
            "objective": objective,
            "rounds": terms.rounds,
            "noise": None if private is None else [private.epsilon, private.delta],
            "code": _code(terms, file),
            "leaves": [*leaves(terms), *rare, *self.with_others(earlier), *changed],
        }


def _weighing(document: Json) -> object:
    terms = document["terms"]
    return terms.get("objective", terms.get("algorithm"))


def _text(values: object) -> str:
    """Return a document as JSON; refuse one that is too long or nested too deeply."""
    level: list[object] = [values]
    for _ in range(DEEPEST):
        tables = (list(one.values()) if isinstance(one, dict) else one for one in level)
        level = [part for parts in tables if isinstance(parts, list) for part in parts]
    if level:
        raise InputError("agreement-unusable", "The agreement is nested too deeply.")
    try:
        text = json.dumps(values, allow_nan=False)
    except (TypeError, ValueError):
        raise InputError("agreement-unusable", "The agreement is not JSON.") from None
    if len(text) > LONGEST:
        raise refusal("agreement-too-large")
    return text


def _methods(terms: FederationTerms) -> tuple[str, str]:
    """Return method and objective in words: as settings have them until own code is loaded."""
    if terms.settled:
        objective = getattr(terms.method, "objective", None)
        return repr(terms.method), "" if objective is None else repr(objective)
    own = {"kind": terms.algorithm.kind, **terms.algorithm.given}
    return _called(own), "" if terms.objective is None else _called(terms.objective.given)


def _called(table: Json) -> str:
    settings = ", ".join(f"{name}={value!r}" for name, value in table.items() if name != "kind")
    return f"{table['kind']}({settings})"


def _columns(terms: FederationTerms) -> list[str]:
    if isinstance(terms.columns, dict):
        return list(terms.columns)
    return [f"shape {' × '.join(map(str, terms.columns))}"]


def _code(terms: FederationTerms, file: SiloFile) -> list[str]:
    """Name code that is not the package's own, and where this silo's own file has it."""
    names = dict(terms.own)
    if terms.model.network is not None:
        names["model"] = terms.model.network
    lists = {**entries(file), "model": file.models}
    return [
        f"{what} {name!r} = {lists[what][name]} of this silo's own file"
        if name in lists[what]
        else f"{what} {name!r}, which this silo's own file does not list: it cannot take part"
        for what, name in names.items()
    ]


def _not_listed(what: str, name: str) -> InputError:
    return InputError(
        "code-not-listed",
        f"The agreement names the {what} {name!r}, which is not the package's own, and [{what}s] "
        "of this silo's file does not list it.",
    )


def _some_noise(terms: FederationTerms, given: object) -> Json:
    """Return noise as it stands in a document whose method is not known yet: plain numbers."""
    if not isinstance(given, dict) or bool(given) != (terms.privacy is not None):
        raise InputError("agreement-unusable", "The agreement has noise without [privacy].")
    numbers = [own for own in given.values() if isinstance(own, int | float)]
    named = all(map(plain_name, given))
    if len(numbers) < len(given) or len(given) > NOISE or not named:
        raise InputError("agreement-unusable", "The agreement has noise that is no number.")
    return given


def _check_share(terms: FederationTerms, most: float) -> None:
    """Refuse an objective that lets one silo have more than its share of a sum.

    What depends on rows, such as weights by their numbers, is looked at with every sum.
    """
    objective = getattr(terms.method, "objective", None)
    n = len(terms.silos)
    if objective is None:
        return
    share = largest_share(objective, n, colluding_of(n, terms.colluding))
    if share > most + EPSILON:
        raise InputError(
            "share-too-large",
            f"With {objective!r} one silo may have {share:.0%} of a sum over silos that do not "
            f"collude, and this silo's file allows {most:.0%}: agree on a larger floor.",
        )


def _noise(terms: FederationTerms) -> Json:
    """Find the noise for the method and its rounds; silos stop at ε by their own accounts.

    By default rows are shortened to √d, their usual length once columns are scaled.
    """
    private = terms.privacy
    assert private is not None
    about = private.model_dump(exclude_none=True, exclude={"shared"})
    linear = terms.model.network is None
    if not linear and "smoothness" not in about:
        raise InputError(
            "network-without-smoothness",
            "[privacy] with a network needs a public smoothness: a loss's curvature depends on the "
            "data.",
        )
    if linear and not {"radius", "smoothness"} & set(about):
        columns = width(terms.encoding())
        steps = MOST / 2 * terms.numbers * terms.curved  # about half of a row's are ones
        about["radius"] = math.sqrt(columns + steps + 1)  # and the intercept
    budget = about["epsilon"], about["delta"]
    before = spent_on_counts(*budget) if terms.curved else 0.0
    rounds = terms.rounds + min(SPARE, terms.rounds)
    solved = Private.solved(Linear(), budget[0], terms.method, rounds, budget[1], before=before)
    made = {**about, "noise": solved.noise, "loss_noise": solved.loss_noise}
    if terms.curved:
        made["counts"] = CountNoise.of(*budget, terms.numbers, len(terms.silos)).z
    if private.shared:
        made["colluding"] = colluding_of(len(terms.silos), terms.colluding)
    return made


def leaves(terms: FederationTerms) -> list[str]:
    """List what leaves a silo, from the questions of all steps, and who learns what."""
    n = len(terms.silos)
    t = colluding_of(n, terms.colluding)
    private = terms.privacy
    noisy = "" if private is None else ", with noise"
    found = phases(terms)
    losses = any(one.part == "loss" for phase in found[:-1] for one in phase.shown)
    shown = "yes" if losses else "no, but for the scores at the end" if private is None else "no"
    lines = [f"Losses in the clear: {shown}."]
    if not terms.settled:
        names = " and ".join(f"the {what} {name!r}" for what, name in terms.own.items())
        lines.insert(0, UNKNOWN.format(names=names))
    for when, parts in found:
        for one_by_one, who in (
            (False, f"Summed over all silos{noisy}"),
            (True, EACH),
        ):
            words = dict.fromkeys(one.words for one in parts if one.each == one_by_one)
            lines += [f"{who}, {when}: {'; '.join(words)}."] if words else []
    tables = dict.fromkeys(one.words for phase in found for one in phase.shown if one.tables)
    lines += [TABLES.format(words="; ".join(tables))] if tables else []
    lines.append(
        f"Sums are made at one point with at most {most_weightings(n, t)} weightings, "
        f"points within {terms.distance:g} of each other being one, in "
        f"{terms.rounds} rounds at most. Each of the other {n - 1} learns the sum over {n - 1} "
        f"silos, all but its own{f'; {t} of them together that over {n - t}' if t > 1 else ''}."
    )
    lines.append(
        f"Everybody gets all masked vectors and adds them up: a model for which they are above "
        f"{LARGEST:,} bytes is refused."
    )
    objective = getattr(terms.method, "objective", None) if terms.settled else None
    if isinstance(objective, Floored):
        lines.append(
            f"Every silo keeps {objective.floor:.2%} of its part of the average, whatever others "
            f"claim: the model serves {1 - objective.floor:.2%} of the objective and "
            f"{objective.floor:.2%} of the average, and its certificate is about both together, if "
            "all silos keep to the protocol."
        )
    if private is not None:
        lines.append(
            f"All that has noise costs at most ε = {private.epsilon:g} at δ = {private.delta:g}, "
            "over the whole run."
        )
    if n - t < SAFE:
        lines.append(
            f"With {n - t} silos that do not collude, the sums of one point tell single losses and "
            "gradients, or nearly; with five or more they do not."
        )
    if private is None:
        lines.append(
            "Over a whole run there are more sums than your loss has unknown numbers, if the model "
            "is small: whoever stores them all may work out losses and gradients. One silo that "
            "breaks the protocol can do so from two sums. Only [privacy] rules that out."
        )
    return lines


def check_size(numbers: int, members: int) -> None:
    size = BYTES * numbers * members
    if size > LARGEST:
        raise InputError(
            "model-too-large",
            f"An exchange of {numbers:,} numbers with {members} silos takes {size:,} bytes to "
            f"every silo, more than {LARGEST:,}: use a smaller model. Nobody takes a sum "
            "on trust.",
        )


def allowed(file: SiloFile, granted: bool | None, others: bool) -> None:
    """Refuse an agreement that a person has to agree to, or has revoked.

    With `others`, members of an earlier run were others, and "always" does not cover it.
    """
    if granted is False:
        raise refusal("agreement-revoked")
    if granted is None and (others or file.agree != ALWAYS):
        raise refusal(AWAITED)

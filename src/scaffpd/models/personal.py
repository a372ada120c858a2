r"""`Personal`: clients that share a model x and each have a personal model near it.

    F_i(x) = min_u ℓ_i(u) + ½ Σ_k γ_ik (u_k − x_k)² + ½ Σ_k l2_k x_k²,    γ_ik = κ_k/n_i

takes the place of f_i(x) = ℓ_i(x) + ½ Σ_k l2_k x_k², with ℓ_i the mean loss of client i's rows.
Everything else is unchanged: objectives, methods, runtimes and the certificate. The regulariser is
on x, outside the minimum, so that a client's own model is pulled to x alone: with κ and l2 in these
units x and u_i are the mode of u_i ~ N(x, τ²), x ~ N(0, ω²) (docs/personal.md). Where ℓ_i is
L-smooth and b-strongly convex, L_F = Lγ/(L + γ) + l2 and μ_F = bγ/(b + γ) + l2.

u_i stays with its client; a server that sees single gradients could form it,
u_i = x − (c_i − l2 ∘ x)/γ_i, and one that sees masked sums cannot. Linear models are solved for by
Newton's method (`newton.py`), networks by a few gradient steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from scaffpd.errors import InputError, unknown
from scaffpd.models.arrays import read_features, read_labels
from scaffpd.models.cox import CoxOracle
from scaffpd.models.envelopes import Envelopes, HeldOutModels, PersonalModuleOracle, PersonalOracle
from scaffpd.models.glm import LinearOracle
from scaffpd.models.linear import AUTO, Linear, each_of, fitted, numbers
from scaffpd.models.module import Module
from scaffpd.models.network_oracle import ModuleOracle
from scaffpd.models.newton import Anchor
from scaffpd.models.oracle import ClientData, Oracle
from scaffpd.models.point import Ridge


@dataclass(frozen=True)
class Personal:
    r"""Personal models u_i = argmin_u ℓ_i(u) + (γ_i/2)‖u − x‖² around a shared x, γ_i = κ/n_i.

    Give it to a `Cohort` in the place of the model; `train` finds x for your objective and bounds
    its suboptimality, for x and all u_i together. `Result.personal[i]` is client i's model,
    `Cohort.personal(x)` all of them by name, and `evaluate` scores each client's own. strength → ∞
    is one model for all, strength → 0 everyone alone; a client with few rows relies on the others,
    one with many hardly does. The model's l2 is on x, and shrinks no u_i.

    With differential privacy, train x with `Private(model)` and let every client call
    `personalise(x, X, y, model)` afterwards: a model that stays at the client costs no ε.

    Args:
        model: `Linear(...)`, or `Module(...)`, trained by at most 30 gradient steps per client and
            without a certificate.
        strength: κ in γ_i = κ/n_i, with n_i rows at client i; or one number for each feature of a
            linear model and a last one for the intercept. ∞ is a shared coefficient. "auto": by
            evidence, when a cohort is made (`Cohort.strengths`).
        columns: the features with personal coefficients, by name (of data frames) or number, and
            "intercept"; of a network the layers, by name ("fc" is a personal head). All of them if
            not given. The others are shared.
    """

    model: Linear | Module
    strength: float | Sequence[float] | str = AUTO
    columns: str | int | Sequence[str | int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, Linear | Module):
            raise InputError(
                "personal-of-other-model",
                f"Personal needs Linear(...) or Module(...), got {self.model!r}: with privacy, "
                "train x with Private(model), and then personalise(x, X, y, Personal(model, ...)), "
                "which costs no ε.",
            )
        # a tuple, so that models compare, hash and print by their numbers
        object.__setattr__(self, "strength", numbers("Personal", "strength", self.strength))
        if not all(kappa > 0 for kappa in each_of(self.strength)):
            raise InputError(
                "strength-not-positive", f"Personal needs strength > 0, got {self.strength!r}."
            )
        if isinstance(self.model, Module) and isinstance(self.strength, tuple | str):
            raise InputError(
                "strength-not-one-number",
                "A personal network needs one number as its strength; name its personal layers by "
                "columns=.",
            )
        if self.columns is not None and not self._columns:
            raise InputError("no-personal-column", "Personal needs at least one column.")

    @property
    def _columns(self) -> list[str | int]:
        columns = self.columns
        if columns is None:
            return []
        return [columns] if isinstance(columns, str | int) else list(columns)

    def oracle(self, data: ClientData, like: Oracle | None = None) -> Oracle:
        """Bind to the clients' data; models of the training rows score held-out rows."""
        rows_alone = replace(self.model, l2=0.0)  # the regulariser is on x
        if isinstance(like, Envelopes):
            return cast(Oracle, HeldOutModels(rows_alone.oracle(data, like.inner), like))
        data = replace(data, features=[np.asarray(x) for x in data.features])
        inner = rows_alone.oracle(data, like)
        own: Tensor | None = None
        if self.columns is not None and isinstance(inner, ModuleOracle):
            own = self._layers(inner).to(data.device)
        elif self.columns is not None or getattr(self.model, "ordered", False):
            width = cast(LinearOracle, inner).rows.A.shape[1]
            own = torch.from_numpy(self.marked(data.columns, width)).to(data.device)
        return self._bound(cast("LinearOracle | CoxOracle | ModuleOracle", inner), own)

    def _bound(
        self, inner: LinearOracle | CoxOracle | ModuleOracle, own: Tensor | None
    ) -> PersonalModuleOracle | PersonalOracle:
        if isinstance(inner, ModuleOracle):
            gamma = cast(float, self.strength) / torch.tensor(inner.rows.sizes).to(inner.start())
            return PersonalModuleOracle(inner, Ridge(cast(float, self.model.l2)), gamma, own)
        assert isinstance(self.model, Linear)
        width = inner.rows.A.shape[1]
        device = inner.rows.A.device
        strength = 1.0 if isinstance(self.strength, str) else self.strength  # until it is settled
        each = fitted("Personal", "strength", strength, width, self.model.intercept)
        kappa = torch.tensor(each, dtype=torch.float64, device=device)
        if own is not None:
            kappa = torch.where(own, kappa, torch.inf)
        ridge = self.model.ridge(width, inner.outputs, device)
        return PersonalOracle(inner, ridge, Anchor(kappa / inner.rows.layout.sizes[:, None]), own)

    def using(
        self,
        l2: float | Sequence[float] | None = None,
        strength: float | Sequence[float] | None = None,
    ) -> Personal:
        model = self.model if l2 is None else replace(self.model, l2=cast(float, l2))
        return replace(self, model=model, strength=self.strength if strength is None else strength)

    def rebound(self, oracle: Oracle, like: Oracle | None = None) -> Oracle:
        bound: object = oracle
        if isinstance(bound, HeldOutModels):
            return cast(Oracle, HeldOutModels(bound.inner, cast(Envelopes, like)))
        assert isinstance(bound, Envelopes)
        return self._bound(bound.inner, bound.marked)

    def _layers(self, inner: ModuleOracle) -> Tensor:
        names = list(inner.function.parameters)
        own = torch.zeros(len(names), dtype=torch.bool)
        for layer in self._columns:
            inside = [name == layer or name.startswith(f"{layer}.") for name in names]
            if not any(inside):
                known = dict.fromkeys(name.rpartition(".")[0] or name for name in names)
                raise unknown("layer", str(layer), known)
            own |= torch.tensor(inside)
        return own.repeat_interleave(torch.tensor(inner.function.sizes))

    def marked(self, columns: Sequence[str] | None, width: int) -> NDArray[np.bool_]:
        """Mark the personal ones of `width` features, the intercept last."""
        intercept = cast(Linear, self.model).intercept
        features = width - intercept
        names = list(columns or [])
        own = np.full(width, self.columns is None)
        if cast(Linear, self.model).ordered:  # clients share the distances of cut points
            features = width - len(cast(Linear, self.model).beyond)
            own[features:-1] = False
        for column in self._columns:
            whole = isinstance(column, int | np.integer) and not isinstance(column, bool)
            if column in names:
                own[names.index(str(column))] = True
            elif column == "intercept" and intercept:
                own[-1] = True
            elif whole and 0 <= int(column) < features:
                own[int(column)] = True
            else:
                known = [*(names or [f"0 to {features - 1}"]), *["intercept"][: int(intercept)]]
                raise unknown("column", column, known)
        return own


def base_of(model: Any) -> Any:
    """Return the model that is, or could be, personal."""
    return model.model if isinstance(model, Personal) else model


def regulariser(model: object, x: NDArray[np.float64]) -> float:
    """Return the regulariser at x that `evaluate` includes: none if the model is `Personal`."""
    if isinstance(model, Personal):
        return 0.0
    l2 = np.asarray(each_of(base_of(getattr(model, "model", model)).l2), dtype=np.float64)
    return float(l2 @ np.square(x).reshape(len(l2), -1).sum(1)) / 2


def personalise(
    x: ArrayLike | Tensor, X: ArrayLike, y: ArrayLike, model: Personal
) -> NDArray[np.float64]:
    """Compute a client's own model from x and its rows alone: argmin_u ℓ(u) + (κ/2n)‖u − x‖².

    Nothing leaves the client, so it costs no ε if x was trained privately. Without rows it is x.

    Args:
        x: the shared model, such as `Result.x`.
        X: the client's features.
        y: its labels.
        model: the `Personal(...)` that x was trained with.
    """
    if not isinstance(model, Personal):
        raise InputError(
            "not-personal",
            f"personalise needs the Personal(...) that x was trained with, got {model!r}.",
        )
    if model.strength == AUTO:
        raise InputError(
            "strength-not-settled",
            "personalise needs the strengths that x was trained with: give it the cohort's model.",
        )
    shared = torch.as_tensor(np.asarray(x))
    features = read_features("client", X) if np.shape(X)[0] else None
    if features is None:
        return np.array(x)
    columns = [str(column) for column in X.columns] if hasattr(X, "columns") else None
    labels = read_labels("client", y, len(features))
    data = ClientData([features], [labels], ["client"], torch.device("cpu"), shared.dtype, columns)
    oracle = model.oracle(data, cast(Oracle, SharedModel(len(shared))))
    if shared.shape != (oracle.dimension,):
        raise InputError(
            "point-length",
            f"x has shape {tuple(shared.shape)}, but the model has {oracle.dimension} parameters.",
        )
    return np.asarray(cast(Envelopes, oracle).own(shared)[0])


@dataclass(frozen=True)
class SharedModel:
    """The shared model as a single client sees it: its length says how many classes there are."""

    dimension: int

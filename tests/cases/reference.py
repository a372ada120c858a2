r"""A slow, dense and independent solver of the minimax problem, the reference for all fast methods.

It finds the saddle point of  Σ λ_i f_i(x) − ψ(λ)  over x ∈ R^d and λ ∈ Λ by second-order steps on
all the data at once, in NumPy float64, and shares no code with the clients' models. With g = Σ λ_i
∇f_i(x), G the N×d matrix of client gradients and P = ∂prox_σ/∂s:

1. proximal point in λ (Rockafellar, 1976): each step minimises the smooth function
   max_l ⟨f(x), l⟩ − ψ(l) − ‖l − λ‖²/(2σ) of x by a semismooth Newton method, with σ growing;
2. Newton on the optimality conditions  g = 0  and  λ = prox_σ(f(x), λ), which for polyhedral Λ is
   an active-set method and which reaches rounding level.

Both solve the same linear system, of size N once x is eliminated.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve

try:
    from threadpoolctl import threadpool_limits
except ImportError:  # then the environment limits threads, or nothing does
    threadpool_limits = None


_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Reference:
    """Solution of min_x max_{λ∈Λ} Σ λ_i f_i(x) − ψ(λ).

    Attributes:
        x: the minimiser, flat; a (d, k) matrix of coefficients is stored row by row.
        weights: λ*, a maximiser (not always the only one).
        value: max_{λ∈Λ} ⟨f(x), λ⟩ − ψ(λ).
        gap: a proven bound on `value` minus the optimum, at least its rounding error.
    """

    x: np.ndarray
    weights: np.ndarray
    value: float
    gap: float


def reference_optimum(
    clients,
    loss,
    l2,
    objective,
    intercept=False,
):
    """Solve the minimax problem to about 1e-14 of its value.

    Args:
        clients: (X, y) for each client.
        loss: "squared", (1/m)‖Ax − y‖² where y may have k columns; "logistic", the mean negative
            log-likelihood of labels 0 and 1; or "softmax", that of labels 0 … k−1.
        l2: μ > 0 in the term (μ/2)‖x‖² of every f_i.
        objective: (Λ, ψ).
        intercept: append a column of ones as the last feature (regularised as all others).
    """
    # one BLAS thread: on small matrices and busy cores, more are a hundred times slower
    with threadpool_limits(1, user_api="blas") if threadpool_limits else nullcontext():
        return solve(ReferenceProblem(clients, loss, l2, intercept), objective)


def solve(problem, objective):
    """Take proximal steps with growing σ, each followed by an attempt to finish with Newton's
    method.
    """
    point = _start(problem, objective)
    if not point.G.any():  # zero is optimal for all clients
        return Reference(point.x, point.weights, point.support, _EPS * abs(point.support))
    best = point
    sigma = 1.0
    for _ in range(40):
        point = _proximal_step(point, sigma)
        best = min(best, point, _polish(point), key=lambda candidate: candidate.residual)
        if best.residual <= 1e-13:
            break
        sigma = min(10 * sigma, 1e8)
    return Reference(best.x, best.weights, best.support, best.gap)


# --- the clients' losses


def _squared(Z, Y):
    """Return per row ‖z − y‖², its slope 2(z − y) and its curvature 2I."""
    difference = Z - Y
    curvature = np.broadcast_to(2 * np.eye(Z.shape[1]), (*Z.shape, Z.shape[1]))
    return np.sum(difference**2, axis=1), 2 * difference, curvature


def _logistic(Z, Y):
    """Return log(1 + e^{−sz}) per row, s = 2y − 1, its slope −s·p and curvature p(1 − p), p = 1/(1
    + e^{sz}).
    """
    sign = 2 * Y - 1
    value = np.logaddexp(0.0, -sign * Z)
    wrong = np.exp(-np.logaddexp(0.0, sign * Z))
    right = np.exp(-value)
    return value[:, 0], -sign * wrong, (wrong * right)[:, :, None]


def _softmax(Z, Y):
    """Return per row log Σ e^{z_k} − z_y, its slope p − e_y and its curvature diag(p) − ppᵀ; Y is
    one-hot.
    """
    shifted = Z - np.sum(Z * Y, axis=1, keepdims=True)
    value = np.logaddexp.reduce(shifted, axis=1)
    p = np.exp(shifted - value[:, None])
    return value, p - Y, p[:, :, None] * (np.eye(Z.shape[1]) - p[:, None, :])


_LINKS = {"squared": _squared, "logistic": _logistic, "softmax": _softmax}


class ReferenceProblem:
    """Losses f_i(x) = (1/m_i) Σ_j link(Wᵀa_ij, y_ij) + (μ/2)‖x‖² with x = W row by row, W of shape
    (d, k).
    """

    def __init__(self, clients, loss, l2, intercept):
        self.link = _LINKS[loss]
        self.l2 = l2
        X = [np.asarray(X, dtype=np.float64) for X, _ in clients]
        if intercept:
            X = [np.column_stack([A, np.ones(len(A))]) for A in X]
        Y = _targets([np.asarray(y) for _, y in clients], loss)
        self.counts = np.array([len(rows) for rows in X])
        ends = np.cumsum(self.counts)
        self.parts = [slice(end - count, end) for end, count in zip(ends, self.counts, strict=True)]
        self.A, self.Y = np.vstack(X), np.vstack(Y)
        self.shape = (self.A.shape[1], self.Y.shape[1])
        self.dimension = self.shape[0] * self.shape[1]
        # gradients at zero: the scale of rounding errors if all gradients vanish together
        self.sizes = np.linalg.norm(self.gradients(np.zeros(self.dimension)), axis=1)

    def losses(self, x):
        value, _, _ = self.link(self.A @ x.reshape(self.shape), self.Y)
        return np.array([value[part].mean() for part in self.parts]) + self.l2 / 2 * (x @ x)

    def gradients(self, x):
        _, slope, _ = self.link(self.A @ x.reshape(self.shape), self.Y)
        rows = [(self.A[part].T @ slope[part]).ravel() for part in self.parts]
        mean = np.array(rows) / self.counts[:, None]
        return mean + self.l2 * x

    def hessian(self, x, weights):
        (d, k), share = self.shape, np.repeat(weights / self.counts, self.counts)
        _, _, curvature = self.link(self.A @ x.reshape(self.shape), self.Y)
        total = np.zeros((d, k, d, k))
        for a in range(k):
            for b in range(a + 1):
                if np.any(curvature[:, a, b]):
                    total[:, a, :, b] = (self.A.T * (share * curvature[:, a, b])) @ self.A
                    total[:, b, :, a] = total[:, a, :, b]
        dense = total.reshape(self.dimension, self.dimension)
        dense[np.diag_indices(self.dimension)] += self.l2 * weights.sum()
        return dense


def _targets(targets, loss):
    """Return targets as (m_i, k) matrices: unchanged, 0/1, or one-hot."""
    if loss != "softmax":
        return [y.reshape(len(y), -1).astype(np.float64) for y in targets]
    highest = max(int(y.max()) for y in targets)
    return [np.eye(highest + 1)[y.astype(np.int64)] for y in targets]


# --- the two kinds of Newton step


class _Point:
    """Pair (x, λ) with its cached quantities."""

    def __init__(self, problem, objective, x, weights):
        self.problem = problem
        self.objective = objective
        self.x = x
        self.weights = weights
        self.losses, self.G = problem.losses(x), problem.gradients(x)
        self.gradient = weights @ self.G
        # σ in these units weighs losses against weights evenly, in any units of either
        self.unit = float(weights.sum() / (np.abs(self.losses).max() or 1.0))
        self.support = objective.support(self.losses)
        self.scale = float(weights @ np.abs(self.losses) + abs(objective.value(weights)))

    @property
    def residual(self):
        """Residual of g = 0 and λ = prox_σ(f(x), λ), relative to the size of the terms."""
        dual = np.abs(
            self.weights - self.objective.prox(self.losses, self.weights, self.unit)
        ).max()
        primal = np.linalg.norm(self.gradient)
        return float(max(dual / self.weights.max(), primal / (self.weights @ self.problem.sizes)))

    @property
    def gap(self):
        """Return support(f) − (⟨f, λ⟩ − ψ(λ)) + ‖g‖² / (2μ Σ λ_i), the difference at least its
        rounding error.
        """
        if not np.isfinite(self.support):
            return float("inf")
        shift = float(self.weights @ self.losses) if self.objective.simplex else 0.0
        centred = self.losses - shift
        lagrangian = float(self.weights @ centred) - self.objective.value(self.weights)
        dual = max(self.objective.support(centred) - lagrangian, _EPS * self.scale)
        return dual + float(
            self.gradient @ self.gradient / (2 * self.problem.l2 * self.weights.sum())
        )

    def step(self, P, left, right):
        """Solve  H dx + Gᵀ dλ = −g  and  left·dλ − P G dx = right,  with H = Σ λ_i ∇²f_i."""
        factor = cho_factor(
            self.problem.hessian(self.x, self.weights), lower=True, overwrite_a=True
        )
        newton = cho_solve(factor, self.gradient)
        spread = cho_solve(factor, self.G.T)
        matrix = left + P @ (self.G @ spread)
        change = np.linalg.lstsq(matrix, right - P @ (self.G @ newton), rcond=_EPS)[0]
        return -newton - spread @ change, change


def _start(problem, objective):
    """Start from x = 0 with the prior, or off the simplex with the best weights, if any."""
    x = np.zeros(problem.dimension)
    losses = problem.losses(x)
    if objective.simplex or not np.isfinite(objective.support(losses)):
        return _Point(problem, objective, x, objective.weights(len(losses)).copy())
    return _Point(problem, objective, x, objective.maximizer(losses))


def _proximal_step(start, factor):
    """Solve min_x max_{l∈Λ} ⟨f(x), l⟩ − ψ(l) − ‖l − λ‖²/(2σ) by damped semismooth Newton; λ⁺ is the
    maximiser l.
    """
    problem = start.problem
    objective = start.objective
    anchor = start.weights
    sigma = factor * start.unit
    identity = np.eye(len(anchor))

    def smoothed(x):
        losses = problem.losses(x)
        weights = objective.prox(losses, anchor, sigma)
        distance = float(np.sum((weights - anchor) ** 2)) / (2 * sigma)
        return float(losses @ weights) - objective.value(weights) - distance, weights

    value, weights = smoothed(start.x)
    point = _Point(problem, objective, start.x, weights)
    for _ in range(200):
        P = objective.prox_step(point.losses, anchor, sigma).jacobian()
        direction, _ = point.step(P, identity, np.zeros(len(anchor)))
        slope = float(point.gradient @ direction)
        length = 1.0
        if -slope <= 1e-15 * point.scale:
            return point
        while True:
            trial, weights = smoothed(point.x + length * direction)
            if trial <= value + 1e-4 * length * slope:
                break
            length /= 2
            if length < 1e-10:
                return point
        value = trial
        point = _Point(problem, objective, point.x + length * direction, weights)
    return point


def _polish(point):
    """Make Newton steps on g = 0 and λ = prox_σ(f(x), λ) while they help; return the best pair met,
    with λ ∈ Λ.
    """
    best = point
    objective = point.objective
    identity = np.eye(len(point.weights))
    for _ in range(30):
        sigma = point.unit
        P = objective.prox_step(point.losses, point.weights, sigma).jacobian()
        target = objective.prox(point.losses, point.weights, sigma)
        dx, change = point.step(P, identity - P / sigma, target - point.weights)
        x = point.x + dx
        weights = point.weights + change
        point = _Point(
            point.problem, objective, x, objective.prox(point.problem.losses(x), weights, sigma)
        )
        if not point.residual < 0.5 * best.residual:
            return min(best, point, key=lambda candidate: candidate.residual)
        best = point
    return best

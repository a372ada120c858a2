r"""Steps that need nothing from the user."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scaffpd.federation import Vector
from scaffpd.steps.base import Problem, Rates, Trial


@dataclass(frozen=True)
class AutoState:
    step: float = 1.0
    gamma: float = 0.0
    previous_sigma: float = 0.0
    coupling: float = 0.0
    imbalance: float = 0.0
    accepted: int = 0
    local_scale: float = 1.0
    failures: int = 0


@dataclass(frozen=True)
class Auto:
    safety: float = 0.9
    balance: float = 0.3
    decay: float = 20.0
    growth: float = 1.2
    cap: float = 2.0

    def start(self, problem: Problem) -> AutoState:
        return AutoState()

    def rates(self, s: AutoState) -> Rates:
        sigma = s.gamma * s.step
        theta = min(1.0, s.previous_sigma / sigma) if s.previous_sigma > 0 else 1.0
        return Rates(sigma=sigma, theta=theta, step=s.step, local_scale=s.local_scale)

    def judge(self, s: AutoState, t: Trial) -> tuple[AutoState, bool]:
        sigma = s.gamma * s.step
        if not (np.all(np.isfinite(t.after)) and np.isfinite(t.slope)):
            scale = s.local_scale * (0.5 if s.failures >= 2 or not np.isfinite(t.slope) else 1.0)
            return replace(s, step=s.step / 10 if np.isfinite(t.slope) else s.step, local_scale=scale, failures=s.failures + 1), False
        decrease = s.step * t.slope
        bregman, change = curvature_and_change(t)
        cross = sigma * (change @ change) / (2 * self.safety)
        b, a = bregman / s.step**2, cross / s.step**3
        root = b + np.sqrt(b * b + 2 * a * max(t.slope, 0))
        ideal = t.slope / root if root > 0 and t.slope > 0 else s.step
        if bregman + cross > 0.5 * decrease and decrease > 1e-30:
            step = float(np.clip(0.9 * ideal, 0.05 * s.step, 0.8 * s.step))
            return replace(s, step=step, failures=s.failures + 1), False
        return self._accept(s, t, sigma, decrease, change, ideal), True

    def _accept(self, s, t, sigma, decrease, change, ideal):
        size = change @ change
        k2 = size / (s.step * decrease) if decrease > 0 else s.coupling
        coupling = max(k2, 0.9 * s.coupling)
        gamma, imbalance = s.gamma, s.imbalance
        if gamma == 0:
            gamma = 0.45 / max(k2, 1e-300) / s.step**2 if k2 > 0 else 0.0
            if not np.isfinite(gamma): gamma = 1.0
            m = t.objective.curvature(t.weights)
            if m > 0 and np.isfinite(m): gamma = max(gamma, 1e-3 / m)
            return replace(s, gamma=gamma, coupling=coupling, accepted=1, failures=0, step=float(min(self.cap, s.step*self.growth, max(.95*ideal,.3*s.step))))
        if coupling > 0:
            o, after, lam = t.objective, t.after, t.weights
            best = o.prox(after, lam, 1 / coupling)
            c = after - lam @ after / lam.sum() if o.simplex else after
            pa, pb = o.value(best), o.value(lam)
            gd = float((best - lam) @ c) - pa + pb - coupling / 2 * float((best - lam) @ (best - lam))
            frozen = gd <= 8e-16 * (abs(pa) + abs(pb)) + 1e-300
            r = 0.0 if frozen else float(np.log(gd / max(0.5 * t.slope, 1e-300)))
            imbalance = r if s.accepted <= 1 else 0.7 * imbalance + 0.3 * r
            gamma *= float(np.exp(self.balance / (1 + s.accepted / self.decay) * np.clip(imbalance, -1.5, 1.5)))
        step = float(min(self.cap, s.step * self.growth, max(0.95 * ideal, 0.3 * s.step)))
        return replace(s, step=step, gamma=gamma, previous_sigma=sigma, coupling=coupling, imbalance=imbalance, accepted=s.accepted + 1, failures=0)


def curvature_and_change(t: Trial) -> tuple[float, Vector]:
    def centre(v: Vector) -> Vector:
        return v - v.mean() if t.objective.simplex else v

    bregman = float(t.weights @ (t.after - t.before)) + t.step * t.slope
    noise = 4e-16 * float(t.weights @ (np.abs(t.before) + np.abs(t.after)))
    if bregman >= 1e4 * noise:
        return bregman, centre(t.after - t.before)
    at_x, at_new = t.secants()
    return max(0.5 * float(t.weights @ (at_new - at_x)), 0.0), centre(0.5 * (at_x + at_new))

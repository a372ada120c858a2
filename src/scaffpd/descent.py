r"""Newton's method whose steps are halved until they descend, for a batch of convex problems.

    H(v) s = ∇f(v),    v ← v − t s,    t the first of 1, ½, ¼, … with
    f(v − t s) ≤ f(v) − 10⁻⁴ t ⟨∇f(v), s⟩

(J. Nocedal and S. J. Wright, "Numerical Optimization", 2006, ch. 3.) ⟨∇f, s⟩ is twice the decrease
that the quadratic model promises. A problem is done where that is no more than `close`, or is not a
number. It stays there while others go on: its answer does not depend on its batch.

A promise of less than `SLACK` of 1 + |f| is lost in the rounding of f, and no test could judge the
step. It is taken as it is: convergence is quadratic there. After two such steps nothing but
rounding is left, and the problem is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

STEPS = 60
HALVINGS = 40
SLACK = 1e-9
WHOLE = 2  # steps below the slack

T = TypeVar("T")


def newton(
    v: Tensor,
    evaluate: Callable[[Tensor], tuple[Tensor, T]],
    step: Callable[[Tensor, T], tuple[Tensor, Tensor]],
    close: float = 0.0,
    steps: int = 0,
) -> tuple[Tensor, Tensor, T]:
    """Return v, f(v) and what else is known there when all n problems are done.

    Args:
        v: where to start, (n, …).
        evaluate: returns f(v), (n,), and what a step from there has to know.
        step: takes v with that, and returns s and ⟨∇f, s⟩, (n,).
        close: the ⟨∇f, s⟩ of a problem that is done.
        steps: the most steps, and halvings of each; 0 for the usual numbers.
    """
    value, known = evaluate(v)
    slack = max(SLACK, 100 * torch.finfo(value.dtype).eps)
    whole = torch.zeros_like(value)
    for _ in range(steps or STEPS):
        if bool((whole >= WHOLE).all()):
            break
        s, slope = step(v, known)
        done = (whole >= WHOLE) | ~(slope > close)
        if bool(done.all()):
            break
        small = slope <= slack * (1 + value.abs())
        whole += small
        each = -1, *(1 for _ in v.shape[1:])
        s = torch.where(done.view(each), 0.0, s)
        length = torch.ones_like(value)
        for _ in range(steps or HALVINGS):
            ahead = v - length.view(each) * s
            new, there = evaluate(ahead)
            descends = done | small | (new <= value - 1e-4 * length * slope)
            if bool(descends.all()):
                break
            length = torch.where(descends, length, length / 2)
        whole = torch.where(descends, whole, WHOLE)  # where nothing descends
        v, value, known = ahead, new, there
    return v, value, known

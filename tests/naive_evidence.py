"""Evidence of a mixed model by its definition: one dense Hessian of (x, u_1, …, u_N), in NumPy.

A second version of `scaffpd.algorithms.evidence`, with none of its algebra.
"""

import numpy as np


def loss_terms(loss, Z, y):
    """Σ ℓ, its derivative and its second derivatives (rows, k, k) at the outputs Z (rows, k)."""
    k = Z.shape[1]
    eye = np.eye(k)
    if loss == "squared":
        R = Z - y.reshape(len(Z), -1)
        return (R**2).sum(), 2 * R, np.broadcast_to(2 * eye, (len(Z), k, k))
    if loss == "softmax":
        P = np.exp(Z - Z.max(1, keepdims=True))
        P /= P.sum(1, keepdims=True)
        target = eye[y.astype(int)]
        value = -np.log(P[np.arange(len(Z)), y.astype(int)]).sum()
        return value, P - target, P[:, :, None] * eye - P[:, :, None] * P[:, None]
    z = Z[:, 0]
    sigma = 1 / (1 + np.exp(-z))
    if loss == "logistic":
        value = np.logaddexp(0, z) - y * z
        first, second = sigma - y, sigma * (1 - sigma)
    else:
        mu = np.exp(z)
        value = mu - y + np.where(y > 0, y * np.log(np.where(y > 0, y, 1) / mu), 0)
        first, second = mu - y, mu
    return value.sum(), first[:, None], second[:, None, None]


def joint(loss, clients, outputs, tau, omega, scale, t):
    """Φ, gradient and Hessian in t = (x, u_1, …, u_N)."""
    d = clients[0][0].shape[1] * outputs
    T, W = (np.repeat(v, outputs) for v in (tau, omega))
    x, *U = t.reshape(-1, d)
    value = (x**2 / W).sum() / 2
    gradient = np.zeros_like(t)
    hessian = np.zeros((len(t), len(t)))
    gradient[:d] = x / W
    hessian[:d, :d] = np.diag(1 / W)
    for i, ((A, y), u) in enumerate(zip(clients, U, strict=True)):
        own = slice((i + 1) * d, (i + 2) * d)
        total, first, second = loss_terms(loss, A @ u.reshape(-1, outputs), y)
        value += total / scale + ((u - x) ** 2 / T).sum() / 2
        gradient[own] = (A.T @ first).ravel() / scale + (u - x) / T
        gradient[:d] -= (u - x) / T
        H = np.einsum("ra,rbc,rd->abdc", A, second, A).reshape(d, d) / scale
        hessian[own, own] = H + np.diag(1 / T)
        hessian[:d, :d] += np.diag(1 / T)
        hessian[own, :d] = hessian[:d, own] = -np.diag(1 / T)
    return value, gradient, hessian


def evidence(loss, clients, tau, omega, scale=1.0, outputs=1):
    """Return log E and the mode t, for features with a column of ones where there is one."""
    d = clients[0][0].shape[1] * outputs
    t = np.zeros((len(clients) + 1) * d)
    parts = (loss, clients, outputs, np.asarray(tau), np.asarray(omega), scale)
    for _ in range(60):
        value, gradient, hessian = joint(*parts, t)
        step = np.linalg.solve(hessian, gradient)
        left = gradient @ step
        if left < 1e-17:
            break
        length = 1.0
        # nearer than that, whole steps converge, and values are equal to their last digits
        while left > 1e-10 and joint(*parts, t - length * step)[0] > value and length > 1e-9:
            length /= 2
        t = t - length * step
    priors = len(clients) * np.log(tau).sum() + np.log(omega).sum()
    found = -value - np.linalg.slogdet(hessian)[1] / 2 - outputs * priors / 2
    if loss == "squared":
        n = sum(np.asarray(y).size for _, y in clients)
        found -= n / 2 * np.log(np.pi * scale)
    return found, t

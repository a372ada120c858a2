"""The clients' arithmetic a second time: plain NumPy, one client after the other, straight from
the definitions.
"""

import numpy as np
from scipy.special import expit, log1p, logsumexp, softmax

CURVATURE = {"squared": 2.0, "logistic": 0.25, "softmax": 0.5}


class Client:
    """f(x) = (1/m) Σ_j ℓ(⟨a_j, x⟩, y_j) + (l2/2)‖x‖² of one client, x a flat (d·k) vector; l2 is a
    number, or one for each of x.
    """

    def __init__(self, X, y, loss, l2, outputs=1, intercept=False):
        A = np.asarray(X, dtype=np.float64)
        self.A = np.hstack([A, np.ones((len(A), 1))]) if intercept else A
        self.y = np.asarray(y)
        self.loss = loss
        self.l2 = l2
        self.k = outputs

    def value_and_gradient(self, x, rows=None):
        rows = np.arange(len(self.A)) if rows is None else rows
        A = self.A[rows]
        y = self.y[rows]
        W = x.reshape(-1, self.k)
        total = 0.0
        G = np.zeros_like(W)
        for a, b in zip(A, y, strict=True):
            z = a @ W
            if self.loss == "squared":
                total += np.sum((z - b) ** 2)
                r = 2 * (z - b)
            elif self.loss == "logistic":
                total += log1p(np.exp(-abs(z[0]))) + max(z[0], 0.0) - b * z[0]
                r = expit(z) - b
            else:
                total += logsumexp(z) - z[int(b)]
                r = softmax(z) - np.eye(self.k)[int(b)]
            G += np.outer(a, r)
        m = len(rows)
        return total / m + (self.l2 * x) @ x / 2, (G / m).ravel() + self.l2 * x

    def loss_at(self, x):
        return self.value_and_gradient(x)[0]

    def gradient(self, x, rows=None):
        return self.value_and_gradient(x, rows)[1]

    def hessian(self, x):
        m = len(self.A)
        W = x.reshape(-1, self.k)
        H = self.l2 * np.eye(x.size)
        for a in self.A:
            z = a @ W
            if self.loss == "squared":
                inner = 2 * np.eye(self.k)
            elif self.loss == "logistic":
                inner = np.diag(expit(z) * expit(-z))
            else:
                p = softmax(z)
                inner = np.diag(p) - np.outer(p, p)
            H += np.kron(np.outer(a, a), inner) / m
        return H

    @property
    def smoothness(self):
        top = np.linalg.eigvalsh(self.A.T @ self.A)[-1] / len(self.A)
        return CURVATURE[self.loss] * top + np.max(self.l2)

    def descend(self, x, c_i, c, rate, steps, batches=None):
        """d = x − u after u ← u − η (g_i(u) − c_i + c), `steps` times; `batches` are the rows of
        each step.
        """
        u = x.copy()
        shift = c - c_i
        for j in range(steps):
            u = u - rate * (self.fast_gradient(u, None if batches is None else batches[j]) + shift)
        return x - u

    def fast_gradient(self, x, rows=None):
        """`gradient` without the loop over samples, for long runs (a test holds the two against
        each other).
        """
        A, y = (self.A, self.y) if rows is None else (self.A[rows], self.y[rows])
        Z = A @ x.reshape(-1, self.k)
        if self.loss == "squared":
            R = 2 * (Z - y.reshape(len(y), -1))
        elif self.loss == "logistic":
            R = expit(Z) - y.reshape(-1, 1)
        else:
            R = softmax(Z, axis=1) - np.eye(self.k)[y.astype(int)]
        return (A.T @ R / len(A)).ravel() + self.l2 * x


def unequal_clients(loss, outputs=1, d=6, seed=0):
    """Clients as awkward as they come: their sizes, and features that repeat, vanish or never
    change.
    """
    random = np.random.default_rng(seed)
    scale = 10 ** random.uniform(-1, 1, d)
    features = {
        "one sample": random.standard_normal((1, d)) * scale,
        "fewer than features": random.standard_normal((d - 2, d)) * scale,
        "as many": random.standard_normal((d, d)) * scale,
        "many": random.standard_normal((40, d)) * scale,
        "repeated rows": np.repeat(random.standard_normal((3, d)), 5, axis=0),
        "a zero column": random.standard_normal((12, d)) * (np.arange(d) != 2),
        "constant": np.ones((9, d)),
        "all zero": np.zeros((4, d)),
    }
    clients = {}
    for name, X in features.items():
        m = len(X)
        if loss == "squared":
            y = random.standard_normal((m, outputs)) if outputs > 1 else random.standard_normal(m)
        else:
            y = random.integers(0, max(2, outputs), m)
        clients[name] = (X, y)
    return clients


def relative(a, b):
    a = np.asarray(a)
    b = np.asarray(b)
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-300)

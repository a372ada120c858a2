"""Regression problems with something odd about them."""

from scaffpd.data import synthetic

AWKWARD = {
    "one client": synthetic(N=1),
    "one feature": synthetic(d=1, m=3, sigma=1.0),
    "identical clients": [synthetic()[0]] * 3,
    "unequal": synthetic(sizes=(1, 2, 300), N=3),
    "solved at the start": [(X, 0 * y) for X, y in synthetic()],
    "nothing to learn": [(0 * X, 1 + 0 * y) for X, y in synthetic(N=2)],
}

"""Secure aggregation: a server learns Σ_i w_i v_i and no single v_i (Bonawitz et al., 2017; Bell et al., 2020).

terms     who takes part in an exchange, who is whose neighbour, and the number format of the sum
keys      identities of clients, Shamir shares, seeds and key streams
exchange  the client's side and the server's side of an exchange

Nothing here knows of models or networks: bytes and arrays go in, bytes and arrays come out.
"""

from importlib.util import find_spec

from scaffpd.errors import not_installed

if find_spec("cryptography") is None:
    raise not_installed("cryptography", "privacy")

from scaffpd.masking.exchange import Aggregator, Incomplete, Opened, Party
from scaffpd.masking.keys import Card, Identity
from scaffpd.masking.terms import FixedPoint, Terms

__all__ = ["Aggregator", "Card", "FixedPoint", "Identity", "Incomplete", "Opened", "Party", "Terms"]

"""Secure aggregation: a server learns Σ_i w_i v_i and no single v_i (after Bonawitz et al., 2017; Bell et al., 2020).

terms     who takes part in a sum, who shares masks with whom, and the number format
keys      identities of clients, what two of them agree on, and key streams
exchange  a client's answer; the server adds them up

Nothing here knows of models or networks: bytes and arrays go in, bytes and arrays come out.
"""

from importlib.util import find_spec

from scaffpd.errors import not_installed

if find_spec("cryptography") is None:
    raise not_installed("cryptography", "privacy")

from scaffpd.masking.exchange import Incomplete, Party
from scaffpd.masking.keys import Card, Identity
from scaffpd.masking.terms import FixedPoint, Terms

__all__ = ["Card", "FixedPoint", "Identity", "Incomplete", "Party", "Terms"]

"""Secure aggregation: a server learns Σ_i w_i v_i and no single v_i (Bonawitz et al., 2017; Bell et al., 2020).

terms        who takes part in an exchange, who is whose neighbour, how many may collude or leave
identity     long-term keys of clients, and how others know them
fixed_point  numbers as whole numbers modulo 2⁶⁴, without overflow
shamir       a secret in shares
streams      seeds and key streams (HKDF, ChaCha20)
party        what a client does
aggregator   what the server does

Nothing here knows of models or networks: bytes and arrays go in, bytes and arrays come out.
"""

from importlib.util import find_spec

from scaffpd.errors import not_installed

if find_spec("cryptography") is None:
    raise not_installed("cryptography", "privacy")

from scaffpd.masking.aggregator import Aggregator, Incomplete
from scaffpd.masking.fixed_point import FixedPoint
from scaffpd.masking.identity import Card, Identity
from scaffpd.masking.party import Opened, Party
from scaffpd.masking.terms import Terms

__all__ = ["Aggregator", "Card", "FixedPoint", "Identity", "Incomplete", "Opened", "Party", "Terms"]

"""Read a startup kit, which comes from outside: an address, a certificate, its key and a root.

A kit is data. These four are parsed, checked and written anew for FLARE (`workspace`); whatever
else a kit holds is neither read nor run.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import NameOID

from scaffpd.errors import InputError

STARTUP = "startup"  # the folder of a kit, and of FLARE's workspace, with keys and addresses
SITE_PARTS = ("fed_client.json", "client.crt", "client.key", "rootCA.pem")
LARGEST = 2**16  # bytes of a file
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # of a silo or a federation
TARGET = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?):([1-9][0-9]{0,4})")


@dataclass(frozen=True)
class SiteKit:
    """What a site takes from its kit."""

    host: str
    port: int
    federation: str
    certificate: x509.Certificate
    key: PrivateKeyTypes
    root: x509.Certificate

    @classmethod
    def read(cls, kit: Path, silo: str) -> SiteKit:
        """Read and check the kit of a silo; refuse another silo's, the server's, and what is none
        of a silo's.
        """
        if not (kit / STARTUP / "client.crt").exists():
            raise _not_for_sites(kit, silo)
        own, root = certificate(kit, "client.crt"), certificate(kit, "rootCA.pem")
        if own.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME):
            raise _not_for_sites(kit, silo)  # the role of an administrator
        host, port = address(kit)
        if _name(own) == host:
            raise _not_for_sites(kit, silo)
        if _name(own) != silo:
            raise InputError(
                "kit-of-another-silo",
                f"This is the kit of silo {_name(own)!r}, and silo.toml says {silo!r}: ask the "
                f"coordinator for the kit of {silo!r}, and replace {str(kit)!r} by it.",
            )
        try:
            own.verify_directly_issued_by(root)
            root.verify_directly_issued_by(root)
        except (ValueError, TypeError, InvalidSignature):
            raise _unfit(kit, "The root has not signed the certificate") from None
        key = _key(kit)
        if key.public_key() != own.public_key():
            raise _unfit(kit, "The private key is not the certificate's")
        if not NAME.fullmatch(_name(root)):
            raise _unfit(kit, "The root does not name a federation")
        return cls(host, port, _name(root), own, key, root)


def content(kit: Path, name: str) -> bytes:
    """Return a small file of a kit's folder `startup`; refuse links to other places."""
    path = (kit / STARTUP / name).resolve()
    if not (path.is_relative_to(kit.resolve()) and path.is_file()):
        raise InputError("kit-incomplete", f"There is no {name!r} in {str(kit / STARTUP)!r}.")
    if path.stat().st_size > LARGEST:
        raise InputError(
            "kit-file-too-large", f"{str(path)!r} has more than 64 kB: it is no part of a kit."
        )
    return path.read_bytes()


def certificate(kit: Path, name: str) -> x509.Certificate:
    written = content(kit, name)
    try:
        (found,) = x509.load_pem_x509_certificates(written)
    except ValueError:
        raise InputError(
            "certificate-unreadable",
            f"{name!r} in {str(kit / STARTUP)!r} does not hold one certificate.",
        ) from None
    return found


def address(kit: Path) -> tuple[str, int]:
    server = (kit / STARTUP / "fed_server.json").exists()
    written = content(kit, "fed_server.json" if server else "fed_client.json")
    try:
        found = TARGET.fullmatch(json.loads(written)["servers"][0]["service"]["target"])
    except (ValueError, LookupError, TypeError, RecursionError):
        found = None
    if found is None or int(found[2]) >= 2**16:
        raise InputError(
            "kit-without-address", f"{str(kit)!r} does not say where the server is, as host:port."
        )
    return found[1], int(found[2])


def _name(certificate: x509.Certificate) -> str:
    """Return whose certificate it is; empty if it does not say that once."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if len(names) == 1 else ""


def _key(kit: Path) -> PrivateKeyTypes:
    written = content(kit, "client.key")
    try:
        return load_pem_private_key(written, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise _unfit(kit, "The private key cannot be read") from None


def _unfit(kit: Path, why: str) -> InputError:
    return InputError(
        "kit-does-not-fit", f"{why} in {str(kit)!r}: ask the coordinator for a new kit."
    )


def _not_for_sites(kit: Path, silo: str) -> InputError:
    return InputError(
        "not-a-kit-for-silos",
        f"{str(kit)!r} is a kit of the coordinator's, or none: ask for the kit of {silo!r}.",
    )

"""What the operator of a silo says about secure sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path


@dataclass(frozen=True)
class SecureRules:
    """What a silo's file says about secure sums.

    Attributes:
        required: whether the silo takes part with masked vectors only.
        identity: the file of its own long-term key; made where there is none.
        pins: fingerprints of other silos' keys.
        authority: a root certificate that has to stand behind every card; `None` to take cards as they come.
        certificate: the silo's own certificate and its key, to sign its card with.
        colluding: the fewest colluding silos that a sum has to bear.
        share: the largest share of a sum that its vector may have.
        quantum: its losses leave as multiples of this; 0 leaves them as they are.
        changing: whether the same vector may be in sums of other silos; who leaves, or comes back, shows its own by it.
        projections: whether it shows its gradient along directions that the coordinator chooses.
    """

    required: bool
    identity: Path
    pins: Mapping[str, str] = field(default_factory=dict)
    authority: Path | None = None
    certificate: tuple[Path, Path] | None = None
    colluding: int = 1
    share: float = 0.9
    quantum: float = 0.0
    projections: bool = False
    changing: bool = False

    def known_by(self, kit: Path) -> SecureRules:
        """With the certificates of an engine's startup kit, unless the silo's file names its own."""
        root, own = kit / "rootCA.pem", (kit / "client.crt", kit / "client.key")
        if self.authority is not None or self.certificate is not None or not all(f.is_file() for f in (root, *own)):
            return self
        return replace(self, authority=root, certificate=own)

"""A runnable Flower app from a federation.toml, and the commands that its operators type."""
from __future__ import annotations
from pathlib import Path

_PYPROJECT = """\
[project]
name = "scaffpd-federation"
version = "1.0.0"
description = "A federation of scaffpd"
license = "Apache-2.0"
dependencies = ["scaffpd[flower]"]

[tool.flwr.app]
publisher = "scaffpd"

[tool.flwr.app.components]
serverapp = "scaffpd_federation.server:app"
clientapp = "scaffpd_federation.client:app"

[tool.flwr.app.config]
federation = ""
"""
def write_app(out: Path) -> None:
    package = out / "scaffpd_federation"
    package.mkdir(parents=True, exist_ok=True)
    (out / "pyproject.toml").write_text(_PYPROJECT, encoding="utf-8")
    (package / "__init__.py").write_text('"""scaffpd as a Flower app."""\n', encoding="utf-8")
    for part in ("server", "client"):
        (package / f"{part}.py").write_text(f'"""The {part}."""\n\nfrom scaffpd.deploy.flower.{part}_app import app\n\n__all__ = ["app"]\n')

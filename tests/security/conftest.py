"""As in tests/deploy: silos of the tests wait for no lock."""

from cases.silos import fake_clock, no_locks  # noqa: F401 - fixtures

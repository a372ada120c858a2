"""Coordinators of the tests wait on a clock of their own; their silos wait for no lock."""

from cases.silos import fake_clock, locks_of_threads  # noqa: F401 - fixtures

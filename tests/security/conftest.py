"""As in tests/deploy: silos of the tests wait for no lock."""

from deploy_cases import no_locks  # noqa: F401 - a fixture

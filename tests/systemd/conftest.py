"""What the tests on a real systemd share: one booted rig for all of them."""

from collections.abc import Iterator

import pytest

from fakes.rig import Rig

pytestmark = pytest.mark.systemd


@pytest.fixture(scope="session")
def rig() -> Iterator[Rig]:
    """Boot a systemd in namespaces of its own."""
    rig = Rig()
    yield rig
    rig.close()

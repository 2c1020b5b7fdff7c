"""What the composition root decides by itself."""

import pytest

from vllm_supervisor.adapters import descriptors
from vllm_supervisor.core.errors import SetupError
from vllm_supervisor.runtime import app


@pytest.mark.parametrize(("allowed", "connections"), [(1 << 20, 4096), (8448, 4096), (1024, 384), (288, 16)])
def test_clients_never_get_the_descriptors_that_custody_needs(
    allowed: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two descriptors a connection and our own fit into what is allowed, whatever the configuration says."""
    asked: list[int] = []
    monkeypatch.setattr(descriptors, "allow", lambda wanted: asked.append(wanted) or allowed)
    assert app.connections_there_is_room_for(4096) == connections
    assert asked == [8448]


def test_a_limit_that_leaves_no_room_is_said_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer open files than we need ourselves nothing is started."""
    monkeypatch.setattr(descriptors, "allow", lambda _wanted: 64)
    with pytest.raises(SetupError, match=r"only 64 open files are allowed; raise the limit .* to at least 288"):
        app.connections_there_is_room_for(4096)
    monkeypatch.setattr(descriptors, "allow", lambda _wanted: 264)
    assert app.connections_there_is_room_for(4) == 4

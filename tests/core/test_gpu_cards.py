"""Which cards an engine uses, from what its processes hold open and what its environment lets it see."""

from collections.abc import Mapping

import pytest

from vllm_supervisor.core.gpu_cards import Card, used

A, B, C = "0000:01:00", "0000:41:00", "0000:81:00"
ALIKE = (Card(A, 0, "GPU-aa11", "X"), Card(B, 1, "GPU-bb22", "X"), Card(C, 2, "GPU-bb33", "X"))
MIXED = (Card(A, 0, "GPU-aa11", "X"), Card(B, 1, "GPU-bb22", "Y"))


@pytest.mark.parametrize(
    ("cards", "environ", "opened", "present", "expected"),
    [
        ((), {}, (), (), None),
        (ALIKE[:1], {}, (), (), {A}),
        (ALIKE, {}, (), (), None),
        (ALIKE, {}, {1}, (), {B}),
        (ALIKE, {}, (), {2}, {C}),  # a container with one device file
        (ALIKE, {}, (), {0, 2}, None),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "1"}, (), (), {B}),
        (ALIKE[::-1], {"CUDA_VISIBLE_DEVICES": "0"}, (), (), {A}),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "2, 0"}, (), (), {A, C}),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "1"}, {0, 1, 2}, (), {B}),  # NVML opens them all for a moment
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "0,1"}, {1}, (), {B}),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "1"}, {2}, (), {B}),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "GPU-aa"}, (), (), {A}),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "GPU-bb"}, (), (), None),  # two begin so
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "MIG-1234"}, (), (), None),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "MIG-1234"}, {2}, (), {C}),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": ""}, (), (), set()),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "-1"}, (), (), set()),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, (), (), {A}),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "7"}, (), (), None),
        (MIXED, {"CUDA_VISIBLE_DEVICES": "0"}, (), (), None),  # the fastest is first, and which that is nobody says
        (MIXED, {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, (), (), {A}),
        (MIXED, {"CUDA_VISIBLE_DEVICES": "0"}, {1}, (), {B}),
        (ALIKE, {"NVIDIA_VISIBLE_DEVICES": "all"}, (), (), None),
        (ALIKE, {"NVIDIA_VISIBLE_DEVICES": "void"}, {1}, (), {B}),
        (ALIKE, {"NVIDIA_VISIBLE_DEVICES": "2"}, (), (), {C}),
        (ALIKE[:1], {"NVIDIA_VISIBLE_DEVICES": "5"}, (), {0}, {A}),  # the host's index; the container sees one card
        (ALIKE, {"NVIDIA_VISIBLE_DEVICES": "1,2", "CUDA_VISIBLE_DEVICES": "0"}, (), (), {B}),
    ],
)  # fmt: skip
def test_the_cards_of_an_engine(
    cards: tuple[Card, ...], environ: Mapping[str, str], opened: set[int], present: set[int], expected: set[str] | None
) -> None:
    """Each witness narrows; what cannot be told is None and never all of them."""
    found = used(cards, environ, opened=opened, present=present)
    assert found == (None if expected is None else frozenset(expected))

"""Whether a machine shares its memory with the GPU."""

import pytest

from vllm_supervisor.core.memory_mode import Gpu, GpuFacts, by_configuration, by_driver, by_names, memory_told


@pytest.mark.parametrize(("mode", "on"), [("unified", True), ("discrete", False), ("off", False)])
def test_the_configuration_decides(mode: str, on: bool) -> None:
    """What is configured holds, and is named as the reason."""
    decided = by_configuration(mode)
    assert decided is not None
    assert decided.on is on
    assert f"memory.mode is {mode}" in decided.sentence


def test_auto_leaves_it_to_the_machine() -> None:
    """Nothing is decided by `auto`."""
    assert by_configuration("auto") is None


@pytest.mark.parametrize(
    ("names", "on"),
    [
        (("NVIDIA GB10",), True),
        (("NVIDIA Thor",), True),
        (("NVIDIA Jetson AGX Orin Developer Kit",), True),
        (("NVIDIA GH200 480GB",), True),
        ((), False),
        (("NVIDIA GB100",), None),
        (("NVIDIA GeForce RTX 4090",), None),
    ],
)
def test_names_that_say_enough(names: tuple[str, ...], on: bool | None) -> None:
    """A known name switches on, no GPU at all off; any other name needs the driver's word."""
    decided = by_names(names)
    assert (None if decided is None else decided.on) is on


@pytest.mark.parametrize(
    ("facts", "on", "word"),
    [
        (GpuFacts((Gpu("NVIDIA X1", None),), "nvidia-smi"), True, "NVIDIA X1 shares"),
        (GpuFacts((Gpu("NVIDIA GeForce RTX 4090", 24 << 30),), "NVML"), False, "memory of its own (NVML)"),
        (GpuFacts((Gpu("A", 24 << 30), Gpu("B", None)), "NVML"), True, "B shares"),
        (GpuFacts((Gpu("A", 24 << 30), Gpu("B", "GPU is lost")), "NVML"), False, "A has memory of its own (NVML); not"),
        (GpuFacts((Gpu("A", "GPU is lost"),), "NVML"), False, 'A: GPU is lost); set memory.mode = "unified"'),
        (GpuFacts((Gpu("NVIDIA GB10", "Unknown Error"),), "NVML"), True, "NVIDIA GB10 shares"),
        (GpuFacts((), "NVML"), False, "no GPU"),
        (GpuFacts(None, "", "no driver"), False, 'set memory.mode = "unified"'),
    ],
)
def test_the_driver_decides_by_the_memory_it_knows(facts: GpuFacts, on: bool, word: str) -> None:
    """A GPU whose memory the driver does not know shares the machine's; silence is off, with the mend."""
    decided = by_driver(facts)
    assert decided.on is on
    assert word in decided.sentence


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("[N/A]", None),
        ("N/A", None),
        ("[Not Supported]", None),
        ("Not Supported", None),
        ("[GPU is lost]", "GPU is lost"),
        ("GPU is lost", "GPU is lost"),
        ("[GPU requires reset]", "GPU requires reset"),
        ("[Unknown Error]", "Unknown Error"),
        ("[Insufficient Permissions]", "Insufficient Permissions"),
        ("[Function Not Found]", "Function Not Found"),
        ("[No data]", "No data"),
        ("ERR!", "ERR!"),
        ("Driver Not Loaded", "Driver Not Loaded"),
        ("0", "0"),
        ("", "no answer"),
        ("[]", "no answer"),
    ],
)
def test_only_not_supported_means_that_there_is_no_memory_to_tell_of(answer: str, told: str | None) -> None:
    """Every answer of NVML and nvidia-smi that is no number: one kind says "shared", all others say why nothing is known."""
    assert memory_told(answer) == told

"""Whether a machine shares its memory with the GPU, and what else the kernel and the driver tell of it."""

import pytest

from vllm_supervisor.core import kernel_lines
from vllm_supervisor.core.memory_mode import Gpu, GpuFacts, by_configuration, by_driver, by_names


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
        (GpuFacts((), "NVML"), False, "no GPU"),
        (GpuFacts(None, "", "no driver"), False, 'set memory.mode = "unified"'),
    ],
)
def test_the_driver_decides_by_the_memory_it_knows(facts: GpuFacts, on: bool, word: str) -> None:
    """A GPU whose memory the driver does not know shares the machine's; silence is off, with the mend."""
    decided = by_driver(facts)
    assert decided.on is on
    assert word in decided.sentence


def test_kernel_lines_of_interest() -> None:
    """Records lose their prefix and their further lines; only the driver's and the OOM killer's are kept."""
    record = b"3,1234,5678,-;NVRM: nvAssertOkFailedNoLog: Out of memory [NV_ERR_NO_MEMORY] (0x51)\n SUBSYSTEM=pci\n"
    line = kernel_lines.text(record)
    assert line.endswith("[NV_ERR_NO_MEMORY] (0x51)")
    assert kernel_lines.of_interest(line)
    assert kernel_lines.of_interest("NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus.")
    assert not kernel_lines.of_interest("usb 1-1: new high-speed USB device")


def test_an_oom_kill_counts_only_for_the_engines_processes() -> None:
    """Another program's end is no evidence about the engine's."""
    ours = "oom-kill:constraint=CONSTRAINT_NONE,task=VLLM::EngineCor,pid=4321,uid=0"
    theirs = "Out of memory: Killed process 99 (python3) total-vm:1kB"
    assert kernel_lines.about([ours, theirs, "NVRM: Xid 31"], {4321}) == f"{ours}\nNVRM: Xid 31"

"""Which lines of the kernel log are evidence about an engine, and which are not: one table."""

import pytest

from vllm_supervisor.core.kernel_lines import NEAR, End, KernelLine, Kind, card_address, counts, evidence, parse

OURS, THEIRS = "0000:01:00", "0000:41:00"


@pytest.mark.parametrize(
    ("record", "kind", "card", "pid"),
    [
        (b"3,1,5,-;NVRM: Xid (PCI:0000:01:00): 79, pid=7, name=python3, GPU has fallen off the bus.\n SUBSYSTEM=pci", "card_lost", OURS, 7),
        (b"3,1,5,-;NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen", "card_lost", OURS, None),
        (b"3,1,5,-;NVRM: Xid (PCI:000f:01:00): 31, pid=7, Ch 0000001b", "card_fault", "000f:01:00", 7),
        (b"3,1,5,-;NVRM: Xid (0000:01:00): 13, Graphics Exception", "card_fault", OURS, None),
        (b"3,1,5,-;NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid='7'", "card_fault", OURS, 7),
        (b"3,1,5,-;NVRM: Xid (PCI:0000:01:00): 45, pid=7, Ch 00000008", None, None, None),  # follows each KILL
        (b"3,1,5,-;NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.", "card_lost", OURS, None),
        (b"3,1,5,-;NVRM: GPU at PCI:0000:01:00: GPU-1b5c", None, None, None),
        (b"3,1,5,-;NVRM: The NVIDIA GPU 0000:01:00.0\\x0aNVRM: (PCI ID: 10de:2684) has\\x0aNVRM: fallen off the bus", "card_lost", OURS, None),
        (b"3,1,5,-;NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x51)", "no_memory", None, None),
        (b"4,1,5,c;NVRM: GPU0 nvAssertOkFailedNoLog: [NV_ERR_NO_MEMORY]", "no_memory", None, None),
        (b"6,1,5,-;oom-kill:constraint=C,task_memcg=/a,pid=5,uid=0,task=VLLM::EngineCor,pid=4321,uid=0", "oom_kill", None, 4321),
        (b"3,1,5,-;Out of memory: Killed process 99 (x,pid=4321,uid=0) total-vm:1kB", "oom_kill", None, 99),
        (b"3,1,5,-;Memory cgroup out of memory: Killed process 99 (python3)", "oom_kill", None, 99),
        (b"12,1,5,-;NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.", None, None, None),  # echo > /dev/kmsg
        (b"11,1,5,-;Out of memory: Killed process 4321 (python3)", None, None, None),
        (b"x,1,5,-;NVRM: Xid (PCI:0000:01:00): 79", None, None, None),
        (b"6,1,5,-;audit: comm=NVRM: Xid (PCI:0000:01:00): 79", None, None, None),
        (b"3,1,5,-;NVRM: loading NVIDIA UNIX Open Kernel Module", None, None, None),
        (b"3,1,5,-;[drm:nv_drm_dev_load] *ERROR* [GPU ID 0x00000100] Failed to allocate", None, None, None),
        (b"3,1,5,-;nvidia-modeset: ERROR: GPU:0: Error while waiting", None, None, None),
        (b"3,1,5,-;amdgpu 0000:01:00.0: amdgpu: GPU reset begin!", None, None, None),
        (b"3,1,5,-;", None, None, None),
        (b"", None, None, None),
        (b"3,1", None, None, None),
        (b"\xff\xfe;NVRM: Xid", None, None, None),
        (b"Jul  1 00:00:00 host kernel: [  12.5] NVRM: Xid (PCI:0000:01:00): 79, GPU", "card_lost", OURS, None),
        (b"Jul  1 00:00:00 host sshd: NVRM: Xid (PCI:0000:01:00): 79, GPU", None, None, None),
    ],
)  # fmt: skip
def test_what_a_record_says(record: bytes, kind: str | None, card: str | None, pid: int | None) -> None:
    """The driver's classes with card and process; other drivers, programs that write to the log and noise say nothing."""
    line = parse(record, 5.0)
    assert (line and line.kind.value, line and line.card, line and line.pid) == (kind, card, pid)


def test_an_address_is_written_in_one_way() -> None:
    """As the driver, nvidia-smi and /proc write it."""
    written = ("0000:01:00", "0000:01:00.0", "00000000:01:00.0")
    assert {card_address(text) for text in written} == {OURS}
    assert card_address("0000000F:01:00.0") == "000f:01:00"


BEGAN, OVER = 100.0, 104.0
KNOWN, UNKNOWN = frozenset({OURS}), None


@pytest.mark.parametrize(
    ("said", "cards", "tight_at", "counted"),
    [
        # no memory: only where memory was tight as well
        (("no_memory", None, None, 102.0), KNOWN, None, False),
        (("no_memory", None, None, 102.0), KNOWN, 101.0, True),
        (("no_memory", None, None, 102.0), KNOWN, 89.0, False),
        (("no_memory", None, None, 102.0), KNOWN, 105.0, False),
        (("no_memory", None, None, 80.0), KNOWN, 101.0, False),
        # a card: only one the engine uses, only around the end
        (("card_lost", OURS, None, 102.0), KNOWN, None, True),
        (("card_lost", OURS, 99, 102.0), KNOWN, None, True),
        (("card_lost", THEIRS, None, 102.0), KNOWN, None, False),
        (("card_lost", OURS, None, 102.0), UNKNOWN, None, False),
        (("card_lost", OURS, None, 102.0), frozenset(), None, False),
        (("card_lost", OURS, None, BEGAN - NEAR), KNOWN, None, True),
        (("card_lost", OURS, None, BEGAN - NEAR - 0.1), KNOWN, None, False),
        (("card_lost", OURS, None, OVER + NEAR), KNOWN, None, True),
        (("card_lost", OURS, None, OVER + NEAR + 0.1), KNOWN, None, False),
        (("card_fault", OURS, None, 102.0), KNOWN, None, True),
        (("card_fault", THEIRS, None, 102.0), KNOWN, None, False),
        # a fault that names a process: one of ours
        (("card_fault", OURS, 7, 102.0), KNOWN, None, True),
        (("card_fault", OURS, 99, 102.0), KNOWN, None, False),
        (("card_fault", THEIRS, 7, 102.0), UNKNOWN, None, True),
        (("card_fault", THEIRS, 7, 80.0), UNKNOWN, None, False),
        # an OOM kill: of ours, whenever
        (("oom_kill", None, 7, 10.0), UNKNOWN, None, True),
        (("oom_kill", None, 99, 102.0), UNKNOWN, None, False),
    ],
)  # fmt: skip
def test_what_is_evidence(
    said: tuple[str, str | None, int | None, float],
    cards: frozenset[str] | None,
    tight_at: float | None,
    counted: bool,
) -> None:
    """Class, memory, card, process and time to the end decide; no line of the driver counts by itself."""
    kind, card, pid, at = said
    line = KernelLine("text", Kind(kind), at, card, pid)
    assert counts(line, End(BEGAN, OVER, frozenset({7}), cards, tight_at)) is counted


def test_in_a_container_the_kernels_pids_are_not_ours() -> None:
    """A pid that is one of ours only by number proves nothing; a fault of our card still counts."""
    inside = End(BEGAN, OVER, frozenset(), KNOWN, None)
    assert not counts(KernelLine("", Kind.OOM_KILL, 102.0, pid=7), inside)
    assert counts(KernelLine("", Kind.CARD_FAULT, 102.0, OURS, 7), inside)


def test_evidence_is_the_lines_that_count() -> None:
    """One a line, as the kernel wrote them."""
    lines = [KernelLine(str(at), Kind.CARD_LOST, at, OURS) for at in (50.0, 99.0, 103.0)]
    assert evidence(lines, End(BEGAN, OVER, cards=KNOWN)) == "99.0\n103.0"

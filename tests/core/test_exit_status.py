"""Every exit code and every signal is read rightly, asked for and not, before ready and after."""

import dataclasses
import signal

import pytest

from vllm_supervisor.core.exit_status import (
    Asked,
    ExitEvidence,
    ExitReading,
    ended,
    give_up_status,
    interpret,
    signal_of,
)
from vllm_supervisor.core.signal_names import LAST_SIGNAL, NUMBERS, SIGNALS, signal_name
from vllm_supervisor.core.signatures import Cause, Repeat, StartPhase

LOADING, SERVING = StartPhase.LOADING, StartPhase.SERVING
NOTHING, TERM, KILL = Asked.NOTHING, Asked.TERM, Asked.KILL
ALL_RAW = [*range(-LAST_SIGNAL, 256)]
OOM_LINE = "Memory cgroup out of memory: Killed process 4711 (VLLM::EngineCor)"


def read(
    raw: int, asked: Asked = NOTHING, phase: StartPhase = SERVING, evidence: ExitEvidence | None = None, **seen: object
) -> ExitReading:
    """Interpret with evidence given by keyword."""
    return interpret(raw, asked, phase, dataclasses.replace(evidence or ExitEvidence(), **seen))  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", StartPhase)
@pytest.mark.parametrize("asked", [TERM, KILL])
def test_a_requested_end_is_clean_whatever_the_number(asked: Asked, phase: StartPhase) -> None:
    """All 256 codes and all 64 signals are clean ends of an engine we had told to stop."""
    for raw in ALL_RAW:
        reading = read(raw, asked, phase)
        assert (reading.clean, reading.cause) == (True, Cause.REQUESTED), raw
        assert reading.sentence
        assert reading.mend == ""


@pytest.mark.parametrize("phase", StartPhase)
def test_an_end_nobody_asked_for_is_never_clean(phase: StartPhase) -> None:
    """All 256 codes and all 64 signals are failures when we asked for nothing, 0 included."""
    for raw in ALL_RAW:
        reading = read(raw, NOTHING, phase)
        assert not reading.clean, raw
        assert reading.cause is not Cause.REQUESTED
        assert reading.sentence
        assert reading.mend


# Code or signal: what it means when nobody asked for it (before ready, while serving).
CRASHES = {4, 5, 6, 7, 8, 11, 16, 24, 25, 31}
CODES = {
    2: (Cause.USAGE, Cause.EXITED),
    126: (Cause.NOT_EXECUTABLE, Cause.EXITED),
    127: (Cause.NOT_EXECUTABLE, Cause.EXITED),
}


def test_every_exit_code_has_its_cause() -> None:
    """Codes 0 to 128 and 193 to 255 are plain exits but for usage and what a shell reports of the command."""
    for raw in [*range(129), *range(193, 256)]:
        expected = CODES.get(raw, (Cause.EXITED, Cause.EXITED))
        assert (read(raw, phase=LOADING).cause, read(raw, phase=SERVING).cause) == expected, raw


def test_every_signal_has_its_cause_bare_and_through_a_shell() -> None:
    """A signal reads the same as -n and as 128 + n: a crash of the program, or something from outside."""
    for number in range(1, LAST_SIGNAL + 1):
        expected = Cause.CRASHED if number in CRASHES else Cause.KILLED
        for phase in StartPhase:
            bare, shell = read(-number, phase=phase), read(128 + number, phase=phase)
            assert bare.cause == shell.cause == expected, number
            assert bare.repeat == shell.repeat
            assert signal_name(number) in bare.sentence
            assert signal_name(number) in shell.sentence


@pytest.mark.parametrize("raw", [-65, 256, 1000, -1000])
def test_what_is_no_status_is_refused(raw: int) -> None:
    """A number that no process can end with is a fault of the caller."""
    with pytest.raises(ValueError, match=str(raw)):
        read(raw)


def test_signal_numbers_are_linux_ones() -> None:
    """The table of names agrees with the kernel headers Python was built with."""
    for number, name in SIGNALS.items():
        if name != "SIGSTKFLT":  # not every Python names it
            assert signal.Signals(number) == getattr(signal, name), name
    assert NUMBERS["SIGKILL"] == 9
    assert [signal_of(raw) for raw in (-9, 137, 9, 128, 192, 193)] == [9, 9, None, None, 64, None]
    assert ended(137) == "ended with status 137 (which stands for SIGKILL)"


def test_zero_of_a_dead_engine_core_is_a_failure() -> None:
    """After its EngineCore was killed vLLM exits 0; who died first is told."""
    reading = read(0, died_first=("VLLM::EngineCore",), alive_s=4000.0)
    assert reading.cause is Cause.PART_DIED
    assert not reading.clean
    assert reading.sentence == (
        "the engine ended with status 0 while it served, 4000 s after its start: "
        "VLLM::EngineCore died first; a part of it died first and the rest shut down"
    )


def test_a_kill_is_called_out_of_memory_only_on_evidence() -> None:
    """SIGKILL alone has an unknown sender; the cgroup's counter or a kernel line makes it a lack of memory."""
    assert read(-9).cause is Cause.KILLED
    assert "sender unknown" in read(-9).sentence
    assert read(-9, oom_kills=1).cause is Cause.OUT_OF_MEMORY
    assert read(137, kernel_log=OOM_LINE).cause is Cause.OUT_OF_MEMORY
    assert read(-15, oom_kills=1).cause is Cause.KILLED
    assert read(1, oom_kills=1).cause is Cause.EXITED


def test_a_member_killed_for_memory_explains_the_end_of_the_main_process() -> None:
    """When the kernel killed EngineCore, the API server's own 0 and its last words are only the consequence."""
    reading = read(
        0,
        died_first=("VLLM::EngineCore",),
        oom_kills=1,
        first_error="Engine core process EngineCore died unexpectedly.",
    )
    assert reading.cause is Cause.OUT_OF_MEMORY
    assert reading.signature is None


@pytest.mark.parametrize(
    ("raw", "phase", "alive_s", "said"),
    [
        (0, SERVING, 5.2, "the engine stopped as told: status 0 after 5 s"),
        (-15, SERVING, 5.2, "the engine stopped as told: SIGTERM after 5 s"),
        (143, SERVING, None, "the engine stopped as told: status 143 (which stands for SIGTERM)"),
        (-2, LOADING, 3.0, "the engine stopped as told while it loaded: SIGINT after 3 s"),
    ],
)
def test_an_expected_end_is_told_calmly(raw: int, phase: StartPhase, alive_s: float | None, said: str) -> None:
    """An engine that ends after our TERM stopped as told; that is said first, then the number and its age."""
    assert read(raw, TERM, phase, alive_s=alive_s).sentence == said


def test_a_kill_during_our_stop_that_was_not_ours_is_said() -> None:
    """A stop we asked for stays clean if somebody else killed the engine in it, but the sentence tells."""
    assert "by somebody else" in read(-9, TERM).sentence
    assert "for lack of memory" in read(-9, TERM, oom_kills=1).sentence
    assert "we killed it" in read(-9, KILL).sentence


def test_a_bus_error_is_blamed_on_full_shared_memory_only_if_it_is_full() -> None:
    """SIGBUS with /dev/shm full is worth one more start after a clean-up; otherwise it is a crash."""
    full = read(-7, phase=LOADING, shm_used=0.99)
    assert (full.cause, full.repeat, full.retries) == (Cause.SHM_FULL, Repeat.SPECIAL, 1)
    assert read(-7, phase=LOADING, shm_used=0.5).cause is Cause.CRASHED
    assert read(-7, phase=LOADING).cause is Cause.CRASHED


@pytest.mark.parametrize("raw", [2, 126, 127, -4, -31, 132])
def test_failures_that_must_repeat_are_deterministic_before_ready(raw: int) -> None:
    """Usage, a command that cannot run, a missing instruction, a forbidden call: tried once, unless it had worked."""
    before = read(raw, phase=LOADING)
    assert (before.repeat, before.retries) == (Repeat.DETERMINISTIC, 0)
    assert read(raw, phase=SERVING).repeat is Repeat.TRANSIENT


def test_a_signature_decides_over_the_number() -> None:
    """The first error block tells more than the status: it gives class, sentence, mend and number of tries."""
    reading = read(1, phase=LOADING, first_error="OSError: You are trying to access a gated repo.\nMake sure")
    assert reading.signature is not None
    assert (reading.signature.id, reading.repeat, reading.retries) == ("hub-denied", Repeat.DETERMINISTIC, 0)
    assert reading.mend == reading.signature.mend
    assert reading.meaning == "the model hub refuses access to this model"


def test_unified_memory_is_worth_another_try() -> None:
    """Where CPU and GPU share memory, a KV cache that did not fit may fit once the page cache is gone."""
    block = "ValueError: No available memory for the cache blocks."
    assert read(1, phase=LOADING, first_error=block).retries == 0
    assert read(1, phase=LOADING, first_error=block, unified_memory=True).retries == 1


def test_a_signature_is_found_even_where_we_ended_the_engine() -> None:
    """A load that hangs after a fatal line is killed by us; what it printed still says whether to try again."""
    reading = read(-9, KILL, LOADING, first_error="RuntimeError: Not enough memory for 3 blocks of KV cache")
    assert reading.clean
    assert (reading.repeat, reading.retries) == (Repeat.DETERMINISTIC, 0)


LOST = "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."
FAULT = "NVRM: Xid (PCI:0000:01:00): 31, pid=7"
NO_MEMORY = "NVRM: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051)"
WRAPPER = "RuntimeError: Engine core initialization failed. See root cause above."
DIED = "RuntimeError: Engine core process EngineCore died unexpectedly."


@pytest.mark.parametrize(
    ("first_error", "kernel_log", "found"),
    [
        ("", LOST, "gpu-off-the-bus"),
        ("", FAULT, "gpu-fault"),
        ("", NO_MEMORY, "driver-memory"),
        (WRAPPER, LOST, "gpu-off-the-bus"),
        (WRAPPER, NO_MEMORY, "driver-memory"),
        (DIED, FAULT, "gpu-fault"),
        ("RuntimeError: CUDA error: unspecified launch failure", LOST, "gpu-off-the-bus"),
        ("RuntimeError: CUDA error: unspecified launch failure", FAULT, None),
        ("ValueError: something of its own", NO_MEMORY, None),
        ("ModuleNotFoundError: No module named 'x'", NO_MEMORY, "import-failed"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", LOST, "illegal-access"),
        ("torch.OutOfMemoryError: CUDA out of memory.", NO_MEMORY, "gpu-memory-loading"),
        ("vllm: error: unrecognized arguments: --x", LOST, "unknown-option"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "", "illegal-access"),
        ("ValueError: something of its own", "", None),
    ],
)
def test_the_engines_own_first_error_outranks_the_kernels_word(
    first_error: str, kernel_log: str, found: str | None
) -> None:
    """The kernel explains an end that the engine does not: nothing was said, or only that something died."""
    reading = read(1, phase=LOADING, first_error=first_error, kernel_log=kernel_log)
    assert (reading.signature and reading.signature.id) == found
    if found is None:
        assert first_error in reading.meaning


def test_a_kernel_line_is_told_with_its_number() -> None:
    """What the kernel said stands in the sentence."""
    assert read(-6, kernel_log=FAULT).meaning == "the GPU driver reported a fault (Xid): 31"
    assert read(-6, kernel_log=LOST).cause is Cause.GPU_LOST


def test_a_sigterm_from_outside_during_the_load_is_no_crash_of_vllm() -> None:
    """The traceback that ends in `KeyboardInterrupt: terminated` means that somebody sent SIGTERM."""
    reading = read(130, phase=LOADING, first_error="Traceback\nKeyboardInterrupt: terminated")
    assert reading.cause is Cause.KILLED
    assert "SIGTERM" in reading.sentence


def test_an_unknown_error_is_quoted_before_ready_and_only_named_afterwards() -> None:
    """Before ready no prompt exists, so the line is shown; a serving engine's error may hold one: only its type is."""
    block = (
        "(EngineCore pid=7) ERROR 11-29 21:07:55 [core.py:1510] Traceback (most recent call last):\n"
        '  File "/x/y.py", line 3, in f\n'
        "    raise WidgetError(prompt)\n"
        "lib.WidgetError: my secret prompt 17\n"
    )
    assert "(first error: lib.WidgetError: my secret prompt 17)" in read(1, phase=LOADING, first_error=block).sentence
    assert read(1, phase=SERVING, first_error=block).sentence.endswith("(first error: lib.WidgetError)")
    assert "secret" not in read(1, phase=SERVING, first_error="my secret prompt").sentence
    assert "(first error: plain words)" in read(1, phase=LOADING, first_error="\nplain words\nmore").sentence
    assert len(read(1, phase=LOADING, first_error="ValueError: " + "x" * 999).sentence) < 400


def test_fingerprints_join_what_looks_alike() -> None:
    """Numbers and addresses do not tell two failures apart; status, text and signature do."""

    def mark(raw: int, block: str) -> str:
        return read(raw, phase=LOADING, first_error=block).fingerprint

    assert mark(1, "FooError: at 0x7fab pid 12") == mark(1, "FooError: at 0x9c pid 3")
    assert mark(1, "FooError: a") != mark(1, "FooError: b")
    assert mark(1, "FooError: a") != mark(-6, "FooError: a")
    assert mark(1, "Error 803: x") == mark(2, "Error 803: y") == "driver-mismatch"


def test_the_status_of_giving_up_tells_why() -> None:
    """75 if only a new container or a reboot helps, 69 if a budget is spent, 78 if the reason repeats."""
    lost = read(1, phase=LOADING, first_error="Failed to initialize NVML: Unknown Error")
    usage = read(2, phase=LOADING)
    assert [give_up_status(lost, spent=spent) for spent in (True, False)] == [75, 75]
    assert [give_up_status(usage, spent=spent) for spent in (True, False)] == [69, 78]

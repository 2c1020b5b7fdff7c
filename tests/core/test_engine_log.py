"""The first error of an incarnation and its root, on lines as vLLM prints them."""

from pathlib import Path

import pytest

from vllm_supervisor.core.engine_log import EngineLog, Line, says_dead, strip

DATA = Path(__file__).parents[1] / "data"

# Recorded from vLLM 0.32.0: what a person must read, and words that stand in the block.
RECORDED = {
    "bad-option": ("vllm: error: unrecognized arguments: --no-such-option 3", "usage: vllm"),
    "bad-value": (
        "vllm serve: error: argument --max-model-len: invalid human_readable_int_or_auto value: 'banana'",
        "usage: vllm serve",
    ),
    "missing-model": (
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name'",
        "validate_repo_id(arg_value)",
    ),
    "too-long": (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig Value error, User-specified max_",
        "For further information visit",
    ),
    "kv-cache": (
        "ValueError: To serve at least one request with the model's max seq len (4000000), (3.81 GiB KV cache is needed",
        "EngineCore failed to start.",
    ),
    "address-in-use": ("OSError: [Errno 98] Address already in use", "sock.bind(path)"),
}


def read(*lines: str) -> EngineLog:
    """Feed lines, a second apart."""
    log = EngineLog()
    for number, line in enumerate(lines):
        log.add(line, float(number))
    return log


def recorded(name: str) -> EngineLog:
    """Feed a recording."""
    return read(*(DATA / f"{name}.txt").read_text().splitlines())


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_the_root_cause_of_a_failed_start_is_named(name: str) -> None:
    """The recorded output of each failure gives the line a person needs."""
    cause, block = RECORDED[name]
    error = recorded(name).error()
    assert error is not None
    assert error.cause.startswith(cause)
    assert not error.wrapper
    assert any(block in line for line in error.lines)


def test_a_killed_core_leaves_only_a_wrapper() -> None:
    """When EngineCore was killed the API server says that it is dead, and nobody says why: that is told as it is."""
    error = recorded("core-killed").error()
    assert error is not None
    assert error.wrapper
    assert error.cause.startswith("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.")


def test_an_orderly_life_has_no_error() -> None:
    """The lines of a good start, up to the KILL of the main process, hold no error."""
    assert recorded("main-killed").error() is None


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ("(APIServer pid=1) plain", Line("APIServer pid=1", "", "plain")),
        (
            "(EngineCore_DP0 pid=68) ERROR 11-29 21:14:52 [core.py:906] boom",
            Line("EngineCore_DP0 pid=68", "ERROR", "boom"),
        ),
        (
            "\x1b[1;36m(Worker_TP0 pid=70)\x1b[0;0m \x1b[31mERROR\x1b[0m 11-29 21:14:52 [a.py:9] x",
            Line("Worker_TP0 pid=70", "ERROR", "x"),
        ),
        ("[rank0]: ValueError: x", Line("", "", "ValueError: x")),
        ("[rank0]:[W1129 21:12:30.972181007 utils.cpp:68] Warning: y", Line("", "WARNING", "Warning: y")),
        ("E1129 21:07:20.304000 11449 torch/_library/triton.py:53] z", Line("", "ERROR", "z")),
        ("INFO:     Application startup complete.", Line("", "INFO", "Application startup complete.")),
        ('(EngineCore pid=5)   File "x.py", line 3', Line("EngineCore pid=5", "", '  File "x.py", line 3')),
        ("2026-01-02T03:04:05.678Z INFO loading", Line("", "INFO", "loading")),
        ("2026-01-02T03:04:05+01:00 [warn] slow", Line("", "WARNING", "slow")),
        ("2026-01-02 03:04:05,678 - engine.loader - ERROR - no file", Line("", "ERROR", "no file")),
        ("[2026-01-02 03:04:05 TP0] Load weight begin.", Line("", "", "Load weight begin.")),
        ("[2026-01-02 03:04:05] ERROR: boom", Line("", "ERROR", "boom")),
        ("2026-01-02 is no stamp", Line("", "", "2026-01-02 is no stamp")),
        ('{"ts": 1, "level": "warn", "msg": "slow\\nvery"}', Line("", "WARNING", "slow very")),
        (
            '{"levelname": "ERROR", "message": "no", "exc_info": "Traceback\\nKeyError: 1"}',
            Line("", "ERROR", "no: KeyError: 1"),
        ),
        ('{"no": "message"}', Line("", "", '{"no": "message"}')),
        ('{"message": 3}', Line("", "", '{"message": 3}')),
        ("{not json", Line("", "", "{not json")),
        ("(not a prefix) x", Line("", "", "(not a prefix) x")),
        ("\x1b]0;title\x07 \x1b[?25lx\0", Line("", "", " x")),
        ("", Line("", "", "")),
    ],
)
def test_prefixes_come_off(raw: str, line: Line) -> None:
    """Process, rank, level, time, file and escape sequences are taken off and told apart."""
    assert strip(raw) == line


CORE = "(EngineCore pid=2) ERROR 01-01 00:00:00 [core.py:1] "
API = "(APIServer pid=1) "


def test_the_first_error_wins_over_its_wrappers() -> None:
    """What the core said first is the cause; the API server's traceback after it is not."""
    log = read(
        CORE + "EngineCore failed to start.",
        CORE + "Traceback (most recent call last):",
        CORE + '  File "core.py", line 1, in run',
        API + "INFO 01-01 00:00:00 [x.py:1] something else meanwhile",
        CORE + "ValueError: No available memory for the cache blocks.",
        API + "Traceback (most recent call last):",
        API + '  File "api.py", line 1, in main',
        API + "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    )
    error = log.error()
    assert error is not None
    assert error.cause == "ValueError: No available memory for the cache blocks."
    assert error.source == "EngineCore pid=2"
    assert error.lines[0] == "EngineCore failed to start."


def test_a_wrapper_counts_only_while_nothing_better_is_known() -> None:
    """A wrapper is told if it is all there is, and gives way to a root that comes after it."""
    wrapper = API + "RuntimeError: Engine core initialization failed. See root cause above."
    error = read(wrapper).error()
    assert error is not None
    assert error.wrapper
    error = read(
        wrapper, API + "INFO 01-01 00:00:00 [x.py:1] x", CORE + "torch.OutOfMemoryError: CUDA out of memory"
    ).error()
    assert error is not None
    assert error.cause == "torch.OutOfMemoryError: CUDA out of memory"


def test_a_chain_names_its_first_exception() -> None:
    """Of exceptions that caused each other the first printed is the root."""
    error = read(
        "Traceback (most recent call last):",
        '  File "a.py", line 1',
        "    x[1]",
        "    ~^^^",
        "OSError: [Errno 28] No space left on device",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        '  File "b.py", line 1',
        "ValueError: could not load",
        "plain line after it",
    ).error()
    assert error is not None
    assert error.causes == ["OSError: [Errno 28] No space left on device", "ValueError: could not load"]
    assert "plain line after it" not in error.lines


def test_noise_and_retried_errors_are_no_errors() -> None:
    """The resource tracker's complaints and errors that are tried again begin no block."""
    log = read(
        CORE + "Error retrieving safetensors: Repo id must be in the form 'repo_name', retrying 1 of 2",
        "resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 2 leaked shared_memory objects",
        "Traceback (most recent call last):",
        '  File "/usr/lib/python3.11/multiprocessing/resource_tracker.py", line 239, in main',
        "KeyError: '/psm_a933233a'",
        "(APIServer pid=1) WARNING 01-01 00:00:00 [x.py:1] error: this is a warning",
    )
    assert log.error() is None
    log.add("Fatal Python error: Segmentation fault", 9.0)
    error = log.error()
    assert error is not None
    assert error.cause == "Fatal Python error: Segmentation fault"


def test_the_error_of_a_crash_is_near_its_end() -> None:
    """An error of a single request hours ago is not the cause of a crash now."""
    log = EngineLog()
    log.add(API + "ERROR 01-01 00:00:00 [x.py:1] one request was bad", 10.0)
    log.add(API + "INFO 01-01 00:00:00 [x.py:1] on we go", 11.0)
    log.add(CORE + "RuntimeError: CUDA error: an illegal memory access was encountered", 7200.0)
    first, last = log.error(), log.error(since=7140.0)
    assert first is not None
    assert last is not None
    assert first.cause == "one request was bad"
    assert last.cause.startswith("RuntimeError: CUDA error")
    assert log.error(since=8000.0) is None


def test_everything_is_bounded() -> None:
    """Neither endless lines, nor endless blocks, nor endless errors grow without limit."""
    log = EngineLog()
    for number in range(2000):
        log.add("x" * 100_000, float(number))
        log.add(f"(P{number} pid=1) ERROR 01-01 00:00:00 [x.py:1] e{number}", float(number))
    for number in range(1000):
        log.add(CORE + f"  frame {number}", 3000.0)
    assert len(log.tail()) == 500
    assert max(map(len, log.tail())) <= 2000
    assert log.tail(2) == [CORE + "  frame 998", CORE + "  frame 999"]
    assert log.tail(0) == []
    error = log.error(since=3000.0)
    assert error is not None
    assert len(error.lines) == 120
    assert (error.lines[0], error.lines[-1]) == ("  frame 0", "  frame 999")


@pytest.mark.parametrize(
    ("line", "dead"),
    [
        ("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", True),
        (API + "ERROR 01-01 00:00:00 [async_llm.py:1] vllm.v1.engine.exceptions.EngineDeadError: x", True),
        (CORE + "ERROR 01-01 00:00:00 [core.py:1] EngineCore encountered a fatal error.", True),
        ('INFO:     127.0.0.1:5 - "GET /EngineDeadError HTTP/1.1" 404 Not Found', False),
        (API + "INFO 01-01 00:00:00 [logger.py:1] Received request cmpl-1: prompt: 'EngineDeadError: x'", False),
        ("    raise EngineDeadError()", False),
    ],
)
def test_only_an_error_of_the_engine_says_that_it_is_dead(line: str, dead: bool) -> None:
    """The words in a path or a prompt, which any client may choose, say nothing."""
    assert says_dead(line) is dead


@pytest.mark.parametrize(
    "line", ['{"a":' * 5000, '{"level": "ERROR", "message": ' + "9" * 5000 + "}", '{"msg": "\udc80"}', "{", "{}"]
)
def test_a_line_that_only_looks_like_json_is_a_plain_line(line: str) -> None:
    """Whatever an engine prints behind a brace, reading it ends nothing."""
    assert strip(line).level == ""

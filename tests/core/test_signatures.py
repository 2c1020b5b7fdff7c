"""Each row of the signature table finds its own failure, names it for a person, and nothing harmless."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_supervisor.core.signatures import SIGNATURES, Repeat, Signature, StartPhase, match

LOADING, SERVING = StartPhase.LOADING, StartPhase.SERVING
BY_ID = {signature.id: signature for signature in SIGNATURES}

# What engines, libraries and the kernel print, as measured on vLLM 0.32 or as the public reports quote it.
SAMPLES: tuple[tuple[str, str], ...] = (
    ("unknown-option", "vllm: error: unrecognized arguments: --no-such-option=secret /m"),
    ("unknown-option", "vllm: error: unrecognized arguments: serve"),
    ("bad-option-value", "vllm serve: error: argument --dtype: invalid choice: 'bogus' (choose from 'auto', 'half')"),
    ("bad-option-value", "vllm serve: error: argument --port: expected one argument"),
    ("missing-argument", "vllm bench: error: the following arguments are required: subcommand"),
    (
        "config-invalid",
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
            "  Value error, Total number of attention heads (2) must be divisible by tensor parallel size (3). [type=value"
        ),
    ),
    ("import-failed", "Traceback (most recent call last):\n  ...\nModuleNotFoundError: No module named 'triton'"),
    ("numa-nodes", "AssertionError: Not enough allowed NUMA nodes to bind threads of 7 local CPUWorkers."),
    (
        "ipc-path-too-long",
        'zmq.error.ZMQError: ipc path "/very/long" is longer than 107 characters (sizeof(sun_path)).',
    ),
    ("model-invalid", "  Value error, Invalid repository ID or local directory specified: '/m/empty'.\nPlease verify"),
    ("model-path", "HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/m/none'."),
    ("model-config-missing", "OSError: /m does not appear to have a file named config.json."),
    ("model-not-found", "404 Client Error.\n\nEntry Not Found for url: ..."),
    ("model-not-found", "huggingface_hub.errors.RepositoryNotFoundError: ..."),
    ("hub-denied", "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: ..."),
    ("hub-denied", "OSError: You are trying to access a gated repo."),
    (
        "hub-offline",
        (
            "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder for the "
            "specified revision on the local disk and outgoing traffic has been disabled."
        ),
    ),
    ("hub-unreachable", "HTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/api/models/x"),
    ("hub-unreachable", "HTTPError: 504 Server Error: Gateway Time-out for url: https://huggingface.co/x"),
    ("hub-unreachable", "MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded"),
    ("hub-unreachable", "LocalEntryNotFoundError: ... Please check your connection and try again"),
    ("architecture-unsupported", "ValueError: Model architectures ['Foo'] are not supported for now. Supported"),
    ("architecture-unsupported", "ValueError: Model architecture Foo was supported in vLLM until v0.9, and is not"),
    (
        "architecture-inspection",
        "ValueError: Model architectures ['Foo'] failed to be inspected. Please check the logs",
    ),
    ("no-device", "RuntimeError: Failed to infer device type, please set the environment variable"),
    ("bfloat16", "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0."),
    ("too-few-gpus", "ValueError: please ensure that world_size (8) is less than than max local gpu count (4)"),
    ("too-few-gpus", "torch.AcceleratorError: CUDA error: invalid device ordinal"),
    ("too-few-gpus", "AssertionError: DP adjusted local rank 1 is out of bounds for 1 devices."),
    ("driver-mismatch", "RuntimeError: Error 803: system has unsupported display driver / cuda driver combination"),
    ("driver-mismatch", "RuntimeError: Error 804: forward compatibility was attempted on non supported HW"),
    ("fabric-manager", "RuntimeError: Error 802: system not yet initialized"),
    ("gpu-access-lost", "NVMLError: Failed to initialize NVML: Unknown Error"),
    ("cuda-unknown", "cudart init failure: 999"),
    ("cuda-unknown", "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment"),
    ("port-in-use", "OSError: [Errno 98] Address already in use"),
    ("internal-port", "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:45123')"),
    ("internal-port", "DistNetworkError: The server socket has failed to listen. port: 29500, EADDRINUSE"),
    (
        "kv-cache-too-small",
        (
            "ValueError: To serve at least one request with the model's max seq len (32768), (4.0 GiB KV cache is needed, "
            "which is larger than the available KV cache memory (1.0 GiB). Based on the available memory, the estimated "
            "maximum model length is 8192. Try increasing"
        ),
    ),
    (
        "kv-cache-too-small",
        "The model's max seq len (8192) is larger than the maximum number of tokens that can be stored in KV cache",
    ),
    ("no-cache-blocks", "ValueError: No available memory for the cache blocks. Try increasing"),
    ("no-cache-blocks", "RuntimeError: Not enough memory for 12 blocks of KV cache"),
    (
        "free-memory",
        (
            "ValueError: Free memory on device cuda:0 (36.75/121.7 GiB) on startup is less than desired GPU memory "
            "utilization (0.85, 103.38 GiB)."
        ),
    ),
    ("memory-profiling", "AssertionError: Error in memory profiling. Initial free memory 10 GiB"),
    (
        "memory-not-back",
        "  File worker.py, in init_device\n    self.init_snapshot = MemorySnapshot()\nRuntimeError: CUDA error: out of memory",
    ),
    ("gpu-memory-loading", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    (
        "shm-nccl",
        "Error while creating shared memory segment /dev/shm/nccl-Ab12 (size 9637888), error: No space left on device",
    ),
    ("shm-space", "RuntimeError: Insufficient space in /dev/shm for the ring: 64 MiB required, 1 MiB free."),
    ("shm-space", "SharedOffloadRegion ...\nOSError: [Errno 14] Bad address"),
    ("disk-full", "OSError: [Errno 28] No space left on device: '/root/.cache/x'"),
    ("compile-cache", "RuntimeError: ... failed, leading to a corrupted compilation artifact. We recommend"),
    ("compile-cache", "RuntimeError: failed to get the hash of the compiled graph"),
    ("compile-cache", "  File /root/.cache/vllm/torch_compile_cache/ab/inductor.py\n    load()\nAssertionError"),
    ("start-timeout", "TimeoutError: Timed out waiting for engine core processes to start. This is often"),
    ("start-timeout", "TimeoutError: Timed out waiting for engines to send initial message on input socket."),
    (
        "engine-core-start",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ),
    ("interrupted", "Traceback\n  ...\nKeyboardInterrupt: terminated"),
    ("part-died", "RuntimeError: Engine core process EngineCore_DP0 died unexpectedly."),
    ("part-died", "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor."),
    ("rpc-timeout", "TimeoutError: RPC call to sample_tokens timed out."),
    ("illegal-access", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ("nccl-timeout", "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)"),
)
SERVING_SAMPLES = (
    ("gpu-memory-serving", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    ("part-died", "EngineCore encountered a fatal error."),
    ("part-died", "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."),
    ("rpc-timeout", "TimeoutError: RPC call to execute_model timed out."),
    ("illegal-access", "Process group watchdog thread terminated with exception: CUDA error"),
)
KERNEL_SAMPLES = (
    ("gpu-off-the-bus", "NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', GPU has fallen off the bus."),
    ("gpu-fault", "NVRM: Xid (PCI:0000:01:00): 31, pid=1234, name=VLLM::EngineCor, MMU Fault"),
    ("driver-memory", "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051)"),
)


def named(signature: Signature | None) -> str | None:
    """Name what was found."""
    return signature.id if signature else None


@pytest.mark.parametrize(("name", "block"), SAMPLES)
def test_a_block_of_a_failed_start_is_named(name: str, block: str) -> None:
    """What an engine prints when it cannot start is named by its row, bare or behind log prefixes."""
    assert named(match(block, LOADING)) == name
    prefix = "(EngineCore_DP0 pid=68) ERROR 11-29 21:07:55 [core.py:1510] "
    assert named(match("\n".join(prefix + line for line in block.splitlines()), LOADING)) == name


@pytest.mark.parametrize(("name", "block"), SERVING_SAMPLES)
def test_a_block_of_a_serving_engine_is_named(name: str, block: str) -> None:
    """What an engine prints when it dies at work is named by its row."""
    assert named(match(block, SERVING)) == name


@pytest.mark.parametrize(("name", "line"), KERNEL_SAMPLES)
def test_a_kernel_line_is_named_only_as_kernel_log(name: str, line: str) -> None:
    """Kernel rows are looked for in the kernel log and nowhere else."""
    assert named(match(line, SERVING, kernel=True)) == name
    assert match(line, SERVING) is None


def test_every_row_has_a_sample() -> None:
    """No row of the table goes without a text that it was seen to match."""
    seen = {name for name, _ in (*SAMPLES, *SERVING_SAMPLES, *KERNEL_SAMPLES)}
    assert seen == BY_ID.keys()


def test_rows_are_well_formed() -> None:
    """Each row has its own id, a valid pattern, words for a person and a public source; what repeats is bounded."""
    assert len(BY_ID) == len(SIGNATURES)
    for row in SIGNATURES:
        re.compile(row.pattern)
        assert row.sentence
        assert row.mend
        assert row.source
        assert re.fullmatch(r"[a-z0-9-]+", row.id)
        if row.repeat is Repeat.DETERMINISTIC:
            assert row.retries in {0, 1}, row.id
        if row.backoff:
            assert row.retries
            assert 0 < row.backoff[0] <= row.backoff[1]
        if row.outside_only:
            assert row.repeat is Repeat.SPECIAL


@pytest.mark.parametrize(
    "line",
    [
        "Error retrieving file list: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/m', retrying 1 of 2",
        "No available shared memory broadcast block found in 60 seconds.",
        "Triton kernel JIT compilation during inference",
        "resource_tracker: There appear to be 3 leaked shared_memory objects to clean up at shutdown",
        "Fatal Python error: _enter_buffered_busy: could not acquire lock for <_io.BufferedWriter name='<stderr>'>",
        "WARNING Found ulimit of 20000; errors like `OSError: [Errno 24] Too many open files`",
        "",
    ],
)
def test_harmless_lines_name_nothing(line: str) -> None:
    """Lines that also stand in the log of a healthy engine are no root of anything."""
    assert match(line, LOADING) is None
    assert match(line, SERVING) is None


def test_the_first_exact_failure_is_the_root() -> None:
    """In a chain of exceptions the first is the root, and a wrapper counts only when nothing more exact is there."""
    memory = "torch.OutOfMemoryError: CUDA out of memory."
    port = "OSError: [Errno 98] Address already in use"
    wrapper = "RuntimeError: Engine core initialization failed. See root cause above."
    assert named(match(f"{memory}\n{port}", LOADING)) == "gpu-memory-loading"
    assert named(match(f"{port}\n{memory}", LOADING)) == "port-in-use"
    assert named(match(f"{wrapper}\n{memory}", LOADING)) == "gpu-memory-loading"
    assert named(match(wrapper, LOADING)) == "engine-core-start"


def test_a_retry_line_does_not_hide_the_root_behind_it() -> None:
    """A failure that was tried again is passed over for the one that ended the engine."""
    herring = "ERROR Repo id must be in the form 'a' or 'a/b': '/m', retrying 1 of 2"
    assert (
        named(match(f"{herring}\nValueError: No available memory for the cache blocks.", LOADING)) == "no-cache-blocks"
    )


def test_the_detail_is_quoted_but_no_value_of_an_option() -> None:
    """A person reads which option is unknown, and never what stood behind its equals sign."""
    text = "vllm: error: unrecognized arguments: --api-kye=secret-1 --other"
    assert BY_ID["unknown-option"].tell(text) == "the engine does not know an argument it was given: --api-kye"
    assert BY_ID["unknown-option"].tell("unrecognized arguments: serve") == BY_ID["unknown-option"].sentence
    assert "secret" not in BY_ID["bad-option-value"].tell("error: argument --port: invalid int value: 'secret'")
    long = "1 validation error for VllmConfig\n  Value error, " + "x" * 500
    assert len(BY_ID["config-invalid"].tell(long)) < 300


@given(st.text(max_size=500), st.sampled_from(StartPhase), st.booleans())
def test_any_text_can_be_matched(text: str, phase: StartPhase, kernel: bool) -> None:
    """No text makes the search raise, and what is found applies to the phase."""
    found = match(text, phase, kernel=kernel)
    assert found is None or found.phase in {None, phase}


@pytest.mark.parametrize(
    "near",
    ["world_size ", "error: unrecognized arguments: a ", "MemorySnapshot ", "vllm_offload_", "torch_compile_cache "],
)
def test_a_hostile_block_is_searched_in_bounded_time(near: str) -> None:
    """Of a megabyte of near misses only the beginning is searched, so no pattern can hold the loop."""
    start = time.process_time()
    assert match(near * (1_000_000 // len(near)), LOADING) is None or near.startswith("error")
    assert time.process_time() - start < 3

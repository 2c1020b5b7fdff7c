"""What the stand-in engine prints: lines in vLLM's form, its error texts by signature, and ugly output on demand.

Rules: vLLM logs to standard output with a `(APIServer pid=N)` prefix, tracebacks of the main process go to standard
error. A reader that went away is ignored. The key phrase of each error is vLLM's own (source file beside it), since
that is what a reader has to recognise.
"""

import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Signature:
    """An error text: `cause` is printed by `process`, `wrapper` by the main process after it; then it exits `status`."""

    process: str  # "APIServer", "EngineCore" or "" for plain text on standard error
    cause: str
    status: int = 1


ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
_ENGINE, _MAIN = "EngineCore", "APIServer"
SIGNATURES: dict[str, Signature] = {
    # argparse
    "usage": Signature(
        "", "usage: vllm serve [model_tag] [options]\nvllm: error: unrecognized arguments: --no-such-option", 2
    ),
    # transformers_utils/config.py
    "missing_model": Signature(
        _MAIN, "ValueError: Invalid repository ID or local directory specified: '/models/none'."
    ),
    "gated_model": Signature(_MAIN, "OSError: You are trying to access a gated repo. 401 Client Error."),
    "hub_down": Signature(
        _MAIN, "requests.exceptions.ConnectTimeoutError: MaxRetryError: huggingface.co, 504 Server Error"
    ),
    # v1/core/kv_cache_utils.py
    "kv_too_small": Signature(
        _ENGINE,
        "ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed, which is larger than the available KV cache memory (3.1 GiB).",
    ),
    "no_kv": Signature(_ENGINE, "ValueError: No available memory for the cache blocks."),
    # v1/worker/utils.py
    "free_memory": Signature(
        _ENGINE,
        "ValueError: Free memory on device cuda:0 (11.2/121.6 GiB) on startup is less than desired GPU memory utilization (0.9, 109.4 GiB).",
    ),
    "cuda_oom": Signature(_ENGINE, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    "nvml": Signature(_MAIN, "RuntimeError: Failed to initialize NVML: Unknown Error"),
    "cuda_999": Signature(_ENGINE, "RuntimeError: CUDA error 999: cudaErrorUnknown"),
    "address_in_use": Signature(_MAIN, "OSError: [Errno 98] Address already in use"),
    "zmq_address": Signature(_ENGINE, "zmq.error.ZMQError: Address already in use"),
    "shm_full": Signature(
        _ENGINE,
        "OSError: [Errno 28] Error while creating shared memory segment /dev/shm/nccl-x: No space left on device",
    ),
    "compile_cache": Signature(_ENGINE, "RuntimeError: torch_compile_cache: corrupted compilation artifact"),
    "ready_timeout": Signature(_MAIN, "TimeoutError: Timed out waiting for engine core processes to start."),
    # v1/executor/multiproc_executor.py
    "execute_timeout": Signature(_ENGINE, "TimeoutError: RPC call to execute_model timed out."),
    "illegal_access": Signature(
        _ENGINE, "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    ),
    "unknown": Signature(_ENGINE, "RuntimeError: something nobody has seen before"),
}


def write(stream: int, data: bytes) -> None:
    """Write to standard output (1) or error (2), all of it; a closed reader is ignored."""
    view = memoryview(data)
    with contextlib.suppress(OSError):
        while view:
            view = view[os.write(stream, view) :]


def log(level: str, text: str, *, process: str = "APIServer", source: str = "launcher.py:1") -> None:
    """Print one line in vLLM's form."""
    stamp = time.strftime("%m-%d %H:%M:%S")
    write(1, f"({process} pid={os.getpid()}) {level} {stamp} [{source}] {text}\n".encode())


def name_process(name: str) -> None:
    """Show `name` as comm, as vLLM's console script has it."""
    ctypes.CDLL(None).prctl(15, name.encode()[:15], 0, 0, 0)  # PR_SET_NAME, prctl(2)


def error(name: str) -> int:
    """Print the text of a signature as vLLM's processes would, return the exit status. Raise KeyError if unknown."""
    signature = SIGNATURES[name]
    if not signature.process:
        write(2, (signature.cause + "\n").encode())
        return signature.status
    prefix = f"({signature.process} pid={os.getpid()}) "
    if signature.process == _ENGINE:
        for line in ("EngineCore failed to start.", "Traceback (most recent call last):", signature.cause):
            log("ERROR", line, process=_ENGINE, source="core.py:1512")
        prefix = f"({_MAIN} pid={os.getpid()}) "
        last = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
    else:
        last = signature.cause
    write(2, f"{prefix}Traceback (most recent call last):\n{prefix}{last}\n".encode())
    return signature.status


def progress(share: float) -> bytes:
    """Give the shard loader's line: it returns with CR and has no end of line before 100 %."""
    done = round(share * 4)
    bar = "█" * (done * 2) + " " * (8 - done * 2)
    end = "\n" if done == 4 else "\r"
    return f"Loading safetensors checkpoint shards: {done * 25:3d}% Completed | {bar} | {done}/4 [00:00<00:00]{end}".encode()


_ANSI = b"\x1b[1;31mERROR\x1b[0m \x1b[2K\x1b[1Acoloured and moving \x1b]0;title\x07line\x1b[0m\n"
_INVALID = b"not utf-8: \xff\xfe\xc3\x28 \x00 end\n"


def long_line(size: int) -> bytes:
    """One line of `size` bytes, its end of line included."""
    return b"x" * max(0, size - 1) + b"\n"


# What the log faults print at once, given their number.
ON_DEMAND: dict[str, Callable[[int], bytes]] = {
    "log_ansi": lambda _: _ANSI,
    "log_invalid": lambda _: _INVALID,
    "log_long": long_line,
}

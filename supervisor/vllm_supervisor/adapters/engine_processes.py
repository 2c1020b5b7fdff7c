"""Reads what the engine's processes do, from /proc: alive or not, CPU time by role, compilers among them.

Rules:
* The caller says which processes are the engine's; nothing is searched for by name.
* Roles are told by the titles vLLM gives its processes (`VLLM::EngineCore`, `VLLM::Worker…`, cut to 15 characters by
  the kernel); everything else that is no compiler counts as the API server.
* A process that ends between two reads is simply not there. Zombies are not alive.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from vllm_supervisor.core.samples import ProcessSample

_TICKS = os.sysconf("SC_CLK_TCK")
_CORE, _WORKER = "VLLM::EngineCor", "VLLM::Worker"
# What a kernel's compile at run time starts: CUDA's tools, Triton's and inductor's.
_COMPILERS = ("nvcc", "ptxas", "cicc", "cudafe", "nvlink", "triton", "clang", "cc1plus", "ninja")


def io_bytes(pid: int) -> int | None:
    """Return how many bytes a process and its reaped children have read and written, by system calls and from disks.

    None: it has ended, or is not ours to read (proc(5) on /proc/PID/io).
    """
    try:
        with open(f"/proc/{pid}/io", "rb", buffering=0) as file:  # noqa: PTH123 - once a second for each process
            fields = dict(line.split(b": ") for line in file.read().splitlines())
    except (OSError, ValueError):
        return None
    return sum(int(fields.get(name, 0)) for name in (b"rchar", b"wchar", b"read_bytes", b"write_bytes"))


def process_sample(main: int, pids: Iterable[int]) -> ProcessSample:
    """Return one sample of the processes `pids`; the engine lives as long as its process `main` does."""
    alive = False
    cpu: dict[str, float] = {}
    compilers = 0
    for pid in {main, *pids}:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        if not fields or fields[0] in {"Z", "X"}:
            continue
        alive = alive or pid == main
        if name.startswith(_COMPILERS):
            compilers += 1
            continue
        role = "core" if name.startswith(_CORE) else "worker" if name.startswith(_WORKER) else "api"
        cpu[role] = cpu.get(role, 0.0) + (int(fields[11]) + int(fields[12])) / _TICKS
    return ProcessSample(alive, cpu.get("api"), cpu.get("core"), cpu.get("worker"), compilers)

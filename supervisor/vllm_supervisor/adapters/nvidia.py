"""What the NVIDIA driver tells of its GPUs: their names from /proc, names and memory from NVML or nvidia-smi.

Rules:
* Names in /proc cost nothing and are asked first. NVML (the optional package nvidia-ml-py) and nvidia-smi may take seconds
  and may hang with a wedged driver: they are asked in a thread, within a limit, and only when the names do not tell.
* Everything that is missing, N/A or an error is a value.

Sources: /proc/driver/nvidia/gpus/*/information, nvidia-smi(1), NVML API reference (NVML_ERROR_NOT_SUPPORTED).
"""

import importlib
import os
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_supervisor.core.gpu_cards import Card
from vllm_supervisor.core.kernel_lines import card_address
from vllm_supervisor.core.memory_mode import Gpu, GpuFacts, memory_told

SMI_WITHIN = 10.0  # seconds: the first call after a boot loads the driver
_MIB = 2**20


def names(proc: Path = Path("/proc")) -> tuple[str, ...]:
    """Return the names of GPUs, and of a board that says it is one of NVIDIA's; nothing where none is seen."""
    found = [model for fields in _information(proc).values() if (model := fields.get("Model"))]
    with suppress(OSError):
        model = (proc / "device-tree/model").read_bytes().rstrip(b"\0").decode("utf-8", "replace")
        if "NVIDIA" in model:
            found.append(model)
    return tuple(found)


def _information(proc: Path) -> dict[str, dict[str, str]]:
    """Return what the driver tells of each GPU in /proc, by its directory's name: the PCI address."""
    found = {}
    for path in sorted(proc.glob("driver/nvidia/gpus/*/information")):
        with suppress(OSError):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            parts = (line.partition(":") for line in lines)
            found[path.parent.name] = {name.strip(): value.strip() for name, _, value in parts}
    return found


def cards(proc: Path = Path("/proc")) -> tuple[Card, ...]:
    """Return the cards the driver shows in /proc."""
    found = []
    for name, fields in _information(proc).items():
        minor = fields.get("Device Minor", "")
        with suppress(ValueError):  # a directory that is no address
            address = card_address(name)
            number = int(minor) if minor.isdigit() else None
            found.append(Card(address, number, fields.get("GPU UUID", ""), fields.get("Model", "")))
    return tuple(found)


def present(dev: Path = Path("/dev")) -> frozenset[int]:
    """Return the minors of the device files that are here: a container sees only those of its own cards."""
    return frozenset(minor for path in dev.glob("nvidia[0-9]*") if (minor := _minor(str(path))) is not None)


def opened(pids: Iterable[int], proc: Path = Path("/proc")) -> frozenset[int]:
    """Return the minors of the devices these processes hold open now; call it in a thread, as `Segments.find`."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            for fd in os.listdir(proc / f"{pid}/fd"):  # noqa: PTH208 - names alone are wanted
                with suppress(OSError):
                    target = os.readlink(proc / f"{pid}/fd/{fd}")  # noqa: PTH115 - the bare text is compared
                    if (minor := _minor(target)) is not None:
                        found.add(minor)
    return frozenset(found)


def _minor(path: str) -> int | None:
    number = path.rpartition("/nvidia")[2] if "/nvidia" in path else ""
    return int(number) if number.isdigit() else None


def ask(environ_path: str) -> GpuFacts:
    """Ask NVML, else nvidia-smi found on `environ_path`. Blocks up to 10 s, or for ever in a wedged driver."""
    facts = by_nvml()
    return facts if facts.gpus is not None else by_smi(environ_path)


def by_nvml(package: str = "pynvml") -> GpuFacts:
    """Ask NVML through nvidia-ml-py, if it is installed."""
    try:
        nvml: Any = importlib.import_module(package)
    except ImportError:
        return GpuFacts(None, "NVML", "nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except Exception as fault:  # noqa: BLE001 - NVML's errors are made at run time and have no common type across versions
        return GpuFacts(None, "NVML", str(fault))
    try:
        gpus = tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        return GpuFacts(gpus, "NVML")
    except Exception as fault:  # noqa: BLE001 - as above
        return GpuFacts(None, "NVML", str(fault))
    finally:
        with suppress(Exception):
            nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    """Ask one card; what it refuses to say is kept in NVML's own words, since not every refusal means the same."""
    name = f"GPU {index}"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        told = nvml.nvmlDeviceGetName(handle)
        name = told.decode("utf-8", "replace") if isinstance(told, bytes) else str(told)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except Exception as fault:  # noqa: BLE001 - as above
        return Gpu(name, memory_told(str(fault)))
    return Gpu(name, int(memory.total) or memory_told("0"), int(memory.used))


def process_memory(environ_path: str, proc: Path = Path("/proc")) -> dict[int, int]:
    """Return the GPU memory of each process in bytes, as far as the driver tells; asked only where it shows a GPU. Blocks."""
    if not _information(proc):
        return {}
    with suppress(Exception):  # NVML's errors have no common type across versions
        return _processes_by_nvml()
    query = ("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
    answer = _smi(query, environ_path)
    return {} if isinstance(answer, GpuFacts) else parse_processes(answer)


def _processes_by_nvml(package: str = "pynvml") -> dict[int, int]:
    nvml: Any = importlib.import_module(package)
    nvml.nvmlInit()
    found: dict[int, int] = {}
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                found[one.pid] = found.get(one.pid, 0) + (one.usedGpuMemory or 0)
    finally:
        with suppress(Exception):
            nvml.nvmlShutdown()
    return found


def parse_processes(text: str) -> dict[int, int]:
    """Read `pid, used_memory` (MiB) lines; a process on several cards is the sum, one without a number is left out."""
    found: dict[int, int] = {}
    for line in text.splitlines():
        pid, _, used = (word.strip() for word in line.partition(","))
        if pid.isdigit() and used.isdigit():
            found[int(pid)] = found.get(int(pid), 0) + int(used) * _MIB
    return found


def by_smi(environ_path: str) -> GpuFacts:
    """Ask nvidia-smi."""
    query = ("--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits")
    answer = _smi(query, environ_path)
    return answer if isinstance(answer, GpuFacts) else parse_smi(answer)


def _smi(query: Sequence[str], environ_path: str) -> str | GpuFacts:
    try:
        done = subprocess.run(
            ["nvidia-smi", *query],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": environ_path, "LC_ALL": "C"},
            timeout=SMI_WITHIN,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as fault:
        return GpuFacts(None, "nvidia-smi", _short(fault))
    return done.stdout.decode("utf-8", "replace")


def _short(fault: Exception) -> str:
    if isinstance(fault, subprocess.TimeoutExpired):
        return f"nvidia-smi did not answer within {SMI_WITHIN:g} s"
    if isinstance(fault, subprocess.CalledProcessError):
        return f"nvidia-smi ended with status {fault.returncode}"
    return f"nvidia-smi: {getattr(fault, 'strerror', None) or fault}"


def parse_smi(text: str) -> GpuFacts:
    """Read `name, memory.total, memory.used` (MiB) lines; what is no number says why (core/memory_mode.py)."""
    gpus = []
    for line in text.splitlines():
        words = [word.strip() for word in line.rsplit(",", 2)]
        if len(words) == 3 and words[0]:
            total = int(words[1]) * _MIB if words[1].isdigit() else 0
            used = int(words[2]) * _MIB if words[2].isdigit() else None
            gpus.append(Gpu(words[0], total or memory_told(words[1]), used))
    return GpuFacts(tuple(gpus), "nvidia-smi")

"""Whether CPU and GPU share one memory on this machine, and with that whether the guard works at all.

Rules:
* The configuration decides if it says so. Else the GPU's name does, or a driver that says that a GPU of this kind has no
  memory of its own to tell of: "not supported", which nvidia-smi writes as [N/A]. Any other refusal ([GPU is lost],
  [Unknown Error], [Insufficient Permissions] …) says nothing about the kind, and is named.
* On anything else everything is off, and that is said: a discrete GPU keeps its own books.
Source of the names: NVIDIA's product names; nvidia-smi shows their memory as [N/A] (GB10, Jetson).
"""

import re
from dataclasses import dataclass
from typing import Literal

# Whole words of GPU or board names.
_UNIFIED = re.compile(r"\b(GB10|DGX Spark|Thor|Orin|Xavier|GH200)\b", re.IGNORECASE)

# NVML_ERROR_NOT_SUPPORTED, in NVML's words and in those of nvidia-smi of all ages.
_NOT_SUPPORTED = {"n/a", "not supported", "nvml_error_not_supported"}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `memory`: bytes of its own; None: the driver knows none; text: why it does not tell. `used` if it is told."""

    name: str
    memory: int | str | None = None
    used: int | None = None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What was found. `source` says where; `gpus` None: nothing could be asked, and `problem` says why."""

    gpus: tuple[Gpu, ...] | None
    source: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Mode:
    """`on`: the guard works. `sentence` says why or why not."""

    on: bool
    sentence: str


def unified_name(name: str) -> bool:
    """Say whether a GPU or board of this name shares the machine's memory."""
    return _UNIFIED.search(name) is not None


def memory_told(answer: str) -> str | None:
    """Read what NVML or nvidia-smi says instead of a number: None for "not supported", else why it does not tell."""
    words = answer.strip().strip("[]").strip()
    return None if words.casefold() in _NOT_SUPPORTED else words or "no answer"


def by_configuration(mode: Literal["auto", "unified", "discrete", "off"]) -> Mode | None:
    """Return what the configuration says, or None where the machine has to be looked at."""
    match mode:
        case "unified":
            return Mode(on=True, sentence="memory guard on: memory.mode is unified")
        case "discrete" | "off":
            return Mode(on=False, sentence=f"memory guard off: memory.mode is {mode}")
        case _:
            return None


def by_names(names: tuple[str, ...]) -> Mode | None:
    """Return what the names alone say, or None when the driver has to be asked. No name at all: no GPU is seen."""
    if not names:
        return Mode(on=False, sentence="memory guard off: no GPU that shares the machine's memory is seen")
    shared = [name for name in names if unified_name(name)]
    if shared:
        return Mode(on=True, sentence=f"memory guard on: {shared[0]} shares the machine's memory")
    return None


def by_driver(facts: GpuFacts) -> Mode:
    """Return what the driver says."""
    gpus = facts.gpus or ()
    for gpu in gpus:
        if unified_name(gpu.name) or gpu.memory is None:
            return Mode(on=True, sentence=f"memory guard on: {gpu.name} shares the machine's memory ({facts.source})")
    silent = [f"{gpu.name}: {gpu.memory}" for gpu in gpus if isinstance(gpu.memory, str)]
    problem = facts.problem if facts.gpus is None else "; ".join(silent)
    if problem and len(silent) == len(gpus):
        sentence = f'memory guard off: the GPU cannot be asked ({problem}); set memory.mode = "unified" if it shares the memory'
        return Mode(on=False, sentence=sentence)
    own = ", ".join(gpu.name for gpu in gpus if not isinstance(gpu.memory, str)) or "no GPU"
    unknown = f"; not told by {', '.join(silent)}" if silent else ""
    return Mode(on=False, sentence=f"memory guard off: {own} has memory of its own ({facts.source}){unknown}")

"""What a person should know about a machine's memory before an engine is started on it: findings for `doctor`.

Rules:
* An error keeps an engine from starting, a warning may wedge the machine, a note is good to know.
* Nothing is said of a machine that does not share its memory with the GPU.
Sources: docs/dgx-spark.md and the reports it names.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_supervisor.core.doctor import Finding, Level
from vllm_supervisor.core.memory import GuardPolicy, Reading, gib

CHECK = "unified_memory"
DEFAULT_UTILISATION = 0.9  # vLLM 0.32
_OTHERS = 0.08  # share of the memory the system and vLLM's own host side use beside what the option counts
_CACHE_MATTERS = 0.2  # share of the memory


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What is known. `utilisation` None: the option was not given; `kv_cache_given`: --kv-cache-memory-bytes was.

    `oom_daemons` are the names of other OOM killers that run (earlyoom, systemd-oomd).
    """

    unified: bool
    reading: Reading
    policy: GuardPolicy
    utilisation: float | None = None
    kv_cache_given: bool = False
    max_model_len_given: bool = False
    oom_daemons: Sequence[str] = ()
    evicts: bool = False  # memory.evict_page_cache or memory.drop_caches
    kernel_log_problem: str = ""


def findings(facts: MemoryFacts) -> list[Finding]:
    """Return what is worth saying; nothing on a machine with a discrete GPU."""
    if not facts.unified:
        return []
    return [
        *_utilisation(facts),
        *_below_low(facts),
        *_swap(facts),
        *_oom_daemons(facts),
        *_page_cache(facts),
        *_options(facts),
        *_kernel_log(facts),
    ]


def highest_utilisation(policy: GuardPolicy) -> float:
    """The largest --gpu-memory-utilization that leaves `low` and the system their room, in steps of 0.05."""
    return int((1 - max(policy.low, policy.floor) - _OTHERS) / 0.05 + 1e-9) * 0.05


def _utilisation(facts: MemoryFacts) -> list[Finding]:
    highest = highest_utilisation(facts.policy)
    asked = DEFAULT_UTILISATION if facts.utilisation is None else facts.utilisation
    if facts.kv_cache_given or asked <= highest + 1e-9:
        return []
    given = "vLLM's default" if facts.utilisation is None else "asked for"
    pool = facts.reading.total
    left = f"it leaves {gib((1 - asked) * pool)} of {gib(pool)} to everything else, and the guard ends it at {gib(facts.policy.floor_bytes(pool))}"
    return [
        Finding(
            Level.WARNING,
            CHECK,
            f"--gpu-memory-utilization {asked:g} ({given}) is too much where CPU and GPU share one memory",
            left,
            f"give --gpu-memory-utilization {highest:.2f} or less",
        )
    ]


def _below_low(facts: MemoryFacts) -> list[Finding]:
    reading = facts.reading
    if reading.available > facts.policy.low_bytes(reading.total):
        return []
    return [
        Finding(
            Level.ERROR,
            CHECK,
            f"only {gib(reading.available)} of {gib(reading.total)} are available",
            "the launch gate waits for more than memory.low and then gives up",
            "end what uses the memory",
        )
    ]


def _swap(facts: MemoryFacts) -> list[Finding]:
    if not facts.reading.swap_total:
        return []
    return [
        Finding(
            Level.WARNING,
            CHECK,
            f"swap is on ({gib(facts.reading.swap_total)})",
            "an engine that takes too much pushes the system into swap first, and the machine crawls before it is saved",
            "swapoff -a, and take it out of /etc/fstab",
        )
    ]


def _oom_daemons(facts: MemoryFacts) -> list[Finding]:
    return [
        Finding(
            Level.WARNING,
            CHECK,
            f"{name} runs",
            "it may end a healthy engine during a load, and two watchdogs do not know of each other",
            f"stop {name}, or exclude vLLM's processes from it",
        )
        for name in facts.oom_daemons
    ]


def _page_cache(facts: MemoryFacts) -> list[Finding]:
    reading = facts.reading
    if facts.evicts or reading.cached < _CACHE_MATTERS * reading.total:
        return []
    return [
        Finding(
            Level.WARNING,
            CHECK,
            f"{gib(reading.cached)} are page cache, {gib(reading.free)} are free",
            "vLLM's start check counts free memory, not available memory, and may refuse to start",
            "set memory.evict_page_cache = true",
        )
    ]


def _options(facts: MemoryFacts) -> list[Finding]:
    found = []
    if not facts.kv_cache_given:
        found.append(
            Finding(
                Level.NOTE,
                CHECK,
                "the size of the KV cache is left to a measurement during the load",
                "page cache and compilers of a cold load are counted as the model's, so it differs from start to start",
                "once a start was good, give the size it printed as --kv-cache-memory-bytes",
            )
        )
    if not facts.max_model_len_given:
        found.append(
            Finding(
                Level.NOTE,
                CHECK,
                "--max-model-len is not given",
                "a prompt of 130,000 tokens and more has taken such machines down during its prefill",
                "give the length you need, such as --max-model-len 32768",
            )
        )
    return found


def _kernel_log(facts: MemoryFacts) -> list[Finding]:
    if not facts.kernel_log_problem:
        return []
    return [
        Finding(
            Level.NOTE,
            CHECK,
            facts.kernel_log_problem,
            "the driver says there that it found no memory, sometimes before anything else shows it",
            "kernel.dmesg_restrict=0, or CAP_SYSLOG for the supervisor",
        )
    ]

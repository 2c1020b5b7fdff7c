"""The part of `doctor` that is about one memory for CPU and GPU: gathers the facts, and has them judged."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_supervisor.adapters import memory, nvidia
from vllm_supervisor.adapters.kernel_log import KernelLog
from vllm_supervisor.core import memory_advice, memory_mode
from vllm_supervisor.core.config_sections import MemoryConfig
from vllm_supervisor.core.doctor import Finding, ok
from vllm_supervisor.core.memory import GuardPolicy
from vllm_supervisor.core.memory_advice import CHECK, MemoryFacts
from vllm_supervisor.core.vllm_words import take_apart

_UTILISATION, _KV_CACHE, _LENGTH = "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--max-model-len"


def findings(config: MemoryConfig, arguments: Sequence[str], environ: Mapping[str, str]) -> list[Finding]:
    """Judge this machine for `serve ARGUMENTS`; where nothing is guarded, say that and why."""
    proc = Path(config.proc)
    mode = memory_mode.by_configuration(config.mode) or memory_mode.by_names(nvidia.names(proc))
    mode = mode or memory_mode.by_driver(nvidia.ask(environ.get("PATH", "")))
    reading = memory.MemoryReader(proc).read()
    if not mode.on or reading is None:
        return [ok(CHECK, mode.sentence)]
    given = take_apart(arguments, {_UTILISATION, _KV_CACHE, _LENGTH}).given
    log = KernelLog(Path(config.kernel_log))
    log.close()
    facts = MemoryFacts(
        unified=True,
        reading=reading,
        policy=GuardPolicy(floor=config.floor, low=config.low),
        utilisation=_number(given.get(_UTILISATION)),
        kv_cache_given=_KV_CACHE in given,
        max_model_len_given=_LENGTH in given,
        oom_daemons=memory.oom_daemons(proc),
        evicts=config.evict_page_cache or config.drop_caches,
        kernel_log_problem=log.problem,
    )
    return memory_advice.findings(facts) or [ok(CHECK, mode.sentence)]


def _number(words: Sequence[str] | None) -> float | None:
    try:
        return float(words[0]) if words else None
    except ValueError:
        return None  # vLLM refuses it with words of its own

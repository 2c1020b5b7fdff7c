"""What in vLLM's installation, options and environment would blind the supervisor or get in its way.

Source of facts: vLLM 0.32 (vllm/envs.py, vllm/v1/metrics, vllm/entrypoints), and PyPI's `supervisor`, which vLLM's own
dependencies pull in.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm_supervisor.core.doctor import Finding, Level, ok
from vllm_supervisor.core.vllm_args import VllmOptions

TESTED = "0.32"


@dataclass(frozen=True, slots=True)
class Installation:
    """What was found of vLLM. `problem`: why there is none, else "". `supervisor_clobbered`: where PyPI's is broken."""

    path: str
    version: str
    problem: str
    supervisor_clobbered: str


def installation(facts: Installation) -> list[Finding]:
    """Judge vLLM's environment."""
    if facts.problem:
        return [
            Finding(
                Level.ERROR,
                "vllm",
                facts.problem,
                "`serve` has no engine to start",
                "set engine.command, or use --engine mock",
            )
        ]
    found = []
    if not facts.version:
        found.append(
            Finding(
                Level.NOTE, "vllm", f"the version of {facts.path} is unknown",
                f"tested with vLLM {TESTED}; of others the facts may differ", "look once: vllm --version",
            )
        )  # fmt: skip
    elif not facts.version.startswith(f"{TESTED}."):
        found.append(
            Finding(
                Level.NOTE, "vllm", f"{facts.path} is vLLM {facts.version}",
                f"tested with vLLM {TESTED}: metrics, options and ends of others may differ",
                "watch the first start and stop; beacon and metrics fall back by themselves",
            )
        )  # fmt: skip
    if facts.supervisor_clobbered:
        found.append(
            Finding(
                Level.ERROR,
                "supervisor",
                f"PyPI's package `supervisor` in {facts.supervisor_clobbered} is incomplete: another package wrote over it",
                "vLLM's model-hosting-container-standards imports it",
                "pip install --force-reinstall --no-deps supervisor in that environment",
            )
        )
    return found or [ok("vllm", f"vLLM {facts.version} at {facts.path}")]


def options(where: str, given: VllmOptions, raw: Mapping[str, str]) -> list[Finding]:
    """Judge the options and the environment an engine would get; `where` says whose they are."""
    found = []
    if given.disable_log_stats:
        found.append(
            Finding(
                Level.WARNING,
                "options",
                f"{where}: --disable-log-stats",
                "vLLM then has no metrics of its own: where the beacon does not work, a hang cannot be told from silence",
                "leave the option out",
            )
        )
    found += [judge(where, raw[name]) for name, wrong, judge in _VARIABLES if name in raw and wrong(raw[name])]
    return found or [ok("options", f"{where}: nothing hides the engine's progress")]


def _multiprocess(where: str, value: str) -> Finding:
    return Finding(
        Level.NOTE,
        "options",
        f"{where}: PROMETHEUS_MULTIPROC_DIR={value}",
        "old counters in it would outlive an engine and look like progress; we take it out of the engine's environment",
        "unset it",
    )


def _keep_alive(where: str, _value: str) -> Finding:
    return Finding(
        Level.WARNING,
        "options",
        f"{where}: VLLM_KEEP_ALIVE_ON_ENGINE_DEATH is set",
        "vLLM then stays up with a dead engine; we end it by other signs, later than its own exit would tell",
        "unset it",
    )


def _rust(where: str, _value: str) -> Finding:
    return Finding(
        Level.WARNING,
        "options",
        f"{where}: VLLM_USE_RUST_FRONTEND is set",
        "how that front end counts, stops and fails has not been measured",
        "unset it, or try every stop and every failure yourself",
    )


def _port(where: str, value: str) -> Finding:
    return Finding(
        Level.ERROR,
        "options",
        f"{where}: VLLM_PORT={value}",
        "Kubernetes sets it for a Service called `vllm`; vLLM reads a number there and does not start",
        "enableServiceLinks: false in the pod, or another name for the Service",
    )


def _is_on(value: str) -> bool:
    return value.strip().lower() in {"1", "true", "yes", "on"}


def _is_no_number(value: str) -> bool:
    return not value.strip().isdecimal()


_VARIABLES: tuple[tuple[str, Callable[[str], bool], Callable[[str, str], Finding]], ...] = (
    ("PROMETHEUS_MULTIPROC_DIR", bool, _multiprocess),
    ("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", _is_on, _keep_alive),
    ("VLLM_USE_RUST_FRONTEND", _is_on, _rust),
    ("VLLM_PORT", _is_no_number, _port),
)

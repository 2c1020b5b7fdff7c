"""Findings on engines that nobody looks after any more."""

from collections.abc import Sequence

from vllm_supervisor.core.doctor import Finding, Level, ok


def orphans(abandoned: Sequence[str], untold: Sequence[tuple[str, str]], *, sweeps: bool) -> list[Finding]:
    """Judge what was found: names of processes, of those that cannot be told with why; `sweeps`: engine.sweep is on."""
    findings = []
    if abandoned:
        does = "the next start ends them" if sweeps else "engine.sweep is off: end them yourself"
        what = f"a killed supervisor left an engine: {', '.join(abandoned)}"
        findings.append(Finding(Level.WARNING, "orphans", what, "it holds memory and GPU beside the next one", does))
    findings += [
        Finding(
            Level.NOTE,
            "orphans",
            f"{name} is an engine's process, and {why}",
            "so it is not known whether somebody looks after it, and no start ends it",
            "if nobody does, end it",
        )
        for name, why in untold
    ]
    return findings or [ok("orphans", "no engine is without its supervisor")]

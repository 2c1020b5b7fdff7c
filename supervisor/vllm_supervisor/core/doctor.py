"""Pre-flight findings: what is wrong with a machine or a configuration, why it matters, and what mends it.

Rules:
* A check is a pure function from gathered facts to findings; what could not be looked at is said, never passed over.
* An error keeps the supervisor from working or loses requests; a warning will bite one day; a note is for your
  information and leaves the exit status alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum


class Level(StrEnum):
    """How much it matters."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result. `check` is a word for scripts; `why` and `mend` are empty where all is well."""

    level: Level
    check: str
    what: str
    why: str = ""
    mend: str = ""


def ok(check: str, what: str) -> Finding:
    """All is well."""
    return Finding(Level.OK, check, what)


def exit_status(findings: Iterable[Finding]) -> int:
    """0: nothing to do; 1: warnings; 2: errors."""
    levels = {finding.level for finding in findings}
    if Level.ERROR in levels:
        return 2
    return 1 if Level.WARNING in levels else 0


_ORDER = (Level.ERROR, Level.WARNING, Level.NOTE, Level.OK)


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """Build one object: the exit status, a count a level, and the findings, the gravest first."""
    ordered = sorted(findings, key=lambda finding: _ORDER.index(finding.level))
    return {
        "status": exit_status(findings),
        "counts": {level.value: sum(finding.level is level for finding in findings) for level in Level},
        "findings": [asdict(finding) for finding in ordered],
    }


def render(findings: Sequence[Finding]) -> str:
    """Write the findings for a terminal, one a paragraph, the gravest first; what is well is one line each."""
    blocks = []
    for finding in sorted(findings, key=lambda finding: _ORDER.index(finding.level)):
        lines = [f"{finding.level.value:7}  {finding.what}"]
        if finding.why:
            lines.append(f"         why: {finding.why}")
        if finding.mend:
            lines.append(f"         do:  {finding.mend}")
        blocks.append("\n".join(lines))
    return "\n".join(blocks)

"""The diagrams of the documents, drawn from the tables, so that they cannot say anything else than the code does."""

import itertools

from vllm_supervisor.core import drain
from vllm_supervisor.core.cells import LEADS_TO
from vllm_supervisor.core.drain import Stage

# Facts that would draw an arrow from nearly everywhere and tell a reader nothing new there.
_EVERYWHERE = {"EngineStopOrdered": "a stop", "EngineKillOrdered": "the third stop"}


def engine_life() -> str:
    """The engine's life as a Mermaid state diagram: one arrow for each pair of nodes, with the facts that lead there."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (node, fact), targets in LEADS_TO.items():
        for target in targets:
            if target is not node:
                name = _EVERYWHERE.get(fact.__name__, fact.__name__)
                arrows.setdefault((node.value, target.value), []).append(name)
    lines = [
        f"    {start} --> {end}: {', '.join(dict.fromkeys(facts))}" for (start, end), facts in sorted(arrows.items())
    ]
    return "\n".join(["stateDiagram-v2", "    [*] --> booting", *lines, "    gone --> [*]"])


def way_out() -> str:
    """The stages of a stop, in the only order there is, each with the public phase it shows as."""
    stages = list(Stage)
    lines = [f"    {stage.value}: {stage.value} ({drain.PHASES[stage].value})" for stage in stages]
    lines += [f"    {before.value} --> {after.value}" for before, after in itertools.pairwise(stages)]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {stages[0].value}", *lines, f"    {stages[-1].value} --> [*]"])


DIAGRAMS = {"engine life": engine_life, "way out": way_out}


def between_marks(text: str) -> str:
    """Return the document `text` with each diagram, which stands between its two marks, drawn anew."""
    for name, draw in DIAGRAMS.items():
        head, begin, rest = text.partition(f"<!-- diagram: {name} -->\n")
        _old, end, tail = rest.partition("<!-- end of diagram -->")
        if begin and end:
            text = f"{head}{begin}```mermaid\n{draw()}\n```\n{end}{tail}"
    return text

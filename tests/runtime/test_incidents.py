"""What is said of an evidence bundle: where it is, and never a place where there is none."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from fakes.door import in_trio
from vllm_supervisor.adapters import evidence
from vllm_supervisor.core.admission import Gate
from vllm_supervisor.core.health import Judgement, Memory, judge
from vllm_supervisor.core.samples import Observation
from vllm_supervisor.core.situation import HealthPolicy
from vllm_supervisor.runtime.incidents import Incidents


class Watched:
    """A watch whose engine starts."""

    samples: tuple[Observation, ...] = ()

    async def judged(self) -> Judgement:
        """Give its judgement."""
        return judge(Memory(), Observation(at=1.0, ready_at=None), HealthPolicy())[1]


async def said_of(root: Path) -> list[tuple[str, str, str]]:
    """Ask for one bundle below `root`; give what was said of it."""
    said: list[tuple[str, str, str]] = []
    parts: Any = {"room": SimpleNamespace(current=None), "watch": Watched()}
    async with trio.open_nursery() as nursery:
        incidents = Incidents(
            root,
            run="r",
            gate=Gate(limit=1, new_id=str),
            memory=tuple,
            nursery=nursery,
            tell=lambda _fact: None,
            say=lambda *words: said.append(words),
            search_path="",
            keep=3,
            max_size=10**6,
            **parts,
        )
        incidents.on_quit("asked for")
    return said


@in_trio
async def test_a_bundle_is_announced_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A written bundle is a warning that says where it is; what could not be had is no warning."""
    monkeypatch.setattr(evidence, "BETWEEN_CPU", 0.0)
    said = await said_of(tmp_path)
    assert [(event, level) for event, _, level in said] == [("incident", "warning"), ("incident_gaps", "info")]
    assert said[0][1].startswith("incident 1: asked for: ")
    assert said[0][1].endswith(f"; see {tmp_path}/1")


@in_trio
async def test_no_place_is_named_where_nothing_could_be_written(tmp_path: Path) -> None:
    """The start warns; then without a bundle there is one line, a warning, that says why and sends nobody to look."""
    (tmp_path / "incidents").write_text("a file")
    [(_, at_start, _), (event, sentence, level)] = await said_of(tmp_path / "incidents")
    assert at_start.startswith("no evidence bundle can be written: ")
    assert (event, level) == ("incident", "warning")
    assert sentence.startswith("incident without a bundle: asked for: ")
    assert "the bundle could not be written" in sentence
    assert "; see " not in sentence

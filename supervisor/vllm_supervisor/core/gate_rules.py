"""The release gate: rules over the two ledgers that must hold before a rollout goes on.

Rules of the rules:
* A file names each rule by a key; a key that does not exist is an error, never ignored.
* Every rule reads one register. Nothing is added over both.
* Too little data fails: a gate that has seen nothing must not open.
* A ledger of which lines or segments are missing inside the window fails: what is gone may be what a rule looks for.
* Requests that are open now count whatever the window; everything else counts by when the request was accepted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from vllm_supervisor.core.accounts import Fold, RunAccount
from vllm_supervisor.core.errors import ConfigError
from vllm_supervisor.core.units import BadValueError, parse_duration, parse_percent
from vllm_supervisor.core.words import Outcome

KEYS = {
    "minimum_sample": "the least number of requests that must have ended (a whole number, at least 1; required)",
    "max_incomplete_streams": 'the largest share of streams that did not complete, such as "1%"',
    "max_open_age": 'the greatest age of a request that is still open, such as "10m"',
    "max_unresolved_executions": "the most executions that are running or unknown after their request has ended",
    "window": 'look only at requests accepted within this time, such as "1h"',
    "release": "look only at runs of this release",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """A parsed file; None: no such rule. Shares are fractions of one, times are seconds."""

    minimum_sample: int
    max_incomplete_streams: float | None = None
    max_open_age: float | None = None
    max_unresolved_executions: int | None = None
    window: float | None = None
    release: str | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """One rule's result; `found` is None where there was nothing to judge by."""

    rule: str
    limit: float
    found: float | None
    passes: bool
    sentence: str


def parse_rules(data: Mapping[str, object], name: str) -> Rules:
    """Read the keys of a rules file called `name`. Raises ConfigError with every problem at once."""
    problems = [f"{name}: {key}: no such rule; there are {', '.join(KEYS)}" for key in data if key not in KEYS]
    if "minimum_sample" not in data:
        problems.append(f"{name}: minimum_sample is missing: {KEYS['minimum_sample']}")
    read: dict[str, object] = {}
    for key in KEYS.keys() & data.keys():
        try:
            read[key] = _value(key, data[key])
        except BadValueError as error:
            problems.append(f"{name}: {key} = {data[key]!r}: {error}")
    if "minimum_sample" in data and not any(key.startswith("max_") for key in data):
        problems.append(f"{name}: no rule that could fail; set one of {', '.join(k for k in KEYS if k[:4] == 'max_')}")
    if problems:
        raise ConfigError(problems)
    return Rules(**read)  # type: ignore[arg-type]  # each value was parsed by its key


def _value(key: str, value: object) -> object:
    if key in ("window", "max_open_age"):
        return parse_duration(value)
    if key == "max_incomplete_streams":
        return parse_percent(value)
    if key == "release":
        if isinstance(value, str) and value:
            return value
        raise BadValueError("expected the name of a release")
    least = 1 if key == "minimum_sample" else 0
    if type(value) is int and value >= least:
        return value
    raise BadValueError(f"expected a whole number, at least {least}")


def judge(fold: Fold, rules: Rules, now: datetime) -> list[Check]:
    """Check each rule against a fold that was made with the rules' window."""
    runs = [run for run in fold.runs.values() if rules.release is None or run.release == rules.release]
    checks = [_sample(runs, rules.minimum_sample)]
    if fold.damaged_since:
        more = f" and {fold.damage_count - 1} more" if fold.damage_count > 1 else ""
        sentence = f"evidence is missing: {fold.damage[0]}{more}"
        checks.append(Check("evidence", 0, fold.damage_count, passes=False, sentence=sentence))
    if rules.max_incomplete_streams is not None:
        checks.append(_streams(runs, rules.max_incomplete_streams))
    if rules.max_open_age is not None:
        checks.append(_open_age(runs, rules.max_open_age, now))
    if rules.max_unresolved_executions is not None:
        checks.append(_unresolved(runs, rules.max_unresolved_executions))
    return checks


def _sample(runs: list[RunAccount], limit: int) -> Check:
    ended = sum(sum(run.outcomes.values()) for run in runs)
    return Check("minimum_sample", limit, ended, ended >= limit, f"{ended} requests have ended, {limit} are needed")


def _streams(runs: list[RunAccount], limit: float) -> Check:
    total = sum(sum(run.streams.values()) for run in runs)
    incomplete = total - sum(run.streams[Outcome.COMPLETED] for run in runs)
    if not total:
        return Check(
            "max_incomplete_streams", limit, None, passes=False, sentence="no stream has ended: too little data"
        )
    share = incomplete / total
    sentence = f"{incomplete} of {total} streams did not complete ({share:.2%}), {limit:.2%} are allowed"
    return Check("max_incomplete_streams", limit, share, share <= limit, sentence)


def _open_age(runs: list[RunAccount], limit: float, now: datetime) -> Check:
    began = [a.at for run in runs for a in run.open_ids.values() if a.outcome is None]
    if not began:
        return Check("max_open_age", limit, 0.0, passes=True, sentence="no request is open")
    age = max(0.0, (now - datetime.fromisoformat(min(began))).total_seconds())
    sentence = f"{len(began)} requests are open, the oldest for {age:.0f} s, {limit:g} s are allowed"
    return Check("max_open_age", limit, age, age <= limit, sentence)


def _unresolved(runs: list[RunAccount], limit: int) -> Check:
    found = sum(1 for run in runs for a in run.open_ids.values() if a.counted and a.outcome is not None)
    sentence = f"{found} executions are unresolved though their requests have ended, {limit} are allowed"
    return Check("max_unresolved_executions", limit, found, found <= limit, sentence)

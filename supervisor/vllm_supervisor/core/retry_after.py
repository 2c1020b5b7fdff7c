"""How long a refused client is asked to wait: the remaining estimate, between 1 and 60 seconds, with jitter.

Clients honour `Retry-After` (the openai client up to 120 s), so a crowd that is refused at one moment must not come back
at one moment: up to a quarter is added at random.
"""

from vllm_supervisor.core.admission import SATURATED, Rejection

PARKED_S = 300  # a person has to come first
SATURATED_S = 2.0  # a place is free again with the next answer
UNKNOWN_S = 10.0  # nothing to estimate from: no engine of this run was ever ready
_PARKED = {"engine_parked", "engine_unkillable"}


def retry_after(rejection: Rejection, remaining_s: float | None, jitter: float) -> int:
    """Return whole seconds. `remaining_s` is the estimate until requests are taken again, `jitter` lies in [0, 1)."""
    if rejection.code in _PARKED:
        return PARKED_S
    if rejection.code == SATURATED:
        remaining_s = SATURATED_S
    estimate = UNKNOWN_S if remaining_s is None else max(remaining_s, 1.0)
    return max(1, min(60, round(estimate * (1 + jitter / 4))))

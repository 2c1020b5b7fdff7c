"""The fuzz of both sockets for a few seconds; `scripts/fuzz` plays it for as long as one likes."""

from fakes.fuzz_scenario import play


def test_both_sockets_survive_rubbish() -> None:
    """The supervisor lives, answers in between, has leaked nothing and stops clean with ledgers that balance."""
    play(seconds=5.0, seed=1)

"""SIGKILL of the supervisor at random moments under load, started again each time: nothing accepted may be missing.

Run by `scripts/kill-test`, and for a few rounds by a test. After each start the audit must hold over all runs so far, and
every request of which a client has seen an answer begin must stand in the ledger. At the end nothing is left.

With small segments a run has many, so the kill falls into a change of segments now and then; and before some rounds the
supervisor is killed a few times more as soon as it listens, which is before or while it closes what the last run left.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from fakes.books import Books
from fakes.ports import free_port
from fakes.supervisor_process import Account, Client, Supervisor, chat_body
from fakes.tiny_engine import START, TinyEngine

NAME = ("--name", "killed")
SEGMENT = "64MiB"
CROWD = 6
LENGTHS = (1, 1, 1, 1, 4, 4, 4, 400)  # tokens: most answers are over at once, so that a run has many; some are cut
MOST = 100  # answers that have begun before the kill, at most: several segments of 16 KiB
LONGEST = 0.1  # seconds from the last of them to the kill, at most
EARLY = 0.4  # the share of rounds before which it is killed before it is ready
EARLY_LONGEST = 1.0  # seconds from listening to that kill, at most


def _user(url: str, chance: random.Random, seen: set[str], over: threading.Event) -> None:
    """Ask for one answer after the other, streamed or whole, and note the ledger id of each that began."""
    with httpx.Client(base_url=url, timeout=30.0, trust_env=False) as http:
        while not over.is_set():
            body = chat_body(stream=chance.random() < 0.7, max_tokens=chance.choice(LENGTHS), ignore_eos=True)
            with (
                contextlib.suppress(httpx.TransportError),
                http.stream("POST", "/v1/chat/completions", json=body) as answer,
            ):
                if "X-Ledger-Id" in answer.headers:
                    seen.add(answer.headers["X-Ledger-Id"])
                for _ in answer.iter_raw():
                    pass


@contextlib.contextmanager
def crowd(url: str, chance: random.Random) -> Iterator[set[str]]:
    """Keep users at work inside the block; give the ledger ids they have seen."""
    seen: set[str] = set()
    over = threading.Event()
    users = [
        threading.Thread(target=_user, args=(url, random.Random(chance.random()), seen, over), daemon=True)
        for _ in range(CROWD)
    ]
    for user in users:
        user.start()
    try:
        yield seen
    finally:
        over.set()
        for user in users:
            user.join(30.0)


def kill_early(start: Callable[[], tuple[Supervisor, Client]], moment: float) -> None:
    """Start it and kill it `moment` seconds after it began to listen, whatever it does then."""
    supervisor, client = start()
    with client:
        supervisor.until(client.listens, within=60.0, what="listening")
        threading.Event().wait(moment)
        supervisor.kill()


def play(
    account: Account,
    start: Callable[[], tuple[Supervisor, Client]],
    *,
    rounds: int,
    seed: int,
    ready_within: float,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Play it; raises AssertionError at the first thing that does not hold."""
    chance = random.Random(seed)
    seen: set[str] = set()
    early = 0
    for number in range(rounds + 1):
        while chance.random() < EARLY:
            early += 1
            kill_early(start, chance.random() * EARLY_LONGEST)
        supervisor, client = start()
        with client:
            supervisor.until(client.is_ready, within=ready_within, what="ready")
            books = Books(account)
            supervisor.until(lambda books=books: books.audit.holds, within=30.0, what="an audit that holds")
            missing = seen - {one["id"] for one in books.events("accepted")}
            assert not missing, f"accepted, but not in the ledger: {missing}"
            if number == rounds:
                supervisor.signal(signal.SIGTERM)
                assert supervisor.ends(within=60.0) == 0, supervisor.words()
                break
            answers, moment = chance.randrange(1, MOST), chance.random() * LONGEST
            with crowd(client.url, chance) as now:
                supervisor.until(lambda now=now: len(now) >= answers, within=60.0, what=f"{answers} answers")  # noqa: B023 - asked at once
                threading.Event().wait(moment)
                supervisor.kill()
            seen |= now
        say(f"round {number + 1}: killed when {len(now)} answers had begun")
    books = Books(account)
    assert books.audit.holds, books.audit
    assert len(books.audit.runs) == rounds + 1 + early
    assert not any(run.partial for run in books.audit.runs), books.audit
    lost = sum(one["why"] == "supervisor_lost" for one in books.events("outcome"))
    segments = len(list((books.state / "ledger").iterdir()))
    say(
        f"{len(seen)} answers seen, {len(books.events('accepted'))} accepted, {lost} closed as open, "
        f"{rounds + early} kills ({early} of them early), {segments} segments, audit holds"
    )
    account.expect_nothing_left()


def play_mock(*, rounds: int, seed: int, segment: str = SEGMENT, say: Callable[[str], None] = lambda _: None) -> None:
    """Play it with the stand-in engine; a file of the ledger ends at `segment`."""
    with Account() as account:

        def start() -> tuple[Supervisor, Client]:
            port = free_port()
            options = ("--mock-start-time", "0s", "--mock-tokens-per-second", "400")
            argv = ("--engine", "mock", "serve", "tiny", "--host", "127.0.0.1", "--port", str(port), *options)
            return account.start(*NAME, "--set", f"ledger.segment={segment}", *argv), Client(port)

        play(account, start, rounds=rounds, seed=seed, ready_within=60.0, say=say)


def play_real(*, rounds: int, seed: int, segment: str = SEGMENT, say: Callable[[str], None] = lambda _: None) -> None:
    """Play it with real vLLM, which two variables name; a file of the ledger ends at `segment`."""
    engine = TinyEngine(Path(os.environ["TEST_VLLM"]), Path(os.environ["TEST_TINY_MODEL"]))
    with Account(engine.env) as account:
        play(
            account,
            lambda: engine.serve(account, before=(*NAME, "--set", f"ledger.segment={segment}")),
            rounds=rounds,
            seed=seed,
            ready_within=START,
            say=say,
        )


def main() -> int:
    """Play it and say how each round went."""
    parser = argparse.ArgumentParser(description="SIGKILL of the supervisor at random moments under load")
    parser.add_argument("--real", action="store_true", help="real vLLM; TEST_VLLM and TEST_TINY_MODEL name it")
    parser.add_argument("--rounds", type=int, help="default: 50, and 5 with real vLLM")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="repeats the moments of a run")
    parser.add_argument("--segment", default=SEGMENT, help=f"ledger.segment; default: {SEGMENT}")
    options = parser.parse_args()
    print(f"seed {options.seed}")  # noqa: T201
    rounds = options.rounds or (5 if options.real else 50)
    (play_real if options.real else play_mock)(
        rounds=rounds,
        seed=options.seed,
        segment=options.segment,
        say=lambda text: print(text, flush=True),  # noqa: T201
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

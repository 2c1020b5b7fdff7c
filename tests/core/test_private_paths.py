"""Which owners and modes of a path leave it in our hands: the table, row by row."""

import stat

import pytest

from vllm_supervisor.core.private_paths import (
    Account,
    Group,
    Identity,
    Kind,
    Step,
    UntrustedError,
    Verdict,
    check_own,
    check_way,
    directory_refusal,
    file_refusal,
    is_own_group,
)

US, OTHER, ROOT = 1000, 1001, 0
OWN_GROUP, SHARED_GROUP = 1000, 100
WE = Identity(US, frozenset({ROOT}), frozenset({OWN_GROUP}))
AS_ROOT = Identity(ROOT, frozenset({ROOT}), frozenset({ROOT}))
IN_NAMESPACE = Identity(US, frozenset({ROOT, 65534}), frozenset({OWN_GROUP}))
REFUSED = None


def step(mode: int, uid: int = US, gid: int = OWN_GROUP, *, acl: bool = False, kind: Kind = Kind.DIRECTORY) -> Step:
    """Give one step, named /x."""
    return Step("/x", kind, uid, gid, mode, acl)


@pytest.mark.parametrize("secret", [False, True])
@pytest.mark.parametrize(
    ("us", "found", "state", "run"),
    [
        (WE, step(0o700), Verdict.PRIVATE, Verdict.PRIVATE),
        (WE, step(0o755), Verdict.PRIVATE, Verdict.TIGHTEN),
        (WE, step(0o711), Verdict.PRIVATE, Verdict.TIGHTEN),
        (WE, step(0o710), Verdict.PRIVATE, Verdict.TIGHTEN),
        (WE, step(0o2770), Verdict.PRIVATE, Verdict.TIGHTEN),
        (WE, step(0o775), Verdict.PRIVATE, Verdict.TIGHTEN),  # a private group, umask 002
        (WE, step(0o775, gid=SHARED_GROUP), REFUSED, REFUSED),
        (WE, step(0o770, acl=True), REFUSED, REFUSED),  # the group's bits are the access list's mask
        (WE, step(0o757), REFUSED, REFUSED),
        (WE, step(0o777), REFUSED, REFUSED),
        (WE, step(0o1777), REFUSED, REFUSED),
        (WE, step(0o700, uid=OTHER), REFUSED, REFUSED),
        (WE, step(0o777, uid=OTHER), REFUSED, REFUSED),
        (WE, step(0o2770, uid=ROOT), Verdict.PRIVATE, Verdict.PRIVATE),  # a volume with fsGroup
        (WE, step(0o2775, uid=ROOT), Verdict.PRIVATE, REFUSED),
        (WE, step(0o2775, uid=ROOT, gid=SHARED_GROUP), REFUSED, REFUSED),
        (WE, step(0o777, uid=ROOT), REFUSED, REFUSED),  # an emptyDir on disk
        (WE, step(0o1777, uid=ROOT), REFUSED, REFUSED),  # one in memory: only below it
        (WE, step(0o700, uid=65534), REFUSED, REFUSED),  # NFS that squashes root
        (WE, step(0o600, kind=Kind.OTHER), REFUSED, REFUSED),
        (AS_ROOT, step(0o700, uid=ROOT, gid=ROOT), Verdict.PRIVATE, Verdict.PRIVATE),
        (AS_ROOT, step(0o775, uid=ROOT, gid=ROOT), Verdict.PRIVATE, Verdict.TIGHTEN),
        (AS_ROOT, step(0o755, uid=OTHER), REFUSED, REFUSED),
        (AS_ROOT, step(0o700, uid=OTHER), REFUSED, REFUSED),
        (AS_ROOT, step(0o775, uid=ROOT, gid=SHARED_GROUP), REFUSED, REFUSED),
        (AS_ROOT, step(0o777, uid=ROOT), REFUSED, REFUSED),
    ],
)
def test_a_directory_of_ours(
    us: Identity, found: Step, state: Verdict | None, run: Verdict | None, *, secret: bool
) -> None:
    """Owner and mode say whether a directory is kept, tightened or refused; a refusal names the directory."""
    expected = run if secret else state
    if expected is REFUSED:
        with pytest.raises(UntrustedError, match="/x"):
            check_own(found, us, secret=secret)
    else:
        assert check_own(found, us, secret=secret) is expected


@pytest.mark.parametrize(
    ("us", "parent", "entry", "fits"),
    [
        (WE, step(0o755, ROOT, ROOT), step(0o700), True),
        (WE, step(0o755), step(0o700), True),
        (WE, step(0o1777, ROOT, ROOT), step(0o700), True),
        (WE, step(0o1777, ROOT, ROOT), step(0o755, ROOT), True),
        (WE, step(0o1777, ROOT, ROOT), step(0o700, OTHER), False),
        (WE, step(0o1777, ROOT, ROOT), step(0o777, ROOT, kind=Kind.LINK), True),
        (WE, step(0o1777, ROOT, ROOT), step(0o777, kind=Kind.LINK), True),
        (WE, step(0o1777, ROOT, ROOT), step(0o777, OTHER, kind=Kind.LINK), False),
        (WE, step(0o777, ROOT, ROOT), step(0o700), False),
        (WE, step(0o775, ROOT, SHARED_GROUP), step(0o700), False),
        (WE, step(0o775, ROOT, OWN_GROUP), step(0o700), True),
        (WE, step(0o755, OTHER), step(0o700), False),
        (WE, step(0o1777, OTHER), step(0o700), False),
        (WE, step(0o755, 65534), step(0o700), False),
        (IN_NAMESPACE, step(0o755, 65534), step(0o700), True),
        (AS_ROOT, step(0o755, US), step(0o700, ROOT), False),
        (AS_ROOT, step(0o755, ROOT), step(0o700, ROOT), True),
    ],
)
def test_the_way_to_it(us: Identity, parent: Step, entry: Step, *, fits: bool) -> None:
    """Nobody but root and we may be able to replace a step of the way; a sticky directory protects what is ours in it."""
    if fits:
        check_way([parent, entry], us)
    else:
        with pytest.raises(UntrustedError, match="/x"):
            check_way([parent, entry], us)


def test_what_a_link_leads_to_is_judged_by_its_own_way() -> None:
    """A link of systemd's (/var/lib/x to private/x) is followed: its mode says nothing, its target's parents do."""
    root, link, again = step(0o755, ROOT), step(0o777, ROOT, kind=Kind.LINK), step(0o755, ROOT)
    check_way([root, link, again, step(0o700, ROOT), step(0o755)], WE)
    with pytest.raises(UntrustedError):
        check_way([root, link, again, step(0o777, ROOT), step(0o755)], WE)


CONTAINERS = " (on a volume that only this container reaches: trust_directories = true)"


@pytest.mark.parametrize(
    ("found", "remedy"),
    [
        (step(0o757), "chmod o-w /x, or set state_dir to another directory"),
        (step(0o777, gid=SHARED_GROUP), "chmod go-w /x, or set state_dir to another directory"),
        (step(0o775, gid=SHARED_GROUP), "chmod g-w /x, or set state_dir to another directory"),
        (step(0o700, uid=OTHER), "chown 1000 /x, or set state_dir to another directory"),
        (step(0o1777), "choose a directory below it, or set state_dir to another directory"),
        (step(0o600, kind=Kind.OTHER), "set state_dir to another directory"),
    ],
)
def test_a_refusal_says_what_to_do(found: Step, remedy: str) -> None:
    """The sentence ends with a command that helps, and with the key."""
    with pytest.raises(UntrustedError) as caught:
        check_own(found, WE, secret=False)
    assert caught.value.sentence("state_dir").endswith(f"; {remedy}{CONTAINERS}")


ACCOUNTS = (Account("root", 0, 0), Account("we", US, OWN_GROUP), Account("they", OTHER, SHARED_GROUP))


@pytest.mark.parametrize(
    ("gid", "group", "accounts", "own"),
    [
        (2000, None, ACCOUNTS, True),  # known to the container runtime alone
        (OWN_GROUP, Group("we", OWN_GROUP, frozenset()), ACCOUNTS, True),
        (OWN_GROUP, Group("we", OWN_GROUP, frozenset({"we", "root"})), ACCOUNTS, True),
        (OWN_GROUP, Group("we", OWN_GROUP, frozenset({"they"})), ACCOUNTS, False),
        (OWN_GROUP, Group("users", OWN_GROUP, frozenset()), ACCOUNTS, False),  # everybody's first group, unlisted
        (SHARED_GROUP, Group("users", SHARED_GROUP, frozenset()), ACCOUNTS, False),
        (2000, Group("models", 2000, frozenset({"we"})), ACCOUNTS, True),
        (2000, Group("models", 2000, frozenset({"we", "they"})), ACCOUNTS, False),
        (0, Group("root", 0, frozenset()), (*ACCOUNTS, Account("halt", 7, 0)), True),
        (0, Group("root", 0, frozenset({"they"})), ACCOUNTS, False),
    ],
)
def test_a_group_that_is_ours_alone(gid: int, group: Group | None, accounts: tuple[Account, ...], *, own: bool) -> None:
    """A group counts as ours when neither its line nor anybody's first group names another account."""
    assert is_own_group(gid, US, group, accounts) is own


@pytest.mark.parametrize(
    ("mode", "uid", "links", "refused"),
    [
        (stat.S_IFREG | 0o600, US, 1, False),
        (stat.S_IFREG | 0o660, US, 1, False),
        (stat.S_IFREG | 0o600, US, 0, False),  # removed just now: the caller looks again
        (stat.S_IFREG | 0o600, OTHER, 1, True),
        (stat.S_IFREG | 0o600, US, 2, True),
        (stat.S_IFIFO | 0o600, US, 1, True),
        (stat.S_IFDIR | 0o700, US, 2, True),
    ],
)
def test_a_file_we_made(mode: int, uid: int, links: int, *, refused: bool) -> None:
    """A regular file of ours with one name may be written; anything else was put there by somebody."""
    assert bool(file_refusal(mode, uid, links, US)) is refused


@pytest.mark.parametrize(
    ("mode", "uid", "refused"),
    [(stat.S_IFDIR | 0o770, US, False), (stat.S_IFDIR | 0o700, OTHER, True), (stat.S_IFREG | 0o600, US, True)],
)
def test_a_directory_we_made(mode: int, uid: int, *, refused: bool) -> None:
    """A directory of ours may be used, also where a volume's mount has loosened it."""
    assert bool(directory_refusal(mode, uid, US)) is refused

"""Whether another user can replace what is below a directory: a table over owner, mode and our own user.

Rules:
* Trusted are root and ourselves, and what the kernel shows as unmapped in a user namespace (the host's root directory).
* Each directory on the way belongs to a trusted user. One that others can write must be sticky, as /tmp is, and then the
  next step, a link too, belongs to a trusted user.
* The directory itself belongs to us or root and nobody else can write it. A run directory that others can only read or
  enter is tightened to 0700; a state directory may be readable, since what is made in it is private.
* Group-writable is accepted for a group that is ours alone: root's, our own user's private group, or one that no other
  account is a member of (Kubernetes' fsGroup gives volumes 2775 and such a group). An access list makes it unknown.

Sources: inode(7), acl(5), namespaces in user_namespaces(7); OpenSSH's StrictModes decides the same but for the group.
"""

import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_ANYBODY = stat.S_IRWXG | stat.S_IRWXO


class Kind(StrEnum):
    """What stands at a path."""

    DIRECTORY = "directory"
    LINK = "link"
    OTHER = "other"


class Verdict(StrEnum):
    """What becomes of a directory of ours."""

    PRIVATE = "private"
    TIGHTEN = "tighten"  # to 0700


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a path as lstat(2) shows it; `mode` holds the permission bits, `acl` an access list beside them."""

    path: str
    kind: Kind
    uid: int
    gid: int
    mode: int
    acl: bool = False


@dataclass(frozen=True, slots=True)
class Identity:
    """Our effective user, the users it trusts besides, and the groups that are ours alone."""

    uid: int
    trusted: frozenset[int] = frozenset({0})
    own_groups: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Account:
    """One line of the user database."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Group:
    """One line of the group database."""

    name: str
    gid: int
    members: frozenset[str]


class UntrustedError(Exception):
    """Somebody else can change what is there: `problem` says what, `remedy` a command that ends it, or nothing."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        """Keep both."""
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy

    def sentence(self, key: str) -> str:
        """Say the problem and both ways out; `key` configures the directory."""
        other = (
            f"set {key} to another directory (on a volume that only this container reaches: trust_directories = true)"
        )
        return f"{self.problem}; {self.remedy}, or {other}" if self.remedy else f"{self.problem}; {other}"


def is_own_group(gid: int, uid: int, group: Group | None, accounts: Iterable[Account]) -> bool:
    """Return whether the group `gid`, of which we are a member, has no member besides us and root.

    `group` is its line, None if it has none: then only the container runtime that gave it to us knows it.
    """
    if group is None:
        return True
    accounts = list(accounts)
    ours = {account.name for account in accounts if account.uid in (0, uid)}
    if group.members - ours:
        return False
    if gid == 0:
        return True  # system accounts have it as their first group on some distributions
    if any(account.gid == gid and account.uid not in (0, uid) for account in accounts):
        return False
    # A directory service does not list every account: a first group counts only as the private group of its user.
    first = [account for account in accounts if account.uid == uid and account.gid == gid]
    return not first or group.name in {account.name for account in first}


def check_way(way: Sequence[Step], us: Identity) -> None:
    """Raise UntrustedError if another user can replace one of the steps; `way` begins with the root directory."""
    for parent, entry in pairwise(way):
        if parent.kind is Kind.LINK:
            continue  # its target was walked in its place
        if not _trusts(us, parent.uid):
            raise UntrustedError(f"{parent.path} belongs to uid {parent.uid}, who can replace what is in it")
        writer = _writer(parent, us)
        if writer and not parent.mode & stat.S_ISVTX:
            raise UntrustedError(f"{parent.path} can be written by {writer}", _take_away(parent, us))
        if writer and not _trusts(us, entry.uid):
            raise UntrustedError(f"{entry.path} belongs to uid {entry.uid}, and {writer} can write in {parent.path}")


def check_own(found: Step, us: Identity, *, secret: bool) -> Verdict:
    """Judge a directory of ours; `secret`: nobody else may enter or list it either. Raises UntrustedError."""
    if found.kind is not Kind.DIRECTORY:
        raise UntrustedError(f"{found.path} is not a directory")
    if found.uid not in (us.uid, 0):
        raise UntrustedError(f"{found.path} belongs to uid {found.uid}", f"chown {us.uid} {found.path}")
    writer = _writer(found, us)
    if writer and found.mode & stat.S_ISVTX:
        raise UntrustedError(f"{found.path} can be written by {writer}", "choose a directory below it")
    if writer:
        raise UntrustedError(f"{found.path} can be written by {writer}", _take_away(found, us))
    if not secret:
        return Verdict.PRIVATE
    if found.uid == us.uid:
        return Verdict.TIGHTEN if found.mode & _ANYBODY else Verdict.PRIVATE
    if found.mode & stat.S_IRWXO:
        raise UntrustedError(f"{found.path} belongs to root and everybody can look into it", f"chmod o= {found.path}")
    return Verdict.PRIVATE


def _trusts(us: Identity, uid: int) -> bool:
    return uid == us.uid or uid in us.trusted


def _writer(found: Step, us: Identity) -> str:
    """Name who else can write there; empty for nobody."""
    if found.mode & stat.S_IWOTH:
        return "everybody"
    if not found.mode & stat.S_IWGRP:
        return ""
    if found.acl:
        return f"group {found.gid} or whom its access list names"
    return "" if found.gid in us.own_groups else f"group {found.gid}"


def _take_away(found: Step, us: Identity) -> str:
    """Return the command that takes away what is too much."""
    group = found.mode & stat.S_IWGRP and (found.acl or found.gid not in us.own_groups)
    others = found.mode & stat.S_IWOTH
    return f"chmod {'g' if group else ''}{'o' if others else ''}-w {found.path}"


def file_refusal(mode: int, uid: int, links: int, us: int) -> str:
    """Say why a file found below a directory of ours is not one we made; empty if it may be. `mode` as stat(2) has it."""
    if not stat.S_ISREG(mode):
        return "it is no regular file"
    if uid != us:
        return f"it belongs to uid {uid}"
    return "it has a second name elsewhere (a hard link)" if links > 1 else ""


def directory_refusal(mode: int, uid: int, us: int) -> str:
    """Say why a directory found below one of ours is not one we made; empty if it may be."""
    if not stat.S_ISDIR(mode):
        return "it is no directory"
    return f"it belongs to uid {uid}" if uid != us else ""

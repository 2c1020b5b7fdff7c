"""Who may use the control socket besides its owner: the members of the one group that `control.group` names."""

import grp
import os
from pathlib import Path

from vllm_supervisor.core.errors import SetupError

SHARED = "vllm-supervisor"  # the directory of all instances, where nobody chose another place


def group_id(name: str) -> int:
    """Return the number of a group. Raises SetupError."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise SetupError(
            f"control.group = {name!r}: this machine has no such group; name one, or leave it empty"
        ) from None


def open_to_group(path: Path, name: str) -> None:
    """Let a group use the control socket at `path`: enter its directory, and no more of that. Raises SetupError.

    A directory of all instances that we made ourselves may be entered by everybody then: it holds private ones alone.
    """
    number = group_id(name)
    shared = path.parent.parent
    one = shared
    try:
        found = shared.stat()
        if shared.name == SHARED and found.st_uid == os.geteuid():
            shared.chmod(found.st_mode & 0o7777 | 0o011)
        for one, mode in ((path.parent, 0o710), (path, 0o660)):
            os.chown(one, -1, number)  # before the mode: no other group gets in meanwhile
            one.chmod(mode)
    except OSError as error:
        raise SetupError(
            f"control.group = {name!r}: {one} cannot be given to it: {error.strerror}; only a member may, or root (in a unit: SupplementaryGroups={name})"
        ) from error

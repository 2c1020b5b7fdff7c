"""The composition root: the only place that constructs adapters and ties them together.

Lifetimes, from the outermost in: output and log, the state directory's lock, control socket and loop, engine, front
door. They end in the opposite order, and each end is bounded.
"""

import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import trio

from vllm_supervisor import __version__
from vllm_supervisor.adapters import clock, control_server, log, ports, reaper, signals
from vllm_supervisor.adapters.lock import StateLock
from vllm_supervisor.adapters.output import Output, fill_standard_descriptors, write_all
from vllm_supervisor.adapters.upstream import Upstreams
from vllm_supervisor.core.address import UnixAddress
from vllm_supervisor.core.admission import Gate
from vllm_supervisor.core.errors import UserError
from vllm_supervisor.core.events import Events
from vllm_supervisor.core.lifecycle import Policy
from vllm_supervisor.core.plan import Plan
from vllm_supervisor.core.restart import RestartPolicy
from vllm_supervisor.runtime.supervise import Parts, supervise

FLUSH_WITHIN = 1.0  # seconds for our last lines to be taken


def run(plan: Plan) -> int:
    """Do what the plan says; return our exit status, or end by the signal that asked, as shells expect.

    Raises UserError for what a person can mend: configuration, port in use, lock held.
    """

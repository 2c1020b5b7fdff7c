"""Real vLLM on the CPU with the tiny model: how tests start it behind the supervisor, and the clients beside it."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import pytest

from fakes.ports import free_port
from fakes.supervisor_process import Account, Client, Supervisor

# A start takes 25 s on two idle cores; a busy machine may need several times that.
START = 180.0


@dataclass(frozen=True)
class TinyEngine:
    """Where vLLM's command and the model folder are (scripts/install-vllm-cpu, scripts/make-tiny-model)."""

    vllm: Path
    model: Path
    env: ClassVar[dict[str, str]] = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    # What every test's engine is started with, beside its address.
    options: ClassVar[tuple[str, ...]] = (
        *("--load-format", "dummy", "--enforce-eager", "--max-num-seqs", "8"),
        *("--served-model-name", "tiny", "--max-model-len", "32768"),
    )

    @classmethod
    def installed(cls) -> Self:
        """Give what `scripts/test --real` has installed; its absence is a failure, never a skip."""
        vllm, model = os.environ.get("TEST_VLLM", ""), os.environ.get("TEST_TINY_MODEL", "")
        if not Path(vllm).is_file() or not Path(model, "config.json").is_file():
            pytest.fail(
                "real vLLM is missing: run scripts/test --real, which installs it and makes the model", pytrace=False
            )
        return cls(Path(vllm), Path(model))

    @property
    def places(self) -> tuple[Path, Path]:
        """The directories it needs to run: its environment, and the Python that was made of."""
        return self.vllm.parents[1], self.python.resolve().parents[1]

    @property
    def python(self) -> Path:
        """The Python of vLLM's environment, which has the client packages."""
        return self.vllm.with_name("python")

    def serve(
        self, account: Account, *options: str, before: tuple[str, ...] = (), terminal: bool = False
    ) -> tuple[Supervisor, Client]:
        """Start `serve` with the tiny model, named `tiny`, on a free port; `before` are options of ours."""
        port = free_port()
        own = ("--set", f"engine.command={self.vllm}", *before)
        address = ("--host", "127.0.0.1", "--port", str(port))
        argv = (*own, "serve", str(self.model), *self.options, *address, *options)
        return account.start(*argv, terminal=terminal), Client(port)

    def client(self, account: Account, *argv: str, within: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a client program to its end and give its outputs; it must end with 0."""
        done = subprocess.run(argv, env=account.env, capture_output=True, text=True, timeout=within, check=False)
        assert done.returncode == 0, (
            f"{argv} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
        return done

"""A key in what a failing engine prints is in nothing of ours, and clients read none of its words at all."""

import signal
import sys
from pathlib import Path

from fakes.ports import free_port
from fakes.supervisor_process import Account, Client

KEY = "topsecret7"
WORD = "frobnication"  # no secret, and not for clients either
PRINTED = (
    f"(APIServer pid=1) INFO 11-29 21:07:57 [api_utils.py:286] non-default args: {{'api_key': ['{KEY}'], 'port': 9}}",
    f"(APIServer pid=1) INFO 11-29 21:07:57 [x.py:1] loading with HF_TOKEN={KEY}",
    f"ValueError: {WORD} failed with api\x1b[0m_key\x1b[32m={KEY} for Authorization: Bearer {KEY}",
)
ENGINE = f"""
import sys
for line in {PRINTED!r}:
    print(line, file=sys.stderr, flush=True)
sys.exit(2)
"""


def test_a_key_in_the_first_error_is_nowhere(account: Account) -> None:
    """Refusal and health show class and remedy; status, events, log and bundle show the line without the key."""
    port = free_port()
    supervisor = account.start(
        *("--set", "restart.on_give_up=park", "--set", f"listen.port={port}", "--name", "s", "run", "--"),
        *(sys.executable, "-c", ENGINE, "{uds}"),
    )
    with Client(port) as client:
        supervisor.until(lambda: supervisor.events("parked"), within=20.0, what="parked")
        public = [
            client.chat().json()["error"]["message"],
            client.get("/readyz").json()["reason"],
            client.get("/health").json()["reason"],
        ]
        assert public == [public[0]] * 3
        assert public[0].startswith("the engine failed to start: it refused its command line; ")
        assert public[0].endswith("; see `vllm-supervisor status`")
        supervisor.signal(signal.SIGQUIT)
        supervisor.until(lambda: supervisor.events("incident"), within=20.0, what="a bundle")
        shown = {
            "public": "".join(public) + client.get("/metrics").text,
            "status": account.tool("--name", "s", "status").stdout,
            "status --json": account.tool("--name", "s", "status", "--json").stdout,
            "events": account.tool("--name", "s", "events", "--json").stdout,
            "log": "".join(line for line in supervisor.shown() if line.startswith("{")),
        }
        files = {
            str(path): path.read_text(errors="replace")
            for path in Path(account.home, "state").rglob("*")
            if path.is_file()
        }
        assert not [name for name, text in (shown | files).items() if KEY in text]
        assert WORD not in shown["public"]
        for name in ("status --json", "events", "log"):
            assert WORD in shown[name], name
            assert "api_key=<redacted>" in shown[name], name
        supervisor.signal(signal.SIGTERM)
        supervisor.ends(within=20.0)

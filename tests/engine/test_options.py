"""vLLM's options with real vLLM: what its own parser makes of an address, and what the engine makes of bad ones."""

import json
from pathlib import Path

import pytest

from fakes.ports import free_port
from fakes.spellings import SPELLINGS
from fakes.supervisor_process import Account, Client
from fakes.tiny_engine import START, TinyEngine

pytestmark = pytest.mark.engine

# Runs inside vLLM's environment: reads command lines from standard input, prints host and port of each.
PARSE = """
import json, sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers(required=False, dest="subparser"))
found = []
for argv in json.loads(sys.argv[1]):
    args = parser.parse_args(["serve", "tiny", *argv])
    found.append([args.host, args.port, args.uds])
print(json.dumps(found))
"""


def test_vllms_own_parser_reads_each_spelling_as_the_address_we_listen_on(
    engine: TinyEngine, account: Account, tmp_path: Path
) -> None:
    """The table of spellings that the front door is tested with means the same host and port to vLLM itself."""
    folders = [tmp_path / str(index) for index in range(len(SPELLINGS))]
    for folder in folders:
        folder.mkdir()
    lines = [spelling.argv(8123, folder) for spelling, folder in zip(SPELLINGS, folders, strict=True)]
    said = engine.client(account, str(engine.python), "-c", PARSE, json.dumps(lines)).stdout
    found = json.loads(said.splitlines()[-1])
    named = dict(zip((spelling.name for spelling in SPELLINGS), found, strict=True))
    assert named == {spelling.name: ["127.0.0.1", 8123, None] for spelling in SPELLINGS}


def test_mixed_spellings_and_a_yaml_file_land_on_the_address(
    engine: TinyEngine, account: Account, tmp_path: Path
) -> None:
    """Host from YAML, port by abbreviation over a wrong one in YAML, `_` and `=` elsewhere: ready on that address."""
    port = free_port()
    file = tmp_path / "vllm.yaml"
    file.write_text(f"host: 127.0.0.1\nport: {port + 1}\nload-format: dummy\nmax_num_seqs: 8\n", encoding="utf-8")
    options = ("--enforce_eager", "--max_model_len=2048", "--served_model_name", "tiny", f"--por={port}")
    own = ("--set", f"engine.command={engine.vllm}")
    supervisor = account.start(*own, "serve", str(engine.model), *options, "--config", str(file))
    with Client(port) as client:
        supervisor.until(client.is_ready, within=START, what=f"ready on {port}")
        assert client.chat().status_code == 200
        assert account.tool("--name", str(port), "stop").returncode == 0
        assert supervisor.ends(within=40.0) == 0, supervisor.words()
    account.expect_nothing_left()


def test_an_option_that_vllm_does_not_know_ends_the_command(engine: TinyEngine, account: Account) -> None:
    """On a terminal a typo ends the command with 78; the last line on the screen repeats vLLM's own reason."""
    supervisor, client = engine.serve(account, "--no-such-option", terminal=True)
    client.close()
    assert supervisor.ends(within=START) == 78, supervisor.words()
    assert "--no-such-option" in supervisor.screen()[-1], supervisor.screen()
    assert "Traceback" not in supervisor.err.text
    account.expect_nothing_left()

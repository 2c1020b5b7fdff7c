"""The spellings of an address that vLLM's command line understands; used on our front door and on vLLM's own parser."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Spelling(NamedTuple):
    """One way to say host 127.0.0.1 and port {port} among `vllm serve`'s options, `yaml` in its configuration file."""

    name: str
    options: Sequence[str]
    yaml: str = ""

    def argv(self, port: int, folder: Path) -> list[str]:
        """Give the options for `port`; the YAML file, if there is one, is written into `folder`."""
        options = [option.format(port=port, other=port + 1) for option in self.options]
        if self.yaml:
            file = folder / "vllm.yaml"
            file.write_text(self.yaml.format(port=port, other=port + 1), encoding="utf-8")
            options += ["--config", str(file)]
        return options


SPELLINGS = [
    Spelling("two words", ["--host", "127.0.0.1", "--port", "{port}"]),
    Spelling("equals sign", ["--host=127.0.0.1", "--port={port}"]),
    Spelling("abbreviations", ["--hos", "127.0.0.1", "--por={port}"]),
    Spelling("last one wins", ["--port", "{other}", "--host", "127.0.0.1", "--port={port}"]),
    Spelling(
        "underscores around",
        ["--max_model_len=2048", "--port", "{port}", "--served_model_name", "tiny", "--host", "127.0.0.1"],
    ),
    Spelling("YAML file", [], "host: 127.0.0.1\nport: {port}\nmax_model_len: 2048\n"),
    Spelling("command line over YAML", ["--port", "{port}"], "port: {other}\nhost: 127.0.0.1\n"),
]

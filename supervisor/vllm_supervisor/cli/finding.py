"""Which running supervisor a tool speaks to: `--name`, else the only one found in the places of the run directory."""

from vllm_supervisor.adapters import directories
from vllm_supervisor.adapters.control_client import ControlClient, choose
from vllm_supervisor.cli.planning import GlobalOptions, load_config


def connect(options: GlobalOptions) -> ControlClient:
    """Return a connection to it; NotRunningError when none runs, UsageError when several do and none is named."""
    run_dir = load_config(options).config.run_dir
    found = directories.control_sockets(run_dir, options.environ)
    places = directories.control_places(run_dir, options.environ)
    # A run directory of one's own choice need not be called as the instance is, so it is taken at its word.
    return ControlClient(choose(found, None if run_dir else options.name, places))

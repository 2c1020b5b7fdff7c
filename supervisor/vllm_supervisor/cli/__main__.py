"""`python -m vllm_supervisor.cli` is the command `vllm-supervisor`.

Until the command line is carried out, Ctrl-C ends us as it ends any program: Python's own handler would show where in
our imports it was. An interrupt that a parent left ignored (nohup in a script) stays ignored.
"""

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from vllm_supervisor.cli.main import main  # after the line above: its imports take a tenth of a second

if __name__ == "__main__":
    sys.exit(main())

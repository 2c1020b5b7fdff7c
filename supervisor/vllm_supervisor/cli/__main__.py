"""`python -m vllm_supervisor.cli` is the command `vllm-supervisor`.

Until the command line is carried out, Ctrl-C ends us as it ends any program: Python's own handler would show where in
our imports it was. An interrupt that a parent left ignored (nohup in a script) stays ignored.
"""

from vllm_supervisor.isolation import leave_python_path

leave_python_path()

import signal  # noqa: E402  # all of this after the line above: it decides where from
import sys  # noqa: E402

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from vllm_supervisor.cli.main import main  # noqa: E402  # after the signal: its imports take a tenth of a second

if __name__ == "__main__":
    sys.exit(main())

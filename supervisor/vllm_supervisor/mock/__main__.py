"""`python -m vllm_supervisor.mock serve MODEL [any vllm serve option]`."""

from vllm_supervisor.isolation import leave_python_path

leave_python_path()

import sys  # noqa: E402  # after the line above, which decides where from

from vllm_supervisor.mock import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

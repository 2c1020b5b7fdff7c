"""`python -m vllm_supervisor.mock serve MODEL [any vllm serve option]`."""

import sys

from vllm_supervisor.mock import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

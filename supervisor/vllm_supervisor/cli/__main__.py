"""`python -m vllm_supervisor.cli` is the command `vllm-supervisor`."""

import sys

from vllm_supervisor.cli.main import main

sys.exit(main())

"""vllm-supervisor: owns vLLM as its child, judges it by its own progress, restarts it only on proof."""

__version__ = "0.1.0"

"""The stand-in engine: a separate process that speaks vLLM's HTTP and shows faults by name (docs/mock-engine.md)."""


def main(argv: list[str]) -> int:
    """Run the stand-in engine with `vllm serve`'s own arguments (a leading `serve` may be there); return the exit status."""
    from vllm_supervisor.mock.program import run  # noqa: PLC0415 - trio is imported only by who runs the engine

    return run(argv)

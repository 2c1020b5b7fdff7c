"""The stand-in engine: speaks the HTTP of vLLM, imitates its measured behaviour, shows faults by name."""

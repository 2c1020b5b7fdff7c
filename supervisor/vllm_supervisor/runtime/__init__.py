"""Trio tasks and wiring. Only the composition root (`app`) constructs adapters."""

"""Pure decisions: no clock, no I/O, no processes, no trio. Facts in, orders out."""

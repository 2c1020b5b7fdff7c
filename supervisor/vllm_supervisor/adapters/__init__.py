"""One outside thing a file: each turns the world into facts, or an order into the world. They decide nothing."""

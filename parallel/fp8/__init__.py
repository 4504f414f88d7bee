"""Products in FP8: formats, scales and their state, and who makes the products."""

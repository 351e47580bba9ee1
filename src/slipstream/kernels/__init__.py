"""Arithmetic on rows: matmuls in every weight format, attention over pages, norms, rotary and counter-based noise."""

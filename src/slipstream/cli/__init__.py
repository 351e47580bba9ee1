"""The command line: one module per verb, everything drawn on a terminal in ui."""

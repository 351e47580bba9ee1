"""The command line: one module per verb; `ui` draws everything on the terminal."""

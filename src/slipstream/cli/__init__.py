"""This package is the command line. Each verb has a module, and `ui` draws everything on the terminal."""

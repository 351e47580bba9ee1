"""Plans, runs and commits steps for any number of sequences; `llm.py` is the public Python API."""

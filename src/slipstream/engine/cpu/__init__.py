"""The executor on a CPU, which runs the phases of a step one after the other."""

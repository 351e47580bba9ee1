"""The executor on a CPU: phases of a step as calls, one after the other."""

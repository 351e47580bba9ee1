"""The memory behind pages and recurrent states in a CPU's memory."""

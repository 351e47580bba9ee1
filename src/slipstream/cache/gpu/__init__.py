"""The memory behind pages and recurrent states on a GPU."""

"""Model files: where they come from, how their headers are checked, and how their tensors are read and written."""

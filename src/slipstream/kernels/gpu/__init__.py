"""Triton kernels and what hands them their memory; nothing here is imported on a machine without a GPU."""

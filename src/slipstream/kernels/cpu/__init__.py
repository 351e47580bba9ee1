"""The CPU's kernels: plain torch, and C++ row kernels (`native/`) for the instruction sets of x86 processors."""

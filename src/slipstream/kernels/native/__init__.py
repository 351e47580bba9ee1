"""Row kernels in C++ for the instruction sets of x86 processors, and the Python side of each."""

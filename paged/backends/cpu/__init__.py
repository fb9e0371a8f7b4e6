"""Kernels of the project's own for CPUs, in C++: compiled on the machine that runs them, called through XLA's FFI."""

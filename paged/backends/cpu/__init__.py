"""Kernels of the project's own for CPUs, in C++: compiled on the machine that runs them, called through XLA's FFI."""

from paged.backends.cpu.backend import CpuBackend as CpuBackend
from paged.backends.cpu.backend import make_backend as make_backend

"""AITER's paged kernels on ROCm, called through XLA's FFI under jax-aiter's target names, with no torch in the process.

`contract` says what those targets are expected to be, `probe` what is there, `backend` calls them.
"""

from paged.backends.aiter.backend import AiterBackend as AiterBackend
from paged.backends.aiter.backend import make_backend as make_backend

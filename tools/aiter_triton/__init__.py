"""AITER's own Triton kernels on a CPU: interpreted, behind jax-aiter's FFI target names, called from jax.

Needs an environment of its own, with torch (CPU), triton and amd-aiter: see README.md and requirements.txt. Nothing of
`paged` or `conformance` imports torch; `conformance.executors.triton_interpreter` loads this folder only where it is
asked to. Importing this package imports none of the three.
"""

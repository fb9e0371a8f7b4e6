"""What append and attention over pages mean (docs/semantics.md), in plain `jax.numpy`: a definition to read and to run.

The reference returns the exact attention of its inputs, rounded once to the output dtype.
"""

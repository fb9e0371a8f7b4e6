"""Attention in plain float32 `jax.numpy`: the default where no vendor kernel is (requirement R5)."""

from paged.backends.xla.backend import XlaBackend as XlaBackend
from paged.backends.xla.backend import make_backend as make_backend

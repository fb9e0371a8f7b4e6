"""FlashInfer's paged kernels, called through XLA's FFI with no torch in the process."""

from paged.backends.flashinfer.backend import FlashInferBackend as FlashInferBackend
from paged.backends.flashinfer.backend import make_backend as make_backend

"""What a runtime's cached prefixes depend on besides their tokens (requirement C6)."""

from __future__ import annotations

import hashlib

import jax
import numpy as np

from paged.backends.protocol import AttentionBackend
from paged.backends.sharding import KvSharding
from paged.common.layout import StorageLayout
from paged.common.namespace import CacheNamespace
from paged.models import Decoder, DecoderConfig


def weights_fingerprint(model: Decoder) -> str:
    """`sha256:…` over every weight, bit for bit, and the config: equal for equal models alone.

    Reads all weights to the host. `LoadedModel.fingerprint` is the cheaper one, over the files that they came from.
    """
    digest = hashlib.sha256(b"paged.decoder.v1")
    digest.update(repr(model.config).encode())
    for path, leaf in jax.tree_util.tree_flatten_with_path(model)[0]:
        array = np.ascontiguousarray(np.asarray(leaf))
        digest.update(f"{jax.tree_util.keystr(path)}{array.dtype.name}{array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return f"sha256:{digest.hexdigest()}"


def make_namespace(
    config: DecoderConfig,
    layout: StorageLayout,
    backend: AttentionBackend,
    sharding: KvSharding | None,
    *,
    weights: str,
    revision: int,
    tokenizer: str,
    dtype: str,
    tenant: str | None,
    adapter: str | None,
    salt: str | None,
) -> CacheNamespace:
    """The namespace of requests of one tenant. What computes K and V, and in which precision, is part of it."""
    mesh = None if sharding is None else repr((dict(sharding.mesh.shape), sharding.kv_axes))
    computed = (backend.name, repr(backend.capabilities.numerics), dtype, layout.tokens_per_page)
    return CacheNamespace(
        weights=weights,
        revision=revision,
        tokenizer=tokenizer,
        adapter=adapter,
        tenant=tenant,
        salt=salt,
        rope=repr((config.rope_theta, config.head_dim)),
        kv_dtype=layout.dtype,
        layout=repr(computed),
        sharding=mesh,
    )

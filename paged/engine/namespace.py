"""What a runtime's cached prefixes depend on besides their tokens (requirement C6)."""

from __future__ import annotations

import dataclasses
import hashlib

import jax
import numpy as np

from paged.backends.protocol import AttentionBackend
from paged.backends.sharding import KvSharding
from paged.common.layout import StorageLayout
from paged.common.namespace import CacheNamespace
from paged.models import Decoder


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


def _options(backend: AttentionBackend) -> tuple[tuple[str, str], ...]:
    """What a backend was made with, where it tells as a dataclass does: two that are made otherwise may compute so."""
    if not dataclasses.is_dataclass(backend):
        return ()
    return tuple((field.name, repr(getattr(backend, field.name))) for field in dataclasses.fields(backend))


class Namespaces:
    """The namespaces of one runtime, by who shares them; what computes K and V, and how, is in all of them.

    - `kernels`: whether the backend's kernels run all layers, see `paged.engine.step.Program`.
    - `fingerprint`: of the weights; None computes it when a namespace is first asked for.
    - `tokenizer`: fingerprint of the tokenizer that makes the prompts.
    """

    def __init__(
        self,
        layout: StorageLayout,
        backend: AttentionBackend,
        sharding: KvSharding | None,
        *,
        kernels: bool,
        fingerprint: str | None,
        tokenizer: str,
    ):
        self.revision = 0
        self._fingerprint = fingerprint
        self._tokenizer = tokenizer
        self._made: dict[tuple[str | None, ...], CacheNamespace] = {}
        self._layout, self._backend, self._sharding, self._kernels = layout, backend, sharding, kernels

    def of(self, model: Decoder, tenant: str | None, adapter: str | None, salt: str | None) -> CacheNamespace:
        """The namespace of one tenant's requests to this model, which is the one that was there before or announced
        by `move_on`."""
        key = (tenant, adapter, salt)
        if key not in self._made:
            self._made[key] = self._make(model, tenant, adapter, salt)
        return self._made[key]

    def move_on(self, fingerprint: str | None) -> None:
        """The weights are others now; None computes their fingerprint when it is needed."""
        self.revision += 1
        self._fingerprint = fingerprint
        self._made.clear()

    def _make(self, model: Decoder, tenant: str | None, adapter: str | None, salt: str | None) -> CacheNamespace:
        if self._fingerprint is None:
            self._fingerprint = weights_fingerprint(model)
        config, layout, backend, sharding = model.config, self._layout, self._backend, self._sharding
        declared = backend.capabilities
        numerics = (backend.name, declared.numerics, declared.decode_numerics, _options(backend), self._kernels)
        return CacheNamespace(
            weights=self._fingerprint,
            revision=self.revision,
            tokenizer=self._tokenizer,
            adapter=adapter,
            tenant=tenant,
            salt=salt,
            rope=repr((config.rope_theta, config.rope_factors, config.head_dim)),
            kv_dtype=layout.dtype,
            layout=repr((*numerics, model.embedding.dtype.name, layout.tokens_per_page)),
            sharding=None if sharding is None else repr((dict(sharding.mesh.shape), sharding.kv_axes)),
        )

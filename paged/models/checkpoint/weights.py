"""Named tensors of a checkpoint as a `Decoder`, checked before anything is allocated, built directly sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from paged.backends.sharding import KvSharding
from paged.common.errors import InvalidInputError
from paged.models.config import FUSED_WEIGHTS, DecoderConfig
from paged.models.decoder import Decoder, abstract_decoder, map_weights, stored_shape

Progress = Callable[[str, int, int], None]
"""progress(weight, done, total): called after each stacked weight is on its devices."""

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint that was not read yet: shape and dtype as declared, `read` for its values."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Naming:
    """How a format names the weights of `paged.models.config`.

    - `layer`, `model`: our name -> the format's; `{i}` is the layer.
    - `derived(name)`: tensors that some writers add and that hold nothing of their own; they are not read.
    """

    layer: Mapping[str, str]
    model: Mapping[str, str]
    derived: Callable[[str], bool] = lambda name: False

    def of(self, config: DecoderConfig) -> dict[str, tuple[str, int | None]]:
        """The format's name of every weight of `config` -> (our name, layer or None)."""
        names: dict[str, tuple[str, int | None]] = {}
        for layer in range(config.num_layers):
            names |= {template.format(i=layer): (ours, layer) for ours, template in self.layer.items()}
        names |= {theirs: (ours, None) for ours, theirs in self.model.items()}
        if config.tied_embeddings:
            del names[self.model["head"]]
        return names


def check_tensors(
    where: str, config: DecoderConfig, tensors: Mapping[str, StoredTensor], naming: Naming, dtypes: Iterable[str]
) -> None:
    """Refuse a checkpoint whose tensors are not exactly those of `config`, before anything is allocated.

    Raises `InvalidInputError` naming a missing tensor, an unknown one, one of the wrong shape or one of a dtype not in
    `dtypes`. With tied embeddings a stored output head is unknown, unless its bits equal the embedding's.
    """
    expected, allowed = naming.of(config), tuple(dtypes)
    for name, (ours, _) in expected.items():
        if name not in tensors:
            raise InvalidInputError(f"{where}: tensor {name!r} is missing; the config asks for {config.shape(ours)}.")
        stored = tensors[name]
        if stored.shape != config.shape(ours):
            raise InvalidInputError(
                f"{where}: tensor {name!r} must have shape {config.shape(ours)} by the config, got {stored.shape}."
            )
        if stored.dtype not in allowed:
            raise InvalidInputError(
                f"{where}: tensor {name!r} has dtype {stored.dtype}; read are {', '.join(allowed)}."
            )
    head = naming.model["head"]
    if config.tied_embeddings and head in tensors:
        _check_tied(where, tensors[head], tensors[naming.model["embedding"]], head)
    unknown = [n for n in tensors if n not in expected and n != head and not naming.derived(n)]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise InvalidInputError(
            f"{where}: tensor {unknown[0]!r}{more} is not part of this architecture, and would be ignored silently. "
            f"The decoder implements {', '.join(sorted(naming.layer.values()))}."
        )


def _check_tied(where: str, head: StoredTensor, embedding: StoredTensor, name: str) -> None:
    same = head.shape == embedding.shape and head.dtype == embedding.dtype
    if not same or head.read().tobytes() != embedding.read().tobytes():
        raise InvalidInputError(
            f"{where}: the config ties the output head to the embedding, but tensor {name!r} differs from it."
        )


def build_decoder(
    where: str,
    config: DecoderConfig,
    tensors: Mapping[str, StoredTensor],
    naming: Naming,
    *,
    dtype: str,
    sharding: KvSharding | None,
    progress: Progress | None,
) -> Decoder:
    """The decoder on its devices, weight by weight: the host holds at most one stacked weight beside what is done.

    `tensors` passed `check_tensors`. Under `sharding` each device gets its own slice and nothing else.
    """
    name_of = {ours_and_layer: name for name, ours_and_layer in naming.of(config).items()}
    abstract = abstract_decoder(config, dtype)
    total, done = len(jax.tree.leaves(abstract)), 0

    def fill(ours: str, position: int | None, struct: jax.ShapeDtypeStruct) -> jax.Array:
        nonlocal done
        if position is None:
            host = _converted(where, name_of[ours, None], tensors, struct.dtype)
        else:
            host = np.empty(stored_shape(config, ours), struct.dtype)
            for block in range(config.num_blocks):
                layer = block * len(config.block) + position
                parts = FUSED_WEIGHTS.get(ours, (ours,))
                names = {part: name_of[part, layer] for part in parts}
                read = {part: _converted(where, name, tensors, struct.dtype) for part, name in names.items()}
                host[block] = config.fuse(ours, read)
        placed = _place(host, None if sharding is None else sharding.named(config.partition(ours, sharding)))
        done += 1
        if progress is not None:
            progress(ours, done, total)
        return placed

    return map_weights(fill, abstract)


def _place(host: np.ndarray, sharding: NamedSharding | None) -> jax.Array:
    if sharding is None:
        return jnp.asarray(host)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _converted(where: str, name: str, tensors: Mapping[str, StoredTensor], dtype: jnp.dtype) -> np.ndarray:
    value = tensors[name].read()
    if dtype == np.float16 and value.dtype != np.float16:
        largest = float(np.abs(value.astype(np.float32)).max(initial=0.0))
        if largest > 65504.0:
            raise InvalidInputError(
                f"{where}: tensor {name!r} holds {largest}, beyond float16. Load as bfloat16 or float32."
            )
    return value.astype(dtype, copy=False)

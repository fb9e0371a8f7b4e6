"""Equinox language models on a paged KV cache, with attention kernels that can be swapped and certified.

Importing `paged` imports neither jax nor numpy-heavy parts: public names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "AttentionSpec": "paged.common",
    "CacheNamespace": "paged.common",
    "Capabilities": "paged.common",
    "PageTable": "paged.common",
    "StorageLayout": "paged.common",
    "build_page_table": "paged.common",
    "ControlPlane": "paged.control",
    "AttentionBackend": "paged.backends.protocol",
    "AttentionExtras": "paged.backends.protocol",
    "KvArrays": "paged.backends.protocol",
    "KvSharding": "paged.backends.sharding",
    "attention_step": "paged.backends.step",
    "get_backend": "paged.backends.registry",
    "load_model": "paged.models.checkpoint",
    "Decoder": "paged.models",
    "Runtime": "paged.engine",
    "Generator": "paged.engine",
    "OfflineEngine": "paged.engine",
    "SamplingParams": "paged.engine",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from paged.backends.protocol import AttentionBackend, AttentionExtras, KvArrays
    from paged.backends.registry import get_backend
    from paged.backends.sharding import KvSharding
    from paged.backends.step import attention_step
    from paged.common import AttentionSpec, CacheNamespace, Capabilities, PageTable, StorageLayout, build_page_table
    from paged.control import ControlPlane
    from paged.engine import Generator, OfflineEngine, Runtime, SamplingParams
    from paged.models import Decoder
    from paged.models.checkpoint import load_model


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'paged' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

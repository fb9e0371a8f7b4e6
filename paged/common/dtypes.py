"""Element sizes by dtype name.

`np.dtype` cannot name bfloat16 or the fp8 formats without `ml_dtypes`, and sizing a pool needs no arithmetic, so the
names and sizes are a table (requirement K2). `fn` and `fnuz` encode the same byte differently (0x38 is 1.0 and 0.5,
0x80 is -0 and NaN), so the encoding is part of the name, and of every layout and namespace (scenario F1).
"""

from __future__ import annotations

from types import MappingProxyType

from paged.common.checks import show
from paged.common.errors import InvalidInputError

ELEMENT_BYTES = MappingProxyType(
    {
        "bfloat16": 2,
        "float16": 2,
        "float32": 4,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2fnuz": 1,
        "int8": 1,
    }
)
"""Bytes of one element, by dtype name. The closed list of dtypes that a pool may have."""

FP8_DTYPES = frozenset(name for name in ELEMENT_BYTES if name.startswith("float8"))


def check_dtype(owner: str, field: str, name: object) -> str:
    """`name` if it is in the table; a dtype object is refused, because not every environment can make one."""
    if not isinstance(name, str) or name not in ELEMENT_BYTES:
        raise InvalidInputError(
            f"{owner}.{field} must be the name of a dtype, one of {', '.join(ELEMENT_BYTES)}; got {show(name)}."
        )
    return str(name)


def element_bytes(name: str) -> int:
    """Bytes of one element of dtype `name`."""
    return ELEMENT_BYTES[check_dtype("element_bytes", "name", name)]

"""Element sizes come from a table in this package (requirement K2)."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from paged.common import InvalidInputError, StorageLayout
from paged.common.dtypes import ELEMENT_BYTES, FP8_DTYPES, element_bytes

WITHOUT_ML_DTYPES = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "ml_dtypes":
            raise ImportError("ml_dtypes is blocked")
sys.meta_path.insert(0, Block())
from paged.common import StorageLayout
from paged.common.dtypes import ELEMENT_BYTES
shapes = [StorageLayout(num_layers=2, num_pages=3, tokens_per_page=4, num_kv_heads=2, head_dim=8, dtype=name)
          for name in ELEMENT_BYTES]
print([shape.total_pool_bytes for shape in shapes], "ml_dtypes" in sys.modules)
"""


def test_a_pool_of_any_dtype_is_sized_without_ml_dtypes():
    run = subprocess.run([sys.executable, "-c", WITHOUT_ML_DTYPES], capture_output=True, text=True, check=True)
    elements = 2 * 3 * 4 * 2 * 16
    assert run.stdout.strip() == f"{[elements * size for size in (2, 2, 4, 1, 1, 1, 1, 1)]} False"


def test_sizes_agree_with_the_types_themselves_where_those_can_be_named():
    for name in ("float16", "float32", "int8"):
        assert element_bytes(name) == np.dtype(name).itemsize
    if importlib.util.find_spec("ml_dtypes"):
        import ml_dtypes

        for name in set(ELEMENT_BYTES) - {"float16", "float32", "int8"}:
            assert element_bytes(name) == np.dtype(getattr(ml_dtypes, name)).itemsize


def test_scenario_f1_the_two_fp8_encodings_are_different_dtypes_of_a_layout():
    assert {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"} == FP8_DTYPES
    shapes = {
        StorageLayout(num_layers=1, num_pages=2, tokens_per_page=1, num_kv_heads=1, head_dim=1, dtype=name)
        for name in FP8_DTYPES
    }
    assert len(shapes) == len({shape.to_bytes() for shape in shapes}) == 4


def test_an_unknown_name_is_refused_with_the_names_there_are():
    with pytest.raises(InvalidInputError) as caught:
        element_bytes("float8_e4m3")
    assert str(caught.value) == (
        "element_bytes.name must be the name of a dtype, one of bfloat16, float16, float32, float8_e4m3fn, "
        "float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz, int8; got 'float8_e4m3'."
    )


def test_the_table_cannot_be_changed():
    with pytest.raises(TypeError):
        ELEMENT_BYTES["float64"] = 8  # type: ignore[index]

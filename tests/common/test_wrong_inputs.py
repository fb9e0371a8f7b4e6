"""Every public constructor and function refuses wrong input with one named error (requirement K7).

One row a callable: good arguments, and what kind of value each argument is. Every wrong value of that kind is tried in
its place. A callable or an argument without a row fails the last two tests.
"""

import dataclasses
import inspect

import numpy as np
import pytest

import paged.common
from paged.common import (
    AttentionSpec,
    CacheNamespace,
    Capabilities,
    InvalidInputError,
    NumericModel,
    PagedError,
    PageTable,
    Range,
    StorageLayout,
    build_page_table,
    pages_for,
)
from paged.common.dtypes import element_bytes


class Hostile:
    """Fails whatever is asked of it."""

    def _fail(self, *args, **kwargs):
        raise RuntimeError("hostile")

    __repr__ = __str__ = __eq__ = __hash__ = __len__ = __iter__ = __array__ = __index__ = __float__ = __bool__ = _fail


def nested(depth: int) -> list:
    out: list = []
    for _ in range(depth):
        out = [out]
    return out


NAN, INF, HUGE = float("nan"), float("inf"), 10**5000
ANYTHING = [
    None,
    b"1",
    {},
    complex(1, 1),
    nested(2000),
    Hostile(),
    object(),
    np.array([[1.5]]),
    np.timedelta64(3, "s"),
    np.datetime64("2020"),
    "x" * 10**6,
    int,
]
NEITHER_NONE_NOR_TEXT = [x for x in ANYTHING if x is not None and not isinstance(x, str)]
INTS = ["3", 1.5, NAN, INF, np.float64(2), True, np.bool_(True), [3], HUGE, -HUGE, 2**63, -1]
NUMBERS = ["1.0", NAN, INF, -INF, True, np.bool_(True), np.float32("nan"), [1.0], np.array(1.0), HUGE]
NOT_FLOAT32 = [1e300, -1e300, 1e-300, 1e-40, 3.5e38]
FINGERPRINTS = [*NEITHER_NONE_NOR_TEXT, None, "\ud800", 0, 1.5, np.str_("x")]
WRONG = {
    "int": [*ANYTHING, *INTS, np.array(3)],
    "positive": [*ANYTHING, *INTS, np.array(3), 0],
    "int or none": [*ANYTHING[1:], *INTS],
    "positive or none": [*ANYTHING[1:], *INTS, 0],
    "integers": [*ANYTHING, *INTS, np.array([1.5]), np.array([2, -1]), np.array(["1"])],
    "number": [*ANYTHING, *NUMBERS],
    "float32": [*ANYTHING, *NUMBERS, *NOT_FLOAT32],
    "positive float32 or none": [*ANYTHING[1:], *NUMBERS, *NOT_FLOAT32, 0, -0.0, -1.0],
    "bool": [*ANYTHING, 0, 1, "true", NAN, [True], np.array(True)],
    "dtype": [*ANYTHING, "", "float64", "BFLOAT16", 2, np.float32, np.dtype("float32"), ["float32"]],
    "choice": [*ANYTHING, "", "other", 1, ["float32"]],
    "choice or none": [*ANYTHING[1:], "", "other", 1, ["float32"]],
    "name of anything": [*NEITHER_NONE_NOR_TEXT, None, 1],
    "name": [*NEITHER_NONE_NOR_TEXT, None, "", 1],
    "names": [*ANYTHING, "cpu", 3, {3}, [None], {""}, [["cpu"]], [Hostile()]],
    "head dims": [*ANYTHING, 64, "64", {"64"}, {0}, [-1], [True], [64.0], [HUGE], [Hostile()]],
    "range or set": [*ANYTHING, 4, (1, 4), [1, 4], range(1, 4), "1..4", {0}, {True}, {"1"}, {1.5}, set(), {HUGE}],
    "range": [*ANYTHING, 4, (1, 4), range(1, 4), "1..4", {"low": 1, "high": 4, "powers_of_two": False}],
    "vector": [
        *ANYTHING,
        *(5, 1.5, {1, 2}, range, (x for x in (1, 2)), "12"),
        *([[0, 1]], [1.5], [True, 1], [1, np.bool_(False)], [NAN], ["1"], [None], [[1], [1, 2]], [Hostile()]),
        *([2**31], [-(2**31) - 1], [2**70], [HUGE], np.array([2**40]), np.array([2**64 - 1])),
        *(np.array([2.0]), np.array([True]), np.array([1], object), np.array(["1"]), np.zeros(0)),
        *(np.array([1], "m8[s]"), np.array([1], "M8[s]"), np.zeros((2, 2), np.int32), np.zeros(2, [("a", np.int32)])),
    ],
    "lengths": [
        *ANYTHING,
        *(5, 1.5, "11", [-1, 1], [1.5, 1], [True, 1], [2**31, 1], [HUGE, 1], [[1], [1]], np.array([1.0, 1.0])),
    ],
    "pages": [
        *ANYTHING,
        *(5, "ab", [1, 2], [[1]], np.zeros((2, 2)), np.array(5), (x for x in ([1], [2]))),
        *([[1.5], [2]], [[1], ["2"]], [[1], None], [[True], [2]], [[1], [[2]]], [[1], Hostile()]),
        *([[1], np.array([2.0])], [[1], [HUGE]], [[2**40], [1]], [[-1], [2]], [[0], [1]], [[1], [8]], [[1], []]),
    ],
    "namespace": [
        *(x for x in NEITHER_NONE_NOR_TEXT if not isinstance(x, bytes)),
        *(NAN, INF, HUGE, -HUGE, 2**63, "\ud800", ["x"]),
        *(np.int64(3), np.float64(1.5), np.str_("x"), np.bytes_(b"x"), np.bool_(True)),
    ],
    "fingerprint": FINGERPRINTS,
    "weights": [*FINGERPRINTS, ""],
    "layout": [*ANYTHING, 1, {"num_layers": 1}],
    "spec": [*ANYTHING, 1, 0.5],
}

LAYOUT = {"num_layers": 2, "num_pages": 4, "tokens_per_page": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": "bfloat16"}
STEP = {"query_lens": [1, 1], "kv_lens": [3, 2], "pages": [[1], [2]], "tokens_per_page": 4, "num_pages": 4}
TABLE = build_page_table(**STEP)
SHAPE = {"rows": 2, "tokens": 2, "listed_pages": 2, "max_query_len": 1, "max_kv_len": 3}
CAPABILITIES = {
    "dtypes": frozenset({"bfloat16"}),
    "kv_dtypes": frozenset({"bfloat16"}),
    "page_sizes": Range(1, 64),
    "head_dims": frozenset({8}),
    "group_sizes": Range(1, 8),
    "features": frozenset(),
    "numerics": "N0",
}
CAPABLE = Capabilities(**CAPABILITIES)
NAMESPACE = {"weights": "w", "revision": 0, "tokenizer": "t", "kv_dtype": "bfloat16"}
OPTIONAL = [f.name for f in dataclasses.fields(CacheNamespace) if f.name not in NAMESPACE]

CALLS = {
    StorageLayout: (
        LAYOUT,
        {
            **dict.fromkeys(("num_layers", "num_pages", "tokens_per_page", "num_kv_heads", "head_dim"), "positive"),
            "value_head_dim": "positive or none",
            "dtype": "dtype",
            "kv_head_shards": "positive",
            "pool_replicas": "positive",
        },
    ),
    PageTable: (
        {f.name: getattr(TABLE, f.name) for f in dataclasses.fields(PageTable)},
        {
            **dict.fromkeys(("query_offsets", "page_offsets", "page_ids"), "vector"),
            **dict.fromkeys(("last_page_len", "kv_lens", "write_slots"), "vector"),
            **dict.fromkeys(("max_query_len", "max_kv_len"), "int"),
            **dict.fromkeys(("tokens_per_page", "num_pages"), "positive"),
        },
    ),
    build_page_table: (
        STEP,
        {
            "query_lens": "lengths",
            "kv_lens": "lengths",
            "pages": "pages",
            "tokens_per_page": "positive",
            "num_pages": "positive",
            "max_query_len": "int or none",
            "max_kv_len": "int or none",
        },
    ),
    AttentionSpec: (
        {"scale": 0.5},
        {"scale": "float32", "causal": "bool", "window": "positive or none", "soft_cap": "positive float32 or none"},
    ),
    Range: ({"low": 1, "high": 4}, {"low": "positive", "high": "positive", "powers_of_two": "bool"}),
    NumericModel: (
        {"name": "mine"},
        {
            "name": "name",
            "weights": "choice",
            "partials": "choice",
            "normalised": "bool",
            "exact": "bool",
            "exp_error_log2": "number",
            "tanh_error_log2": "number",
        },
    ),
    Capabilities: (
        CAPABILITIES,
        {
            **dict.fromkeys(("dtypes", "kv_dtypes", "features", "promises", "regimes", "platforms"), "names"),
            "page_sizes": "range",
            "group_sizes": "range or set",
            "decode_numerics": "choice or none",
            **dict.fromkeys(("numerics", "pool_layout", "pool_storage", "poison"), "choice"),
            "head_dims": "head dims",
            "max_page_id": "positive",
            "max_pool_bytes": "positive",
        },
    ),
    CacheNamespace: (
        NAMESPACE,
        {
            "weights": "weights",
            "tokenizer": "fingerprint",
            "revision": "int",
            "kv_dtype": "dtype",
            **dict.fromkeys(OPTIONAL, "namespace"),
        },
    ),
    pages_for: ({"kv_lens": 3, "tokens_per_page": 4}, {"kv_lens": "integers", "tokens_per_page": "positive"}),
    element_bytes: ({"name": "int8"}, {"name": "dtype"}),
    TABLE.pad: (SHAPE, dict.fromkeys(SHAPE, "positive")),
    TABLE.pages_of: ({"row": 0}, {"row": "int"}),
    StorageLayout(**LAYOUT).first_head_of_rank: ({"rank": 0}, {"rank": "int"}),
    StorageLayout(**LAYOUT).group_size: ({"num_query_heads": 4}, {"num_query_heads": "positive"}),
    StorageLayout(**LAYOUT).page_and_offset: ({"slot": 0}, {"slot": "int"}),
    CAPABLE.require_layout: (
        {"backend": "b", "layout": StorageLayout(**LAYOUT), "num_query_heads": 4, "dtype": "bfloat16"},
        {"layout": "layout", "num_query_heads": "positive", "dtype": "dtype"},
    ),
    CAPABLE.require_spec: (
        {"backend": "b", "spec": AttentionSpec(scale=1.0)},
        {"spec": "spec", "sinks": "bool", "kv_scales": "bool"},
    ),
    CAPABLE.require_platform: ({"backend": "b", "platform": "cpu"}, {"platform": "name of anything"}),
}
ARGUMENTS = [
    pytest.param(call, good, name, kind, id=f"{call.__qualname__}-{name}")
    for call, (good, kinds) in CALLS.items()
    for name, kind in kinds.items()
]


def complaint(call, arguments) -> str | None:
    """What is wrong with how `call` takes `arguments` that it must refuse; None if it refuses them as promised."""
    try:
        call(**arguments)
    except InvalidInputError as error:
        text = str(error)
        if len(text) > 600:
            return f"a message of {len(text)} characters is not for reading"
        return None
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:200]
    return "accepted"


@pytest.mark.parametrize(("call", "good", "name", "kind"), ARGUMENTS)
def test_wrong_input_is_refused_by_name(call, good, name, kind):
    call(**good)
    for i, wrong in enumerate(WRONG[kind]):
        arguments = {**good, name: wrong}
        assert complaint(call, arguments) is None, f"{name} = wrong value {i} of kind {kind!r}"
        with pytest.raises(InvalidInputError) as caught:
            call(**arguments)
        assert name in str(caught.value) or (name == "pages" and "page_ids" in str(caught.value))


@pytest.mark.parametrize("wrong", [*WRONG["choice"]], ids=range(len(WRONG["choice"])))
def test_only_features_of_the_vocabulary_can_be_asked_for(wrong):
    assert complaint(CAPABLE.require_features, {"backend": "b"}) == "accepted"
    with pytest.raises(InvalidInputError, match=r"require_features\.feature must be one of decode, kv_scales, "):
        CAPABLE.require_features("b", wrong)


def test_every_public_name_is_in_the_table():
    exported = {name: value for name, value in vars(paged.common).items() if not name.startswith("_")}
    callables = {
        value
        for value in exported.values()
        if callable(value) and not (isinstance(value, type) and issubclass(value, PagedError))
    }
    assert callables <= set(CALLS)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)
def test_every_argument_is_in_the_table(call):
    assert set(inspect.signature(call).parameters) - {"backend"} == set(CALLS[call][1])


def test_the_table_would_notice_a_type_that_checks_nothing_and_one_that_fails_on_its_own():
    @dataclasses.dataclass(frozen=True)
    class Careless:
        rows: int

    @dataclasses.dataclass(frozen=True)
    class Clumsy:
        rows: int

        def __post_init__(self):
            if self.rows < 0:
                raise InvalidInputError("rows")

    assert complaint(Careless, {"rows": "three"}) == "accepted"
    assert complaint(Clumsy, {"rows": -1}) is None
    assert complaint(Clumsy, {"rows": "three"}).startswith("TypeError")

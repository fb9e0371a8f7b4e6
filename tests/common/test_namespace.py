"""What makes cached K and V interchangeable, field by field (requirements C6, X1)."""

import dataclasses
import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.common import CacheNamespace, InvalidInputError

FIELDS = [field.name for field in dataclasses.fields(CacheNamespace)]
OPTIONAL = [field.name for field in dataclasses.fields(CacheNamespace) if field.default is None]


def namespace(**changes) -> CacheNamespace:
    fields = {"weights": "sha256:1", "revision": 0, "tokenizer": "sha256:2", "kv_dtype": "float8_e4m3fn", **changes}
    return CacheNamespace(**fields)


def other(name: str, value):
    """A valid value of the field that differs from `value`."""
    if name == "kv_dtype":
        return "float8_e4m3fnuz" if value != "float8_e4m3fnuz" else "int8"
    if name == "revision":
        return value + 1
    return "other" if value is None else f"{value} "


FULL = namespace(**{name: f"the {name}" for name in OPTIONAL})


@pytest.mark.parametrize("base", [namespace(), FULL], ids=["defaults", "all fields set"])
@pytest.mark.parametrize("name", FIELDS)
def test_changing_one_field_alone_changes_the_digest(base, name):
    changed = dataclasses.replace(base, **{name: other(name, getattr(base, name))})
    assert [f for f in FIELDS if getattr(changed, f) != getattr(base, f)] == [name]
    assert changed.digest() != base.digest()
    assert changed != base


@pytest.mark.parametrize("name", OPTIONAL)
def test_nothing_empty_zero_and_false_are_different_values(name):
    values = (None, "", 0, 0.0, -0.0, False, b"", "0", "None", b"0", 1, True, 1.0, "1")
    digests = {namespace(**{name: value}).digest() for value in values}
    assert len(digests) == len(values)


def test_every_field_that_requirement_c6_names_is_there():
    assert set(FIELDS) >= {"weights", "revision", "tokenizer", "adapter", "tenant", "rope", "kv_dtype"}
    assert set(FIELDS) >= {"kv_quantisation", "layout", "sharding", "prompt_embeddings", "multimodal"}


def test_a_field_added_later_enters_the_digest_by_itself():
    wider = dataclasses.make_dataclass(
        "Wider", [("extra", str | None, None)], bases=(CacheNamespace,), frozen=True, kw_only=True, eq=False
    )
    fields = {f.name: getattr(namespace(), f.name) for f in dataclasses.fields(CacheNamespace)}
    digests = {namespace().digest(), wider(**fields).digest(), wider(**fields, extra="x").digest()}
    assert len(digests) == 3


def test_the_digest_is_sha256_over_typed_length_prefixed_fields():
    base = namespace(adapter=b"\x00\x01", tenant=0.5, salt=True, rope="ü", layout=-7)
    text = {
        "weights": ("str", b"sha256:1"),
        "revision": ("int", b"0"),
        "tokenizer": ("str", b"sha256:2"),
        "adapter": ("bytes", b"\x00\x01"),
        "tenant": ("float", b"0x1.0000000000000p-1"),
        "salt": ("bool", b"True"),
        "rope": ("str", b"\xc3\xbc"),
        "kv_dtype": ("str", b"float8_e4m3fn"),
        "layout": ("int", b"-7"),
    }
    message = b"paged.CacheNamespace.v1"
    for name in FIELDS:
        kind, value = text.get(name, ("NoneType", b""))
        for part in (name.encode(), kind.encode(), value):
            message += len(part).to_bytes(8, "little") + part
    assert base.digest() == hashlib.sha256(message).digest()
    assert len(base.digest()) == 32


def test_scenario_c5_an_adapter_and_a_salt_of_the_same_text_do_not_meet():
    assert namespace(adapter="X").digest() != namespace(salt="X").digest()
    assert namespace(adapter="X", salt="Y").digest() != namespace(adapter="Y", salt="X").digest()
    assert namespace(adapter="XY").digest() != namespace(adapter="X", salt="Y").digest()


def test_scenario_c6_adapters_are_told_apart_by_their_weights_and_not_by_a_name():
    first, second = (hashlib.sha256(weights).hexdigest() for weights in (b"adapter weights 1", b"adapter weights 2"))
    assert namespace(adapter=first).digest() != namespace(adapter=second).digest()


def test_scenario_c8_a_new_revision_of_the_weights_is_another_namespace():
    assert namespace(revision=0).digest() != namespace(revision=1).digest()
    assert namespace(weights="sha256:1").digest() != namespace(weights="sha256:3").digest()


def test_scenario_f1_the_encoding_of_fp8_is_part_of_the_namespace():
    names = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
    assert len({namespace(kv_dtype=name).digest() for name in names}) == 4


def test_two_tenants_share_nothing():
    assert namespace(tenant="a").digest() != namespace(tenant="b").digest() != namespace(tenant=None).digest()


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.binary(max_size=8),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)


def typed(value):
    return (type(value), value.hex() if isinstance(value, float) else value)


@settings(max_examples=200, deadline=None)
@given(*[st.fixed_dictionaries(dict.fromkeys(OPTIONAL, plain))] * 2)
def test_digests_agree_exactly_when_every_field_agrees_in_type_and_value(left, right):
    one, two = namespace(**left), namespace(**right)
    same = all(typed(left[name]) == typed(right[name]) for name in OPTIONAL)
    assert (one.digest() == two.digest()) == same
    assert (one == two) == same
    again = CacheNamespace.from_bytes(one.to_bytes())
    assert [typed(getattr(again, name)) for name in FIELDS] == [typed(getattr(one, name)) for name in FIELDS]
    assert again == one
    assert hash(again) == hash(one)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": ""}, "CacheNamespace.weights must be a fingerprint of the weights, got ''."),
        ({"weights": None}, "CacheNamespace.weights must be a fingerprint (str), got None."),
        ({"tokenizer": 3}, "CacheNamespace.tokenizer must be a fingerprint (str), got 3."),
        ({"revision": True}, "CacheNamespace.revision must be an int, got True of type bool. Pass a Python int."),
        ({"revision": -1}, "CacheNamespace.revision must be in 0..9223372036854775807, got -1."),
        ({"adapter": float("nan")}, "CacheNamespace.adapter must be finite, got nan."),
        ({"adapter": 2**64}, "CacheNamespace.adapter must fit 64 bits, got 18446744073709551616."),
        ({"rope": "\ud800"}, "CacheNamespace.rope must be text that UTF-8 can hold, got '\\ud800'."),
        (
            {"tenant": ["a"]},
            "CacheNamespace.tenant must be a plain str, int, float, bytes, bool or None, got ['a'] of type list.",
        ),
    ],
)
def test_refusals_say_which_field_and_what_it_held(change, message):
    with pytest.raises(InvalidInputError) as caught:
        namespace(**change)
    assert str(caught.value) == message

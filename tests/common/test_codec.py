"""One byte format: round trips, damage of every kind, and one encoding for each value (requirement K7, X3)."""

import json
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.common import (
    AttentionSpec,
    CacheNamespace,
    Capabilities,
    InvalidInputError,
    PageTable,
    Range,
    StorageLayout,
    build_page_table,
)

LAYOUT = StorageLayout(num_layers=2, num_pages=4, tokens_per_page=4, num_kv_heads=2, head_dim=8, dtype="bfloat16")
OBJECTS = [
    LAYOUT,
    build_page_table(query_lens=[2, 1], kv_lens=[5, 2], pages=[[1, 3], [2]], tokens_per_page=4, num_pages=4),
    build_page_table(query_lens=[], kv_lens=[], pages=[], tokens_per_page=4, num_pages=2),
    AttentionSpec(scale=0.1, causal=False, window=3, soft_cap=30.0),
    CacheNamespace(weights="w", revision=3, tokenizer="t", kv_dtype="int8", adapter=b"\x00\xff", salt=0.5, rope="ü"),
    Capabilities(
        dtypes=frozenset({"bfloat16"}),
        kv_dtypes=frozenset({"bfloat16", "int8"}),
        page_sizes=Range(1, 64, powers_of_two=True),
        head_dims=frozenset({64, 128}),
        group_sizes=Range(1, 8),
        features=frozenset({"lse"}),
        numerics="N0",
    ),
]
each_object = pytest.mark.parametrize("made", OBJECTS, ids=lambda made: type(made).__name__)


def sealed(header: bytes, words: bytes = b"") -> bytes:
    """A frame around any header, with a checksum that holds, so that the checks behind it are reached."""
    body = b"PGD1" + struct.pack("<I", len(header)) + header + words
    return body + struct.pack("<I", zlib.crc32(body))


def parts(data: bytes) -> tuple[dict, bytes]:
    (size,) = struct.unpack_from("<I", data, 4)
    return json.loads(data[8 : 8 + size]), data[8 + size : -4]


def compact(header) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def refused(kind: type, data: object) -> str:
    with pytest.raises(InvalidInputError) as caught:
        kind.from_bytes(data)
    text = str(caught.value)
    assert len(text) < 600
    return text


@each_object
def test_bytes_give_an_equal_object_and_the_same_bytes(made):
    data = made.to_bytes()
    for form in (data, bytearray(data), memoryview(data)):
        again = type(made).from_bytes(form)
        assert again == made
        assert again.to_bytes() == data


def test_the_format_is_what_its_description_says():
    header = (
        b'{"arrays":[],"fields":{"dtype":"bfloat16","head_dim":8,"kv_head_shards":1,"num_kv_heads":2,"num_layers":2,'
        b'"num_pages":4,"pool_replicas":1,"tokens_per_page":4,"value_head_dim":8},"kind":"StorageLayout","version":1}'
    )
    assert LAYOUT.to_bytes() == sealed(header)
    table = OBJECTS[1]
    header, words = parts(table.to_bytes())
    assert next(name for name, _ in header["arrays"]) == "query_offsets"
    assert struct.unpack("<3i", words[:12]) == (0, 2, 3)


@each_object
def test_cut_short_or_prolonged_bytes_are_refused(made):
    data = made.to_bytes()
    for length in range(len(data)):
        refused(type(made), data[:length])
    refused(type(made), data + b"\x00")
    refused(type(made), data + data)


@each_object
def test_every_flipped_byte_is_refused(made):
    data = made.to_bytes()
    for i in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            text = refused(type(made), data[:i] + bytes([data[i] ^ flip]) + data[i + 1 :])
            assert i < 8 or "the checksum does not match; the bytes are damaged or cut short" in text


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(OBJECTS), st.binary(max_size=300), st.booleans())
def test_arbitrary_bytes_are_refused(made, noise, framed):
    refused(type(made), sealed(noise) if framed else noise)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(OBJECTS), st.data())
def test_any_json_in_any_place_is_refused_or_gives_an_object_with_those_bytes(made, data):
    header, words = parts(made.to_bytes())
    place = data.draw(st.sampled_from([header, header["fields"]]))
    place[data.draw(st.sampled_from(sorted(place)) | st.text(max_size=5))] = data.draw(json_values)
    changed = sealed(compact(header), words)
    try:
        again = type(made).from_bytes(changed)
    except InvalidInputError:
        return
    assert again.to_bytes() == changed


@each_object
def test_missing_unknown_and_repeated_fields_are_named(made):
    kind = type(made)
    header, words = parts(made.to_bytes())
    for name in list(header["fields"]):
        fields = {k: v for k, v in header["fields"].items() if k != name}
        assert refused(kind, sealed(compact({**header, "fields": fields}), words)).endswith(
            f"field {name!r} is missing."
        )
        text = compact(header).decode()
        twice = text.replace(f'"{name}":', f'"{name}":null,"{name}":', 1).encode()
        assert f"{name!r} is named twice" in refused(kind, sealed(twice, words))
    fields = {**header["fields"], "stride": 1}
    assert "unknown field 'stride'; the fields are [" in refused(
        kind, sealed(compact({**header, "fields": fields}), words)
    )
    for name in header:
        assert "damaged header (KeyError" in refused(
            kind, sealed(compact({k: v for k, v in header.items() if k != name}), words)
        )
    assert "not as" in refused(kind, sealed(compact({**header, "more": 1}), words))


@each_object
def test_other_kinds_and_versions_are_refused_by_name(made):
    kind = type(made).__name__
    header, words = parts(made.to_bytes())
    for version in (0, 2, -1, "1", None, 1.5, 10**400):
        text = refused(type(made), sealed(compact({**header, "version": version}), words))
        assert text.endswith("this release reads version 1.")
    for version in (True, 1.0):
        assert "not as" in refused(type(made), sealed(compact({**header, "version": version}), words))
    assert refused(type(made), sealed(compact({**header, "kind": "Pool"}), words)) == (
        f"{kind}.from_bytes: these bytes hold a 'Pool'."
    )
    others = {type(o) for o in OBJECTS} - {type(made)}
    assert all("these bytes hold a" in refused(other, made.to_bytes()) for other in others)


def test_declared_sizes_are_checked_before_anything_is_allocated():
    table = OBJECTS[1]
    header, words = parts(table.to_bytes())
    for length in (2**31, 2**62, 10**300, -1, 1.0, "3", True, None, [3]):
        for i in range(len(header["arrays"])):
            arrays = [list(entry) for entry in header["arrays"]]
            arrays[i][1] = length
            refused(PageTable, sealed(compact({**header, "arrays": arrays}), words))
    arrays = [[name, 2**61] for name, _ in header["arrays"]]
    assert "bytes follow the header" in refused(PageTable, sealed(compact({**header, "arrays": arrays}), words))
    for size in (97, 2**20, 2**20 + 1, 2**31, 2**32 - 1):
        data = b"PGD1" + struct.pack("<I", size) + bytes(100)
        assert f"header of {size} bytes declared, 96 bytes follow" in refused(PageTable, data)


def test_arrays_are_named_once_each_and_in_order():
    table = OBJECTS[1]
    header, words = parts(table.to_bytes())
    swapped = [header["arrays"][1], header["arrays"][0], *header["arrays"][2:]]
    for arrays in ([], swapped, header["arrays"] * 2, header["arrays"][:-1], [[["x"], 1]], [["x"]], "ab", {"a": 1}):
        refused(PageTable, sealed(compact({**header, "arrays": arrays}), words))
    fields = {**header["fields"], "kv_lens": 3}
    assert "'kv_lens' is both a field and an array" in refused(
        PageTable, sealed(compact({**header, "fields": fields}), words)
    )


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 200_000,
        b'{"a":' * 150_000,
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'"\xed\xa0\x80"',
        b"9" * 10_000,
        b'{"kind":"StorageLayout"',
    ],
    ids=["deep list", "deep object", "empty", "null", "list", "object", "not utf-8", "surrogate", "long int", "cut"],
)
def test_a_header_that_is_no_header_is_refused(header):
    assert "StorageLayout.from_bytes: damaged header (" in refused(StorageLayout, sealed(header))


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000, b"[" * 900 + b"]" * 900])
def test_numbers_that_are_not_finite_or_too_large_or_no_numbers_are_refused(number):
    for made, before in ((OBJECTS[3], b'"scale":0.1'), (LAYOUT, b'"head_dim":8')):
        header, words = parts(made.to_bytes())
        text = compact(header)
        assert before in text
        name = before[: before.index(b":") + 1]
        refused(type(made), sealed(text.replace(before, name + number), words))


def test_a_value_has_one_encoding():
    header, words = parts(OBJECTS[3].to_bytes())
    text = compact(header)
    for other in (
        text.replace(b'"scale":0.1', b'"scale":0.10'),
        text.replace(b'"scale":0.1', b'"scale":1e-1'),
        text.replace(b'"window":3', b'"window":3 '),
        text.replace(b'"soft_cap":30.0', b'"soft_cap":30'),
        text.replace(b"window", b"\\u0077indow"),
        json.dumps(header).encode(),
    ):
        assert other != text
        assert "not as AttentionSpec.to_bytes writes" in refused(AttentionSpec, sealed(other, words))
    namespace = OBJECTS[4]
    header, words = parts(namespace.to_bytes())
    for value in ({"bytes": "00FF"}, {"bytes": "00 ff"}, {"bytes": "00ff", "x": 1}, {"bytes": 1}, {"byte": "00"}, {}):
        header["fields"]["adapter"] = value
        refused(CacheNamespace, sealed(compact(header), words))


@pytest.mark.parametrize("data", [None, "PGD1", 5, [80, 71], object()])
def test_only_bytes_are_decoded(data):
    for made in OBJECTS:
        kind = type(made).__name__
        assert refused(type(made), data) == f"{kind}.from_bytes needs bytes, got {type(data).__name__}."


def test_what_from_bytes_would_refuse_is_not_written():
    with pytest.raises(
        InvalidInputError, match=r"CacheNamespace\.to_bytes: the fields take \d+ bytes, more than 1048576"
    ):
        CacheNamespace(weights="w" * 2**20, revision=0, tokenizer="t", kv_dtype="int8").to_bytes()

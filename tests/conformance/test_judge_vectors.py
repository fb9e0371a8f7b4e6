"""Generators: what they promise of their inputs, what they refuse, and that their predictions agree with the oracle."""

import dataclasses

import numpy as np
import pytest

from conformance import oracle
from conformance.case import AttendProblem, Case
from conformance.formats import FORMATS, cell, decode, is_nan, ordinal
from conformance.stream import Stream
from conformance.vectors import generate, owned_slots
from conformance.vectors.address import read_back
from paged.common import InvalidInputError

BASE = {
    "dtype": "bfloat16",
    "page": 16,
    "num_pages": 24,
    "kv_heads": 2,
    "head_dim": 64,
    "q_heads": 4,
    "query_lens": [7, 3, 1, 0, 2],
    "kv_lens": [53, 9, 130, 0, 0],
    "scale": 0.125,
    "layers": 2,
    "layer": 1,
}
LADDER = {"query_lens": [1, 0, 1], "kv_lens": [64, 0, 128]}
ATTEND = {
    "census": {},
    "address": {},
    "ladder": LADDER,
    "dyadic": {},
    "generic": {},
    "steep": {"kv_lens": [7, 3, 5, 0, 2], "drop": 8.5, "scale": 48**-0.5},
}


def case(generator: str, id: str = "test/case", **params) -> Case:
    base = {} if generator in ("append_slots", "append_step", "scrub", "copy_pages") else BASE
    return Case(id=id, tier=2, level="core", generator=generator, params={**base, **params}, clause=("attend.1",))


def test_a_stream_depends_on_its_name_alone():
    """Frozen words: another numpy, another machine, the same bits."""
    assert Stream("a", "b").words(2).tolist() == [17025321114378806056, 13220669726087691755]
    assert Stream("a", "c").words(2).tolist() != Stream("a", "b").words(2).tolist()
    s = Stream("case", "shape")
    x = s.normal(20000)
    assert abs(x.mean()) < 0.03
    assert abs(x.std() - 1) < 0.02
    assert sorted(s.permutation(50).tolist()) == list(range(50))
    assert set(s.integers(-2, 3, 500).tolist()) == {-2, -1, 0, 1, 2}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("generator", ATTEND)
def test_predictions_agree_with_the_oracle(generator, dtype):
    for extra in ({}, {"window": 19}, {"causal": False}, {"page_order": "strided"}):
        if generator == "ladder" and "window" in extra:
            continue
        v = generate(case(generator, dtype=dtype, **{**ATTEND[generator], **extra}))
        assert isinstance(v.problem, AttendProblem)
        got = oracle.attend(v.problem)
        assert np.all(np.isfinite(got.output))
        if v.predicted is None or (generator == "ladder" and dtype == "float32"):
            continue
        low, high = v.predicted
        slack = got.output_error + 2.0**-20 * np.abs(got.output) * (generator == "ladder")
        assert np.all(decode(low, dtype) <= got.output + FORMATS[dtype].unit_roundoff * np.abs(got.output) + slack)
        exact = cell(got.output - got.output_error, got.output + got.output_error, dtype)
        assert np.all(ordinal(exact[0], dtype) >= ordinal(low, dtype))
        assert np.all(ordinal(exact[1], dtype) <= ordinal(high, dtype))


@pytest.mark.parametrize("generator", ATTEND)
def test_only_owned_slots_hold_finite_numbers(generator):
    v = generate(case(generator, **ATTEND[generator]))
    p = v.problem
    owned = owned_slots(p)
    assert int(owned.sum()) == sum(p.table.kv_lens)
    sentinel = np.arange(len(owned)) % p.table.num_pages == 0
    for words in (p.keys, p.values):
        value = decode(words, p.kv_dtype)
        assert np.all(np.isfinite(value[owned]))
        assert not np.isfinite(value[~owned & ~sentinel[:, None]]).any()
        assert np.all(np.isfinite(value[sentinel]))


@pytest.mark.parametrize("generator", ATTEND)
def test_poison_changes_no_owned_word_and_no_prediction(generator):
    one, two = (generate(case(generator, **ATTEND[generator]), poison) for poison in ("any_bits", "finite"))
    owned = owned_slots(one.problem)
    np.testing.assert_array_equal(one.problem.keys[owned], two.problem.keys[owned])
    np.testing.assert_array_equal(one.problem.query, two.problem.query)
    assert np.all(np.isfinite(decode(two.problem.values, two.problem.kv_dtype)))
    if one.predicted is not None:
        np.testing.assert_array_equal(one.predicted, two.predicted)
    with pytest.raises(InvalidInputError, match="poison must be one of"):
        generate(case(generator, **ATTEND[generator]), "none")


def test_every_other_id_gives_other_inputs():
    one, two = (generate(case("generic", id)) for id in ("a", "b"))
    assert np.mean(one.problem.query == two.problem.query) < 0.1


def test_address_spells_what_it_reads():
    v = generate(case("address"))
    e = v.explain
    p = v.problem
    for token, head in ((0, 0), (6, 3), (9, 1), (10, 2)):
        place = read_back(decode(v.predicted[0][token, head], p.dtype), e["fields"], e["base"])
        j = int(e["target"][token, head])
        row = int(np.searchsorted(p.table.query_offsets, token, side="right") - 1)
        assert place is not None
        assert place["page"] == p.table.pages_of(row)[j // 16]
        assert (place["slot"], place["head"], place["row"], place["layer"]) == (j % 16, head // 2, row, 1)
    assert read_back(np.zeros(64), e["fields"], e["base"]) is None


def test_address_reaches_the_edges():
    """Newest, oldest and page-border tokens are all asked for."""
    v = generate(case("address", query_lens=[30], kv_lens=[130], window=40))
    position = v.problem.table.positions()
    target = v.explain["target"]
    assert np.any(target == position[:, None])
    assert np.any(target == position[:, None] - 39)
    assert np.any(target % 16 == 0)
    assert np.any(target % 16 == 15)


def test_address_beyond_16_bits_of_page_id():
    """A pool of more than 65,536 rows; every listed page needs the seventeenth bit."""
    v = generate(
        case(
            "address",
            page=1,
            num_pages=66000,
            kv_heads=1,
            q_heads=2,
            head_dim=16,
            layers=1,
            layer=0,
            query_lens=[1, 2],
            kv_lens=[7, 5],
            scale=0.25,
            page_order="high",
        )
    )
    assert v.problem.table.page_ids.min() >= 65536
    place = read_back(decode(v.predicted[0][0, 0], "bfloat16"), v.explain["fields"], v.explain["base"])
    assert place is not None
    assert place["page"] >= 65536


def test_ladder_means_differ_and_never_cancel():
    """With one mean for both rungs any scale returns the right answer; a zero by cancellation is not exact."""
    v = generate(case("ladder", **LADDER))
    for row, (first, second) in v.explain["means"].items():
        assert np.all(first != second), row
        assert np.all(first * second > 0)
    assert np.all(decode(v.predicted[0], "bfloat16")[:2] != 0)


@pytest.mark.parametrize("scale", [0.125, 1.0, 48**-0.5, 256**-0.5, 80**-0.5])
@pytest.mark.parametrize("cap", [None, 1.0])
def test_ladder_logits_are_multiples_of_ln_2_under_any_scale(scale, cap):
    lens = [48, 96] if cap else [64, 128]
    v = generate(case("ladder", query_lens=[1, 1], kv_lens=lens, scale=scale, soft_cap=cap))
    for t in oracle.terms(v.problem):
        octaves = t.logits / np.log(2)
        near = octaves > -100
        assert np.all(np.abs(octaves - np.rint(octaves))[near] < 2.0**-16)
        assert set(np.rint(octaves[near]).astype(int)) == {0, -1}
        assert np.all(octaves[~near] < -150)


def test_movers_keep_signalling_nans_out():
    for generator in ("append_slots", "scrub", "copy_pages"):
        size = {"tokens": 20} if generator == "append_slots" else {"pages": 5}
        params = {"dtype": "float16", "page": 4, "num_pages": 12, "kv_heads": 2, "head_dim": 8, "layers": 3, "layer": 1}
        for fill in ("bits", "special"):
            p = generate(case(generator, **params, **size, fill=fill)).problem
            for words in (p.keys, p.values, p.expected_keys):
                signalling = is_nan(words, "float16") & (words & 0x200 == 0)
                assert not signalling.any()
                assert is_nan(words, "float16").any()


def test_append_slots_cover_borders_and_padding():
    params = {"dtype": "bfloat16", "page": 4, "num_pages": 6, "kv_heads": 1, "head_dim": 4, "layers": 3, "layer": 1}
    none = generate(case("append_slots", **params, tokens=9, padding="none")).problem
    assert {4, 7, 23} <= set(none.slots.tolist())
    assert len(set(none.slots.tolist())) == 9
    mixed = generate(case("append_slots", **params, tokens=12, padding="interleaved")).problem
    assert mixed.slots[0] == -1
    assert (mixed.slots >= 0).any()
    single = generate(case("append_slots", **{**params, "page": 1}, tokens=5, padding="none")).problem
    assert sorted(single.slots.tolist()) == [1, 2, 3, 4, 5]
    every = generate(case("append_slots", **params, tokens=4, padding="all")).problem
    np.testing.assert_array_equal(every.expected_keys, every.keys)
    with pytest.raises(InvalidInputError, match="exceeds the 20 slots"):
        generate(case("append_slots", **params, tokens=21))


def test_append_step_follows_its_table():
    params = {k: v for k, v in BASE.items() if k not in ("q_heads", "scale")}
    rung = {"rows": 6, "tokens": 16, "listed_pages": 16, "max_query_len": 8, "max_kv_len": 256}
    p = generate(case("append_step", **params, rung=rung))
    move = p.problem
    np.testing.assert_array_equal(move.slots, move.table.write_slots)
    assert (move.slots[-3:] == -1).all()
    changed = np.argwhere((move.keys != move.expected_keys).any((2, 3)))
    assert {int(r) // 24 for r, _ in changed} == {1}
    assert len(changed) == 11


def test_copies_contain_a_swap_and_a_chain():
    params = {"dtype": "float32", "page": 2, "num_pages": 40, "kv_heads": 1, "head_dim": 2, "layers": 2}
    p = generate(case("copy_pages", **params, pages=8, padding="none")).problem
    both = set(p.source.tolist()) & set(p.target.tolist())
    assert len(both) >= 3
    assert p.source[1] == p.target[0]
    assert p.source[0] == p.target[1]


REFUSALS = [
    ("generic", {"dtype": "int8"}, "params.dtype must be one of"),
    ("generic", {"head_dim": 4096}, r"params.head_dim must be an int in 1..512, got 4096"),
    ("generic", {"num_pages": 1 << 18, "page": 1024}, "the pool would have"),
    ("generic", {"query_lens": [4000], "kv_lens": [65536], "q_heads": 2}, "the logits would have|the query would have"),
    ("generic", {"import": "os"}, "params.import is not a parameter"),
    ("generic", {"layer": 2}, "params.layer must be below layers = 2"),
    ("generic", {"q_heads": 5}, "not a multiple of kv_heads"),
    ("generic", {"num_pages": 5}, "too small"),
    ("generic", {"query_lens": [1]}, "has 1 rows, kv_lens 5"),
    ("generic", {"window": 0}, "params.window must be an int"),
    ("generic", {"causal": 1}, "params.causal must be true or false"),
    ("generic", {"rung": {"rows": 9}}, "params.rung must be an object"),
    ("generic", {"query_lens": [True] * 5}, r"params.query_lens\[0\] must be an int"),
    ("census", {"sinks": "random"}, "spoils the count"),
    ("address", {"sinks": "zero"}, "must be absent"),
    ("address", {"soft_cap": 5.0}, "leaks"),
    ("address", {"head_dim": 8}, "cannot address 130 tokens"),
    ("ladder", {}, "row 0 needs q <= 1"),
    ("ladder", {**LADDER, "window": 3}, "must be absent"),
    ("ladder", {**LADDER, "scale": 2.0**-9}, "too small"),
    ("steep", {}, "params.drop is missing"),
]


@pytest.mark.parametrize(("generator", "params", "message"), REFUSALS)
def test_refusals(generator, params, message):
    with pytest.raises(InvalidInputError, match=message):
        generate(case(generator, **params))


def test_an_unknown_generator_is_refused():
    with pytest.raises(InvalidInputError, match="generator must be one of"):
        generate(dataclasses.replace(case("generic"), generator="os.system"))

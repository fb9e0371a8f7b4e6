"""PrefixIndex alone: keys, matches, adoption, eviction (requirements C5, C6, X1, X2)."""

import dataclasses
import hashlib

import numpy as np
import pytest
from plane_helpers import make_layout, make_namespace, snapshot

from paged.common import CacheNamespace, InternalError, InvalidInputError
from paged.control import PrefixIndex
from paged.control.prefix_index import chain_key

SPACE = make_namespace()
NOBODY = np.zeros(32, np.bool_)


def make_index(tokens_per_page: int = 2, **kwargs) -> PrefixIndex:
    return PrefixIndex(make_layout(32, tokens_per_page), **kwargs)


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_a_prompt_matches_whole_pages_of_what_was_published():
    index = make_index()
    assert index.insert(SPACE, [1, 2, 3, 4, 5], pages(7, 3)).tolist() == [7, 3]
    assert index.match(SPACE, [1, 2, 3, 4, 9]).tolist() == [7, 3]
    assert index.match(SPACE, [1, 2, 3, 9, 9]).tolist() == [7]
    assert index.match(SPACE, [1, 9, 3, 4, 9]).tolist() == []
    assert index.match(SPACE, [3, 4, 9]).tolist() == []
    assert index.match(SPACE, []).tolist() == []
    assert len(index) == 2
    index.verify()


@pytest.mark.parametrize(("prompt", "matched"), [(7, 0), (8, 0), (9, 8), (16, 8), (17, 16), (24, 16), (25, 24)])
def test_a_match_leaves_a_token_to_compute(prompt, matched):
    index = make_index(8)
    index.insert(SPACE, list(range(40)), pages(1, 2, 3, 4, 5))
    assert index.match(SPACE, list(range(prompt))).shape[0] * 8 == matched


def test_keys_are_chained_blake2b_over_fixed_width_ids():
    root = SPACE.digest()
    one = (1).to_bytes(4, "little") + (70000).to_bytes(4, "little")
    key = hashlib.blake2b(one, key=root, person=b"paged.prefix.v1", digest_size=32).digest()
    assert chain_key(root, one) == key
    index = make_index()
    index.insert(SPACE, [1, 70000, 2, 3], pages(4, 5))
    assert index._key_of_page == {4: key, 5: chain_key(key, bytes([2, 0, 0, 0, 3, 0, 0, 0]))}
    assert chain_key(root, one) != hashlib.blake2b(one, key=root, digest_size=32).digest()


def other(value: object) -> object:
    """Another value that a field of its kind takes."""
    kinds = {int: lambda v: v + 1, str: lambda v: "float32" if v == "bfloat16" else v + "x", type(None): lambda v: ""}
    return kinds[type(value)](value)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CacheNamespace)])
def test_every_field_of_the_namespace_alone_defeats_the_match(field):
    index = make_index()
    index.insert(SPACE, [1, 2, 3], pages(4))
    assert index.match(SPACE, [1, 2, 3]).tolist() == [4]
    changed = dataclasses.replace(SPACE, **{field: other(getattr(SPACE, field))})
    assert index.match(changed, [1, 2, 3]).tolist() == []
    assert index.insert(changed, [1, 2, 3], pages(5)).tolist() == [5]
    assert index.match(SPACE, [1, 2, 3]).tolist() == [4]
    index.verify()


def test_two_tenants_share_nothing():
    index = make_index()
    index.insert(make_namespace(tenant="a"), [1, 2, 3], pages(4))
    assert index.match(make_namespace(tenant="b"), [1, 2, 3]).tolist() == []
    assert index.match(make_namespace(tenant=None), [1, 2, 3]).tolist() == []


def test_tokens_that_are_published_already_keep_their_page():
    index = make_index()
    index.insert(SPACE, [1, 2, 3, 4], pages(4, 5))
    assert index.insert(SPACE, [1, 2, 3, 4, 5, 6], pages(8, 9, 10)).tolist() == [10]
    assert index.match(SPACE, [1, 2, 3, 4, 5, 6, 0]).tolist() == [4, 5, 10]
    assert index.insert(SPACE, [1, 2, 7, 7], pages(4, 11)).tolist() == [11]
    index.verify()


@pytest.mark.parametrize("digest", [lambda key, data: b"x", lambda key, data: data[:1], lambda key, data: key])
def test_scenario_c7_a_collision_of_keys_can_only_miss(digest):
    index = make_index(chain=digest)
    index.insert(SPACE, [1, 2, 3, 4], pages(4, 5))
    assert index.match(SPACE, [1, 2, 9]).tolist() == [4]
    assert index.match(SPACE, [1, 3, 9]).tolist() == []
    assert index.match(SPACE, [2, 1, 2, 1, 9]).tolist() == []
    assert index.match(make_namespace(tenant="b"), [1, 2, 9]).tolist() == []
    index.insert(SPACE, [1, 5, 1, 2], pages(6, 7))
    assert index.match(SPACE, [1, 5, 1, 2, 9]).tolist() in ([], [6], [6, 7])
    assert index.match(SPACE, [1, 2, 1, 2, 9]).tolist() == [4]
    index.verify()


def test_eviction_takes_the_leaf_that_was_used_longest_ago():
    index = make_index()
    index.insert(SPACE, [1, 1, 2, 2, 3, 3], pages(1, 2, 3))
    index.insert(SPACE, [1, 1, 4, 4], pages(9, 4))
    index.insert(SPACE, [5, 5], pages(5))
    index.touch(index.match(SPACE, [1, 1, 2, 2, 3, 3, 0]))
    assert index.evict(2, NOBODY).tolist() == [4, 5]
    assert index.evict(2, NOBODY).tolist() == [3, 2]
    assert index.evict(9, NOBODY).tolist() == [1]
    assert index.evict(9, NOBODY).tolist() == []
    index.verify()


def test_a_pinned_page_keeps_itself_and_nothing_above_it():
    index = make_index()
    index.insert(SPACE, [1, 1, 2, 2, 3, 3], pages(1, 2, 3))
    index.insert(SPACE, [1, 1, 4, 4], pages(9, 4))
    pinned = NOBODY.copy()
    pinned[2] = True
    assert np.flatnonzero(index.evictable(pinned)).tolist() == [1, 3, 4]
    assert index.evict(2, pinned).tolist() == [3, 4]
    index.verify()
    assert index.evict(9, pinned).tolist() == [2, 1]  # the pinned page leaves the index before the one above it
    assert len(index) == 0
    index.verify()


def test_pinned_pages_are_forgotten_only_below_unpinned_ones_and_those_used_longest_ago_first():
    index = make_index()
    index.insert(SPACE, [1, 1, 2, 2, 3, 3], pages(1, 2, 3))
    index.insert(SPACE, [1, 1, 4, 4], pages(9, 4))
    index.insert(SPACE, [5, 5, 6, 6], pages(5, 6))
    index.insert(SPACE, [7, 7], pages(7))
    index.touch(index.match(SPACE, [1, 1, 2, 2, 3, 3, 0]))
    pinned = NOBODY.copy()
    pinned[[2, 3, 4, 6, 7]] = True
    assert index.evict(1, pinned).tolist() == [4, 6, 5]  # 4 was used before 6, and alone freed nothing
    assert index.evict(1, pinned).tolist() == [3, 2, 1]
    assert index.evict(1, pinned).tolist() == []
    assert np.flatnonzero(index.held).tolist() == [7]
    index.verify()


def test_what_is_evictable_is_what_eviction_gets():
    rng = np.random.default_rng(3)
    for _ in range(60):
        index = make_index(1)
        free = list(range(1, 32))
        while len(free) > 6:
            tokens = rng.integers(0, 3, rng.integers(1, 6)).tolist()
            adopted = index.insert(SPACE, tokens, pages(*free[: len(tokens)]))
            free = [page for page in free if page not in adopted.tolist()]
        pinned = rng.random(32) < rng.choice([0.0, 0.1, 0.4])
        expected = np.flatnonzero(index.evictable(pinned)).tolist()
        part = int(rng.integers(0, len(expected) + 1))
        gone: list[int] = []
        for count in (part, 99):
            found = index.evict(count, pinned).tolist()
            assert len([page for page in found if not pinned[page]]) == min(count, len(expected) - len(gone))
            gone += [page for page in found if not pinned[page]]
            index.verify()
        assert sorted(gone) == expected
        kept = np.flatnonzero(index.held)
        assert pinned[kept].all()  # and what hangs below nobody's page is gone
        assert all(index.evict(1, pinned).shape[0] == 0 for _ in range(2))


def test_scenario_c16_an_evicted_page_loses_its_key():
    index = make_index()
    index.insert(SPACE, [1, 2], pages(4))
    assert index.evict(1, NOBODY).tolist() == [4]
    assert index.match(SPACE, [1, 2, 3]).tolist() == []
    index.insert(SPACE, [8, 9], pages(4))
    assert index.match(SPACE, [1, 2, 3]).tolist() == []
    assert index.match(SPACE, [8, 9, 3]).tolist() == [4]
    index.verify()


def test_clear_forgets_everything():
    index = make_index()
    index.insert(SPACE, [1, 1, 2, 2, 3, 3], pages(3, 1, 2))
    assert index.clear().tolist() == [1, 2, 3]
    assert len(index) == 0
    assert snapshot(index) == {
        **snapshot(make_index()),
        "_clock": index._clock,
        "_last_used": snapshot(index._last_used),
    }
    index.verify()


@pytest.mark.usefixtures("own_checks_only")
@pytest.mark.parametrize("method", ["match", "insert"])
@pytest.mark.parametrize(
    ("tokens", "namespace", "text"),
    [
        ([1, -1], SPACE, r"tokens must not be negative: token 1 has -1"),
        ([1, 2**31], SPACE, r"tokens must fit 32 bits"),
        ([1.5], SPACE, r"tokens must be int32, got dtype float64"),
        ([[1, 2]], SPACE, r"tokens must be one-dimensional"),
        ("text", SPACE, r"tokens must be"),
        ([1, 2, 3], None, r"namespace must be a CacheNamespace, got None"),
        ([1, 2, 3], "ns", r"namespace must be a CacheNamespace, got 'ns'"),
    ],
)
def test_wrong_input_is_refused(method, tokens, namespace, text):
    index = make_index()
    index.insert(SPACE, [1, 2], pages(4))
    before = snapshot(index)
    with pytest.raises(InvalidInputError, match=rf"PrefixIndex.{method}.{text}"):
        getattr(index, method)(namespace, tokens, *([pages(1, 2)] if method == "insert" else []))
    assert snapshot(index) == before


def test_publishing_one_page_as_two_contents_is_refused_before_anything_changes():
    index = make_index()
    index.insert(SPACE, [1, 2], pages(4))
    before = snapshot(index)
    with pytest.raises(InvalidInputError, match="page 4 is published with other tokens"):
        index.insert(SPACE, [5, 6, 7, 8], pages(9, 4))
    assert snapshot(index) == before


@pytest.mark.usefixtures("own_checks_only")
def test_a_wrong_layout_is_refused():
    with pytest.raises(InvalidInputError, match=r"PrefixIndex.layout must be a StorageLayout, got 8"):
        PrefixIndex(8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda i: i._parent.__setitem__(5, 9), "page 5 hangs below a page that is not in the index"),
        (lambda i: i._content.__setitem__(5, (b"?", i._content[5][1])), "page 5 has another namespace than its parent"),
        (lambda i: i._content.__setitem__(5, (i._content[5][0], bytes(8))), "page 5 has a key that its tokens do not"),
        (lambda i: i._page_of_key.__setitem__(i._key_of_page[5], 4), "page 5 is not the page of its key"),
        (lambda i: i._children.__setitem__(4, 2), "page 4 has 1 children, not 2"),
        (lambda i: i._page_of_key.__setitem__(b"old", 9), "2 pages are held, 3 have keys"),
    ],
)
def test_verify_finds_planted_damage(damage, text):
    index = make_index()
    index.insert(SPACE, [1, 2, 3, 4], pages(4, 5))
    index.verify()
    damage(index)
    with pytest.raises(InternalError, match=text):
        index.verify()

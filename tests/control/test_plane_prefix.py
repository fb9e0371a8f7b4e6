"""Published prefixes through the control plane: who holds a page, and when it is freed (requirements C5, C7, C8)."""

import pytest
from plane_helpers import FakePool, checked, make_layout, make_namespace, make_plane, never, open_with, snapshot

from paged.common import InternalError, InvalidInputError
from paged.control import PrefixIndex, Slice

SPACE = make_namespace()


def make_sharing(num_pages: int = 13, tokens_per_page: int = 4, **kwargs):
    index = PrefixIndex(make_layout(num_pages, tokens_per_page))
    return make_plane(num_pages, tokens_per_page, prefixes=index, **kwargs)


def run(plane, tokens, publish=True, keep=False):
    """Compute a request of these tokens on a fresh row; returns (tokens found in the cache, handle)."""
    handle = plane.open()
    found = plane.attach(handle, SPACE, tokens)
    checked(plane.prepare([Slice(handle, found, len(tokens) - found)], lambda pages: None, lambda source, target: None))
    if publish:
        plane.publish(handle, SPACE, tokens)
    if not keep:
        plane.release(handle)
    plane.verify()
    return found, handle


def test_scenario_c1_a_prompt_sent_twice_still_computes_a_token():
    plane = make_sharing(tokens_per_page=8)
    prompt = list(range(16))
    assert run(plane, prompt)[0] == 0
    handle = plane.open()
    assert plane.attach(handle, SPACE, prompt) == plane.length(handle) == 8
    table = checked(plane.prepare([Slice(handle, 8, 8)], never))
    assert table.query_lens.tolist() == [8]
    assert table.pages_of(0).tolist() == [1, 3]
    plane.verify()


@pytest.mark.parametrize(("prompt", "found"), [(16, 8), (17, 16), (24, 16)])
def test_matched_tokens_of_the_usual_lengths(prompt, found):
    plane = make_sharing(tokens_per_page=8)
    run(plane, list(range(24)))
    assert plane.cached_tokens(SPACE, list(range(prompt))) == found
    assert run(plane, list(range(prompt)))[0] == found


def test_scenario_c15_a_prefix_of_exactly_one_page():
    plane = make_sharing(num_pages=9, tokens_per_page=64)
    pool = FakePool(plane)
    shared = list(range(100, 164))
    for tail in (7, 8):
        handle = plane.open()
        found = plane.attach(handle, SPACE, [*shared, tail])
        assert found == (0 if tail == 7 else 64)
        table = checked(plane.prepare([Slice(handle, found, 65 - found)], pool.scrub))
        pool.run(table, [*shared, tail][found:])
        assert pool.cached(handle) == [*shared, tail]
        plane.publish(handle, SPACE, [*shared, tail])
    plane.verify()


def test_scenario_c3_a_match_is_held_from_attach_on():
    plane = make_sharing(num_pages=4)
    run(plane, [1, 2, 3, 4, 5])
    waiting, other = plane.open(), plane.open()
    assert plane.attach(waiting, SPACE, [1, 2, 3, 4, 6]) == 4
    assert plane.available_pages == 2
    assert plane.prepare([Slice(other, 0, 12)], never) is None
    checked(plane.prepare([Slice(other, 0, 8)], lambda pages: None))
    assert plane.pages_of(waiting).tolist() == [1]
    plane.verify()


def test_scenario_c10_release_frees_exactly_what_was_not_adopted():
    freed = []
    plane = make_sharing(poison_freed=lambda pages: freed.append(pages.tolist()))
    handle = open_with(plane, 10)
    assert plane.publish(handle, SPACE, list(range(10))).tolist() == [1, 2]
    assert plane.release(handle).tolist() == [3]
    assert freed == [[3]]
    assert (plane.held_pages, plane.retained_pages(), plane.leaked_pages()) == (2, 2, 0)
    plane.verify()


def test_a_reservation_evicts_what_it_is_short_of_and_no_more():
    poisoned = []
    plane = make_sharing(num_pages=6, poison_freed=lambda pages: poisoned.extend(pages.tolist()))
    for first in (10, 20, 30, 40):
        run(plane, [first, 2, 3, 4])
    assert (plane.retained_pages(), plane.available_pages) == (4, 5)
    handle = plane.open()
    scrubbed = []
    checked(plane.prepare([Slice(handle, 0, 12)], lambda pages: scrubbed.extend(pages.tolist())))
    assert (poisoned, scrubbed) == ([1, 2], [1, 2])
    assert plane.retained_pages() == 2
    assert [plane.cached_tokens(SPACE, [n, 2, 3, 4, 0]) for n in (10, 20, 30, 40)] == [0, 0, 4, 4]
    plane.verify()


def test_backpressure_evicts_nothing():
    plane = make_sharing(num_pages=6)
    run(plane, [1, 2, 3, 4, 5, 6, 7, 8])
    held = open_with(plane, 8)
    handle = plane.open()
    before = snapshot(plane)
    assert plane.available_pages == 3
    assert not plane.fits([Slice(handle, 0, 16)])
    assert plane.prepare([Slice(handle, 0, 16)], never) is None
    assert snapshot(plane) == before
    assert plane.fits(12)
    checked(plane.prepare([Slice(handle, 0, 12)], lambda pages: None))
    assert plane.length(held) == 8


def test_recently_attached_prefixes_stay_longest():
    plane = make_sharing(num_pages=4)
    for first in (10, 20, 30):
        run(plane, [first, 2, 3, 4])
    plane.release(_attached(plane, [10, 2, 3, 4, 0]))
    open_with(plane, 4)
    assert [plane.cached_tokens(SPACE, [n, 2, 3, 4, 0]) for n in (10, 20, 30)] == [4, 0, 4]


def _attached(plane, tokens):
    handle = plane.open()
    plane.attach(handle, SPACE, tokens)
    return handle


def test_a_page_in_flight_is_not_evicted():
    plane = make_sharing(num_pages=3)
    handle = plane.open()
    number = plane.dispatch(checked(plane.prepare([Slice(handle, 0, 4)], never)))
    plane.publish(handle, SPACE, [1, 2, 3, 4])
    plane.release(handle)
    assert (plane.retained_pages(), plane.pending_pages, plane.available_pages) == (1, 0, 1)
    other = plane.open()
    assert plane.prepare([Slice(other, 0, 8)], never) is None
    assert plane.retire(number).tolist() == []
    checked(plane.prepare([Slice(other, 0, 8)], lambda pages: None))
    assert plane.retained_pages() == 0
    plane.verify()


def test_forgetting_defers_pages_in_flight_and_leaves_those_in_use():
    plane = make_sharing()
    a = plane.open()
    number = plane.dispatch(checked(plane.prepare([Slice(a, 0, 8)], never)))
    plane.publish(a, SPACE, list(range(8)))
    plane.truncate(a, 4)
    run(plane, [50, 51, 52, 53])
    assert plane.forget_prefixes().tolist() == [3]
    assert (plane.pending_pages, plane.retained_pages(), plane.leaked_pages()) == (1, 0, 0)
    plane.verify()
    assert plane.retire(number).tolist() == [2]
    assert plane.release(a).tolist() == [1]
    plane.verify()


def test_writing_into_a_published_page_goes_through_a_copy():
    plane = make_sharing()
    pool = FakePool(plane)
    handle = plane.open()
    pool.run(checked(plane.prepare([Slice(handle, 0, 8)], pool.scrub)), [1, 2, 3, 4, 5, 6, 7, 8])
    plane.publish(handle, SPACE, [1, 2, 3, 4, 5, 6, 7, 8])
    plane.truncate(handle, 6)
    pool.run(checked(plane.prepare([Slice(handle, 6, 1)], pool.scrub, pool.copy)), [70])
    assert pool.copied == [([2], [3])]
    assert pool.cached(handle) == [1, 2, 3, 4, 5, 6, 70]
    other = _attached(plane, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert pool.cached(other) == [1, 2, 3, 4, 5, 6, 7, 8]
    plane.verify()


def test_a_duplicate_stays_private_and_what_follows_it_is_adopted_below_the_original():
    plane = make_sharing()
    _, a = run(plane, [1, 2, 3, 4, 9], keep=True)
    b = plane.open()
    checked(plane.prepare([Slice(b, 0, 9)], never))  # computed at the same time, so nothing was found
    assert plane.publish(b, SPACE, [1, 2, 3, 4, 5, 6, 7, 8, 9]).tolist() == [4]
    assert plane.cached_tokens(SPACE, [1, 2, 3, 4, 5, 6, 7, 8, 0]) == 8
    plane.release(a)
    # The first page is nobody's but the index's, which gives it back although b holds the one below it.
    assert plane.available_pages == 12 - 3
    c = plane.open()
    checked(plane.prepare([Slice(c, 0, 4 * 8)], lambda pages: None))
    assert plane.cached_tokens(SPACE, [1, 2, 3, 4, 5, 6, 7, 8, 0]) == 8
    plane.verify()
    d = plane.open()
    checked(plane.prepare([Slice(d, 0, 4)], lambda pages: None))
    assert (plane.available_pages, plane.retained_pages(), plane.cached_tokens(SPACE, [1, 2, 3, 4, 5])) == (0, 0, 0)
    plane.verify()
    assert plane.release(b).tolist() == [3, 4, 5]  # nothing of it is in the index any more
    assert plane.leaked_pages() == 0
    plane.verify()


def test_a_longer_match_than_a_row_holds_is_cut():
    plane = make_sharing(max_pages_per_request=2)
    run(plane, list(range(8)))
    assert plane.attach(plane.open(), SPACE, [*range(8), 9]) == 8
    small = make_sharing(max_pages_per_request=1)
    run(small, [1, 2, 3, 4])
    assert small.attach(small.open(), SPACE, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4


def test_forks_share_attached_pages():
    plane = make_sharing()
    run(plane, [1, 2, 3, 4, 5])
    a = _attached(plane, [1, 2, 3, 4, 5])
    b = plane.fork(a)
    assert plane.pages_of(b).tolist() == [1]
    plane.release(a)
    plane.release(b)
    assert (plane.retained_pages(), plane.leaked_pages()) == (1, 0)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda p, a, b: p.attach(a, SPACE, [1, 2]),
            r"row 0 has 6 tokens and 2 pages\. Attach a prefix right after open",
        ),
        (lambda p, a, b: p.publish(a, SPACE, [1] * 7), r"has 7 tokens, the request of row 0 has 6 in the cache"),
        (lambda p, a, b: p.publish(a, SPACE, [1, 2, 3, -4]), r"ControlPlane.publish.tokens must not be negative"),
        (lambda p, a, b: p.publish(a, SPACE, 5), r"ControlPlane.publish.tokens must be one-dimensional"),
        (lambda p, a, b: p.publish(a, None, [1]), r"namespace must be a CacheNamespace, got None"),
        (lambda p, a, b: p.attach(b, None, [1]), r"namespace must be a CacheNamespace, got None"),
        (lambda p, a, b: p.attach(b, SPACE, [-1]), r"tokens must not be negative"),
        (lambda p, a, b: p.cached_tokens(SPACE, [0.5]), r"tokens must be int32, got dtype float64"),
    ],
)
@pytest.mark.usefixtures("own_checks_only")
def test_wrong_input_is_refused_and_changes_nothing(call, text):
    plane = make_sharing()
    handle, fresh = open_with(plane, 6), plane.open()
    before = snapshot(plane)
    with pytest.raises(InvalidInputError, match=text):
        call(plane, handle, fresh)
    assert snapshot(plane) == before
    plane.verify()


@pytest.mark.parametrize("method", ["attach", "publish", "cached_tokens", "forget_prefixes"])
def test_a_plane_without_an_index_says_so(method):
    plane = make_plane()
    handle = plane.open()
    arguments = {"attach": (handle, SPACE, [1]), "publish": (handle, SPACE, []), "cached_tokens": (SPACE, [1])}
    with pytest.raises(InvalidInputError, match=rf"{method}: there is no prefix index\. Construct with prefixes="):
        getattr(plane, method)(*arguments.get(method, ()))
    assert (plane.prefixes, plane.retained_pages()) == (None, 0)


@pytest.mark.usefixtures("own_checks_only")
def test_an_index_of_another_layout_or_in_use_is_refused():
    with pytest.raises(InvalidInputError, match="is over 9 pages of 4 tokens, 0 of them published; the layout has 13"):
        make_plane(prefixes=PrefixIndex(make_layout(9)))
    with pytest.raises(InvalidInputError, match="must be a PrefixIndex or None, got 1"):
        make_plane(prefixes=1)
    used = make_sharing()
    run(used, [1, 2, 3, 4])
    with pytest.raises(InvalidInputError, match="1 of them published"):
        make_plane(prefixes=used.prefixes)


def test_verify_finds_an_index_that_lost_its_reference():
    plane = make_sharing()
    run(plane, [1, 2, 3, 4])
    plane._ledger.prefixes._forget(1)
    with pytest.raises(InternalError, match="page 1 has 0 holders and 1 references"):
        plane.verify()
    assert plane.leaked_pages() == 1

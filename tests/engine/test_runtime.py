"""The runtime step by step: parity with the dense path, reuse of pages, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.backends.xla.backend import CAPABILITIES, XlaBackend
from paged.common import (
    DonatedPoolError,
    InvalidInputError,
    PoolExhaustedError,
    StaleHandleError,
    UnsupportedError,
)
from paged.control import Slice
from paged.engine import limits, replay
from paged.engine import runner as runner_module
from paged.engine.step import step

TIE = 1e-3
"""float32: tokens may differ from the dense path's only where the two likeliest are closer than this."""


def assert_parity(model, runtime, handles, prompts):
    for handle, prompt in zip(handles, prompts):
        parity = replay(model, runtime.tokens(handle), len(prompt))
        assert parity.flips(TIE) == []


def test_prefill_and_decode_agree_with_the_dense_path_over_several_pages(tiny, make_runtime, prompts):
    model, runtime = tiny(), make_runtime()
    batch = [prompts[i] for i in (0, 2, 3, 5)]
    handles = [runtime.add(p) for p in batch]
    first = runtime.prefill(handles)
    steps = [first] + [runtime.decode(handles) for _ in range(20)]
    for i, handle in enumerate(handles):
        assert runtime.tokens(handle) == (*batch[i], *(s[i].id for s in steps))
        parity = replay(model, runtime.tokens(handle), len(batch[i]))
        assert parity.flips(TIE) == []
        exact = np.flatnonzero(parity.top_gap > TIE)
        assert len(exact) > 15
        assert (parity.behind[exact] == 0).all()
        np.testing.assert_allclose([s[i].logprob for s in steps], parity.logprobs, atol=1e-4)
    assert len(runtime.plane.pages_of(handles[3])) == 15


def test_packed_prefill_samples_the_right_row_for_every_request(make_runtime, prompts):
    runtime = make_runtime()
    handles = [runtime.add(p) for p in prompts[:4]]  # 1 + 4 + 5 + 11 tokens in steps of 16: the last is cut
    together = [t.id for t in runtime.prefill(handles)]
    alone = []
    for prompt in prompts[:4]:
        other = make_runtime()
        alone.append(other.prefill([other.add(prompt)])[0].id)
    assert together == alone
    assert len(set(alone)) > 1


def test_scenario_c14_reused_pages_out_of_order_change_nothing(tiny, make_runtime, prompts, run_greedy):
    # Freed pages are filled with NaN: reading one, or a slot of one that was not scrubbed, would show.
    model, runtime, fresh = tiny(), make_runtime(), make_runtime()
    want = run_greedy(fresh, fresh.add(prompts[5]), 12)
    first = [runtime.add(prompts[5]) for _ in range(4)]  # all 40 pages
    runtime.prefill(first)
    for i in (1, 3, 2, 0):
        runtime.release(first[i])
    pages = np.zeros(0, np.int32)
    for _ in range(3):
        handle = runtime.add(prompts[5])
        got = run_greedy(runtime, handle, 12)
        pages = runtime.plane.pages_of(handle)
        assert got == want
        assert_parity(model, runtime, [handle], [prompts[5]])
        runtime.release(handle)
    assert (np.diff(pages) < 0).any()
    runtime.plane.verify()
    assert (runtime.plane.held_pages, runtime.plane.leaked_pages()) == (0, 0)


def test_scenario_n6_a_recycled_page_keeps_nothing_of_its_last_owner(make_runtime, prompts):
    runtime = make_runtime(num_pages=6, poison_freed=False)
    runtime.prefill([handle := runtime.add([5] * 20)])
    assert np.all(runtime.pool.read(1)[0] != 0)
    assert runtime.release(handle).tolist() == [1, 2, 3, 4, 5]
    runtime.prefill([runtime.add(prompts[0])])
    keys, values = runtime.pool.read(1)
    for stored in (keys, values):
        assert (stored[:, 0] != 0).any(axis=(1, 2)).all()
        assert (stored[:, 1:] == 0).all()


def test_two_orders_of_arrival_give_the_same_tokens(tiny, make_runtime, prompts):
    model = tiny()

    def serve(order, late):
        runtime = make_runtime()
        handles = {i: runtime.add(prompts[i]) for i in order if i != late}
        runtime.prefill(list(handles.values()))
        for _ in range(3):
            runtime.decode(list(handles.values()))
        handles[late] = runtime.add(prompts[late])
        runtime.prefill([handles[late]])
        for _ in range(8):
            runtime.decode(list(handles.values()))
        assert_parity(model, runtime, handles.values(), [prompts[i] for i in handles])
        return {i: runtime.tokens(h)[len(prompts[i]) :][:9] for i, h in handles.items()}

    assert serve([2, 3, 5], late=5) == serve([5, 3, 2], late=2)


def test_chunks_of_any_size_give_the_same_tokens(make_runtime, prompts, run_greedy):
    results = []
    shapes = make_runtime().plane.shapes
    for most, options in ((64, {}), (16, {}), (7, {"shapes": shapes})):
        runtime = make_runtime(max_step_tokens=most, **options)
        ran = []
        handle = runtime.add(prompts[5])
        runtime.prefill([handle], on_chunk=lambda done, total, ran=ran: ran.append((done, total)))
        assert [done for done, _ in ran] == [*range(most, 37, most), 37]
        assert {total for _, total in ran} == {37}
        results.append([t.id for t in runtime.decode([handle])] + list(runtime.tokens(handle)))
    assert results[0] == results[1] == results[2]


def test_every_step_keeps_the_addresses_and_spends_the_old_handle(make_runtime, prompts):
    runtime = make_runtime()
    before, old = runtime.pool.addresses(), runtime.pool
    handles = [runtime.add(p) for p in prompts[:3]]
    runtime.prefill(handles)
    for _ in range(3):
        runtime.decode(handles)
        assert runtime.pool.addresses() == before
    runtime.release(handles[0])
    with pytest.raises(DonatedPoolError, match="Use the pool that the step returned"):
        old.addresses()


def test_few_programs_are_compiled(make_runtime, prompts, monkeypatch):
    runtime = make_runtime(max_step_tokens=64)
    programs = []
    monkeypatch.setattr(runner_module, "step", lambda *a: programs.append((*a[:2], a[-1].shape)) or step(*a))
    for batch in (prompts[:2], prompts[2:5], prompts[5:], prompts[1:4]):
        handles = [runtime.add(p) for p in batch]
        runtime.prefill(handles)
        for count in range(len(handles), 0, -1):
            runtime.decode(handles[:count])
        for handle in handles:
            runtime.release(handle)
    assert len(programs) > 12
    assert len(set(programs)) == 2  # decode, and everything else at 64 tokens


def test_a_mixed_step_by_slices(tiny, make_runtime, prompts):
    # What a driver does: it keeps the tokens itself, and mixes a decode with a chunk of another prompt.
    runtime = make_runtime()
    known = {runtime.plane.open(): list(prompts[2]), runtime.plane.open(): list(prompts[3])}
    a, b = known

    def advance(*slices):
        prepared = runtime.prepare_step(slices, [known[s.handle] for s in slices])
        out = runtime.run(prepared)
        for s, token in zip(slices, out):
            if token is not None:
                known[s.handle].append(token.id)
        return out

    assert advance(Slice(a, 0, 5))[0] is not None
    decoded, chunk = advance(Slice(a, 5, 1), Slice(b, 0, 6))
    assert (decoded is not None, chunk) == (True, None)
    assert all(token is not None for token in advance(Slice(b, 6, 5), Slice(a, 6, 1)))
    for handle, prompt in ((a, prompts[2]), (b, prompts[3])):
        assert replay(tiny(), known[handle], len(prompt)).flips(TIE) == []
    with pytest.raises(InvalidInputError, match="was not opened by add"):
        runtime.prepare_step([Slice(a, 7, 1)])


def test_a_prepared_step_runs_once_or_is_cancelled(make_runtime, prompts):
    runtime = make_runtime()
    handle = runtime.add(prompts[3])
    prepared = runtime.prepare_step([Slice(handle, 0, 11)])
    runtime.cancel(prepared)
    assert runtime.plane.length(handle) == 0
    again = runtime.prepare_step([Slice(handle, 0, 11)])
    (token,) = runtime.run(again)
    for spent in (prepared, again):
        for use in (runtime.run, runtime.cancel):
            with pytest.raises(InvalidInputError, match="ran or was cancelled already"):
                use(spent)
    other = make_runtime()
    assert token == other.prefill([other.add(prompts[3])])[0]
    runtime.plane.verify()


def test_scenario_n3_padding_writes_to_no_page_that_somebody_owns(make_runtime, prompts):
    # A full batch, then a smaller one in the same bucket: its padding rows and tokens hold what the first one left.
    runtime = make_runtime(poison_freed=False)
    handles = [runtime.add(p) for p in prompts[1:5]]
    runtime.prefill(handles)
    runtime.decode(handles)
    # Padding writes the same bits in every step, so what it may have written before is covered first.
    owned = np.concatenate([runtime.plane.pages_of(handle) for handle in handles])
    runtime.runner.poison(np.setdiff1d(np.arange(1, 41, dtype=np.int32), owned))
    before = [np.stack(x) for x in zip(*(runtime.pool.read(page) for page in range(1, 41)))]
    written = np.zeros((40, 3, 4), bool)  # page, layer, offset
    for handle in handles[:2]:
        length = runtime.plane.length(handle)
        written[runtime.plane.pages_of(handle)[length // 4] - 1, :, length % 4] = True
    runtime.decode(handles[:2])
    for old, new in zip(before, zip(*(runtime.pool.read(page) for page in range(1, 41)))):
        changed = (old.view(np.uint32) != np.stack(new).view(np.uint32)).any(axis=(-1, -2))
        np.testing.assert_array_equal(changed, written)


def test_backpressure_is_none_by_slices_and_arithmetic_by_request(make_runtime, prompts):
    runtime = make_runtime(num_pages=6)
    a, b = runtime.add(prompts[4]), runtime.add(prompts[2])
    runtime.prefill([a])
    assert runtime.prepare_step([Slice(b, 0, 5)]) is None
    text = r"needs 2 more pages of 4 tokens; 1 of 5 are free, 4 are held by 2 open requests.*6144 bytes a page"
    with pytest.raises(PoolExhaustedError, match=text):
        runtime.prefill([b])
    runtime.decode([a])
    runtime.release(a)
    assert len(runtime.prefill([b])) == 1


def test_what_can_never_fit_is_refused_when_it_is_added(make_runtime):
    runtime = make_runtime(num_pages=6)
    with pytest.raises(PoolExhaustedError, match=r"21 tokens need 6 pages of 4 tokens; the pool has 5 .*num_pages=7"):
        runtime.add([1] * 21)
    with pytest.raises(InvalidInputError, match=r"has 97 tokens; the model has positions for 96 .*Shorten it by 1"):
        runtime.add([1] * 97)
    with pytest.raises(InvalidInputError, match="prompt is empty"):
        runtime.add([])
    with pytest.raises(InvalidInputError, match=r"tokens must be in 0..95: token 1 has 96"):
        runtime.add([1, 96])
    handles = [runtime.add([1]) for _ in range(4)]
    with pytest.raises(PoolExhaustedError, match=r"all 4 requests are open"):
        runtime.add([1])
    assert len(set(handles)) == 4
    assert runtime.plane.held_pages == 0


def test_the_last_position_is_the_last(make_runtime):
    runtime = make_runtime()
    handle = runtime.add([1] * 96)
    runtime.prefill([handle])
    with pytest.raises(InvalidInputError, match=r"positions exceed the 96 that fit: row 0 has 97"):
        runtime.decode([handle])


def test_requests_are_named_by_handles_that_go_stale(make_runtime, prompts):
    runtime = make_runtime()
    handle = runtime.add(prompts[0])
    with pytest.raises(InvalidInputError, match=r"has 1 tokens that are not cached.*Call prefill"):
        runtime.decode([handle])
    runtime.prefill([handle])
    with pytest.raises(InvalidInputError, match="names the request of slice 0 again"):
        runtime.decode([handle, handle])
    runtime.release(handle)
    for use in (runtime.tokens, runtime.release, lambda h: runtime.decode([h]), lambda h: runtime.prefill([h])):
        with pytest.raises(StaleHandleError, match="epoch 0"):
            use(handle)
    runtime.plane.verify()


def test_a_step_that_is_refused_leaves_the_requests_as_they_were(make_runtime, prompts, monkeypatch):
    runtime = make_runtime()
    handle = runtime.add(prompts[2])

    def refused(*_):
        raise ValueError("refused while tracing")

    with monkeypatch.context() as patch:
        patch.setattr(runner_module, "step", refused)
        with pytest.raises(ValueError, match="while tracing"):
            runtime.prefill([handle])
    assert runtime.plane.length(handle) == 0
    want = make_runtime()
    assert runtime.prefill([handle])[0].id == want.prefill([want.add(prompts[2])])[0].id
    runtime.plane.verify()


def test_logits_that_are_not_finite_are_an_error(tiny, make_runtime):
    model = tiny()
    bad = dataclasses.replace(model, norm=model.norm.at[0].set(jnp.nan))
    runtime = make_runtime(bad)
    with pytest.raises(InvalidInputError, match=r"log probability of what request Handle.*\(row 0\) is NaN"):
        runtime.prefill([handle := runtime.add([1, 2])])
    assert runtime.plane.length(handle) == 0
    assert runtime.release(handle).shape == (0,)
    assert runtime.plane.held_pages == 0


@dataclasses.dataclass(frozen=True)
class Limited(XlaBackend):
    """The backend `xla` under another declaration."""

    name: str = "limited"
    changes: tuple[tuple[str, object], ...] = ()

    @property
    def capabilities(self):
        return dataclasses.replace(CAPABILITIES, **dict(self.changes))


def limited(**changes):
    return Limited(changes=tuple(changes.items()))


def test_a_backend_without_mixed_batches_gets_none(make_runtime, prompts):
    features = CAPABILITIES.features
    runtime = make_runtime(backend=limited(features=features - {"mixed"}))
    handles = [runtime.add(p) for p in prompts[:4]]
    whole = make_runtime()
    want = [t.id for t in whole.prefill([whole.add(p) for p in prompts[:4]])]
    assert [t.id for t in runtime.prefill(handles)] == want
    late = runtime.release(handles[0]) is not None and runtime.add(prompts[3])
    with pytest.raises(UnsupportedError, match="one step cannot hold slices of one token"):
        runtime.prepare_step([Slice(handles[1], 4, 1), Slice(late, 0, 3)])
    with pytest.raises(UnsupportedError, match="'decode'"):
        make_runtime(backend=limited(features=features - {"decode"}))


def test_a_pool_for_each_layer_gives_the_same_tokens(make_runtime, prompts, run_greedy):
    runtime, whole = make_runtime(backend=limited(pool_layout="per_layer")), make_runtime()
    before = runtime.pool.addresses()
    assert len(before) == 6
    got = run_greedy(runtime, handle := runtime.add(prompts[3]), 5)
    assert got == run_greedy(whole, whole.add(prompts[3]), 5)
    runtime.release(handle)
    assert run_greedy(runtime, runtime.add(prompts[3]), 5) == got
    assert runtime.pool.addresses() == before


def test_the_pool_is_sized_by_pages_or_by_bytes(make_runtime):
    page = 3 * 4 * 8 * 2 * 8 * 4  # layers, tokens, KV heads, K and V, head dim, bytes
    runtime = make_runtime(num_pages=None, memory_bytes=10 * page + 5)
    assert runtime.layout.num_pages == 10
    held = sum(x.nbytes for x in jax.tree.leaves(runtime.pool.arrays))
    assert held == runtime.layout.total_pool_bytes == 10 * page
    with pytest.raises(PoolExhaustedError, match=rf"holds 1 pages of {page} bytes \(3 layers × 4 tokens × 8 KV heads"):
        make_runtime(num_pages=None, memory_bytes=2 * page - 1)
    options = {"tokens_per_page": 4, "dtype": "float32", "sharding": None}
    huge = limits.layout_for(runtime.model.config, num_pages=None, memory_bytes=2**50, **options)
    assert huge.num_pages == (2**31 - 1) // 12  # more could not be addressed by int32 slots
    for options in ({"num_pages": None}, {"memory_bytes": 10**6}):
        with pytest.raises(InvalidInputError, match="exactly one of num_pages and memory_bytes"):
            make_runtime(**options)


def test_a_pool_beyond_the_device_says_the_arithmetic(make_runtime, monkeypatch):
    def full(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")

    monkeypatch.setattr(limits, "KvPool", full)
    with pytest.raises(PoolExhaustedError, match=r"41 pages × 6144 bytes = 251904 bytes on each device"):
        make_runtime()


def test_the_pool_may_be_narrower_than_the_model(tiny, make_runtime, prompts, run_greedy):
    runtime = make_runtime(kv_dtype="bfloat16")
    assert runtime.layout.dtype == "bfloat16"
    handle = runtime.add(prompts[3])
    run_greedy(runtime, handle, 10)
    # Keys and values keep 8 bits: the tokens may differ from the dense path's where its choice was close.
    assert replay(tiny(), runtime.tokens(handle), 11).flips(0.25) == []
    with pytest.raises(InvalidInputError, match=r"dtype must be the name of a dtype.*'float13'"):
        make_runtime(kv_dtype="float13")

"""What requests share: cached prefixes, the prompt of several samples, and under `invariant` nothing that shows."""

import dataclasses

import jax
import numpy as np
import pytest

from paged.common import InvalidInputError
from paged.engine import OfflineEngine, Runtime, SamplingParams, weights_fingerprint

TIE = 1e-3
COUNT = 10
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=1.3, top_k=40, seed=5)


@pytest.fixture(scope="module")
def make_engine(tiny):
    def make(model=None, **options):
        base = {"num_pages": 41, "tokens_per_page": 4, "max_requests": 4, "max_step_tokens": 16, "poison_freed": True}
        return OfflineEngine(tiny() if model is None else model, **{**base, **options})

    return make


@pytest.fixture(scope="module")
def invariant(make_engine):
    return make_engine(invariant=True, prefix_cache=True)


def bits(output):
    return output.token_ids, np.asarray(output.logprobs, np.float32).tobytes()


@pytest.fixture(scope="module")
def alone(make_engine, prompts):
    """Tokens and log probabilities, to the last bit, of each prompt by itself and without a cache."""
    engine = make_engine(invariant=True)
    return {
        (i, params): bits(engine.batch_inference([prompt], params)[0])
        for i, prompt in enumerate(prompts)
        for params in (GREEDY, RANDOM)
    }


def assert_nothing_left(engine):
    plane = engine.runtime.plane
    assert plane.num_open == plane.leaked_pages() == plane.pending_pages == 0
    assert plane.held_pages == plane.retained_pages()
    plane.verify()


def test_scenario_n9_tokens_do_not_depend_on_arrival_or_neighbours(make_engine, prompts, alone):
    # The tool that tells wrong numbers from numbers of another batch shape: if it were corruption, it would show here.
    engine = make_engine(invariant=True)
    for order in ([5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 3, 4]):
        params = [(GREEDY, RANDOM)[i % 2] for i in range(6)]
        outputs = engine.batch_inference([prompts[i] for i in order], params)
        for output, i, one in zip(outputs, order, params):
            assert bits(output) == alone[i, one]
    # Staggered: a request comes every other step, while others decode.
    keys = {}
    for i in (3, 5, 1, 4, 0, 2):
        keys[i] = engine.submit(prompts[i], GREEDY)
        engine.step()
        engine.step()
    while not engine.idle:
        engine.step()
    for i, key in keys.items():
        assert bits(engine.take(key)[0]) == alone[i, GREEDY]
    assert engine.driver.counters.preemptions == 0
    assert engine.flips(engine.batch_inference(prompts, GREEDY)).beyond(TIE) == 0


def test_scenario_b2_a_warm_prefix_gives_the_bits_of_a_cold_one(invariant, prompts, alone):
    outputs = []
    for _ in range(3):
        outputs = invariant.batch_inference([prompts[5], prompts[4], prompts[3], prompts[5]], [GREEDY, RANDOM] * 2)
        for output, i, params in zip(outputs, (5, 4, 3, 5), [GREEDY, RANDOM] * 2):
            assert bits(output) == alone[i, params]
    # Of 37 tokens nine pages of four are shared, less the last where it would leave one token to feed.
    assert [o.prefix_tokens for o in outputs] == [32, 12, 8, 32]
    # What was generated is not shared: it was computed by another program than a prompt would be.
    longer = [*prompts[5], *alone[5, GREEDY][0]]
    first = invariant.batch_inference([longer], GREEDY)[0]
    assert first.prefix_tokens == 36
    second = invariant.batch_inference([longer], GREEDY)[0]
    assert second.prefix_tokens == 44
    assert bits(first) == bits(second)
    assert_nothing_left(invariant)


def test_the_size_of_the_pool_moves_no_bit_and_the_budget_of_a_step_no_token_beyond_ties(make_engine, prompts):
    """Shapes of steps come from rows, budget and longest request, and not from the pool; see docs/engine.md."""
    params = [GREEDY, RANDOM] * 3

    def outputs(engine):
        return engine.batch_inference(prompts, params)

    options = {"invariant": True, "max_request_tokens": 48}
    want = outputs(make_engine(**options))
    # 12 pages are those of the longest request: one runs at a time, and never with its neighbours of before.
    for pages, more in ((13, {}), (90, {"depth": 1}), (13, {"prefix_cache": True})):
        engine = make_engine(num_pages=pages, **options, **more)
        assert [bits(o) for o in outputs(engine)] == [bits(o) for o in want]
        assert_nothing_left(engine)
    for budget in (8, 48):
        engine = make_engine(max_step_tokens=budget, **options)
        found = outputs(engine)
        assert engine.flips([o for o, one in zip(found, params) if one is GREEDY]).beyond(TIE) == 0
        for one, other in zip(found, want):
            assert np.allclose(one.logprobs[:1], other.logprobs[:1], atol=1e-4)


def test_samples_that_fork_have_the_bits_of_samples_alone(invariant, prompts, alone):
    params = dataclasses.replace(RANDOM, n=3)
    outputs = invariant.batch_inference([prompts[5]], params)
    assert bits(outputs[0]) == alone[5, RANDOM]
    assert len({o.token_ids for o in outputs}) == 3
    assert invariant.driver.counters.forked_tokens > 0
    # Seven samples and a neighbour on four rows: they come when there is room, whoever there is to fork from.
    params = dataclasses.replace(RANDOM, n=7)
    crowded = invariant.batch_inference([prompts[1], prompts[5]], [GREEDY, params])
    assert [bits(o) for o in crowded[1:4]] == [bits(o) for o in outputs]
    assert bits(crowded[0]) == alone[1, GREEDY]
    assert_nothing_left(invariant)


def test_without_invariance_flips_are_ties_of_the_dense_path(make_engine, prompts):
    engine = make_engine(num_pages=14, prefix_cache=True)
    outputs = [output for _ in range(2) for output in engine.batch_inference(prompts, GREEDY)]
    assert engine.driver.counters.preemptions == 2
    assert engine.driver.counters.prefix_tokens == 16
    flips = engine.flips(outputs)
    assert flips.tokens == 12 * COUNT
    assert flips.beyond(TIE) == 0
    assert str(flips).startswith(f"{len(flips.gaps)} flips in 120 tokens")
    wrong = dataclasses.replace(outputs[0], token_ids=tuple((t + 1) % 96 for t in outputs[0].token_ids))
    assert engine.flips([wrong]).beyond(TIE) > 0
    assert_nothing_left(engine)


def test_samples_share_their_prompt_also_when_pages_are_short(make_engine, prompts):
    engine = make_engine(num_pages=14)
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True, n=3)
    outputs = engine.batch_inference([prompts[5], prompts[3]], params)
    assert len(outputs) == 6
    assert engine.driver.counters.forked_tokens == 92
    assert engine.flips(outputs).beyond(TIE) == 0
    assert_nothing_left(engine)


def test_scenario_c13_scores_of_a_cached_prompt_are_whole_and_those_of_a_cold_one(invariant, prompts):
    params = dataclasses.replace(GREEDY, prompt_logprobs=2)
    invariant.batch_inference([prompts[5]], GREEDY)
    first, second = (invariant.batch_inference([prompts[5]], params)[0] for _ in range(2))
    assert first.prompt_logprobs == second.prompt_logprobs
    assert [token.id for token in first.prompt_logprobs[1:]] == prompts[5][1:]
    assert bits(first) == bits(second) == bits(invariant.batch_inference([prompts[5]], GREEDY)[0])


def test_tenants_share_only_with_themselves_unless_asked(make_engine, prompts):
    def hits(engine, *tenants):
        outputs = [engine.batch_inference([prompts[5]], GREEDY, tenant=tenant)[0] for tenant in tenants]
        return [output.prefix_tokens for output in outputs]

    engine = make_engine(prefix_cache=True)
    assert hits(engine, "a", "b", None, "a", "b", None) == [0, 0, 0, 36, 36, 36]
    assert hits(make_engine(prefix_cache=True, share_across_tenants=True), "a", "b", None) == [0, 36, 36]
    plain = make_engine()
    assert hits(plain, "a", "a") == [0, 0]
    for one in (engine, plain):  # not through submit, whose types are checked in tests
        with pytest.raises(InvalidInputError, match="submit: tenant must be a str or None, got 3"):
            one._intake.tenant(3, "submit")


def test_scenario_c8_other_weights_never_meet_what_the_old_ones_cached(make_engine, tiny, prompts):
    engine = make_engine(prefix_cache=True)
    runtime = engine.runtime
    cold = engine.batch_inference([prompts[5]], GREEDY)[0]
    assert engine.batch_inference([prompts[5]], GREEDY)[0].prefix_tokens == 36
    old = runtime.namespace()
    other = jax.tree.map(lambda x: x * 1.5, tiny())
    held = engine.submit(prompts[5], GREEDY)
    engine.step()
    with pytest.raises(InvalidInputError, match="1 requests are open, and what is cached for them comes from the old"):
        engine.update_weights(other)
    engine.abort(held)
    engine.take(held)
    engine.update_weights(other)
    assert runtime.plane.retained_pages() == 0
    new = runtime.namespace()
    assert old != new
    assert (old.revision, new.revision) == (0, 1)
    assert new.weights == weights_fingerprint(other) != old.weights
    fresh = engine.batch_inference([prompts[5]], GREEDY)[0]
    assert fresh.prefix_tokens == 0
    assert fresh.token_ids == make_engine(other).batch_inference([prompts[5]], GREEDY)[0].token_ids != cold.token_ids
    # Even if the pages were still there, their namespace is not: nothing old can hit.
    assert runtime.plane.cached_tokens(new, prompts[5]) == 36
    assert runtime.plane.cached_tokens(old, prompts[5]) == 0
    runtime.bump()
    assert runtime.namespace().revision == 2
    assert engine.batch_inference([prompts[5]], GREEDY)[0].prefix_tokens == 0


def test_weights_of_another_model_are_refused(make_engine, tiny):
    engine, model = make_engine(), tiny()
    with pytest.raises(InvalidInputError, match="another structure, shape, dtype, placement or config"):
        engine.update_weights(dataclasses.replace(model, norm=model.norm.astype("bfloat16")))


def test_a_namespace_tells_apart_what_changes_keys_and_values(tiny, make_engine):
    def namespace(**options):
        base = {"num_pages": 9, "tokens_per_page": 4, "prefix_cache": True, "max_request_tokens": 16}
        return Runtime(tiny(), **{**base, **options}).namespace()

    base = namespace()
    assert base == namespace()
    assert base.weights == weights_fingerprint(tiny())
    for changes in (
        {"tokens_per_page": 8},
        {"kv_dtype": "bfloat16"},
        {"fingerprint": "other"},
        {"backend": "reference"},
    ):
        assert namespace(**changes) != base
    assert namespace(tokenizer_fingerprint="t") != base
    runtime = make_engine(prefix_cache=True).runtime
    spaces = [runtime.namespace(**{field: "x"}) for field in ("tenant", "adapter", "salt")]
    assert len({runtime.namespace(), *spaces}) == 4

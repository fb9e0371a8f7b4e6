"""The engine over the backend `cpu`: one program a rung, bits that no company moves, layers by XLA where they must."""

import dataclasses

import jax
import numpy as np
import pytest

from paged import get_backend
from paged.backends.cpu import library
from paged.common import AttentionSpec, BackendUnavailableError, DonatedPoolError
from paged.engine import OfflineEngine, Runtime, SamplingParams, runner
from paged.engine.step import num_compiled
from paged.models import shard_decoder

TIE, TIE_16 = 1e-3, 0.25
COUNT = 8
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=1.3, top_p=0.9, top_k=40, seed=5)
SCORED = dataclasses.replace(RANDOM, prompt_logprobs=0)
# One row of logits is below 4096 elements and eight are above: XLA's other library, if it came in, would show.
SIZES = {"vocab_size": 1000, "head_dim": 16, "num_kv_heads": 4}
BLOCK = (AttentionSpec(scale=0.25), AttentionSpec(scale=0.25, window=6, soft_cap=4.0))


@pytest.fixture(scope="module")
def model(tiny):
    """Blocks of two kinds of layers, two query heads for each KV head."""
    return tiny(**SIZES, num_layers=4, block=BLOCK)


@pytest.fixture(scope="module")
def make_engine(model):
    def make(backend="cpu", *, of=None, **options):
        base = {"num_pages": 61, "tokens_per_page": 4, "max_requests": 4, "max_step_tokens": 16, "poison_freed": True}
        return OfflineEngine(model if of is None else of, None, backend, **{**base, "max_logprobs": 2, **options})

    return make


def bits(output):
    scores = output.prompt_logprobs and [np.float32(t.logprob).tobytes() for t in output.prompt_logprobs[1:]]
    return output.token_ids, np.asarray(output.logprobs, np.float32).tobytes(), scores


@pytest.fixture(scope="module")
def alone(make_engine, prompts):
    """Of each prompt by itself, whole in one step, with nothing cached: tokens, and all log probabilities' bits."""
    engine = make_engine(max_requests=1, max_step_tokens=64, num_pages=5, tokens_per_page=16, depth=1)
    every = [(i, one) for i in range(len(prompts)) for one in (GREEDY, RANDOM)] + [(5, SCORED), (3, SCORED)]
    return {(i, one): bits(engine.batch_inference([prompts[i]], one)[0]) for i, one in every}


def assert_nothing_left(engine):
    plane = engine.runtime.plane
    assert plane.num_open == plane.leaked_pages() == plane.pending_pages == 0
    assert plane.held_pages == plane.retained_pages()
    engine.driver.verify()


def test_tokens_are_those_of_xla_and_of_the_dense_path_up_to_ties(make_engine, prompts):
    outputs = make_engine().batch_inference(prompts, GREEDY)
    flips = make_engine().flips(outputs)
    assert flips.tokens == 6 * COUNT
    assert flips.beyond(TIE) == 0, str(flips)
    others = make_engine("xla").batch_inference(prompts, GREEDY)
    for output, other in zip(outputs, others):
        agreed = np.cumprod([a == b for a, b in zip(output.token_ids, other.token_ids)]).sum()
        np.testing.assert_allclose(output.logprobs[:agreed], other.logprobs[:agreed], atol=1e-4)
    # Ties aside they are the same, and there is at most one tie among so few.
    assert sum(a.token_ids == b.token_ids for a, b in zip(outputs, others)) >= 5


def test_a_rung_is_one_program_nothing_compiles_late_and_the_pool_stays(make_engine, prompts):
    before = num_compiled("cpu")
    engine = make_engine(max_requests=3)
    program = engine.runtime.runner.program
    assert program.kernels
    assert not program.apart
    warm = engine.warm_up(GREEDY, strict=True)
    assert num_compiled("cpu") - before == warm.step_programs == 2
    addresses, pages = engine.runtime.pool.addresses(), engine.runtime.pool
    engine.batch_inference(prompts, GREEDY)
    assert num_compiled("cpu") - before == 2
    assert engine.runtime.pool.addresses() == addresses
    assert engine.runtime.pool is not pages
    assert_nothing_left(engine)


@pytest.mark.parametrize(
    "options",
    [
        {"num_pages": 14, "max_step_tokens": 7, "prefix_cache": True},  # preempts; prompts in many chunks
        {"max_requests": 9, "max_step_tokens": 200, "num_pages": 201, "tokens_per_page": 5, "depth": 1},
    ],
)
def test_no_company_moves_a_bit_of_tokens_or_log_probabilities(make_engine, prompts, alone, options):
    """Without `invariant`: what is certain there by shapes of steps is certain here by the kernels."""
    engine = make_engine(**options)
    params = [GREEDY, RANDOM]
    for order in ([5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 3, 4]):
        outputs = engine.batch_inference([prompts[i] for i in order], params * 3)
        for output, i, one in zip(outputs, order, params * 3):
            assert bits(output) == alone[i, one]
    # They come and go while others run, some are aborted, and prompts are scored beside.
    keys = {}
    for i, one in ((3, GREEDY), (5, SCORED), (1, RANDOM), (5, RANDOM), (3, SCORED), (4, GREEDY)):
        keys[i, one] = engine.submit(prompts[i], one)
        gone = engine.submit(prompts[4], RANDOM)
        engine.step()
        engine.step()
        engine.abort(gone)
    while not engine.idle:
        engine.step()
    for asked, key in keys.items():
        assert bits(engine.take(key)[0]) == alone[asked]
    samples = engine.batch_inference([prompts[5], prompts[3]], dataclasses.replace(RANDOM, n=3))
    assert bits(samples[0]) == alone[5, RANDOM]
    assert bits(samples[3]) == alone[3, RANDOM]
    counters = engine.driver.counters
    assert counters.forked_tokens > 0
    assert (counters.preemptions > 0) == (options["num_pages"] == 14)
    assert (counters.prefix_tokens > 0) == ("prefix_cache" in options)
    assert_nothing_left(engine)


def test_one_whose_logits_are_not_finite_fails_alone(make_engine, model, prompts, alone):
    sick = dataclasses.replace(model, embedding=model.embedding.at[np.array([0, 999])].set(np.nan))
    engine = make_engine(of=sick)
    for _ in range(2):  # and leaves nothing in its pages
        outputs = engine.batch_inference([prompts[5], [*prompts[4][:9], 999], prompts[3], prompts[1]], GREEDY)
        assert [o.finish_reason for o in outputs] == ["length", "error", "length", "length"]
        assert [bits(o) for o in outputs if not o.error] == [alone[i, GREEDY] for i in (5, 3, 1)]
    assert_nothing_left(engine)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_fails_on_the_device_takes_the_pool_along_and_later_ones_say_so(
    make_engine, prompts, monkeypatch, depth
):
    engine, run = make_engine(depth=depth), runner.step

    def broken(program, rung, model, pool, previous, packed):
        packed = packed.copy()
        packed[-rung.listed_pages - rung.tokens :] = 10**6  # lengths and pages that no pool has
        return run(program, rung, model, pool, previous, packed)

    engine.batch_inference(prompts[:1], GREEDY)
    monkeypatch.setattr(runner, "step", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="row 0: page_offsets"):
        engine.batch_inference(prompts, GREEDY)
    monkeypatch.setattr(runner, "step", run)
    assert engine.interruption is not None
    for _ in range(2):
        with pytest.raises(
            DonatedPoolError, match=r"and what the pool held is lost: .*row 0: .*\. Build a new Runtime"
        ):
            engine.batch_inference(prompts, GREEDY)
    assert engine.idle
    assert engine.runtime.plane.num_open == engine.runtime.plane.leaked_pages() == 0


def test_other_weights_are_used_at_once(make_engine, model, prompts):
    other = jax.tree.map(lambda x: x * 1.5, model)
    engine = make_engine(prefix_cache=True)
    engine.batch_inference(prompts, GREEDY)
    engine.update_weights(other)
    outputs = engine.batch_inference(prompts, GREEDY)
    assert {o.prefix_tokens for o in outputs} == {0}
    assert [bits(o) for o in outputs] == [bits(o) for o in make_engine(of=other).batch_inference(prompts, GREEDY)]


def test_where_the_kernels_do_not_fit_xla_runs_the_layers_as_with_any_backend(make_engine, model, tiny, prompts):
    half, by_xla = jax.tree.map(lambda x: x.astype("bfloat16"), model), get_backend("cpu", layers="xla")
    cases = [  # an engine, and whether its blocks of layers are programs of their own
        (make_engine(of=half), True),
        (make_engine(kv_dtype="bfloat16"), True),
        (make_engine(of=tiny()), True),
        (make_engine(by_xla), True),
        (make_engine(scan=False), False),
    ]
    for engine, apart in cases:
        program = engine.runtime.runner.program
        assert (program.kernels, program.apart) == (False, apart)
    engine, _ = cases[0]
    addresses = engine.runtime.pool.addresses()
    flips = engine.flips(engine.batch_inference([prompts[5], prompts[3]], dataclasses.replace(GREEDY, max_tokens=4)))
    assert flips.tokens == 8
    assert flips.beyond(TIE_16) == 0, str(flips)
    assert engine.runtime.pool.addresses() == addresses
    assert_nothing_left(engine)


@pytest.mark.parametrize("shards", [2, 4])
def test_over_a_mesh_tokens_are_the_same_up_to_ties(make_engine, model, tensor_mesh, prompts, alone, shards):
    sharding = tensor_mesh(shards)
    engine = make_engine(of=shard_decoder(model, sharding), sharding=sharding)
    assert not engine.runtime.runner.program.kernels
    outputs = engine.batch_inference(prompts[3:], GREEDY)
    flips = make_engine().flips(outputs)
    assert flips.tokens == 3 * COUNT
    assert flips.beyond(TIE) == 0, str(flips)
    assert sum(o.token_ids == alone[i, GREEDY][0] for i, o in enumerate(outputs, 3)) >= 2
    assert_nothing_left(engine)


def test_what_another_backend_cached_is_never_hit(make_engine, model, prompts):
    def runtime(backend, **options):
        sizes = {"num_pages": 9, "tokens_per_page": 4, "max_request_tokens": 16}
        return Runtime(model, backend, **sizes, prefix_cache=True, **options)

    by_xla = get_backend("cpu", layers="xla")
    others = [runtime("xla"), runtime("reference"), runtime(by_xla), runtime("cpu", scan=False)]
    spaces = [r.namespace() for r in (runtime("cpu"), *others)]
    assert len({space.digest() for space in spaces}) == 5
    engine = make_engine(prefix_cache=True)
    assert engine.runtime.namespace() == spaces[0]
    engine.batch_inference([prompts[5]], GREEDY)
    assert [engine.runtime.plane.cached_tokens(space, prompts[5]) for space in spaces] == [36, 0, 0, 0, 0]


def test_without_a_compiler_the_runtime_says_so_when_it_is_built(make_engine, monkeypatch, tmp_path):
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PAGED_CPU_DIR", str(tmp_path))
    with pytest.raises(BackendUnavailableError, match="no C\\+\\+ compiler 'no-such-compiler' on this machine"):
        make_engine()

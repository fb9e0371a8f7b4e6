"""The logic of the benchmarks, not their figures: the arms compute the same, and the model of the trace is right."""

import jax
import numpy as np
import pytest
import tokenizers

from benchmarks import harness, prefix, serving, workload
from benchmarks.dense import DenseEngine, run_all
from benchmarks.offline import export
from paged.common import AttentionSpec
from paged.control import ControlPlane
from paged.control.cost import CostModel
from paged.control.simulate import simulate
from paged.control.trace import Arrival
from paged.models import DecoderConfig, random_decoder
from paged.models.checkpoint import load_model

TINY = DecoderConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_eps=1e-5,
    rope_theta=1e4,
    max_positions=64,
    tied_embeddings=False,
    eos=(0,),
    block=(AttentionSpec(scale=8**-0.5),),
)
PROMPTS = [5, 1, 16, 17, 23, 9, 30]
NEW = [6, 9, 1, 4, 8, 12, 3]


@pytest.fixture(scope="module")
def model():
    return random_decoder(TINY, jax.random.key(3))


@pytest.fixture(scope="module")
def trace():
    return [Arrival(0.0, prompt, new) for prompt, new in zip(PROMPTS, NEW)]


@pytest.fixture(scope="module")
def prompts(trace):
    return workload.prompts_of(trace, TINY.vocab_size)


@pytest.fixture(scope="module")
def arm(model):
    """10 pages of 4 tokens: the longest request and a little more."""
    return workload.PagedArm(
        model,
        pages=10,
        max_requests=4,
        max_request_tokens=40,
        max_step_tokens=16,
        tokens_per_page=4,
        prefixes=True,
    )


def test_dense_and_paged_arms_give_the_same_tokens_and_every_token_a_time(model, arm, trace, prompts):
    paged = arm.run(trace, prompts)
    dense = run_all(DenseEngine(model, slots=2, max_len=48, max_step_tokens=16, min_bound=16), prompts, NEW)
    assert paged.tokens == dense.tokens
    assert [len(dense.tokens[n]) for n in range(len(NEW))] == NEW
    for one in (paged, dense):
        assert one.first_token_s.shape == (len(NEW),)
        assert one.between_tokens_s.shape == (sum(NEW) - len(NEW),)
    assert dense.peak_running <= 2 < paged.peak_running
    assert paged.leaked == 0
    assert paged.overhead > 1
    assert len(arm.programs) <= 7


def test_a_dense_request_that_can_never_fit_is_refused(model):
    engine = DenseEngine(model, slots=2, max_len=48, max_step_tokens=16)
    with pytest.raises(ValueError, match="request 3 needs 49 tokens, a slot has 48"):
        engine.submit(3, np.ones(40, np.int32), 10)
    with pytest.raises(ValueError, match="no multiple"):
        DenseEngine(model, slots=2, max_len=50, max_step_tokens=16)


def test_the_model_of_a_trace_counts_whole_pages_of_prompts_that_were_in_the_cache():
    shared = np.arange(40, dtype=np.int32)
    prompts = [np.concatenate([shared, np.full(n, 50 + n, np.int32)]) for n in (3, 5, 7)]
    assert prefix.avoided(prompts, [4, 4, 4], [0, 0, 1]) == 32  # the second came before the first was cached
    assert prefix.avoided(prompts, [4, 4, 4], [0, 1, 9]) == 64
    whole = np.arange(32, dtype=np.int32)
    assert prefix.avoided([whole, whole], [1, 1], [0, 5]) == 16  # a token is left to compute


@pytest.mark.parametrize("stagger", [0, 1, 5])
def test_the_engine_avoids_what_the_model_of_the_trace_says(arm, prompts, monkeypatch, stagger):
    monkeypatch.setattr(prefix, "PAGE", 4)
    monkeypatch.setattr(prefix, "STEP_TOKENS", 16)
    monkeypatch.setattr(arm.runtime.runner, "depth", 1)
    shared = [np.concatenate([np.arange(1, 10, dtype=np.int32), prompts[n]]) for n in (0, 1, 5)]
    trace = [Arrival(0.0, len(p), 3) for p in shared]
    steps = [0, stagger, 2 * stagger]
    expected = prefix.avoided(shared, [3] * 3, steps)
    warm, cold = (arm.run(trace, shared, share=share, step_arrivals=steps) for share in (True, False))
    assert warm.prefix_tokens == cold.prefill_tokens - warm.prefill_tokens == expected
    assert expected == {0: 8, 1: 16, 5: 16}[stagger]
    assert warm.tokens == cold.tokens


def test_committed_traces_fit_their_budgets():
    budgets, trace = workload.budgets(), workload.load_trace("mixed24")
    assert len(trace) == budgets["max_requests"] == 24
    assert max(a.prompt_tokens + a.output_tokens for a in trace) <= budgets["slot_tokens"]
    assert budgets["serving_slots"] == [2, 4, 8]
    prompts, outputs, steps = prefix.load(1000)
    assert len(prompts) == len(outputs) == 24
    assert steps == sorted(steps)
    assert {p[:512].tobytes() for p in prompts} == {prompts[0][:512].tobytes()}


def test_a_pass_with_preemptions_tells_capacity_and_no_throughput():
    row = dict.fromkeys(("slots", "overhead", "programs", "compiles", "leaked", "same_tokens", "requests"), 1)
    arm = {"tokens_per_s": harness.Spread(5, 4, 6)._asdict(), "tokens_per_cpu_s": harness.Spread(5, 4, 6)._asdict()}
    arm |= {"first_token_ms": {}, "between_tokens_ms": {}}
    arm |= {"mean_running": harness.Spread(5, 4, 6)._asdict(), "peak_running": 9}
    ratio = harness.Spread(2, 1, 3)._asdict()
    row |= {
        "paged": arm,
        "dense": arm,
        "preemptions": 7,
        "throughput_ratio": None,
        "cpu_ratio": None,
        "first_token_ratio": ratio,
    }
    single = {
        "paged": {"tokens_per_s": ratio},
        "dense": {"tokens_per_s": ratio},
        "wall_ratio": ratio,
        "cpu_ratio": ratio,
    }
    text = "\n".join(serving.lines({"rows": [row], "single_stream": single, "broken": []}))
    assert "capacity only, 7 preemptions" in text
    assert "throughput not told" in text


def test_weights_for_the_other_arm_are_those_of_the_model(tmp_path):
    model = random_decoder(TINY, jax.random.key(5))
    export(model, tmp_path)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(96)}, "0")).save(
        str(tmp_path / "tokenizer.json")
    )
    again = load_model(tmp_path, dtype="float32").model
    assert again.config.num_kv_heads == TINY.num_kv_heads
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(again), jax.tree.leaves(model))


def test_simulated_and_measured_runs_of_one_trace_schedule_the_same_steps(arm, trace, prompts, monkeypatch):
    """With all requests there from the start the schedule depends on no clock, so even step counts are equal."""
    monkeypatch.setattr(arm.runtime.runner, "depth", 1)
    measured = arm.run(trace, prompts, record=True)
    plane = ControlPlane(arm.layout, max_requests=4, max_pages_per_request=10, shapes=arm.shapes)
    told = simulate(trace, plane, CostModel(), max_step_tokens=16)
    assert (told.counters.steps, told.counters.preemptions) == (measured.steps, measured.preemptions)
    assert len(measured.samples) == measured.steps
    assert sum(s["prefill_tokens"] + s["decode_rows"] for s in measured.samples) == (
        told.counters.prefill_tokens + told.counters.decode_tokens
    )
    assert min(s["seconds"] for s in measured.samples) > 0

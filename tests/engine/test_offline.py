"""The offline engine: tokens, ends, texts, refusals, and what an interruption says and leaves behind."""

import gc

import pytest

from paged.common import InvalidInputError, LateCompileError, PoolExhaustedError
from paged.engine import OfflineEngine, Overlap, SamplingParams, replay
from paged.engine.step import num_compiled

COUNT = 12


class Letters:
    """Id i is the character chr(i + 32)."""

    def encode(self, text):
        return [ord(c) - 32 for c in text]

    def stream(self):
        return self

    def push(self, token):
        return chr(token + 32)

    def finish(self):
        return ""


@pytest.fixture(scope="module")
def make_engine(tiny):
    def make(tokenizer=None, **options):
        base = {"num_pages": 41, "tokens_per_page": 4, "max_requests": 4, "max_step_tokens": 16, "poison_freed": True}
        return OfflineEngine(tiny(), tokenizer, **{**base, **options})

    return make


@pytest.fixture(scope="module")
def engine(make_engine):
    return make_engine(Letters())


GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(make_runtime, prompts, run_greedy):
    """Tokens of each prompt by the step-level entry points, one request after the other."""
    runtime, out = make_runtime(), []
    for prompt in prompts:
        handle = runtime.add(prompt)
        out.append(tuple(run_greedy(runtime, handle, COUNT)))
        runtime.release(handle)
    return out


def finish(engine):
    while not engine.idle:
        engine.step()


def assert_nothing_left(engine):
    plane, runner = engine.runtime.plane, engine.runtime.runner
    assert (plane.num_open, plane.held_pages, plane.leaked_pages(), plane.pending_pages) == (0, 0, 0, 0)
    assert engine.idle
    assert not runner.sampling
    assert not runner.prompt_scores
    assert not engine._live.samples
    plane.verify()


def test_tokens_are_those_of_the_step_level_entry_points(engine, prompts, alone):
    outputs = engine.batch_inference(prompts, GREEDY)
    assert [o.request for o in outputs] == list(range(6))
    assert [o.token_ids for o in outputs] == alone
    assert {(o.finish_reason, o.stop_reason, o.seed, o.error) for o in outputs} == {("length", None, None, None)}
    for output, prompt in zip(outputs, prompts):
        assert output.prompt_ids == tuple(prompt)
        assert output.text == "".join(chr(t + 32) for t in output.token_ids)
        assert len(output.logprobs) == COUNT
        assert output.timing.arrival <= output.timing.first_token <= output.timing.last_token
    assert_nothing_left(engine)


def test_random_tokens_are_those_of_the_step_level_entry_points_and_of_their_seed_alone(engine, make_runtime, prompts):
    params = [SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.8 + i / 10, seed=i) for i in range(6)]
    runtime, steps = make_runtime(), []
    for prompt, one in zip(prompts, params):
        handle = runtime.add(prompt, one)
        tokens = runtime.prefill([handle])
        while len(tokens) < 8:
            tokens += runtime.decode([handle])
        steps.append(tuple(token.id for token in tokens))
        runtime.release(handle)
    assert not runtime.runner.sampling
    forward = engine.batch_inference(prompts, params)
    assert [o.token_ids for o in forward] == steps
    assert [o.seed for o in forward] == list(range(6))
    mixed = [*[SamplingParams(max_tokens=9)] * 2, *params[::-1]]
    backward = engine.batch_inference([prompts[4], prompts[0], *prompts[::-1]], mixed)
    assert [o.token_ids for o in backward[:1:-1]] == steps
    assert_nothing_left(engine)


def test_samples_differ_repeat_with_their_seed_and_report_a_fresh_one(engine, prompts):
    params = SamplingParams(max_tokens=10, ignore_eos=True, temperature=1.5, n=3)
    outputs = engine.batch_inference([prompts[2], prompts[1]], params)
    assert [(o.request, o.sample) for o in outputs] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert len({o.token_ids for o in outputs}) == 6
    assert len({o.seed for o in outputs}) == 2
    again = SamplingParams(max_tokens=10, ignore_eos=True, temperature=1.5, n=3, seed=outputs[0].seed)
    assert [o.token_ids for o in engine.batch_inference([prompts[2]], again)] == [o.token_ids for o in outputs[:3]]


def test_log_probabilities_of_generated_and_prompt_tokens_are_the_dense_paths(tiny, engine, prompts):
    params = [
        SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=3),
        SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=0),
        SamplingParams(max_tokens=4, ignore_eos=True),
    ]
    batch = [prompts[5], prompts[3], prompts[2]]  # 37 tokens in steps of 16
    scored, bare, plain = engine.batch_inference(batch, params)
    assert plain.prompt_logprobs is None
    assert plain.top_logprobs == ()
    for output in (scored, bare):
        ids = [*output.prompt_ids, *output.token_ids]
        parity = replay(tiny(), ids, 1)
        got = [*output.prompt_logprobs[1:]]
        assert output.prompt_logprobs[0] is None
        assert [token.id for token in got] == list(output.prompt_ids[1:])
        values = [*(token.logprob for token in got), *output.logprobs]
        assert values == pytest.approx(parity.logprobs.tolist(), abs=1e-4)
    assert {len(token.top) for token in scored.prompt_logprobs[1:]} == {3}
    assert {len(token.top) for token in bare.prompt_logprobs[1:]} == {0}
    assert [top[0] for top in scored.top_logprobs] == list(zip(scored.token_ids, scored.logprobs))
    assert {len(top) for top in scored.top_logprobs} == {2}
    assert_nothing_left(engine)


def test_a_stop_string_cuts_the_text_and_ends_the_request(engine, prompts, alone):
    text = "".join(chr(t + 32) for t in alone[0])
    stop = text[4:6]  # two tokens
    assert text.find(stop) == 4
    pieces = list(engine.stream([prompts[0], prompts[1]], [SamplingParams(max_tokens=COUNT, stop=stop), GREEDY]))
    mine = [delta for delta in pieces if delta.request == 0]
    assert "".join(delta.text for delta in mine) == text[:4]
    assert [delta.finish_reason for delta in mine] == [None] * 5 + ["stop"]
    assert "".join(d.text for d in pieces if d.request == 1) == "".join(chr(t + 32) for t in alone[1])
    (output,) = engine.batch_inference([prompts[0]], SamplingParams(max_tokens=COUNT, stop=["nothing", stop]))
    assert (output.text, output.token_ids, output.stop_reason) == (text[:4], alone[0][:6], stop)
    # Held back, because it might have been the beginning of a stop string, and given at the end.
    (output,) = engine.batch_inference([prompts[0]], SamplingParams(max_tokens=5, stop=stop))
    assert (output.text, output.finish_reason) == (text[:5], "length")
    assert_nothing_left(engine)


def test_stop_tokens_end_a_text_and_are_its_last_token(engine, prompts, alone):
    cut = next(i for i in range(1, COUNT) if alone[3][i] not in alone[3][:i])
    params = SamplingParams(max_tokens=COUNT, stop_token_ids=[95, alone[3][cut]], ignore_eos=True)
    (output,) = engine.batch_inference([prompts[3]], params)
    assert output.token_ids == alone[3][: cut + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", alone[3][cut])


def test_scenario_h6_a_request_that_can_never_fit_is_refused_and_the_others_run(make_engine, prompts, alone):
    engine = make_engine(num_pages=14)
    long, params = [1] * 60, SamplingParams(max_tokens=COUNT, ignore_eos=True)
    outputs = engine.batch_inference([prompts[1], long, [1] * 97, prompts[3]], params)
    assert [o.finish_reason for o in outputs] == ["length", "refused", "refused", "length"]
    assert [outputs[0].token_ids, outputs[3].token_ids] == [alone[1], alone[3]]
    assert outputs[1].error.startswith("prompt 1: 60 tokens and 11 to generate need 18 pages of 4 tokens; the pool has")
    assert outputs[2].error.startswith("prompt 2 has 97 tokens; the model has positions for 96")
    with pytest.raises(PoolExhaustedError, match=r"prompt: 60 tokens and 11 to generate need 18 pages"):
        engine.submit(long, params)
    assert engine.check([prompts[1], prompts[3]], params) == 15
    with pytest.raises(PoolExhaustedError, match=r"prompt 1: 60 tokens"):
        engine.check([prompts[1], long], params)
    assert_nothing_left(engine)


@pytest.mark.parametrize(
    ("batch", "params", "message"),
    [
        ([[1], []], None, "prompt 1 is empty"),
        ([[1], [96]], None, r"prompt 1.tokens must be in 0..95: token 0 has 96"),
        ([[1], [2]], [SamplingParams()], "2 prompts and 1 SamplingParams"),
        (
            [[1], [2]],
            SamplingParams(logprobs=21),
            r"prompt 0: SamplingParams.logprobs is 21; .* at most 20 .*num_top=21",
        ),
        ([[1]], SamplingParams(prompt_logprobs=30), r"prompt 0: SamplingParams.prompt_logprobs is 30"),
        ([[1]], SamplingParams(stop_token_ids=[96]), r"prompt 0.stop_token_ids must be in 0..95, got 96"),
    ],
)
def test_wrong_values_name_the_prompt_before_anything_runs(engine, batch, params, message):
    steps = engine.driver.counters.steps
    with pytest.raises(InvalidInputError, match=message):
        engine.batch_inference(batch, params)
    assert engine.driver.counters.steps == steps
    assert_nothing_left(engine)


def test_params_of_another_type_are_refused(engine):  # not through submit, whose types are checked in tests
    with pytest.raises(InvalidInputError, match=r"submit: params must be SamplingParams, got \{'max_tokens': 3\}"):
        engine._intake.params({"max_tokens": 3}, "submit")


def test_texts_need_a_tokenizer(make_engine):
    engine = make_engine()
    with pytest.raises(InvalidInputError, match="prompt 1 is text, and this engine has no tokenizer"):
        engine.batch_inference([[1], "text"])
    with pytest.raises(
        InvalidInputError, match=r"prompt 0: SamplingParams.stop is \('x',\), and there is no tokenizer"
    ):
        engine.batch_inference([[1]], SamplingParams(stop="x"))


def test_requests_come_and_go_one_by_one(engine, prompts, alone):
    first = engine.submit(prompts[5], GREEDY)
    got = {first: []}
    for _ in range(5):
        engine.step()
    second, third = engine.submit(prompts[3], GREEDY), engine.submit(prompts[2], GREEDY)
    with pytest.raises(InvalidInputError, match=f"request {second} has not ended"):
        engine.take(second)
    while not engine.idle:
        for delta in engine.step():
            got.setdefault(delta.request, []).append(delta.token.id)
            if delta.request == second and len(got[second]) == 3:
                engine.abort(second)
                engine.abort(second)
    (output,) = engine.take(second)
    assert (output.finish_reason, output.token_ids) == ("abort", alone[3][:3])
    assert [engine.take(i)[0].token_ids for i in (first, third)] == [alone[5], alone[2]]
    with pytest.raises(InvalidInputError, match="never submitted, or taken"):
        engine.take(first)
    assert engine.step() == []
    assert_nothing_left(engine)


def test_an_interruption_says_what_is_done_and_leaves_nothing(engine, prompts, alone):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 12, 12, 12, 12, 12)]

    def interrupt(progress):
        if progress.generated_tokens >= 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as info:
        engine.batch_inference(prompts, params, on_step=interrupt)
    (note,) = info.value.__notes__
    assert note.startswith("paged: 1 of 6 completions are done (prompt 0: 2 tokens), 5 are not: ")
    outputs = engine.interruption.outputs
    assert [o.finish_reason for o in outputs] == ["length", *["abort"] * 5]
    assert all(o.token_ids == whole[: len(o.token_ids)] for o, whole in zip(outputs, alone))
    begun = [i for i, o in enumerate(outputs) if o.finish_reason == "abort" and o.token_ids]
    assert f"{len(begun)} had begun, {sum(len(outputs[i].token_ids) for i in begun)} tokens in all" in note
    assert_nothing_left(engine)
    assert engine.batch_inference([prompts[5]], GREEDY)[0].token_ids == alone[5]


def test_a_failing_device_says_what_is_lost_and_leaves_nothing(engine, prompts, alone, monkeypatch):
    runner = engine.runtime.runner
    collect, calls = runner.collect, []

    def failing(ticket):
        calls.append(ticket)
        if len(calls) == 4:
            raise ConnectionError("device lost")
        return collect(ticket)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "collect", failing)
        with pytest.raises(ConnectionError, match="device lost") as info:
            engine.batch_inference(prompts, GREEDY)
    assert "0 of 6 completions are done (none), 6 are not" in info.value.__notes__[0]
    assert_nothing_left(engine)
    assert engine.batch_inference([prompts[5]], GREEDY)[0].token_ids == alone[5]


def test_a_stream_that_is_dropped_aborts_its_requests(engine, prompts):
    stream = engine.stream(prompts, GREEDY)
    next(stream)
    del stream
    gc.collect()
    assert_nothing_left(engine)
    assert {o.finish_reason for o in engine.interruption.outputs} == {"abort"}


def test_streams_that_are_read_in_turn_get_every_piece_once(engine, prompts, alone):
    number = engine.submit(prompts[2], GREEDY)
    got, open_ = {0: [], 3: []}, {i: engine.stream([prompts[i]], GREEDY) for i in (0, 3)}
    while open_:
        for i, stream in tuple(open_.items()):
            delta = next(stream, None)
            if delta is None:
                del open_[i]
            else:
                got[i].append(delta)
    for i, deltas in got.items():
        assert tuple(delta.token.id for delta in deltas) == alone[i]
        assert {delta.request for delta in deltas} == {0}
        assert [delta.finish_reason for delta in deltas] == [None] * (COUNT - 1) + ["length"]
    assert engine.take(number)[0].token_ids == alone[2]
    assert_nothing_left(engine)
    assert not engine._inboxes


def test_scores_of_a_prompt_without_likeliest_tokens_are_those_with_them(engine, prompts):
    bare, scored = (SamplingParams(max_tokens=1, prompt_logprobs=most) for most in (0, 3))
    ((one,), (other,)) = (engine.batch_inference([prompts[5]], each) for each in (bare, scored))
    assert [t and t.logprob for t in one.prompt_logprobs] == [t and t.logprob for t in other.prompt_logprobs]
    assert {t.top for t in one.prompt_logprobs[1:]} == {()}


def test_scores_of_a_prompt_that_is_aborted_on_its_way_are_forgotten(engine, prompts):
    number = engine.submit(prompts[5], SamplingParams(max_tokens=1, prompt_logprobs=0))  # 37 tokens in steps of 16
    engine.step()
    assert engine.driver.num_in_flight == 1
    engine.abort(number)
    finish(engine)
    assert engine.take(number)[0].finish_reason == "abort"
    assert_nothing_left(engine)


def test_after_a_strict_warm_up_nothing_compiles(make_engine, prompts):
    lines = []
    engine = make_engine(poison_freed=False)
    sampled = SamplingParams(max_tokens=4, temperature=1.0)
    done = engine.warm_up(GREEDY, sampled, strict=True, say=lines.append)
    # One rung of rows, tokens and lengths, for decoding and for prompts; greedy, sampled, and both in one step.
    assert (done.step_programs, engine.runtime.runner.programs.steps) == (4, 4)
    assert lines == [str(done)]
    assert lines[0].startswith("warm-up: 4 step programs and ")
    compiled = num_compiled("cpu")
    engine.batch_inference(prompts, [GREEDY, sampled] * 3)
    assert num_compiled("cpu") == compiled
    with pytest.raises(
        LateCompileError, match=r"wants a program that the warm-up did not compile: .*scores_prompt=True"
    ):
        engine.batch_inference(prompts, SamplingParams(prompt_logprobs=0))
    assert_nothing_left(engine)
    handle = engine.runtime.add([1])
    with pytest.raises(InvalidInputError, match="1 requests are open"):
        engine.warm_up()
    engine.runtime.release(handle)


def test_few_programs_serve_requests_of_many_lengths(tiny):
    engine = OfflineEngine(tiny(), max_requests=16, max_step_tokens=64, tokens_per_page=4, num_pages=60)
    warm = engine.warm_up(strict=True)
    assert warm.step_programs == 3
    lengths = [(7 * i) % 61 + 1 for i in range(24)]
    params = [SamplingParams(max_tokens=1 + i % 9) for i in range(24)]
    before = num_compiled("cpu")
    outputs = engine.batch_inference([[1 + i] * n for i, n in enumerate(lengths)], params)
    assert num_compiled("cpu") == before
    assert len(outputs) == 24
    assert_nothing_left(engine)


def test_the_trace_tells_who_waited(engine, prompts):
    engine.runtime.runner.traces.clear()
    steps = engine.driver.counters.steps
    engine.batch_inference(prompts, GREEDY)
    traces = engine.trace()
    assert len(traces) == engine.driver.counters.steps - steps
    overlap = Overlap.of(traces)
    assert 0 <= overlap.idle_share <= 1
    assert overlap.total_s > 0
    assert {trace.rows for trace in traces} <= {1, 2, 3, 4}
    assert overlap.lines()[0].startswith(f"{len(traces)} steps, on average: host plans ")
    assert Overlap.of([]).lines() == ["no step was run"]

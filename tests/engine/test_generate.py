"""The generation loop: order, admission, ends, text, and that nothing is left behind."""

import pytest

from paged.common import InvalidInputError, PoolExhaustedError
from paged.engine import Generator, replay


class Letters:
    """Id i is the character chr(i + 32); what a stream holds back is its latest character."""

    def encode(self, text):
        return [ord(c) - 32 for c in text]

    def stream(self):
        return LetterStream()


class LetterStream:
    def __init__(self):
        self._held = ""

    def push(self, token):
        out, self._held = self._held, chr(token + 32)
        return out

    def finish(self):
        out, self._held = self._held, ""
        return out


@pytest.fixture(scope="module")
def make_generator(tiny):
    def make(tokenizer=None, **options):
        base = {"num_pages": 41, "tokens_per_page": 4, "max_requests": 4, "max_step_tokens": 16, "poison_freed": True}
        return Generator(tiny(), tokenizer, **{**base, **options})

    return make


@pytest.fixture(scope="module")
def alone(make_generator, prompts):
    """Each prompt's completion by itself, twelve tokens, end of text ignored."""
    generator = make_generator()
    return [generator.generate([p], max_tokens=12, eos=())[0] for p in prompts]


def assert_nothing_left(generator):
    plane = generator.runtime.plane
    assert (plane.num_open, plane.held_pages, plane.leaked_pages()) == (0, 0, 0)
    plane.verify()


def test_completions_are_in_order_and_follow_the_dense_path(tiny, make_generator, prompts, alone):
    generator = make_generator()
    got = generator.generate(prompts, max_tokens=12, eos=())  # six prompts, four rows
    assert [c.prompt_ids for c in got] == [tuple(p) for p in prompts]
    for completion, single, prompt in zip(got, alone, prompts):
        parity = replay(tiny(), [*prompt, *completion.token_ids], len(prompt))
        assert parity.flips(1e-3) == []
        assert completion.token_ids == single.token_ids
        assert completion.logprobs == pytest.approx(parity.logprobs.tolist(), abs=1e-4)
        assert (completion.finish_reason, completion.text, completion.top_logprobs) == ("length", "", ())
    assert_nothing_left(generator)


def test_a_pool_for_one_request_serves_all_of_them(make_generator, prompts, alone):
    # With 11 more tokens each the prompts need 12, 7, 6, 4, 4 and 3 pages; there are 13.
    generator = make_generator(num_pages=14)
    got = generator.generate(prompts[::-1], max_tokens=12, eos=())
    assert [c.token_ids for c in got] == [c.token_ids for c in alone[::-1]]
    assert sum(c.preemptions for c in got) == generator.engine.driver.counters.preemptions == 1
    assert_nothing_left(generator)


def test_a_text_ends_at_any_of_the_models_end_tokens(make_generator, prompts, alone):
    generator = make_generator()
    ids = alone[3].token_ids
    cut = next(i for i in range(1, 12) if ids[i] not in ids[:i])
    others = [t for t in range(96) if t not in ids]
    for eos in ((ids[cut], others[0]), (others[-1], ids[cut])):
        stopped = generator.generate([prompts[3]], max_tokens=12, eos=eos)[0]
        assert stopped.token_ids == ids[: cut + 1]
        assert (stopped.finish_reason, len(stopped.logprobs)) == ("stop", cut + 1)
    full = generator.generate([prompts[3]], max_tokens=cut + 1, eos=())[0]
    assert (full.token_ids, full.finish_reason) == (ids[: cut + 1], "length")
    assert_nothing_left(generator)


def test_the_models_last_position_ends_a_text(make_generator):
    generator = make_generator()
    whole, nearly = generator.generate([[1] * 96, [1] * 94], max_tokens=12, eos=())
    assert (len(whole.token_ids), whole.finish_reason) == (1, "length")
    assert len(nearly.token_ids) == 3
    assert_nothing_left(generator)


def test_text_comes_in_pieces_that_join_to_the_whole(make_generator):
    generator = make_generator(Letters(), num_top=2)
    seen = []
    got = generator.generate(
        ["pages", "of a pool"],
        max_tokens=5,
        eos=(),
        on_token=lambda index, token, piece: seen.append((index, token, piece)),
    )
    for i, completion in enumerate(got):
        assert completion.prompt_ids == tuple(Letters().encode(["pages", "of a pool"][i]))
        assert completion.text == "".join(piece for j, _, piece in seen if j == i)
        # The prompt's last character was held back by the stream, so it comes first; nothing else of the prompt does.
        assert completion.text == ["s", "l"][i] + "".join(chr(t + 32) for t in completion.token_ids)
        assert [t.id for j, t, _ in seen if j == i] == list(completion.token_ids)
        for (best, second), token, logprob in zip(completion.top_logprobs, completion.token_ids, completion.logprobs):
            assert best == (token, logprob)
            assert second[1] <= logprob
    assert [j for j, _, _ in seen[:4]] == [0, 1, 0, 1]


@pytest.mark.parametrize("depth", [1, 2])
def test_no_token_is_told_after_the_end_of_a_text(make_generator, prompts, alone, depth):
    # At depth 2 a step that feeds the end of the text is under way when the end is seen.
    cut = alone[3].token_ids[4]
    seen = []
    generator = make_generator(depth=depth)
    done = generator.generate(
        [prompts[3], prompts[1]], max_tokens=12, eos=[cut], on_token=lambda i, token, _: seen.append((i, token.id))
    )
    for i, completion in enumerate(done):
        assert tuple(token for j, token in seen if j == i) == completion.token_ids
    assert done[0].token_ids == alone[3].token_ids[: alone[3].token_ids.index(cut) + 1]


def test_chunks_are_reported(make_generator, prompts):
    seen = []
    make_generator().generate([prompts[5]], max_tokens=1, on_chunk=lambda done, total: seen.append((done, total)))
    assert seen == [(16, 37), (32, 37), (37, 37)]


@pytest.mark.parametrize(
    ("batch", "max_tokens", "error", "message"),
    [
        ([[1], []], 4, InvalidInputError, r"prompt 1 is empty"),
        ([[1], "text"], 4, InvalidInputError, r"prompt 1 is text, and this engine has no tokenizer"),
        ([[1, 96]], 4, InvalidInputError, r"prompt 0.tokens must be in 0..95: token 1 has 96"),
        ([[1], [1] * 97], 4, InvalidInputError, r"prompt 1 has 97 tokens; the model has positions for 96"),
        (
            [[1], [1] * 30],
            40,
            PoolExhaustedError,
            r"prompt 1: 30 tokens and 39 to generate need 18 pages .*has 13",
        ),
        ([[1]], 0, InvalidInputError, r"generate.max_tokens must be in 1"),
    ],
)
def test_every_prompt_is_checked_before_anything_runs(make_generator, batch, max_tokens, error, message):
    generator = make_generator(num_pages=14)
    generator.runtime.plane.open = None  # any attempt to start a request fails loudly
    with pytest.raises(error, match=message):
        generator.generate(batch, max_tokens=max_tokens)
    assert generator.generate([]) == []


def test_an_interruption_leaves_nothing_behind(make_generator, prompts, alone):
    generator = make_generator()
    count = 0

    def interrupt(*_):
        nonlocal count
        count += 1
        if count == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate(prompts, max_tokens=12, eos=(), on_token=interrupt)
    assert_nothing_left(generator)
    assert generator.generate([prompts[5]], max_tokens=12, eos=())[0].token_ids == alone[5].token_ids


def test_requests_of_other_users_are_left_alone(make_generator, prompts, alone):
    generator = make_generator(num_pages=14)
    runtime = generator.runtime
    other = runtime.add(prompts[3])
    runtime.prefill([other])
    with pytest.raises(PoolExhaustedError, match=r"0 of 13 can be had: somebody else holds the others"):
        generator.generate([prompts[5]], max_tokens=12, eos=())
    assert generator.generate([prompts[2]], max_tokens=12, eos=())[0].token_ids == alone[2].token_ids
    assert runtime.decode([other])[0].id == alone[3].token_ids[1]
    more = [runtime.add([1]) for _ in range(3)]
    with pytest.raises(PoolExhaustedError, match="4 of 4 rows are open, 0 of them by this driver"):
        generator.generate([prompts[2]], max_tokens=2)
    assert len(more) == 3


def test_the_default_pool_holds_whole_requests(tiny):
    generator = Generator(tiny(), max_requests=2)
    assert generator.runtime.layout.num_pages == 1 + 2 * 6  # 96 positions are six pages of 16

"""A real model end to end: parity over many pages, reuse of pages, and the command, sharded too."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from paged.engine import Generator, replay

pytestmark = pytest.mark.weights

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "A page table maps",
    "1, 2, 3, 4,",
]
TIE = 1e-3


@pytest.fixture(scope="module")
def generator(smollm2):
    options = {"num_pages": 41, "max_requests": 4, "max_step_tokens": 64, "poison_freed": True}
    return Generator(smollm2.model, smollm2.tokenizer, **options)


def assert_parity(model, completion):
    parity = replay(model, [*completion.prompt_ids, *completion.token_ids], len(completion.prompt_ids))
    assert parity.flips(TIE) == []
    assert (parity.behind[parity.top_gap > TIE] == 0).all()
    np.testing.assert_allclose(completion.logprobs, parity.logprobs, atol=3e-4)


def test_tokens_follow_the_dense_path_over_pages_and_their_reuse(smollm2, generator):
    # Five prompts on four rows, so the fifth runs on pages that were freed and filled with NaN.
    completions = generator.generate(PROMPTS, max_tokens=24, eos=())
    assert completions[0].text.startswith(" Paris")
    for completion in completions:
        assert_parity(smollm2.model, completion)
    # A prompt of 150 tokens in chunks of 64, over eleven of its 40 pages, all of which were used before.
    long = smollm2.tokenizer.encode(" ".join(PROMPTS * 7))[:150]
    completion = generator.generate([long], max_tokens=20, eos=())[0]
    assert_parity(smollm2.model, completion)
    assert generator.generate([PROMPTS[1]], max_tokens=24, eos=())[0].token_ids == completions[1].token_ids
    generator.runtime.plane.verify()
    assert generator.runtime.plane.held_pages == 0


def test_texts_stream_and_end_at_the_models_own_end(smollm2, generator):
    chat = "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"
    pieces = []
    done = generator.generate([chat], max_tokens=60, on_token=lambda _i, _t, piece: pieces.append(piece))[0]
    assert done.finish_reason == "stop"
    assert done.token_ids[-1] in smollm2.config.eos
    assert "".join(pieces) == done.text == smollm2.tokenizer.decode(done.token_ids)
    assert done.text
    assert "<|im_end|>" not in done.text


def paged(*arguments):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "paged.cli", "generate", "--model", "smollm2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_the_command_says_paris():
    done = paged("--prompt", "The capital of France is", "--max-tokens", "16")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "loading weights: 11/11" in done.stderr
    assert "16 tokens in" in done.stderr


def test_the_command_gives_ids_and_log_probabilities_as_json(generator):
    arguments = ["--max-tokens", "8", "--json", "--quiet", "--tensor-parallel", "3", "--dtype", "float32"]
    done = paged("--prompt", PROMPTS[0], "--prompt", PROMPTS[1], *arguments, "--top-logprobs", "2")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert (document["model"], document["backend"], document["dtype"]) == ("smollm2", "xla", "float32")
    want = generator.generate(PROMPTS[:2], max_tokens=8)
    for entry, prompt, completion in zip(document["completions"], PROMPTS, want):
        assert entry["prompt"] == prompt
        assert entry["prompt_ids"] == list(completion.prompt_ids)
        assert entry["token_ids"] == list(completion.token_ids)
        assert entry["text"] == completion.text
        np.testing.assert_allclose(entry["logprobs"], completion.logprobs, atol=3e-4)
        assert [pair[0][0] for pair in entry["top_logprobs"]] == entry["token_ids"]

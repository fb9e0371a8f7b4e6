"""A real model end to end: parity over many pages, reuse of pages, and the command."""

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
]
TIE = 1e-3


@pytest.fixture(scope="module")
def generator(smollm2):
    options = {"num_pages": 41, "tokens_per_page": 4, "max_requests": 2, "max_step_tokens": 64}
    return Generator(smollm2.model, smollm2.tokenizer, poison_freed=True, **options)


def test_tokens_follow_the_dense_path_over_pages_and_their_reuse(smollm2, generator):
    # Three prompts on two rows, then one of 100 tokens in chunks of 64, over 28 of 40 pages of four tokens, some of
    # which were used before and filled with NaN when they were freed; then one on pages that all were.
    completions = generator.generate(PROMPTS, max_tokens=10, eos=())
    assert completions[0].text.startswith(" Paris")
    long = smollm2.tokenizer.encode(" ".join(PROMPTS * 9))[:100]
    for completion in [*completions, *generator.generate([long], max_tokens=10, eos=())]:
        parity = replay(smollm2.model, [*completion.prompt_ids, *completion.token_ids], len(completion.prompt_ids))
        assert parity.flips(TIE) == []
        assert (parity.behind[parity.top_gap > TIE] == 0).all()
        np.testing.assert_allclose(completion.logprobs, parity.logprobs, atol=3e-4)
    again = generator.generate([PROMPTS[1]], max_tokens=10, eos=())[0]
    assert again.token_ids == completions[1].token_ids
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


def test_the_command_says_paris():
    command = [sys.executable, "-m", "paged.cli", "generate", "--model", "smollm2", "--max-tokens", "16"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    arguments = {"capture_output": True, "text": True, "timeout": 300, "env": environment}
    done = subprocess.run([*command, "--prompt", "The capital of France is"], **arguments)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "loading weights: 8/8" in done.stderr
    assert "16 tokens in" in done.stderr

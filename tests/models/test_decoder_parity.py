"""The decoder on pages against the same weights without a cache (requirements M1, M4; scenario M7)."""

import jax
import numpy as np
import pytest
from model_steps import PerLayer, Rows, dense_logits, drawn_decoder, run_step, tiny_config

from paged.common import AttentionSpec, InvalidInputError

BLOCK = (AttentionSpec(scale=0.25), AttentionSpec(scale=0.2, window=5, soft_cap=3.0))


def prompts(count, length, seed=0):
    return np.random.default_rng(seed).integers(3, 96, (count, length)).tolist()


@pytest.fixture(scope="module")
def model():
    """Four layers in a block of two: full attention, then a window of 5 with a soft cap."""
    return drawn_decoder(tiny_config(num_layers=4, block=BLOCK), 0)


def replay(rows, model):
    """Prefill two rows, then mix prefill with decode, then decode; every sampled row against the dense path."""
    a, b, c = prompts(3, 19)
    steps = [[(0, 0, a[:11]), (1, 0, b[:7])], [(0, 11, a[11:12]), (1, 7, b[7:15]), (2, 0, c[:13])]]
    steps += [[(0, 12 + i, a[12 + i : 13 + i]), (1, 15 + i, b[15 + i : 16 + i])] for i in range(4)]
    want = [dense_logits(model, tokens) for tokens in (a, b, c)]
    got, dense = [], []
    for slices in steps:
        got.append(rows.step(slices))
        dense.append([want[row][start + len(tokens) - 1] for row, start, tokens in slices])
    return np.concatenate(got), np.concatenate(dense)


FORMS = {
    "scanned": (4, {}),
    "unrolled": (2, {"scan": False}),
    "per_layer": (4, {"scan": False, "backend": PerLayer()}),
}


@pytest.mark.parametrize("form", FORMS)
def test_prefill_decode_and_mixed_steps_give_the_dense_logits(model, form):
    layers, options = FORMS[form]
    if layers != 4:
        model = drawn_decoder(tiny_config(num_layers=layers, block=BLOCK), 0)
    got, want = replay(Rows(model, **options), model)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())
    assert (got.argmax(-1) == want.argmax(-1)).all()


def test_pages_are_appended_to_in_every_layer_of_the_block(model):
    rows = Rows(model)
    rows.step([(1, 0, prompts(1, 6)[0])])
    keys, _ = rows.pool.read(rows.pages[1][0])
    assert (np.abs(keys).max(axis=(1, 2, 3)) > 0).all()
    assert np.unique(np.abs(keys).max(axis=(1, 2, 3))).size == 4


def test_bfloat16_weights_and_pool_follow_the_dense_path():
    model = drawn_decoder(tiny_config(), 1, "bfloat16")
    got, want = replay(Rows(model, dtype="bfloat16"), model)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=0, atol=0.03 * np.abs(want).max())


def test_scenario_m7_a_later_chunk_keeps_its_absolute_positions(model):
    tokens = prompts(1, 12)[0]
    want = dense_logits(model, tokens)[-1]
    rows = Rows(model)
    rows.step([(0, 0, tokens[:8])])
    got = rows.step([(0, 8, tokens[8:])])[0]
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())

    rows = Rows(model)
    rows.step([(0, 0, tokens[:8])])
    restarted = rows.step([(0, 8, tokens[8:])], positions=np.arange(32))[0]
    assert np.abs(restarted - want).max() > 0.01 * np.abs(want).max()


def test_dense_takes_a_batch(model):
    batch = np.asarray(prompts(2, 32), np.int32)
    together = jax.jit(lambda model, tokens: model.dense(tokens))(model, batch)
    for tokens, logits in zip(batch, together):
        np.testing.assert_allclose(logits, dense_logits(model, tokens), rtol=0, atol=1e-5)


def test_a_plan_for_other_attention_is_refused(model):
    rows = Rows(model)
    arrays, static = rows.arguments([(0, 0, [5])])
    static["specs"] = static["specs"][::-1]
    with pytest.raises(InvalidInputError, match=r"plans must be for the attention of the block.*window=5"):
        rows.pool.step(lambda pool: run_step(pool, model, *arrays, **static))


def test_a_pool_for_other_layers_is_refused(model):
    small = drawn_decoder(tiny_config(block=BLOCK), 0)
    rows = Rows(small)
    rows.model = model
    with pytest.raises(InvalidInputError, match=r"for 4 layers of 33 pages has 132 rows, got 66"):
        rows.step([(0, 0, [5])])


def test_per_layer_pools_cannot_be_scanned(model):
    with pytest.raises(InvalidInputError, match=r"per-layer pools need scan=False"):
        Rows(model, backend=PerLayer()).step([(0, 0, [5])])

"""Backend `cpu`: layers, vocabulary and append against XLA's, the promise about bits, and what its calls refuse."""

import dataclasses
import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_steps import Row, drawn_decoder, random_pool, run, scattered, table_of, written

from paged.backends import native
from paged.backends.cpu import CpuBackend, ops
from paged.backends.metadata import table_arrays
from paged.backends.protocol import AttentionExtras, KvArrays, LayerAt, LayerSizes, LayerWeights, Rung
from paged.backends.registry import get_backend
from paged.backends.step import plan_step
from paged.common import AttentionSpec

KERNELS, PLAIN = CpuBackend(), get_backend("xla")
GLOBAL, LOCAL = AttentionSpec(scale=0.25), AttentionSpec(scale=0.3, window=9, soft_cap=4.0)

# Sizes: hidden, intermediate, KV heads, query heads of one, head dim. Rows: (tokens in the pool, tokens of the step).
GEOMETRIES = {
    "mixed rows, padding, sizes that fill no tile": (
        ((100, 150, 2, 3, 16), (GLOBAL,), 16),
        ([(20, 1), (0, 7), (33, 17), (63, 1), (0, 64)], {"rows": 8, "tokens": 97, "listed_pages": 40}),
    ),
    "a block of two, one token of each row": (
        ((67, 50, 1, 1, 128), (GLOBAL, LOCAL), 4),
        ([(n, 1) for n in (0, 1, 3, 9, 20, 64, 65)], {}),
    ),
    "chunks of two long rows": (((48, 23, 2, 8, 32), (LOCAL,), 1), ([(10, 33), (1, 62)], {"tokens": 96})),
    "16 tokens": (((12, 12, 3, 3, 80), (GLOBAL,), 32), ([(5, 15), (130, 1)], {"rows": 3})),
    "32 tokens": (((16, 5, 1, 3, 48), (LOCAL,), 8), ([(0, 32)], {})),
    "1 token": (((31, 97, 1, 2, 64), (GLOBAL,), 16), ([(70, 1)], {"tokens": 8})),
}


def model_of(sizes, block, seed=0):
    hidden, intermediate, kv_heads, group, dim = sizes
    return drawn_decoder(
        seed,
        block,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_kv_heads=kv_heads,
        num_query_heads=kv_heads * group,
        head_dim=dim,
    )


def near(found, wanted, tolerance=2e-6):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * max(1.0, float(np.abs(wanted).max())))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_layers_and_logits_are_those_of_the_model(name):
    ((sizes, block, page), (lengths, padded)) = GEOMETRIES[name]
    model, rows = model_of(sizes, block), scattered(1, lengths, page)
    before = random_pool(model, page)
    was = [np.array(x) for x in (before.keys, before.values)]
    found, _ = run(model, KERNELS, before, rows, **padded)
    wanted, _ = run(model, PLAIN, random_pool(model, page), rows, **padded)
    live = sum(len(row.tokens) for row in rows)
    near(found.hidden[:live], wanted.hidden[:live])
    near(found.logits[:live], wanted.logits[:live], 4e-6)
    where = written(model, rows, page)
    for new, xla, old in zip((found.keys, found.values), (wanted.keys, wanted.values), was):
        near(new[where].view(np.float32), xla[where].view(np.float32))
        np.testing.assert_array_equal(new[~where], old[~where], "a slot that no token owns was written")
    embedded = np.asarray(model.embedding)[0]
    for padding in found.hidden[live:]:
        np.testing.assert_array_equal(padding, embedded, "the residual stream of padding is left as it came")


SMALL = ((100, 150, 2, 3, 16), (GLOBAL, AttentionSpec(scale=0.3, window=70, soft_cap=4.0)))
COMPANY = {"rows": 6, "tokens": 150, "listed_pages": 110, "max_query_len": 150, "max_kv_len": 110}


def one_request():
    """90 tokens of one request: two blocks of positions."""
    return Row(0, np.random.default_rng(3).integers(3, 203, 90).tolist(), [])


def chunks(model, page, pages, cuts, company=(), backend=KERNELS):
    """Hidden states and logits of the request's tokens, computed from cut to cut beside `company`."""
    request, pool, parts = one_request()._replace(pages=pages), random_pool(model, page, seed=len(pages)), []
    for start, end in itertools.pairwise(cuts):
        rows = [*company, request._replace(start=start, tokens=request.tokens[start:end])]
        found, pool = run(model, backend, pool, rows, **COMPANY)
        at = sum(len(row.tokens) for row in company)
        parts.append((found.hidden[at : at + end - start], found.logits[at : at + end - start]))
    return [np.concatenate(part) for part in zip(*parts)]


def test_a_tokens_bits_depend_on_its_own_row_alone():
    model = model_of(*SMALL)
    alone = chunks(model, 4, list(range(1, 24)), [0, 90])
    rng = np.random.default_rng(4)
    elsewhere = rng.permutation(np.arange(24, 70))[:45].tolist()
    others = [Row(0, rng.integers(3, 203, 17).tolist(), list(range(70, 75))), Row(30, [9], list(range(75, 83)))]
    many = [*others, *(Row(20, rng.integers(3, 203, 9).tolist(), list(range(p, p + 8))) for p in (83, 91))]
    found = {
        "among others": chunks(model, 4, elsewhere[:23], [0, 90], others),
        "in chunks": chunks(model, 4, elsewhere[:23], [0, 1, 17, 18, 19, 50, 80, 90], many),
        "token by token": chunks(model, 4, elsewhere[:23], [0, 82, *range(83, 91)]),
        "on pages of 2": chunks(model, 2, elsewhere, [0, 90]),
        "on pages of 16": chunks(model, 16, [7, 3, 5, 4, 9, 2], [0, 73, 90]),
    }
    for name, parts in found.items():
        for part, wanted in zip(parts, alone):
            np.testing.assert_array_equal(part.view(np.uint32), wanted.view(np.uint32), name)


def digest():
    """Of a step that pays for helpers where the process has two threads."""
    model = model_of(*SMALL)
    step, _ = run(model, KERNELS, random_pool(model, 4), scattered(2, [(30, 40), (0, 33), (50, 1)], 4))
    return hashlib.sha256(b"".join(x.tobytes() for x in step)).hexdigest()


def digest_elsewhere(before, **env):
    """`digest` in a process that runs `before` first."""
    here = Path(__file__).parent
    code = f"import os\n{before}\nimport test_cpu_kernels as t\nprint(t.digest())"
    env = os.environ | {"PYTHONPATH": f"{here}:{here.parents[1]}"} | env
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_one_thread_and_several_give_the_same_bits():
    assert digest_elsewhere("os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])") == digest()


@pytest.mark.skipif(not {"avx2", "fma"} <= set(native.machine().split()), reason="compiled for AVX2")
def test_narrower_registers_and_another_optimization_give_the_same_bits(tmp_path):
    before = """
from paged.backends import native
from paged.backends.cpu import library
native.NATIVE_FLAGS = ("-march=x86-64-v3",)
library.FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in library.FLAGS)
"""
    assert digest_elsewhere(before, PAGED_CPU_DIR=str(tmp_path)) == digest()
    (manifest,) = tmp_path.glob("*/*/manifest.json")
    assert {"-O1", "-march=x86-64-v3"} <= set(json.loads(manifest.read_text())["flags"])


def test_a_nan_stays_in_its_row():
    model = model_of(*SMALL)
    rows = scattered(5, [(20, 5), (0, 20), (9, 1)], 4)
    clean, _ = run(model, KERNELS, random_pool(model, 4), rows)
    ill = dataclasses.replace(model, embedding=model.embedding.at[1].set(jnp.nan))
    rows[1].tokens[10] = 1
    found, _ = run(ill, KERNELS, random_pool(model, 4), rows)
    reached = np.zeros(26, bool)
    reached[15:25] = True  # the token, and those of its row that see it
    for part, wanted in zip(found[:2], clean[:2]):
        np.testing.assert_array_equal(part[~reached], wanted[~reached])
        assert np.isnan(part[15]).all()


def test_the_pool_and_its_slots_stay_where_they_are():
    model = model_of(*SMALL)
    pool = random_pool(model, 4)
    at = [array.unsafe_buffer_pointer() for array in (pool.keys, pool.values)]
    _, after = run(model, KERNELS, pool, scattered(2, [(3, 4)], 4))
    assert [array.unsafe_buffer_pointer() for array in (after.keys, after.values)] == at
    assert pool.keys.is_deleted()


def test_append_moves_bits_and_skips_negative_slots():
    rng = np.random.default_rng(0)
    for dtype in ("uint8", "uint16", "uint32"):
        draw = lambda *shape: rng.integers(0, 256, shape).astype(dtype)  # noqa: B023, E731
        keys, values, key, value = draw(9, 4, 3, 5), draw(9, 4, 3, 7), draw(300, 3, 5), draw(300, 3, 7)
        slots = np.full(300, -1, np.int32)
        slots[rng.permutation(300)[:30]] = rng.permutation(36)[:30]
        after = ops.append(
            KvArrays(jnp.asarray(keys), jnp.asarray(values)), jnp.asarray(key), jnp.asarray(value), jnp.asarray(slots)
        )
        for stored, fresh, found in ((keys, key, after.keys), (values, value, after.values)):
            wanted = stored.reshape(36, *stored.shape[2:]).copy()
            wanted[slots[slots >= 0]] = fresh[slots >= 0]
            np.testing.assert_array_equal(np.asarray(found), wanted.reshape(stored.shape))


def small_table(**changes):
    """Of a step of two rows: 3 tokens at length 6, 1 at length 9, 2 of padding; on pages of 4."""
    table = table_of([Row(3, [5, 6, 7], [4, 2]), Row(8, [9], [3, 5, 7])], 4, tokens=6)
    arrays = table_arrays(table)
    return dataclasses.replace(arrays, **{name: jnp.asarray(value, jnp.int32) for name, value in changes.items()})


BAD_TABLES = {
    "page 12 does not exist": {"page_ids": [4, 2, 3, 12, 7]},
    "page -1 does not exist": {"page_ids": [4, -1, 3, 5, 7]},
    "row 1: page_offsets go from -1 to 5 of 5": {"query_offsets": [0, 0, 1], "page_offsets": [0, -1, 5]},
    "row 1: page_offsets go from 2 to 4 of 5; kv_lens needs 3 pages": {"page_offsets": [0, 2, 4]},
    "row 1: page_offsets go from 2 to 6 of 5": {"page_offsets": [0, 2, 6]},
    "query_offsets start at 1": {"query_offsets": [1, 3, 4]},
    "row 1: query_offsets go from 3 to 2 of 6 tokens": {"query_offsets": [0, 3, 2]},
    "row 1: query_offsets go from 3 to 7 of 6 tokens": {"query_offsets": [0, 3, 7]},
    "row 0: kv_lens is 2, with 3 queries": {"kv_lens": [2, 9]},
}


def attend(table, *, query=(6, 6, 8), sinks=None, ill=()):
    rng = np.random.default_rng(0)
    keys, values = (jnp.asarray(rng.standard_normal((12, 4, 2, 8), np.float32)).view(jnp.uint32) for _ in range(2))
    pool = KvArrays(keys, values, words_of="float32")
    extras = AttentionExtras(sinks=sinks)
    out, lse = ops.attend(
        jnp.ones(query, jnp.float32).at[jnp.asarray(ill, jnp.int32)].set(jnp.nan), pool, 0, table, GLOBAL, extras
    )
    return np.asarray(out), np.asarray(lse)


def refused(call, *words):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(call())
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("words", BAD_TABLES)
def test_attention_names_what_is_wrong_with_a_table(words):
    refused(lambda: attend(small_table(**BAD_TABLES[words])), words)


def test_attention_refuses_shapes_that_do_not_fit():
    refused(lambda: attend(small_table(), query=(6, 5, 8)), "queries of (6, 5, 8) do not fit a pool of (12, 4, 2, 8)")
    refused(lambda: attend(small_table(), sinks=jnp.ones(5, jnp.float32)), "sinks has shape (5)", "expected (6)")


def test_attention_gives_padding_zeros_and_no_logits():
    out, lse = attend(small_table())
    assert not out[4:].view(np.uint32).any()
    assert (lse[4:] == -np.inf).all()
    assert np.isfinite(lse[:4]).all()


def test_a_query_whose_logits_are_all_nan_gets_nan_and_no_other_does():
    (out, lse), (clean, clean_lse) = attend(small_table(), ill=[1]), attend(small_table())
    assert np.isnan(out[1]).all()
    assert np.isnan(lse[1]).all()
    np.testing.assert_array_equal(np.delete(out, 1, 0), np.delete(clean, 1, 0))
    np.testing.assert_array_equal(np.delete(lse, 1, 0), np.delete(clean_lse, 1, 0))


def layers(table, *, slots=(-1,) * 6, counter=0, count=2, pages=24, **changes):
    """Two layers of ones over a pool of 12 pages a layer."""
    ones = {name: jnp.ones(shape, jnp.float32) for name, shape in (WEIGHTS | changes).items()}
    x, cos, sin = ones.pop("x"), ones.pop("cos"), ones.pop("sin")
    pool = KvArrays(*(jnp.zeros((pages, 4, 2, 16), jnp.uint32) for _ in range(2)), words_of="float32")
    rung = Rung(rows=2, tokens=6, listed_pages=5, max_query_len=3, max_kv_len=9, tokens_per_page=4, num_pages=12)
    plan = dataclasses.replace(plan_step(KERNELS, small_table(), rung, GLOBAL), arrays=table)
    plan = dataclasses.replace(plan, write_slots=jnp.asarray(slots, jnp.int32))
    sizes = LayerSizes(hidden_size=20, intermediate_size=24, num_query_heads=4, num_kv_heads=2, head_dim=16)
    at = LayerAt(times=count, plus=0, block=1, position=0, count=count)
    return ops.layers(x, pool, LayerWeights(**ones), jnp.int32(counter), at, cos, sin, plan, sizes, 1e-5)[0]


WEIGHTS = {
    "x": (6, 20),
    "cos": (6, 8),
    "sin": (6, 8),
    "attention_norm": (2, 20),
    "qkv": (2, 2, 4, 16, 20),
    "output": (2, 20, 64),
    "mlp_norm": (2, 20),
    "gate_up": (2, 2, 24, 20),
    "down": (2, 20, 24),
}


@pytest.mark.parametrize("words", list(BAD_TABLES)[:2])
def test_layers_name_what_is_wrong_with_a_table(words):
    """A page that the step does not have is refused though the pool has it, in another layer."""
    refused(lambda: layers(small_table(**BAD_TABLES[words]), pages=48), words)


def test_layers_refuse_slots_layers_and_shapes_that_do_not_exist():
    table = small_table()
    refused(lambda: layers(table, slots=(0, 1, 48, 2, -1, -1)), "token 2: slot 48 does not exist")
    refused(lambda: layers(table, counter=1), "layers 2 and on, of the pool 2 and on, do not exist")
    refused(lambda: layers(table, pages=12), "layers 0 and on, of the pool 0 and on, do not exist")
    refused(lambda: layers(table, counter=-1), "layers -2 and on")
    refused(lambda: layers(table, x=(6, 19)), "attention_norm has shape (2, 20)", "expected (2, 19)")
    refused(lambda: layers(table, cos=(6, 7), sin=(6, 7)), "cos has shape (6, 7)", "expected (6, 8)")
    assert np.isfinite(np.asarray(layers(table))).all()


def test_append_refuses_slots_and_shapes_that_do_not_fit():
    pool = KvArrays(*(jnp.zeros((3, 4, 1, 8), jnp.uint32) for _ in range(2)))
    fresh, slots = jnp.ones((2, 1, 8), jnp.uint32), jnp.asarray([3, 12], jnp.int32)
    refused(lambda: ops.append(pool, fresh, fresh, slots).keys, "token 1: slot 12 does not exist")
    half = fresh.astype(jnp.uint16)
    refused(lambda: ops.append(pool, fresh, half, slots - 1).keys, "new elements of (2, 1, 8) do not fit")


def test_the_vocabulary_takes_no_tokens_and_no_words():
    for tokens, words in ((0, 5), (3, 0)):
        x, norm, head = (jnp.ones(shape, jnp.float32) for shape in ((tokens, 7), (7,), (words, 7)))
        assert jax.block_until_ready(ops.logits(x, norm, head, 1e-5)).shape == (tokens, words)

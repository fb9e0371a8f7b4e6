"""Attention of models that are not ours, on pages (requirement M1)."""

import dataclasses
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.backends.metadata import pack_table, unpack_table
from paged.backends.registry import get_backend
from paged.common import AttentionSpec, InvalidInputError, build_page_table
from paged.engine.pool import KvPool
from paged.models import MultiheadParts, page_attention
from paged.models.adapter import AttentionShape
from paged.models.multihead import rotate_at

WIDTH, VOCAB, SIZE = 16, 40, 4
ROTARY = eqx.nn.RotaryPositionalEmbedding(8)


class Block(eqx.Module):
    """A pre-norm transformer block as an Equinox user writes it."""

    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    rope: eqx.nn.RotaryPositionalEmbedding
    window: int | None = eqx.field(static=True)

    def __init__(self, key, window=None):
        a, b = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(24)
        self.attention = eqx.nn.MultiheadAttention(
            3, 24, qk_size=8, vo_size=4, use_query_bias=True, use_value_bias=True, use_output_bias=True, key=a
        )
        self.mlp = eqx.nn.MLP(24, 24, 48, 1, activation=jax.nn.gelu, key=b)
        self.rope = ROTARY
        self.window = window

    def __call__(self, x):
        def process_heads(query, key, value):
            turn = jax.vmap(self.rope, in_axes=1, out_axes=1)
            return turn(query), turn(key), value

        y = jax.vmap(self.norm)(x)
        mask = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))
        if self.window is not None:
            mask &= jnp.triu(jnp.ones_like(mask), 1 - self.window)
        x = x + self.attention(y, y, y, mask=mask, process_heads=process_heads)
        return x + jax.vmap(self.mlp)(x)


class Foreign(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key, windows=(None, None, None)):
        a, b, *rest = jax.random.split(key, 2 + len(windows))
        self.embedding = eqx.nn.Embedding(VOCAB, 24, key=a)
        self.blocks = [Block(k, w) for k, w in zip(rest, windows)]
        self.head = eqx.nn.Linear(24, VOCAB, key=b)

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def attention_of(model):
    return [block.attention for block in model.blocks]


PARTS = MultiheadParts(rotary=ROTARY, replaces=frozenset({"mask", "process_heads"}))


@pytest.fixture(scope="module")
def foreign():
    return Foreign(jax.random.key(0))


def compiled(paged, backend):
    """The step as one program that takes the pool and the model's arrays; what else the model holds is closed over."""
    arrays, static = eqx.partition(paged, eqx.is_array)

    @partial(jax.jit, static_argnames="rung", donate_argnums=0)
    def step(pool, arrays, tokens, positions, vector, *, rung):
        paged = eqx.combine(arrays, static)
        plans = paged.plan(backend, unpack_table(vector, rung), rung)
        logits, pool = paged(lambda m: m(tokens), positions, pool, plans, backend=backend)
        return pool, logits

    return lambda pool, *fed, rung: step(pool, arrays, *fed, rung=rung)


class Requests:
    """Two rows of pages for a paged model; every step is 16 tokens wide."""

    def __init__(self, paged, backend="reference"):
        self.run = compiled(paged, get_backend(backend))
        self.pages = [[3, 1, 7, 5, 9], [2, 8, 4, 6, 10]]
        layout = paged.storage_layout(num_pages=11, tokens_per_page=SIZE, dtype="float32")
        self.pool = KvPool(layout, get_backend(backend))

    def step(self, slices, positions=None):
        """Logits of every fed token, slice by slice."""
        query = [len(tokens) for _, _, tokens in slices]
        table = build_page_table(
            query_lens=query,
            kv_lens=[start + len(tokens) for _, start, tokens in slices],
            pages=[self.pages[row] for row, _, _ in slices],
            tokens_per_page=SIZE,
            num_pages=11,
        ).pad(rows=2, tokens=WIDTH, listed_pages=10, max_query_len=WIDTH, max_kv_len=20)
        vector, rung = pack_table(table)
        tokens = np.zeros(WIDTH, np.int32)
        tokens[: sum(query)] = np.concatenate([t for _, _, t in slices])
        at = table.positions() if positions is None else positions
        fed = [jnp.asarray(x, jnp.int32) for x in (tokens, at, vector)]
        self.pool, logits = self.pool.step(lambda pool: self.run(pool, *fed, rung=rung))
        return np.split(np.asarray(logits)[: sum(query)], np.cumsum(query)[:-1])


def prompts():
    a, b = np.random.default_rng(0).integers(0, VOCAB, (2, 15)).tolist()
    return a, b


def serve(requests):
    """Logits of both rows over prefill, a mixed step with a chunk, and decode."""
    a, b = prompts()
    steps = [[(0, 0, a[:9])], [(0, 9, a[9:10]), (1, 0, b[:7])], [(0, 10, a[10:11]), (1, 7, b[7:12])]]
    steps += [[(0, 11 + i, a[11 + i : 12 + i]), (1, 12 + i, b[12 + i : 13 + i])] for i in range(3)]
    rows = {0: [], 1: []}
    for slices in steps:
        for (row, _, _), logits in zip(slices, requests.step(slices)):
            rows[row].append(logits)
    return np.concatenate(rows[0]), np.concatenate(rows[1])


def ulps(a, b):
    """Largest difference in float32 ulps at the scale of each token's logits."""
    return np.max(np.abs(a - b) / np.spacing(np.abs(b).max(-1, keepdims=True)))


def dense(model, tokens):
    """The untouched model on one whole sequence."""
    arrays, static = eqx.partition(model, eqx.is_array)
    return np.asarray(jax.jit(lambda arrays, x: eqx.combine(arrays, static)(x))(arrays, np.asarray(tokens, np.int32)))


def test_a_foreign_model_gives_its_own_dense_logits(foreign):
    """Within a few ulps: the model's own float32 logits are two ulps from those of float64 weights."""
    got = serve(Requests(page_attention(foreign, attention_of, PARTS)))
    for logits, tokens in zip(got, prompts()):
        want = dense(foreign, tokens)[: len(logits)]
        assert ulps(logits, want) <= 4
        assert (logits.argmax(-1) == want.argmax(-1)).all()


def test_each_module_may_have_its_own_window():
    model = Foreign(jax.random.key(1), windows=(None, 4, None))
    full = AttentionSpec(scale=8**-0.5)
    specs = [full, dataclasses.replace(full, window=4), full]
    paged = page_attention(model, attention_of, PARTS, specs)
    assert paged.specs == (full, specs[1])
    for logits, tokens in zip(serve(Requests(paged, "xla")), prompts()):
        assert ulps(logits, dense(model, tokens)[: len(logits)]) <= 8
    assert ulps(dense(Foreign(jax.random.key(1)), prompts()[0]), dense(model, prompts()[0])) > 1000


def test_positions_are_given_and_never_restarted(foreign):
    """Scenario M7 for a foreign model: Equinox's rotary embedding would count from 0 in every step."""
    a, _ = prompts()
    requests = Requests(page_attention(foreign, attention_of, PARTS))
    requests.step([(0, 0, a[:8])])
    restarted = requests.step([(0, 8, a[8:12])], positions=np.arange(WIDTH))[0]
    assert ulps(restarted, dense(foreign, a)[8:12]) > 1000


def test_rotary_at_0_1_2_is_equinox_rotary_bit_for_bit():
    x = jax.random.normal(jax.random.key(0), (12, 3, 8))
    want = jax.vmap(ROTARY, in_axes=1, out_axes=1)(x)
    assert np.array_equal(rotate_at(ROTARY, x, jnp.arange(12, dtype=jnp.int32)), want)
    assert np.array_equal(rotate_at(ROTARY, x[5:], jnp.arange(5, 12, dtype=jnp.int32)), want[5:])


class FusedAttention(eqx.Module):
    """An attention of one's own: one projection for all, two query heads to a KV head, learned positions, a cap."""

    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    places: jax.Array

    def __init__(self, key):
        a, b, c = jax.random.split(key, 3)
        self.qkv = eqx.nn.Linear(24, (4 + 2 + 2) * 6, use_bias=False, key=a)
        self.out = eqx.nn.Linear(24, 24, key=b)
        self.places = jax.random.normal(c, (20, 6))

    def heads(self, x, positions):
        q, k, v = jnp.split(jax.vmap(self.qkv)(x).reshape(len(x), 8, 6), [4, 6], axis=1)
        return q + self.places[positions][:, None], k, v

    def __call__(self, x):
        q, k, v = self.heads(x, jnp.arange(len(x)))
        k, v = (jnp.repeat(y, 2, axis=1) for y in (k, v))
        logits = 3 * jnp.tanh(jnp.einsum("qhd,khd->hqk", q, k) * 0.3 / 3)
        visible = jnp.tril(jnp.ones((len(x), len(x)), bool))
        weights = jax.nn.softmax(jnp.where(visible[None], logits, -jnp.inf))
        return jax.vmap(self.out)(jnp.einsum("hqk,khd->qhd", weights, v).reshape(len(x), 24))


class FusedParts:
    def describe(self, module):
        spec = AttentionSpec(scale=0.3, soft_cap=3.0)
        return AttentionShape(spec=spec, num_query_heads=4, num_kv_heads=2, head_dim=6, value_head_dim=6)

    def project(self, module, positions, x):
        return module.heads(x, positions)

    def combine(self, module, heads):
        return jax.vmap(module.out)(heads.reshape(len(heads), 24))


class Single(eqx.Module):
    embedding: eqx.nn.Embedding
    attention: FusedAttention

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.embedding = eqx.nn.Embedding(VOCAB, 24, key=a)
        self.attention = FusedAttention(b)

    def __call__(self, tokens):
        return self.attention(jax.vmap(self.embedding)(tokens))


def test_an_attention_of_ones_own_is_paged_by_three_methods():
    model = Single(jax.random.key(2))
    paged = page_attention(model, lambda m: m.attention, FusedParts())
    layout = paged.storage_layout(num_pages=4, tokens_per_page=2, dtype="bfloat16")
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.dtype) == (1, 2, 6, "bfloat16")
    for logits, tokens in zip(serve(Requests(paged)), prompts()):
        assert ulps(logits, dense(model, tokens)[: len(logits)]) <= 4


def trace(paged, run=lambda m, tokens: m(tokens)):
    """One step of one request, traced and not compiled."""
    table = build_page_table(query_lens=[3], kv_lens=[3], pages=[[1]], tokens_per_page=SIZE, num_pages=2)
    vector, rung = pack_table(table)
    backend = get_backend("xla")
    pool = KvPool(paged.storage_layout(num_pages=2, tokens_per_page=SIZE, dtype="float32"), backend)

    def step(pool, tokens, positions, vector):
        plans = paged.plan(backend, unpack_table(vector, rung), rung)
        return paged(lambda m: run(m, tokens), positions, pool, plans, backend=backend)

    return jax.eval_shape(step, pool.arrays, jnp.arange(3), jnp.arange(3), jnp.asarray(vector))


def blockwise(call):
    """The foreign model with its blocks called in another way."""

    def run(model, tokens):
        x = jax.vmap(model.embedding)(tokens)
        for block in model.blocks:
            x = call(block, x)
        return x

    return run


RUNS = {
    "jit": (blockwise(lambda block, x: jax.jit(block.__call__)(x)), r"module 0 was called inside a scan, vmap, grad"),
    "checkpoint": (blockwise(lambda block, x: jax.checkpoint(block.__call__)(x)), r"module 0 was called inside a scan"),
    "vmap": (blockwise(lambda block, x: jax.vmap(block)(x[None])[0]), r"module 0 was called inside a scan"),
    "twice": (blockwise(lambda block, x: block(block(x))), r"attention module 0 was called twice in one step"),
    "skipped": (lambda m, tokens: m.blocks[0](jax.vmap(m.embedding)(tokens)), r"modules \[1, 2\] were not called"),
}


@pytest.mark.parametrize("name", RUNS)
def test_modules_are_called_once_and_where_the_pool_can_return_from(foreign, name):
    run, message = RUNS[name]
    with pytest.raises(InvalidInputError, match=message):
        trace(page_attention(foreign, attention_of, PARTS), run)


def test_the_model_itself_is_left_alone(foreign):
    paged = page_attention(foreign, attention_of, PARTS)
    trace(paged)
    assert paged.model is foreign
    assert isinstance(foreign.blocks[0].attention, eqx.nn.MultiheadAttention)


WRONG_PARTS = {
    "mask": (MultiheadParts(rotary=ROTARY, replaces=frozenset({"process_heads"})), r"called with mask\..*\{'mask'\}"),
    "rotary": (MultiheadParts(replaces=frozenset({"mask"})), r"called with process_heads\..*\{'process_heads'\}"),
}


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_an_argument_that_paging_would_drop_is_refused(foreign, name):
    parts, message = WRONG_PARTS[name]
    with pytest.raises(InvalidInputError, match=message):
        trace(page_attention(foreign, attention_of, parts))


def calling(attend, **options):
    """A model that is one attention module, called as `attend` does."""

    class Caller(eqx.Module):
        attention: eqx.nn.MultiheadAttention

        def __call__(self, tokens):
            return attend(self.attention, jnp.ones((tokens.shape[0], 24)))

    return Caller(eqx.nn.MultiheadAttention(3, 24, qk_size=8, vo_size=4, key=jax.random.key(0), **options))


def test_what_multihead_attention_would_do_beyond_self_attention_is_refused():
    def page(attend, rotary=None, **options):
        trace(page_attention(calling(attend, **options), lambda m: m.attention, MultiheadParts(rotary=rotary)))

    page(lambda attention, x: attention(x, x, x))
    with pytest.raises(InvalidInputError, match=r"cross attention is not paged"):
        page(lambda attention, x: attention(x, x + 1, x + 1))
    with pytest.raises(InvalidInputError, match=r"dropout of 0\.5 is on.*inference_mode"):
        page(lambda attention, x: attention(x, x, x, key=jax.random.key(0)), dropout_p=0.5)
    page(lambda attention, x: attention(x, x, x, inference=True), dropout_p=0.5)
    with pytest.raises(InvalidInputError, match=r"`rotary` is given, but attention is called without process_heads"):
        page(lambda attention, x: attention(x, x, x), rotary=ROTARY)


def test_modules_that_cannot_share_a_pool_are_refused(foreign):
    other = eqx.nn.MultiheadAttention(2, 24, qk_size=8, vo_size=4, key=jax.random.key(0))
    mixed = eqx.tree_at(lambda m: m.blocks[1].attention, foreign, other)
    with pytest.raises(InvalidInputError, match=r"attention module 1 is .*num_query_heads=2.*Page them in groups"):
        page_attention(mixed, attention_of, PARTS)
    with pytest.raises(InvalidInputError, match=r"2 specs for 3 attention modules"):
        page_attention(foreign, attention_of, PARTS, [AttentionSpec(scale=1.0)] * 2)
    with pytest.raises(InvalidInputError, match=r"returned no attention module"):
        page_attention(foreign, lambda m: [], PARTS)


def test_plans_for_other_specs_are_refused(foreign):
    paged = page_attention(foreign, attention_of, PARTS)
    other = page_attention(foreign, attention_of, PARTS, AttentionSpec(scale=1.0))
    backend = get_backend("xla")
    table = build_page_table(query_lens=[1], kv_lens=[1], pages=[[1]], tokens_per_page=SIZE, num_pages=2)
    vector, rung = pack_table(table)
    plans = other.plan(backend, unpack_table(jnp.asarray(vector), rung), rung)
    pool = KvPool(paged.storage_layout(num_pages=2, tokens_per_page=SIZE, dtype="float32"), backend)
    with pytest.raises(InvalidInputError, match=r"plans must be for .*Make them with `plan`"):
        paged(lambda m: m, jnp.zeros(1, jnp.int32), pool.arrays, plans, backend=backend)

"""First look at FlashInfer on a GPU: every path against float64 numpy, with poison, and where the pool's buffers are.

Usage: python tools/flashinfer_smoke.py [--directory MODULES]. Prints one line per case; exits 1 if one is off.
"""

from __future__ import annotations

import argparse
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from paged import AttentionSpec, build_page_table, get_backend
from paged.backends.metadata import table_arrays
from paged.backends.protocol import AttentionExtras, KvArrays, Rung
from paged.backends.step import attention_step, plan_step

LAYERS, PAGES = 2, 600


def expected(query, keys, values, table, spec):
    """float64 attention of each token over its row's pages; +0 where there is nothing to attend to."""
    out = np.zeros(query.shape)
    group = query.shape[1] // keys.shape[2]
    for row in range(table.num_rows):
        n, pages = int(table.kv_lens[row]), table.pages_of(row)
        first, last = table.query_offsets[row : row + 2]
        if n == 0 or first == last:
            continue
        k, v = (x[pages].reshape(-1, *x.shape[2:])[:n].astype(np.float64) for x in (keys, values))
        q = query[first:last].astype(np.float64)
        s = np.einsum("qhd,nhd->qhn", q, np.repeat(k, group, 1)) * np.float64(np.float32(spec.scale))
        if spec.soft_cap:
            s = spec.soft_cap * np.tanh(s / spec.soft_cap)
        position = np.arange(n - (last - first), n)[:, None]
        at = np.arange(n)[None]
        mask = (at <= position) if spec.causal else np.ones((last - first, n), bool)
        if spec.window:
            mask &= at > position - spec.window
        s = np.where(mask[:, None], s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        out[first:last] = np.einsum("qhn,nhd->qhd", p / p.sum(-1, keepdims=True), np.repeat(v, group, 1))
    return out


def main() -> int:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory")
    args = parser.parse_args()
    rng, bad = np.random.default_rng(0), 0
    batches = {
        "decode": ([1] * 6 + [0], [700, 1, 16, 17, 2000, 512, 0]),
        "mixed": ([1, 3, 0, 1, 200, 64], [700, 3, 5, 1, 1300, 64]),
        "prefill": ([300, 129, 17], [300, 640, 17]),
    }
    specs = {
        "plain": AttentionSpec(scale=0.088),
        "window": AttentionSpec(scale=0.1, window=100),
        "cap": AttentionSpec(scale=0.1, soft_cap=20.0),
        "window+cap": AttentionSpec(scale=0.1, window=100, soft_cap=20.0),
        "non-causal": AttentionSpec(scale=0.1, causal=False),
    }
    tiers, dtypes = ("exact", "fast"), ("bfloat16", "float16")
    for tier, dtype, head_dim, page in itertools.product(tiers, dtypes, (128, 64), (16, 1)):
        backend = get_backend("flashinfer", tier=tier, directory=args.directory)
        hq, hk = 8, 2
        for (name, (q_lens, n_lens)), (option, spec) in itertools.product(batches.items(), specs.items()):
            if page == 1 and (option != "plain" or name == "prefill"):
                continue
            pages_per_layer = PAGES if page == 16 else PAGES * 8
            ids, at, lists = rng.permutation(np.arange(1, pages_per_layer)), 0, []
            for n in n_lens:
                lists.append(ids[at : at + -(-n // page)].tolist())
                at += -(-n // page)
            table = build_page_table(
                query_lens=q_lens, kv_lens=n_lens, pages=lists, tokens_per_page=page, num_pages=pages_per_layer
            )
            tokens = table.num_tokens + 5
            table = table.pad(
                rows=table.num_rows + 2,
                tokens=tokens,
                listed_pages=table.page_ids.shape[0] + 9,
                max_query_len=max(q_lens),
                max_kv_len=4096,
            )
            draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype)
            shape = (LAYERS * pages_per_layer, page, hk, head_dim)
            owned = np.zeros((pages_per_layer, page), bool)
            for row, n in enumerate(n_lens):
                for j in range(n):
                    owned[lists[row][j // page], j % page] = True
            live = np.zeros((LAYERS, pages_per_layer, page), bool)
            live[1] = owned
            live = live.reshape(-1, page)[..., None, None]
            k, v = (jnp.where(live, draw(*shape), jnp.asarray(np.nan, dtype)) for _ in range(2))
            key, value, query = draw(tokens, hk, head_dim), draw(tokens, hk, head_dim), draw(tokens, hq, head_dim)
            rung = Rung.of(table).with_heads(group_size=hq // hk, head_dim=head_dim, kv_dtype=dtype)
            arrays = table_arrays(table)

            def step(pool, query, key, value, arrays, backend=backend, rung=rung, spec=spec):
                plan = plan_step(backend, arrays, rung, spec)
                return attention_step(backend, plan, pool, query, key, value, layer=1, extras=AttentionExtras())

            label = f"{tier:5} {dtype:8} d{head_dim} page{page:<2} {name:8} {option:10}"
            try:
                run = jax.jit(step, donate_argnums=0)
                pool = KvArrays(k, v)
                slots = np.where(table.write_slots >= 0, table.write_slots + pages_per_layer * page, -1)
                kn, vn = (np.asarray(x, np.float32) for x in (k, v))
                for token, slot in enumerate(slots):
                    if slot >= 0:
                        kn[slot // page, slot % page] = np.asarray(key[token], np.float32)
                        vn[slot // page, slot % page] = np.asarray(value[token], np.float32)
                before = [x.unsafe_buffer_pointer() for x in (pool.keys, pool.values)]
                out, lse, pool = run(pool, query, key, value, arrays)
                same = before == [x.unsafe_buffer_pointer() for x in (pool.keys, pool.values)]
                half = slice(pages_per_layer, None)
                want = expected(np.asarray(query, np.float32), kn[half], vn[half], table, spec)
                got = np.asarray(out.astype(jnp.float32), np.float64)
                kept = np.array_equal(
                    np.delete(np.asarray(pool.keys, np.float32), [0, pages_per_layer], 0),
                    np.delete(kn, [0, pages_per_layer], 0),
                    equal_nan=True,
                )
                relative = np.linalg.norm(got - want) / np.linalg.norm(want)
                rounded = np.asarray(jnp.asarray(want, jnp.float32).astype(dtype).astype(jnp.float32))
                equal = float((rounded == got).mean())
                good = (
                    relative < 6e-3 and same and kept and np.isfinite(np.asarray(lse)[: table.query_offsets[-1]]).any()
                )
                bad += not good
                print(
                    f"{label} rel {relative:.2e} equal {equal:.4f} in-place {same} pool {kept} {'' if good else '<-- OFF'}",
                    flush=True,
                )
            except Exception as error:
                text = str(error).replace("\n", " ")[:160]
                missing = "not built" in text
                bad += not missing
                print(f"{label} {'not built' if missing else 'ERROR ' + text}", flush=True)
    print("off:", bad)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())

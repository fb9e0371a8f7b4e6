"""FlashInfer plans against a planner of this test's own, read from the workspaces as the kernels read them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.backends.flashinfer import FlashInferBackend, backend, plan
from paged.backends.metadata import table_arrays
from paged.backends.protocol import Rung
from paged.common import AttentionSpec, build_page_table
from paged.common.errors import InvalidInputError

PAGE, PAGES = 16, 400
BATCHES = {
    "decode": ([1, 1, 1, 0, 1], [700, 512, 513, 0, 1]),
    "mixed": ([1, 3, 0, 1, 200, 2], [700, 3, 40, 1, 1300, 0]),
    "prefill": ([129, 128, 2], [640, 128, 2]),
    "empty": ([0, 0], [0, 0]),
}


def step(name, group_size=4, head_dim=128, kv_dtype="bfloat16"):
    query_lens, kv_lens = BATCHES[name]
    ids = np.random.default_rng(0).permutation(np.arange(1, PAGES)).tolist()
    pages = [[ids.pop() for _ in range(-(-n // PAGE))] for n in kv_lens]
    table = build_page_table(query_lens=query_lens, kv_lens=kv_lens, pages=pages, tokens_per_page=PAGE, num_pages=PAGES)
    longest = 1 if name == "decode" else 256
    table = table.pad(rows=8, tokens=512, listed_pages=256, max_query_len=longest, max_kv_len=2048)
    rung = Rung.of(table).with_heads(group_size=group_size, head_dim=head_dim, kv_dtype=kv_dtype)
    return table, rung


def planned(name, *, decode, prefill, **heads):
    table, rung = step(name, **heads)
    tile = 128 if prefill == "fa3" else 64
    static = plan.static_plan(rung, decode=decode, prefill=prefill, chunk=512, tile=tile, ctas=7)
    arrays = jax.jit(lambda t: plan.plan_arrays(static, t))(table_arrays(table))
    return table, static, jax.tree.map(np.asarray, arrays)


def words(vector, offset, count):
    return vector[offset // 4 : offset // 4 + count].tolist()


def mask_bytes(vector, offset, count):
    return vector.view(np.uint8)[offset : offset + count].astype(bool).tolist()


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("decode", ["cuda_cores", "tensor_cores"])
def test_decode_pieces_are_those_of_the_rows_with_one_token(name, decode):
    table, static, arrays = planned(name, decode=decode, prefill="fa3")
    lens = np.where((table.query_lens == 1) & (table.kv_lens > 0), table.kv_lens, 0)
    pieces = [(row, piece) for row, n in enumerate(lens) for piece in range(-(-int(n) // 512))]
    assert len(pieces) <= static.decode_blocks
    info, float_bytes = plan.decode_info(static, query_heads=32, head_dim=128)
    if decode == "cuda_cores":
        blocks, _, _, at_row, at_piece, at_out, at_mask, at_chunk, graph, split = info
    else:
        (
            blocks,
            rows,
            at_total,
            tile,
            at_row,
            at_tile,
            at_piece,
            at_merge,
            at_out,
            at_chunk,
            *_,
            at_mask,
            graph,
            split,
        ) = info
        assert tile == 16
        assert words(arrays.decode_words, at_tile, blocks) == [0] * blocks
        out, total = words(arrays.decode_words, at_out, 9), words(arrays.decode_words, at_total, 1)
        if static.by_token:  # queries where the tokens are: a token's pieces are those of its row
            assert (rows, total) == (512, [table.query_offsets[-1]])
            tokens = [out[row] for row in range(8) for _ in range(table.query_lens[row])]
            assert words(arrays.decode_words, at_merge, len(tokens) + 1) == [*tokens, out[-1]]
        else:
            assert (rows, total) == (8, [8])
            assert words(arrays.decode_words, at_merge, 9) == out
    assert (blocks, graph, split) == (static.decode_blocks, 1, 1)
    assert words(arrays.decode_words, at_chunk, 1) == [512]
    assert mask_bytes(arrays.decode_words, at_mask, blocks) == [i < len(pieces) for i in range(blocks)]
    found = zip(words(arrays.decode_words, at_row, blocks), words(arrays.decode_words, at_piece, blocks))
    assert list(found)[: len(pieces)] == pieces
    counts = [-(-int(n) // 512) for n in lens]
    assert words(arrays.decode_words, at_out, 9) == [0, *np.cumsum(counts).tolist()]
    assert float_bytes >= 32 * blocks * (128 + 1) * 4


@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize("name", BATCHES)
def test_pieces_of_the_own_kernel_are_those_inside_the_window(name, window):
    table, rung = step(name)
    options = {"decode": "paged", "prefill": "fa3", "chunk": 512, "tile": 128, "ctas": 7}
    static = plan.static_plan(rung, window=window, **options)
    vector = np.asarray(jax.jit(lambda t: plan.plan_arrays(static, t).decode_words)(table_arrays(table)))
    single = [r for r in range(8) if table.query_lens[r] == 1 and table.kv_lens[r] > 0]
    if name == "decode":
        items = {int(table.query_offsets[r]): (r, int(table.query_offsets[r])) for r in single}
        count = 512
    else:
        items, count = {r: (r, int(table.query_offsets[r])) for r in single}, 8
    blocks, live, offsets = np.split(vector, [8 * static.decode_blocks, 8 * static.decode_blocks + count])
    assert [i for i in range(count) if live[i]] == list(items)
    found = {}
    for block, (item, alive, token, length, pages, begin, end, whole) in enumerate(blocks.reshape(-1, 8).tolist()):
        assert (item >= 0) == (block < offsets[-1])  # blocks with a piece come first: the kernel ends at one without
        if item >= 0:
            assert whole == (offsets[item + 1] - offsets[item] == 1)
            assert offsets[item] <= block < offsets[item + 1]
            row, first_token = items[item]
            want = (1, first_token, table.kv_lens[row], table.page_offsets[row])
            assert (alive, token, length, pages) == want
            found.setdefault(item, []).append((begin, end))
    lens = {i: int(table.kv_lens[r]) for i, (r, _) in items.items()}
    first = {i: 0 if window is None else max(n - window, 0) // 512 for i, n in lens.items()}
    assert found == {i: [(c * 512, c * 512 + 512) for c in range(first[i], -(-n // 512))] for i, n in lens.items()}
    assert offsets[-1] == sum(len(p) for p in found.values())


def test_a_rung_of_rows_within_one_piece_is_not_split():
    rung = step("decode")[1]
    made = [plan.static_plan(rung, decode="paged", prefill="fa3", chunk=n, tile=128, ctas=7) for n in (2048, 2047)]
    assert [static.chunk for static in made] == [None, 2047]
    assert made[0].decode_blocks == 512


@pytest.mark.parametrize("name", ["mixed", "prefill"])
def test_fa3_covers_every_tile_of_the_longer_rows_once(name):
    table, static, arrays = planned(name, decode="cuda_cores", prefill="fa3")
    info, _ = plan.prefill_info(static)
    names = ("tile", "query", "page", "query_len", "kv_len", "head", "work", "row")
    at = dict(zip(names, info))
    assert info[8] == 1
    work = words(arrays.prefill_words, at["work"], static.ctas + 1)
    assert work[0] == 0
    assert work == sorted(work)
    columns = {k: words(arrays.prefill_words, at[k], static.prefill_blocks) for k in names if k != "work"}
    found = {}
    for i in range(work[-1]):
        row, tile = columns["row"][i], columns["tile"][i]
        assert (row, tile) not in found
        found[row, tile] = i
        assert columns["query"][i] == table.query_offsets[row]
        assert columns["page"][i] == table.page_offsets[row]
        assert columns["query_len"][i] == table.query_lens[row]
        assert columns["kv_len"][i] == table.kv_lens[row]
    longer = [r for r in range(8) if table.query_lens[r] > 1 and table.kv_lens[r] > 0]
    assert set(found) == {(r, i) for r in longer for i in range(-(-int(table.query_lens[r]) // 128))}
    # The kernel's schedule finds tile number `rank` of the order of falling cost like this.
    at_rank = [work[rank % static.ctas] + rank // static.ctas for rank in range(work[-1])]
    assert sorted(at_rank) == list(range(work[-1]))
    cost = []
    for i in at_rank:
        end = columns["kv_len"][i] - columns["query_len"][i] + (columns["tile"][i] + 1) * 128
        cost.append(min(end, columns["kv_len"][i]))
    assert cost == sorted(cost, reverse=True)


@pytest.mark.parametrize("group_size", [1, 3, 8])
def test_fa2_packs_the_group_into_its_tiles(group_size):
    table, static, arrays = planned("mixed", decode="cuda_cores", prefill="fa2", group_size=group_size)
    info, _ = plan.prefill_info(static)
    blocks, tokens, at_total, tile, at_row, at_tile, at_piece, _, at_out, at_chunk, _, _, at_mask, graph, split = info
    assert (tokens, tile, graph, split) == (512, 64, 1, 0)
    assert words(arrays.prefill_words, at_total, 1) == [table.query_offsets[-1]]
    want = [
        (r, i)
        for r in range(8)
        if table.query_lens[r] > 1 and table.kv_lens[r] > 0
        for i in range(-(-int(table.query_lens[r]) * group_size // 64))
    ]
    found = list(zip(words(arrays.prefill_words, at_row, blocks), words(arrays.prefill_words, at_tile, blocks)))
    assert found[: len(want)] == want
    assert mask_bytes(arrays.prefill_words, at_mask, blocks) == [i < len(want) for i in range(blocks)]
    assert set(words(arrays.prefill_words, at_piece, blocks)) == {0}
    assert words(arrays.prefill_words, at_out, 9) == table.query_offsets.tolist()
    assert words(arrays.prefill_words, at_chunk, 1)[0] > 1 << 20


@pytest.mark.parametrize("name", BATCHES)
def test_masks_say_which_output_is_attention(name):
    table, _, arrays = planned(name, decode="cuda_cores", prefill="fa3")
    single, live = np.zeros(512, bool), np.zeros(512, bool)
    for row in range(8):
        tokens = slice(table.query_offsets[row], table.query_offsets[row + 1])
        live[tokens] = table.kv_lens[row] > 0
        single[tokens] = table.kv_lens[row] > 0 and table.query_lens[row] == 1
        assert set(arrays.token_row[tokens]) <= {row}
    np.testing.assert_array_equal(arrays.live, live)
    np.testing.assert_array_equal(arrays.single, single)


def test_plan_info_does_not_follow_lengths_and_words_do():
    specs = AttentionSpec(scale=1.0)
    backend = FlashInferBackend(sm_count=7)
    table, rung = step("decode")
    other = table_arrays(table)
    other = type(other)(**{**vars(other), "kv_lens": jnp.minimum(other.kv_lens, 100)})
    static = backend.static_plan(rung, specs)
    first, second = (backend.plan_arrays(static, t) for t in (table_arrays(table), other))
    assert static == backend.static_plan(rung, specs)
    assert jax.tree.map(jnp.shape, first) == jax.tree.map(jnp.shape, second)
    assert not np.array_equal(first.decode_words, second.decode_words)


def test_a_rung_without_the_geometry_of_heads_is_refused():
    table, _ = step("decode")
    with pytest.raises(InvalidInputError, match="group_size"):
        FlashInferBackend(sm_count=7).static_plan(Rung.of(table), AttentionSpec(scale=1.0))


def test_a_number_of_multiprocessors_unlike_the_device_s_is_refused_where_a_gpu_is(monkeypatch):
    """FA3's grid is the device's, whatever the plan says: a plan for another one would be read past its end."""
    _, rung = step("mixed")
    spec = AttentionSpec(scale=1.0)
    assert FlashInferBackend(sm_count=78).static_plan(rung, spec).ctas == 78  # lowering without a device
    monkeypatch.setattr(backend, "_sm_count", lambda: 132)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert FlashInferBackend().static_plan(rung, spec).ctas == 132
    assert FlashInferBackend(sm_count=132).static_plan(rung, spec).ctas == 132
    with pytest.raises(InvalidInputError, match=r"sm_count=78, but this device has 132 SMs. Leave it out"):
        FlashInferBackend(sm_count=78).static_plan(rung, spec)
    assert FlashInferBackend(sm_count=78, prefill="fa2").static_plan(rung, spec).ctas == 0


def test_a_rung_of_single_tokens_has_no_prefill():
    _, static, arrays = planned("decode", decode="cuda_cores", prefill="fa3")
    assert static.prefill is None
    assert arrays.prefill_words is None


def test_fp8_pools_prefill_with_fa2_and_a_window_is_not_split_on_tensor_cores():
    _, rung = step("mixed", kv_dtype="float8_e4m3fn")
    assert FlashInferBackend().static_plan(rung, AttentionSpec(scale=1.0)).prefill == "fa2"
    window = AttentionSpec(scale=1.0, window=9)
    assert FlashInferBackend(tier="fast").static_plan(rung, window).chunk is None
    assert FlashInferBackend(tier="exact").static_plan(rung, window).chunk == 512

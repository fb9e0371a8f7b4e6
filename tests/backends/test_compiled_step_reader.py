"""`conformance.hlo` reads small programs, of which each but the first mistreats its pool in one way."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from conformance.hlo import collectives_before_readers, parse, problems

PAGES, SIZE, HEADS, WIDTH, TOKENS = 64, 4, 2, 8, 3
SHAPE = (PAGES, SIZE, HEADS, WIDTH)
ELEMENTS = PAGES * SIZE * HEADS * WIDTH


def compile_step(write, between=lambda pool, x: (pool, x), after=lambda x: x, *, donate=True, dtype=jnp.uint16):
    """A scan over two layers: write the pool, `between`, read one page, `after`; on two devices, heads split."""
    spec = PartitionSpec(None, None, "heads")
    mesh = Mesh(jax.devices()[:2], ("heads",))

    def step(pool, new):
        def layer(carry, _):
            pool, x = carry
            pool = write(pool, new)
            pool, x = between(pool, x)
            read = lax.dynamic_slice_in_dim(pool, 3, 1)[0, :TOKENS].astype(jnp.float32)
            return (pool, after(x + read)), None

        return lax.scan(layer, (pool, jnp.zeros(new.shape, jnp.float32)), length=2)[0]

    sharded = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(spec, PartitionSpec(None, "heads")),
        out_specs=(spec, PartitionSpec(None, "heads")),
        check_vma=False,
    )
    place = functools.partial(jax.sharding.NamedSharding, mesh)
    arguments = (
        jax.ShapeDtypeStruct(SHAPE, dtype, sharding=place(spec)),
        jax.ShapeDtypeStruct((TOKENS, HEADS, WIDTH), dtype, sharding=place(PartitionSpec(None, "heads"))),
    )
    return jax.jit(sharded, donate_argnums=0 if donate else ()).lower(*arguments).compile()


def scatter(pool, new):
    return pool.at[jnp.arange(TOKENS) + 1, jnp.arange(TOKENS)].set(new, mode="drop")


def total(x):
    return lax.psum(x, "heads")


def found(compiled, itemsize=2):
    return problems(
        compiled.as_text(),
        pool_elements=ELEMENTS // 2,
        pool_bytes=ELEMENTS // 2 * itemsize,
        alias_bytes=compiled.memory_analysis().alias_size_in_bytes,
    )


def test_a_step_that_keeps_its_pool_has_no_problem():
    compiled = compile_step(scatter, after=total)
    assert any(one.opcode.startswith("all-reduce") for ones in parse(compiled.as_text()).values() for one in ones)
    assert found(compiled) == []


def test_a_pool_that_is_not_donated_is_found():
    undonated = found(compile_step(scatter, after=total, donate=False))
    assert any("it is not donated" in problem for problem in undonated)
    assert any("copy" in problem and "as large as the pool" in problem for problem in undonated)


def test_a_conversion_of_the_pool_inside_a_fusion_is_found():
    def through_float32(pool, new):
        return scatter(pool.astype(jnp.float32) * 2, new.astype(jnp.float32)).astype(pool.dtype)

    problem = found(compile_step(through_float32, after=total, dtype=jnp.float16))
    assert any("convert" in one and "as large as the pool" in one for one in problem), problem


def test_a_collective_between_append_and_attention_is_found():
    def reduce_what_was_written(pool, x):
        return pool, x + total(pool[2, :TOKENS].astype(jnp.float32))

    problem = found(compile_step(scatter, reduce_what_was_written))
    assert any("all-reduce" in one and "stands between" in one for one in problem), problem


def test_a_program_without_the_pool_is_an_error():
    with pytest.raises(ValueError, match="no scatter or update of 1000000 elements"):
        problems(compile_step(scatter).as_text(), pool_elements=10**6, pool_bytes=0, alias_bytes=0)


def between_write_and_read(*middle, read="bf16[8] gather(%pool, %ids), offset_dims={0}", elsewhere=""):
    """Collectives found in a written-out program: scatter to a pool of 4096 elements, `middle`, then `read`."""
    text = "\n  ".join(
        [
            "%scattered = f32[512,8] scatter(%wide, %ids, %new), to_apply=%assign",
            *middle,
            f"ROOT %read = {read}",
        ]
    )
    module = f"{elsewhere}\nENTRY %main (a: f32[512,8]) -> bf16[8] {{\n  {text}\n}}\n"
    return [one.name for _, one, _ in collectives_before_readers(parse(module), 4096)]


NARROW = "%pool = bf16[512,8] convert(%scattered)"
SUM = "%sum = s32[] all-reduce(%mark), to_apply=%add"


def test_a_pool_that_is_converted_back_after_the_write_is_still_the_pool():
    assert between_write_and_read(NARROW, SUM) == ["sum"]
    assert between_write_and_read(SUM, NARROW) == ["sum"]


@pytest.mark.parametrize(("inside", "seen"), [("convert(%p)", True), ("negate(%p)", False)])
def test_a_fusion_hands_on_the_pool_only_if_it_does_nothing_else(inside, seen):
    body = f"%p = f32[512,8] parameter(0)\n  ROOT %r = bf16[512,8] {inside}"
    fused = f"%fused (p: f32[512,8]) -> bf16[512,8] {{\n  {body}\n}}"
    names = between_write_and_read(
        "%pool = bf16[512,8] fusion(%scattered), kind=kLoop, calls=%fused", SUM, elsewhere=fused
    )
    assert names == (["sum"] if seen else [])


def test_what_a_page_was_read_into_is_not_the_pool():
    assert (
        between_write_and_read(
            NARROW,
            "%page = bf16[8] gather(%pool, %ids), offset_dims={0}",
            "%wide_page = f32[8] convert(%page)",
            "%sum = f32[8] all-reduce(%wide_page), to_apply=%add",
            read="bf16[8] convert(%sum)",
        )
        == []
    )


@pytest.mark.parametrize(
    "collective",
    [
        "%sum = (s32[], s32[]) all-reduce-start(%mark), to_apply=%add",
        "%sum = bf16[1024,8] all-gather(%mark), dimensions={0}",
        "%sum = bf16[8] reduce-scatter(%mark), to_apply=%add",
        "%sum = bf16[8] collective-permute(%mark), source_target_pairs={{0,1}}",
        "%sum = bf16[8] all-to-all(%mark), dimensions={0}",
        "%sum = bf16[8] ragged-all-to-all(%mark)",
        "%sum = bf16[8] collective-broadcast(%mark)",
        "%sum = (bf16[8], token[]) recv(%token), channel_id=1",
    ],
)
def test_every_kind_of_collective_is_seen(collective):
    assert between_write_and_read(NARROW, collective) == ["sum"]


@pytest.mark.parametrize(
    "caller",
    [
        "%x = s32[] call(%mark), to_apply=%inner",
        "%x = s32[] while(%mark), condition=%other, body=%inner",
        "%x = s32[] conditional(%mark, %mark, %mark), branch_computations={%other, %inner}",
        "%x = s32[] conditional(%mark, %mark, %mark), true_computation=%other, false_computation=%inner",
        "%x = ((s32[]), s32[]) async-start(%mark), calls=%inner",
    ],
)
def test_a_collective_inside_something_called_is_seen(caller):
    inner = (
        "%inner (m: s32[]) -> s32[] {\n  %m = s32[] parameter(0)\n  ROOT %sum = s32[] all-reduce(%m), to_apply=%add\n}"
    )
    assert between_write_and_read(NARROW, caller, elsewhere=inner) == ["sum"]

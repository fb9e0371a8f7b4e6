"""`linear`: one meaning, in forms that differ by platform, by a weight's axes and by the number of tokens."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.models.layers import linear

WEIGHTS = [(48, 32), (16, 32), (2, 24, 32), (3, 5, 8, 32)]


def arguments(tokens, shape, dtype=jnp.float32):
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((tokens, shape[-1])), rng.standard_normal(shape)
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


@pytest.mark.parametrize("shape", WEIGHTS, ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 200])
def test_every_form_is_the_product(tokens, shape):
    x, weight = arguments(tokens, shape)
    expected = np.tensordot(np.asarray(x, np.float64), np.asarray(weight, np.float64), ((1,), (len(shape) - 1,)))
    found = jax.jit(linear)(x, weight)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_the_output_has_the_dtype_that_is_asked_for():
    for shape in WEIGHTS:
        x, weight = arguments(4, shape, jnp.bfloat16)
        assert jax.eval_shape(linear, x, weight).dtype == jnp.bfloat16
        assert linear(x, weight, out=jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("shape", WEIGHTS, ids=str)
@pytest.mark.parametrize("tokens", [8, 200])
def test_no_weight_is_copied_on_a_cpu(tokens, shape):
    """A transposed copy of a weight takes longer than a product of few tokens."""
    text = jax.jit(linear).lower(*arguments(tokens, shape)).compile().as_text()
    size, made = int(np.prod(shape)), re.findall(r"= f32\[([\d,]+)\]\S* (copy|transpose|fusion)\(", text)
    assert [found for found in made if np.prod([int(n) for n in found[0].split(",")]) == size] == []


@pytest.mark.parametrize("shape", WEIGHTS, ids=str)
def test_other_platforms_get_one_product_of_the_weight_as_it_is(shape):
    text = jax.jit(linear).trace(*arguments(8, shape)).lower(lowering_platforms=("cuda",)).as_text()
    operations = re.findall(r"stablehlo\.(\w+)", text)
    # What chooses the platform is left as a choice of one branch, which XLA takes away first.
    assert [name for name in operations if name not in ("constant", "case", "return")] == ["dot_general"]
    assert "tensor<8x32xf32>, tensor<" + "x".join(map(str, shape)) + "xf32>" in text

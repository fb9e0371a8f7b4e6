"""What is changed in Triton's interpreter: bfloat16, which its documentation says it does not support, and one loop.

These are about the emulator, never about the vendor's kernels. The patches of bfloat16 leave every other dtype's way
through the interpreter as it is, and the loop gives the same bits, so results in float32 and float16 are those of an
unpatched one; a test compares them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

QUIET_NAN = 0x7FC0


@dataclasses.dataclass(frozen=True)
class Patch:
    """`name` of what is replaced in `triton.runtime.interpreter`, and the `reason`."""

    name: str
    reason: str


PATCHES = (
    Patch(
        "InterpreterBuilder.create_dot",
        "bfloat16 operands are held as their 16-bit words, and the stock matrix product multiplies the words",
    ),
    Patch(
        "_convert_float",
        "float32 to bfloat16 drops the low bits where the devices round to nearest, ties to even, and the way back "
        "shifts the bits of subnormal numbers",
    ),
    Patch(
        "InterpreterBuilder.binary_op",
        "arithmetic and comparisons of bfloat16 act on the words as integers; here they act on float32 values, rounded "
        "once",
    ),
    Patch("InterpreterBuilder.unary_op", "as binary_op, for functions of one argument"),
    Patch(
        "ReduceOps.apply_impl",
        "speed alone: an exclusive or along an axis, inside `tl.flip`, is one call of numpy instead of a Python loop "
        "over elements",
    ),
)


def widen(words: np.ndarray) -> np.ndarray:
    """Float32 values of bfloat16 words: exact, NaN payloads included."""
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Words of the nearest bfloat16 values, ties to even; every NaN gives one quiet NaN."""
    values = np.asarray(values, np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64).reshape(values.shape)
    words = ((bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(QUIET_NAN), words)


def install() -> None:
    """Install all of `PATCHES` in this process. Again is a no-op."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    reduction: Any = interpreter.ReduceOps
    if getattr(builder, "paged_patches", False):
        return
    builder.paged_patches = True
    bits = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)

    def is_bfloat16(*handles: Any) -> bool:
        return any(h.dtype.scalar == tl.bfloat16 for h in handles)

    def values(handle: Any) -> np.ndarray:
        return widen(handle.data) if is_bfloat16(handle) else handle.data

    def rounded(result: np.ndarray) -> Any:
        if result.dtype == np.bool_:
            return interpreter.TensorHandle(result, tl.int1)
        return interpreter.TensorHandle(narrow(result), tl.bfloat16)

    stock_dot, stock_binary, stock_unary = builder.create_dot, builder.binary_op, builder.unary_op
    stock_convert = interpreter._convert_float

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        if not is_bfloat16(a, b):
            return stock_dot(self, a, b, d, input_precision, max_num_imprecise_acc)
        product = np.matmul(values(a).astype(np.float32), values(b).astype(np.float32))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source == tl.float32 and target == tl.bfloat16 and rounding is None:
            return narrow(data.view(np.float32))
        if source == tl.bfloat16 and target == tl.float32:
            return widen(data).view(np.uint32)
        return stock_convert(data, source, target, rounding)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if not is_bfloat16(lhs) or op in bits:
            return stock_binary(self, lhs, rhs, op)
        return rounded(op(values(lhs), values(rhs)))

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        return rounded(op(values(arg))) if is_bfloat16(arg) else stock_unary(self, arg, op)

    stock_reduce = reduction.apply_impl

    def apply_impl(self: Any, inputs: Any) -> Any:
        if self.combine_fn is not tl.standard._xor_combine or self.axis is None:
            return stock_reduce(self, inputs)
        (operand,) = inputs
        found = np.bitwise_xor.reduce(operand.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return [self.to_tensor(found, operand.dtype)]

    reduction.apply_impl = apply_impl
    builder.create_dot, builder.binary_op, builder.unary_op = create_dot, binary_op, unary_op
    interpreter._convert_float = convert

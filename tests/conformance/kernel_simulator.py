"""Kernels that a vendor could ship, simulated: tiles, lanes, splits, matrix units that truncate, approximate functions.

Every float32 operation is one rounding of a float64 result. With no fault planted, a kernel is honest by construction
under the numeric model it was drawn for; whatever the suite then objects to is the suite's mistake.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from conformance.case import AttendProblem
from conformance.formats import decode, encode, round_to
from paged.common.capabilities import NumericModel

LOG2E = 1.4426950408889634


def f32(x):
    """One rounding to float32; what is too large becomes infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


def toward_zero(x, bits):
    """`x` cut to that many significant bits."""
    step = np.ldexp(1.0, np.frexp(x)[1] - bits)
    return np.trunc(x / step) * step


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One member of the family."""

    model: NumericModel
    seed: int
    tile: int
    splits: int
    order: str  # tiles of a split: "up", "down" or "lanes" (interleaved, each lane with its own maximum)
    unit: str  # "truncating" 16 products a step, "tree" of 8, or "chain" of single products
    merge: str  # "state" or "lse"
    round_row_sum: bool
    approximate_reciprocal: bool
    fused: bool
    fault: str | None = None

    @classmethod
    def draw(cls, seed: int, model: NumericModel, fault: str | None = None, **fixed) -> Kernel:
        """A random honest kernel."""
        g = np.random.default_rng(seed)
        drawn = {
            "tile": int(g.choice([4, 16, 32, 64, 128])),
            "splits": int(g.choice([1, 1, 2, 3, 5, 8])),
            "order": str(g.choice(["up", "down", "lanes"])),
            "unit": str(g.choice(["truncating", "tree", "chain"])),
            "merge": str(g.choice(["state", "lse"])),
            "round_row_sum": bool(g.integers(2)),
            "approximate_reciprocal": bool(g.integers(2)),
            "fused": bool(g.integers(2)),
        }
        return cls(model=model, seed=seed, fault=fault, **{**drawn, **fixed})

    def run(self, p: AttendProblem) -> tuple[np.ndarray, np.ndarray]:
        """Output words (t, h, e) and float32 LSE (t, h)."""
        tokens, heads, _ = p.query.shape
        out, lse = np.zeros((tokens, heads, p.values.shape[-1])), np.full((tokens, heads), -np.inf)
        g = np.random.default_rng([self.seed, 1])
        with np.errstate(all="ignore"):
            for row in range(p.table.num_rows):
                n, first = int(p.table.kv_lens[row]), int(p.table.query_offsets[row])
                q_len = int(p.table.query_offsets[row + 1]) - first
                if n and q_len:
                    for head in range(heads):
                        at = slice(first, first + q_len)
                        out[at, head], lse[at, head] = self._head(p, g, row, at, head, n)
        words = encode(out, p.dtype)
        return np.where(words == (1 << (8 * words.itemsize - 1)), 0, words).astype(words.dtype), lse.astype(np.float32)

    def _head(self, p, g, row, at, head, n):
        size, spec = p.table.tokens_per_page, p.spec
        pages = p.layer * p.table.num_pages + p.table.pages_of(row)
        kv = head // (p.query.shape[1] // p.keys.shape[2])
        k, v = (decode(x[pages, :, kv].reshape(len(pages) * size, -1)[:n], p.kv_dtype) for x in (p.keys, p.values))
        q = decode(p.query[at, head], p.dtype)
        position = n - len(q) + np.arange(len(q))[:, None]
        j = np.arange(n)[None]
        mask = (j <= position) if spec.causal else np.ones((len(q), n), bool)
        if spec.window is not None:
            mask &= j > position - spec.window
        scale = float(np.float32(spec.scale)) * (p.key_scale or 1.0)
        logits, unit = self._logits(g, q, k, scale, spec.soft_cap)
        logits = np.where(mask, logits, 0.0 if self.fault == "mask_zero" else -np.inf)
        if self.model.normalised:
            acc, top, total = self._whole(g, logits, unit, v, p)
        else:
            acc, top, total = self._merged(g, logits, unit, v, p, head)
        lse = top + f32(f32(np.log2(total)) + g.choice([-1, 0, 1], total.shape) * 2.0**-21)
        return acc * (p.value_scale or 1.0), f32(lse / LOG2E)[:, 0]

    def _logits(self, g, q, k, scale, cap):
        """Logits in the unit in which exp2 takes them times `unit`."""
        s = self._dot(g, q, k.T)
        if self.fault == "scale_twice":
            scale = scale * scale
        if cap is None:
            return s, float(f32(scale * LOG2E))
        error = 1 + 2.0**self.model.tanh_error_log2 * g.uniform(-1, 1, s.shape)
        if self.fault == "no_soft_cap":
            return s, float(f32(scale * LOG2E))
        return f32(f32(np.tanh(f32(s * f32(scale / cap))) * error) * cap), float(f32(LOG2E))

    def _exp2(self, g, x):
        error = 1 + np.where(x == 0, 0.0, 2.0**self.model.exp_error_log2 * 0.9) * g.uniform(-1, 1, np.shape(x))
        return np.where(x > -149, f32(np.exp2(np.clip(x, -200, 120)) * error), 0.0)

    def _shifted(self, s, top, unit):
        return f32(s * unit - f32(top * unit)) if self.fused else f32(f32(s - top) * unit)

    def _narrow(self, p, weights):
        if self.fault == "p_4_bits":
            return np.where(weights > 0, np.sign(weights) * toward_zero(weights * (1 + 2.0**-4), 4), 0.0)
        return round_to(weights, p.dtype) if self.model.weights == "input" else weights

    def _whole(self, g, logits, unit, v, p):
        """softmax in one piece, then rounded, then times V."""
        top = logits.max(1, keepdims=True)
        e = np.where(np.isneginf(logits), 0.0, self._exp2(g, self._shifted(logits, top, unit)))
        total = f32(e.sum(1, keepdims=True))
        sink = self._sink(p, 0, unit)
        assert sink is None, "normalised kernels are tried without sinks"
        return self._dot(g, self._narrow(p, f32(e / total)), v), f32(top * unit), total

    def _sink(self, p, head, unit):
        return None if p.sinks is None else float(f32(float(p.sinks[head]) * LOG2E))

    def _merged(self, g, logits, unit, v, p, head):
        n = logits.shape[1]
        cuts = np.sort(g.choice(np.arange(1, n), min(self.splits, n) - 1, replace=False)) if n > 1 else []
        states = []
        for lo, hi in zip([0, *cuts], [*cuts, n]):
            lanes = min(4, hi - lo) if self.order == "lanes" else 1
            for lane in range(lanes):
                states.append(self._sweep(g, logits, unit, v, p, np.arange(lo + lane, hi, lanes)))
        sink = self._sink(p, head, unit)
        if sink is not None:
            zero = np.zeros_like(states[0][2])
            states.append((np.full((len(zero), 1), sink), np.ones((len(zero), 1)), zero))
        return self._merge(g, states, p)

    def _sweep(self, g, logits, unit, v, p, columns):
        """Running maximum, row sum and accumulator over some columns, tile after tile."""
        rows = len(logits)
        top, total, acc = np.full((rows, 1), -np.inf), np.zeros((rows, 1)), np.zeros((rows, v.shape[1]))
        tiles = [columns[i : i + self.tile] for i in range(0, len(columns), self.tile)]
        for tile in tiles[::-1] if self.order == "down" else tiles:
            s = logits[:, tile]
            new = np.maximum(top, s.max(1, keepdims=True))
            if self.fault == "running_max_stale":
                new = np.where(np.isneginf(top), new, top)
            safe = np.where(np.isneginf(new), 0.0, new)
            e = np.where(np.isneginf(s), 0.0, self._exp2(g, self._shifted(s, safe, unit)))
            old = np.where(np.isneginf(top), 0.0, top)
            factor = np.where(
                np.isneginf(top), 0.0, np.where(top == new, 1.0, self._exp2(g, self._shifted(old, safe, unit)))
            )
            if self.fault == "no_rescale":
                factor = np.where(np.isneginf(top), 0.0, 1.0)
            narrow = self._narrow(p, e)
            total = f32(f32(total * factor) + (narrow if self.round_row_sum else e).sum(1, keepdims=True))
            acc = self._dot(g, narrow, v[tile], f32(acc * factor))
            if self.fault == "bf16_accumulator":
                acc = round_to(acc, "bfloat16")
            top = new
        return f32(top * unit), total, acc

    def _merge(self, g, states, p):
        partial = p.dtype if self.model.partials == "output" else None
        top = np.max([np.where(l > 0, m, -np.inf) for m, l, _ in states], axis=0)
        total, acc = np.zeros_like(top), np.zeros_like(states[0][2])
        if self.fault == "unweighted_merge":
            live = [(l > 0) for _, l, _ in states]
            mean = sum(np.where(l > 0, a / np.where(l > 0, l, 1), 0.0) for _, l, a in states) / sum(live)
            return mean, top, np.ones_like(top)
        if (self.merge == "state" and partial is None) or len(states) == 1:
            for m, l, a in states:
                w = np.where(l > 0, self._exp2(g, np.where(l > 0, f32(m - top), 0.0)), 0.0)
                total, acc = f32(total + f32(w * l)), f32(acc + f32(w * a))
        else:
            bases = [np.where(l > 0, f32(m + f32(np.log2(np.where(l > 0, l, 1.0)))), -np.inf) for m, l, _ in states]
            top = np.max(bases, axis=0)
            for base, (_, l, a) in zip(bases, states):
                o = f32(a / np.where(l > 0, l, 1.0))
                o = o if partial is None else round_to(o, partial)
                w = np.where(l > 0, self._exp2(g, np.where(l > 0, f32(base - top), 0.0)), 0.0)
                total, acc = f32(total + w), f32(acc + f32(w * o))
        if self.approximate_reciprocal:
            exact = np.log2(total) % 1 == 0
            inverse = f32(f32(1 / total) * (1 + np.where(exact, 0, g.choice([-1, 0, 1], total.shape) * 2.0**-23)))
            return f32(acc * inverse), top, total
        return f32(acc / total), top, total

    def _dot(self, g, a, b, acc=None):
        """a (m, K) @ b (K, n) into float32, `unit` products at a time, in random order of the steps."""
        acc = np.zeros((len(a), b.shape[1])) if acc is None else acc
        step = {"truncating": 16, "tree": 8, "chain": 1 if a.shape[1] <= 32 else 4}[self.unit]
        b = np.nan_to_num(b, nan=0.0, posinf=0.0, neginf=0.0)
        for i in g.permutation(np.arange(0, a.shape[1], step)):
            if self.unit == "truncating":
                terms = np.concatenate([acc[:, None], a[:, i : i + step, None] * b[None, i : i + step]], axis=1)
                grid = np.ldexp(1.0, np.frexp(np.abs(terms).max(1, keepdims=True))[1] - 25)
                acc = toward_zero((np.trunc(terms / grid) * grid).sum(1), 24)
            else:
                acc = f32(acc + a[:, i : i + step] @ b[i : i + step])
        return acc

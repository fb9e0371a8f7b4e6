"""Faults of the CPU kernels: edits of the C++ text as it is, and for each the case that must see it.

`broken_cpu.py` builds them.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fault:
    """Edits (file, text, its replacement), each of a text that occurs once there; `case` sees it and names `clause`.

    `costly` ones are for the command alone.
    """

    clause: str
    case: str
    edits: tuple[tuple[str, str, str], ...]
    costly: bool = False


def edit(old: str, new: str, file: str = "attention.h") -> tuple[tuple[str, str, str], ...]:
    """One edit."""
    return ((file, old, new),)


def moved(change: str) -> tuple[tuple[str, str, str], ...]:
    """The 16-bit words x of an appended token changed on their way."""
    copy = "std::memcpy(move.to + slot[t] * move.bytes, move.from + t * move.bytes, move.bytes);"
    words = "auto* at = reinterpret_cast<uint16_t*>(move.to + slot[t] * move.bytes); "
    words += f"for (int64_t i = 0; i < move.bytes / 2; ++i) {{ uint16_t& x = at[i]; {change} }}"
    return edit(copy, f"{copy} {words}", "handlers.cc")


MIXED, DECODE = "attend/{}/bf16/mixed".format, "attend/{}/bf16/d128/decode".format
MODULO = "token * heads + kv_head + g * pool.kv_heads"
LAST_SLOT = "keys.dimensions()[0] * keys.dimensions()[1] - 1"
FULL = "(kv_len + pool.page_size - 1) / pool.page_size * pool.page_size"
WHOLE_PAGE = "const int64_t kv_len = rows.kv_lens[item.row]; if ({0}.high == kv_len) {0}.high = " + FULL + ";"

FAULTS = {
    "window one too long": Fault(
        "attend.4", "attend/census/bf16/window-19", edit("position - (options.window - 1)", "position - options.window")
    ),
    "window one too short": Fault(
        "attend.4",
        "attend/census/bf16/window-19",
        edit("position - (options.window - 1)", "position - (options.window - 2)"),
        costly=True,
    ),
    "a token sees the next one": Fault(
        "attend.3", MIXED("census"), edit("std::min(length, position + 1)", "std::min(length, position + 2)")
    ),
    "causal mask at the top left": Fault(
        "attend.3",
        MIXED("census"),
        edit("length - rows.query_offsets[item.row + 1] + item.first", "item.first - rows.query_offsets[item.row]"),
        costly=True,
    ),
    "causal where it is not asked": Fault(
        "attend.13",
        "attend/census/bf16/non-causal",
        edit("options.causal ? std::min(length, position + 1) : length", "std::min(length, position + 1)"),
        costly=True,
    ),
    "no scale under a cap": Fault(
        "attend.2",
        "attend/generic/f32/soft-cap-30",
        edit("* Splat(options.scale);", "* Splat(options.cap != 0 ? 1.0f : options.scale);"),
    ),
    "cap ignored": Fault(
        "attend.5", "attend/generic/f32/soft-cap-0.7", edit("if (options.cap != 0)", "if (false)"), costly=True
    ),
    "sink missing from the LSE": Fault(
        "attend.11",
        "attend/generic/bf16/sinks",
        edit(
            "std::log(static_cast<double>(total))",
            "std::log(static_cast<double>(total) - (options.sinks ? std::exp(options.sinks[head] - top) : 0))",
        ),
    ),
    "sinks ignored": Fault(
        "attend.1", "attend/census/bf16/sinks", edit("if (options.sinks) {", "if (false) {"), costly=True
    ),
    "sinks by KV head": Fault(
        "attend.1", "attend/generic/bf16/sinks", edit("options.sinks[head]", "options.sinks[head / 2]"), costly=True
    ),
    "state not rescaled by a sink": Fault(
        "attend.1",
        "attend/generic/bf16/sinks",
        edit("Load(state + i) * Splat(decay) /", "Load(state + i) /"),
        costly=True,
    ),
    "KV head modulo": Fault(
        "attend.6",
        MIXED("address"),
        (
            ("handlers.cc", "Data<char>(query) + (first + g) *", f"Data<char>(query) + ({MODULO}) *"),
            ("handlers.cc", "outputs + (first + g) *", f"outputs + ({MODULO}) *"),
            ("handlers.cc", "lses[first + g]", f"lses[{MODULO}]"),
        ),
    ),
    "pages in reverse": Fault(
        "pages.3",
        DECODE("address"),
        edit("pages[page]", "pages[(rows.kv_lens[item.row] - 1) / pool.page_size - page]"),
    ),
    "pages of the first row": Fault(
        "attend.12", MIXED("address"), edit("rows.page_ids + rows.page_offsets[item.row]", "rows.page_ids"), costly=True
    ),
    "pages of layer 0": Fault(
        "pages.4", MIXED("address"), edit("(pages[page] + rows.page_base)", "(pages[page])"), costly=True
    ),
    "last page to its end": Fault(
        "attend.7",
        MIXED("census"),
        edit(
            "const Seen seen = SeenBy(rows, options, item, t);",
            "Seen seen = SeenBy(rows, options, item, t); " + WHOLE_PAGE.format("seen"),
        )
        + edit(
            "seen[t] = SeenBy(rows, options, item, t);",
            "seen[t] = SeenBy(rows, options, item, t); " + WHOLE_PAGE.format("seen[t]"),
        ),
    ),
    "scale of values missing": Fault(
        "attend.14", "attend/generic/bf16-e4m3fn/mixed", edit("if (options.value_scale != 1)", "if (false)")
    ),
    "scale of keys missing": Fault(
        "attend.14",
        "attend/generic/bf16-e4m3fn/mixed",
        edit("scale * *Data<float>(key_scale)", "scale", "handlers.cc"),
        costly=True,
    ),
    "padding is written": Fault(
        "append.2",
        "append/bf16/bits",
        edit("if (slot[t] < 0) continue;", f"const int64_t to = slot[t] < 0 ? {LAST_SLOT} : slot[t];", "handlers.cc")
        + edit("move.to + slot[t] * move.bytes", "move.to + to * move.bytes", "handlers.cc"),
    ),
    "slots of a pair exchanged": Fault(
        "append.1",
        "append/bf16/bits",
        edit("move.to + slot[t] * move.bytes", "move.to + (slot[t] ^ 1) * move.bytes", "handlers.cc"),
        costly=True,
    ),
    "−0 is appended as 0": Fault("append.4", "append/bf16/special", moved("if (x == 0x8000) x = 0;")),
    "payload of a NaN changed": Fault(
        "append.4", "append/bf16/special", moved("if ((x & 0x7fff) > 0x7f80) x = (x & 0x8000) | 0x7fc0;")
    ),
    "state not rescaled when the top rises": Fault(
        "attend.1",
        "attend/generic/bf16/d128/long-decode",
        edit("Store(state + i, Load(state + i) * Splat(decay));", ";"),
    ),
    "sum not rescaled when the top rises": Fault(
        "attend.1", "attend/generic/bf16/d128/long-decode", edit("*total *= decay;", ";"), costly=True
    ),
    "a last block of 64 left out": Fault(
        "pages.3",
        "attend/census/bf16/full-row/phase-2",
        edit("block < end;", "block + (end % kBlock ? 0 : kBlock) < end;"),
    ),
    "weights of what is masked in the sum": Fault(
        "attend.7", "attend/generic/bf16/mixed", edit("logit[c] = Select(in, logit[c], Splat(kNothing));", "(void)in;")
    ),
    "e4m3fnuz by the bias of e4m3fn": Fault(
        "attend.14",
        "attend/generic/bf16-e4m3fnuz/mixed",
        edit("Decode8(bits, 3, 8, false, true)", "Decode8(bits, 3, 7, false, true)", "elements.h"),
    ),
    "e4m3fn read as e5m2": Fault(
        "attend.1",
        "attend/generic/bf16-e4m3fn/mixed",
        edit("Decode8(bits, 3, 7, true, false)", "Decode8(bits, 2, 15, false, false)", "elements.h"),
        costly=True,
    ),
    "e5m2fnuz by the bias of e5m2": Fault(
        "attend.14",
        "attend/generic/bf16-e5m2fnuz/mixed",
        edit("Decode8(bits, 2, 16, false, true)", "Decode8(bits, 2, 15, false, true)", "elements.h"),
        costly=True,
    ),
    "decode: values of the block's first head": Fault(
        "attend.6",
        DECODE("address"),
        edit("width, slots, pool.kv_heads, kv_head + h,", "width, slots, pool.kv_heads, kv_head,"),
    ),
    "decode: keys of the block's first head": Fault(
        "attend.6",
        "attend/generic/bf16/decode/d64-page16-group2/plain",
        edit("GatherKeys(pool, slots, kv_head + h,", "GatherKeys(pool, slots, kv_head,"),
        costly=True,
    ),
    "bfloat16 is cut off": Fault(
        "attend.1",
        MIXED("generic"),
        edit("(bits + 0x7fff + (bits >> 16 & 1)) >> 16", "bits >> 16", "elements.h"),
        costly=True,
    ),
    "float16 is cut off": Fault(
        "attend.1",
        "attend/generic/fp16/mixed",
        edit("size - 0x38000000u + 0xfff + (size >> 13 & 1)", "size - 0x38000000u", "elements.h"),
        costly=True,
    ),
    "subnormal float16 outputs are 0": Fault(
        "attend.1",
        "attend/generic/fp16/mixed",
        edit("sign | (BitsOf(OfBits(size) + 0.5f) & 0x7ff)", "sign", "elements.h"),
        costly=True,
    ),
    "LSE to base 2": Fault(
        "attend.11", MIXED("generic"), edit("std::log(static_cast", "std::log2(static_cast"), costly=True
    ),
    "an empty row's LSE is 0": Fault(
        "attend.8",
        "attend/census/bf16/decode/d128-page16-group4/empty-and-idle/plain",
        edit("width, 0.0f);\n    return kNothing;", "width, 0.0f);\n    return 0.0f;"),
        costly=True,
    ),
    "a padding token's LSE is 0": Fault(
        "invariant.3",
        "self/padding/bf16",
        edit("* heads, -std::numeric_limits<float>::infinity()", "* heads, 0.0f", "handlers.cc"),
        costly=True,
    ),
    "padding tokens are left as they are": Fault(
        "invariant.3",
        "self/padding/bf16",
        edit(
            "(outputs + live * heads * width * bytes, 0,", "(outputs + live * heads * width * bytes, 1,", "handlers.cc"
        ),
        costly=True,
    ),
}
"""Name -> fault."""

UNSEEN = {
    "masked values times 0": Fault(
        "attend.1", "nan_of_a_later_token", edit("group, values, low, high, state", "group, values, from, to, state")
    ),
    "blocks start at the chunk": Fault(
        "invariant.6",
        "chunks_under_a_window",
        edit("int64_t block = begin / kBlock * kBlock;", "int64_t block = begin;"),
    ),
    "subnormal numbers are flushed": Fault(
        "attend.1", "subnormal_values", edit("_mm_setcsr(0x1f80)", "_mm_setcsr(0x9fc0)", "team.h"), costly=True
    ),
    "subnormal float16 inputs are 0": Fault(
        "attend.1", "subnormal_values", edit("static_cast<float>(fraction) * 0x1p-24f", "0.0f", "elements.h")
    ),
    "zeros from below stay −0": Fault(
        "attend.10", "zeros_from_below", edit("half == 0x8000 ? 0 : half", "half", "elements.h")
    ),
    "exponential two terms short": Fault(
        "attend.1",
        "exponential",
        edit("Splat(1.9841270e-4f)", "Splat(0.0f)", "vector.h")
        + edit("Splat(1.3888889e-3f)", "Splat(0.0f)", "vector.h"),
        costly=True,
    ),
}
"""Faults that no case of the catalogue asks for; `case` is then a function of `test_cpu_unasked.py`."""

HARMLESS = {
    "items of another size": Fault("", "", edit("kMostTokens / group", "5 / group")),
    "exponential one term short": Fault("", "", edit("Splat(1.9841270e-4f)", "Splat(0.0f)", "vector.h")),
    "LSE in float32": Fault("", "", edit("std::log(static_cast<double>(total))", "std::log(total)")),
    "bfloat16 ties go up": Fault("", "", edit("0x7fff + (bits >> 16 & 1)", "0x8000", "elements.h")),
    "−0 of a sum kept": Fault("", "", edit("Select(out == Floats{}, Floats{}, out)", "out")),
}
"""Edits that a certificate of N0 allows: work cut elsewhere, errors below the declared, and what cannot come up."""

EVERY = {**FAULTS, **UNSEEN, **HARMLESS}

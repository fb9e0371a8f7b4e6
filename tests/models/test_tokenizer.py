"""Text to ids and back, and text that grows token by token."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from model_steps import drawn_decoder
from tiny_checkpoints import (
    CONFIG,
    LETTERS,
    MERGES,
    SPECIALS,
    TOKENS,
    gguf_tensors,
    hf_tensors,
    write_gguf,
    write_huggingface,
)

from paged.common import InvalidInputError
from paged.models.tokenizer import Tokenizer, byte_level_tokenizer

FIELDS = {"split": "smollm", "special": [0, 1, 2], "eos": (2, 0), "bos": 1}


def tokenizer(**changes):
    return byte_level_tokenizer(TOKENS, MERGES, **(FIELDS | changes))


TINY = tokenizer()


def streamed(tokens, **options):
    stream = TINY.stream(**options)
    return [stream.push(token) for token in tokens] + [stream.finish()]


@given(st.text(max_size=40))
@settings(deadline=None)
def test_text_comes_back(text):
    assert TINY.decode(TINY.encode(text), skip_special_tokens=False) == text


@given(st.lists(st.integers(0, TINY.vocab_size + 3) | st.integers(0, 2), max_size=60))
@example([97, *[0] * 20, 97])
@example([97, *[500] * 20])
@settings(deadline=None)
def test_streamed_pieces_join_to_the_decoded_text(tokens):
    """Whatever the tokens are: broken bytes and special tokens included."""
    for skip in (True, False):
        pieces = streamed(tokens, skip_special_tokens=skip)
        assert "".join(pieces) == TINY.decode(tokens, skip_special_tokens=skip)


@given(st.text(alphabet="aé€😀 ", max_size=30))
@settings(deadline=None)
def test_no_piece_holds_part_of_a_character(text):
    pieces = streamed(TINY.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_out_with_its_last_byte():
    assert streamed(TINY.encode("a😀b")) == ["a", "", "", "", "😀", "b", ""]


def test_an_unfinished_character_comes_out_at_the_end():
    assert streamed(TINY.encode("é")[:1]) == ["", "\ufffd"]


def test_a_long_run_of_broken_bytes_does_not_hold_text_back():
    broken = TINY.encode("😀")[1]
    pieces = streamed([broken] * 50)
    assert len("".join(pieces[:-1])) == 47
    assert "".join(pieces) == "\ufffd" * 50


def test_special_tokens_are_matched_whole_and_skipped_when_decoding():
    ids = TINY.encode("<|start|>he<|im_end|>")
    assert ids == [1, TINY.token_id("he"), 2]
    assert TINY.decode(ids) == "he"
    assert TINY.decode(ids, skip_special_tokens=False) == "<|start|>he<|im_end|>"
    assert [TINY.is_eos(i) for i in (0, 1, 2)] == [True, False, True]


def test_merges_and_the_cut_before_them():
    assert TINY.encode("hell") == [TINY.token_id("hell")]
    assert TINY.encode(" w") == [TINY.token_id("Ġw")]
    # llama.cpp's `smollm` cuts every digit off on its own; GPT-2 keeps a space with the digits after it.
    digits = [*MERGES, "4 2", "Ġ 4"]
    vocabulary = [*TOKENS, "42", "Ġ4"]
    for split, want in (("smollm", ["Ġ", "4", "2"]), ("gpt-2", ["Ġ", "42"])):
        made = byte_level_tokenizer(vocabulary, digits, **(FIELDS | {"split": split}))
        assert made.encode(" 42") == [made.token_id(t) for t in want]


def test_llama_bpe_prefers_whole_tokens_and_starts_every_text():
    made = byte_level_tokenizer([*TOKENS, "xyz"], MERGES, **(FIELDS | {"split": "llama-bpe", "add_bos": True}))
    assert made.encode("xyz") == [1, made.token_id("xyz")]
    assert made.encode("xyz", add_special_tokens=False) == [made.token_id("xyz")]
    assert tokenizer(add_bos=False).encode("he") == [TINY.token_id("he")]


def test_verbatim_tokens_are_matched_whole_and_kept():
    made = byte_level_tokenizer([*TOKENS, "<think>"], MERGES, verbatim=[len(TOKENS)], **FIELDS)
    assert made.encode("<think>") == [len(TOKENS)]
    assert made.decode([len(TOKENS)]) == "<think>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "tekken"}, r"pre-tokenizer 'tekken' is not implemented"),
        ({"eos": (263,)}, r"Tokenizer\.eos must be in 0\.\.262, got 263"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(InvalidInputError, match=message):
        tokenizer(**changes)


@pytest.mark.parametrize("merge", ["h", "h e l", "h zz", "h h"])
def test_a_merge_of_unknown_tokens_is_refused(merge):
    with pytest.raises(InvalidInputError, match=rf"merge 0 is '{merge}', not two known tokens that make one"):
        byte_level_tokenizer([*SPECIALS, *LETTERS], [merge], **FIELDS)


def test_a_repeated_token_is_refused():
    with pytest.raises(InvalidInputError, match=r"the token 'he' occurs twice"):
        byte_level_tokenizer([*TOKENS, "he"], MERGES, **FIELDS)


def test_ids_out_of_range_are_refused():
    with pytest.raises(InvalidInputError, match=r"Tokenizer\.decode\.tokens must be in 0\.\.2147483647, got -1"):
        TINY.decode([3, -1])


def test_the_fingerprint_follows_the_definition():
    same, others = tokenizer(), [tokenizer(eos=(2,)), tokenizer(split="gpt-2"), tokenizer(bos=0)]
    assert TINY.fingerprint == same.fingerprint
    assert len({TINY.fingerprint, *(t.fingerprint for t in others)}) == 4
    assert isinstance(TINY, Tokenizer)
    assert tokenizers.__version__


FORBIDDEN = ("torch", "transformers", "jetstream")

LOAD = """
import sys
for name in {forbidden}:
    sys.modules[name] = None  # importing it now fails, lazily or not
from paged.models.checkpoint import load_model
for source in {sources}:
    loaded = load_model(source)
    stream = loaded.tokenizer.stream()
    assert "".join(map(stream.push, loaded.tokenizer.encode("hello"))) + stream.finish() == "hello"
present = [m for m in sys.modules if m.split(".")[0] in {forbidden} and sys.modules[m] is not None]
assert not present, present
"""


def run_load(sources, forbidden=FORBIDDEN):
    code = LOAD.format(forbidden=forbidden, sources=[str(s) for s in sources])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_loading_and_tokenizing_need_no_torch_and_no_transformers(tmp_path):
    model = drawn_decoder(CONFIG, 0)
    file = write_gguf(tmp_path / "tiny.gguf", gguf_tensors(model))
    directory = write_huggingface(tmp_path / "hf", hf_tensors(model))
    done = run_load([file, directory])
    assert done.returncode == 0, done.stderr
    assert "tokenizers" in run_load([], (*FORBIDDEN, "tokenizers")).stderr


def imported(source):
    """Top-level names that a source imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_no_source_imports_them():
    """The cause, not the symptom: transformers imports torch only when something asks for it."""
    for path in Path(__file__).parents[2].joinpath("paged").rglob("*.py"):
        assert not set(imported(path.read_text())) & set(FORBIDDEN), path


def test_the_search_finds_an_import_inside_a_function():
    assert set(imported("def f():\n    import torch.nn as nn\n    from transformers.x import y")) == {
        "torch",
        "transformers",
    }

"""Text to token ids and back, with `tokenizers` alone: no torch and no transformers (requirement E6)."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from paged.common.checks import check_int
from paged.common.errors import InvalidInputError

_UNFINISHED = "\ufffd"
_WINDOW = 16

_LLAMA3_SPLIT = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Llama 3's cut: contractions, words, runs of up to three digits, punctuation, line ends, spaces."""


class Tokenizer:
    """Encode, decode, and stream text.

    - `eos`: every id that ends a text. `bos`: the id that starts one, or None; `encode` adds it if the model's
      tokenizer does.
    - `chat_template`: the model's Jinja template as text, or None. It is not run here.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos: Iterable[int],
        bos: int | None = None,
        chat_template: str | None = None,
    ):
        self._backend = backend
        self.eos = tuple(check_int("Tokenizer", "eos", t, minimum=0, maximum=self.vocab_size - 1) for t in eos)
        self.bos = bos
        self.chat_template = chat_template

    @property
    def vocab_size(self) -> int:
        """Ids are below this; a model's vocabulary may be padded beyond it."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @functools.cached_property
    def fingerprint(self) -> str:
        """`sha256:…` over the tokenizer's whole definition, special tokens and the ids that end a text included."""
        digest = hashlib.sha256(self._backend.to_str().encode())
        digest.update(repr((self.eos, self.bos)).encode())
        return f"sha256:{digest.hexdigest()}"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written out in it, e.g. `<|im_end|>`, become their ids.

        `add_special_tokens`: also add what the tokenizer puts around every text, such as the id that starts one.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are no UTF-8 become U+FFFD; an id without a token (a padded vocabulary has
        some) gives nothing. Raises `InvalidInputError` for what is no id at all."""
        ids = [check_int("Tokenizer.decode", "tokens", t, minimum=0, maximum=2**31 - 1) for t in tokens]
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def has_text(self, token: int, *, skip_special_tokens: bool = True) -> bool:
        """Whether `decode` looks at this id, rather than pass over it as special or unknown."""
        if self._backend.id_to_token(token) is None:
            return False
        return not (skip_special_tokens and token in self._special)

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its own spelling, special tokens included, or None."""
        return self._backend.token_to_id(token)

    def is_eos(self, token: int) -> bool:
        """Whether `token` ends a text."""
        return token in self.eos

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """An incremental decoder for one sequence."""
        return TextStream(self, skip_special_tokens=skip_special_tokens)


class TextStream:
    """Text of a sequence that grows token by token; a character is never handed out in parts.

    The pieces of `push` and the last one of `finish` join to `Tokenizer.decode` of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool):
        self._decode = functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._has_text = functools.partial(tokenizer.has_text, skip_special_tokens=skip_special_tokens)
        # Text is decoded over a sliding window of ids that have text: a character has at most four bytes, so its ids
        # are all in it, and what a decoder strips or joins at the start of a text was handed out before.
        self._window: list[int] = []
        self._given = 0

    def push(self, token: int) -> str:
        """The text that became certain with this token; may be empty."""
        if not self._has_text(token):
            return ""
        self._window.append(token)
        piece = self._take(self._certain())
        if len(self._window) > _WINDOW:
            self._window = self._window[-_WINDOW // 2 :]
            self._given = len(self._certain())
        return piece

    def finish(self) -> str:
        """What `push` still held back: characters that never became complete, as U+FFFD."""
        return self._take(self._decode(self._window))

    def _certain(self) -> str:
        text = self._decode(self._window)
        held = text[-3:]  # the bytes of an unfinished character decode to at most three replacement characters
        return text[: len(text) - len(held)] + held.rstrip(_UNFINISHED)

    def _take(self, text: str) -> str:
        piece = text[self._given :]
        self._given = max(self._given, len(text))
        return piece


def tokenizer_from_json(
    path: Path, *, eos: Iterable[int], bos: int | None = None, chat_template: str | None = None
) -> Tokenizer:
    """A Hugging Face `tokenizer.json`. Raises `InvalidInputError` if it is damaged."""
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise InvalidInputError(f"{path} is not a tokenizer definition: {error}.") from None
    return Tokenizer(backend, eos=eos, bos=bos, chat_template=chat_template)


def _byte_level(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(kind: str) -> pre_tokenizers.PreTokenizer | None:
    """How text is cut before byte-pair merges, by llama.cpp's name for it."""
    if kind == "gpt-2":
        return _byte_level(use_regex=True)
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)])
    if kind == "llama-bpe":
        cut = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
        return pre_tokenizers.Sequence([cut, _byte_level(use_regex=False)])
    return None


def byte_level_tokenizer(
    tokens: Sequence[str],
    merges: Sequence[str],
    *,
    split: str,
    special: Iterable[int],
    verbatim: Iterable[int] = (),
    eos: Iterable[int],
    bos: int | None = None,
    add_bos: bool = False,
    chat_template: str | None = None,
) -> Tokenizer:
    """A GPT-2 style byte-level BPE tokenizer from a vocabulary and merges, as GGUF files carry them.

    - `tokens[i]`: spelling of id i. `merges`: pairs separated by one space, in order of rank.
    - `split`: `"gpt-2"`, `"smollm"` (digits apart, then GPT-2's cut) or `"llama-bpe"`.
    - `special`, `verbatim`: ids that are matched whole; the former are skipped when decoding.

    Raises `InvalidInputError` for another split, a repeated token, a malformed merge or one of unknown tokens.
    """
    cut = _split(split)
    if cut is None:
        raise InvalidInputError(f"pre-tokenizer {split!r} is not implemented, only gpt-2, smollm and llama-bpe are.")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(t for i, t in enumerate(tokens) if vocabulary[t] != i)
        raise InvalidInputError(f"tokenizer: the token {twice!r} occurs twice in the vocabulary.")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for rank, pair in enumerate(pairs):
        if len(pair) != 2 or any(part not in vocabulary for part in (*pair, "".join(pair))):
            raise InvalidInputError(f"tokenizer: merge {rank} is {merges[rank]!r}, not two known tokens that make one.")
    # Llama 3 takes a whole word that is a token as that token, whatever the merges would make of it.
    bpe = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=split == "llama-bpe")  # type: ignore[arg-type]
    backend = tokenizers.Tokenizer(bpe)
    backend.pre_tokenizer = cut  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in special])
    backend.add_tokens([AddedToken(tokens[i], special=False, normalized=False) for i in verbatim])
    if add_bos and bos is not None:
        start = (tokens[bos], bos)
        backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=[tokens[bos], "$A"], pair=[tokens[bos], "$A", "$B"], special_tokens=[start]
        )
    return Tokenizer(backend, eos=eos, bos=bos, chat_template=chat_template)

"""Text of a sequence as it grows: characters whole, and nothing after a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

_CONTEXT_TOKENS = 8


@runtime_checkable
class TextPieces(Protocol):
    """Text of a sequence that grows token by token."""

    def push(self, token: int) -> str:
        """The text that became certain with this token."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


@runtime_checkable
class TextCodec(Protocol):
    """What the engine needs of a tokenizer; `paged.models.tokenizer.Tokenizer` is one."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def stream(self) -> TextPieces:
        """An incremental decoder for one sequence, special tokens left out."""
        ...


def stream_after(codec: TextCodec, prompt: Sequence[int]) -> TextPieces:
    """A decoder that has seen the prompt's end: at the start of a text some tokenizers drop a leading space."""
    pieces = codec.stream()
    for token in prompt[-_CONTEXT_TOKENS:]:
        pieces.push(token)
    return pieces


class StopText:
    """Generated text that ends before the first of some stop strings.

    A stop string may begin in one token and end in another, so the end of the text is held back as long as it may be
    the beginning of one: what was handed out is never taken back.

    - `pieces`: the text's decoder; None stands for no text at all. `stop`: non-empty strings.
    """

    def __init__(self, pieces: TextPieces | None, stop: Sequence[str] = ()):
        self._pieces = pieces
        self._stop = tuple(stop)
        self._held = ""
        self.text = ""
        self.stopped_by: str | None = None

    def push(self, token: int) -> str:
        """The text that became certain with this token. After a stop string, `stopped_by` names it."""
        return "" if self._pieces is None else self._take(self._pieces.push(token))

    def finish(self) -> str:
        """What was held back: the sequence ends here, unless a stop string ended it before."""
        if self._pieces is None or self.stopped_by is not None:
            return ""
        out = self._take(self._pieces.finish())
        rest, self._held = self._held, ""
        self.text += rest
        return out + rest

    def _take(self, piece: str) -> str:
        if self.stopped_by is not None:
            return ""
        held = self._held + piece
        found = [(held.find(string), i) for i, string in enumerate(self._stop) if string in held]
        if found:
            at, which = min(found)
            self.stopped_by, self._held = self._stop[which], ""
            certain = held[:at]
        else:
            keep = max((_overlap(held, string) for string in self._stop), default=0)
            certain, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self.text += certain
        return certain


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that `string` begins with and does not end with."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)

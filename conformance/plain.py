"""Text that comes from a backend, made fit to be shown: nothing in it moves a cursor or poses as a line of ours."""

from __future__ import annotations

import re

# Controls, separators that end a line, marks that turn the writing direction, halves of surrogate pairs.
_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """`text` with everything but printable characters, tabs and line feeds spelled as an escape such as `\\x1b`."""
    return _UNFIT.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def indented(text: str) -> str:
    """`text` with every line but the first set in, so that none of them can be taken for another message."""
    return text.replace("\n", "\n      ")

"""Text that ends at a stop string, wherever tokens begin and end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.engine.text import StopText


class Pieces:
    """Token i of a list of pieces is the text pieces[i]; `held` is what a decoder would still hold at the end."""

    def __init__(self, pieces, held=""):
        self._pieces, self._held = pieces, held

    def push(self, token):
        return self._pieces[token]

    def finish(self):
        out, self._held = self._held, ""
        return out


def feed(pieces, stop, held=""):
    """Pieces handed out, the whole text, and what stopped it; the caller stops as the engine does."""
    text = StopText(Pieces(pieces, held), stop)
    out = []
    for token in range(len(pieces)):
        out.append(text.push(token))
        if text.stopped_by is not None:
            break
    out.append(text.finish())
    assert "".join(out) == text.text
    return out, text.text, text.stopped_by


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "by"),
    [
        (["ab", "cd", "ef"], ["cd"], "ab", "cd"),
        (["ab", "c", "de"], ["bcd"], "a", "bcd"),  # straddles three tokens
        (["ab", "cx", "de"], ["bcd"], "abcxde", None),
        (["aaab"], ["aab"], "a", "aab"),
        (["x", "a", "a", "a", "b"], ["aab"], "xa", "aab"),  # what was held back is partly let go
        (["hello END", " more"], ["END", "hello E"], "", "hello E"),  # the first in the text, not in the list
        (["ab"], ["b", "ab"], "", "ab"),
        (["ab"], [], "ab", None),
    ],
)
def test_the_text_ends_before_the_first_stop_string(pieces, stop, text, by):
    assert feed(pieces, stop)[1:] == (text, by)


def test_what_may_begin_a_stop_string_is_held_back_and_given_at_the_end():
    out, text, by = feed(["one EN", "D", "x"], ["END!"])
    assert out[:3] == ["one ", "", "ENDx"]
    assert (text, by) == ("one ENDx", None)
    assert feed(["one EN"], ["END!"])[0] == ["one ", "EN"]


def test_a_stop_string_that_the_decoder_only_gives_at_the_end_counts():
    assert feed(["ab"], ["\ufffd"], held="c\ufffd")[1:] == ("abc", "\ufffd")


def test_without_a_tokenizer_there_is_no_text():
    text = StopText(None)
    assert (text.push(5), text.finish(), text.text) == ("", "", "")


@given(
    st.lists(st.text("abc", max_size=4), max_size=8),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_any_cut_into_tokens_gives_the_text_of_the_whole(pieces, stop):
    _, text, by = feed(pieces, stop)
    whole = "".join(pieces)
    # The engine stops at the token that completes a stop string, so later ones are never seen.
    ends = [n for n in range(1, len(pieces) + 1) if any(s in "".join(pieces[:n]) for s in stop)]
    seen = "".join(pieces[: ends[0]]) if ends else whole
    first = min((seen.find(s) for s in stop if s in seen), default=None)
    assert text == (whole if first is None else seen[:first])
    assert (by is None) == (first is None)

"""The page: every string that comes from a backend is escaped, and every part of a certificate is on it."""

import html.parser

import pytest

from conformance import certificate, page
from conformance.case import Case, Result

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]


def make(text, status="fail"):
    cases = [
        Case(id=f"a/{t}", tier=t, level="core", generator="g", params={}, clause=("attend.1",), needs=("window",))
        for t in (1, 3)
    ]
    results = [
        Result(id="a/1", status="pass", elements=1, decided=1),
        Result(id="a/3", status=status, diagnosis=text, clause=text, elements=10, details={"x": text}),
    ]
    waiver = {
        "case": text,
        "reason": text,
        "issue": text,
        "until": text,
        "problem": text,
        "matched": [],
        "applies": True,
    }
    body = certificate.build(
        cases=cases, results=results, level="core", complete=False, waivers=[waiver],
        suite={"tree": text, "mutants": text},
        backend={"entry_point": text, "distribution": text, "packages": {text: text}},
        claims={"features": [text], "numerics": text, text: {"low": 1, "high": text, "powers_of_two": True}},
        environment={"device": text, "jax": text, text: text},
    )  # fmt: skip
    return certificate.seal(body, {"host": text, text: text})


@pytest.mark.parametrize("status", ["fail", "not-claimed"])
def test_nothing_from_a_backend_becomes_markup(status):
    honest, evil = Tags(), Tags()
    honest.feed(page.render(make("plain", status), ["plain"]))
    text = page.render(make(EVIL, status), [EVIL])
    evil.feed(text)
    assert evil.tags == honest.tags
    assert evil.attributes == honest.attributes
    assert "script" not in evil.tags
    assert EVIL not in text
    assert "&lt;script&gt;" in text


@pytest.mark.parametrize("whole", [True, False])
def test_the_page_says_how_much_of_a_level_was_run_where_it_was_a_part(whole):
    made = make("plain")
    if whole:
        made["body"].pop("selection", None)
    else:
        made["body"]["selection"] = {"run": 1, "of": 9, "untouched": {"dtypes": ["float32"]}}
    text = page.render(made)
    assert ("in 1 of 9 cases of level" in text) is not whole
    assert ("A part of a level certifies nothing" in text) is not whole


def test_the_page_loads_nothing_from_elsewhere():
    text = page.render(make("plain"))
    assert "default-src 'none'" in text
    assert "http" not in text.replace('http-equiv="', "")


def test_values_are_short():
    assert page._value([4, *range(8, 513, 8), 1000]) == "4, 8 to 512 in steps of 8, 1000"
    assert page._value([]) == "none"
    assert page._value({"low": 1, "high": 64, "powers_of_two": True}) == "1 to 64, powers of two"
    assert page._value(["a", "b"]) == "a, b"


@pytest.mark.parametrize(
    ("claims", "model", "said"),
    [
        ("exact", {"exact": True}, "exact: float64 inside"),
        ("N1n", {"weights": "input", "partials": "output", "normalised": True, "exp_error_log2": -22.0}, "normalised"),
        ("?", {}, "weights in ?"),
    ],
)
def test_the_numerics_line(claims, model, said):
    body = {"claims": {"numerics": claims}, "backend": {"numerics": model}}
    assert said in page.numerics_line(body)


def test_the_kill_matrix_is_shown_where_it_is_that_of_the_suite():
    matrix = {"matrix": {"no_window": {"clause": "attend.4", "by": {"a": "census", "b": "census", "c": "bounds"}}}}
    html = page.render(make("why"), matrix=matrix)
    assert "ignores the window" in html
    assert "census 2" in html
    assert "bounds 1" in html
    assert "Broken backends that the suite catches" not in page.render(make("why"))


def test_a_compiled_library_is_named_at_the_top():
    made = make("plain")
    assert "<b>Library</b>" not in page.render(made)
    made["body"]["backend"]["build"] = {"library": "sha256:ab", "compiler": "c++ 1", "flags": ["-O3", "-fPIC"]}
    text = page.render(made)
    assert "<code>sha256:ab</code>, compiled by c++ 1;" in text
    assert "<dt>build flags</dt><dd>-O3, -fPIC</dd>" in text
    made["body"]["backend"]["build"] = "no mapping"
    assert "<b>Library</b>" not in page.render(made)

"""The journal: resuming, torn lines, deaths."""

from conformance.case import Result
from conformance.journal import Journal


def test_results_survive_and_another_key_starts_afresh(tmp_path):
    path = tmp_path / "j" / "x.jsonl"
    with Journal(path, "key") as journal:
        journal.start("a")
        journal.finish(Result(id="a", status="pass", details={"n": 1}))
        journal.start("b")
    with Journal(path, "key") as again:
        assert again.results == {"a": Result(id="a", status="pass", details={"n": 1})}
        assert again.deaths == {"b": 1}
        again.start("b")
    with Journal(path, "key") as third:
        assert third.deaths == {"b": 2}
    for key in ("other", "key"):
        with Journal(path, key) as fresh:
            assert fresh.results == {}


def test_a_last_line_without_its_end_is_not_glued_to_the_next(tmp_path):
    path = tmp_path / "x"
    with Journal(path, "key") as journal:
        journal.finish(Result(id="a", status="pass"))
    path.write_text(path.read_text().rstrip("\n"))
    with Journal(path, "key") as second:
        second.finish(Result(id="b", status="pass"))
    with Journal(path, "key") as third:
        assert list(third.results) == ["a", "b"]


def test_an_interruption_is_forgiven(tmp_path):
    with Journal(tmp_path / "x", "key") as journal:
        journal.start("a")
        journal.forgive("a")
    with Journal(tmp_path / "x", "key") as again:
        assert again.deaths == {}


def test_a_torn_line_is_dropped_and_what_follows_is_kept_apart(tmp_path):
    path = tmp_path / "x"
    with Journal(path, "key") as journal:
        journal.finish(Result(id="a", status="pass"))
    with path.open("a") as file:
        file.write('{"result": {"id": "b", "sta')
    with Journal(path, "key") as second:
        assert list(second.results) == ["a"]
        second.finish(Result(id="c", status="fail"))
    with Journal(path, "key") as third:
        assert list(third.results) == ["a", "c"]


def test_discard_removes_the_file(tmp_path):
    journal = Journal(tmp_path / "x", "key")
    journal.discard()
    assert not (tmp_path / "x").exists()


def test_a_run_in_progress_keeps_its_file(tmp_path):
    with Journal(tmp_path / "x.jsonl", "key") as first:
        first.finish(Result(id="a", status="pass"))
        with Journal(tmp_path / "x.jsonl", "key") as second:
            assert second.path != first.path
            assert second.results == {}
            second.discard()
    with Journal(tmp_path / "x.jsonl", "key", fresh=True) as third:
        assert third.results == {}

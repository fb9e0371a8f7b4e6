"""The catalogue: cases as data, validated when they are loaded.

A file `catalogue/v1/*.json` is `{"schema": 1, "cases": [case, …]}`, a case being an object with the fields of
`conformance.case.Case`. `retracted.toml` withdraws cases: `[[retracted]]` tables with `id`, `reason`, `issue`, and
optionally `replacement`. A retracted case stays in its file, so that an old certificate can still be read, and is not
run. Nothing here names a module or a path to import: a case is data (requirement X5).
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from conformance.canonical import digest, dumps
from conformance.case import LEVELS, Case
from paged.common.errors import InvalidInputError

VERSION = "v1"
DIRECTORY = Path(__file__).parent / "catalogue" / VERSION
SCHEMA = 1

SELECTIONS: Mapping[str, tuple[str, ...]] = {
    "move": ("move",),
    "core": ("move", "core"),
    "sharded": ("move", "core", "sharded"),
    "serving": ("move", "core", "serving"),
    "all": ("move", "core", "sharded", "serving"),
    "long": ("move", "core", "long"),
}
"""What `--level` runs: `core` contains `move`, the others contain `core`; `all` is all but the long contexts."""

MAX_PARAM_DEPTH = 4
MAX_PARAM_ITEMS = 4096
MAX_PARAM_INT = 2**31
MAX_TEXT = 1000

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+=,-]*(/[A-Za-z0-9][A-Za-z0-9_.+=,-]*)*\Z")
_CLAUSE = re.compile(r"[a-z]+\.[0-9]+\Z")
_NEED = re.compile(r"[a-z_]+(:[A-Za-z0-9_.-]+)?\Z")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retraction:
    """A case withdrawn by the suite: a fault of ours, never of a backend."""

    id: str
    reason: str
    issue: str
    replacement: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Earlier:
    """A catalogue that certificates were made with before cases were added: its digest, the ids of its cases, and a
    digest of what those cases ask, which must never move."""

    digest: str
    ids: tuple[str, ...]
    questions: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Catalogue:
    """All cases of one catalogue version, in the order of their ids, retracted ones included.

    `digest` covers every case and retraction, so two certificates with one digest were asked the same questions.
    """

    version: str
    cases: tuple[Case, ...]
    retracted: tuple[Retraction, ...] = ()
    earlier: tuple[Earlier, ...] = ()

    def at(self, digest: str | None) -> Catalogue | None:
        """This catalogue as it was when its digest was the given one; None if it never was, as far as is recorded.

        Cases are added and never changed, so an earlier catalogue is a part of this one.
        """
        if digest == self.digest:
            return self
        for one in self.earlier:
            if one.digest == digest:
                known = frozenset(one.ids)
                return dataclasses.replace(self, cases=tuple(c for c in self.cases if c.id in known), earlier=())
        return None

    @property
    def digest(self) -> str:
        """`sha256:…` of the cases and retractions."""
        return digest([[case_to_json(c) for c in self.cases], [dataclasses.asdict(r) for r in self.retracted]])

    def select(self, level: str = "all", *, quick: bool = False) -> tuple[Case, ...]:
        """Cases to run at a level, retracted ones left out; with `quick` only the stratified tenth."""
        if level not in SELECTIONS:
            raise InvalidInputError(f"level must be one of {', '.join(SELECTIONS)}; got {level!r}.")
        gone = {r.id for r in self.retracted}
        wanted = SELECTIONS[level]
        return tuple(c for c in self.cases if c.level in wanted and c.id not in gone and (c.quick or not quick))

    def case(self, case_id: str) -> Case:
        """The case of that id; an error that names near ones if there is none."""
        for case in self.cases:
            if case.id == case_id:
                return case
        import difflib

        near = difflib.get_close_matches(case_id, [c.id for c in self.cases], n=3, cutoff=0.3)
        raise InvalidInputError(f"no case {case_id!r} in catalogue {self.version}. Near: {', '.join(near) or 'none'}.")


def load(directory: Path | None = None) -> Catalogue:
    """Load and validate a catalogue directory, by default the one shipped with the suite.

    Raises `InvalidInputError` naming the file, the case and the field for anything that does not fit, for an id used
    twice, and for a retraction of a case that does not exist.
    """
    directory = DIRECTORY if directory is None else Path(directory)
    files = sorted(directory.glob("*.json"))
    if not files:
        raise InvalidInputError(f"no catalogue in {directory}: expected *.json files there.")
    seen: dict[str, str] = {}
    cases: list[Case] = []
    for file in files:
        for case in _load_file(file):
            if case.id in seen:
                raise InvalidInputError(f"case {case.id!r} is in {seen[case.id]} and again in {file.name}.")
            seen[case.id] = file.name
            cases.append(case)
    retracted = load_retractions(directory / "retracted.toml", set(seen))
    earlier = _load_earlier(directory / "record" / "earlier.json")
    cases.sort(key=lambda c: c.id)
    return Catalogue(version=directory.name, cases=tuple(cases), retracted=retracted, earlier=earlier)


def questions(cases: Iterable[Case]) -> str:
    """Digest of what cases ask of a backend: everything but what the suite says about them."""
    said = ("clause", "flags", "kills", "quick")
    return digest([{k: v for k, v in case_to_json(case).items() if k not in said} for case in cases])


def _load_earlier(file: Path) -> tuple[Earlier, ...]:
    if not file.exists():
        return ()
    entries = json.loads(file.read_text("utf-8"))
    return tuple(Earlier(digest=e["digest"], ids=tuple(e["ids"]), questions=e["questions"]) for e in entries)


def by_program(cases: Iterable[Case]) -> list[Case]:
    """The cases in an order that puts those likely to share a compiled program next to each other."""
    first = ("mesh", "dtype", "kv_dtype", "q_heads", "kv_heads", "head_dim", "page", "num_pages", "layers", "rung")

    def key(case: Case) -> tuple[str, ...]:
        params = case.params
        return (*(dumps(params.get(name)) for name in first), case.generator, case.id)

    return sorted(cases, key=key)


def _load_file(file: Path) -> Iterable[Case]:
    try:
        data = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise InvalidInputError(f"{file.name} is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("cases"), list):
        raise InvalidInputError(f'{file.name} must be an object {{"schema": {SCHEMA}, "cases": [...]}}.')
    for index, entry in enumerate(data["cases"]):
        yield parse_case(entry, f"{file.name}, case {index}")


def load_retractions(file: Path, known: set[str]) -> tuple[Retraction, ...]:
    """Retractions of a TOML file, none if it does not exist; ids outside `known` are refused."""
    if not file.exists():
        return ()
    try:
        data = tomllib.loads(file.read_text("utf-8"))
        entries = data.pop("retracted", [])
        found = tuple(Retraction(**entry) for entry in entries)
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise InvalidInputError(f"{file.name}: {error}. A [[retracted]] table has id, reason and issue.") from None
    if data:
        raise InvalidInputError(f"{file.name}: unknown key {sorted(data)[0]!r}; only [[retracted]] is read.")
    for entry in found:
        if not all(isinstance(v, str) and v for v in (entry.id, entry.reason, entry.issue)):
            raise InvalidInputError(f"{file.name}: retraction {entry.id!r} needs a non-empty id, reason and issue.")
        for case_id in filter(None, (entry.id, entry.replacement)):
            if case_id not in known:
                raise InvalidInputError(f"{file.name}: {case_id!r} is not a case of this catalogue.")
    return tuple(sorted(found, key=lambda r: r.id))


def case_to_json(case: Case) -> dict[str, Any]:
    """The case as JSON-able data; fields that hold their default are left out."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(Case):
        value = getattr(case, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        value = list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
        if value != (list(default) if isinstance(default, tuple) else default):
            out[field.name] = value
    return out


def parse_case(entry: Any, where: str) -> Case:
    """A validated `Case` of JSON data, from a catalogue or a `repro.json`; `where` begins every message."""
    if not isinstance(entry, dict):
        raise InvalidInputError(f"{where}: expected an object, got {type(entry).__name__}.")
    where = f"{where} ({entry.get('id')!r})"
    names = {f.name for f in dataclasses.fields(Case)}
    if unknown := sorted(set(entry) - names):
        raise InvalidInputError(f"{where}: unknown field {unknown[0]!r}; a case has {', '.join(sorted(names))}.")
    required = ("id", "tier", "level", "generator", "params", "clause")
    if missing := [name for name in required if name not in entry]:
        raise InvalidInputError(f"{where}: field {missing[0]!r} is missing.")
    _match(where, "id", entry["id"], _ID)
    if type(entry["tier"]) is not int or not 0 <= entry["tier"] <= 4:
        raise InvalidInputError(f"{where}: tier must be an int in 0..4, got {entry['tier']!r}.")
    if entry["level"] not in LEVELS:
        raise InvalidInputError(f"{where}: level must be one of {', '.join(LEVELS)}; got {entry['level']!r}.")
    if not isinstance(entry.get("quick", False), bool):
        raise InvalidInputError(f"{where}: quick must be true or false, got {entry['quick']!r}.")
    if not isinstance(entry["params"], dict):
        raise InvalidInputError(f"{where}: params must be an object.")
    _check_param(where, "params", entry["params"], MAX_PARAM_DEPTH)
    _check_generator(where, entry["generator"])
    values = dict(entry)
    for field, pattern in (("clause", _CLAUSE), ("needs", _NEED), ("kills", None)):
        values[field] = _texts(where, field, entry.get(field, []), pattern)
    if not values["clause"]:
        raise InvalidInputError(f"{where}: clause is empty; name the clauses of docs/semantics.md that the case tests.")
    flags = entry.get("flags", {})
    if not isinstance(flags, dict) or not all(_is_text(k) and _is_text(v) for k, v in flags.items()):
        raise InvalidInputError(f"{where}: flags must map hint names to text.")
    for field in ("inputs", "expected"):
        if entry.get(field) is not None:
            _match(where, field, entry[field], _DIGEST)
    return Case(**values)


def _check_generator(where: str, name: Any) -> None:
    from conformance.vectors import GENERATORS

    if not isinstance(name, str) or name not in GENERATORS:
        raise InvalidInputError(f"{where}: generator must be one of {', '.join(sorted(GENERATORS))}; got {name!r}.")


def _check_param(where: str, path: str, value: Any, depth: int) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise InvalidInputError(f"{where}: {path} has {len(value)} characters, at most {MAX_TEXT}.")
    elif isinstance(value, int):
        if abs(value) > MAX_PARAM_INT:
            raise InvalidInputError(f"{where}: {path} = {value} is outside ±2^31.")
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise InvalidInputError(f"{where}: {path} = {value} is not finite.")
    elif isinstance(value, (list, dict)):
        if depth == 0 or len(value) > MAX_PARAM_ITEMS:
            raise InvalidInputError(
                f"{where}: {path} is nested deeper than {MAX_PARAM_DEPTH} or has more than {MAX_PARAM_ITEMS} items."
            )
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            _check_param(where, f"{path}.{key}", item, depth - 1)
    else:
        raise InvalidInputError(f"{where}: {path} is a {type(value).__name__}, which JSON does not have.")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT


def _match(where: str, field: str, value: Any, pattern: re.Pattern[str]) -> None:
    if not _is_text(value) or not pattern.match(value):
        raise InvalidInputError(f"{where}: {field} {value!r} does not match {pattern.pattern!r}.")


def _texts(where: str, field: str, value: Any, pattern: re.Pattern[str] | None) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(_is_text(v) for v in value):
        raise InvalidInputError(f"{where}: {field} must be a list of texts, got {value!r}.")
    for item in value:
        if pattern is not None:
            _match(where, field, item, pattern)
    if len(set(value)) != len(value):
        raise InvalidInputError(f"{where}: {field} names an entry twice.")
    return tuple(value)

"""A run's results as they come, one JSON line each, so that a run that died can be resumed.

The first line is a key over what decides results: backend sources, catalogue, environment. A journal with another key
is not read. Before a case runs its start is noted; a start without a result is a case during which the process died.
The first such death is taken for an accident and the case is run again; the second is recorded as an error.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from conformance.case import STATUSES, Result
from conformance.plain import plain

MAX_DEATHS = 2


def result_from_json(entry: Mapping[str, Any]) -> Result:
    """A `Result` of JSON data, its diagnosis made fit to be shown; `ValueError` if it is none."""
    try:
        result = Result(**entry)
    except TypeError as error:
        raise ValueError(f"not a result: {error}") from None
    if result.status not in STATUSES:
        raise ValueError(f"{result.id!r} has the status {result.status!r}")
    return dataclasses.replace(result, diagnosis=plain(result.diagnosis))


class Journal:
    """Append-only record of one run.

    - `results`: what was finished before this process opened it. `deaths`: case -> starts without a result.
    - `fresh`: forget what is there. `path`: where it lies; a run in progress keeps its own file, and another run of
      the same key begins one beside it.
    """

    def __init__(self, path: Path, key: str, *, fresh: bool = False):
        self.results: dict[str, Result] = {}
        self.deaths: dict[str, int] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._file = _locked(path)
        self._file.seek(0)
        kept = [] if fresh else self._read(self._file.read().splitlines(keepends=True), key)
        if not kept:
            self.results, self.deaths = {}, {}
        self._file.truncate(0)
        self._file.write("".join(kept) if kept else json.dumps({"key": key}) + "\n")
        self._file.flush()

    def _read(self, lines: list[str], key: str) -> list[str]:
        """The lines that can be used: none of another run's, and nothing after one that a crash tore."""
        try:
            if not lines or json.loads(lines[0]) != {"key": key}:
                return []
        except ValueError:
            return []
        kept = [lines[0]]
        for line in lines[1:]:
            try:
                entry = json.loads(line)
                if "start" in entry:
                    self.deaths[entry["start"]] = self.deaths.get(entry["start"], 0) + 1
                elif "forgive" in entry:
                    self.deaths.pop(entry["forgive"], None)
                else:
                    result = result_from_json(entry["result"])
                    self.results[result.id] = result
                    self.deaths.pop(result.id, None)
            except (ValueError, KeyError, TypeError):
                break
            kept.append(line.rstrip("\n") + "\n")
        return kept

    def start(self, case_id: str) -> None:
        """Note that a case is about to run."""
        self._write({"start": case_id})

    def forgive(self, case_id: str) -> None:
        """Note that a case was interrupted from outside, which says nothing about it."""
        self._write({"forgive": case_id})

    def finish(self, result: Result) -> None:
        """Note a result."""
        self.results[result.id] = result
        self._write({"result": dataclasses.asdict(result)})

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; it stays."""
        self._file.close()

    def discard(self) -> None:
        """The run is complete: close and remove the file."""
        self.close()
        self.path.unlink(missing_ok=True)


def _locked(path: Path) -> tuple[Path, TextIO]:
    """The file, opened and locked; another one beside it if a run in progress has it."""
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return _locked(path.with_suffix(f".{os.getpid()}{path.suffix}"))
    return path, file

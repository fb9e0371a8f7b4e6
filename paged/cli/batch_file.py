"""Prompts of `paged generate --input` as JSON lines, and a line of JSON for each completion as it ends."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import io
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from paged.common.checks import show
from paged.common.errors import InvalidInputError

if TYPE_CHECKING:
    from paged.engine import CompletionOutput, SamplingParams

OWN_FIELDS = ("prompt", "id")


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the input: `number` from 1; `id` as given, None without one."""

    number: int
    id: str | int | None
    prompt: str | list[int]
    params: SamplingParams


def read(path: str, defaults: SamplingParams) -> list[Line]:
    """All lines of a file of prompts; a wrong one refuses the whole file, before anything runs.

    A line is an object with `prompt`, a text or token ids; if wanted, `id`, a text or a number that its results bear;
    and any field of `SamplingParams`, where `defaults` has the others. Raises `InvalidInputError` naming the line, the
    field and the value.
    """
    lines: list[Line] = []
    seen: dict[str | int, int] = {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror}. Give a file of JSON lines.") from None
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} is not UTF-8 text ({error.reason}, byte {error.start}).") from None
    for number, raw in enumerate(text.removesuffix("\n").split("\n"), 1):
        line = _line(f"{path}, line {number}", number, raw, defaults)
        if line.id is not None and seen.setdefault(line.id, number) != number:
            raise InvalidInputError(
                f"{path}, line {number}: id {show(line.id)} is that of line {seen[line.id]}, too. Give each its own."
            )
        lines.append(line)
    return lines


def _line(where: str, number: int, raw: str, defaults: SamplingParams) -> Line:
    if not raw.strip():
        raise InvalidInputError(f'{where} is blank. Each line is an object, such as {{"prompt": "Once"}}.')

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entry: dict[str, Any] = {}
        for key, value in pairs:
            if key in entry:
                raise InvalidInputError(f"{where}: {show(key)} is there twice. Give it once.")
            entry[key] = value
        return entry

    try:
        entry = json.loads(raw, object_pairs_hook=once)
    except InvalidInputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where} is not JSON ({error}): {show(raw)}.") from None
    if not isinstance(entry, dict) or "prompt" not in entry:
        raise InvalidInputError(f"{where} must be an object with a 'prompt', got {show(entry)}.")
    fields = [field.name for field in dataclasses.fields(defaults)]
    if unknown := [key for key in entry if key not in (*OWN_FIELDS, *fields)]:
        there = ", ".join([*OWN_FIELDS, *fields])
        raise InvalidInputError(f"{where}: there is no field {show(unknown[0])}, but {there}.")
    known = entry.get("id")
    if isinstance(known, bool) or not (known is None or isinstance(known, (str, int))):
        raise InvalidInputError(f"{where}: id must be a text or a whole number, got {show(known)}.")
    if isinstance(known, str):
        _encodable(f"{where}: id", known)
    try:
        params = dataclasses.replace(defaults, **{key: entry[key] for key in fields if key in entry})
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}: {error}") from None
    return Line(number, known, prompt_of(f"{where}: prompt", entry["prompt"]), params)


def prompt_of(where: str, prompt: object) -> str | list[int]:
    """A prompt whose type is right; whether ids are in the vocabulary only the model can say."""
    if isinstance(prompt, list):
        if not prompt or not all(type(i) is int for i in prompt):
            raise InvalidInputError(f"{where} must be token ids, at least one; got {show(prompt)}.")
        return prompt
    if not isinstance(prompt, str) or not prompt:
        raise InvalidInputError(f"{where} must be a text that is not empty, or token ids; got {show(prompt)}.")
    _encodable(where, prompt)
    return prompt


def _encodable(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{where} is no text: {error.reason} at character {error.start}.") from None


class Results:
    """Where completions go as they end, a line each, flushed line by line: what was finished survives a kill."""

    def __init__(self, stream: TextIO | io.TextIOBase, lines: list[Line]):
        self._stream, self.lines = stream, lines
        self.written = 0

    def put(self, output: CompletionOutput) -> None:
        """One line. `line` is the number of the input's line."""
        line = self.lines[output.request]
        entry: dict[str, Any] = {"line": line.number}
        if line.id is not None:
            entry["id"] = line.id
        entry |= {"sample": output.sample, **fields_of(output)}
        try:
            self._stream.write(as_json(entry, self._stream.encoding) + "\n")
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise InvalidInputError(
                f"cannot write the result of line {line.number}: {error.strerror}. {self.written} results were written."
            ) from None
        self.written += 1


def as_json(value: object, encoding: str | None) -> str:
    """JSON on one line, in characters that a stream's `encoding` has; None for one that takes any."""
    anything = encoding is None or codecs.lookup(encoding).name == "utf-8"
    return json.dumps(value, ensure_ascii=not anything, allow_nan=False)


def _number(logprob: float) -> float | None:
    return logprob if math.isfinite(logprob) else None


def _pairs(top: Sequence[tuple[int, float]]) -> list[tuple[int, float | None]]:
    return [(token, _number(logprob)) for token, logprob in top]


def fields_of(output: CompletionOutput) -> dict[str, Any]:
    """What JSON tells of a completion, besides which one it is. A log probability that is not finite is null there."""
    entry: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "logprobs": [_number(p) for p in output.logprobs],
    }
    entry |= {"finish_reason": output.finish_reason}
    for name in ("error", "stop_reason", "seed"):
        if (value := getattr(output, name)) is not None:
            entry[name] = value
    if output.top_logprobs:
        entry["top_logprobs"] = [_pairs(top) for top in output.top_logprobs]
    if output.prompt_logprobs is not None:
        entry["prompt_logprobs"] = [
            token and {"logprob": _number(token.logprob), "top": _pairs(token.top)} for token in output.prompt_logprobs
        ]
    return entry


@contextlib.contextmanager
def opened(path: str | None) -> Iterator[TextIO | io.TextIOBase]:
    """The file to write to, which must not be there yet, or stdout: results of an earlier run are never overwritten.

    Where nothing was written because of an error, no file stays.
    """
    if path is None:
        yield sys.stdout
        return
    there = Path(path)
    try:
        # A pipe or a device has no results to lose.
        file = there.open("w" if there.exists() and not there.is_file() else "x", encoding="utf-8")
    except FileExistsError:
        raise InvalidInputError(f"{path} is there already. Remove it, or give --output another name.") from None
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror}.") from None
    try:
        yield file
    except BaseException:
        with contextlib.suppress(OSError):  # what could not be written before cannot be now
            file.close()
        if there.is_file() and not there.stat().st_size:
            there.unlink()
        raise
    file.close()

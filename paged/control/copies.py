"""Copy-on-write: which shared pages wait to be copied before their holder may write into them (requirement C9)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paged.control.batch import Batch

_NO_PAGES = np.zeros(0, np.int32)


class PendingCopy(NamedTuple):
    """A row's partly filled page `source`, its page `number` in token order, will be replaced by `target`."""

    number: int
    source: int
    target: int


class CopyLedger:
    """Copies that were reserved and are not confirmed, at most one for each row of the map.

    Until it is confirmed the row lists, and holds a reference to, the source; the ledger holds the target.
    """

    def __init__(self) -> None:
        self.pending: dict[int, PendingCopy] = {}

    def wanted(
        self, batch: Batch, first: np.ndarray, shared: np.ndarray, references: np.ndarray
    ) -> list[tuple[int, int, int]]:
        """(row, page number, source) of each copy that the batch needs beyond the pending ones.

        `first` (rows,): the page that each slice's first token goes to; `shared` (rows,): it has more holders than one.
        Of the holders that write into a page the last one that is left keeps it, so k writers never take k copies of
        a page that k requests hold.
        """
        leaving: dict[int, int] = {}
        for copy in self.pending.values():
            leaving[copy.source] = leaving.get(copy.source, 0) + 1
        out = []
        for i in np.flatnonzero(shared).tolist():
            row, source = int(batch.rows[i]), int(first[i])
            left = int(references[source]) - leaving.get(source, 0)
            if row not in self.pending and left > 1:
                leaving[source] = leaving.get(source, 0) + 1
                out.append((row, int(batch.first_pages[i]), source))
        return out

    def add(self, wanted: list[tuple[int, int, int]], targets: np.ndarray) -> None:
        """Enter copies for which pages were allocated."""
        for (row, number, source), target in zip(wanted, targets.tolist()):
            self.pending[row] = PendingCopy(number, source, target)

    def take_confirmed(self, pages: np.ndarray | list[int]) -> list[tuple[int, PendingCopy]]:
        """Remove and return, with their rows, the copies whose target is among `pages`."""
        confirmed = set(np.asarray(pages).tolist())
        done = [(row, copy) for row, copy in self.pending.items() if copy.target in confirmed]
        for row, _ in done:
            del self.pending[row]
        return done

    def drop(self, row: int, keep: int) -> np.ndarray:
        """Forget a row's copy unless the page it replaces is among the row's first `keep`; returns its target."""
        if row in self.pending and self.pending[row].number >= keep:
            return np.array([self.pending.pop(row).target], np.int32)
        return _NO_PAGES

    def before(self, rows: np.ndarray, first: np.ndarray) -> list[PendingCopy]:
        """Copies that must be made before `rows` write into the pages `first`: their own, and those of others who
        still list such a page, because its content changes then."""
        if not self.pending:
            return []
        writers, written = set(rows.tolist()), set(first.tolist())
        return [copy for row, copy in self.pending.items() if row in writers or copy.source in written]

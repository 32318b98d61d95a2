"""Which pages of a cache hold which tokens: integers alone, no key and no value is touched here."""

import numpy as np

from ._core import UNBOUNDED


class Pages:
    """For each batch entry a row of pages, with its tokens one after the other.

    Entry b holds the tokens from position ``starts[b]`` on, ``ends[b]`` of them, in the pages
    ``table[b, :held[b]]``. ``starts`` are multiples of `size`. Entries share a page until one of
    them writes to it. A row that is full gives up its oldest page for a new one.

    There are as many pages as the table has places, so that one is always free when it is needed.

    Three numbers are kept for those in a hurry: `longest`, the most tokens that an entry holds;
    `room`, how many more every entry can take before `extend` has something to do or the capacity is
    reached; `least_left`, the fewest tokens that are left of an entry that has lost some.
    """

    def __init__(self, batch: int, columns: int, size: int, capacity: int):
        self.size = size
        self.number = batch * columns
        self.one_each = np.ones(batch, np.int64)
        self._capacity = capacity
        self.table = np.zeros((batch, columns), np.int64)
        self.starts = np.zeros(batch, np.int64)
        self.ends = np.zeros(batch, np.int64)
        self._held = np.zeros(batch, np.int64)
        self._entries = np.arange(batch)
        self._owners = np.zeros(self.number, np.int64)
        self._free = list(range(self.number))[::-1]
        self._refresh()

    def lengths(self) -> np.ndarray:
        """Tokens that each entry ever had and was not asked to forget."""
        return self.starts + self.ends

    def extend(self, counts: np.ndarray) -> list[tuple[int, int, int]]:
        """Find pages of their own for counts[b] more tokens of each entry.

        Returns what must be copied before they are written: from page, to page, its first tokens.
        """
        wanted = -(-(self.ends + counts) // self.size)
        writes_shared = (counts > 0) & self._ends_in_shared()
        changed = np.flatnonzero((wanted > self._held) | writes_shared).tolist()
        copies = []
        for b in changed:
            if writes_shared[b]:
                copies += self._separate(b)
            self._grow(b, int(wanted[b]))
        if changed:
            self._refresh()
        return copies

    def advance(self, counts: np.ndarray) -> None:
        """The tokens that `extend` found pages for are there."""
        self.ends = self.ends + counts
        self._refresh()

    def advance_one(self) -> None:
        """Every entry has one token more, for which there was room."""
        self.ends = self.ends + self.one_each  # faster than in place, and than + 1
        self.longest += 1
        self.room -= 1
        self.least_left += 1

    def truncate(self, lengths: np.ndarray) -> None:
        """Forget the tokens from position lengths[b] on, which is among those that are held."""
        self.starts[lengths == 0] = 0
        self.ends = lengths - self.starts
        self._trim()
        self._refresh()

    def reorder(self, index: np.ndarray) -> None:
        """Entry b becomes what index[b] was; pages are shared, not copied."""
        self._trim()
        changed = np.flatnonzero(index != self._entries)
        if not changed.size:
            return
        given_up = self._pages_of(changed)
        np.add.at(self._owners, self._pages_of(index[changed]), 1)
        for array in (self.table, self.starts, self.ends, self._held):
            array[changed] = array[index[changed]]
        self._release(given_up)
        self._refresh()

    def _refresh(self) -> None:
        """The three numbers."""
        # Lists are faster than reductions until there are very many entries.
        self.longest = max(self.ends.tolist())
        room = np.where(self._ends_in_shared(), 0, self._held * self.size - self.ends)
        self.room = min(*room.tolist(), self._capacity - self.longest)
        left = np.where(self.starts > 0, self.ends, 2 * UNBOUNDED)
        self.least_left = min(left.tolist())

    def _pages_of(self, entries: np.ndarray) -> np.ndarray:
        """All pages of some entries, one row after the other."""
        return np.concatenate([self.table[b, : self._held[b]] for b in entries])

    def _ends_in_shared(self) -> np.ndarray:
        """Whether the next token of each entry goes to a page that others have too."""
        column = np.minimum(self.ends // self.size, self.table.shape[1] - 1)
        page = self.table[self._entries, column]
        return (self.ends % self.size > 0) & (self._owners[page] > 1)

    def _separate(self, b: int) -> list[tuple[int, int, int]]:
        """A page of its own for the token that comes next, unless the others have left."""
        column, tokens = divmod(int(self.ends[b]), self.size)
        shared = int(self.table[b, column])
        if self._owners[shared] == 1:
            return []
        self._owners[shared] -= 1
        self.table[b, column] = own = self._take()
        return [(shared, own, tokens)]

    def _grow(self, b: int, wanted: int) -> None:
        """New pages at the end of a row; the oldest ones go where there are too many."""
        row, held = self.table[b], int(self._held[b])
        surplus = wanted - len(row)
        if surplus > 0:
            self._release(row[:surplus])
            row[: held - surplus] = row[surplus:held]
            self.starts[b] += surplus * self.size
            self.ends[b] -= surplus * self.size
            held, wanted = held - surplus, len(row)
        for column in range(held, wanted):
            row[column] = self._take()
        self._held[b] = max(held, wanted)

    def _trim(self) -> None:
        """Give back the pages that hold no token."""
        needed = -(-self.ends // self.size)
        for b in np.flatnonzero(needed < self._held).tolist():
            self._release(self.table[b, needed[b] : self._held[b]])
            self._held[b] = needed[b]

    def _take(self) -> int:
        """A free page, for one owner."""
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def _release(self, pages: np.ndarray) -> None:
        """One owner less for each of them; a page may be named several times."""
        np.subtract.at(self._owners, pages, 1)
        self._free += np.unique(pages[self._owners[pages] == 0]).tolist()[::-1]

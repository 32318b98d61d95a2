"""The page table of a cache: integers only, keys and values are not accessed here."""

from typing import NamedTuple

import numpy as np

from .._core import UNBOUNDED
from ..shapes.words import new_tuple


class Pages(NamedTuple):
    """An immutable page table: for each batch entry, the pages that hold its tokens in order.

    Entry b holds ``ends[b]`` tokens, the first at position ``starts[b]``, in the first pages of
    ``table[b]``. ``starts`` are multiples of `size`. Entries share a page until one of them writes
    to it; ``owners`` counts the entries of each page. A full row of `columns` pages drops its
    oldest page for a new one.

    Three numbers serve the fast path: `longest`, the most tokens that an entry holds; `free`, the
    number of tokens that every entry can take before it needs a page or reaches the capacity;
    `least_left`, the fewest tokens held by an entry that has dropped some.
    """

    size: int
    columns: int
    capacity: int
    one_each: np.ndarray
    owners: np.ndarray
    table: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    longest: int
    free: int
    least_left: int

    def lengths(self) -> np.ndarray:
        """Return the length of each entry, dropped tokens included."""
        return self.starts + self.ends

    def held(self) -> np.ndarray:
        """Return the number of pages of each entry."""
        return -(-self.ends // self.size)

    def with_one(self) -> "Pages":
        """Return the table with one more token in every entry; `free` must not be 0."""
        tokens = (self.ends + self.one_each, self.longest + 1, self.free - 1, self.least_left + 1)
        return new_tuple(Pages, self[:7] + tokens)

    def extended(
        self, counts: np.ndarray, kept: "Pages"
    ) -> tuple["Pages", np.ndarray, list[tuple[int, int, int]]]:
        """Return the table with counts[b] more tokens, in slots where `kept` has none.

        Return also the slot of each entry's first new token in its row, and the copies to make
        before tokens are written: (from page, to page, number of first tokens).
        """
        firsts, ends, size = self.ends, self.ends + counts, self.size
        held, wanted = self.held(), -(-ends // size)
        shared = np.flatnonzero((counts > 0) & self._ends_in_shared())
        if not shared.size and (wanted <= held).all():
            return self._arranged(self.table, self.starts, ends, self.owners), firsts, []
        surplus = np.maximum(wanted - self.columns, 0)
        width = self.table.shape[1]
        table = np.zeros((len(ends), max(width, int((wanted - surplus).max()))), np.int64)
        table[:, :width] = self.table
        owners = self.owners.copy()
        copies = self._separate(table, owners, shared.tolist(), kept)
        if surplus.any():
            given_up = table[:, :width][np.arange(width) < surplus[:, None]]
            owners -= np.bincount(given_up, minlength=len(owners))
            for b in np.flatnonzero(surplus):
                table[b, : width - surplus[b]] = table[b, surplus[b] : width]
        column = np.arange(table.shape[1])
        new = ((held - surplus)[:, None] <= column) & (column < (wanted - surplus)[:, None])
        table[new] = _take(owners, kept, np.count_nonzero(new))
        lost = surplus * size
        pages = self._arranged(table, self.starts + lost, ends - lost, owners)
        return pages, firsts - lost, copies

    def truncated(self, lengths: np.ndarray) -> "Pages":
        """Return the table without the tokens from position lengths[b] on, which must be held."""
        starts = np.where(lengths == 0, 0, self.starts)
        ends = lengths - starts
        if (-(-ends // self.size) == self.held()).all():
            return self._arranged(self.table, starts, ends, self.owners)
        return self.filled(self.table, starts, ends)

    def reordered(self, index: np.ndarray) -> "Pages":
        """Return the table in which entry b is entry index[b] of this one; pages are shared."""
        if (index == np.arange(len(index))).all():
            return self
        return self.filled(self.table[index], self.starts[index], self.ends[index])

    def filled(self, table: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> "Pages":
        """Return a table of these rows, with the owners of each page counted."""
        live = np.arange(table.shape[1]) < -(-ends // self.size)[:, None]
        owners = np.bincount(table[live], minlength=len(self.owners))
        return self._arranged(table, starts, ends, owners)

    def used(self) -> list[tuple[int, int]]:
        """Return each page in use and the most tokens that an entry has in it."""
        tokens = np.clip(
            self.ends[:, None] - np.arange(self.table.shape[1]) * self.size, 0, self.size
        )
        most = np.zeros(len(self.owners), np.int64)
        np.maximum.at(most, self.table[tokens > 0], tokens[tokens > 0])
        pages = np.flatnonzero(most)
        return list(zip(pages.tolist(), most[pages].tolist(), strict=True))

    def _arranged(
        self, table: np.ndarray, starts: np.ndarray, ends: np.ndarray, owners: np.ndarray
    ) -> "Pages":
        """Return the table with these arrays and the three numbers that follow from them."""
        pages = self._replace(table=table, starts=starts, ends=ends, owners=owners)
        # Lists are faster than NumPy's reductions unless there are very many entries.
        longest = max(ends.tolist())
        free = np.where(pages._ends_in_shared(), 0, -ends % self.size)
        left = np.where(starts > 0, ends, 2 * UNBOUNDED)
        return pages._replace(
            longest=longest,
            free=min(*free.tolist(), self.capacity - longest),
            least_left=min(left.tolist()),
        )

    def _ends_in_shared(self) -> np.ndarray:
        """Return whether the next token of each entry goes to a shared page."""
        column = np.minimum(self.ends // self.size, self.table.shape[1] - 1)
        page = self.table[np.arange(len(column)), column]
        return (self.ends % self.size > 0) & (self.owners[page] > 1)

    def _separate(
        self, table: np.ndarray, owners: np.ndarray, shared: list[int], kept: "Pages"
    ) -> list[tuple[int, int, int]]:
        """Give these entries a last page of their own; return the copies to make.

        The last entry keeps the page if no other entry has it.
        """
        columns, tokens = self.ends // self.size, self.ends % self.size
        leaving = []
        # The entry with the most tokens in a page comes last: if it keeps the page, it overwrites
        # no token of another entry.
        for b in sorted(shared, key=tokens.__getitem__):
            page = table[b, columns[b]]
            if owners[page] > 1:
                owners[page] -= 1
                leaving.append(b)
        sources = table[leaving, columns[leaving]]
        table[leaving, columns[leaving]] = own = _take(owners, kept, len(leaving))
        copies = zip(sources.tolist(), own.tolist(), tokens[leaving].tolist(), strict=True)
        return list(copies)


def no_pages(batch: int, columns: int, number: int, size: int, capacity: int) -> Pages:
    """Return a table without tokens, with `number` free pages."""
    nothing = np.zeros(batch, np.int64)
    ones, owners = np.ones(batch, np.int64), np.zeros(number, np.int64)
    table = np.zeros((batch, 1), np.int64)
    sizes = (size, columns, capacity)
    pages = Pages(*sizes, ones, owners, table, nothing, nothing, 0, 0, 0)
    return pages.filled(table, nothing, nothing)


def _take(owners: np.ndarray, kept: Pages, number: int) -> np.ndarray:
    """Take the first pages that have no owner here or in `kept`; give each one owner."""
    pages = np.flatnonzero((owners == 0) & (kept.owners == 0))[:number]
    owners[pages] = 1
    return pages

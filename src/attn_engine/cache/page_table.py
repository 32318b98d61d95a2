"""Which pages of a cache hold which tokens: integers alone, no key and no value is touched here."""

from typing import NamedTuple

import numpy as np

from .._core import UNBOUNDED

_new = tuple.__new__  # past NamedTuple's own constructor, for the step of a decoder


class Pages(NamedTuple):
    """For each batch entry a row of pages, with its tokens one after the other; it never changes.

    Entry b holds the tokens from position ``starts[b]`` on, ``ends[b]`` of them, in the first pages
    of ``table[b]``, as many as they fill. ``starts`` are multiples of `size`. Entries share a page
    until one of them writes to it; ``owners`` has how many entries each page has. A row of
    `columns` pages that is full gives up its oldest for a new one.

    Three numbers are kept for those in a hurry: `longest`, the most tokens that an entry holds;
    `room`, how many more every entry can take before it needs a page or the capacity is reached;
    `least_left`, the fewest tokens that are left of an entry that has lost some.
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
    room: int
    least_left: int

    def lengths(self) -> np.ndarray:
        """Tokens that each entry ever had and was not asked to forget."""
        return self.starts + self.ends

    def held(self) -> np.ndarray:
        """Pages that each entry has."""
        return -(-self.ends // self.size)

    def with_one(self) -> "Pages":
        """Every entry has one token more, for which there was room."""
        tokens = (self.ends + self.one_each, self.longest + 1, self.room - 1, self.least_left + 1)
        return _new(Pages, self[:7] + tokens)

    def extended(
        self, counts: np.ndarray, kept: "Pages"
    ) -> tuple["Pages", np.ndarray, list[tuple[int, int, int]]]:
        """Every entry has counts[b] tokens more, where `kept` has none.

        Returns also where in its row each entry's first new token goes, and what must be copied
        before they are written: from page, to page, its first tokens.
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
        """Without the tokens from position lengths[b] on, which is among those that are held."""
        starts = np.where(lengths == 0, 0, self.starts)
        ends = lengths - starts
        if (-(-ends // self.size) == self.held()).all():
            return self._arranged(self.table, starts, ends, self.owners)
        return self.filled(self.table, starts, ends)

    def reordered(self, index: np.ndarray) -> "Pages":
        """Entry b is what index[b] was; pages are shared, not copied."""
        if (index == np.arange(len(index))).all():
            return self
        return self.filled(self.table[index], self.starts[index], self.ends[index])

    def filled(self, table: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> "Pages":
        """These rows on the same pages, of which each has an owner for every row that has it."""
        live = np.arange(table.shape[1]) < -(-ends // self.size)[:, None]
        owners = np.bincount(table[live], minlength=len(self.owners))
        return self._arranged(table, starts, ends, owners)

    def used(self) -> list[tuple[int, int]]:
        """Every page that an entry has, and how many of its first tokens one of them has."""
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
        """All this with the three numbers."""
        pages = self._replace(table=table, starts=starts, ends=ends, owners=owners)
        # Lists are faster than reductions until there are very many entries.
        longest = max(ends.tolist())
        room = np.where(pages._ends_in_shared(), 0, -ends % self.size)
        left = np.where(starts > 0, ends, 2 * UNBOUNDED)
        return pages._replace(
            longest=longest,
            room=min(*room.tolist(), self.capacity - longest),
            least_left=min(left.tolist()),
        )

    def _ends_in_shared(self) -> np.ndarray:
        """Whether the next token of each entry goes to a page that others have too."""
        column = np.minimum(self.ends // self.size, self.table.shape[1] - 1)
        page = self.table[np.arange(len(column)), column]
        return (self.ends % self.size > 0) & (self.owners[page] > 1)

    def _separate(
        self, table: np.ndarray, owners: np.ndarray, shared: list[int], kept: "Pages"
    ) -> list[tuple[int, int, int]]:
        """A last page of their own for these entries; the last one keeps it if no other is left."""
        columns, tokens = self.ends // self.size, self.ends % self.size
        leaving = []
        # Who has the most tokens of a page comes last: whoever keeps it overwrites none of
        # another's.
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
    """Rows without tokens, of at most so many columns, and a number of pages that are free."""
    nothing = np.zeros(batch, np.int64)
    ones, owners = np.ones(batch, np.int64), np.zeros(number, np.int64)
    table = np.zeros((batch, 1), np.int64)
    sizes = (size, columns, capacity)
    pages = Pages(*sizes, ones, owners, table, nothing, nothing, 0, 0, 0)
    return pages.filled(table, nothing, nothing)


def _take(owners: np.ndarray, kept: Pages, number: int) -> np.ndarray:
    """The first pages without an owner, also in `kept`; they have one then."""
    pages = np.flatnonzero((owners == 0) & (kept.owners == 0))[:number]
    owners[pages] = 1
    return pages

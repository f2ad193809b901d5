# SPDX-License-Identifier: Apache-2.0
"""The rectangles of scores that one rank's queries have over one rank's keys, as calls of the core.

A rectangle knows where it lies in the whole: masks, windows, ALiBi and dropout are those of the whole sequence. In
rows i and keys j counted from the rectangle's corner a mask is a band lo ≤ j − i ≤ hi. Rows and keys that it
hides altogether are cut off; what is left then has its bottom-right diagonal, from which the core counts windows,
inside the band, so that the core's own options say the rest.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import NamedTuple, Optional

from fa2_cpu.distributed._shards import Segments

_FAR = 1 << 60


class Mask(NamedTuple):
    """causal is "", "top_left" or "bottom_right"; window as the core's, −1 is unbounded."""

    causal: str
    left: int
    right: int
    alibi: bool

    def band(self, queries: int, keys: int) -> tuple[int, int]:
        """(lo, hi) of j − i in a document of so many queries and keys."""
        diagonal = 0 if self.causal == "top_left" else keys - queries
        hi = diagonal + self.right if self.right >= 0 else _FAR
        if self.causal:
            hi = min(hi, diagonal)
        return (diagonal - self.left if self.left >= 0 else -_FAR), hi


class Document(NamedTuple):
    """Rows of the whole: queries q0 … q1 attend to keys k0 … k1."""

    q0: int
    q1: int
    k0: int
    k1: int


class Documents:
    """All documents, in the order of their rows."""

    def __init__(self, starts_q: tuple[int, ...], starts_k: tuple[int, ...]) -> None:
        self.starts_q, self.starts_k = starts_q, starts_k
        self.longest_q = max((b - a for a, b in zip(starts_q, starts_q[1:])), default=0)
        self.longest_k = max((b - a for a, b in zip(starts_k, starts_k[1:])), default=0)

    def __len__(self) -> int:
        return len(self.starts_q) - 1

    def __getitem__(self, n: int) -> Document:
        return Document(self.starts_q[n], self.starts_q[n + 1], self.starts_k[n], self.starts_k[n + 1])

    def holds_scores(self, numbers: list[int]) -> bool:
        first, last = self[numbers[0]], self[numbers[-1]]
        return first.q0 < last.q1 and first.k0 < last.k1

    def between(self, a: int, b: int, c: int, d: int) -> range:
        """Those that may have queries in a … b and keys in c … d."""
        first = max(bisect.bisect_right(self.starts_q, a), bisect.bisect_right(self.starts_k, c)) - 1
        last = min(bisect.bisect_left(self.starts_q, b), bisect.bisect_left(self.starts_k, d))
        return range(max(first, 0), min(last, len(self)))


class Tile(NamedTuple):
    """One call of the core: rows q0 … q1 of the queries' part, k0 … k1 of the keys' part."""

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int  # lo ≤ j − i ≤ hi, counted from the corner, is what the mask shows
    hi: int
    document: int  # of which the tile is a part, or the first of those that it holds whole
    query: int  # the first row within its document
    key: int
    # ALiBi counts i + diagonal − j where the core would count i + Nk − Nq − j; side is 0 where these are the same,
    # else the sign of the former in all that is visible.
    diagonal: int
    side: int
    cu_q: Optional[tuple[int, ...]] = None  # prefix sums of several whole documents
    cu_k: Optional[tuple[int, ...]] = None
    mask: Optional[Mask] = None  # theirs

    @property
    def plain(self) -> bool:
        return self.cu_q is None and self.core_mask == ("", -1, -1)

    @property
    def core_mask(self) -> tuple[str, int, int]:
        """causal and the window's left and right for the call of the core."""
        if self.mask is not None:
            return self.mask[:3]
        edge = self.keys - self.queries
        left = edge - self.lo if self.lo > 1 - self.queries else -1
        right = self.hi - edge if self.hi < self.keys - 1 else -1
        return ("bottom_right", left, -1) if right == 0 else ("", left, right)

    def rows(self, first: int, last: int) -> Optional[Tile]:
        """Of some of the rows, counted from the corner; None where they see nothing."""
        return trimmed(self._replace(
            q0=self.q0 + first, q1=self.q0 + last, lo=self.lo + first, hi=self.hi + first,
            query=self.query + first, diagonal=self.diagonal + first,
        ))  # fmt: skip

    def columns(self, first: int, last: int) -> Optional[Tile]:
        """Of some of the keys."""
        return trimmed(self._replace(
            k0=self.k0 + first, k1=self.k0 + last, lo=self.lo - first, hi=self.hi - first,
            key=self.key + first, diagonal=self.diagonal - first,
        ))  # fmt: skip

    @property
    def queries(self) -> int:
        return self.q1 - self.q0

    @property
    def keys(self) -> int:
        return self.k1 - self.k0


def tiles_of(
    queries: Segments, keys: Segments, documents: Documents, mask: Mask, join: bool, pack: bool
) -> list[Tile]:
    """The tiles of one rank's queries over one rank's keys, in a fixed order.

    join: whether neighbours without a mask may become one; not where places in the whole matter (bias, dropout). pack:
    whether whole documents that follow each other become one.
    """
    result: list[Tile] = []
    row = 0
    for a, b in queries:
        column = 0
        for c, d in keys:
            result += _of_segments(a, b, row, c, d, column, documents, mask, pack)
            column += d - c
        row += b - a
    return _joined(result) if join and not mask.alibi else result


def _of_segments(a, b, row, c, d, column, documents: Documents, mask: Mask, pack: bool) -> Iterator[Tile]:
    whole: list[int] = []
    for n in documents.between(a, b, c, d):
        document = documents[n]
        if pack and a <= document.q0 and document.q1 <= b and c <= document.k0 and document.k1 <= d:
            whole.append(n)
            continue
        q0, q1 = max(a, document.q0), min(b, document.q1)
        k0, k1 = max(c, document.k0), min(d, document.k1)
        if q0 < q1 and k0 < k1:
            nq, nk = document.q1 - document.q0, document.k1 - document.k0
            lo, hi = mask.band(nq, nk)
            query, key = q0 - document.q0, k0 - document.k0
            tile = trimmed(Tile(
                q0 + row - a, q1 + row - a, k0 + column - c, k1 + column - c, lo + query - key, hi + query - key,
                n, query, key, query - key + nk - nq, 0,
            ))  # fmt: skip
            if mask.alibi:
                yield from _bent(tile)
            elif tile is not None:
                yield tile
    if whole and documents.holds_scores(whole):
        yield _whole(whole, documents, mask, row - a, column - c)


def _whole(numbers: list[int], documents: Documents, mask: Mask, q_shift: int, k_shift: int) -> Tile:
    """Documents that follow each other and lie in both parts altogether: one packed call."""
    first, last = documents[numbers[0]], documents[numbers[-1]]
    chosen = [documents[n] for n in numbers]
    return Tile(
        first.q0 + q_shift, last.q1 + q_shift, first.k0 + k_shift, last.k1 + k_shift, -_FAR, _FAR, numbers[0],
        0, 0, 0, 0, (0, *(x.q1 - first.q0 for x in chosen)), (0, *(x.k1 - first.k0 for x in chosen)), mask,
    )  # fmt: skip


def trimmed(tile: Tile) -> Optional[Tile]:
    """Without the rows and keys that the mask hides altogether."""
    r = max(0, -tile.hi)  # rows in front that see no key
    c = max(0, tile.lo + r)  # keys in front that no row sees
    nq, nk = tile.queries - r, tile.keys - c
    lo, hi = tile.lo + r - c, tile.hi + r - c
    nk = min(nk, nq + hi)
    nq = min(nq, nk - lo)
    if nq <= 0 or nk <= 0:
        return None
    return tile._replace(
        q0=tile.q0 + r, q1=tile.q0 + r + nq, k0=tile.k0 + c, k1=tile.k0 + c + nk, lo=lo, hi=hi,
        query=tile.query + r, key=tile.key + c, diagonal=tile.diagonal + r - c,
    )  # fmt: skip


def _bent(tile: Optional[Tile]) -> Iterator[Tile]:
    """The tile with the side of ALiBi's diagonal on which it lies; several tiles where it lies on both."""
    if tile is None:
        return
    nq, nk, diagonal = tile.queries, tile.keys, tile.diagonal
    if diagonal == nk - nq:
        yield tile
    elif min(tile.hi, nk - 1) <= diagonal:
        yield tile._replace(side=1)
    elif max(tile.lo, 1 - nq) >= diagonal:
        yield tile._replace(side=-1)
    elif nq + diagonal <= nk:
        # The first part's bottom-right diagonal is ALiBi's.
        yield from _bent(tile.columns(0, nq + diagonal))
        yield from _bent(tile.columns(nq + diagonal, nk))
    else:
        yield from _bent(tile.rows(0, nk - diagonal))
        yield from _bent(tile.rows(nk - diagonal, nq))


def _joined(tiles: list[Tile]) -> list[Tile]:
    """Plain tiles over the same keys whose queries follow each other, or over the same queries, as one."""
    result: list[Tile] = []
    if _is_causal_pair(tiles):
        first, _, last = tiles
        return [first._replace(q1=last.q1, k1=last.k1)]
    for tile in tiles:
        for n, other in enumerate(result):
            if not (tile.plain and other.plain and tile.document == other.document):
                continue
            same_keys = (tile.k0, tile.k1) == (other.k0, other.k1) and other.q1 == tile.q0
            same_queries = (tile.q0, tile.q1) == (other.q0, other.q1) and other.k1 == tile.k0
            if same_keys or same_queries:
                result[n] = other._replace(q1=tile.q1, k1=tile.k1, lo=-_FAR, hi=_FAR)
                break
        else:
            result.append(tile)
    return result


def _is_causal_pair(tiles: list[Tile]) -> bool:
    """Whether the tiles are those of two pieces, one behind the other, on themselves: together again causal."""
    if len(tiles) != 3 or len({tile.document for tile in tiles}) != 1 or tiles[0].cu_q is not None:
        return False
    first, between, last = tiles
    causal = all(t.core_mask == ("bottom_right", -1, -1) and t.queries == t.keys for t in (first, last))
    behind = first.q1 == last.q0 and first.k1 == last.k0
    return causal and behind and between.plain and between[:4] == (last.q0, last.q1, first.k0, first.k1)


def key_rows(tiles: list[Tile], keys: Segments) -> Segments:
    """The rows of the keys' part that tiles read, at most one range a segment; what has to be sent."""
    result = []
    row = 0
    for start, stop in keys:
        end = row + stop - start
        read = [(max(t.k0, row), min(t.k1, end)) for t in tiles if t.k0 < end and t.k1 > row]
        if read:
            result.append((min(a for a, _ in read), max(b for _, b in read)))
        row = end
    return joined(result)


def joined(ranges: list[tuple[int, int]]) -> Segments:
    """Sorted ranges, those that touch made one."""
    result: list[tuple[int, int]] = []
    for a, b in ranges:
        if result and result[-1][1] == a:
            result[-1] = (result[-1][0], b)
        else:
            result.append((a, b))
    return tuple(result)


def moved(tiles: list[Tile], sent: Segments) -> list[Tile]:
    """The tiles with key rows counted in what was sent, where the ranges lie one behind the other."""
    shifts = []
    before = 0
    for a, b in sent:
        shifts.append((a, b, before - a))
        before += b - a
    result = []
    for tile in tiles:
        shift = next(s for a, b, s in shifts if a <= tile.k0 and tile.k1 <= b) if tile.keys else 0
        result.append(tile._replace(k0=tile.k0 + shift, k1=tile.k1 + shift))
    return result

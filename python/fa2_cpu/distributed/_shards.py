# SPDX-License-Identifier: Apache-2.0
"""Which rows of a sequence each rank holds: segments (start, stop) in the order in which they lie in its part."""

from __future__ import annotations

from collections.abc import Sequence

Segment = tuple[int, int]
Segments = tuple[Segment, ...]

SHARDS = ("zigzag", "contiguous")


def pieces(total: int, count: int) -> list[Segment]:
    """0 … total cut into pieces, of which the first total mod count are one longer."""
    short, longer = divmod(total, count)
    ends = [n * short + min(n, longer) for n in range(count + 1)]
    return list(zip(ends, ends[1:]))


def segments_of(total: int, world: int, shards: str) -> tuple[Segments, ...]:
    """The segments of every rank where a whole sequence is cut.

    "zigzag" gives rank r pieces r and 2·world − 1 − r of 2·world, which balances causal work; "contiguous" piece r
    of world.
    """
    if shards == "contiguous":
        return tuple((piece,) for piece in pieces(total, world))
    cut = pieces(total, 2 * world)
    return tuple((cut[r], cut[2 * world - 1 - r]) for r in range(world))


def segments_of_parts(lengths: Sequence[int], shards: str) -> tuple[Segments, ...] | str:
    """The same of the lengths that ranks have; a sentence where zigzag cuts otherwise."""
    if shards == "contiguous":
        ends = [0]
        for length in lengths:
            ends.append(ends[-1] + length)
        return tuple((segment,) for segment in zip(ends, ends[1:]))
    total = sum(lengths)
    result = segments_of(total, len(lengths), shards)
    wanted = [rows(segments) for segments in result]
    if wanted != list(lengths):
        return (
            f"has {_listed(lengths)} rows on ranks 0 to {len(lengths) - 1}; zigzag cuts {total} rows into "
            f'{_listed(wanted)} (shards="contiguous" takes any lengths)'
        )
    return result


def _listed(numbers: Sequence[int]) -> str:
    shown = [str(n) for n in numbers]
    return ", ".join(shown if len(shown) <= 16 else [*shown[:8], "…", *shown[-8:]])


def rows(segments: Segments) -> int:
    return sum(stop - start for start, stop in segments)


def joined(parts: Sequence[Segments]) -> Segments:
    """The segments of several ranks together, sorted, neighbours made one."""
    result: list[Segment] = []
    for start, stop in sorted(s for segments in parts for s in segments if s[0] < s[1]):
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result)


def places(segments: Segments, within: Segments) -> list[tuple[int, int, int]]:
    """(row, row in the joined part, length) of each segment, where within holds all of them."""
    result = []
    row = 0
    for start, stop in segments:
        before = 0
        for first, last in within:
            if first <= start and stop <= last and start < stop:
                result.append((row, before + start - first, stop - start))
            before += last - first
        row += stop - start
    return result

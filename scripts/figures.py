#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/images/block-loop-{light,dark}.svg: the backward's loop over blocks of scores."""

import pathlib

from results_chart import THEMES

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "docs/images"
BLOCK_W, BLOCK_H, LEFT, TOP, COLUMNS, ROWS = 96, 64, 150, 76, 4, 3


def text(x, y, words, colour, anchor="middle", weight="400"):
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'


def arrow(path, colour):
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2" marker-end="url(#head)"/>'


def figure(c):
    width, height = 760, 380
    right, bottom = LEFT + COLUMNS * BLOCK_W, TOP + ROWS * BLOCK_H
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13">',
        "<title>One key block meets the query blocks from last to first</title>",
        f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{c["fa2"]}"/></marker></defs>',
        text(LEFT + COLUMNS * BLOCK_W / 2, 24, "queries: packed Q, dO, lse, delta of each block", c["text"]),
    ]
    for column in range(COLUMNS):
        x = LEFT + column * BLOCK_W
        parts.append(f'<rect x="{x + 3}" y="36" width="{BLOCK_W - 6}" height="22" rx="3" fill="none" stroke="{c["soft"]}"/>')
        parts.append(text(x + BLOCK_W / 2, 52, f"block {column}", c["soft"]))
    for row in range(ROWS):
        y = TOP + row * BLOCK_H
        parts.append(f'<rect x="{LEFT - 96}" y="{y + 3}" width="86" height="{BLOCK_H - 6}" rx="3" '
                     f'fill="none" stroke="{c["fa2"] if row == 1 else c["soft"]}" stroke-width="{2 if row == 1 else 1}"/>')
        parts.append(text(LEFT - 53, y + 28, f"keys {row}", c["text" if row == 1 else "soft"]))
        parts.append(text(LEFT - 53, y + 46, "K, V", c["soft"]))
        for column in range(COLUMNS):
            x = LEFT + column * BLOCK_W
            stroke, wide = (c["fa2"], 2) if (row, column) == (1, 2) else (c["grid"], 1)
            parts.append(f'<rect x="{x + 2}" y="{y + 2}" width="{BLOCK_W - 4}" height="{BLOCK_H - 4}" fill="none" '
                         f'stroke="{stroke}" stroke-width="{wide}"/>')
    x, y = LEFT + 2 * BLOCK_W, TOP + BLOCK_H
    for step in range(1, 3):
        parts.append(f'<path d="M{x + 2 + step * (BLOCK_W - 4) / 3:.0f} {y + 2}v{BLOCK_H - 4}" stroke="{c["grid"]}"/>')
    for step in range(1, 4):
        parts.append(f'<path d="M{x + 2} {y + 2 + step * (BLOCK_H - 4) / 4:.0f}h{BLOCK_W - 4}" stroke="{c["grid"]}"/>')
    parts += [
        arrow(f"M{LEFT + 3.6 * BLOCK_W:.0f} {y + BLOCK_H / 2}H{x + BLOCK_W + 6}", c["fa2"]),
        arrow(f"M{x - 6} {y + BLOCK_H / 2}H{LEFT + BLOCK_W * 0.4:.0f}", c["fa2"]),
        arrow(f"M{x + BLOCK_W / 2} {bottom + 4}v34", c["fa2"]),
        text(x + BLOCK_W / 2, bottom + 56, "dQ of the block: add in the order of the keys", c["text"]),
        text(x + BLOCK_W / 2, bottom + 74, "(wait for keys 0, release keys 2)", c["soft"]),
        arrow(f"M{right + 6} {y + BLOCK_H / 2}h30", c["fa2"]),
        text(right + 44, y + BLOCK_H / 2 - 4, "dK, dV of keys 1", c["text"], "start"),
        text(right + 44, y + BLOCK_H / 2 + 14, "stay with the worker", c["soft"], "start"),
        text(right + 10, TOP + 28, "tiles of 32 queries × 16 keys:", c["soft"], "start"),
        text(right + 10, TOP + 46, "hidden, partial or visible", c["soft"], "start"),
    ]
    return "\n".join(parts + ["</svg>"]) + "\n"


if __name__ == "__main__":
    for name, colours in THEMES.items():
        (FOLDER / f"block-loop-{name}.svg").write_text(figure(colours), encoding="utf-8")

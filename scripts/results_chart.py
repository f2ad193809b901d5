# SPDX-License-Identifier: Apache-2.0
"""The README's chart as SVG, for light and dark pages: GFLOP/s over the length, fa2 and PyTorch."""

import math
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 800, 310
TOP, BOTTOM, PANEL, GAP, LEFT = 56, 44, 316, 66, 56
THEMES = {"light": {"text": "#1f2328", "soft": "#59636e", "grid": "#d1d9e0", "fa2": "#0969da", "pytorch": "#bc4c00"},
          "dark": {"text": "#f0f6fc", "soft": "#9198a1", "grid": "#3d444d", "fa2": "#58a6ff", "pytorch": "#f0883e"}}


def ceiling(value):
    """The least of 1, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten that is not below value, and its grid step."""
    power = 10 ** math.floor(math.log10(value))
    top = next(m for m in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if m * power >= value)
    return top * power, top * power / (3 if top in (1.5, 3, 6) else 4 if top in (2, 4, 8) else 5)


def panel(left, direction, points, colours):
    top, step = ceiling(max(max(fa2, pytorch) for _, fa2, pytorch in points))
    height = HEIGHT - TOP - BOTTOM
    first, last = math.log2(points[0][0]), math.log2(points[-1][0])

    def x(length):
        return left + (math.log2(length) - first) / max(last - first, 1) * PANEL

    def y(rate):
        return TOP + height * (1 - rate / top)

    parts = [f'<text x="{left}" y="{TOP - 14}" fill="{colours["text"]}" font-weight="600">{direction}</text>']
    for tick in range(round(top / step) + 1):
        rate = tick * step
        parts.append(f'<path d="M{left} {y(rate):.1f}H{left + PANEL}" stroke="{colours["grid"]}"/>')
        parts.append(f'<text x="{left - 8}" y="{y(rate) + 4:.1f}" text-anchor="end" fill="{colours["soft"]}">'
                     f'{rate:,.0f}</text>')
    for length, _, _ in points:
        parts.append(f'<text x="{x(length):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle" '
                     f'fill="{colours["soft"]}">{length}</text>')
    for index, (key, label) in enumerate((("fa2", "fa2"), ("pytorch", "PyTorch")), start=1):
        line = "L".join(f"{x(p[0]):.1f} {y(p[index]):.1f}" for p in points)
        parts.append(f'<path d="M{line}" fill="none" stroke="{colours[key]}" stroke-width="2.5"/>')
        for point in points:
            parts.append(f'<circle cx="{x(point[0]):.1f}" cy="{y(point[index]):.1f}" r="3.5" fill="{colours[key]}"/>')
        parts.append(f'<text x="{x(points[-1][0]):.1f}" y="{y(points[-1][index]) - 10:.1f}" text-anchor="end" '
                     f'fill="{colours[key]}" font-weight="600">{label}</text>')
    return parts


def chart(title, series, colours):
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
             f'height="{HEIGHT}" font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12">',
             f"<title>{escape(title)}</title>",
             f'<text x="{LEFT}" y="20" fill="{colours["soft"]}">GFLOP/s over the sequence length. {escape(title)}</text>']
    for index, (direction, points) in enumerate(series):
        if points:
            parts += panel(LEFT + index * (PANEL + GAP), direction, points, colours)
    return "\n".join(parts + ["</svg>"]) + "\n"


def write_charts(folder, title, series):
    """{path: text} of both files."""
    return {folder / f"speed-{name}.svg": chart(title, series, colours) for name, colours in THEMES.items()}

# SPDX-License-Identifier: Apache-2.0
"""compare_pytorch's results for the shapes of models: geometric means, rows where fa2 is slower, a line a shape."""

import math

from pytorch_cases import Case, case_of
from shapes import SHAPES


def head(report):
    return [f"{report['cpu']}, {report['cores']} cores; PyTorch {report['pytorch']}; fa2 through "
            f"{report['through']}, build {report['build']}.", ""]


def _groups(report):
    """{(threads, when): {(dtype, direction): {model: row}}}."""
    models = {}
    for shape in SHAPES:
        models.setdefault(_key(case_of(shape, "forward", "bf16", 1)), shape.model)
    groups = {}
    for row in report["rows"]:
        case = Case.parse(row["case"])
        columns = groups.setdefault((case.threads, row["when"]), {})
        columns.setdefault((case.dtype, case.direction), {})[models.get(_key(case), case.name)] = row
    return groups


def _key(case):
    return (case.batch, case.heads, case.kv_heads, case.lengths, case.head_dim, case.causal, case.option)


def _title(threads, when):
    return f"{threads} thread{'s' if threads > 1 else ''}{', after a Linear' if when == 'linear' else ''}"


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def _means(groups):
    lines = ["| geometric mean of PyTorch's time over fa2's | rows | fa2 / PyTorch | rows below 1.0 | fa2 / JAX |",
             "|---|---|---|---|---|"]
    for (threads, when), columns in groups.items():
        for (dtype, direction), rows in columns.items():
            ratios = [row["speedup"] for row in rows.values()]
            jax = [row["jax_ms"] / row["fa2_ms"] for row in rows.values() if "jax_ms" in row]
            lines.append(f"| {_title(threads, when)}, {dtype} {direction} | {len(ratios)} | "
                         f"**{geometric_mean(ratios):.2f}** | {sum(r < 1 for r in ratios)} | "
                         f"{format(geometric_mean(jax), '.2f') if jax else ''} |")
    return lines


def _slower(groups):
    slower = [(row["speedup"], _title(threads, when), dtype, direction, model, row)
              for (threads, when), columns in groups.items()
              for (dtype, direction), rows in columns.items()
              for model, row in rows.items() if row["speedup"] < 1]
    if not slower:
        return ["No row below 1.0."]
    lines = ["| rows below 1.0 | threads | | fa2, ms | PyTorch, ms | fa2 / PyTorch (middle half) |",
             "|---|---|---|---|---|---|"]
    for _, title, dtype, direction, model, row in sorted(slower, key=lambda entry: entry[0]):
        lines.append(f"| {model} | {title} | {dtype} {direction} | {row['fa2_ms']:.3f} | {row['pytorch_ms']:.3f} | "
                     f"{_ratio(row)} |")
    return lines


def _ratio(row):
    text = f"**{row['speedup']:.2f}** ({row['speedup_low']:.2f}–{row['speedup_high']:.2f})"
    return text + (f" JAX {row['jax_ms'] / row['fa2_ms']:.2f}" if "jax_ms" in row else "")


def _table(title, columns):
    keys = list(columns)
    lines = [f"### {title}", "", "| fa2 / PyTorch (middle half) | B·H/Hkv, N, D | "
             + " | ".join(f"{dtype} {direction}" for dtype, direction in keys) + " |",
             "|---|---|" + "---|" * len(keys)]
    models = {model: row for rows in columns.values() for model, row in rows.items()}
    for model, row in models.items():
        case = Case.parse(row["case"])
        words = [word for word in ("causal" if case.causal else "", case.option) if word]
        shape = f"{case.batch}·{case.heads}/{case.kv_heads}, {case.lengths}, {' '.join([str(case.head_dim), *words])}"
        cells = (_ratio(columns[key][model]) if model in columns[key] else "" for key in keys)
        lines.append(f"| {model} | {shape} | {' | '.join(cells)} |")
    return lines


def shapes_markdown(report):
    groups = _groups(report)
    lines = head(report) + _means(groups) + [""] + _slower(groups)
    for key, columns in groups.items():
        lines += [""] + _table(_title(*key), columns)
    return "\n".join(lines) + "\n"


def plot_shapes(report, path):
    """A panel for each number of threads: the ratio of every shape, sorted, on a log scale."""
    from matplotlib import pyplot
    groups = _groups(report)
    figure, axes = pyplot.subplots(1, len(groups), squeeze=False, sharey=True, figsize=(6 * len(groups), 4))
    for axis, (key, columns) in zip(axes[0], groups.items()):
        for index, ((dtype, direction), rows) in enumerate(sorted(columns.items())):
            ratios = sorted(row["speedup"] for row in rows.values())
            share = [(i + 0.5) / len(ratios) for i in range(len(ratios))]
            axis.plot(share, ratios, ".-", color=f"C{index}",
                      label=f"{dtype} {direction}, mean {geometric_mean(ratios):.2f}")
        axis.axhline(1, color="gray", linewidth=0.8)
        axis.set_yscale("log", base=2)
        axis.set(title=_title(*key), xlabel="share of the shapes", ylabel="fa2 / PyTorch")
        axis.legend()
    figure.suptitle(f"{report['cpu']}, {report['cores']} cores, {len(SHAPES)} shapes of models")
    figure.tight_layout()
    figure.savefig(path, dpi=120)

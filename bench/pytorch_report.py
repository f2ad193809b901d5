# SPDX-License-Identifier: Apache-2.0
"""compare_pytorch's results as JSON, as a Markdown table and as plots."""

import json
import sys

from pytorch_cases import Case
from shapes_report import head, plot_shapes, shapes_markdown


def onednn_cells(row):
    """How many times oneDNN's time fa2 is, and the memory that oneDNN takes beside inputs and outputs."""
    if "onednn_ms" not in row:
        return " | |"
    memory = (row["onednn_scratch_bytes"] + row["onednn_between_bytes"]) / 1e6
    partitions = row["onednn_partitions"]
    return (f" {row['onednn_ms'] / row['fa2_ms']:.2f} | {row['onednn_form']}, {partitions} "
            f"partition{'s' if partitions > 1 else ''}, {memory:.0f} MB |")


def markdown(report):
    onednn = {row["onednn"] for row in report["rows"] if "onednn" in row}
    lines = head(report)
    if onednn:
        lines += [f"oneDNN Graph {'; '.join(sorted(onednn))}, in a process of its own that takes turns with the others.", ""]
    lines += [
        "| direction | dtype | B·H/Hkv | N | D | mask | threads | fa2 GFLOP/s | PyTorch GFLOP/s |"
        " fa2 / PyTorch (middle half) | fa2 / JAX | share of peak |"
        + (" fa2 / oneDNN | oneDNN's form and scratch |" if onednn else ""),
        "|---|---|---|---|---|---|---|---|---|---|---|---|" + ("---|---|" if onednn else ""),
    ]
    for row in report["rows"]:
        case = Case.parse(row["case"])
        share, jax = row.get("peak_share"), row.get("jax_ms")
        lines.append(
            f"| {case.direction}{' after a Linear' if row['when'] == 'linear' else ''} | {case.dtype} | "
            f"{case.batch}·{case.heads}/{case.kv_heads} | {case.lengths} | {case.head_dim} | {case.mask} {case.option} | "
            f"{case.threads} | {row['fa2_gflops']:.0f} | {row['pytorch_gflops']:.0f} | "
            f"**{row['speedup']:.2f}** ({row['speedup_low']:.2f}–{row['speedup_high']:.2f}) | "
            f"{'' if jax is None else format(jax / row['fa2_ms'], '.2f')} | "
            f"{'' if share is None else format(share, '.2f')} |" + (onednn_cells(row) if onednn else ""))
    return "\n".join(lines) + "\n"


def plot_rates(report, path):
    """The paper's figures: one panel per head dim and mask, GFLOP/s over the length."""
    from matplotlib import pyplot
    rows = [(Case.parse(row["case"]), row) for row in report["rows"]]
    directions = [d for d in ("forward", "backward", "both") if any(c.direction == d for c, _ in rows)]
    panels = sorted({(c.causal, c.head_dim) for c, _ in rows})
    figure, axes = pyplot.subplots(len(directions), len(panels), squeeze=False,
                                   figsize=(4 * len(panels), 3 * len(directions)))
    for i, direction in enumerate(directions):
        for j, (causal, head_dim) in enumerate(panels):
            axis = axes[i][j]
            points = sorted(((c.length, r) for c, r in rows if c.direction == direction
                             and (c.causal, c.head_dim) == (causal, head_dim)), key=lambda p: p[0])
            for key, label in (("fa2_gflops", "fa2"), ("pytorch_gflops", "PyTorch")):
                axis.plot([n for n, _ in points], [r[key] for _, r in points], "o-", label=label)
            axis.set(title=f"{direction}, D {head_dim}, {'causal' if causal else 'full'}",
                     xlabel="sequence length", ylabel="GFLOP/s", ylim=(0, None))
            axis.set_xscale("log", base=2)
            axis.legend()
    figure.suptitle(f"{report['cpu']}, {report['cores']} cores")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def plot_speedups(report, path):
    """One panel per dtype, direction and thread count: speedup over the length."""
    from matplotlib import pyplot
    rows = [(Case.parse(row["case"]), row) for row in report["rows"]]
    dtypes = [d for d in ("bf16", "f16", "f32") if any(c.dtype == d for c, _ in rows)]
    columns = sorted({(c.threads, c.direction) for c, _ in rows}, key=lambda c: (c[0], c[1] != "forward"))
    figure, axes = pyplot.subplots(len(dtypes), len(columns), squeeze=False,
                                   figsize=(4 * len(columns), 3 * len(dtypes)))
    for i, dtype in enumerate(dtypes):
        for j, (threads, direction) in enumerate(columns):
            axis = axes[i][j]
            lines = {}
            for case, row in rows:
                if (case.dtype, case.threads, case.direction) == (dtype, threads, direction):
                    key = (case.head_dim, case.causal, case.heads // case.kv_heads, case.option)
                    lines.setdefault(key, []).append((case.length, row["speedup"]))
            for (head_dim, causal, group, option), points in sorted(lines.items()):
                points.sort()
                axis.plot([n for n, _ in points], [s for _, s in points],
                          marker={"dbias": "^", "dropout": "s"}.get(option, "o" if group == 1 else "x"),
                          linestyle="--" if causal else "-",
                          color=f"C{(64, 128, 256).index(head_dim) if head_dim in (64, 128, 256) else 3}",
                          label=f"D {head_dim} {option}{' causal' if causal else ''}"
                                f"{'' if group == 1 else f' GQA {group}:1'}")
            axis.axhline(1, color="gray", linewidth=0.8)
            axis.set(title=f"{direction}, {dtype}, {threads} thread{'s' if threads > 1 else ''}",
                     xlabel="sequence length", ylabel="fa2 / PyTorch", ylim=(0, None))
            axis.set_xscale("log", base=2)
    labels = {}
    for axis in axes.flat:
        labels.update({label: handle for handle, label in zip(*axis.get_legend_handles_labels())})
    figure.suptitle(f"{report['cpu']}, {report['cores']} cores")
    figure.tight_layout()
    figure.legend(labels.values(), labels.keys(), loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120, bbox_inches="tight")


def save_rows(report, out):
    """Writes OUT.json."""
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def save(report, out):
    """Writes OUT.json, OUT.md and OUT.png; returns the text of OUT.md."""
    save_rows(report, out)
    shapes = report["suite"] == "shapes"
    text = shapes_markdown(report) if shapes else markdown(report)
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    if report["rows"]:
        try:
            import matplotlib
            matplotlib.use("Agg")
        except ImportError:
            print("no plot: matplotlib is not installed", file=sys.stderr)
            return text
        draw = plot_shapes if shapes else plot_rates if report["suite"] == "fa2-paper" else plot_speedups
        draw(report, out.with_suffix(".png"))
    return text

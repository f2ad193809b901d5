#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/training_steps.md from bench/results/steps, whose files bench/train_step.py --json makes.

    scripts/step_results.py             writes the page
    scripts/step_results.py --check     changes nothing, fails where the page differs from the files
"""

import argparse
import json
import sys

from results import ROOT, fill

PAGE = ROOT / "docs/training_steps.md"
RESULTS = ROOT / "bench/results/steps"
# Below this a step is not told from one that takes as long.
HELPS = 1.05


def load():
    """The newest file of each machine."""
    newest = {}
    for path in sorted(RESULTS.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        report["file"] = path.name
        machine = report["machine"]
        key = (machine["cpu"], machine["cores"])
        if key not in newest or newest[key]["machine"]["date"] <= machine["date"]:
            newest[key] = report
    if not newest:
        sys.exit(f"{RESULTS} holds no results: bench/train_step.py --json makes them")
    return [newest[key] for key in sorted(newest)]


def model(case):
    heads = f"{case['heads']} heads" + (f", {case['kv_heads']} of keys" if case["kv_heads"] != case["heads"] else "")
    return f"{case['layers']} layers of {case['hidden']}, {heads}, {case['vocab']:,} ids"


def step(case):
    documents = case.get("documents", 1)
    return (f"N {case['tokens']:,}" + (f" in {documents} documents" if documents > 1 else "") +
            (f", window {case['window']:,}" if case["window"] else ""))


def share(row, kind):
    return f"{100 * row['shares'].get(kind, 0):.0f}%"


def memory(row):
    return "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.2f}"


def in_order(results):
    return sorted(results, key=lambda r: (model(r["case"]), r["case"]["dtype"], r["case"]["threads"], r["case"]["window"],
                                          r["case"].get("documents", 1), r["case"]["tokens"]))


def table(results):
    lines = ["| | sdpa, ms | tokens/s | `replace_sdpa` | `accelerate` | peak memory, GB: sdpa, `accelerate` |"
             " attention's share: sdpa, `accelerate` |", "|---|---|---|---|---|---|---|"]
    for result in in_order(results):
        case, rows = result["case"], result["variants"]
        sdpa, replaced, accelerated = (rows[name] for name in ("sdpa", "replace_sdpa", "accelerate"))
        lines.append(
            f"| {case['dtype']}, {step(case)} | {1e3 * sdpa['median_seconds']:,.0f} | {sdpa['tokens_per_second']:,.0f} | "
            f"{replaced['speedup']:.2f}× | **{accelerated['speedup']:.2f}×** | {memory(sdpa)}, {memory(accelerated)} | "
            f"{share(sdpa, 'attention')}, {share(accelerated, 'attention')} |")
    return lines


def groups(results):
    """{(model, threads): its results}."""
    found = {}
    for result in results:
        found.setdefault((model(result["case"]), result["case"]["threads"]), []).append(result)
    return found


def without_help(results):
    names = [f"{r['case']['dtype']}, {step(r['case'])}" for r in in_order(results)
             if r["variants"]["accelerate"]["speedup"] < HELPS]
    return ["", f"Less than {HELPS} times as fast: {'; '.join(names)}."] if names else []


def machine_part(report):
    machine = report["machine"]
    fa2 = machine["fa2"]
    lines = [f"### {machine['cpu']}", "",
             f"{machine['cores']} core{'s' if machine['cores'] > 1 else ''}; {machine['date']}, PyTorch "
             f"{machine['torch'].split('+')[0]}, transformers {machine['transformers']}, fa2 {fa2['commit']} "
             f"(`{fa2['target']}/{fa2['engine']}`); [`{report['file']}`](../bench/results/steps/{report['file']})."]
    for (name, threads), results in groups(report["results"]).items():
        title = f"{name}; {threads} thread{'s' if threads > 1 else ''}"
        lines += ["", f"**{title}**", "", *table(results), *without_help(results)]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    page = fill(PAGE, "training steps", "\n".join(map(machine_part, load())), "scripts/step_results.py")
    if page == PAGE.read_text(encoding="utf-8"):
        return
    if options.check:
        sys.exit(f"{PAGE.relative_to(ROOT)} is not what bench/results/steps says: run scripts/step_results.py")
    PAGE.write_text(page, encoding="utf-8")
    print(f"Wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

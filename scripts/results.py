#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures this machine into bench/results/, and writes the pages' tables and chart from what lies there.

    scripts/results.py run [--python VENV/bin/python]     some five minutes on 2 idle cores; writes CPU-DATE.json
    scripts/results.py tables                             docs/performance.md, README.md, docs/images/speed-*.svg
    scripts/results.py tables --check                     changes nothing, fails where they differ from the files

`run` needs build/bench/bench_attention (cmake --build build --target bench_attention); with --python, an interpreter
that has PyTorch and fa2_cpu, it compares with PyTorch too (bench/compare_pytorch.py). On a machine without this
repository's history name the revision with --commit. Nothing else should run meanwhile.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

from results_chart import write_charts

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"
COLUMNS = [("64", "full"), ("128", "full"), ("256", "full"), ("128", "causal")]
ROWS = [("bf16", "backward"), ("bf16", "forward"), ("f32", "backward"), ("f32", "forward")]
CHART_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)


def heads_for(threads):
    return 4 if threads == 1 else min(max(8, threads), 64)


def case_name(direction, dtype, length, dim, mask, threads):
    heads = heads_for(threads)
    return f"{direction}/{dtype}/B1/H{heads}/KV{heads}/N{length}/D{dim}/{mask}/T{threads}"


def table_cases(threads):
    return [case_name(direction, dtype, 2048, dim, mask, threads)
            for dtype, direction in ROWS for dim, mask in COLUMNS]


def chart_cases(threads):
    return [case_name(direction, "bf16", length, 128, "causal", threads)
            for direction in ("backward", "forward") for length in CHART_LENGTHS]


# ---- Measuring ----------------------------------------------------------------------------------


def cpu_name():
    """The maker's name, with the generation where the host hides the model."""
    text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")

    def field(name):
        match = re.search(rf"^{name}\s*: (.*)$", text, re.MULTILINE)
        return match.group(1).strip() if match else ""

    name = re.sub(r"\((R|TM)\)|CPU|Processor|@.*", "", field("model name")).strip() or os.uname().machine
    name = re.sub(r"\s+", " ", name)
    family, model = field("cpu family"), field("model")
    generation = {("25", "1"): "Zen 3", ("25", "17"): "Zen 4", ("26", "2"): "Zen 5", ("26", "17"): "Zen 5",
                  ("6", "143"): "Sapphire Rapids", ("6", "207"): "Emerald Rapids",
                  ("6", "173"): "Granite Rapids"}.get((family, model))
    return f"{name} ({generation})" if generation else name


def revision():
    result = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--match", "v*"],
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return result.stdout.strip() or None


def bench(binary, name, min_time):
    result = subprocess.run([binary, f"--case={name}", "--benchmark_format=json",
                             f"--benchmark_min_time={min_time}"],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        sys.exit(f"{binary} failed:\n{result.stderr}")
    entry = json.loads(result.stdout)["benchmarks"][0]
    return None if entry.get("error_occurred") else entry


def measure_rates(binary, names, rounds, min_time):
    """Each case once a round, so that a slow minute of the machine does not fall on one case alone. A rate is that of
    the best round: who else uses the machine can only make a call slower."""
    found = {name: [] for name in names}
    for index in range(rounds):
        for name in names:
            entry = bench(binary, name, min_time)
            if entry is not None:
                found[name].append(entry)
        print(f"round {index + 1} of {rounds} done", flush=True)
    rows = []
    for name, entries in found.items():
        if entries:
            best = max(entries, key=lambda entry: entry["GFLOPS"])
            rows.append({"case": name,
                         "kernels": best["label"],
                         "gflops": round(best["GFLOPS"], 1),
                         "gflops_median": round(statistics.median(e["GFLOPS"] for e in entries), 1),
                         "gflops_least": round(min(e["GFLOPS"] for e in entries), 1),
                         "peak_share": round(best["peak_share"], 3)})
    return rows


def measure_pytorch(python, names, case_time):
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "compare"
        command = [python, str(ROOT / "bench/compare_pytorch.py"), "--out", str(out), "--case-time", str(case_time)]
        for name in names:
            command += ["--case", name]
        subprocess.run(command, check=True)
        report = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    keep = ("case", "rounds", "fa2_gflops", "pytorch_gflops", "speedup", "speedup_low", "speedup_high")
    rows = [{key: round(row[key], 3) if isinstance(row[key], float) else row[key] for key in keep}
            for row in report["rows"]]
    return {"pytorch": report["pytorch"], "through": report["through"], "beside_pytorch": rows}


def run(options):
    cores = len(os.sched_getaffinity(0))
    threads = sorted({1, cores})
    names = [name for count in threads for name in table_cases(count)]
    result = {
        "cpu": options.cpu_name or cpu_name(),
        "cores": cores,
        "date": datetime.date.today().isoformat(),
        "commit": options.commit or revision() or "unknown",
        "rounds": options.rounds,
        "rates": measure_rates(str(options.bench), names, options.rounds, options.min_time),
    }
    if options.python:
        charted = [name for name in chart_cases(cores) if name not in names]
        result.update(measure_pytorch(options.python, names + charted, options.case_time))
    slug = re.sub(r"[^a-z0-9]+", "-", result["cpu"].lower()).strip("-")
    path = options.out or RESULTS / f"{slug}-{cores}-cores-{result['date']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"Saved {path}")


# ---- Tables -------------------------------------------------------------------------------------


def load():
    """The newest file of each machine, fastest machine first."""
    newest = {}
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        result["file"] = path.name
        key = (result["cpu"], result["cores"])
        if key not in newest or newest[key]["date"] <= result["date"]:
            newest[key] = result
    if not newest:
        sys.exit(f"{RESULTS} holds no results: scripts/results.py run makes them")
    return sorted(newest.values(), key=lambda r: -max(row["gflops"] for row in r["rates"]))


def machine_line(result):
    beside = ""
    if "pytorch" in result:
        beside = f", PyTorch {result['pytorch'].split('+')[0]} (fa2 through {result['through']})"
    cores = f"{result['cores']} core{'s' if result['cores'] > 1 else ''}"
    return f"{cores}; {result['date']}, fa2 {result['commit']}{beside}"


def speedups(result):
    return {row["case"]: row for row in result.get("beside_pytorch", [])}


def machine_table(result):
    rates = {row["case"]: row for row in result["rates"]}
    beside = speedups(result)
    kernels = next(row["kernels"] for row in result["rates"] if "/bf16/" in row["case"])
    lines = [f"### {result['cpu']}", "",
             f"{machine_line(result)}; bf16 by `{kernels}`; the best of {result['rounds']} rounds; "
             f"[`{result['file']}`](../bench/results/{result['file']}).", ""]
    for threads in sorted({1, result["cores"]}):
        title = "one thread" if threads == 1 else f"{threads} threads"
        lines += [f"| {title}, H {heads_for(threads)}, N 2048 | " + " | ".join(
            f"D {dim}{', causal' if mask == 'causal' else ''}" for dim, mask in COLUMNS) + " |",
            "|---|" + "---|" * len(COLUMNS)]
        for dtype, direction in ROWS:
            cells = []
            for dim, mask in COLUMNS:
                name = case_name(direction, dtype, 2048, dim, mask, threads)
                if name not in rates:
                    cells.append("")
                    continue
                row = rates[name]
                cell = f"{row['gflops']:,.0f} ({row['peak_share']:.2f})"
                if name in beside:
                    cell += f" {beside[name]['speedup']:.1f}×"
                cells.append(cell)
            lines.append(f"| {dtype} {direction} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def readme_table(result):
    beside = speedups(result)
    threads = result["cores"]
    lines = [f"N 2048, D 128, {heads_for(threads)} heads, causal, on all cores of {result['cpu']}, {machine_line(result)}.", "",
             "| | fa2, GFLOP/s | PyTorch, GFLOP/s | fa2 / PyTorch |", "|---|---|---|---|"]
    for dtype, direction in ROWS:
        row = beside[case_name(direction, dtype, 2048, 128, "causal", threads)]
        lines.append(f"| {dtype} {direction} | {row['fa2_gflops']:,.0f} | {row['pytorch_gflops']:,.0f} | "
                     f"**{row['speedup']:.1f}** ({row['speedup_low']:.1f}–{row['speedup_high']:.1f}) |")
    return "\n".join(lines) + "\n"


def chart_series(result):
    """[(direction, [(N, fa2, PyTorch)])] of the chart's cases."""
    beside = speedups(result)
    series = []
    for direction in ("backward", "forward"):
        points = [(length, row["fa2_gflops"], row["pytorch_gflops"]) for length in CHART_LENGTHS
                  if (row := beside.get(case_name(direction, "bf16", length, 128, "causal", result["cores"])))]
        series.append((direction, points))
    return series


def fill(path, name, text, script="scripts/results.py"):
    """What path holds with the part between its markers replaced."""
    page = path.read_text(encoding="utf-8")
    begin, end = f"<!-- {name}: written by {script} -->\n", f"<!-- end of {name} -->"
    if begin not in page or end not in page:
        sys.exit(f"{path} lacks the markers of {name!r}")
    before, rest = page.split(begin)
    return before + begin + "\n" + text.rstrip("\n") + "\n\n" + end + rest.split(end)[1]


def tables(options):
    results = load()
    compared = next((r for r in results if r.get("beside_pytorch")), None)
    if compared is None:
        sys.exit("no file of bench/results compares with PyTorch: scripts/results.py run --python VENV/bin/python")
    wanted = {ROOT / "docs/performance.md": fill(ROOT / "docs/performance.md", "results",
                                                 "\n".join(map(machine_table, results))),
              ROOT / "README.md": fill(ROOT / "README.md", "results", readme_table(compared))}
    title = f"bf16, D 128, {heads_for(compared['cores'])} heads, causal: {compared['cpu']}, {compared['cores']} cores"
    wanted.update(write_charts(ROOT / "docs/images", title, chart_series(compared)))
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if options.check:
        if stale:
            sys.exit("not what bench/results says (run scripts/results.py tables): " +
                     ", ".join(str(path.relative_to(ROOT)) for path in stale))
        return
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
        print(f"Wrote {path.relative_to(ROOT)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="measure this machine")
    runs.add_argument("--bench", type=pathlib.Path, default=ROOT / "build/bench/bench_attention")
    runs.add_argument("--python", help="interpreter with PyTorch and fa2_cpu; without it no comparison")
    runs.add_argument("--rounds", type=int, default=3, help="runs of every case (default 3)")
    runs.add_argument("--min-time", type=float, default=0.2, help="seconds a case and round (default 0.2)")
    runs.add_argument("--case-time", type=float, default=1.5, help="seconds a case beside PyTorch (default 1.5)")
    runs.add_argument("--cpu-name", help="default: from /proc/cpuinfo")
    runs.add_argument("--commit", help="default: git describe")
    runs.add_argument("--out", type=pathlib.Path, help="default: bench/results/CPU-CORES-DATE.json")
    runs.set_defaults(function=run)
    writes = commands.add_parser("tables", help="write tables and chart")
    writes.add_argument("--check", action="store_true")
    writes.set_defaults(function=tables)
    options = parser.parse_args()
    options.function(options)


if __name__ == "__main__":
    main()

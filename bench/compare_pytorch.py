#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""fa2 beside PyTorch's scaled_dot_product_attention on this machine, forward and backward.

    bench/compare_pytorch.py --quick                      about five minutes
    bench/compare_pytorch.py                              the whole matrix: hours
    bench/compare_pytorch.py --suite shapes               attention as some 80 layers of models call it (bench/shapes.py)
    bench/compare_pytorch.py --suite shapes --quick       half of them, under two minutes
    bench/compare_pytorch.py --suite fa2-paper            the FlashAttention-2 paper's setting, with its plot
    bench/compare_pytorch.py --suite options              attn_mask, its gradient, boolean masks, dropout
    bench/compare_pytorch.py --case backward/bf16/B1/H8/KV8/N2048/D128/causal/T1
    bench/compare_pytorch.py --filter 'backward/bf16.*D128' --when alone linear --jax
    bench/compare_pytorch.py --suite onednn --onednn build/bench/onednn/bench_onednn

Both sides run in this process, on PyTorch's threads, on the same tensors: fa2_cpu.torch's
scaled_dot_product_attention and PyTorch's. Where the package cannot be imported, or with --bench, fa2 is
the bench binary (default build/bench/bench_attention), a process each time, so that another machine needs
only python3, PyTorch, NumPy and that binary.

Times on shared machines are noisy: the two sides take turns (A B, B A, ...), and what is printed is
the median of the rounds' ratios with the middle half of them. Every case is saved as soon as it is
measured (OUT.json), and cases that OUT.json already holds are not measured again, so a run that was
cut short goes on where it stopped; results of another build of fa2, of another machine or version
are refused. OUT.md is the table, OUT.png the plot (with matplotlib).

PyTorch runs its own fused kernel (flash_attention_for_cpu) for all cases but a mask's gradient and
dropout, for which it has none; grouped heads use enable_gqa. Both sides read and write dense
[B, H, N, D] arrays, compute all of dQ, dK, dV, and gradients have the inputs' dtype. A bias is
[1, H, Nq, Nk] in the inputs' dtype, a mask boolean, [1, 1, Nq, Nk]: all true, or of documents of 500;
padding is a boolean [B, 1, 1, Nk]. --when linear: each call comes right after an nn.Linear on the same
number of tokens, whose threads still spin then; only the call is timed. --jax: jax.nn's function too, on
all cores and on threads of its own. --onednn: oneDNN Graph's attention for training, by a process of its
own that waits for its turns; cases without options or grouped heads.
"""

import argparse
import hashlib
import json
import os
import pathlib
import platform
import re
import statistics
import sys
import time

from pytorch_cases import CORES, SUITES, Case, suite_cases
from pytorch_report import save, save_rows
from pytorch_sides import Attention, Fa2Bench, Inputs, Jax, OneDnn, difference

# (seconds a side and round, seconds a case, rounds at most). A call of the shapes takes microseconds, or some
# hundred milliseconds.
TIMES = {False: (0.05, 3.0, 15), True: (0.01, 0.5, 15)}
QUICK_SHAPES = (0.004, 0.1, 7)


class Fa2Package(Attention):
    """Runs a case with fa2_cpu.torch."""

    def __init__(self, inputs, with_peak):
        import fa2_cpu
        import fa2_cpu.torch
        super().__init__(inputs, fa2_cpu.torch.scaled_dot_product_attention)
        self.core, self.with_peak = fa2_cpu._core, with_peak
        self.info = self.core.info(inputs.case.threads, "openmp")
        self.details = {"fa2": f"{self.info['target']}/{self.info['engine']} on {self.info['pool']}"}

    def add_peak(self, rate):
        """The peak of the arithmetic unit, measured now. AMX takes every dtype; other engines of bf16 take bf16."""
        engine = self.info["engine"]
        if engine != "amx" and self.inputs.case.dtype != "bf16":
            engine = "f32"
        peak = self.core.measure_peak(self.inputs.case.threads, engine) if self.with_peak else None
        if peak:
            self.details.update(peak_gflops=peak / 1e9, peak_share=rate / peak)


def measure(case, when, make_fa2, options):
    import torch
    inputs = Inputs(case)
    sides = {"fa2": make_fa2(case, inputs),
             "pytorch": Attention(inputs, torch.nn.functional.scaled_dot_product_attention)}
    if options.jax and case.threads == CORES and case.option not in ("dbias", "dropout"):
        sides["jax"] = Jax(inputs)
    if options.onednn and OneDnn.takes(case):
        try:
            sides["onednn"] = OneDnn(case, options.onednn)
        except RuntimeError as error:
            print(f"{case.name}: without oneDNN: {error}", file=sys.stderr)
    try:
        return measure_sides(case, when, inputs, sides, options)
    finally:
        if "onednn" in sides:
            sides["onednn"].close()


def measure_sides(case, when, inputs, sides, options):
    before = inputs.linear() if when == "linear" else None
    # The first calls of each side warm it up and say how many rounds the time allows.
    first = {name: min(side.seconds(0, before) for _ in range(2)) for name, side in sides.items()}
    per_round = sum(max(seconds, options.min_time) for seconds in first.values())
    rounds = int(min(max(options.case_time / per_round, 3), options.max_rounds))
    times = {name: [] for name in sides}
    # PyTorch's workers spin for some milliseconds after a parallel loop, in the way of other threads.
    pause = case.threads > 1 and (len(sides) > 2 or not sides["fa2"].details.get("fa2", "").endswith("openmp"))
    for index in range(rounds):
        for name in list(sides)[:: 1 if index % 2 == 0 else -1]:
            if pause and before is None:
                time.sleep(0.01)
                sides[name].seconds(0)
            times[name].append(sides[name].seconds(options.min_time, before))
    ratios = sorted(p / f for p, f in zip(times["pytorch"], times["fa2"]))
    medians = {name: statistics.median(values) for name, values in times.items()}
    row = {"case": case.name, "when": when, "rounds": rounds}
    for name, seconds in medians.items():
        row[f"{name}_gflops"] = case.flops / seconds / 1e9
        row[f"{name}_ms"] = seconds * 1e3
    row["speedup"] = statistics.median(ratios)
    row["speedup_low"] = ratios[rounds // 4]
    row["speedup_high"] = ratios[-1 - rounds // 4]
    fa2 = sides["fa2"]
    row["difference"] = difference(fa2, sides["pytorch"]) if isinstance(fa2, Attention) else None
    if isinstance(fa2, Fa2Package):
        fa2.add_peak(case.flops / medians["fa2"])
    row.update(fa2.details)
    if "onednn" in sides:
        row.update(sides["onednn"].details)
    return row


def cpu_name():
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
        return re.search(r"model name\s*: (.*)", text).group(1)
    except (OSError, AttributeError):
        return platform.processor() or platform.machine()


def build_of(path):
    """What tells one build of fa2 from another."""
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()[:12]


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=tuple(SUITES), default="full")
    parser.add_argument("--quick", action="store_true", help="a short list of cases")
    parser.add_argument("--case", action="append", help="this case only; may be repeated")
    parser.add_argument("--filter", default="", help="only cases that match this regular expression")
    parser.add_argument("--when", nargs="+", choices=("alone", "linear"), default=["alone"],
                        help="calls one after another, or each right after an nn.Linear (default: alone)")
    parser.add_argument("--jax", action="store_true", help="jax.nn.dot_product_attention on the CPU too")
    parser.add_argument("--onednn", metavar="PROGRAM", type=pathlib.Path,
                        help="oneDNN Graph too, by bench_onednn (docs/bench.md)")
    parser.add_argument("--bench", type=pathlib.Path,
                        help="use this bench_attention even where the package fa2_cpu is importable")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("compare_pytorch"),
                        help="OUT.json, OUT.md, OUT.png (default compare_pytorch)")
    parser.add_argument("--min-time", type=float,
                        help="seconds of calls per side and round (default 0.05; shapes: 0.01, quick 0.004)")
    parser.add_argument("--case-time", type=float,
                        help="seconds per case, at least three rounds (default 3; shapes: 0.5, quick 0.1)")
    parser.add_argument("--max-rounds", type=int, help="(default 15, quick shapes 7)")
    parser.add_argument("--no-peak", action="store_true", help="do not measure the peak after each case (60 ms)")
    parser.add_argument("--fresh", action="store_true", help="measure again what OUT.json holds")
    options = parser.parse_args()
    if options.onednn and not options.onednn.is_file():
        sys.exit(f"--onednn {options.onednn} is not there: it must be the program bench_onednn, which cmake builds with "
                 "-DFA2_BENCH_ONEDNN=ON")
    shapes = options.suite == "shapes"
    defaults = QUICK_SHAPES if shapes and options.quick else TIMES[shapes]
    for name, value in zip(("min_time", "case_time", "max_rounds"), defaults):
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def choose_fa2(options):
    """(how it is called, its build, what makes the side of a case)."""
    if options.bench is None:
        try:
            import fa2_cpu.torch
            # A quick run has no time for it.
            with_peak = not options.no_peak and not (options.suite == "shapes" and options.quick)
            return ("fa2_cpu.torch, in turns in one process", build_of(fa2_cpu._core.__file__),
                    lambda case, inputs: Fa2Package(inputs, with_peak))
        except ImportError:
            options.bench = pathlib.Path(__file__).resolve().parent.parent / "build/bench/bench_attention"
    binary = options.bench.resolve()
    if not binary.is_file():
        sys.exit(f"neither the Python package fa2_cpu nor the bench binary {binary} is there")
    if options.when != ["alone"]:
        sys.exit("--when linear needs the Python package fa2_cpu")
    return ("bench_attention, a process each time", build_of(binary),
            lambda case, inputs: Fa2Bench(case, str(binary)))


def load_earlier(report, path):
    """The rows of an earlier run of the same things; no run of others is gone on with."""
    earlier = json.loads(path.read_text(encoding="utf-8"))
    for key, what in (("build", "build of fa2"), ("cpu", "machine"), ("cores", "number of cores"),
                      ("pytorch", "version of PyTorch"), ("through", "way of calling fa2"), ("suite", "suite")):
        if earlier.get(key) != report[key]:
            sys.exit(f"{path} is of another {what} ({earlier.get(key)}, now {report[key]}): "
                     "choose another --out, or --fresh")
    return earlier["rows"]


def main():
    options = parse_arguments()
    try:
        import torch
    except ImportError:
        sys.exit("compare_pytorch needs PyTorch: pip install torch")
    if os.environ.get("FA2_NUM_THREADS"):
        sys.exit("FA2_NUM_THREADS is set; it must not be, since each case says its number of threads")
    through, build, make_fa2 = choose_fa2(options)
    if options.case:
        cases = [Case.parse(name) for name in options.case]
    else:
        suite = suite_cases(options.suite, options.quick)
        cases = [c for c in suite if re.search(options.filter, c.name)]

    report = {"cpu": cpu_name(), "cores": CORES, "pytorch": torch.__version__, "through": through,
              "build": build, "suite": options.suite, "rows": []}
    saved = options.out.with_suffix(".json")
    if saved.is_file() and not options.fresh:
        report["rows"] = load_earlier(report, saved)
    done = {(row["case"], row["when"]) for row in report["rows"]}
    print(f"{report['cpu']}, {CORES} cores; PyTorch {torch.__version__}; fa2 (build {build}) through {through}")

    jobs = [(case, when) for case in cases for when in options.when if (case.name, when) not in done]
    for index, (case, when) in enumerate(jobs):
        try:
            row = measure(case, when, make_fa2, options)
        except RuntimeError as error:
            print(f"{case.name}: {error}", file=sys.stderr)
            continue
        report["rows"].append(row)
        after = " after a Linear" if when == "linear" else ""
        apart = "" if row["difference"] is None else f"  differ by {row['difference']:.1e}"
        print(f"[{index + 1}/{len(jobs)}] {case.name}{after}: fa2 {row['fa2_ms']:.3f} ms, PyTorch "
              f"{row['pytorch_ms']:.3f} ms, {row['speedup']:.2f}x "
              f"({row['speedup_low']:.2f}-{row['speedup_high']:.2f}){apart}", flush=True)
        save_rows(report, options.out)
    print(save(report, options.out))
    print(f"Saved {options.out}.json, .md and, with matplotlib, .png")


if __name__ == "__main__":
    main()

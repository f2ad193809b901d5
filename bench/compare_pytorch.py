#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""fa2 beside PyTorch's scaled_dot_product_attention on this machine, forward and backward.

    bench/compare_pytorch.py --quick                      about five minutes
    bench/compare_pytorch.py                              the whole matrix: hours
    bench/compare_pytorch.py --suite fa2-paper            the FlashAttention-2 paper's setting, with its plot
    bench/compare_pytorch.py --suite options              attn_mask, its gradient, boolean masks, dropout
    bench/compare_pytorch.py --case backward/bf16/B1/H8/KV8/N2048/D128/causal/T1
    bench/compare_pytorch.py --filter 'backward/bf16.*D128'

fa2 is called through its Python package where that can be imported, else through the bench binary
(--bench, default build/bench/bench_attention), so that another machine needs only python3, PyTorch,
NumPy and that binary.

Times on shared machines are noisy: the two sides take turns (A B, B A, ...), and what is printed is
the median of the rounds' ratios with the middle half of them. Every case is saved as soon as it is
measured (OUT.json), and cases that OUT.json already holds are not measured again, so a run that was
cut short goes on where it stopped. OUT.md is the table, OUT.png the plot (with matplotlib).

PyTorch runs its own fused kernel (flash_attention_for_cpu) for all cases but a mask's gradient and
dropout, for which it has none; grouped heads use enable_gqa. Both sides read and write dense
[B, H, N, D] arrays, compute all of dQ, dK, dV, and gradients have the inputs' dtype. A bias is
[1, H, N, N] in the inputs' dtype, a mask boolean, [1, 1, N, N]: all true, or of documents of 500.
"""

import argparse
import json
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time

from pytorch_cases import CORES, SUITES, Case, suite_cases
from pytorch_report import save

DROPOUT = 0.1


class PyTorch:
    """Runs a case with torch.nn.functional.scaled_dot_product_attention."""

    def __init__(self, case):
        import torch
        self.torch, self.case = torch, case
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[case.dtype]
        torch.manual_seed(0)

        def tensor(heads):
            return torch.randn(case.batch, heads, case.length, case.head_dim).to(dtype)

        self.q, self.k, self.v = (
            tensor(h).requires_grad_() for h in (case.heads, case.kv_heads, case.kv_heads))
        self.dout = tensor(case.heads)
        self.mask = None
        if "bias" in case.option:
            self.mask = torch.randn(1, case.heads, case.length, case.length).to(dtype)
            self.mask.requires_grad_(case.option == "dbias")
        elif case.option.startswith("mask"):
            position = torch.arange(case.length) // (case.document or case.length)
            self.mask = (position[:, None] == position)[None, None]
        torch.set_num_threads(case.threads)
        self.out = self.forward()

    def forward(self):
        case = self.case
        options = {} if case.heads == case.kv_heads else {"enable_gqa": True}
        return self.torch.nn.functional.scaled_dot_product_attention(
            self.q, self.k, self.v, attn_mask=self.mask, is_causal=case.causal,
            dropout_p=DROPOUT if case.option == "dropout" else 0.0, **options)

    def backward(self, out):
        inputs = (self.q, self.k, self.v)
        if self.case.option == "dbias":
            inputs += (self.mask,)
        return self.torch.autograd.grad(out, inputs, self.dout, retain_graph=True)

    def run(self):
        if self.case.direction == "forward":
            with self.torch.no_grad():
                self.forward()
        elif self.case.direction == "backward":
            self.backward(self.out)
        else:
            self.backward(self.forward())

    def seconds(self, at_least):
        return time_calls(self.run, at_least)


class Fa2Package:
    """Runs a case with the Python package fa2_cpu on PyTorch's tensors."""

    def __init__(self, case, pytorch):
        import fa2_cpu as fa2
        self.fa2, self.case = fa2, case
        self.q, self.k, self.v = (t.detach() for t in (pytorch.q, pytorch.k, pytorch.v))
        self.dout = pytorch.dout
        self.options = {"causal": "top_left" if case.causal else None,
                        "num_threads": case.threads}
        if pytorch.mask is not None:
            self.options["bias"] = pytorch.mask.detach()
        if case.option == "dropout":
            self.options["dropout_p"] = DROPOUT
        self.out, self.lse = self.forward()

    def forward(self):
        return self.fa2.attention_forward(self.q, self.k, self.v, **self.options)

    def backward(self, out, lse):
        return self.fa2.attention_backward(self.dout, self.q, self.k, self.v, out, lse,
                                           want_dbias=self.case.option == "dbias",
                                           **self.options)

    def run(self):
        if self.case.direction == "forward":
            self.forward()
        elif self.case.direction == "backward":
            self.backward(self.out, self.lse)
        else:
            self.backward(*self.forward())

    def seconds(self, at_least):
        return time_calls(self.run, at_least)

    def difference(self, pytorch):
        """The largest relative L2 difference of out, dq, dk, dv, dbias from PyTorch's."""
        if self.case.option == "dropout":
            return None  # They drop other elements.
        grads = self.backward(self.out, self.lse)
        pairs = zip((self.out, grads.dq, grads.dk, grads.dv, grads.dbias),
                    (pytorch.out.detach(), *pytorch.backward(pytorch.out)))
        return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)

    @property
    def details(self):
        info = self.fa2.info()
        return {"fa2": f"{info['target']}/{info['engine']}"}


class Fa2Bench:
    """Runs a case with the bench binary, a process each time."""

    def __init__(self, case, binary):
        self.case, self.binary, self.details = case, binary, {}

    def seconds(self, at_least):
        result = subprocess.run(
            [self.binary, f"--case={self.case.name}", "--benchmark_format=json",
             f"--benchmark_min_time={at_least}"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if result.returncode != 0:
            sys.exit(f"{self.binary} failed:\n{result.stderr}")
        entry = json.loads(result.stdout)["benchmarks"][0]
        if entry.get("error_occurred"):
            raise RuntimeError(entry["error_message"])
        self.details = {"fa2": entry["label"], "peak_gflops": entry.get("peak_GFLOPS"),
                        "peak_share": entry.get("peak_share")}
        return self.case.flops / entry["GFLOPS"] / 1e9

    def difference(self, pytorch):
        del pytorch
        return None


def time_calls(function, at_least):
    """Seconds per call over at least that many seconds."""
    calls, begin = 0, time.perf_counter()
    while True:
        function()
        calls += 1
        elapsed = time.perf_counter() - begin
        if elapsed >= at_least:
            return elapsed / calls


def measure(case, make_fa2, options):
    pytorch = PyTorch(case)
    fa2 = make_fa2(case, pytorch)
    sides = {"fa2": fa2, "pytorch": pytorch}
    # The first call of each side warms it up and says how many rounds the time allows.
    first = {name: side.seconds(0) for name, side in sides.items()}
    per_round = sum(max(seconds, options.min_time) for seconds in first.values())
    rounds = int(min(max(options.case_time / per_round, 3), options.max_rounds))
    times = {"fa2": [], "pytorch": []}
    for index in range(rounds):
        for name in ("fa2", "pytorch") if index % 2 == 0 else ("pytorch", "fa2"):
            # OpenMP's workers spin for some milliseconds after a parallel loop.
            time.sleep(0.01)
            times[name].append(sides[name].seconds(options.min_time))
    ratios = sorted(p / f for p, f in zip(times["pytorch"], times["fa2"]))
    row = {
        "case": case.name,
        "rounds": rounds,
        "fa2_gflops": case.flops / statistics.median(times["fa2"]) / 1e9,
        "pytorch_gflops": case.flops / statistics.median(times["pytorch"]) / 1e9,
        "fa2_ms": statistics.median(times["fa2"]) * 1e3,
        "pytorch_ms": statistics.median(times["pytorch"]) * 1e3,
        "speedup": statistics.median(ratios),
        "speedup_low": ratios[rounds // 4],
        "speedup_high": ratios[-1 - rounds // 4],
        "difference": fa2.difference(pytorch),
    }
    row.update(fa2.details)
    return row


def cpu_name():
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
        return re.search(r"model name\s*: (.*)", text).group(1)
    except (OSError, AttributeError):
        return platform.processor() or platform.machine()


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=tuple(SUITES), default="full")
    parser.add_argument("--quick", action="store_true", help="a short list of cases")
    parser.add_argument("--case", action="append", help="this case only; may be repeated")
    parser.add_argument("--filter", default="", help="only cases that match this regular expression")
    parser.add_argument("--bench", type=pathlib.Path,
                        help="use this bench_attention even where the package fa2_cpu is importable")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("compare_pytorch"),
                        help="OUT.json, OUT.md, OUT.png (default compare_pytorch)")
    parser.add_argument("--min-time", type=float, default=0.05,
                        help="seconds of calls per side and round (default 0.05)")
    parser.add_argument("--case-time", type=float, default=3.0,
                        help="seconds per case, at least three rounds (default 3)")
    parser.add_argument("--max-rounds", type=int, default=15)
    parser.add_argument("--fresh", action="store_true", help="measure again what OUT.json holds")
    return parser.parse_args()


def main():
    options = parse_arguments()
    try:
        import torch
    except ImportError:
        sys.exit("compare_pytorch needs PyTorch: pip install torch")
    through = "its Python package"
    make_fa2 = Fa2Package
    if options.bench is None:
        try:
            import fa2_cpu as fa2
            del fa2
        except ImportError:
            options.bench = pathlib.Path(__file__).resolve().parent.parent / "build/bench/bench_attention"
    if options.bench is not None:
        binary = options.bench.resolve()
        if not binary.is_file():
            sys.exit(f"neither the Python package fa2_cpu nor the bench binary {binary} is there")
        through = "bench_attention"
        make_fa2 = lambda case, pytorch: Fa2Bench(case, str(binary))  # noqa: E731

    if options.case:
        cases = [Case.parse(name) for name in options.case]
    else:
        suite = suite_cases(options.suite, options.quick)
        cases = [c for c in suite if re.search(options.filter, c.name)]

    report = {"cpu": cpu_name(), "cores": CORES, "pytorch": torch.__version__, "through": through,
              "suite": options.suite, "rows": []}
    saved = options.out.with_suffix(".json")
    if saved.is_file() and not options.fresh:
        earlier = json.loads(saved.read_text(encoding="utf-8"))
        same = ("cpu", "cores", "pytorch", "through", "suite")
        if all(earlier.get(key) == report[key] for key in same):
            report["rows"] = earlier["rows"]
        else:
            sys.exit(f"{saved} is of another machine, version or suite: choose another --out, or --fresh")
    done = {row["case"] for row in report["rows"]}

    for index, case in enumerate(cases):
        if case.name in done:
            continue
        try:
            row = measure(case, make_fa2, options)
        except RuntimeError as error:
            print(f"{case.name}: {error}", file=sys.stderr)
            continue
        report["rows"].append(row)
        difference = "" if row["difference"] is None else f"  differ by {row['difference']:.1e}"
        print(f"[{index + 1}/{len(cases)}] {case.name}: fa2 {row['fa2_gflops']:.0f}, PyTorch "
              f"{row['pytorch_gflops']:.0f} GFLOP/s, {row['speedup']:.2f}x "
              f"({row['speedup_low']:.2f}-{row['speedup_high']:.2f}){difference}", flush=True)
        save(report, options.out, plot=False)
    save(report, options.out, plot=True)
    print(f"Saved {options.out}.json, .md and, with matplotlib, .png")


if __name__ == "__main__":
    main()

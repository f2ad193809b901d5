# SPDX-License-Identifier: Apache-2.0
"""Whole training steps of a language model: PyTorch's attention against fa2's, and against fa2 for every layer.

    python bench/train_step.py [--tokens 2048 ...] [--dtype bf16 f32] [--threads N ...] [--window W ...]
                               [--documents D ...] [--json FILE]

A step is forward, loss, backward and AdamW of a Llama-like model from transformers (Mistral's where a window is
given) on one sequence of random tokens, which may be several documents of equal length packed as transformers'
DataCollatorWithFlattening packs them: position_ids that begin again, and cu_seq_lens. Three ways to run the same model take turns, step by step, in one process:

    sdpa          attn_implementation="sdpa"
    replace_sdpa  the same under fa2_cpu.torch.replace_sdpa()
    accelerate    fa2_cpu.hf.accelerate(model)

Printed for each: the median of the steps' times with the least and the greatest, tokens per second, the ratio to
sdpa, the peak memory of a process of its own that runs nothing but this (--no-memory leaves it out), and where the
time goes by PyTorch's profiler. --json writes the same with all times, and with the machine and the versions; a file of
the same machine, versions and build of fa2 is added to, so that a run can come in pieces, and another one is refused.
scripts/step_results.py makes docs/training_steps.md from such files.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import itertools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}

# Of the profiler's operators: what their names begin with or contain, first match first.
KINDS = {
    "attention": ("attention", "flash"),
    "loss": ("cross_entropy", "nll_loss", "log_softmax"),
    "optimizer": ("adam", "Optimizer"),
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul", "mkldnn"),
    "norms, rotary, swiglu": ("rms_norm", "rotary", "swiglu", "silu", "rsqrt", "aten::pow", "aten::mean"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    tokens: int
    dtype: str
    threads: int
    window: int  # 0: none
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    documents: int = 1

    def __str__(self) -> str:
        window = f", window {self.window}" if self.window else ""
        documents = f" in {self.documents} documents" if self.documents > 1 else ""
        return (
            f"N {self.tokens}{documents}, {self.dtype}, {self.threads} threads{window}: {self.layers} layers of {self.hidden}, "
            f"{self.heads} heads, {self.kv_heads} for keys, {self.vocab} ids"
        )


def pack(tokens: int, documents: int) -> dict[str, Any]:
    """What a model is given beside the tokens of packed documents."""
    bounds = torch.linspace(0, tokens, documents + 1).to(torch.int32)
    lengths = bounds.diff()
    return {
        "position_ids": torch.cat([torch.arange(int(length)) for length in lengths])[None],
        "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds,
        "max_length_q": int(lengths.max()), "max_length_k": int(lengths.max()),
    }  # fmt: skip


class Training:
    """A model with its optimizer and one batch."""

    def __init__(self, case: Case) -> None:
        import transformers

        torch.set_num_threads(case.threads)
        torch.manual_seed(0)
        sizes = dict(
            vocab_size=case.vocab, hidden_size=case.hidden, intermediate_size=8 * case.hidden // 3 // 64 * 64,
            num_hidden_layers=case.layers, num_attention_heads=case.heads, num_key_value_heads=case.kv_heads,
            max_position_embeddings=case.tokens, use_cache=False,
        )  # fmt: skip
        if case.window:
            config = transformers.MistralConfig(**sizes, sliding_window=case.window)
            kind = transformers.MistralForCausalLM
        else:
            config = transformers.LlamaConfig(**sizes)
            kind = transformers.LlamaForCausalLM
        self.model = kind._from_config(config, attn_implementation="sdpa").to(DTYPES[case.dtype]).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        ids = torch.randint(0, case.vocab, (1, case.tokens))
        self.batch = {"input_ids": ids, "labels": ids}
        if case.documents > 1:
            self.batch.update(pack(case.tokens, case.documents))

    def step(self) -> float:
        """The loss."""
        loss = self.model(**self.batch).loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


@contextlib.contextmanager
def _replace_sdpa(training: Training) -> Iterator[None]:
    import fa2_cpu.torch

    with fa2_cpu.torch.replace_sdpa():
        yield


@contextlib.contextmanager
def _accelerate(training: Training) -> Iterator[None]:
    import fa2_cpu.hf

    with fa2_cpu.hf.accelerate(training.model):
        yield


VARIANTS: dict[str, Callable[[Training], Any]] = {
    "sdpa": lambda training: contextlib.nullcontext(),
    "replace_sdpa": _replace_sdpa,
    "accelerate": _accelerate,
}


def measure_times(training: Training, rounds: int) -> dict[str, list[float]]:
    """Seconds of every step, the variants taking turns; one round before is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for round in range(rounds + 1):
        for name, variant in VARIANTS.items():
            with variant(training):
                start = time.perf_counter()
                training.step()
                if round > 0:
                    seconds[name].append(time.perf_counter() - start)
    return seconds


def _kind_of(operator: str) -> str:
    for kind, parts in KINDS.items():
        if any(part in operator for part in parts):
            return kind
    return "other"


def measure_shares(training: Training, variant: str) -> dict[str, float]:
    """Shares of a step's time by kind of operator, each operator without those that it calls."""
    with VARIANTS[variant](training), torch.profiler.profile() as profiler:
        training.step()
    sums: dict[str, float] = {}
    for event in profiler.key_averages():
        kind = _kind_of(event.key)
        sums[kind] = sums.get(kind, 0.0) + event.self_cpu_time_total
    total = sum(sums.values())
    return {kind: sums[kind] / total for kind in (*KINDS, "other") if kind in sums}


def run_alone(case: Case, variant: str) -> None:
    """Two steps, in a process whose peak is then that of the variant; prints it in bytes."""
    training = Training(case)
    with VARIANTS[variant](training):
        for _ in range(2):
            training.step()
    # Not getrusage, whose peak a process takes over from the one that started it.
    with open("/proc/self/status") as lines:
        print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024)


def measure_peak(case: Case, variant: str) -> int:
    command = [sys.executable, __file__, "--alone", variant, "--case", json.dumps(dataclasses.asdict(case))]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def measure(case: Case, rounds: int, memory: bool) -> dict[str, Any]:
    training = Training(case)
    times = measure_times(training, rounds)
    shares = {variant: measure_shares(training, variant) for variant in VARIANTS}
    del training
    rows = {}
    for variant, seconds in times.items():
        median = statistics.median(seconds)
        rows[variant] = {
            "seconds": seconds,
            "median_seconds": median,
            "tokens_per_second": case.tokens / median,
            "speedup": statistics.median(times["sdpa"]) / median,
            "peak_bytes": measure_peak(case, variant) if memory else None,
            "shares": shares[variant],
        }
    return {"case": dataclasses.asdict(case), "variants": rows}


def report(case: Case, result: dict[str, Any]) -> None:
    print(f"\n{case}")
    print(f"{'':14}{'ms (least - greatest)':>30}{'tokens/s':>12}{'speedup':>10}{'peak MB':>10}  shares of the time")
    for name, row in result["variants"].items():
        ms = [1e3 * x for x in (row["median_seconds"], min(row["seconds"]), max(row["seconds"]))]
        times = f"{ms[0]:.0f} ({ms[1]:.0f} - {ms[2]:.0f})"
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}"
        shares = ", ".join(f"{kind} {100 * share:.0f}%" for kind, share in row["shares"].items() if share >= 0.005)
        print(f"{name:14}{times:>30}{row['tokens_per_second']:12.0f}{row['speedup']:10.2f}{peak:>10}  {shares}")


def revision() -> str:
    """Of the tree that this script is in."""
    command = ["git", "-C", str(pathlib.Path(__file__).parent), "describe", "--always", "--dirty", "--match", "v*"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.strip()
    return ""


def machine(name: str | None, commit: str | None) -> dict[str, Any]:
    import transformers

    import fa2_cpu

    cpu = platform.processor()
    with contextlib.suppress(OSError):
        with open("/proc/cpuinfo") as lines:
            cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    info = {key: value for key, value in fa2_cpu.info().items() if key in ("version", "target", "engine")}
    info["build"] = hashlib.sha256(pathlib.Path(fa2_cpu._core.__file__).read_bytes()).hexdigest()[:12]
    info["commit"] = commit or revision() or "unknown"
    return {
        "cpu": name or cpu,
        "cores": len(os.sched_getaffinity(0)),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fa2": info,
    }


def load_earlier(path: pathlib.Path | None, description: dict[str, Any]) -> list[dict[str, Any]]:
    """What the file holds of this machine and build; those of others are not added to."""
    if path is None or not path.is_file():
        return []
    earlier = json.loads(path.read_text())
    if earlier["machine"] != description:
        sys.exit(f"{path} is of another machine, version, build or day ({earlier['machine']}): choose another --json")
    return earlier["results"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048])
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bf16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[len(os.sched_getaffinity(0))])
    parser.add_argument("--window", type=int, nargs="+", default=[0], help="keys that a query sees; 0: all before it")
    parser.add_argument("--documents", type=int, nargs="+", default=[1], help="into which the tokens are cut")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="default: --heads")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=5, help="steps of each variant that are counted")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path)
    parser.add_argument("--cpu-name", help="default: from /proc/cpuinfo")
    parser.add_argument("--commit", help="of the fa2 that is measured (default: git describe, here)")
    parser.add_argument("--alone", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.alone:
        run_alone(Case(**json.loads(arguments.case)), arguments.alone)
        return
    description = machine(arguments.cpu_name, arguments.commit)
    print(", ".join(f"{key} {value}" for key, value in description.items()))
    results = load_earlier(arguments.json, description)
    for threads in arguments.threads:
        for dtype in arguments.dtype:
            for window, documents, tokens in itertools.product(arguments.window, arguments.documents, arguments.tokens):
                case = Case(
                    tokens, dtype, threads, window, arguments.hidden, arguments.layers, arguments.heads,
                    arguments.kv_heads or arguments.heads, arguments.vocab, documents,
                )  # fmt: skip
                results.append(measure(case, arguments.rounds, not arguments.no_memory))
                report(case, results[-1])
                if arguments.json:
                    arguments.json.write_text(json.dumps({"machine": description, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What compare_pytorch measures: its cases, named as bench_attention names them, and its suites."""

import dataclasses
import os
import re
import sys

from shapes import SHAPES

CORES = len(os.sched_getaffinity(0))


@dataclasses.dataclass(frozen=True)
class Case:
    """One row; `name` is bench_attention's name of the same case (bench/attention/case.h), which has no padding."""
    direction: str = "backward"  # forward, backward, both
    dtype: str = "bf16"  # bf16, f16, f32
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    length: int = 2048
    head_dim: int = 128
    causal: bool = False
    threads: int = 1
    option: str = ""  # bias, dbias (its gradient too), mask, mask500 (of documents), padding, dropout
    keys: int = 0  # 0: length

    @property
    def mask(self):
        return "causal" if self.causal else "full"

    @property
    def num_keys(self):
        return self.keys or self.length

    @property
    def lengths(self):
        return f"{self.length}x{self.keys}" if self.keys else f"{self.length}"

    @property
    def name(self):
        name = (f"{self.direction}/{self.dtype}/B{self.batch}/H{self.heads}/KV{self.kv_heads}/"
                f"N{self.lengths}/D{self.head_dim}/{self.mask}/T{self.threads}")
        return f"{name}/{self.option_name}" if self.option else name

    @property
    def option_name(self):
        """As bench_attention has it: a mask of the inputs' dtype, which it takes for f32 if none is named."""
        own_dtype = "bias" in self.option and self.dtype != "f32"
        return f"{self.option}_{self.dtype}" if own_dtype else self.option

    @property
    def document(self):
        """How many positions see one another, or 0: all."""
        return int(self.option.removeprefix("mask") or 0) if self.option.startswith("mask") else 0

    def filled(self, sequence):
        """How many keys of a sequence are no padding: all, to half of them."""
        if self.option != "padding":
            return self.num_keys
        return self.num_keys - sequence * (self.num_keys // 2) // max(self.batch - 1, 1)

    @property
    def pairs(self):
        """(query, key) that take part, of one head of all sequences; causal counts half."""
        if self.document:
            documents, rest = divmod(self.length, self.document)
            pairs = self.batch * (documents * self.document ** 2 + rest ** 2)
        else:
            pairs = self.length * sum(map(self.filled, range(self.batch)))
        return pairs / (2 if self.causal else 1)

    @property
    def flops(self):
        per_pair = {"forward": 4, "backward": 10, "both": 14}[self.direction]
        return per_pair * self.heads * self.pairs * self.head_dim

    @staticmethod
    def parse(name):
        match = re.fullmatch(
            r"(forward|backward|both)/(bf16|f16|f32)/B(\d+)/H(\d+)/KV(\d+)/N(\d+)(?:x(\d+))?/D(\d+)/"
            r"(full|causal)/T(\d+)(?:/((dbias|bias|mask\d*|padding|dropout)(?:_(?:bf16|f16))?))?", name)
        if match is None:
            sys.exit(f"case {name!r} must look like {Case().name}")
        (direction, dtype, batch, heads, kv_heads, length, keys, head_dim, mask, threads,
         option_name, option) = match.groups()
        case = Case(direction, dtype, int(batch), int(heads), int(kv_heads), int(length),
                    int(head_dim), mask == "causal", int(threads) or CORES, option or "", int(keys or 0))
        if case.option_name != (option_name or ""):
            sys.exit(f"case {name!r} must name a mask of its own dtype, as {case.name} does")
        return case


def thread_counts():
    return [1] if CORES == 1 else [1, CORES]


def full_suite():
    for threads in thread_counts():
        for direction in ("forward", "backward"):
            for dtype in ("bf16", "f16", "f32"):
                for head_dim in (64, 128, 256):
                    for length in (256, 1024, 4096, 16384):
                        for causal in (False, True):
                            for group in (1, 4):
                                # As many rows whatever the length, so that no case takes minutes.
                                heads = min(max(16384 // length, 4), 16)
                                yield Case(direction, dtype, 1, heads, heads // group, length,
                                           head_dim, causal, threads)


def quick_suite():
    for threads in thread_counts():
        length, heads = (2048, 4) if threads == 1 else (4096, 16)
        for direction in ("forward", "backward"):
            for dtype in ("bf16", "f32"):
                for head_dim in (64, 128, 256):
                    for causal in (False, True):
                        yield Case(direction, dtype, 1, heads, heads, length, head_dim, causal,
                                   threads)
            yield Case(direction, "f16", 1, heads, heads, length, 128, False, threads)
            yield Case(direction, "bf16", 1, heads, heads // 4, length, 128, True, threads)
            yield Case(direction, "bf16", 1, heads, heads, 256, 128, False, threads)


def paper_suite():
    """Batch x length = 16,384 tokens, heads x head dim = 2,048 (Dao 2023, section 4.1)."""
    for direction in ("forward", "backward", "both"):
        for causal in (False, True):
            for head_dim in (64, 128):
                for length in (512, 1024, 2048, 4096, 8192, 16384):
                    heads = 2048 // head_dim
                    yield Case(direction, "bf16", 16384 // length, heads, heads, length, head_dim,
                               causal, CORES)


def options_suite():
    for threads in thread_counts():
        heads = 4 if threads == 1 else 16
        for option in ("bias", "dbias", "mask", "mask500", "dropout"):
            # Where a mask wants its gradient PyTorch's forward is another one too.
            for direction in ("both",) if option == "dbias" else ("forward", "backward", "both"):
                for dtype in ("bf16", "f32"):
                    for head_dim in (64, 128, 256):
                        yield Case(direction, dtype, 1, heads, heads, 2048, head_dim, False,
                                   threads, option)


def case_of(shape, direction, dtype, threads):
    """A line of shapes.py as a case."""
    heads, kv_heads = shape.heads if isinstance(shape.heads, tuple) else (shape.heads, shape.heads)
    length, keys = shape.length if isinstance(shape.length, tuple) else (shape.length, 0)
    return Case(direction, dtype, shape.batch, heads, kv_heads, length, shape.head_dim, shape.causal, threads,
                shape.option, keys)


def shapes_suite(quick=False):
    for threads in thread_counts():
        for shape in SHAPES:
            for dtype in ("bf16", "f32"):
                # Where a mask wants its gradient PyTorch's forward is another one too.
                for direction in ("both",) if shape.option == "dbias" else ("forward", "backward"):
                    if shape.quick or not quick:
                        yield case_of(shape, direction, dtype, threads)


def onednn_suite():
    """The lengths at which oneDNN keeps whole matrices of scores in reasonable memory."""
    for threads in thread_counts():
        for direction in ("forward", "backward"):
            for dtype in ("bf16", "f32"):
                for head_dim in (64, 128):
                    for length in (128, 256, 512, 1024, 2048, 4096):
                        yield Case(direction, dtype, length=length, head_dim=head_dim, threads=threads)


SUITES = {"full": full_suite, "fa2-paper": paper_suite, "options": options_suite, "shapes": shapes_suite,
          "onednn": onednn_suite}


def suite_cases(name, quick):
    """The cases of a suite, or a short list of them."""
    if not quick:
        return SUITES[name]()
    if name == "full":
        return quick_suite()
    if name == "shapes":
        return shapes_suite(quick)
    if name == "fa2-paper":
        return (c for c in paper_suite() if c.length in (512, 2048, 8192))
    if name == "onednn":
        return (c for c in onednn_suite() if c.dtype == "bf16" and c.length in (256, 1024))
    return (c for c in options_suite() if c.dtype == "bf16")

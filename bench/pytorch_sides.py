# SPDX-License-Identifier: Apache-2.0
"""The implementations that compare_pytorch and after_linear hold beside each other, on the same arrays."""

import json
import subprocess
import sys
import time

DROPOUT = 0.1


def time_calls(function, at_least, before=None):
    """Seconds per call over at least that many seconds of calls; before() runs ahead of each and is not counted."""
    calls, total = 0, 0.0
    while True:
        if before is not None:
            before()
        begin = time.perf_counter()
        function()
        total += time.perf_counter() - begin
        calls += 1
        if total >= at_least:
            return total / calls


class Inputs:
    """PyTorch tensors of a case: q, k, v, dout, mask."""

    def __init__(self, case):
        import torch
        self.case, self.dtype = case, {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[case.dtype]
        torch.manual_seed(0)

        def tensor(heads, length):
            return torch.randn(case.batch, heads, length, case.head_dim).to(self.dtype)

        self.q = tensor(case.heads, case.length).requires_grad_()
        self.k, self.v = (tensor(case.kv_heads, case.num_keys).requires_grad_() for _ in range(2))
        self.dout = tensor(case.heads, case.length)
        self.mask = None
        if "bias" in case.option:
            self.mask = torch.randn(1, case.heads, case.length, case.num_keys).to(self.dtype)
            self.mask.requires_grad_(case.option == "dbias")
        elif case.option == "padding":
            filled = torch.tensor([case.filled(i) for i in range(case.batch)])
            self.mask = (torch.arange(case.num_keys) < filled[:, None])[:, None, None]
        elif case.option.startswith("mask"):
            position = torch.arange(case.length) // (case.document or case.length)
            self.mask = (position[:, None] == position)[None, None]

    def linear(self):
        """A call of an nn.Linear on as many tokens as there are queries, as a layer has it before attention."""
        import torch
        width = self.case.heads * self.case.head_dim
        layer = torch.nn.Linear(width, width, dtype=self.dtype)
        tokens = torch.randn(self.case.batch * self.case.length, width).to(self.dtype)

        def call():
            with torch.no_grad():
                layer(tokens)

        return call


class Attention:
    """Runs a case with a function that has the arguments of torch.nn.functional.scaled_dot_product_attention."""

    def __init__(self, inputs, function):
        import torch
        self.torch, self.inputs, self.function, self.details = torch, inputs, function, {}
        case = inputs.case
        torch.set_num_threads(case.threads)
        self.wanted = (inputs.q, inputs.k, inputs.v) + ((inputs.mask,) if case.option == "dbias" else ())
        self.options = {} if case.heads == case.kv_heads else {"enable_gqa": True}
        self.out = self.forward()

    def forward(self):
        case, inputs = self.inputs.case, self.inputs
        return self.function(inputs.q, inputs.k, inputs.v, attn_mask=inputs.mask, is_causal=case.causal,
                             dropout_p=DROPOUT if case.option == "dropout" else 0.0, **self.options)

    def backward(self, out):
        return self.torch.autograd.grad(out, self.wanted, self.inputs.dout, retain_graph=True)

    def run(self):
        direction = self.inputs.case.direction
        if direction == "forward":
            with self.torch.no_grad():
                self.forward()
        elif direction == "backward":
            self.backward(self.out)
        else:
            self.backward(self.forward())

    def seconds(self, at_least, before=None):
        return time_calls(self.run, at_least, before)

    def results(self):
        """out and the gradients."""
        return [self.out.detach(), *self.backward(self.out)]


class Jax:
    """Runs a case with jax.nn.dot_product_attention, compiled, on all cores; the backward on saved probabilities."""

    def __init__(self, inputs):
        import jax
        import jax.numpy as jnp
        self.jax, self.direction = jax, inputs.case.direction
        case = inputs.case

        def array(x):  # [B, H, N, D] as JAX's [B, N, H, D]
            x = x.detach().transpose(1, 2).float().numpy()
            return jnp.asarray(x, {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}[case.dtype])

        self.arrays = [array(x) for x in (inputs.q, inputs.k, inputs.v)]
        self.dout = array(inputs.dout)
        mask = None if inputs.mask is None else jnp.asarray(inputs.mask.detach().float().numpy())
        if mask is not None and "bias" in case.option:
            options = {"bias": mask.astype(self.dout.dtype)}
        else:
            options = {} if mask is None else {"mask": mask > 0}

        def attention(q, k, v):
            return jax.nn.dot_product_attention(q, k, v, is_causal=case.causal, **options)

        self.forward = jax.jit(attention)
        _, self.pullback = jax.vjp(self.forward, *self.arrays)
        self.apply = jax.jit(lambda pullback, dout: pullback(dout))
        self.both = jax.jit(lambda q, k, v, dout: jax.vjp(attention, q, k, v)[1](dout))

    def run(self):
        if self.direction == "forward":
            out = self.forward(*self.arrays)
        elif self.direction == "backward":
            out = self.apply(self.pullback, self.dout)
        else:
            out = self.both(*self.arrays, self.dout)
        self.jax.block_until_ready(out)

    def seconds(self, at_least, before=None):
        return time_calls(self.run, at_least, before)


class Fa2Bench:
    """Runs a case with the bench binary, a process each time."""

    def __init__(self, case, binary):
        self.case, self.binary, self.details = case, binary, {}

    def seconds(self, at_least, before=None):
        del before
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


class OneDnn:
    """Runs a case with bench_onednn, a process that makes calls when it is told to; RuntimeError where it cannot."""

    def __init__(self, case, program):
        self.process = subprocess.Popen([str(program), "--serve", f"--case={case.name}"], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        self.details = json.loads(self._read() or '{"error": "it ended"}')
        if "error" in self.details:
            self.close()
            raise RuntimeError(f"{program}: {self.details['error']}")

    @staticmethod
    def takes(case):
        return not case.option and case.heads == case.kv_heads

    def _read(self):
        return self.process.stdout.readline()

    def _ask(self, at_least):
        """The program's own time of a call, so that pipes cost nothing."""
        self.process.stdin.write(f"{at_least}\n")
        self.process.stdin.flush()
        return float(self._read())

    def seconds(self, at_least, before=None):
        if before is None:
            return self._ask(at_least)
        calls, total = 0, 0.0
        while calls == 0 or total < at_least:
            before()
            total += self._ask(0)
            calls += 1
        return total / calls

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def difference(side, other):
    """The largest relative L2 difference of out, dq, dk, dv and dbias between two of Attention."""
    if side.inputs.case.option == "dropout":
        return None  # They drop other elements.
    pairs = zip(side.results(), other.results())
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)

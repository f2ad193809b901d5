# SPDX-License-Identifier: Apache-2.0
"""Whose threads calls run on: PyTorch's beside PyTorch, with the same bits wherever a call comes from."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fa2_cpu  # noqa: E402
import fa2_cpu.torch  # noqa: E402
from fa2_cpu import _core  # noqa: E402

OPENMP = torch.backends.openmp.is_available()


def _tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 300, 32, generator=generator).to(torch.bfloat16) for _ in range(4)]


def _step():
    """out, dq, dk, dv of fa2 on PyTorch's threads."""
    q, k, v, dout = _tensors()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = fa2_cpu.torch.scaled_dot_product_attention(*inputs, is_causal=True)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def _same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_info_names_the_pool():
    assert fa2_cpu.info()["pool"] == os.environ.get("FA2_POOL", "tbb")
    if "FA2_POOL" not in os.environ:
        assert _core.info(2, "openmp")["pool"] == ("openmp" if OPENMP else "tbb")
        assert _core.info(2, "tbb")["pool"] == "tbb"


def test_same_bits_between_changes_of_the_number_of_threads(threads):
    expected = _step()
    for count in (1, 3, 16, 2, threads):
        torch.set_num_threads(count)
        torch.randn(512, 512) @ torch.randn(512, 512)
        for _ in range(2):
            assert _same(_step(), expected)


def test_same_bits_as_on_numpys_pool():
    q, k, v, _ = (x.float() for x in _tensors())
    out = fa2_cpu.torch.scaled_dot_product_attention(q, k, v)
    own, _ = fa2_cpu.attention_forward(q.numpy(), k.numpy(), v.numpy())
    assert np.array_equal(out.numpy(), own)


def test_several_threads_at_once():
    expected = _step()
    wrong = []

    def work():
        for _ in range(5):
            if not _same(_step(), expected):
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
        assert not worker.is_alive()
    assert not wrong


def test_fork_after_a_call():
    """A child, in which libgomp would wait for threads of its parent, calls on as many threads."""
    expected = _step()
    # Before the fork, and compared by NumPy: PyTorch's own parallel operators would hang in the child.
    q, k, v, _ = _tensors()
    bits = expected[0].view(torch.int16).numpy().tobytes()
    torch.randn(512, 512) @ torch.randn(512, 512)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        out = fa2_cpu.torch.scaled_dot_product_attention(q, k, v, is_causal=True)
        os._exit(0 if out.view(torch.int16).numpy().tobytes() == bits else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _same(_step(), expected)


@pytest.mark.parametrize("pool", ["tbb", "openmp", "nonsense"])
def test_the_environment_decides(pool):
    if pool == "openmp" and not OPENMP:
        pytest.skip("PyTorch without OpenMP")
    program = (
        "import torch, fa2_cpu, fa2_cpu.torch\n"
        "q = torch.randn(1, 2, 64, 16)\n"
        "fa2_cpu.torch.scaled_dot_product_attention(q, q, q)\n"
        "from fa2_cpu import _core\n"
        "print(fa2_cpu.info()['pool'], _core.info(2, 'openmp')['pool'])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "FA2_POOL": pool}, capture_output=True, text=True
    )
    if pool == "nonsense":
        assert run.returncode != 0
        assert "FA2_POOL is 'nonsense'" in run.stderr
    else:
        assert run.stdout.split() == [pool, pool], run.stderr

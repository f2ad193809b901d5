# SPDX-License-Identifier: Apache-2.0
"""The checker from Python: arrays of several libraries, files, the pytest helper and capture."""

import sys

import numpy as np
import pytest

import fa2_cpu as fa2
from fa2_cpu import _core

if not hasattr(_core, "verify"):
    pytest.skip("this build has no checker", allow_module_level=True)

from fa2_cpu import VerificationError, verify
from fa2_cpu._verify import load


def make_case(seed=0, causal=None):
    rng = np.random.default_rng(seed)
    q, dout = (rng.standard_normal((1, 4, 40, 16), np.float32) for _ in range(2))
    k, v = (rng.standard_normal((1, 2, 50, 16), np.float32) for _ in range(2))
    out, lse = fa2.attention_forward(q, k, v, causal=causal)
    grads = fa2.attention_backward(dout, q, k, v, out, lse, causal=causal)
    return {
        **{"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse},
        **{"dq": grads.dq, "dk": grads.dk, "dv": grads.dv},
    }


def test_right_gradients_pass():
    report = verify(make_case(causal="bottom_right"), causal="bottom_right")
    assert report.passed and report.diagnosis == []
    report.raise_if_failed()
    assert [t["name"] for t in report.cases[0]["tensors"]] == ["out", "lse", "dq", "dk", "dv"]
    assert all(t["own"] == "pass" for t in report.cases[0]["tensors"][2:])


def test_a_mistake_is_named():
    case = make_case()
    case["dq"] = case["dq"] * 3
    report = verify({f"mine/{name}": x for name, x in case.items()})
    assert not report.passed and report.diagnosis == ["overcount"]
    assert report.cases[0]["name"] == "mine"
    with pytest.raises(VerificationError, match="overcount"):
        report.raise_if_failed()


def test_synonyms_and_what_is_missing():
    case = make_case()
    report = verify({"query": case["q"], "key": case["k"], "value": case["v"], "o": case["out"], "other": 3})
    assert report.passed
    assert set(report.cases[0]["unchecked"]) == {"lse", "dq", "dk", "dv"}
    with pytest.raises(ValueError, match="tensor k"):
        verify({"q": case["q"]})
    assert verify(case, scale=np.float32(0.25), window=(np.int64(-1), -1)).passed
    with pytest.raises(ValueError, match="causal"):
        verify(case, causal="left")
    with pytest.raises(TypeError, match="casual"):
        verify(case, casual="top_left")


def test_npz(tmp_path):
    path = str(tmp_path / "case.npz")
    np.savez(path, **make_case())
    assert set(load(path)) == set(make_case())
    assert verify(path).passed


def test_torch_files_and_helper(tmp_path):
    torch = pytest.importorskip("torch")
    from fa2_cpu.testing import assert_attention_gradients

    path = tmp_path / "case.pt"
    torch.save({name: torch.from_numpy(np.asarray(x)) for name, x in make_case().items()}, path)
    assert verify(path).passed

    def attention(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    reports = assert_attention_gradients(attention, (2, 3, 40, 16), causal="top_left", dtype="bfloat16")
    assert len(reports) == 5
    with pytest.raises(AssertionError):
        assert_attention_gradients(attention, (2, 3, 40, 16), inputs="gaussian")


def test_ranks_are_put_together():
    case = make_case(causal="bottom_right")
    rows = {"q", "dout", "out", "dq", "k", "v", "dk", "dv", "lse"}

    def piece(rank, ranks=2):
        def part(name, x):
            size = x.shape[2] // ranks
            return x[:, :, rank * size : (rank + 1) * size]

        return {name: part(name, x) if name in rows else x for name, x in case.items()}

    assert verify([piece(0), piece(1)], causal="bottom_right").passed
    wrong = piece(0)
    wrong["dk"] = wrong["dk"] * 2
    report = verify([wrong, piece(1)], causal="bottom_right")
    assert not report.passed
    findings = [f for t in report.cases[0]["tensors"] for f in t["findings"]]
    assert any("ranks 0 of 2" in f for f in findings)
    with pytest.raises(ValueError, match="rank 1"):
        verify([piece(0), {**piece(1), "dk": case["dk"][..., :8]}])


def test_the_page_needs_no_other_file():
    html = verify(make_case()).html
    assert html.startswith("<!doctype html>") and html.rstrip().endswith("</html>")
    assert "http://www.w3.org/2000/svg" in html
    assert "src=" not in html and "href=" not in html


def recorded_cases(path, calls, function):
    from fa2_cpu import capture

    with capture(path, calls=calls) as recorded:
        function()
    return recorded


def test_capture(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "run.safetensors"
    x = torch.randn(1, 2, 40, 16, requires_grad=True)

    def train():
        for _ in range(3):
            out = torch.nn.functional.scaled_dot_product_attention(x, 2 * x, x + 1, is_causal=True)
            out.square().sum().backward()

    assert len(recorded_cases(path, 2, train)) == 2
    report = verify(path)
    assert report.passed
    assert [case["name"] for case in report.cases] == ["call0", "call1"]
    assert [t["name"] for t in report.cases[0]["tensors"]] == ["out", "dq", "dk", "dv"]


def test_capture_of_a_trained_bias(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "run.safetensors"
    q, k, v = (torch.randn(2, 3, n, 16, requires_grad=True) for n in (20, 30, 30))
    bias = torch.randn(1, 3, 20, 30, requires_grad=True)

    def train():
        torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).square().sum().backward()

    recorded_cases(path, 1, train)
    report = verify(path)
    assert report.passed, str(report)
    assert report.cases[0]["unchecked"] == ["lse"]
    assert bias.grad is not None


def test_capture_of_packed_flash_attn(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    flash = pytest.importorskip("fa2_cpu.flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    path = tmp_path / "run.safetensors"
    q, k, v = (torch.randn(50, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    sums = torch.tensor([0, 20, 21, 50], dtype=torch.int32)

    def train():
        out = flash.flash_attn_varlen_func(q, k, v, sums, sums, 29, 29, causal=True)
        out.square().sum().backward()

    recorded_cases(path, 1, train)
    report = verify(path)
    assert report.passed, str(report)
    assert report.cases[0]["unchecked"] == ["lse"]


def test_capture_of_dropout(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "run.safetensors"
    q, k, v = (torch.randn(2, 3, n, 16, requires_grad=True) for n in (40, 50, 50))
    mask = torch.randn(2, 1, 40, 50).masked_fill(torch.rand(2, 1, 40, 50) < 0.2, -torch.inf)

    def train():
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.3)
        out.square().sum().backward()

    torch.manual_seed(1)
    train()
    expected = (q.grad.clone(), torch.rand(3))
    q.grad = None
    torch.manual_seed(1)
    (case,) = recorded_cases(path, 1, train)
    # What is recorded, and what comes after it, is as without the recording.
    assert torch.equal(q.grad, expected[0]) and torch.equal(torch.rand(3), expected[1])
    seen = case["tensors"]["keep"][~torch.isinf(mask).expand(2, 3, 40, 50)].float()
    assert abs(seen.mean().item() - 0.7) < 0.03
    report = verify(path)
    assert report.passed, str(report)
    assert not any(name.startswith("d") and name != "dbias" for name in report.cases[0]["unchecked"])


def test_capture_of_flex_attention(tmp_path):
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    path = tmp_path / "run.safetensors"
    q, k, v = (torch.randn(1, 2, n, 16) for n in (128, 256, 256))
    # PyTorch 2.9 and newer ask for it in another way.
    lse = {"return_aux": flex.AuxRequest(lse=True)} if hasattr(flex, "AuxRequest") else {"return_lse": True}
    causal = flex.create_block_mask(lambda b, h, i, j: i + 128 >= j, None, None, 128, 256, device="cpu")

    def run():
        flex.flex_attention(q, k, v, block_mask=causal, scale=0.3)
        flex.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - 0.1 * (i - j).abs(), **lse)
        with pytest.warns(UserWarning, match="score_mod"):
            flex.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.tanh(s))

    recorded = recorded_cases(path, 3, run)
    assert len(recorded) == 2
    assert recorded[0]["tensors"]["bias"].dtype == torch.bool
    assert "lse" in recorded[1]["tensors"]
    report = verify(path)
    assert report.passed, str(report)

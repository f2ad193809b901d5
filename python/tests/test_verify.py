# SPDX-License-Identifier: Apache-2.0
"""The checker from Python: arrays of several libraries, files, the pytest helper and capture."""

import numpy as np
import pytest

import fa2_cpu as fa2
from fa2_cpu import _core

if not hasattr(_core, "verify_tensors"):
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


def test_capture(tmp_path):
    torch = pytest.importorskip("torch")
    from fa2_cpu import capture

    path = tmp_path / "run.safetensors"
    x = torch.randn(1, 2, 40, 16, requires_grad=True)
    with capture(path, calls=2) as recorded:
        for _ in range(3):
            out = torch.nn.functional.scaled_dot_product_attention(x, 2 * x, x + 1, is_causal=True)
            out.square().sum().backward()
    assert len(recorded) == 2
    report = verify(path)
    assert report.passed
    assert [case["name"] for case in report.cases] == ["call0", "call1"]
    assert [t["name"] for t in report.cases[0]["tensors"]] == ["out", "dq", "dk", "dv"]

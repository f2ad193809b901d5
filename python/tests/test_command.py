# SPDX-License-Identifier: Apache-2.0
"""The command fa2 of an installed package."""

import json
import subprocess
import sys

import numpy as np
import pytest

from fa2_cpu import _command

if not _command.os.access(_command._PROGRAM, _command.os.X_OK):
    pytest.skip("this build has no command", allow_module_level=True)


def fa2(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "fa2_cpu._command", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def arrays(tmp_path):
    path = tmp_path / "case.safetensors"
    made = fa2("gen", path, "--shape", "1,2,2,30,40,16", "--dtype", "f32", "--causal", "bottom_right", "--answers")
    assert made.returncode == 0, made.stderr
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    options = header.pop("__metadata__")["fa2"]
    return options, {
        name: np.frombuffer(data[8 + size :][slice(*entry["data_offsets"])], np.float32).reshape(entry["shape"])
        for name, entry in header.items()
    }


def test_exit_codes(tmp_path):
    assert fa2("--version").returncode == 0
    wrong = fa2("verify", tmp_path / "nowhere.safetensors")
    assert wrong.returncode == 2
    assert "nowhere" in wrong.stderr and wrong.stderr.count("\n") == 1


def test_npz(tmp_path):
    options, tensors = arrays(tmp_path)
    good = tmp_path / "good.npz"
    np.savez(good, fa2=options, **tensors)
    assert fa2("verify", good).returncode == 0
    bad = tmp_path / "bad.npz"
    np.savez(bad, **{**tensors, "dq": 8 * tensors["dq"]})
    result = fa2("verify", bad, "--causal", "bottom_right", "--json", tmp_path / "report.json")
    assert result.returncode == 1
    assert json.loads((tmp_path / "report.json").read_text())["cases"][0]["diagnosis"][0]["id"] == "overcount"
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"no archive")
    result = fa2("verify", broken)
    assert result.returncode == 2 and "broken.npz" in result.stderr


def test_several_cases_in_an_npz(tmp_path):
    options, tensors = arrays(tmp_path)
    both = {f"{case}/{name}": x for case in ("one", "two") for name, x in tensors.items()}
    other = json.dumps({**json.loads(options), "causal": "top_left"})
    path = tmp_path / "both.npz"
    # What is no tensor of a case does not matter.
    np.savez(path, one=options, two=other, steps=np.arange(3, dtype=np.int16), **both)
    assert fa2("verify", path, "--case", "one").returncode == 0
    assert fa2("verify", path, "--case", "two").returncode == 1


def test_bfloat16_in_an_npz(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    options, tensors = arrays(tmp_path)
    path = tmp_path / "half.npz"
    wide = {"lse"}
    np.savez(path, fa2=options, **{n: x if n in wide else x.astype(ml_dtypes.bfloat16) for n, x in tensors.items()})
    result = fa2("verify", path)
    assert "bf16" in result.stdout, result.stderr


def test_pt(tmp_path):
    torch = pytest.importorskip("torch")
    options, tensors = arrays(tmp_path)
    path = tmp_path / "case.pt"
    torch.save({"fa2": json.loads(options), **{n: torch.from_numpy(x.copy()) for n, x in tensors.items()}}, path)
    assert fa2("verify", path).returncode == 0
    # Cases are dicts within it.
    case = {n: torch.from_numpy(x.copy()) for n, x in tensors.items()}
    torch.save({"one": {"fa2": json.loads(options), **case}, "two": {**case, "dq": 8 * case["dq"]}}, path)
    assert fa2("verify", path, "--case", "one").returncode == 0
    assert fa2("verify", path, "--causal", "bottom_right").returncode == 1

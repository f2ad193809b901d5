# SPDX-License-Identifier: Apache-2.0
"""bench/compare_pytorch.py measures, compares and saves, run as a user runs it, on the smallest cases."""

import json
import pathlib
import subprocess
import sys

import pytest

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from pytorch_cases import SUITES, Case, suite_cases  # noqa: E402  (found by the line above)


@pytest.mark.parametrize("quick", (False, True))
@pytest.mark.parametrize("suite", SUITES)
def test_cases_are_named_for_good(suite, quick):
    cases = list(suite_cases(suite, quick))
    assert len({case.name for case in cases}) == len(cases) > 0
    for case in cases:
        assert Case.parse(case.name) == case


def compare(out, *arguments):
    return subprocess.run(
        [sys.executable, str(BENCH / "compare_pytorch.py"), "--out", str(out), "--min-time", "0",
         "--case-time", "0", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=300)


def test_measures_and_saves(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "result"
    size = "B1/H4/KV2/N96/D64"
    # The errors of results in bf16 and f32 (2⁻⁹ and 2⁻²⁴ each) on both sides, and of P rounded to bf16.
    bounds = {f"both/bf16/{size}/causal/T1": 8e-3, f"backward/f32/{size}/full/T2/dbias": 3e-6}
    arguments = [argument for case in bounds for argument in ("--case", case)]
    run = compare(out, *arguments)
    assert run.returncode == 0, run.stdout
    report = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert [row["case"] for row in report["rows"]] == list(bounds)
    table = out.with_suffix(".md").read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith(("| both", "| backward")) for line in table) == 2
    for row in report["rows"]:
        assert row["rounds"] == 3
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert row["fa2_gflops"] > 0 and row["pytorch_gflops"] > 0
        assert row["difference"] < bounds[row["case"]]

    # What is saved is not measured again.
    again = compare(out, *arguments)
    assert again.returncode == 0 and "GFLOP/s" not in again.stdout
    assert json.loads(out.with_suffix(".json").read_text(encoding="utf-8")) == report


def test_refuses_what_is_no_case(tmp_path):
    pytest.importorskip("torch")
    run = compare(tmp_path / "result", "--case", "sideways/bf16")
    assert run.returncode == 1
    assert "case 'sideways/bf16' must look like backward/bf16/B1/" in run.stdout

# SPDX-License-Identifier: Apache-2.0
"""bench/compare_pytorch.py measures, compares and saves, run as a user runs it, on the smallest cases."""

import json
import pathlib
import subprocess
import sys

import pytest

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from pytorch_cases import SUITES, Case, case_of, suite_cases  # noqa: E402  (found by the line above)
from pytorch_report import markdown  # noqa: E402
from pytorch_sides import OneDnn  # noqa: E402
from shapes import SHAPES  # noqa: E402
from shapes_report import geometric_mean  # noqa: E402


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


def test_shapes_are_many_and_different():
    cases = [case_of(shape, "forward", "bf16", 1) for shape in SHAPES]
    assert len(set(cases)) == len({shape.model for shape in SHAPES}) == len(SHAPES) >= 60


def test_pairs_that_take_part():
    def pairs(**sizes):
        return Case(batch=3, heads=2, kv_heads=2, **sizes).pairs

    assert pairs(length=5, keys=8) == 3 * 5 * 8
    assert pairs(length=8, causal=True) == 3 * 8 * 8 / 2
    assert pairs(length=8, option="mask3") == 3 * (9 + 9 + 4)
    assert pairs(length=5, keys=8, option="padding") == 5 * (8 + 6 + 4)


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
    assert again.returncode == 0 and "[1/" not in again.stdout
    assert json.loads(out.with_suffix(".json").read_text(encoding="utf-8")) == report

    # Nor is what another build of fa2 gave printed as this one's.
    report["build"] = "another"
    out.with_suffix(".json").write_text(json.dumps(report), encoding="utf-8")
    other = compare(out, *arguments)
    assert other.returncode == 1 and "is of another build of fa2 (another, now " in other.stdout


ONEDNN = {"onednn": "3.13.2, SYCL", "onednn_form": "softmax", "onednn_partitions": 10,
          "onednn_scratch_bytes": 3_000_000, "onednn_between_bytes": 4_000_000, "onednn_difference": 1e-6}


def bench_onednn(folder, case, facts):
    """A program that says what bench_onednn says: the facts, then a time for each request."""
    program = folder / "bench_onednn"
    program.write_text(f"""#!{sys.executable}
import json, sys
assert sys.argv[1:] == ["--serve", "--case={case.name}"]
print({json.dumps(json.dumps(facts))}, flush=True)
while sys.stdin.readline():
    print(0.25, flush=True)
""")
    program.chmod(0o755)
    return program


def test_shapes_alone_and_after_a_linear(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "result"
    # The first is a line of shapes.py; the bounds are those of f32, of bf16 and of P rounded to bf16.
    bounds = {"forward/bf16/B1/H8/KV8/N7x4096/D16/full/T1": 8e-3,
              "backward/f32/B3/H2/KV1/N5x33/D16/full/T1/padding": 3e-6}
    whole = Case.parse(next(iter(bounds)))
    run = compare(out, "--suite", "shapes", "--when", "alone", "linear",
                  "--onednn", str(bench_onednn(tmp_path, whole, ONEDNN)),
                  *(argument for case in bounds for argument in ("--case", case)))
    assert run.returncode == 0, run.stdout
    report = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert [(row["case"], row["when"]) for row in report["rows"]] == [
        (case, when) for case in bounds for when in ("alone", "linear")]
    for row in report["rows"]:
        assert row["difference"] < bounds[row["case"]]
        if row["case"] == whole.name:  # The other has padding.
            assert ONEDNN.items() <= row.items() and row["onednn_ms"] == 250
        else:
            assert not any(key.startswith("onednn") for key in row)
        assert row["fa2"].split("/")[1].split(" on ")[0] and row["peak_share"] < 1
    assert "in turns in one process" in report["through"]
    table = out.with_suffix(".md").read_text(encoding="utf-8")
    assert "| SAM decoder, tokens to image | 1·8/8, 7x4096, 16 |" in table
    slower = [row for row in report["rows"] if row["speedup"] < 1]
    assert ("| rows below 1.0 |" in table) == bool(slower)
    assert geometric_mean([0.5, 8.0]) == pytest.approx(2)


def test_onednn_that_cannot(tmp_path):
    case = Case.parse("forward/f16/B1/H2/KV2/N16/D16/full/T1")
    with pytest.raises(RuntimeError, match="bench_onednn: not supported"):
        OneDnn(case, bench_onednn(tmp_path, case, {"error": "not supported"}))
    assert not OneDnn.takes(Case(heads=4, kv_heads=2)) and not OneDnn.takes(Case(option="dropout"))


def test_onednn_in_the_table():
    case = "forward/f32/B1/H2/KV2/N16/D16/full/T1"
    row = {"case": case, "when": "alone", "fa2_ms": 100.0, "fa2_gflops": 1, "pytorch_gflops": 1,
           "speedup": 1.0, "speedup_low": 1.0, "speedup_high": 1.0}
    report = {"cpu": "a CPU", "cores": 2, "pytorch": "2", "through": "it", "build": "1", "rows": [row]}
    assert "oneDNN" not in markdown(report)
    report["rows"].append(row | ONEDNN | {"onednn_ms": 250.0})
    table = markdown(report).splitlines()
    assert "oneDNN Graph 3.13.2, SYCL, in a process of its own that takes turns with the others." in table
    columns = {line.count("|") for line in table if line.startswith("|")}
    assert len(columns) == 1 and table[-1].endswith("| 2.50 | softmax, 10 partitions, 7 MB |")


def test_refuses_what_is_no_case(tmp_path):
    pytest.importorskip("torch")
    run = compare(tmp_path / "result", "--case", "sideways/bf16")
    assert run.returncode == 1
    assert "case 'sideways/bf16' must look like backward/bf16/B1/" in run.stdout

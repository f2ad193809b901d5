# SPDX-License-Identifier: Apache-2.0
"""The measuring scripts run on the package alone, as on a machine that has a wheel and PyTorch, on the smallest sizes."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"


def _run(script, *arguments):
    return subprocess.run(
        [sys.executable, str(BENCH / script), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")
def test_scaling(tmp_path):
    pytest.importorskip("torch")
    saved = tmp_path / "scaling.json"
    run = _run("scaling.py", "--cases", "2x32", "--rounds", "1", "--min-time", "0", "--threads", "2", "--json", str(saved))
    assert run.returncode == 0, run.stdout
    (row,) = json.loads(saved.read_text())["rows"]
    assert (row["heads"], row["length"]) == (2, 32) and row["share"] == row["one_process"] / row["pinned"] > 0


def test_after_linear(tmp_path):
    pytest.importorskip("torch")
    saved = tmp_path / "after.json"
    run = _run("after_linear.py", "--lengths", "16", "--rounds", "1", "--min-time", "0", "--json", str(saved))
    assert run.returncode == 0, run.stdout
    (row,) = json.loads(saved.read_text())["rows"]
    assert all(row[side][run][when] > 0 for side in ("fa2", "pytorch") for run in ("forward", "backward")
               for when in ("alone", "linear"))  # fmt: skip


def test_flex_attention(tmp_path):
    pytest.importorskip("torch.nn.attention.flex_attention")
    saved = tmp_path / "flex.json"
    run = _run("flex_attention.py", "--length", "256", "--rounds", "1", "--cases", "documents", "blocks", "--without-compile",
               "--json", str(saved))  # fmt: skip
    assert run.returncode == 0, run.stdout
    rows = {row["case"]: row for row in json.loads(saved.read_text())["rows"]}
    assert rows["documents"]["fa2 step"] > 0 and rows["documents"]["SDPA step"] > 0 and rows["blocks"]["fa2 step"] > 0


def test_training_steps(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    saved = tmp_path / "steps.json"
    sizes = ["--hidden", "64", "--layers", "1", "--heads", "2", "--vocab", "50", "--rounds", "1", "--threads", "1", "--no-memory"]
    for tokens, documents in ((16, 1), (32, 4)):  # The second run adds to what the first wrote.
        run = _run("train_step.py", "--tokens", str(tokens), "--documents", str(documents), *sizes, "--json", str(saved))
        assert run.returncode == 0, run.stdout
    report = json.loads(saved.read_text())
    cases = [(result["case"]["tokens"], result["case"]["documents"]) for result in report["results"]]
    assert cases == [(16, 1), (32, 4)]
    assert set(report["results"][0]["variants"]) == {"sdpa", "replace_sdpa", "accelerate"}

    report["machine"]["torch"] = "another"
    saved.write_text(json.dumps(report))
    run = _run("train_step.py", "--tokens", "16", *sizes, "--json", str(saved))
    assert run.returncode == 1 and "is of another machine, version, build or day" in run.stdout


@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")
def test_several_processes(tmp_path):
    pytest.importorskip("torch")
    saved, timeline = tmp_path / "distributed.json", tmp_path / "timeline.json"
    run = _run("distributed.py", "--tokens", "64", "--heads", "2", "--kv-heads", "1", "--depth", "16", "--rounds", "1", "--share",
               "--profile", "--timeline", str(timeline), "--json", str(saved))  # fmt: skip
    assert run.returncode == 0, run.stdout
    (row,) = json.loads(saved.read_text())["rows"]
    assert row["many"] > 0 and row["messages"] > 0 and 0 <= row["hidden"] <= 1
    names = {event.get("name") for event in json.loads(timeline.read_text())["traceEvents"]}
    assert {"fa2::distributed block", "fa2::distributed wait"} <= names


def test_the_model_of_several_machines():
    run = _run("distributed.py", "--table", "--tokens", "65536", "1048576")
    assert run.returncode == 0, run.stdout
    rows = [line for line in run.stdout.splitlines() if line.startswith("| ")][1:]
    assert [row.split("|")[1].strip() for row in rows] == ["8", "32", "128", "512", "1024"]

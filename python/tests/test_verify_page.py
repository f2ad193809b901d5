# SPDX-License-Identifier: Apache-2.0
"""The page of a report, clicked through in a browser without a window. Needs Chromium."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest

import fa2_cpu as fa2
from fa2_cpu import _core

if not hasattr(_core, "verify"):
    pytest.skip("this build has no checker", allow_module_level=True)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no Chromium", allow_module_level=True)

# Clicks, keys and pointers; what the page then says is left in its title as JSON.
CLICKS = """
const said = {}, $ = (selector) => document.querySelector(selector);
const button = (text) => [...document.querySelectorAll("button")].find((b) => b.textContent.trim() === text);
const caption = () => $("canvas").parentElement.querySelector("figcaption").textContent;
window.onerror = (message) => { said.error = message; };
said.first = $("h1").textContent;
said.tensor = $("#tensor").textContent;
said.code = $(".diagnosis code").textContent;
button("worst tile").click();
said.worst = caption();
$("canvas").dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowUp"}));
$("canvas").dispatchEvent(new KeyboardEvent("keydown", {key: "+"}));
said.key = caption();
button("+").click();
button("−").click();
const box = $("canvas").getBoundingClientRect();
$("canvas").dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + 2, clientY: box.top + 2}));
said.pointer = caption();
button("dv").click();
said.other = $("#tensor").textContent;
button("✓ right").click();
said.case = $("h2").textContent;
said.wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
document.title = JSON.stringify(said);
"""


def browse(path, width):
    result = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},1200", "--dump-dom",
         "--virtual-time-budget=3000", path.as_uri()],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", result.stdout, re.S).group(1)
    return json.loads(title.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.mark.parametrize("width", [1100, 500])  # the narrowest that a headless window takes
def test_clicking_through(tmp_path, width):
    rng = np.random.default_rng(3)
    q, k, v, dout = (rng.standard_normal((1, 3, 150, 16), np.float32) for _ in range(4))
    out, lse = fa2.attention_forward(q, k, v)
    grads = fa2.attention_backward(dout, q, k, v, out, lse)
    right = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
    right |= {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
    dq = np.array(grads.dq)
    dq[0, 1] *= 2
    dq[0, 2, 130:] *= 2
    dk = 4 * np.array(grads.dk)
    cases = {"right": right, "wrong": {**right, "dq": dq, "dk": dk}}
    report = fa2.verify({f"{case}/{name}": x for case, tensors in cases.items() for name, x in tensors.items()})
    page = tmp_path / "report.html"
    page.write_text(report.html.replace("</body>", f"<script>{CLICKS}</script></body>"), encoding="utf-8")
    said = browse(page, width)
    assert "error" not in said
    assert said["first"].endswith("fail") and said["tensor"] == "dq" and said["code"] == "scale_missing"
    assert re.match(r"batch 0, head [12], rows \d+ to \d+: relative error", said["worst"])
    assert said["key"] != said["worst"]
    assert said["pointer"].startswith("batch 0, head 0, rows 0 to 63")
    assert said["other"] == "dv" and said["case"].startswith("right")
    assert not said["wide"]

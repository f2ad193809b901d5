// SPDX-License-Identifier: Apache-2.0
// The report of `fa2 verify`: verdicts, an error map and a histogram of a tensor, diagnosis.
const state = {case: 0, tensor: 0};

// Error over what is allowed: blue up to 1, red past it.
function color(ratio) {
  if (ratio === null) return "#b42318";
  const t = Math.max(0, Math.min(1, (Math.log10(Math.max(ratio, 1e-3)) + 3) / 3));
  if (ratio <= 1) return `hsl(212 70% ${88 - 45 * t}%)`;
  return `hsl(6 75% ${62 - 30 * Math.min(1, Math.log10(ratio) / 3)}%)`;
}

function heatMap(tensor) {
  const [batches, heads, rows] = tensor.sizes;
  const width = tensor.tiles, height = batches * heads;
  const view = {x: 0, y: 0, zoom: 1};
  const cell = {x: 0, y: 0};
  const canvas = element("canvas", {tabindex: 0, role: "img", height: Math.max(120, Math.min(480, height * 24)),
    "aria-label": `error map of ${tensor.name}; arrow keys move, plus and minus zoom`});
  const caption = element("figcaption", {"aria-live": "polite"}, "Hover, tap, or use the arrow keys; + and − zoom.");
  const sizes = () => ({w: canvas.width / width * view.zoom, h: canvas.height / height * view.zoom});

  function draw() {
    canvas.width = canvas.clientWidth || 640;
    const context = canvas.getContext("2d");
    const {w, h} = sizes();
    view.x = Math.max(0, Math.min(view.x, width * (1 - 1 / view.zoom)));
    view.y = Math.max(0, Math.min(view.y, height * (1 - 1 / view.zoom)));
    context.clearRect(0, 0, canvas.width, canvas.height);
    const gap = w > 6 && h > 6 ? 1 : 0;
    for (let y = Math.floor(view.y); y < height; ++y) {
      for (let x = Math.floor(view.x); x < width; ++x) {
        const slice = tensor.map[y * width + x];
        context.fillStyle = color(slice.not_finite > 0 ? null : slice.ratio);
        context.fillRect((x - view.x) * w, (y - view.y) * h, Math.max(w - gap, 0.5), Math.max(h - gap, 0.5));
      }
    }
    context.strokeStyle = getComputedStyle(document.body).color;
    context.lineWidth = 2;
    context.strokeRect((cell.x - view.x) * w + 1, (cell.y - view.y) * h + 1, Math.max(w - 2, 1), Math.max(h - 2, 1));
  }

  function choose(x, y) {
    cell.x = Math.max(0, Math.min(width - 1, x));
    cell.y = Math.max(0, Math.min(height - 1, y));
    const slice = tensor.map[cell.y * width + cell.x];
    const first = cell.x * tensor.tile_rows, last = Math.min(rows, first + tensor.tile_rows) - 1;
    const bad = slice.not_finite > 0 ? `, ${slice.not_finite} elements NaN or infinite` : "";
    caption.textContent = `batch ${Math.floor(cell.y / heads)}, head ${cell.y % heads}, rows ${first} to ${last}: ` +
      `relative error ${number(slice.relative)}, ${number(slice.ratio)} times what is allowed${bad}`;
    draw();
  }

  function zoom(factor) {
    view.zoom = Math.max(1, Math.min(64, view.zoom * factor));
    view.x = cell.x + 0.5 - width / view.zoom / 2;
    view.y = cell.y + 0.5 - height / view.zoom / 2;
    draw();
  }

  function at(event) {
    const box = canvas.getBoundingClientRect(), {w, h} = sizes();
    const scale = canvas.height / box.height;
    return [Math.floor(view.x + (event.clientX - box.left) * scale / w),
      Math.floor(view.y + (event.clientY - box.top) * scale / h)];
  }

  canvas.addEventListener("pointermove", (event) => choose(...at(event)));
  canvas.addEventListener("pointerdown", (event) => choose(...at(event)));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && view.zoom === 1 && event.deltaY > 0) return;
    event.preventDefault();
    zoom(event.deltaY < 0 ? 1.5 : 1 / 1.5);
  }, {passive: false});
  canvas.addEventListener("keydown", (event) => {
    const moves = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};
    if (moves[event.key]) {
      event.preventDefault();
      choose(cell.x + moves[event.key][0], cell.y + moves[event.key][1]);
      if (view.zoom > 1) zoom(1);
    } else if (event.key === "+" || event.key === "=") {
      zoom(2);
    } else if (event.key === "-") {
      zoom(0.5);
    }
  });
  new ResizeObserver(draw).observe(canvas);
  const button = (text, label, act) => element("button", {type: "button", "aria-label": label, onclick: act}, text);
  const worst = () => {
    const score = (slice) => slice.not_finite > 0 || slice.ratio === null ? Infinity : slice.ratio;
    const best = tensor.map.reduce((most, slice, i) => score(slice) > score(tensor.map[most]) ? i : most, 0);
    choose(best % width, Math.floor(best / width));
  };
  return element("figure", {}, element("div", {class: "tools"},
    button("+", "zoom in", () => zoom(2)), button("−", "zoom out", () => zoom(0.5)),
    button("worst tile", "go to the worst tile", worst),
    element("span", {class: "muted"}, `heads down, tiles of ${tensor.tile_rows} rows across; blue: within the bound, red: past it`)),
    canvas, caption);
}

// Errors of elements over what an element may err, by powers of 2.
function histogram(tensor) {
  const width = 720, height = 200, bottom = 34, most = Math.max(1, ...tensor.histogram);
  const step = (width - 20) / tensor.histogram.length;
  const caption = element("figcaption", {"aria-live": "polite"}, "Elements by error over what one element may err.");
  const root = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `histogram of ${tensor.name}`});
  tensor.histogram.forEach((count, i) => {
    const power = i - 16;
    const tall = count === 0 ? 0 : (height - bottom - 8) * Math.log1p(count) / Math.log1p(most);
    const bar = svg("rect", {x: 10 + i * step, y: height - bottom - tall, width: step - 2, height: tall,
      fill: power >= 0 ? "#d13c2a" : "#3b7dd8"});
    bar.addEventListener("pointerenter", () => {
      caption.textContent = `${count} elements err by 2^${power} to 2^${power + 1} of what one may`;
    });
    root.append(bar);
    if (i % 4 === 0) root.append(svg("text", {x: 10 + (i + 0.5) * step, y: height - 14, "text-anchor": "middle"}, `2^${power}`));
  });
  return element("figure", {}, root, caption);
}

const verdict = (word) => element("span", {class: word === "pass" ? "good" : "bad"}, word);

function show() {
  const report = data.cases[state.case];
  const main = document.getElementById("main");
  const passed = data.cases.filter((c) => c.verdict === "pass").length;
  const press = (index, chosen, text, act) => element("button", {type: "button", "aria-pressed": String(index === chosen),
    onclick: act}, text);
  const parts = [element("h1", {}, "Attention gradients: ", verdict(passed === data.cases.length ? "pass" : "fail"))];
  if (data.cases.length > 1) {
    parts.push(element("p", {class: "muted"}, `${passed} of ${data.cases.length} cases pass`),
      element("nav", {"aria-label": "cases"}, ...data.cases.map((c, i) => press(i, state.case,
        `${c.verdict === "pass" ? "✓" : "✗"} ${c.name || "case"}`, () => choose(i, 0)))));
  }
  parts.push(element("h2", {}, report.name || "The case", " ", verdict(report.verdict)),
    element("p", {class: "muted"}, `${report.what}; products in ${report.precision}`));
  for (const found of report.diagnosis) {
    parts.push(element("div", {class: "diagnosis"}, element("code", {}, found.id),
      ` (${found.tensors.join(", ")}): ${found.sentence}`));
  }
  for (const moved of report.moved) parts.push(element("div", {class: "diagnosis"}, moved));
  parts.push(table(["tensor", "verdict", "own", "relative L2", "bound", "twin", "cosine", "worst element", "got", "expected"],
    report.tensors.map((t, i) => [
      element("button", {type: "button", onclick: () => choose(state.case, i)}, t.name), verdict(t.verdict),
      t.own === null ? "–" : verdict(t.own), number(t.relative_l2), number(t.bound), number(t.twin_relative_l2),
      number(t.cosine, 6), `[${t.worst.index.join(", ")}]`, number(t.worst.got, 6), number(t.worst.expected, 6)])));
  if (report.unchecked.length > 0) {
    parts.push(element("p", {class: "muted"}, `Not checked, since the file has none: ${report.unchecked.join(", ")}.`));
  }
  const tensor = report.tensors[state.tensor];
  if (tensor) {
    parts.push(element("h2", {id: "tensor"}, tensor.name),
      element("nav", {"aria-label": "tensors"}, ...report.tensors.map((t, i) => press(i, state.tensor, t.name,
        () => choose(state.case, i)))));
    for (const finding of tensor.findings) parts.push(element("p", {}, finding));
    parts.push(element("h3", {}, "Where it errs"), heatMap(tensor), element("h3", {}, "How far elements err"),
      histogram(tensor));
  }
  main.replaceChildren(...parts);
}

function choose(index, tensor) {
  state.case = index;
  state.tensor = tensor;
  show();
}

// The first case and tensor that fail, if any does.
const failed = data.cases.findIndex((c) => c.verdict !== "pass");
if (failed >= 0) {
  choose(failed, Math.max(0, data.cases[failed].tensors.findIndex((t) => t.verdict !== "pass")));
} else {
  show();
}

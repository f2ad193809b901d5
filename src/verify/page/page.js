// SPDX-License-Identifier: Apache-2.0
// What every page draws with: elements, numbers, line charts.
const data = JSON.parse(document.getElementById("data").textContent);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function number(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  return size >= 1e-2 && size < 1e5 ? String(Number(x.toPrecision(digits))) : x.toExponential(digits - 1);
}

function table(head, rows) {
  return element("div", {class: "scroll"}, element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((text) => element("th", {scope: "col"}, text)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, cell)))))));
}

const kSeries = ["#0b68cb", "#d9480f", "#2f9e44", "#9c36b5", "#c2255c", "#087f5b", "#e67700", "#5f3dc4"];

// Lines over a logarithmic x; y is logarithmic where `options.log` says so. series: [{name, points: [[x, y, label]], dashed}].
function chart(series, options) {
  const width = 720, height = 300, left = 60, right = 12, top = 12, bottom = 40;
  const points = series.flatMap((s) => s.points);
  if (points.length === 0) return element("p", {class: "muted"}, "Nothing to draw.");
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  const xLow = Math.min(...xs), xHigh = Math.max(...xs, xLow * 1.01);
  const yLow = options.log ? Math.min(...ys) / 1.3 : 0, yHigh = Math.max(...ys) * (options.log ? 1.3 : 1.05);
  const x = (value) => left + (width - left - right) * Math.log(value / xLow) / Math.log(xHigh / xLow);
  const y = (value) => height - bottom - (height - top - bottom) *
    (options.log ? Math.log(value / yLow) / Math.log(yHigh / yLow) : (value - yLow) / (yHigh - yLow));
  const caption = element("figcaption", {"aria-live": "polite"}, options.caption);
  const root = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.caption});
  root.append(svg("path", {class: "axis", d: `M${left},${top}V${height - bottom}H${width - right}`}));
  for (let i = 0; i <= 4; ++i) {
    const value = options.log ? yLow * (yHigh / yLow) ** (i / 4) : yLow + (yHigh - yLow) * i / 4;
    root.append(svg("text", {x: left - 6, y: y(value) + 4, "text-anchor": "end"}, number(value, 2)));
  }
  const ticks = options.ticks ?? [...new Set(xs)].sort((a, b) => a - b);
  const step = Math.ceil(ticks.length / 8);
  ticks.forEach((value, i) => {
    if (i % step === 0) {
      const anchor = x(value) > width - 40 ? "end" : "middle";
      root.append(svg("text", {x: x(value), y: height - bottom + 18, "text-anchor": anchor}, number(value, 6)));
    }
  });
  root.append(svg("text", {x: width - right, y: height - 6, "text-anchor": "end"}, options.x));
  root.append(svg("text", {x: left + 6, y: top + 12}, options.y));
  series.forEach((s, n) => {
    const color = kSeries[n % kSeries.length];
    const path = s.points.map((p, i) => `${i === 0 ? "M" : "L"}${x(p[0])},${y(p[1])}`).join("");
    if (!s.dots) {
      root.append(svg("path", {d: path, fill: "none", stroke: color, "stroke-width": 2,
        "stroke-dasharray": s.dashed ? "6 4" : "none"}));
    }
    for (const [px, py, label] of s.dashed ? [] : s.points) {
      const dot = svg("circle", {cx: x(px), cy: y(py), r: 5, fill: color, tabindex: 0, role: "img", "aria-label": label});
      const say = () => { caption.textContent = label; };
      dot.addEventListener("pointerenter", say);
      dot.addEventListener("focus", say);
      dot.addEventListener("click", say);
      root.append(dot);
    }
  });
  const legend = element("p", {}, ...series.filter((s) => s.name).map((s) => element("span",
    {style: `color:${kSeries[series.indexOf(s) % kSeries.length]};margin-right:1rem`}, `● ${s.name}`)));
  return element("figure", {}, root, caption, legend);
}

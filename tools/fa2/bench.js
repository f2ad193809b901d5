// SPDX-License-Identifier: Apache-2.0
// The page of `fa2 bench --html`: limits, cases, roofline, rates over length, scaling.
const share = (x) => x === null ? "–" : `${(100 * x).toFixed(x < 0.1 ? 1 : 0)}%`;

// The case's name without its parts of these kinds.
const without = (name, pattern) => name.split("/").filter((part) => !pattern.test(part)).join("/");

function grouped(pattern, coordinate, least) {
  const groups = new Map();
  for (const c of data.cases) {
    const key = without(c.name, pattern);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push([coordinate(c), c.gflops, `${c.name}: ${number(c.gflops)} GFLOP/s, ${share(c.peak_share)} of the peak`]);
  }
  return [...groups].map(([name, points]) => ({name, points: points.sort((p, q) => p[0] - q[0])}))
    .filter((s) => new Set(s.points.map((p) => p[0])).size >= least);
}

function roofline(threads) {
  const cases = data.cases.filter((c) => c.threads === threads);
  const intensities = cases.map((c) => c.flops_per_byte);
  const memory = data.machine.memory.find((m) => m.threads === threads);
  const low = Math.min(1, ...intensities), high = Math.max(10, ...intensities) * 2;
  const series = [{dots: true, name: `cases on ${threads} threads`, points: cases.map((c) => [c.flops_per_byte, c.gflops,
    `${c.name}: ${number(c.gflops)} GFLOP/s at ${number(c.flops_per_byte)} FLOP/byte, ${share(c.limit_share)} of the limit`])}];
  for (const peak of data.machine.peaks.filter((p) => p.threads === threads)) {
    const ridge = Math.min(high, Math.max(low, peak.gflops / memory.triad_gbps));
    series.push({dashed: true, name: peak.unit, points: [[low, Math.min(peak.gflops, low * memory.triad_gbps)],
      [ridge, Math.min(peak.gflops, ridge * memory.triad_gbps)], [high, Math.min(peak.gflops, high * memory.triad_gbps)]]});
  }
  return chart(series, {log: true, x: "FLOP / byte", y: "GFLOP/s", ticks: [1, 10, 100, 1000, 10000].filter((t) => t >= low && t <= high),
    caption: "Each case below the roof of its unit: hover or tab to a dot."});
}

const parts = [element("h1", {}, "fa2 bench"),
  element("p", {class: "muted"}, `${data.cpu}, ${data.cores} cores; fa2 ${data.fa2}, ${data.revision}`),
  element("h2", {}, "The machine's limits"),
  table(["unit", "threads", "limit"], [
    ...data.machine.peaks.map((p) => [p.unit, String(p.threads), `${number(p.gflops, 4)} GFLOP/s`]),
    ...data.machine.memory.map((m) => ["memory, triad", String(m.threads), `${number(m.triad_gbps, 4)} GB/s`])]),
  element("h2", {}, "Cases"),
  table(["case", "GFLOP/s", "of the peak", "of the limit", "FLOP / byte", "workspace"], data.cases.map((c) => [c.name,
    number(c.gflops, 4), share(c.peak_share), share(c.limit_share), number(c.flops_per_byte), `${number(c.workspace_bytes / 1e6)} MB`])),
  element("h2", {}, "Roofline"),
  ...[...new Set(data.cases.map((c) => c.threads))].sort((a, b) => a - b).map(roofline)];
const lengths = grouped(/^N\d/, (c) => c.keys, 2);
if (lengths.length > 0) {
  parts.push(element("h2", {}, "Over the length"), chart(lengths, {x: "N", y: "GFLOP/s", caption: "Rates over the sequence length."}));
}
const scaling = grouped(/^T\d/, (c) => c.threads, 2);
if (scaling.length > 0) {
  parts.push(element("h2", {}, "Over threads"), chart(scaling, {x: "threads", y: "GFLOP/s", caption: "Rates over the number of threads."}));
}
document.getElementById("main").replaceChildren(...parts);

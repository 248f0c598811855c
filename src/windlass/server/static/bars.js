// What was predicted beside what was measured, and memory by tier.

import { el } from "./dom.js";
import { formatBytes, formatRatio, formatSeconds } from "./formats.js";

const TERM_COLOURS = ["blue", "orange", "green", "pink", "violet", "red", "brown", "grey"];
const CLASS_COLOURS = {
  weights: "blue", gradients: "red", optimizer: "green", activations: "orange", working: "pink",
  runtime: "grey",
};
const NEGLIGIBLE = 0.0005;

/** Rows of a kind of instruction each: the predicted bar (pale) above the measured one. */
export function kindBars(predicted, measured, colours) {
  const names = [...new Set([...Object.keys(predicted), ...Object.keys(measured)])];
  const longest = (name) => Math.max(predicted[name] ?? 0, measured[name] ?? 0);
  const total = names.reduce((sum, name) => sum + longest(name), 0);
  const rows = names.filter((name) => longest(name) > NEGLIGIBLE * total);
  rows.sort((a, b) => longest(b) - longest(a));
  const most = Math.max(...rows.map(longest), 1e-12);
  if (!rows.length) return el("p", { class: "note", text: "No times of instructions yet." });
  const bar = (name, kind, seconds) =>
    seconds === undefined
      ? el("span", { class: "bar missing" })
      : el("span", {
          class: `bar ${kind}`,
          title: `${kind} ${formatSeconds(seconds)}`,
          style: { width: `${(100 * seconds) / most}%`, background: `var(--${colours[name] ?? "grey"})` },
        });
  const show = (seconds) => (seconds === undefined ? "–" : formatSeconds(seconds));
  const ratio = (name) =>
    predicted[name] > 0 && measured[name] !== undefined
      ? formatRatio(measured[name] / predicted[name])
      : "–";
  return el(
    "table",
    { class: "kinds" },
    el("tr", {}, ...[["kind", ""], ["predicted (pale) above measured", ""], ["predicted", "number"],
      ["measured", "number"], ["ratio", "number"]].map(([text, kind]) => el("th", { text, class: kind }))),
    ...rows.map((name) =>
      el(
        "tr",
        {},
        el("td", { text: name }),
        el("td", { class: "bars" }, bar(name, "predicted", predicted[name]), bar(name, "measured", measured[name])),
        el("td", { class: "number", text: show(predicted[name]) }),
        el("td", { class: "number", text: show(measured[name]) }),
        el("td", { class: "number", text: ratio(name) }),
      ),
    ),
  );
}

/** One bar of the predicted step time by term: matmul, attention, traffic and others. */
export function termBar(terms) {
  const parts = Object.entries(terms).filter(([, seconds]) => seconds > 0).sort((a, b) => b[1] - a[1]);
  return stack(parts.map(([name, seconds], index) => ({
    name, size: seconds, colour: TERM_COLOURS[index % TERM_COLOURS.length],
  })), formatSeconds);
}

/** For each tier a bar of its predicted peak by class, against its capacity or the measured peak. */
export function memoryBars(peaks, measured) {
  return peaks
    .filter((peak) => peak.peak_bytes > 0)
    .map((peak, index) => {
      const facts = [`predicted peak ${formatBytes(peak.peak_bytes)} of ${formatBytes(peak.capacity_bytes)}`];
      if (index === 0 && measured) facts.push(`measured ${formatBytes(measured)}`);
      const end = Math.max(peak.peak_bytes, index === 0 ? (measured ?? 0) : 0) * 1.04;
      const parts = Object.entries(peak.by_class).filter(([, bytes]) => bytes > 0);
      const bars = stack(
        parts.map(([name, bytes]) => ({ name, size: bytes, colour: CLASS_COLOURS[name] ?? "grey" })),
        formatBytes,
        (100 * peak.peak_bytes) / end,
      );
      if (index === 0 && measured) {
        const place = `${(100 * measured) / end}%`;
        bars.firstChild.append(el("span", { class: "measured-mark", title: "measured", style: { left: place } }));
      }
      return el("div", { class: "tier" }, el("h3", { text: peak.tier }), el("p", { class: "note", text: facts.join(", ") }), bars);
    });
}

/** Parts beside each other, with their names below. */
function stack(parts, show, percent = 100) {
  const total = parts.reduce((sum, part) => sum + part.size, 0) || 1;
  const bar = el(
    "div",
    { class: "stack" },
    ...parts.map((part) =>
      el("span", {
        title: `${part.name}: ${show(part.size)}`,
        style: { width: `${(percent * part.size) / total}%`, background: `var(--${part.colour})` },
      }),
    ),
  );
  const keys = el(
    "div",
    { class: "keys" },
    ...parts.map((part) =>
      el("span", {}, el("i", { style: { background: `var(--${part.colour})` } }),
        `${part.name} ${show(part.size)} (${((100 * part.size) / total).toFixed(0)} %)`),
    ),
  );
  return el("div", {}, bar, keys);
}

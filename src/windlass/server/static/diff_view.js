// What differs between runs: inputs key by key, results in units of the noise, code line by line.

import { ask, path } from "./client.js";
import { card, el } from "./dom.js";
import { formatBytes, formatNumber, formatSeconds } from "./formats.js";

const MOST_OPEN = 12;
const MOST_CHARACTERS = 2000;
const MOST_LINES = 5000;

/** Shows the differences; gives a function that ends it. */
export async function diffView(host, state) {
  const ids = (state.ids ?? "").split(",").filter(Boolean);
  if (ids.length < 2) throw new Error("choose two runs or more in the table first");
  const diff = await ask(path("/api/diff", { ids }));
  document.title = "what differs – Windlass";
  const names = diff.runs.map((run) => run.short_id);
  host.append(
    el("header", { class: "view" }, el("h1", { text: names.length === 2 ? `${names[1]} beside ${names[0]}` : `${names.length} runs` }),
      el("p", { text: `${diff.summary[0].toUpperCase()}${diff.summary.slice(1)}.` }),
      ...diff.runs.map((run) => el("p", { class: "soft" }, el("a", { href: `#/run/${encodeURIComponent(run.id)}`, text: `${run.short_id} ${run.name}` }), ` ${run.model} on ${run.machine}, ${run.state}`))),
    card("Seven inputs", chips(diff.inputs)),
    card("Results", results(diff, names)),
    card("What differs", keys(diff, names)),
    diff.code.length ? card("Code", code(diff.code)) : el("div"),
  );
  return () => {};
}

function chips(inputs) {
  const marks = { same: "=", different: "≠", "not recorded": "?" };
  return el("div", { class: "chips" }, ...Object.entries(inputs).map(([name, status]) =>
    el("span", { class: `chip ${status.replace(" ", "-")}`, title: status }, el("b", { text: marks[status] }), name)));
}

function results(diff, names) {
  if (!diff.results.length) return el("p", { class: "note", text: "No results yet." });
  const show = (value, unit) => (value === null ? "–" : unit === "seconds" ? formatSeconds(value) : unit === "bytes" ? formatBytes(value) : formatNumber(value));
  return el("div", { class: "scroll" }, el("table", {},
    el("tr", {}, el("th", { text: "result" }), ...names.map((name) => el("th", { class: "number", text: name })), el("th", { text: "difference from the first" })),
    ...diff.results.map((one) => el("tr", {},
      el("td", { text: one.name }), ...one.values.map((value) => el("td", { class: "number", text: show(value, one.unit) })),
      el("td", { class: "wide" }, ...one.differences.map((text, index) => el("div", { class: strength(one.sigmas[index]), text })))))));
}

function strength(sigmas) {
  if (sigmas === null || Math.abs(sigmas) < 1) return "soft";
  return Math.abs(sigmas) >= 3 ? "outside" : "";
}

function keys(diff, names) {
  if (!diff.keys.length) return el("p", { class: "note", text: "No key of an input differs." });
  const inputs = [...new Set(diff.keys.map((one) => one.input))];
  return el("div", {}, ...inputs.map((input) => {
    const found = diff.keys.filter((one) => one.input === input);
    const count = found.length + (diff.omitted[input] ?? 0);
    const more = diff.omitted[input] ? el("p", { class: "note", text: `${diff.omitted[input]} more keys differ` }) : null;
    return el("details", { class: "input", open: count <= MOST_OPEN },
      el("summary", {}, el("b", { text: input }), el("span", { class: "soft", text: `${count} key${count === 1 ? "" : "s"}` })),
      el("div", { class: "scroll" }, el("table", { class: "keys-table" },
        el("tr", {}, ...["key", ...names].map((text) => el("th", { text }))),
        ...found.map((one) => el("tr", {}, el("td", { class: "wide", text: one.key }),
          ...one.values.map((value) => el("td", { class: "wide value", text: shortened(value) })))))), more);
  }));
}

/** The beginning of a long value, which says that it is one. */
function shortened(value) {
  if (value === null) return "–";
  return value.length > MOST_CHARACTERS ? `${value.slice(0, MOST_CHARACTERS)} …` : value;
}

function code(lines) {
  const left = lines.length - MOST_LINES;
  const more = left > 0 ? el("p", { class: "note", text: `${left} more lines; \`windlass diff\` prints them` }) : null;
  return el("div", {}, el("pre", { class: "code" }, ...lines.slice(0, MOST_LINES).map((line) => el("span", { class: { "+": "added", "-": "removed", "@": "place" }[line[0]] ?? "", text: `${line}\n` }))), more);
}

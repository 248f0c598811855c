// Curves of many runs over each other.

import { ask, path } from "./client.js";
import { firstNames, runKeys, showCurves } from "./curves.js";
import { card, el } from "./dom.js";
import { formatBytes, formatNumber, formatSeconds } from "./formats.js";

const COLUMNS = ["id", "name", "state", "step", "loss", "held_out_loss", "seconds", "predicted_seconds", "memory_bytes"];

/** Shows the overlay; gives a function that ends it. */
export async function compareView(host, state, update) {
  const ids = (state.ids ?? "").split(",").filter(Boolean);
  if (!ids.length) throw new Error("choose runs in the table first");
  const [table, series] = await Promise.all([
    ask(path("/api/runs", { ids, columns: COLUMNS, archived: "all" })),
    ask(`/api/runs/${encodeURIComponent(ids[0])}`),
  ]);
  const rows = new Map(table.rows.map((row) => [row[0], row]));
  const runs = ids.filter((id) => rows.has(id)).map((id) => ({ id, name: rows.get(id)[1], isLive: rows.get(id)[2] === "running" }));
  const all = Object.keys(series.series);
  const names = state.names ? state.names.split(",") : firstNames(all);
  document.title = `${runs.length} runs – Windlass`;
  const charts = el("div");
  const differ = runs.length > 1
    ? el("a", { class: "button", href: `#/diff?ids=${runs.map((run) => encodeURIComponent(run.id)).join(",")}`, text: "what differs" })
    : null;
  host.append(
    el("header", { class: "view" }, el("h1", {}, `${runs.length} runs`, differ), runKeys(runs)),
    card(null, charts),
    card("Results", resultTable(runs, rows)),
  );
  const shown = await showCurves(charts, { runs, names, all, state, update, since: table.version });
  return shown.destroy;
}

function resultTable(runs, rows) {
  const show = (value, format) => (value === null ? "–" : format(value));
  const head = ["run", "step", "loss", "held out", "step time", "predicted", "memory"];
  return el("div", { class: "scroll" }, el("table", {},
    el("tr", {}, ...head.map((text, index) => el("th", { text, class: index ? "number" : "" }))),
    ...runs.map((run, index) => {
      const [, , , step, loss, heldOut, seconds, predicted, memory] = rows.get(run.id);
      const cells = [String(step), show(loss, formatNumber), show(heldOut, formatNumber), show(seconds, formatSeconds), show(predicted, formatSeconds), show(memory, formatBytes)];
      return el("tr", {}, el("td", {}, runKeysOf(run, index)), ...cells.map((text) => el("td", { class: "number", text })));
    })));
}

function runKeysOf(run, index) {
  const keys = runKeys(Array.from({ length: index + 1 }, () => run));
  return keys.lastChild;
}

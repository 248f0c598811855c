// Charts of several series of one or many runs, with one set of controls, and live points.

import { appendPoints, drawChart, lineColour } from "./chart.js";
import { ask, followLive, path } from "./client.js";
import { button, el } from "./dom.js";
import { formatPoint, unitOfSeries } from "./formats.js";

const POINTS = 500;
const FIRST_NAMES = ["loss", "seconds", "gradient_norm", "learning_rate"];

/** The series that are shown first of those that there are. */
export function firstNames(names) {
  const first = FIRST_NAMES.filter((name) => names.includes(name));
  return first.length ? first : names.slice(0, 4);
}

/** Settings of charts from the state of the page. */
export function chartSettings(state) {
  return {
    smooth: Math.min(0.99, Math.max(0, Number(state.smooth) || 0)),
    logX: state.logx === "1",
    logY: state.logy === "1",
  };
}

/**
 * Shows series of runs; gives `{ destroy, lines }`.
 *
 * `runs`: `{ id, name, isLive }`; `names`: of series; `all`: names that can be added;
 * `marks`: marks of charts by the name of their series; `extra`: more lines of a chart;
 * `changed`: called when one of the runs has changed in the table.
 */
export async function showCurves(host, { runs, names, all, state, update, marks = {}, extra = {}, since = 0, changed }) {
  const settings = chartSettings(state);
  let shown = [...names];
  const charts = new Map();
  const grid = el("div", { class: "charts" });
  const lines = new Map();
  host.append(controls(), grid);
  await load(shown);
  draw();
  const stop = followLive(
    () => ({
      since,
      ids: runs.filter((run) => run.isLive).map((run) => run.id),
      after: runs.filter((run) => run.isLive).map((run) => String(lastStep(run.id))),
      names: shown,
    }),
    { points: receive, runs: (event) => event.ids.some((id) => runs.some((run) => run.id === id)) && changed?.() },
  );
  return {
    destroy() {
      stop();
      for (const chart of charts.values()) chart.destroy();
    },
  };

  async function load(wanted) {
    const ids = runs.map((run) => run.id);
    const missing = wanted.filter((name) => !lines.has(name));
    if (!missing.length || !ids.length) return;
    const { curves } = await ask(path("/api/curves", { ids, names: missing, points: POINTS }));
    for (const name of missing) {
      const found = runs
        .map((run, index) => ({ run, index, curve: curves[run.id]?.[name] }))
        .filter((one) => one.curve)
        .map(({ run, index, curve }) => ({
          id: run.id, name: run.name, colour: lineColour(index),
          steps: curve.steps, median: curve.median, low: curve.low, high: curve.high,
        }));
      lines.set(name, found);
    }
  }

  function lastStep(id) {
    let last = 0;
    for (const group of lines.values()) {
      for (const line of group) if (line.id === id) last = Math.max(last, line.steps.at(-1) ?? 0);
    }
    return last;
  }

  async function receive({ id, restarted, series }) {
    if (restarted) {
      const kept = shown.filter((name) => lines.delete(name));
      await load(kept);
      draw();
      return;
    }
    for (const [name, [steps, values]] of Object.entries(series)) {
      const line = lines.get(name)?.find((one) => one.id === id);
      if (line) appendPoints(line, steps, values);
      charts.get(name)?.update();
    }
  }

  function draw() {
    for (const chart of charts.values()) chart.destroy();
    charts.clear();
    grid.replaceChildren();
    for (const name of shown) {
      const plot = el("div", { class: "plot" });
      const group = [...(lines.get(name) ?? []), ...(extra[name] ?? [])];
      const remove = button("×", () => toggle(name), { class: "quiet", title: `leave ${name} out` });
      const heading = el("div", { class: "chart-head" }, el("h3", { text: name }), keysOf(name), remove);
      const body = group.length ? plot : el("p", { class: "note", text: "no such series" });
      grid.append(el("div", { class: "chart" }, heading, body));
      if (group.length) {
        charts.set(name, drawChart(plot, { lines: group, unit: unitOfSeries(name), settings, marks: marks[name] ?? [] }));
      }
    }
  }

  /** What is in a chart beside the runs: dots, and what was predicted. */
  function keysOf(name) {
    const unit = unitOfSeries(name);
    return el("span", { class: "keys" },
      ...(extra[name] ?? []).map((line) => el("span", {}, el("i", { class: "dot", style: { background: `var(--${line.colour})` } }), line.name)),
      ...(marks[name] ?? []).map((mark) => el("span", {}, el("i", { class: "dash", style: { background: `var(--${mark.colour})` } }), `${mark.name} ${formatPoint(mark.y, unit)}`)));
  }

  function redraw() {
    for (const chart of charts.values()) chart.redraw();
  }

  async function toggle(name) {
    shown = shown.includes(name) ? shown.filter((one) => one !== name) : [...shown, name];
    update({ names: shown.join(",") });
    await load(shown);
    draw();
  }

  function controls() {
    const label = el("span", { class: "soft", text: settings.smooth.toFixed(2) });
    const slider = el("input", {
      type: "range", min: "0", max: "0.99", step: "0.01", value: String(settings.smooth),
      "aria-label": "smoothing",
      on: {
        input: (event) => {
          settings.smooth = Number(event.target.value);
          label.textContent = settings.smooth.toFixed(2);
          redraw();
        },
        change: () => update({ smooth: settings.smooth ? String(settings.smooth) : "" }),
      },
    });
    const box = (text, key, word) =>
      el("label", {}, el("input", {
        type: "checkbox", checked: settings[key],
        on: {
          change: (event) => {
            settings[key] = event.target.checked;
            update({ [word]: event.target.checked ? "1" : "" });
            redraw();
          },
        },
      }), text);
    const list = el("datalist", { id: "series-names" }, ...all.map((name) => el("option", { value: name })));
    const add = el("input", {
      type: "search", list: "series-names", placeholder: "add a series", "aria-label": "add a series",
      on: {
        change: (event) => {
          const name = event.target.value.trim();
          if (all.includes(name) && !shown.includes(name)) {
            event.target.value = "";
            toggle(name);
          }
        },
      },
    });
    return el("div", { class: "controls" },
      el("label", {}, "smoothing", slider, label), box("log steps", "logX", "logx"),
      box("log values", "logY", "logy"), add, list);
  }
}

/** A list of runs with the colour of their lines. */
export function runKeys(runs) {
  return el("div", { class: "keys runs" }, ...runs.map((run, index) =>
    el("a", { href: `#/run/${encodeURIComponent(run.id)}`, title: run.id },
      el("i", { style: { background: `var(--${lineColour(index)})` } }), run.name)));
}

// Charts of several series of one or many runs, with one set of controls, and live points.

import { appendPoints, drawChart, lineColour } from "./chart.js";
import { ask, followLive, forgetAnswer, path } from "./client.js";
import { button, el, fault } from "./dom.js";
import { formatPoint, unitOfSeries } from "./formats.js";

const POINTS = 500;
const MOST_POINTS = 4000;
const MOST_LIVE = 50;
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
 * Shows series of runs; gives `{ destroy, offer, reload, update }`: `offer` takes names of all series
 * that there are by now, `reload` follows runs that go on again, `update` draws `extra` that has grown.
 *
 * `runs`: `{ id, name, isLive }`; `names`: of series; `all`: names that can be added;
 * `marks`: marks of charts by the name of their series; `extra`: more lines of a chart;
 * `changed`: called when one of the runs has changed in the table.
 */
export async function showCurves(host, { runs, names, all, state, update, marks = {}, extra = {}, since = 0, changed }) {
  const settings = chartSettings(state);
  const live = () => runs.filter((run) => run.isLive).slice(0, MOST_LIVE);
  let shown = [...names];
  let offered = [...all];
  const charts = new Map();
  const grid = el("div", { class: "charts" });
  const options = el("datalist", { id: "series-names" });
  const lines = new Map();
  let stream = { reopen() {}, end() {} };
  let question = "";
  host.append(controls(), grid);
  list();
  await read();
  stream = followLive(
    () => ({
      since,
      ids: live().map((run) => run.id),
      after: live().map((run) => String(lastStep(run.id))),
      names: shown,
    }),
    { points: receive, runs: (event) => event.ids.some((id) => runs.some((run) => run.id === id)) && changed?.() },
  );
  return {
    destroy() {
      stream.end();
      for (const chart of charts.values()) chart.destroy();
    },
    async offer(found) {
      offered = [...found];
      list();
      const first = state.names ? shown : firstNames(offered);
      if (first.join() !== shown.join()) await choose(first);
    },
    reload,
    update: () => grow(shown),
  };

  /** Asks for all curves that are shown: one question, which a saved page asks again. */
  async function read() {
    const [ids, wanted] = [runs.map((run) => run.id), shown];
    const place = path("/api/curves", { ids, names: wanted, points: POINTS });
    const { curves } = ids.length && wanted.length ? await ask(place) : { curves: {} };
    if (wanted !== shown) return; // others were chosen meanwhile
    if (place !== question) forgetAnswer(question);
    question = place;
    lines.clear();
    for (const name of wanted) lines.set(name, linesOf(name, curves));
    draw();
  }

  function linesOf(name, curves) {
    return runs
      .map((run, index) => ({ run, index, curve: (curves[run.id] ?? {})[name] }))
      .filter(({ run, curve }) => curve?.steps || run.isLive)
      .map(({ run, index, curve }) => ({
        id: run.id, name: run.name, colour: lineColour(index),
        steps: curve?.steps ?? [], median: curve?.median ?? [], low: curve?.low, high: curve?.high,
      }));
  }

  /** Asks for all curves anew, and for what comes after them. */
  async function reload() {
    await read();
    stream.reopen();
  }

  /** The step up to which all lines of a run are known. */
  function lastStep(id) {
    const groups = shown.map((name) => lines.get(name) ?? []);
    const last = groups.flat().filter((line) => line.id === id).map((line) => line.steps.at(-1) ?? 0);
    return last.length ? Math.min(...last) : 0;
  }

  async function receive({ id, restarted, series }) {
    if (restarted) return reload();
    let most = 0;
    for (const [name, [steps, values]] of Object.entries(series)) {
      const line = lines.get(name)?.find((one) => one.id === id);
      if (line) appendPoints(line, steps, values);
      most = Math.max(most, line?.steps.length ?? 0);
    }
    grow(Object.keys(series));
    if (most > MOST_POINTS) await reload(); // the server makes few points of many
  }

  /** Draws series that have grown; one that has its first points gets a chart. */
  function grow(names) {
    if (shown.some((name) => !charts.has(name) && hasPoints(name))) return draw();
    for (const name of names) charts.get(name)?.update();
  }

  function groupOf(name) {
    return [...(lines.get(name) ?? []), ...ownOf(extra, name)];
  }

  function hasPoints(name) {
    return groupOf(name).some((line) => line.steps.length);
  }

  function draw() {
    for (const chart of charts.values()) chart.destroy();
    charts.clear();
    grid.replaceChildren();
    for (const name of shown) {
      const plot = el("div", { class: "plot", role: "img", "aria-label": `${name} over the steps` });
      const remove = button("×", () => toggle(name), { class: "quiet", title: `leave ${name} out` });
      const heading = el("div", { class: "chart-head" }, el("h3", { text: name }), keysOf(name), remove);
      const body = hasPoints(name) ? plot : el("p", { class: "note", text: "no points yet" });
      grid.append(el("div", { class: "chart" }, heading, body));
      if (hasPoints(name)) {
        charts.set(name, drawChart(plot, { lines: groupOf(name), unit: unitOfSeries(name), settings, marks: ownOf(marks, name) }));
      }
    }
  }

  /** What is in a chart beside the runs: dots, and what was predicted. */
  function keysOf(name) {
    const unit = unitOfSeries(name);
    return el("span", { class: "keys" },
      ...ownOf(extra, name).filter((line) => line.steps.length).map((line) => el("span", {}, el("i", { class: "dot", style: { background: `var(--${line.colour})` } }), line.name)),
      ...ownOf(marks, name).map((mark) => el("span", {}, el("i", { class: "dash", style: { background: `var(--${mark.colour})` } }), `${mark.name} ${formatPoint(mark.y, unit)}`)));
  }

  function redraw() {
    for (const chart of charts.values()) chart.redraw();
  }

  async function toggle(name) {
    const wanted = shown.includes(name) ? shown.filter((one) => one !== name) : [...shown, name];
    update({ names: wanted.join(",") });
    await choose(wanted);
  }

  /** Shows other series. */
  async function choose(wanted) {
    shown = wanted;
    try {
      await reload();
    } catch (error) {
      grid.prepend(fault(error));
    }
  }

  function list() {
    options.replaceChildren(...offered.map((name) => el("option", { value: name })));
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
    const add = el("input", {
      type: "search", list: "series-names", placeholder: "add a series", "aria-label": "add a series",
      on: {
        change: (event) => {
          const name = event.target.value.trim();
          if (offered.includes(name) && !shown.includes(name)) {
            event.target.value = "";
            toggle(name);
          }
        },
      },
    });
    return el("div", { class: "controls" },
      el("label", {}, "smoothing", slider, label), box("log steps", "logX", "logx"),
      box("log values", "logY", "logy"), add, options);
  }
}

/** The list of a table under a name, which may be one that any table has, such as `constructor`. */
function ownOf(table, name) {
  return Object.hasOwn(table, name) ? table[name] : [];
}

/** A list of runs with the colour of their lines. */
export function runKeys(runs) {
  return el("div", { class: "keys runs" }, ...runs.map((run, index) =>
    el("a", { href: `#/run/${encodeURIComponent(run.id)}`, title: run.id },
      el("i", { style: { background: `var(--${lineColour(index)})` } }), run.name)));
}

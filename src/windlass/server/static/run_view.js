// One run beside its prediction.

import { kindBars, memoryBars, termBar } from "./bars.js";
import { ask, post, saved } from "./client.js";
import { firstNames, showCurves } from "./curves.js";
import { button, card, el, fault, phrase } from "./dom.js";
import { formatAgo, formatBytes, formatCount, formatNumber, formatRatio, formatSeconds, formatTime, formatValue } from "./formats.js";
import { drawLanes } from "./lanes.js";

const MOST_EVENTS = 200;
const INPUT_NAMES = ["request", "plan", "graph", "machine", "environment", "code", "data"];

/** Shows one run; gives a function that ends it. */
export async function runView(host, state, update) {
  const place = `/api/runs/${encodeURIComponent(state.id)}`;
  const [run, answer] = await Promise.all([ask(place), ask(`${place}/events`)]);
  let { events } = answer;
  let question = 0;
  document.title = `${run.name} – Windlass`;
  const [charts, lanes, inputs, head, measured, after] = Array.from({ length: 6 }, () => el("div"));
  const followed = { id: run.id, name: run.name, isLive: run.state === "running" };
  const own = annotations(run, place);
  const extra = extraOf(events);
  const past = happened();
  const drawHead = () => head.replaceChildren(header(run), tiles(run, events), faults(run, events));
  const drawRest = () => {
    measured.replaceChildren(times(run), memory(run));
    past.fill(events);
  };
  drawHead();
  drawRest();
  after.append(settings(run), past.node);
  host.append(
    head, own.node, card("Curves", charts), measured, card("One step, instruction by instruction", lanes),
    card("Inputs", inputs), after,
  );
  let curves = null;
  const ended = [];
  await Promise.all([[drawCurves, charts], [drawTimeline, lanes], [listInputs, inputs]].map(async ([draw, into]) => {
    try {
      await draw();
    } catch (error) { // the other parts are shown all the same
      into.append(fault(error));
    }
  }));
  return () => ended.forEach((end) => end());

  async function drawCurves() {
    const all = Object.keys(run.series);
    const names = state.names ? state.names.split(",") : firstNames(all);
    curves = await showCurves(charts, {
      runs: [followed],
      names, all, state, update, marks: marksOf(run), extra, since: run.version, changed,
    });
    ended.push(curves.destroy);
  }

  /** Another step, another state: the numbers above the curves; after more than a step all others. */
  async function changed() {
    const mine = ++question;
    const found = await ask(place);
    const isMore = milestones(found) !== milestones(run);
    const more = isMore ? await ask(`${place}/events`) : { events };
    if (mine !== question) return;
    Object.assign(run, found);
    events = more.events;
    drawHead();
    if (!isMore) return;
    own.fill();
    drawRest();
    for (const [name, [line]] of Object.entries(extraOf(events))) Object.assign(extra[name][0], line);
    const wasLive = followed.isLive;
    followed.isLive = run.state === "running";
    if (followed.isLive && !wasLive) await curves?.reload(); // it was resumed
    await curves?.offer(Object.keys(run.series));
    curves?.update();
  }

  async function drawTimeline() {
    const timeline = await ask(`${place}/timeline`);
    const text = timeline.is_cut
      ? "This step has too many instructions for this page; `windlass report` draws them."
      : "Predicted above measured on one time axis. Click, then turn the wheel or press + and - to zoom; drag or press the arrows to move; double-click to see all.";
    if (!timeline.lanes.length) {
      lanes.append(el("p", { class: "note", text: timeline.is_cut ? text : "No timeline in this run folder." }));
      return;
    }
    lanes.append(el("p", { class: "note", text }));
    ended.push(drawLanes(lanes, timeline));
  }

  async function listInputs() {
    const { inputs: found } = await ask(`${place}/inputs`);
    for (const name of INPUT_NAMES) {
      const one = found.find((input) => input.input === name);
      if (!one) {
        inputs.append(el("div", { class: "input missing" }, el("b", { text: name }), el("span", { class: "soft", text: "not recorded" })));
        continue;
      }
      const cut = one.text.length < one.characters ? `\n… ${one.characters - one.text.length} more characters` : "";
      inputs.append(el("details", { class: "input" },
        el("summary", {}, el("b", { text: name }), el("code", { text: one.fingerprint ?? "" }), el("span", { class: "soft", text: one.file })),
        el("pre", { text: one.text + cut })));
    }
  }
}

function header(run) {
  const facts = [run.started ? formatTime(run.started) : null, `machine ${run.machine}`, run.host ? `host ${run.host}` : null,
    run.site ? `site ${run.site}` : null, run.group ? `group ${run.group}` : null, run.parent ? `started from ${run.parent}` : null,
    run.attempts > 1 ? `${run.attempts} attempts` : null, run.ranks > 1 ? `${run.ranks} ranks` : null, run.id];
  return el("header", { class: "view" },
    el("h1", {}, run.name, el("span", { class: `pill ${run.state}`, text: run.state }),
      run.verdict ? el("span", { class: `verdict ${run.verdict}`, text: run.verdict }) : null),
    el("p", { class: "soft", text: [run.model, ...facts].filter(Boolean).join(" · ") }));
}

function tiles(run, events) {
  const prediction = run.prediction;
  const tile = (name, value, more, outside = false) =>
    el("div", { class: `tile ${outside ? "outside" : ""}` }, el("div", { class: "name", text: name }),
      el("div", { class: "value", text: value }), el("div", { class: "more", text: more ?? "" }));
  const found = [tile("step", String(run.step), run.steps ? `of ${run.steps} requested` : "")];
  const summary = run.series.loss;
  if (run.loss !== null) found.push(tile("loss", formatNumber(run.loss), Number.isFinite(summary?.minimum) ? `nats a token, lowest ${formatNumber(summary.minimum)}` : "nats a token"));
  else if (run.metric) found.push(tile(run.metric, run.metric_value === null ? "not finite" : formatNumber(run.metric_value)));
  if (run.held_out_loss !== null) {
    const last = events.filter((event) => event.event === "evaluation").at(-1);
    const bits = last?.bits_per_byte;
    found.push(tile("held-out loss", formatNumber(run.held_out_loss), typeof bits === "number" ? `${bits.toFixed(3)} bits per byte` : ""));
  }
  const predicted = run.predicted_seconds;
  if (run.seconds !== null || predicted) {
    const outside = run.seconds !== null && run.low_seconds !== null && (run.seconds < run.low_seconds || run.seconds > run.high_seconds);
    const ratio = run.seconds && predicted ? `, ${formatRatio(run.seconds / predicted)}` : "";
    found.push(tile("step time", run.seconds === null ? "not measured" : formatSeconds(run.seconds), predicted ? `predicted ${formatSeconds(predicted)}${ratio}` : "", outside));
  }
  if (run.tokens_per_second !== null) {
    const speed = prediction ? prediction.tokens_per_step / prediction.step_seconds : null;
    found.push(tile("tokens per second", formatCount(run.tokens_per_second), speed ? `predicted ${formatCount(speed)}` : ""));
  }
  const peak = prediction?.peaks?.[0]?.peak_bytes;
  if (run.memory_bytes !== null) found.push(tile("peak memory", formatBytes(run.memory_bytes), peak ? `predicted ${formatBytes(peak)}, ${formatRatio(run.memory_bytes / peak)}` : "", peak && run.memory_bytes > run.most_memory_bytes));
  found.push(tile("peers", String(run.peers), "same graph, plan, machine"));
  return el("div", { class: "tiles" }, ...found);
}

function faults(run, events) {
  const verdict = events.filter((event) => event.event === "verdict").at(-1);
  const lines = [...run.faults, ...events.filter((event) => event.event === "alert").map((event) => event.message),
    ...events.filter((event) => event.event === "end" && event.reason).map((event) => event.reason)];
  const parts = [];
  if (verdict?.sentences?.length) {
    parts.push(el("section", { class: `judgement ${verdict.level}` }, el("h2", {}, "Verdict ", el("span", { class: `verdict ${verdict.level}`, text: String(verdict.level) })),
      el("ul", {}, ...verdict.sentences.map((text) => el("li", {}, phrase(text))))));
  }
  const words = [...new Set(lines.filter(Boolean).map(String))];
  if (words.length) parts.push(el("section", { class: "faults" }, el("h2", { text: "What went wrong" }), el("ul", {}, ...words.map((text) => el("li", { text })))));
  return el("div", {}, ...parts);
}

/** Tags, notes and marks; gives `{ node, fill }`. What somebody types stays when they are filled. */
function annotations(run, place) {
  const message = el("div");
  const [tags, notes] = [el("span", { class: "tag-list" }), el("div")];
  const change = async (body) => {
    try {
      Object.assign(run, await post(`${place}/annotations`, body));
      message.replaceChildren();
      fill();
      return true;
    } catch (error) {
      message.replaceChildren(fault(error));
      return false;
    }
  };
  const entry = (placeholder, key) => el("input", {
    type: "text", placeholder, "aria-label": placeholder, class: key === "note" ? "note-entry" : "tag-entry",
    on: {
      keydown: async (event) => {
        const field = event.target;
        const text = field.value.trim();
        if (event.key !== "Enter" || !text) return;
        if (await change(key === "note" ? { note: text } : { tags: [text] })) field.value = "";
      },
    },
  });
  const result = el("div", { role: "status" });
  const judge = async () => {
    result.replaceChildren(el("p", { class: "note", text: "comparing with its prediction, its peers and its past …" }));
    try {
      const found = await ask(`${place}/verdict`, { keep: false });
      result.replaceChildren(el("p", { class: "remark" }, el("span", { class: `verdict ${found.level}`, text: found.level })),
        el("ul", {}, ...found.sentences.map((text) => el("li", {}, phrase(text)))));
    } catch (error) {
      result.replaceChildren(fault(error));
    }
  };
  const archive = button("", () => change({ archived: !run.archived }));
  const broken = button("", () => change({ broken: !run.broken }), { title: "verdicts do not compare with broken runs" });
  const fill = () => {
    tags.replaceChildren(...run.tags.map((tag) => el("span", { class: "tag" }, tag,
      saved ? null : button("×", () => change({ remove: [tag] }), { class: "quiet", title: `take ${tag} away` }))));
    notes.replaceChildren(...run.notes.map((note) => el("p", { class: "remark", text: note })));
    archive.textContent = run.archived ? "take out of the archive" : "archive";
    broken.textContent = run.broken ? "is no longer broken" : "mark as broken";
  };
  fill();
  const judging = { title: "beside its prediction, its peers and its own past" };
  const node = el("section", { class: "slim annotations" },
    el("div", { class: "tags" }, tags,
      ...(saved ? [] : [entry("add a tag", "tags"), entry("add a note", "note"), button("judge", judge, judging), archive, broken])),
    message, notes, result);
  return { node, fill };
}

/** What tells that more than another step was done. */
function milestones(run) {
  return JSON.stringify([
    run.state, run.attempts, run.held_out_loss, run.verdict, run.faults, run.tags, run.notes, run.archived, run.broken,
    Object.keys(run.series),
  ]);
}

function times(run) {
  const prediction = run.prediction;
  const parts = [el("p", { class: "note", text: "Seconds of a step by kind of instruction; measured is the median under the current plan." }),
    kindBars(prediction?.by_kind ?? {}, run.kinds, run.colours)];
  if (prediction) {
    parts.push(el("h3", { text: "Predicted by term" }), termBar(prediction.by_term));
  }
  return card("Where the time goes", ...parts);
}

function memory(run) {
  if (!run.prediction) return card("Memory", el("p", { class: "note", text: "No prediction in this run folder." }));
  return card("Memory by tier", ...memoryBars(run.prediction.peaks, run.memory_bytes));
}

function settings(run) {
  const names = Object.keys(run.settings);
  if (!names.length) return el("div");
  return card("Settings", el("details", {}, el("summary", { text: `${names.length} settings` }),
    el("table", {}, ...names.map((name) => el("tr", {}, el("td", { class: "soft", text: name }), el("td", { class: "wide", text: formatValue(run.settings[name]) }))))));
}

/** The last events; gives `{ node, fill }`. */
function happened() {
  const [summary, table] = [el("summary"), el("table")];
  const words = (event) => {
    const facts = Object.entries(event).filter(([key, value]) => !["event", "time", "attempt", "id", "sentences", "files"].includes(key) && ["string", "number", "boolean"].includes(typeof value));
    return facts.slice(0, 8).map(([key, value]) => `${key} ${formatValue(value)}`).join(", ");
  };
  const fill = (events) => {
    const shown = events.filter((event) => !["seal"].includes(event.event)).slice(-MOST_EVENTS).reverse();
    summary.textContent = events.length > MOST_EVENTS ? `${events.length} events, the last ${MOST_EVENTS} of them` : `${events.length} events`;
    table.replaceChildren(...shown.map((event) => el("tr", {}, el("td", { class: "soft", text: formatAgo(event.time), title: formatTime(event.time) }),
      el("td", { text: String(event.event) }), el("td", { class: "wide", text: words(event) }))));
  };
  return { node: card("What happened", el("details", {}, summary, table)), fill };
}

/** What was predicted, behind the curve of the step time. */
function marksOf(run) {
  if (!run.predicted_seconds) return {};
  return { seconds: [{ name: "predicted", colour: "orange", y: run.predicted_seconds, low: run.low_seconds, high: run.high_seconds }] };
}

/** Held-out losses, as dots beside the curve of the loss. */
function extraOf(events) {
  const found = events.filter((event) => event.event === "evaluation" && Number.isFinite(event.loss) && Number.isFinite(event.step));
  return { loss: [{ id: "held out", name: "held out", colour: "red", dots: true, steps: found.map((event) => event.step), median: found.map((event) => event.loss) }] };
}

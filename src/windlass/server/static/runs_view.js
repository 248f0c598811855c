// The table of runs: filter, order, columns, tags, notes, archive; only the rows in sight exist.

import { ask, followLive, forgetAnswers, path, post, saved } from "./client.js";
import { button, delayed, el } from "./dom.js";
import { formatCount, formatRatio, formatSeconds, formatTime, formatValue } from "./formats.js";

const PAGE_ROWS = 1000;
const EXTRA_ROWS = 8;
const FIRST_CHOSEN = 20;
const DIFFERING = "differing"; // stands for the settings that tell the runs of a sweep apart
const SHOWN = ["name", DIFFERING, "state", "model", "machine", "started", "step", "loss", "held_out_loss", "seconds", "tokens_per_second", "memory_bytes", "verdict"];
const NEEDED = ["id", "name", "state", "steps", "step", "predicted_seconds", "low_seconds", "high_seconds", "tags", "notes", "archived", "broken", "verdict", "metric", "metric_value"];
const TITLES = {
  name: "run", held_out_loss: "held out", seconds: "step time", tokens_per_second: "tokens/s",
  memory_bytes: "memory", predicted_seconds: "predicted", step: "progress",
};
const OTHER_WIDTH = 96;
const NAME_END = 8; // letters of a long name that are never cut off: they tell a sweep's runs apart
const WIDTHS = { name: 180, state: 100, model: 84, machine: 68, started: 92, step: 96, loss: 66, held_out_loss: 66, seconds: 116, tokens_per_second: 68, memory_bytes: 78, verdict: 88 };
const ALIKE = ["machine", "model"]; // left out of a narrow table, where all runs have the same
const GROWING = { name: 2.4, model: 1, machine: 0.6 };
const PICK_WIDTH = 26;
const GAP_WIDTH = 10;
const EDGE_WIDTH = 26;

/** Shows the table; gives a function that ends it. */
export async function runsView(host, state, update) {
  let columns = state.columns ? state.columns.split(",") : SHOWN;
  let shown = []; // the columns that the table has: the chosen ones, with the settings that differ
  let table = { columns: [], rows: [], total: 0, version: 0 };
  let places = {};
  const chosen = new Set(state.chosen ? state.chosen.split(",") : []);
  const message = el("p", { class: "message", role: "status" });
  const count = el("span", { class: "soft" });
  const head = el("div", { class: "row head", role: "row" });
  const body = el("div", { class: "rows", role: "rowgroup" });
  const actions = el("div", { class: "actions", hidden: true });
  const grid = el("div", { class: "table", role: "table", "aria-label": "runs" }, head, body);
  let isOver = false;
  let isAsking = false;
  let question = 0; // a later one makes answers to earlier ones void
  let look = 0; // of rows; those that were made for an earlier one are made anew
  host.append(toolbar(), message, actions, grid);
  await load();
  const onScroll = () => draw();
  window.addEventListener("scroll", onScroll, { passive: true });
  window.addEventListener("resize", drawAnew);
  const live = followLive(() => ({ since: table.version }), { runs: patch });
  return () => {
    isOver = true;
    live.end();
    window.removeEventListener("scroll", onScroll);
    window.removeEventListener("resize", drawAnew);
  };

  function query(more = {}) {
    return path("/api/runs", {
      filter: state.filter, sort: state.sort, archived: state.archived, columns: asked(), limit: String(PAGE_ROWS), ...more,
    });
  }

  function asked() {
    return [...new Set([...NEEDED, ...columns])];
  }

  function tell(fault) {
    message.textContent = fault ?? "";
    message.classList.toggle("fault", Boolean(fault));
  }

  /** Asks for the first rows of the table, as many as are wanted. */
  async function load(wanted = PAGE_ROWS) {
    if (isOver) return;
    const mine = ++question;
    forgetAnswers();
    try {
      const answer = await ask(query());
      while (mine === question && answer.rows.length < Math.min(wanted, answer.total)) {
        const next = await ask(query({ offset: String(answer.rows.length) }));
        if (!next.rows.length) break;
        answer.rows.push(...next.rows);
      }
      if (mine !== question) return;
      table = answer;
      tell(table.fault);
    } catch (error) {
      if (mine !== question) return;
      tell(error.message);
    }
    places = Object.fromEntries(table.columns.map((column, index) => [column.name, index]));
    drawAnew();
  }

  /** Asks for the rows that have changed, and for no others. */
  async function patch({ version, ids }) {
    if (ids.length > 150) return load(table.rows.length);
    const mine = question;
    const names = table.columns.map((column) => column.name).join(",");
    const fresh = await ask(query({ ids, columns: names }), { keep: false });
    if (mine !== question) return; // all rows were asked for meanwhile
    table.version = version;
    const changed = new Map(fresh.rows.map((row) => [row[places.id], row]));
    const gone = new Set(ids.filter((id) => !changed.has(id)));
    const before = table.rows.length;
    table.rows = table.rows.filter((row) => !gone.has(row[places.id]));
    table.total -= before - table.rows.length;
    table.rows = table.rows.map((row) => {
      const one = changed.get(row[places.id]);
      changed.delete(row[places.id]);
      return one ?? row;
    });
    if (changed.size) return load(table.rows.length); // new runs, whose place the server knows
    drawCount();
    draw();
  }

  async function more() {
    if (isAsking || isOver || table.rows.length >= table.total) return;
    isAsking = true;
    const mine = question;
    try {
      const next = await ask(query({ offset: String(table.rows.length) }));
      if (mine !== question) return;
      const known = new Set(table.rows.map((row) => row[places.id]));
      const others = next.rows.filter((row) => !known.has(row[places.id]));
      table.rows.push(...others);
      if (!others.length) table.total = table.rows.length;
    } catch (error) {
      if (!saved) tell(error.message); // a saved table ends where its reader was
      return;
    } finally {
      isAsking = false;
    }
    draw();
  }

  /** The chosen columns, with the settings that differ; where there is no room, without what all runs share. */
  function shownColumns() {
    let names = columns.flatMap((name) => (name === DIFFERING ? table.differing ?? [] : [name])).filter((name, index, all) => all.indexOf(name) === index);
    if (state.columns || isPhone()) return names;
    for (const name of ALIKE) {
      const values = new Set(table.rows.map((row) => row[places[name]]));
      if (values.size < 2 && leastWidth(names) > grid.clientWidth) names = names.filter((one) => one !== name);
    }
    return names;
  }

  function leastWidth(names) {
    return names.reduce((sum, name) => sum + (WIDTHS[name] ?? OTHER_WIDTH) + GAP_WIDTH, PICK_WIDTH + EDGE_WIDTH);
  }

  function drawHead() {
    const least = shown.map((name) => WIDTHS[name] ?? OTHER_WIDTH);
    const tracks = shown.map((name, index) => {
      const share = name in WIDTHS ? GROWING[name] : 0.6;
      return share ? `minmax(${least[index]}px,${share}fr)` : `${least[index]}px`;
    });
    grid.style.setProperty("--columns", [`${PICK_WIDTH}px`, ...tracks].join(" "));
    const width = leastWidth(shown);
    grid.style.setProperty("--least", `${width}px`);
    grid.classList.toggle("wide", grid.clientWidth < width);
    const [sorted, falling] = [(state.sort ?? "-id").replace(/^-/, ""), (state.sort ?? "-id").startsWith("-")];
    const focus = [...head.querySelectorAll("input,button")].indexOf(document.activeElement);
    head.replaceChildren(
      el("span", { class: "cell", role: "columnheader" }, el("input", {
        type: "checkbox", "aria-label": `choose the first ${FIRST_CHOSEN}`, title: `the first ${FIRST_CHOSEN}`,
        checked: chosen.size > 0, on: { change: (event) => chooseAll(event.target.checked) },
      })),
      ...shown.map((name) => {
        const order = sorted !== name ? "none" : falling ? "descending" : "ascending";
        const sign = { none: "", descending: " ↓", ascending: " ↑" }[order];
        return el("span", { class: `cell ${isNumber(name) ? "number" : ""}`, role: "columnheader", "aria-sort": order },
          button(`${TITLES[name] ?? shortKey(name)}${sign}`, () => sortBy(name), { title: `order by ${name}` }));
      }),
    );
    if (focus >= 0) head.querySelectorAll("input,button")[focus]?.focus();
    drawCount();
    drawActions();
  }

  function drawCount() {
    grid.setAttribute("aria-rowcount", String(table.total + 1));
    count.textContent = `${table.total} run${table.total === 1 ? "" : "s"}`;
  }

  function drawAnew() {
    look += 1;
    shown = shownColumns();
    drawHead();
    draw();
  }

  /** Makes the rows that are in sight; those that have not changed stay as they are. */
  function draw() {
    const height = rowHeight();
    body.style.height = `${table.rows.length * height}px`;
    const top = body.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor(-top / height) - EXTRA_ROWS);
    const last = Math.min(table.rows.length, Math.ceil((innerHeight - top) / height) + EXTRA_ROWS);
    const present = new Map([...body.children].filter((node) => node.look === look).map((node) => [node.values, node]));
    const nodes = table.rows.slice(first, last).map((row, index) => {
      const node = present.get(row) ?? rowNode(row);
      node.setAttribute("aria-rowindex", String(first + index + 2));
      node.style.transform = `translateY(${(first + index) * height}px)`;
      return node;
    });
    const focus = focusOf(document.activeElement);
    for (const node of [...body.children]) if (!nodes.includes(node)) node.remove();
    nodes.forEach((node, index) => {
      if (body.children[index] !== node) body.insertBefore(node, body.children[index] ?? null);
    });
    if (focus && !focus.node.isConnected) {
      const again = nodes.find((node) => node.run === focus.node.run);
      again?.querySelectorAll("a,input")[focus.place]?.focus({ preventScroll: true });
    }
    if (last > table.rows.length - 50) more();
    grid.classList.toggle("empty", !table.rows.length);
  }

  /** The row that has the focus, and which of its parts. */
  function focusOf(active) {
    const node = active?.closest(".rows .row");
    return node ? { node, place: [...node.querySelectorAll("a,input")].indexOf(active) } : null;
  }

  function rowHeight() {
    return isPhone() ? 112 : 44;
  }

  function isPhone() {
    return matchMedia("(max-width: 720px)").matches;
  }

  function rowNode(row) {
    const value = (name) => row[places[name]] ?? null;
    const id = value("id");
    const link = `#/run/${encodeURIComponent(id)}`;
    const box = el("input", {
      type: "checkbox", "aria-label": `choose ${value("name")}`, checked: chosen.has(id),
      on: { change: (event) => choose(id, event.target.checked) },
    });
    const node = el("div", { class: `row ${value("broken") ? "is-broken" : ""}`, role: "row" }, el("span", { class: "cell pick", role: "cell" }, box));
    Object.assign(node, { values: row, run: id, look });
    for (const name of shown) node.append(cell(name, value, link));
    node.addEventListener("click", (event) => {
      if (!event.target.closest("a,input,button")) location.hash = link;
    });
    return node;
  }

  function cell(name, value, link) {
    const options = { class: `cell c-${name.replace(/[^a-z_]/g, "-")} ${isNumber(name) ? "number" : ""}`, role: "cell" };
    const one = value(name);
    if (name === "name") {
      const tags = (value("tags") ?? []).map((tag) => el("span", { class: "tag", text: tag }));
      if (value("broken")) tags.unshift(el("span", { class: "tag warn", text: "broken", title: "marked: verdicts leave it out" }));
      if (value("archived")) tags.unshift(el("span", { class: "tag", text: "archived" }));
      const notes = value("notes") ?? [];
      if (notes.length) tags.push(el("span", { class: "tag note-mark", title: notes.join("\n"), text: "✎" }));
      const [start, end] = nameParts(one);
      return el("span", options, el("a", { href: link, class: "name", title: one }, el("span", { class: end ? "start" : "start whole", text: start }), end || null), ...tags);
    }
    if (name === "model") {
      const known = (table.differing ?? []).filter((key) => value(key) !== null);
      const settings = known.map((key) => `${shortKey(key)} ${formatValue(value(key))}`);
      return el("span", options, el("span", { class: "plain", text: one }), settings.length ? el("span", { class: "differing", text: settings.join(", ") }) : null);
    }
    if (name === "state") return el("span", options, el("span", { class: `pill ${one}`, text: one }));
    if (name === "verdict") {
      return el("span", options, one ? el("span", { class: `verdict ${one}`, text: one }) : el("span", { class: "soft", text: "–" }));
    }
    if (name === "step" && value("steps")) {
      const share = Math.min(1, one / value("steps"));
      return el("span", options, el("span", { text: `${one} / ${value("steps")}` }),
        el("span", { class: "progress" }, el("i", { style: { width: `${100 * share}%` } })));
    }
    if (name === "seconds" && one !== null) {
      const predicted = value("predicted_seconds");
      const outside = value("low_seconds") !== null && (one < value("low_seconds") || one > value("high_seconds"));
      const ratio = predicted ? el("span", { class: outside ? "outside" : "soft", text: ` ${formatRatio(one / predicted)}`, title: `predicted ${formatSeconds(predicted)}` }) : null;
      return el("span", options, formatSeconds(one), ratio);
    }
    if (name === "tokens_per_second" && one !== null) return el("span", { ...options, text: formatCount(one) });
    if (name === "loss" && one === null && value("metric") !== null && value("metric") !== "loss") {
      return el("span", { ...options, text: formatValue(value("metric_value")), title: value("metric") });
    }
    if (name.endsWith("loss") && typeof one === "number") return el("span", { ...options, text: one.toFixed(3) });
    const unit = table.columns[places[name]]?.unit;
    const title = unit === "time" && one ? formatTime(one) : undefined;
    return el("span", { ...options, text: formatValue(one, unit), title });
  }

  /** The name in two parts, without the day of a folder's name, which has a column of its own. */
  function nameParts(name) {
    const short = name.replace(/^\d{4}-\d\d-\d\d-(?=.)/, "");
    const cut = short.length > 2 * NAME_END ? short.length - NAME_END : short.length;
    return [short.slice(0, cut), short.slice(cut)];
  }

  /** A setting without its section. */
  function shortKey(name) {
    return name.slice(name.lastIndexOf(".") + 1);
  }

  function isNumber(name) {
    const unit = table.columns[places[name]]?.unit;
    return ["count", "number", "seconds", "bytes"].includes(unit) && name !== "step";
  }

  function sortBy(name) {
    state.sort = state.sort === `-${name}` ? name : `-${name}`;
    update({ sort: state.sort });
    load();
  }

  function choose(id, isChosen) {
    if (isChosen) chosen.add(id);
    else chosen.delete(id);
    update({ chosen: [...chosen].join(",") });
    drawActions();
  }

  function chooseAll(isChosen) {
    chosen.clear();
    if (isChosen) for (const row of table.rows.slice(0, FIRST_CHOSEN)) chosen.add(row[places.id]);
    update({ chosen: [...chosen].join(",") });
    drawAnew();
  }

  function drawActions() {
    actions.hidden = !chosen.size;
    const ids = [...chosen];
    const link = (place, text, least) =>
      ids.length < least ? null
        : el("a", { class: "button", href: `#/${place}?ids=${ids.map(encodeURIComponent).join(",")}`, text });
    actions.replaceChildren(
      el("span", { text: `${ids.length} chosen` }),
      link("compare", "overlay curves", 1) ?? "",
      link("diff", "what differs", 2) ?? "",
      ...(saved ? [] : [
        button("tag …", () => askFor("Tag the chosen runs as", (tag) => change({ tags: [tag] }))),
        button("note …", () => askFor("A note on the chosen runs", (note) => change({ note }))),
        button(state.archived === "yes" ? "take back" : "archive", () => change({ archived: state.archived !== "yes" })),
        button("mark broken", () => change({ broken: true }), { title: "no verdict compares with them" }),
      ]),
      button("none", () => chooseAll(false), { class: "quiet" }),
    );
  }

  function askFor(question, answer) {
    const text = prompt(question);
    if (text?.trim()) answer(text.trim());
  }

  async function change(body) {
    try {
      for (const id of chosen) await post(`/api/runs/${encodeURIComponent(id)}/annotations`, body);
      chosen.clear();
      update({ chosen: "" });
      await load();
    } catch (error) {
      tell(error.message);
    }
  }

  function toolbar() {
    const filter = el("input", {
      type: "search", class: "filter", value: state.filter ?? "", spellcheck: "false", autocapitalize: "off",
      placeholder: 'model = "gpt-tiny" and loss < 5', "aria-label": "filter",
      on: {
        input: delayed((event) => {
          state.filter = event.target.value;
          update({ filter: state.filter });
          load();
        }, 300),
      },
    });
    const archived = el("select", {
      "aria-label": "archived runs",
      on: {
        change: (event) => {
          state.archived = event.target.value;
          update({ archived: state.archived });
          load();
        },
      },
    }, ...[["", "not archived"], ["yes", "archived"], ["all", "all runs"]].map(([value, text]) =>
      el("option", { value, text, selected: (state.archived ?? "") === value })));
    return el("div", { class: "toolbar" }, filter, saved ? null : archived, saved ? null : picker(), count);
  }

  /** The list of columns: those of every run, then settings and series that a word finds. */
  function picker() {
    const list = el("div", { class: "choices" });
    const search = el("input", { type: "search", placeholder: "find a setting or series", "aria-label": "find a setting or series", on: { input: () => fill() } });
    let names = null;
    const details = el("details", { class: "picker" }, el("summary", { text: "columns" }), el("div", { class: "menu" }, search, list));
    details.addEventListener("toggle", async () => {
      if (!details.open) return;
      try {
        names ??= await ask("/api/columns", { keep: false });
        fill();
      } catch (error) {
        tell(error.message);
      }
    });
    const fill = () => {
      if (!names) return;
      const word = search.value.trim().toLowerCase();
      const own = names.columns.map((column) => column.name).filter((name) => !["id", "kinds", "inputs", "settings"].includes(name));
      const found = [...columns.filter((name) => !own.includes(name)), ...own, ...names.others.filter((name) => !columns.includes(name))]
        .filter((name) => !name.includes(",") && name.toLowerCase().includes(word)).slice(0, 60);
      list.replaceChildren(...found.map((name) => el("label", {}, el("input", {
        type: "checkbox", checked: columns.includes(name), on: { change: (event) => pick(name, event.target.checked) },
      }), name)));
    };
    const pick = (name, isShown) => {
      columns = isShown ? [...columns, name] : columns.filter((one) => one !== name);
      update({ columns: columns.join(",") });
      load();
    };
    return details;
  }
}

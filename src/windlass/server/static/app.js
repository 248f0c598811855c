// Which view the address asks for, and what stands above all views.

import { connection, forgetAnswers, logIn, saveLink, saved } from "./client.js";
import { compareView } from "./compare_view.js";
import { diffView } from "./diff_view.js";
import { el, fault } from "./dom.js";
import { runView } from "./run_view.js";
import { runsView } from "./runs_view.js";

const VIEWS = { runs: runsView, run: runView, compare: compareView, diff: diffView };
const content = el("main", { tabindex: "-1" });
const copied = el("span", { class: "soft", role: "status" });
let end = () => {};
let turn = 0;

/** Name and parameters of the view in an address, `#/run/ID?names=loss`. */
function parsed(hash) {
  const [place, query = ""] = hash.replace(/^#?\/?/, "").split("?");
  const [name, id] = place.split("/");
  const state = Object.fromEntries(new URLSearchParams(query));
  if (id) state.id = decodeURIComponent(id);
  return { name: Object.hasOwn(VIEWS, name) ? name : "runs", state };
}

function addressOf(name, state) {
  const { id, ...rest } = state;
  const query = new URLSearchParams(Object.entries(rest).filter(([, value]) => value));
  const words = query.toString();
  return `#/${name}${id ? `/${encodeURIComponent(id)}` : ""}${words ? `?${words}` : ""}`;
}

async function show() {
  const mine = ++turn;
  end();
  end = () => {};
  forgetAnswers();
  document.title = "Windlass";
  const root = el("div");
  content.replaceChildren(root);
  try {
    const { name, state } = parsed(saved && !show.moved ? saved.view : location.hash);
    root.className = `the-${name}`;
    const update = (changes) => {
      Object.assign(state, changes);
      if (!saved && mine === turn) history.replaceState(null, "", addressOf(name, state));
    };
    const finish = await VIEWS[name](root, state, update);
    if (mine === turn) end = finish;
    else finish();
  } catch (error) {
    root.append(fault(error));
  }
  if (mine === turn) document.documentElement.dataset.ready = String(mine);
}

function topBar() {
  const share = el("button", { type: "button", text: "copy link", on: { click: copyLink } });
  const save = el("a", { class: "button", href: "#", text: "save as one file", download: "windlass.html" });
  save.addEventListener("click", () => {
    save.href = saveLink(location.hash);
  });
  return el("nav", {}, el("a", { class: "brand", href: "#/runs", text: "Windlass" }),
    saved ? el("span", { class: "soft", text: "saved view" }) : null, el("span", { class: "space" }), connection, copied,
    ...(saved ? [] : [share, save]));
}

async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href);
    copied.textContent = "copied";
  } catch {
    copied.textContent = "copy it from the address bar";
  }
  setTimeout(() => {
    copied.textContent = "";
  }, 2500);
}

async function start() {
  document.body.append(topBar(), content);
  try {
    await logIn();
  } catch (error) {
    content.replaceChildren(fault(error));
    document.documentElement.dataset.ready = "0";
    return;
  }
  window.addEventListener("hashchange", () => {
    show.moved = true;
    window.scrollTo(0, 0);
    content.focus({ preventScroll: true });
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  await show();
}

start();

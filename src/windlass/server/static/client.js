// What the page asks of the server, or of the answers that a saved page carries with it.

import { el } from "./dom.js";

const savedNode = document.getElementById("saved");
/** View and answers of a page that was saved as one file; null on the server's page. */
export const saved = savedNode ? JSON.parse(savedNode.textContent) : null;

/** Says when the page no longer hears of what grows. */
export const connection = el("span", { class: "fault", role: "status" });

let asked = new Set();

/** Forgets which answers were asked for, by the view before or for another filter. */
export function forgetAnswers() {
  asked = new Set();
}

/** Forgets one of them, in whose place another is shown. */
export function forgetAnswer(place) {
  asked.delete(place);
}

/** The link that saves the present view as one file. */
export function saveLink(view) {
  const query = new URLSearchParams({ view });
  for (const path of asked) query.append("path", path);
  return `/api/page?${query}`;
}

/** A path with a query; lists become words with commas between them. */
export function path(place, query = {}) {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    const text = Array.isArray(value) ? value.join(",") : value;
    if (text !== undefined && text !== null && text !== "") words.set(name, text);
  }
  const text = words.toString();
  return text ? `${place}?${text}` : place;
}

/** The answer to a question; `keep` puts it into the file when the view is saved. */
export async function ask(place, { keep = true } = {}) {
  if (saved) {
    if (Object.hasOwn(saved.answers, place)) return structuredClone(saved.answers[place]);
    throw new Error("this file holds one view only; the server has the others");
  }
  const own = asked;
  const answer = await answerOf(place);
  if (keep) own.add(place);
  return answer.json();
}

/** Changes something; gives the answer, or null if it is empty. */
export async function post(place, body) {
  if (saved) throw new Error("this file changes nothing; open the server's page");
  const answer = await answerOf(place, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  return answer.status === 204 ? null : answer.json();
}

async function answerOf(place, options) {
  const answer = await fetch(place, options).catch(() => {
    throw new Error("the server does not answer; see whether `windlass serve` still runs");
  });
  if (!answer.ok) throw new Error((await answer.text()).trim() || answer.statusText);
  return answer;
}

/** Exchanges the token of the link for a cookie, and takes it out of the address. */
export async function logIn() {
  const words = new URLSearchParams(location.hash.slice(1));
  const token = words.get("token");
  if (saved || !token) return;
  history.replaceState(null, "", "#/runs");
  await post("/api/login", { token });
}

/**
 * Follows what grows while the page is visible; gives `{ reopen, end }`.
 * `state` says from where on: `since`, and for each run the last step that is known.
 */
export function followLive(state, { runs, points }) {
  if (saved) return { reopen() {}, end() {} };
  let source = null;
  let timer = 0;
  let failures = 0;
  const hear = (action) => async (event) => {
    try {
      await action?.(JSON.parse(event.data));
      connection.textContent = "";
    } catch (error) {
      connection.textContent = error.message;
    }
  };
  const open = () => {
    close();
    if (document.hidden) return;
    const { since, ids = [], after = [], names = [] } = state();
    source = new EventSource(path("/api/live", { since: String(since), ids, after, names }));
    source.addEventListener("runs", hear(runs));
    source.addEventListener("points", hear(points));
    source.onopen = () => {
      failures = 0;
      connection.textContent = "";
    };
    source.onerror = () => { // once in a while the server ends a stream, too
      close();
      failures += 1;
      if (failures > 1) connection.textContent = "not connected: what is shown may be old";
      timer = setTimeout(open, 3000);
    };
  };
  const close = () => {
    clearTimeout(timer);
    source?.close();
    source = null;
  };
  document.addEventListener("visibilitychange", open);
  open();
  return {
    reopen: open,
    end() {
      document.removeEventListener("visibilitychange", open);
      close();
      connection.textContent = "";
    },
  };
}

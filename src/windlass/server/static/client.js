// What the page asks of the server, or of the answers that a saved page carries with it.

const savedNode = document.getElementById("saved");
/** View and answers of a page that was saved as one file; null on the server's page. */
export const saved = savedNode ? JSON.parse(savedNode.textContent) : null;

const asked = new Set();

/** Forgets which answers the view before has asked for. */
export function beginView() {
  asked.clear();
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
    if (place in saved.answers) return saved.answers[place];
    throw new Error("this file holds one view only; the server has the others");
  }
  const answer = await fetch(place);
  if (!answer.ok) throw new Error((await answer.text()).trim() || answer.statusText);
  if (keep) asked.add(place);
  return answer.json();
}

/** Changes something; gives the answer, or null if it is empty. */
export async function post(place, body) {
  if (saved) throw new Error("this file changes nothing; open the server's page");
  const answer = await fetch(place, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  if (!answer.ok) throw new Error((await answer.text()).trim() || answer.statusText);
  return answer.status === 204 ? null : answer.json();
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
 * Follows what grows while the page is visible; gives a function that ends it.
 * `state` says from where on: `since`, and for each run the last step that is known.
 */
export function followLive(state, { runs, points }) {
  if (saved) return () => {};
  let source = null;
  let timer = 0;
  const open = () => {
    close();
    if (document.hidden) return;
    const { since, ids = [], after = [], names = [] } = state();
    source = new EventSource(path("/api/live", { since: String(since), ids, after, names }));
    source.addEventListener("runs", (event) => runs?.(JSON.parse(event.data)));
    source.addEventListener("points", (event) => points?.(JSON.parse(event.data)));
    source.onerror = () => {
      close();
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
  return () => {
    document.removeEventListener("visibilitychange", open);
    close();
  };
}

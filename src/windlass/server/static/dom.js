// Elements without markup: every text is set as text, so that none can become an element.

/** An element. `options` may have `class`, `text`, `title`, `on` (events), `style` and attributes. */
export function el(tag, options = {}, ...children) {
  return filled(document.createElement(tag), options, children);
}

function filled(node, options, children) {
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "on") {
      for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    } else if (name === "style") {
      for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    } else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** The colour of the palette with this name, as it is in the light or the dark page now. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || "#888";
}

/** A sentence whose words in backticks are code. */
export function phrase(text) {
  return String(text).split("`").map((part, index) => (index % 2 ? el("code", { text: part }) : part));
}

/** A button; one that is a mere sign is read out as its title. */
export function button(text, click, options = {}) {
  const label = text === "×" ? options.title : undefined;
  return el("button", { type: "button", text, on: { click }, "aria-label": label, ...options });
}

/** What went wrong, which is read out at once. */
export function fault(error) {
  return el("p", { class: "message fault", role: "alert", text: error.message });
}

/** A section with a heading. */
export function card(heading, ...children) {
  return el("section", {}, heading ? el("h2", { text: heading }) : null, ...children);
}

/** The function, called once after it was asked for several times within some milliseconds. */
export function delayed(action, milliseconds) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), milliseconds);
  };
}

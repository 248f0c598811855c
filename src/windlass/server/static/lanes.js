// One step as lanes on a canvas: predicted above measured, zoomed by wheel and moved by dragging.

import { colour, el } from "./dom.js";
import { formatSeconds } from "./formats.js";

const LANE = 30;
const GAP = 4;
const RANK_GAP = 12;
const LEFT = 96;
const BOTTOM = 24;

/** Draws the timeline into `host`; gives a function that ends it. */
export function drawLanes(host, { kinds, lanes }) {
  const ordered = [...lanes].sort((a, b) => a.device - b.device || (a.name < b.name ? 1 : -1));
  const many = new Set(ordered.map((lane) => lane.device)).size > 1;
  const lane = ordered.length > 16 ? 12 : LANE;
  const tops = [];
  let height = 4;
  ordered.forEach((one, index) => {
    if (index && one.device !== ordered[index - 1].device) height += RANK_GAP;
    tops.push(height);
    height += lane + GAP;
  });
  const end = Math.max(...ordered.map((one) => one.ends.reduce((a, b) => Math.max(a, b), 0)), 1e-9);
  const canvas = el("canvas", {
    class: "lanes", tabindex: "0", role: "img",
    "aria-label": `${ordered.length} lanes of instructions over ${formatSeconds(end)}`,
  });
  const tip = el("div", { class: "tip", hidden: true });
  const used = new Set(ordered.flatMap((one) => one.kinds));
  const keys = el(
    "div",
    { class: "keys" },
    ...kinds.map((kind, index) =>
      used.has(index)
        ? el("span", {}, el("i", { style: { background: `var(--${kind.colour})` } }), kind.name)
        : null,
    ),
  );
  host.append(keys, el("div", { class: "plot" }, canvas, tip));
  let low = 0;
  let high = end;
  let from = null;
  const context = canvas.getContext("2d");
  const place = (time, width) => LEFT + ((time - low) / (high - low)) * (width - LEFT);

  const draw = () => {
    const width = host.clientWidth;
    const scale = devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = (height + BOTTOM) * scale;
    canvas.style.height = `${height + BOTTOM}px`;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height + BOTTOM);
    context.font = '12px system-ui, -apple-system, "Segoe UI", sans-serif';
    drawClock(width);
    const colours = kinds.map((kind) => colour(kind.colour));
    ordered.forEach((one, index) => {
      const name = many ? `${one.name} ${one.device}` : one.name;
      context.fillStyle = colour("ink");
      context.textAlign = "right";
      context.fillText(name, LEFT - 8, tops[index] + lane / 2 + 4);
      context.save();
      context.beginPath();
      context.rect(LEFT, 0, width - LEFT, height);
      context.clip();
      for (let at = 0; at < one.kinds.length; at += 1) {
        if (one.ends[at] < low || one.starts[at] > high) continue;
        const x = place(one.starts[at], width);
        const wide = Math.max(0.4, place(one.ends[at], width) - x - 0.3);
        context.globalAlpha = (one.micro_batches[at] ?? 0) % 2 ? 0.72 : 1;
        context.fillStyle = colours[one.kinds[at]];
        context.fillRect(x, tops[index], wide, lane);
      }
      context.restore();
    });
  };

  const drawClock = (width) => {
    const raw = (high - low) / Math.max(3, width / 140);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
    context.textAlign = "center";
    for (let time = Math.ceil(low / step - 1e-9) * step; time <= high * (1 + 1e-9); time += step) {
      const x = place(time, width);
      context.fillStyle = colour("grid");
      context.fillRect(x, 0, 1, height);
      context.fillStyle = colour("soft");
      context.fillText(formatSeconds(Math.max(0, time)), Math.min(x, width - 24), height + 16);
    }
  };

  const timeAt = (event) => {
    const box = canvas.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left - LEFT) / (box.width - LEFT)));
    return low + share * (high - low);
  };
  const show = (start, span) => {
    const kept = Math.min(end, Math.max(end / 2000, span));
    low = Math.min(end - kept, Math.max(0, start));
    high = low + kept;
    draw();
  };
  const hover = (event) => {
    const box = canvas.getBoundingClientRect();
    const y = event.clientY - box.top;
    const index = tops.findIndex((top) => y >= top && y < top + lane);
    const one = ordered[index];
    const time = timeAt(event);
    const at = one && event.clientX - box.left > LEFT ? covering(one, time) : -1;
    tip.hidden = at < 0;
    if (at < 0) return;
    const parts = [kinds[one.kinds[at]].name];
    if (one.layers[at] !== null) parts.push(`layer ${one.layers[at]}`);
    if (one.micro_batches[at] !== null) parts.push(`micro-batch ${one.micro_batches[at]}`);
    tip.replaceChildren(
      el("b", { text: parts.join(", ") }),
      el("div", { text: `${one.name} ${formatSeconds(one.ends[at] - one.starts[at])}, from ${formatSeconds(one.starts[at])}` }),
    );
    const left = event.clientX - box.left + 14;
    tip.style.left = `${left + tip.offsetWidth > box.width ? left - 28 - tip.offsetWidth : left}px`;
    tip.style.top = `${Math.min(tops[index] + lane + 4, height - 20)}px`;
  };

  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !canvas.matches(":focus")) return; // the page scrolls until a click
    event.preventDefault();
    const time = timeAt(event);
    const span = (high - low) * Math.exp(event.deltaY / 400);
    show(time - ((time - low) / (high - low)) * span, span);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const span = high - low;
    const views = {
      ArrowLeft: [low - span / 5, span], ArrowRight: [low + span / 5, span], Home: [0, end],
      "+": [low + span / 4, span / 2], "-": [low - span / 2, span * 2],
    };
    if (!Object.hasOwn(views, event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    show(...views[event.key]);
  });
  canvas.addEventListener("pointerdown", (event) => {
    from = { time: timeAt(event), low };
    canvas.focus({ preventScroll: true });
  });
  const release = () => {
    from = null;
  };
  window.addEventListener("pointerup", release);
  canvas.addEventListener("pointermove", (event) => {
    if (from) show(low + from.time - timeAt(event), high - low);
    else hover(event);
  });
  canvas.addEventListener("pointerleave", () => {
    tip.hidden = true;
  });
  canvas.addEventListener("dblclick", () => show(0, end));
  const observer = new ResizeObserver(draw);
  observer.observe(host);
  draw();
  return () => {
    observer.disconnect();
    window.removeEventListener("pointerup", release);
  };
}

/** Index of the instruction of a lane that runs at a time; -1 if none does. */
function covering(one, time) {
  let best = -1;
  for (let at = 0; at < one.starts.length; at += 1) {
    if (one.starts[at] <= time && time < one.ends[at]) best = at;
  }
  return best;
}

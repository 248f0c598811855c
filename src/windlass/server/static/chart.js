// Line charts over steps, drawn by uPlot: many runs, smoothing, log axes, bands, live points.

import { colour, el } from "./dom.js";
import { formatPoint } from "./formats.js";

const LINE_COLOURS = ["blue", "orange", "green", "pink", "violet", "red", "brown", "sky", "yellow", "grey"];
const MOST_BANDS = 8;
const FONT = '12px system-ui, -apple-system, "Segoe UI", sans-serif';

/** The colour name of the nth run. */
export function lineColour(index) {
  return LINE_COLOURS[index % LINE_COLOURS.length];
}

/** Exponential mean with the bias of its start taken away; `weight` from 0 (none) to below 1. */
export function smoothed(values, weight) {
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

/**
 * Draws lines into `host`; gives `{ redraw, destroy }`.
 *
 * `lines`: `{ name, colour, steps, median, low, high, dots }`. `settings`: `{ smooth, logX, logY }`.
 * `marks`: `{ name, colour, y, low, high }`, such as a predicted time with its interval.
 */
export function drawChart(host, { lines, unit, settings, marks = [], height = 260 }) {
  let chart = null;
  let size = 0;
  const tip = el("div", { class: "tip", hidden: true });
  const make = () => {
    chart?.destroy();
    const width = host.clientWidth;
    if (!width) return;
    size = width;
    const { series, bands, data, shown } = layers(lines, settings);
    chart = new globalThis.uPlot(
      {
        width, height, series, bands,
        legend: { show: false },
        cursor: { points: { size: 6 }, drag: { x: true, y: false }, y: false },
        scales: {
          x: { time: false, distr: settings.logX ? 3 : 1 },
          y: { distr: settings.logY ? 3 : 1, range: settings.logY ? undefined : linearRange(marks, unit === "seconds" ? lines : []) },
        },
        axes: [axis(formatStep, 28), axis((value) => formatPoint(value, unit), 68)],
        hooks: {
          drawClear: [(plot) => drawMarks(plot, marks, settings)],
          setCursor: [(plot) => showTip(plot, tip, shown, unit)],
        },
      },
      data,
      host,
    );
    chart.over.append(tip);
  };
  const observer = new ResizeObserver(() => {
    if (host.clientWidth && host.clientWidth !== size) make();
  });
  observer.observe(host);
  make();
  return {
    redraw: make,
    /** Takes changed lines without forgetting where the reader has zoomed to. */
    update() {
      if (!chart) return;
      const { series, data } = layers(lines, settings);
      if (series.length !== chart.series.length) { // a line has its first points
        make();
        return;
      }
      const zoomed = chart.scales.x.min > chart.data[0][0] || chart.scales.x.max < chart.data[0].at(-1);
      chart.setData(data, !zoomed);
    },
    destroy() {
      observer.disconnect();
      chart?.destroy();
      chart = null;
    },
  };
}

/** Adds points to a line; steps that it has already are left out. */
export function appendPoints(line, steps, values) {
  const last = line.steps.at(-1) ?? -1;
  steps.forEach((step, index) => {
    if (step <= last) return;
    line.steps.push(step);
    line.median.push(values[index]);
    line.low?.push(values[index]);
    line.high?.push(values[index]);
  });
}

/** Series, bands and joined data for uPlot. */
function layers(lines, settings) {
  const tables = [];
  const series = [{}];
  const bands = [];
  const shown = [];
  const banded = lines.length <= MOST_BANDS;
  const known = (values) => (settings.logY ? values.map((v) => (v > 0 ? v : null)) : values);
  const push = (steps, values, options) => {
    const kept = settings.logX ? steps.map((step) => Math.max(step, 1)) : steps;
    tables.push([kept, known(values)]);
    series.push({ points: { show: false }, ...options });
    return series.length - 1;
  };
  for (const line of lines) {
    if (!line.steps.length) continue;
    const stroke = colour(line.colour);
    const faint = settings.smooth > 0 && !line.dots;
    if (line.low && banded && !line.dots) {
      const high = push(line.steps, line.high, { stroke: "transparent", width: 0 });
      const low = push(line.steps, line.low, { stroke: "transparent", width: 0 });
      bands.push({ series: [high, low], fill: `${stroke}2b` });
    }
    if (line.dots) {
      const points = { show: true, size: 7, fill: stroke, stroke };
      shown.push({ line, index: push(line.steps, line.median, { stroke, width: 0, paths: () => null, points }) });
      continue;
    }
    if (faint) push(line.steps, line.median, { stroke: `${stroke}40`, width: 1 });
    const values = faint ? smoothed(line.median, settings.smooth) : line.median;
    shown.push({ line, index: push(line.steps, values, { stroke, width: 1.75 }) });
  }
  const data = tables.length ? globalThis.uPlot.join(tables) : [[]];
  return { series, bands, data, shown };
}

function axis(format, size) {
  return {
    stroke: colour("soft"),
    font: FONT,
    size,
    grid: { stroke: colour("grid"), width: 1 },
    ticks: { stroke: colour("line"), width: 1, size: 4 },
    values: (_, values) => values.map((value) => (value === null ? "" : format(value))),
  };
}

function formatStep(step) {
  return step >= 10000 ? `${Number((step / 1000).toPrecision(4))} k` : String(Number(step.toPrecision(6)));
}

/**
 * The range of the values, and of what is marked, with some space.
 *
 * The first step of `warming` lines also compiles, and would hide all others: it may leave the chart.
 */
function linearRange(marks, warming) {
  return (_, low, high) => {
    const values = marks.flatMap((mark) => [mark.y, mark.low, mark.high]).filter(Number.isFinite);
    const warm = warming.flatMap((line) => (line.high ?? line.median).slice(1)).filter(Number.isFinite);
    const top = warm.length > 4 ? Math.min(high, warm.reduce((a, b) => Math.max(a, b))) : high;
    const least = Math.min(low ?? Infinity, ...values);
    const most = Math.max(top ?? -Infinity, ...values);
    if (!Number.isFinite(least) || !Number.isFinite(most)) return [0, 1];
    const space = (most - least || Math.abs(most) || 1) * 0.06;
    return [least >= 0 ? Math.max(0, least - space) : least - space, most + space];
  };
}

/** Lines and washes behind the curves, such as what was predicted. */
function drawMarks(plot, marks, settings) {
  const { ctx, bbox } = plot;
  for (const mark of marks) {
    if (settings.logY && !(mark.y > 0)) continue;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const stroke = colour(mark.colour);
    if (mark.low > 0 && mark.high > 0) {
      const top = plot.valToPos(mark.high, "y", true);
      ctx.fillStyle = `${stroke}22`;
      ctx.fillRect(bbox.left, top, bbox.width, plot.valToPos(mark.low, "y", true) - top);
    }
    const y = plot.valToPos(mark.y, "y", true);
    ctx.strokeStyle = stroke;
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.restore();
  }
}

/** The values at the pointer, the nearest line first of many. */
function showTip(plot, tip, shown, unit) {
  const index = plot.cursor.idx;
  if (index === null || index === undefined || plot.cursor.left < 0) {
    tip.hidden = true;
    return;
  }
  const step = plot.data[0][index];
  const y = plot.posToVal(plot.cursor.top, "y");
  const rows = [];
  for (const { line, index: at } of shown) {
    const value = nearest(plot.data[at], index);
    if (value !== null) rows.push({ line, value });
  }
  rows.sort((a, b) => Math.abs(a.value - y) - Math.abs(b.value - y));
  tip.replaceChildren(el("b", { text: `step ${formatStep(step)}` }));
  for (const { line, value } of rows.slice(0, 8)) {
    const swatch = el("i", { style: { background: colour(line.colour) } });
    tip.append(el("div", {}, swatch, el("span", { text: `${line.name}  ${formatPoint(value, unit)}` })));
  }
  tip.hidden = !rows.length;
  const left = plot.cursor.left + 14;
  const flipped = left + tip.offsetWidth > plot.over.clientWidth;
  tip.style.left = `${flipped ? Math.max(0, left - 28 - tip.offsetWidth) : left}px`;
  tip.style.top = "4px";
}

/** The value of a series at an index, or the one before it: other runs have other steps. */
function nearest(values, index) {
  for (let at = index; at >= 0 && at > index - 400; at -= 1) {
    if (values[at] !== undefined) return values[at];
  }
  return null;
}

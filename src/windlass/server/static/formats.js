// Numbers in the units that a person would choose, as on the command line.

const BYTES = [["PiB", 2 ** 50], ["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
const COUNTS = [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]];

function digits(value) {
  const size = Math.abs(value);
  if (size >= 99.95) return value.toFixed(0);
  return size >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}

export function formatSeconds(seconds) {
  const size = Math.abs(seconds);
  const hours = Math.round(seconds / 3600);
  if (size >= 86400) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  if (size >= 3600) return `${Math.floor(seconds / 3600)} h ${Math.floor((size % 3600) / 60)} min`;
  if (size >= 60) return `${Math.floor(seconds / 60)} min ${Math.floor(size % 60)} s`;
  for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
    if (size >= 0.9995 * scale) return `${digits(seconds / scale)} ${unit}`;
  }
  return size < 5e-12 ? "0 s" : `${digits(seconds / 1e-9)} ns`;
}

export function formatBytes(count) {
  // What rounds to 1024 of a unit is 1 of the next one.
  const found = BYTES.find(([, scale]) => Math.abs(count) >= scale - scale / 2048);
  return found ? `${digits(count / found[1])} ${found[0]}` : `${Math.round(count)} B`;
}

export function formatCount(count) {
  const found = COUNTS.find(([, scale]) => Math.abs(count) >= 0.9995 * scale);
  if (found) return `${digits(count / found[1])} ${found[0]}`;
  return Number.isInteger(count) ? String(count) : digits(count);
}

export function formatNumber(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e5 || size < 1e-3) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

/** `2026-11-22 21:05` in the viewer's time zone. */
export function formatTime(seconds) {
  const date = new Date(seconds * 1000);
  if (Number.isNaN(date.getTime())) return "–";
  const two = (number) => String(number).padStart(2, "0");
  return (
    `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ` +
    `${two(date.getHours())}:${two(date.getMinutes())}`
  );
}

/** `3 min ago`, for a list. */
export function formatAgo(seconds, now = Date.now() / 1000) {
  const age = now - seconds;
  if (age < 60) return "just now";
  if (age < 3600) return `${Math.floor(age / 60)} min ago`;
  if (age < 86400) return `${Math.floor(age / 3600)} h ago`;
  if (age < 30 * 86400) return `${Math.floor(age / 86400)} d ago`;
  return formatTime(seconds).slice(0, 10);
}

/** Measured over predicted, `1.03 ×`. */
export function formatRatio(ratio) {
  return `${ratio >= 10 ? ratio.toFixed(0) : ratio.toFixed(2)}\u00a0×`;
}

/** A value of a column, by its unit. */
export function formatValue(value, unit) {
  if (value === null || value === undefined) return "–";
  if (Array.isArray(value)) return value.join(", ");
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "string") return value;
  if (typeof value === "object") return JSON.stringify(value);
  if (unit === "seconds") return formatSeconds(value);
  if (unit === "bytes") return formatBytes(value);
  if (unit === "time") return formatAgo(value);
  if (unit === "count") return String(value);
  return formatNumber(value);
}

/** The unit of a series, by its name. */
export function unitOfSeries(name) {
  if (name.startsWith("seconds") || name.endsWith("_seconds")) return "seconds";
  if (name.endsWith("_bytes") || name.endsWith("bytes_per_second")) return "bytes";
  return name === "tokens" ? "tokens" : "number";
}

/** A number of an axis or a tooltip. */
export function formatPoint(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "seconds") return formatSeconds(value);
  if (unit === "bytes") return formatBytes(value);
  return unit === "tokens" ? formatCount(value) : formatNumber(value);
}

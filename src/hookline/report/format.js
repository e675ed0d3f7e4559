// Text and numbers. Names and logged text come from strangers: they become text nodes, never markup.

const UNSAFE = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

/** Make an element. Attributes are set one by one, children are nodes or become text. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Return a text with control characters and marks that change the direction made visible. */
export function visible(text) {
  return String(text).replace(UNSAFE, (c) => (c === "\n" || c === "\t" ? c : "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0")));
}

/** Return a text on one line of at most `most` characters, cut in the middle: names differ at both ends. */
export function short(text, most = 60) {
  const line = visible(text).replace(/\s+/g, " ");
  if (line.length <= most) return line;
  const end = Math.floor((most - 1) / 2);
  return line.slice(0, most - 1 - end) + "…" + line.slice(line.length - end);
}

/** Make an element with a name that may be long; the whole name is shown on hover. */
export function named(tag, text, most = 60, attributes = {}) {
  const full = visible(text);
  return el(tag, { ...(full.length > most ? { title: full.slice(0, 1000) } : {}), ...attributes }, short(text, most));
}

/** Return the name of a kind of event, of a field or of a part of a step in words. */
export const words = (name) => name.replace(/_/g, " ");

/** Return a number as JSON has it: NaN and infinities are strings there. */
export function toNumber(value) {
  return typeof value === "number" ? value : value === null || value === undefined ? null : Number(value);
}

export const clamp = (value, least, greatest) => Math.min(Math.max(value, least), greatest);
const minus = (text) => text.replace(/-/g, "−");
const exponential = (value, digits) => minus(value.toExponential(digits - 1).replace(/\.?0*e\+?/, "e"));

/** Return a number with a sensible count of digits. */
export function number(value, digits = 4) {
  value = toNumber(value);
  if (value === null) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return minus(value.toLocaleString("en-US"));
  if (size >= 1e6 || size < 1e-3) return exponential(value, digits);
  const rounded = Number(value.toPrecision(digits));
  return minus(Math.abs(rounded) >= 1000 ? rounded.toLocaleString("en-US") : String(rounded));
}

/** Return a number for an axis, short: 20k, 1.5M, 1e−6. */
export function tick(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e12) return exponential(value, 3);
  for (const [factor, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= factor) return minus(`${Number((value / factor).toPrecision(4))}${letter}`);
  }
  return minus(String(Number(value.toPrecision(6))));
}

/** Return seconds in one or two units, from a second on as a terminal shows them: 4 ms, 4.2 s, 1 m 15 s, 2 d 07 h. */
export function duration(seconds) {
  seconds = toNumber(seconds);
  if (seconds === null || !Number.isFinite(seconds)) return number(seconds);
  if (seconds < 1e-3) return `${number(seconds * 1e6, 3)} µs`;
  if (seconds < 1) return `${number(seconds * 1e3, 3)} ms`;
  if (Math.round(10 * seconds) < 600) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const units = [[86400, "d", 3600, "h"], [3600, "h", 60, "m"], [60, "m", 1, "s"]];
  const [size, unit, smaller, name] = units.find(([length]) => whole >= length);
  return `${Math.floor(whole / size)} ${unit} ${String(Math.floor((whole % size) / smaller)).padStart(2, "0")} ${name}`;
}

export const percent = (share) => `${number(100 * toNumber(share), 3)} %`;

export function time(text) {
  const date = typeof text === "number" ? new Date(text * 1000) : new Date(text);
  return Number.isNaN(date.getTime()) ? short(text) : date.toISOString().slice(0, 19).replace("T", " ") + " UTC";
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

const inUnit = (unit) => ({ unit, format: (value) => `${number(value)} ${unit}` });

const BYTES = { bytes: "B", gib: "GiB", gb: "GB", mib: "MiB", mb: "MB" };

/** How the values of a metric are written, by how its name ends. */
const UNITS = [
  [/([a-z]+)_per_s(ec(ond)?)?$/, ([, noun]) => inUnit(`${noun}/s`)],
  [/(^|[_/])(seconds|secs)$/, () => ({ unit: "s", format: duration })],
  [/(^|[_/])share$/, () => ({ unit: "%", format: percent, factor: 100 })],
  [/(^|[_/])(bytes|gib|gb|mib|mb)$/i, ([, , noun]) => inUnit(BYTES[noun.toLowerCase()])],
];

/** Return the unit of a metric, and how its values are written. */
export function unitOf(name) {
  const known = UNITS.find(([pattern]) => pattern.test(name));
  return known ? known[1](known[0].exec(name)) : { unit: "", format: number };
}

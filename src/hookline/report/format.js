// Text and numbers. Names and logged text come from strangers: they become text nodes, never markup.

const UNSAFE = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

/** Make an element. Attributes are set one by one, children are nodes or become text. */
function el(tag, attributes = {}, ...children) {
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
function visible(text) {
  return String(text).replace(UNSAFE, (c) => (c === "\n" || c === "\t" ? c : "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0")));
}

/** Return a text on one line of at most `most` characters, cut in the middle: names differ at both ends. */
function short(text, most = 60) {
  const line = visible(text).replace(/\s+/g, " ");
  if (line.length <= most) return line;
  const end = Math.floor((most - 1) / 2);
  return line.slice(0, most - 1 - end) + "…" + line.slice(line.length - end);
}

/** Make an element with a name that may be long; the whole name is shown on hover. */
function named(tag, text, most = 60, attributes = {}) {
  const full = visible(text);
  return el(tag, { ...(full.length > most ? { title: full.slice(0, 1000) } : {}), ...attributes }, short(text, most));
}

/** Return a number as JSON has it: NaN and infinities are strings there. */
function toNumber(value) {
  return typeof value === "number" ? value : value === null || value === undefined ? null : Number(value);
}

/** Return a number with a sensible count of digits. */
function number(value, digits = 4) {
  value = toNumber(value);
  if (value === null) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return minus(value.toLocaleString("en-US"));
  if (size >= 1e6 || size < 1e-3) return minus(value.toExponential(digits - 1).replace(/\.?0*e\+?/, "e"));
  const rounded = Number(value.toPrecision(digits));
  return minus(rounded >= 10000 ? rounded.toLocaleString("en-US") : String(rounded));
}

function minus(text) {
  return text.replace(/-/g, "−");
}

/** Return seconds as milliseconds, seconds, minutes or hours. */
function duration(seconds) {
  seconds = toNumber(seconds);
  if (seconds === null || !Number.isFinite(seconds)) return number(seconds);
  if (seconds < 1e-3) return `${number(seconds * 1e6, 3)} µs`;
  if (seconds < 1) return `${number(seconds * 1e3, 3)} ms`;
  if (seconds < 60) return `${number(seconds, 3)} s`;
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60);
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${whole % 60} s`;
}

const SECONDS = { unit: "s", format: duration };
const PERCENT = { unit: "%", format: (v) => `${number(100 * toNumber(v), 3)} %`, factor: 100 };
const PLAIN = { unit: "", format: number };

/** Return how the values of a metric are written, which its name says. */
function unitOf(name) {
  let match;
  if ((match = /([a-z]+)_per_s(ec(ond)?)?$/.exec(name))) {
    const unit = `${match[1]}/s`;
    return { unit, format: (v) => `${number(v)} ${unit}` };
  }
  if (/(^|[_/])(seconds|secs)$/.test(name)) return SECONDS;
  if (/(^|[_/])share$/.test(name)) return PERCENT;
  if ((match = /(^|[_/])(bytes|gib|gb|mib|mb)$/i.exec(name))) {
    const unit = { bytes: "B", gib: "GiB", gb: "GB", mib: "MiB", mb: "MB" }[match[2].toLowerCase()];
    return { unit, format: (v) => `${number(v)} ${unit}` };
  }
  return PLAIN;
}

/** Return a number for an axis, short: 20k, 1.5M, 1e−6. */
function tick(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  for (const [factor, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= factor && size < 1e12) return minus(`${Number((value / factor).toPrecision(4))}${letter}`);
  }
  if (size < 1e-3 || size >= 1e12) return minus(value.toExponential(2).replace(/\.?0*e\+?/, "e"));
  return minus(String(Number(value.toPrecision(6))));
}

function time(text) {
  const date = typeof text === "number" ? new Date(text * 1000) : new Date(text);
  return Number.isNaN(date.getTime()) ? short(text) : date.toISOString().slice(0, 19).replace("T", " ") + " UTC";
}

function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

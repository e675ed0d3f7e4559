// The comparison of runs: which one is better, and their metrics side by side. Python computes both.

import { page, runs } from "./data.js";
import { el, named, number, toNumber, unitOf, visible } from "./format.js";
import { lineName, swatch } from "./plots.js";

const MAX_LINES = 20; // of the table, beside those that a click shows

/** Make the card with the headline: which run or group is better, and what that rests on. */
export function headlineCard() {
  const { headline, notes } = page.ranking;
  return el("div", { class: "card headline" }, el("p", { class: "outcome" }, `${visible(headline)}.`),
    ...notes.map((note) => el("p", { class: "note" }, visible(note))));
}

/** Make the table of metrics: a column for each run or group with its change against the first one, the best value in bold.
 * Metrics that are equal in all of them are one line below it. */
export function metricTable() {
  const { groups, rows } = page.ranking;
  const isEqual = ({ values }) => values.every((value) => value && value.least === values[0]?.least && value.greatest === values[0].greatest);
  const head = groups.map(({ name, places }, place) => el("th", { scope: "col", class: "number", colspan: place ? 2 : 1 },
    ...(places.length === 1 ? [swatch(lineName(runs[places[0]].index)), " "] : []), named("span", name, 50)));
  const lines = rows.filter((row) => !isEqual(row)).map((row) =>
    el("tr", {}, el("th", { scope: "row", class: "setting" }, named("span", `${row.metric}${row.kind === "best" ? ", best" : ""}`, 60)),
      ...row.values.flatMap((value, place) => [el("td", { class: "number" }, valueOf(row, value, place === row.best)),
        place ? el("td", { class: "number unit" }, changeText(row.changes[place])) : null])));
  const equal = rows.filter((row) => isEqual(row) && row.kind === "last").map((row) => `${visible(row.metric)} ${textOf(row, row.values[0])}`);
  const made = (shown) => el("div", { class: "scroll" }, el("table", { class: "metrics" },
    el("thead", {}, el("tr", {}, el("td"), ...head.map((cell) => cell.cloneNode(true)))), el("tbody", {}, ...shown)));
  const rest = lines.slice(MAX_LINES);
  return el("div", {}, lines.length ? made(lines.slice(0, MAX_LINES)) : null,
    rest.length ? el("details", {}, el("summary", {}, `${number(rest.length)} more`), made(rest)) : null,
    equal.length ? el("p", { class: "note" }, `Equal: ${equal.join(", ")}`) : null);
}

function textOf({ metric }, { mean, least, greatest, runs: count }) {
  const { format } = unitOf(metric);
  const [from, to] = [format(least), format(greatest)];
  return count > 1 && from !== to ? `${format(mean)} (${from} to ${to})` : format(mean);
}

function valueOf(row, value, isBest) {
  if (!value) return "–";
  const step = row.kind === "best" && value.step !== null ? `step ${number(value.step)}` : null;
  return el(isBest ? "strong" : "span", { title: step }, textOf(row, value));
}

/** Make the text of a change, which is a share of the first value, as `change_text` does for a terminal. */
export function changeText(change) {
  if (change === null) return "";
  const percent = 100 * toNumber(change), size = Math.abs(percent);
  if (!percent) return "=";
  const text = size < 0.01 ? "<0.01" : size >= 10 ? Math.round(size).toLocaleString("en-US") : size.toFixed(size < 1 ? 2 : 1);
  return `${percent > 0 ? "+" : "−"}${text} %`;
}

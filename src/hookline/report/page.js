// The page: its sections in their order, the links between them, and the keys.

import { axes, groupBy, markKinds, markLook, markOf, page, runs, several } from "./data.js";
import { duration, el, named, number, percent, plural, short, time, toNumber, visible, words } from "./format.js";
import { headlineCard, metricTable } from "./compare.js";
import { GradientFlow, HeatMap, HistogramPlot } from "./layers.js";
import { CurvePlot, inColor, isDark, lineName, marks, setTheme, swatch, themeChanged, view } from "./plots.js";

const main = document.getElementById("main");
const byId = (id) => document.getElementById(id);
const places = { curves: new Map(), series: new Map(), hooks: new Map() }; // what alerts link to

/** Add a section with a heading and a link in the navigation; nothing is added if it has no content. */
function section(id, title, ...content) {
  const shown = content.filter(Boolean);
  if (!shown.length) return;
  const heading = el("h2", { id: `${id}-heading` }, title);
  main.append(el("section", { id, "aria-labelledby": `${id}-heading` }, heading, ...shown));
  byId("sections").append(el("a", { href: `#${id}` }, title));
}

/** Make a table of rows; cells are nodes, numbers or text, which is cut after `most` characters. A column that has nothing
 * but numbers is aligned as such, with its head. */
function table(heads, rows, most = 300) {
  const cell = (content) => {
    const isNumber = typeof content === "number";
    const node = content instanceof Node ? content : isNumber ? number(content) : named("span", content ?? "–", most);
    return el("td", isNumber || content?.classList?.contains("number") ? { class: "number" } : {}, node);
  };
  const lines = rows.map((row) => (row instanceof Node ? row : el("tr", {}, ...row.map(cell))));
  const head = (content) => el("th", {}, named("span", content, most));
  const top = el("tr", {}, ...heads.map(head));
  for (const index of heads.keys()) {
    const cells = lines.map((line) => line.cells[index]).filter((line) => line && line.textContent !== "–");
    const ofNumbers = cells.length > 0 && cells.every((content) => content.classList.contains("number"));
    for (const line of [top, ...lines]) line.cells[index]?.classList.toggle("number", ofNumbers);
  }
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, top), el("tbody", {}, ...lines)));
}

/** Return whether a field has a value, so that it is worth a row. */
const isThere = (value) => value !== null && value !== undefined && value !== "" && !(Array.isArray(value) && !value.length);

/** Make a list of names and values; nested values are indented, empty ones left out. */
function facts(fields) {
  const entries = Object.entries(fields).filter(([, value]) => isThere(value));
  return el("dl", { class: "facts" }, ...entries.flatMap(([name, value]) => [named("dt", words(name), 60), el("dd", {}, factValue(value))]));
}

function factValue(value) {
  if (value instanceof Node) return value;
  if (Array.isArray(value)) {
    const isPlain = value.every((item) => typeof item !== "object" || item === null);
    return isPlain ? named("span", value.join(" "), 400) : el("div", {}, ...value.map(factValue));
  }
  if (typeof value === "object" && value !== null) return facts(value);
  if (typeof value === "string" && value.includes("\n")) return el("span", { class: "notes" }, visible(value));
  return typeof value === "number" ? number(value, 6) : named("span", value, 400);
}

/** Put the items after the first few behind a link that shows them; `wrap` makes a list or a table of items. */
function foldRest(items, most, wrap) {
  if (items.length <= most) return [wrap(items)];
  return [wrap(items.slice(0, most)), el("details", {}, el("summary", {}, `${number(items.length - most)} more`), wrap(items.slice(most)))];
}

/** Make an element for each run, under its name if there are several. */
function perRun(make) {
  return runs.map((run) => {
    const content = make(run);
    if (!content || !several) return content;
    return el("div", { class: "of-run" }, runName(run, "h3"), content);
  }).filter(Boolean);
}

function runName(run, tag = "span") {
  return el(tag, { class: "run-name" }, swatch(lineName(run.index)), named("span", run.name, 50));
}

/** Say which names of a kind (curves, layers, histograms) the page has no room for. */
function leftOut(kind, nouns) {
  return perRun(({ data }) => {
    const names = data.left_out.names[kind] ?? [], count = data.left_out.counts[kind] ?? 0;
    if (!count) return null;
    const more = count > names.length ? ` and ${number(count - names.length)} more` : "";
    const what = `Left out, because the page would become too large: ${number(count)} ${nouns}: `;
    return el("p", { class: "note" }, what, ...names.flatMap((name, index) =>
      [index ? ", " : "", named("span", name, 60)]), `${more}. The run's record has everything.`);
  });
}

// ---- alerts and overview ----------------------------------------------------------------------------------------------

const SEVERITIES = { error: "Error", warning: "Warning", info: "Notice" }, MAX_ALERTS = 5, MAX_TOLD = 4;

/** Say for each run whether it can be trusted; why not, the alerts below say. */
function verdicts() {
  return runs.map((run) => {
    const { health } = run.data.verdict, count = (severity) => run.alerts.filter((alert) => alert.severity === severity).length;
    const counts = [[count("error"), "error"], [count("warning"), "warning"], [count("info"), "notice"]].filter(([most]) => most);
    const summed = counts.map(([most, noun]) => plural(most, noun)).join(", ") || "nothing was found that needs attention";
    const text = several && health !== "healthy" ? short(toldBy(run.alerts[0])[0].text, 160) : summed;
    return el("p", { class: `verdict ${{ healthy: "good", broken: "bad" }[health] ?? "open"}` }, several ? runName(run) : null,
      el("strong", {}, `${health[0].toUpperCase()}${health.slice(1)}`), el("span", {}, text));
  });
}

function alerts() {
  const rank = ({ severity }) => Object.keys(SEVERITIES).indexOf(severity);
  const all = runs.flatMap((run) => run.alerts).sort((a, b) => rank(a) - rank(b)); // those of each run are sorted already
  const items = all.map((alert) => {
    const click = (event) => (event.preventDefault(), goTo(alert)), [first, ...parts] = toldBy(alert);
    const link = el("a", { href: "#curves", on: { click } }, visible(first.text).slice(0, 500));
    const where = alert.step === null ? "" : `step ${number(alert.step)}`;
    return el("li", { class: `alert ${alert.severity}` }, el("span", { class: "severity" }, SEVERITIES[alert.severity]),
      el("div", { class: "what" }, several ? runName(alert.run) : null, link, ...story(alert, parts)), el("span", { class: "where" }, where));
  });
  return !all.length ? [] : foldRest(items, MAX_ALERTS, (shown) => el("ul", { class: "alerts" }, ...shown));
}

/** Return what an alert tells at once: of a story the first part of each kind, of which others say the same elsewhere. */
function toldBy(alert) {
  const parts = alert.parts.length ? alert.parts : [alert];
  return parts.filter(({ kind }, place) => parts.findIndex((part) => part.kind === kind) === place).slice(0, MAX_TOLD);
}

/** List how the story of an alert goes on, and fold what it does not tell at once. */
function story(alert, told) {
  const line = ({ step, text }) => el("li", {}, isThere(step) ? el("span", { class: "where" }, `step ${number(step)} `) : null, named("span", text, 300));
  const shown = new Set(told), rest = alert.parts.slice(1).filter((part) => !shown.has(part));
  const folded = rest.length ? el("details", { class: "fields" }, el("summary", {}, `${number(rest.length)} more`), el("ul", {}, ...rest.map(line))) : null;
  return [told.length ? el("ul", { class: "story" }, ...told.map(line)) : null, folded].filter(Boolean);
}

/** Scroll to what an alert is about, with the cursor at its step. */
function goTo(alert) {
  const { place } = alert;
  let target = null;
  if ("curve" in place) target = places.curves.get(place.curve)?.figure;
  else if ("series" in place) {
    const map = places.series.get(place.series);
    map?.choose(place.name, place.column);
    target = map?.figure;
  } else if ("hook" in place) target = places.hooks.get(place.hook);
  target ??= byId("loss") ?? byId("curves") ?? byId("overview");
  target.closest("details")?.setAttribute("open", "");
  target.scrollIntoView({ block: "center", behavior: "instant" });
  if (!target.hasAttribute("tabindex")) target.setAttribute("tabindex", "-1");
  target.focus({ preventScroll: true });
  if (alert.step !== null) {
    const place = alert.run.at(alert.step);
    if (place < view.range[0] || place > view.range[1]) view.zoom(null);
    view.moveTo(place);
  }
}

/** Return the metrics that a reader asks for first, with their last and their best value; if no direction is known to
 * be better, with the lowest and the highest one. */
function headline(run) {
  const isFirst = ({ name }) => /^val\//.test(name) || name === "train/loss";
  const rank = ({ name }) => ["train/loss", "val/loss", name].indexOf(name);
  return [...run.curves.values()].filter(isFirst).sort((a, b) => rank(a) - rank(b)).map((curve) => {
    const extremes = { low: [["lowest", curve.data.least]], high: [["highest", curve.data.greatest]] };
    const shown = extremes[curve.data.better] ?? [...extremes.low, ...extremes.high];
    const { format } = curve.unit;
    const note = shown.filter(([, point]) => point)
      .map(([word, [step, value]]) => `${word} ${format(value)} at step ${number(step)}`).join(", ");
    return { curve, last: format(curve.data.last?.[1]), note };
  });
}

/** Return the last step of a run that has not ended; null if nothing was recorded. */
function lastStep(run) {
  return run.curves.size ? Math.max(...[...run.curves.values()].map((curve) => curve.lastStep)) : null;
}

const FACTS = [
  ["outcome", (run) => outcome(run)], ["reason", (run) => run.run.reason],
  ["steps", (run) => run.run.counters.step ?? lastStep(run)],
  ["completed epochs", (run) => run.data.epochs || null],
  ["duration", (run) => (run.data.seconds ? duration(run.data.seconds) : null)],
  ["tokens", (run) => run.run.counters.tokens_seen || null],
  ["started", (run) => (run.run.started ? time(run.run.started) : null)],
  ["run id", (run) => run.id], ["name", (run) => (several ? run.labels.name : null)], ["tags", (run) => run.labels.tags?.join(", ") || null],
  ["notes", (run) => (run.labels.notes ? el("span", { class: "notes" }, visible(run.labels.notes)) : null)],
  ["resumed from", (run) => lineage(run)], ["attempts", (run) => (run.run.attempts.length > 1 ? run.run.attempts.length : null)],
];

const MAX_CAUSES = 5, MAX_TILES = 5; // of a run
const SPEEDS = ["tokens_per_s", "samples_per_s", "steps_per_s"].map((name) => `throughput/${name}`);

/** Name the metrics for which an overview has no room. */
function notHere(metrics, most) {
  const names = metrics.slice(most).map(({ curve }) => curve.name);
  return names.length ? el("p", { class: "note" }, "Below, among the curves: ", named("span", names.join(", "), 400)) : null;
}

/** Make five tiles: the steps, the metrics that a reader asks for first, and the speed. */
function tiles() {
  if (several) return [];
  const [run] = runs, metrics = headline(run), speed = SPEEDS.map((name) => run.curves.get(name)).find(Boolean);
  const steps = run.run.counters.step ?? lastStep(run), room = MAX_TILES - (steps === null ? 0 : 1) - (speed ? 1 : 0);
  const tile = (name, value, note) => el("div", { class: "tile" }, named("span", name, 30, { class: "tile-name" }),
    el("span", { class: "tile-value" }, value), el("span", { class: "tile-note" }, note));
  const made = metrics.slice(0, room).map(({ curve, last, note }) => tile(curve.name, last, note));
  if (steps !== null) made.unshift(tile("steps", number(steps), el("span", {}, outcome(run), run.data.seconds ? ` in ${duration(run.data.seconds)}` : "")));
  if (speed) made.push(tile("speed", speed.unit.format(speed.data.last?.[1]), "at the last measurement"));
  return made.length ? [el("div", { class: "tiles" }, ...made), notHere(metrics, room)] : [];
}

function overview() {
  if (several) return sideBySide();
  return facts(Object.fromEntries(FACTS.map(([label, read]) => [label, read(runs[0])])));
}

/** Make a table with a column for each run; of several parts, each with a title and rows of a name and values. */
function compareRuns(parts) {
  const value = (content) => el("td", {}, content instanceof Node ? content : typeof content === "number" ? number(content) : named("span", content ?? "–", 300));
  const line = ([name, values]) => el("tr", {}, el("th", { class: "setting", scope: "row" }, ...breakable(short(name, 120))), ...values.map(value));
  const title = (text) => (text ? [el("tr", {}, el("th", { class: "part", colspan: runs.length + 1 }, text))] : []);
  const head = el("tr", {}, el("td", { class: "setting" }), ...runs.map((run) => el("th", { scope: "col" }, runName(run))));
  const made = el("table", { class: "compare" }, el("thead", {}, head),
    ...parts.map(([text, rows]) => el("tbody", {}, ...title(text), ...rows.map(line))));
  made.style.setProperty("--runs", runs.length);
  return el("div", { class: "scroll" }, made);
}

/** Return the parts of a name such as optimizer.lr_start, between which a line may break. */
function breakable(name) {
  return name.split(/(?<=[._/])/).flatMap((part) => [part, el("wbr")]);
}

function sideBySide() {
  const filled = FACTS.map(([label, read]) => [label, runs.map(read)]).filter(([, values]) => values.some(isThere));
  return compareRuns([["", filled]]);
}

/** Say where each run diverges from the first one, and why that may be. */
function divergences() {
  return page.divergences.map(({ text, causes }, index) => {
    const names = [runName(runs[0]), " and ", runName(runs[index + 1]), ` ${visible(text)}.`];
    const likely = causes.slice(0, MAX_CAUSES).map((cause) => el("li", {}, named("span", cause, 300)));
    const more = causes.length - likely.length;
    if (more > 0) likely.push(el("li", {}, `${number(more)} more, among the differences below`));
    return el("div", { class: "card divergence" }, el("p", {}, ...names),
      ...(likely.length ? [el("p", { class: "note" }, "Likely because of"), el("ul", {}, ...likely)] : []));
  });
}

function outcome(run) {
  const text = run.run.outcome ?? "still running, or killed, when this was written";
  const good = text === "completed", bad = ["failed", "non_finite"].includes(text);
  const shown = text === "non_finite" ? "non-finite" : short(text);
  return el("span", { class: `outcome ${good ? "good" : bad ? "bad" : "open"}` }, shown);
}

function lineage(run) {
  const from = run.run.lineage;
  return from && short(Object.entries(from).map(([name, value]) => `${name}: ${value}`).join(", "), 200);
}

// ---- curves -----------------------------------------------------------------------------------------------------------

const TRAINING = "Training and validation";

/** Return what the chart of a step's times draws, and what it lists beside them; null for other metrics. In a comparison the
 * parts of a step have their own plots. */
function roleInStep(name) {
  if (/^throughput\/.*_seconds$/.test(name)) return several && name !== "throughput/step_seconds" ? null : "line";
  return /^throughput\/.*_(per_s|share)$/.test(name) && !several ? "value" : null;
}

/** Return the group and the title of the plot of a metric: training with validation and the learning rate, throughput, then
 * by what stands before the "/". */
function plotOf(name, names) {
  const [, prefix, rest] = /^([^/]*)\/(.*)$/s.exec(name) ?? [null, "", name];
  if (/^(train\/|val\/)?lr(\/|$|-)|^lr_/.test(name)) return { group: TRAINING, title: name };
  if (prefix === "throughput") return { group: "Throughput", title: roleInStep(name) ? "Time of a step" : name };
  if (!["train", "val"].includes(prefix)) return { group: prefix || "Other", title: name };
  return { group: TRAINING, title: names.includes(`train/${rest}`) && names.includes(`val/${rest}`) ? rest : name };
}

/** Return whether a metric never changed, so that a plot of it would be a line without a shape. */
function isConstant(curves) {
  const value = curves[0].data.least?.[1];
  return curves.every(({ steps, data }) => steps.length > 1 && !data.non_finite &&
    data.least?.[1] === value && data.greatest?.[1] === value);
}

function curves() {
  const content = [], constants = [];
  let mainFigure = null;
  const all = [...new Set(runs.flatMap((run) => [...run.curves.keys()]))];
  const groupOrder = (group) => [TRAINING, "Throughput"].indexOf(group) + 1 || 3;
  const titleOrder = (title) => (title === "loss" || title === "train/loss" ? 0 : /^(train\/)?lr/.test(title) ? 1 : 2);
  for (const [group, ofGroup] of [...groupBy(all, (name) => plotOf(name, all).group)].sort(([a], [b]) => groupOrder(a) - groupOrder(b))) {
    const drawn = new Map(); // by the values: a metric that is recorded twice, as lr and train/lr, is drawn once
    const plots = [...groupBy(ofGroup, (name) => plotOf(name, all).title)];
    for (const [title, names] of plots.sort(([a], [b]) => titleOrder(a) - titleOrder(b))) {
      const shown = [...names].sort().flatMap((name) => runs.map((run) => run.curves.get(name)).filter(Boolean));
      const key = shown.map((curve) => curve.key).join();
      let place = drawn.get(key);
      // Losses and learning rates are looked for, also where they are constant.
      if (group !== TRAINING && isConstant(shown)) {
        const value = shown[0].unit.format(shown[0].data.least[1]);
        place = { figure: el("span", {}, named("span", title, 60), ` ${value}`) };
        constants.push(constants.length ? ", " : "", place.figure);
      } else if (place) place.alike(names);
      else {
        const more = shown.filter(({ name }) => roleInStep(name) === "value"), lines = shown.filter((curve) => !more.includes(curve));
        place = lines.length ? new CurvePlot(title, lines, more) : new CurvePlot(title, more);
        drawn.set(key, place);
        if (!mainFigure && (title === "loss" || title === "train/loss")) {
          Object.assign(place, { isMain: true, height: 340 });
          mainFigure = place.figure;
        }
        if (more.length) place.figure.classList.add("wide");
      }
      for (const name of names) places.curves.set(name, place);
    }
    if (!drawn.size) continue;
    const figures = [...drawn.values()].map((plot) => plot.figure).filter((figure) => figure !== mainFigure);
    const most = group === "Throughput" ? 1 : figures.length, cards = (some) => el("div", { class: "cards" }, ...some);
    if (figures.length) content.push(el("div", { class: "group" }, named("h3", group, 60), ...foldRest(figures, most, cards)));
  }
  if (constants.length) content.push(el("p", { class: "note constants" }, "Constant: ", ...constants));
  if (!content.length && !mainFigure) content.push(el("p", { class: "quiet" }, "No metrics were recorded."));
  return { loss: mainFigure ? [eventLegend(), mainFigure] : [], others: mainFigure ? content : [eventLegend(), ...content] };
}

/** Make the legend of the events' marks; a click hides those of a kind. */
function eventLegend() {
  const byKind = groupBy(marks(), markOf);
  if (!byKind.size) return null;
  const buttons = markKinds.filter((kind) => byKind.has(kind)).map((kind) => {
    const click = ({ currentTarget }) => {
      const show = view.hiddenMarks.delete(kind) || !view.hiddenMarks.add(kind);
      currentTarget.setAttribute("aria-pressed", String(show));
      view.setOptions({});
    };
    const title = "Show or hide these marks";
    return el("button", { type: "button", class: "chip", "aria-pressed": "true", title, on: { click } },
      el("span", { class: `mark ${markLook(kind).color}` }, markLook(kind).sign),
      `${short(words(kind), 40)} (${number(byKind.get(kind).length)})`);
  });
  return el("div", { class: "chips", role: "group", "aria-label": "Events on the time axis" },
    el("span", { class: "note" }, "Events on the step axis:"), ...buttons);
}

// ---- layers -----------------------------------------------------------------------------------------------------------

/** Return the tables of a kind (layers, histograms) of all runs, by the name of the series. */
function collect(kind) {
  const tables = runs.flatMap((run) => [...run[kind].values()]).filter(({ names }) => names.length);
  return [...groupBy(tables, ({ name }) => name)];
}

function layers() {
  const maps = collect("layers").map(([name, tables]) => {
    const map = new HeatMap(name, tables);
    places.series.set(name, map);
    return map.figure;
  });
  return maps.length ? [el("div", { class: "cards" }, ...maps)] : [];
}

function gradientFlow() {
  const gradients = collect("layers").find(([name, [table]]) => /grad/i.test(name) && table.columns.includes("norm") && table.steps.length);
  return gradients ? [new GradientFlow(gradients[1]).figure] : [];
}

const histograms = () => collect("histograms").map(([name, tables]) => new HistogramPlot(name, tables).figure);

// ---- cost -------------------------------------------------------------------------------------------------------------

const secondsOf = (cost) => toNumber(cost.seconds) || 0;
const sum = (values) => values.reduce((total, value) => total + value, 0);

/** Make an element that fills a share of the width. */
function filled(share, className = null) {
  const element = el("span", { class: className });
  element.style.width = `${100 * share}%`;
  return element;
}

/** Return the parts of a step with their share of its time over the whole run. */
function anatomy(run) {
  const { step: ofStep, hooks: ofHooks, ...ofParts } = run.data.step_seconds, step = toNumber(ofStep);
  if (!step) return null;
  const parts = Object.entries(ofParts).map(([name, seconds]) => [words(name), toNumber(seconds)]);
  const has = (wanted) => parts.some(([name]) => name === wanted);
  // Hooks run between the other parts and inside of them, so that their time is not one more part.
  const inHooks = toNumber(ofHooks);
  const rest = Math.max(step - sum(parts.map(([, value]) => value)), 0);
  if (rest > step * 0.001) parts.push([has("forward backward") ? "other" : "model and optimizer", rest]);
  const total = sum(parts.map(([, value]) => value));
  const note = inHooks === null ? null : el("p", { class: "note" }, `Hooks take ${duration(inHooks)} of it (${percent(Math.min(inHooks / total, 1))}), partly inside of the other parts.`);
  const label = parts.map(([name, value]) => `${name} ${percent(value / total)}`).join(", ");
  const bar = el("div", { class: "stack", role: "img", "aria-label": label },
    ...parts.map(([, value], index) => inColor(filled(value / total), lineName(index))));
  const legend = el("ul", { class: "legend" }, ...parts.map(([name, value], index) =>
    el("li", {}, swatch(lineName(index), "box"), `${name} ${duration(value)} (${percent(value / total)})`)));
  return el("div", { class: "card wide" }, el("h4", {}, `A step takes ${duration(total)} on average`), bar, legend, note);
}

function hookCosts(run) {
  const { costs, attempts } = run.run;
  if (!costs.length) return null;
  const total = run.data.attempt.seconds, most = Math.max(...costs.map(secondsOf));
  const small = costs.filter((cost) => secondsOf(cost) < 0.001 * total);
  const calls = sum(small.map((cost) => toNumber(cost.calls) || 0)), others = { hook: `${small.length} others`, calls, seconds: sum(small.map(secondsOf)) };
  const listed = small.length > 1 ? [...costs.filter((cost) => !small.includes(cost)), others] : costs;
  const rows = listed.map((cost) => {
    const seconds = secondsOf(cost), bar = filled(most ? seconds / most : 0, "cost");
    const numbers = [number(cost.calls), duration(seconds), cost.calls ? duration(seconds / cost.calls) : "–", total ? percent(seconds / total) : "–"];
    const row = el("tr", {}, el("td", { class: "whole" }, named("span", cost.hook, 40)),
      el("td", {}, short(cost.kind ?? "", 40)), ...numbers.map((text) => el("td", { class: "number" }, text)),
      el("td", { class: "bar-cell" }, bar));
    if (!places.hooks.has(cost.hook)) places.hooks.set(cost.hook, row);
    return row;
  });
  const resumed = attempts.length > 1;
  const heads = ["calls", "total", "per call", resumed ? "of the attempt" : "of the run"];
  return el("div", { class: "card wide" }, el("h4", {}, resumed ? "Time in hooks, last attempt" : "Time in hooks"),
    table(["hook", "kind", ...heads, ""], rows));
}

// ---- events, tables and images, config --------------------------------------------------------------------------------

const MAX_EVENTS = 20, MAX_CELL_LENGTH = 1000; // characters

function events(run) {
  if (!run.events.length) return null;
  const rows = run.events.map((event) => {
    const { sign, color } = markLook(markOf(event)), mark = el("span", { class: `mark ${color}` }, `${sign} `);
    const row = el("tr", {}, el("td", { class: "number" }, typeof event.step === "number" ? number(event.step) : "–"),
      el("td", { class: "kind" }, mark, short(words(event.kind), 40)),
      el("td", { class: "text" }, named("span", event.text, MAX_CELL_LENGTH), fieldsOf(event)),
      el("td", { class: "time" }, typeof event.time === "number" ? time(event.time) : "–"));
    if (typeof event.step === "number") row.addEventListener("click", () => view.moveTo(run.at(event.step)));
    return row;
  });
  const heads = ["step", "event", "what", "time"];
  const count = run.data.event_count;
  const note = `${number(rows.length)} of ${number(count)} events are shown: the first and the last of each kind.`;
  const [first, ...rest] = foldRest(rows, MAX_EVENTS, (shown) => table(heads, shown));
  return el("div", {}, first, count > rows.length ? el("p", { class: "note" }, note) : null, ...rest);
}

/** Make a list of the fields of an event that its sentence lacks; it is filled when it is opened. */
function fieldsOf(event) {
  const isSaid = (value) => typeof value === "string" && event.text.includes(value);
  const isEmpty = (value) => value === null || (typeof value === "object" && !Object.keys(value).length);
  const shown = Object.entries(event.fields).filter(([name, value]) =>
    !["time", "kind", "step"].includes(name) && !isSaid(value) && !isEmpty(value));
  if (!shown.length) return null;
  const details = el("details", { class: "fields" }, el("summary", {}, "more"));
  details.addEventListener("toggle", () => details.append(facts(Object.fromEntries(shown))), { once: true });
  details.addEventListener("click", (click) => click.stopPropagation());
  return details;
}

/** Make a card for each name of tables and images. */
function media(run) {
  const byName = groupBy(run.data.media, ({ type, name }) => JSON.stringify([type, name])), left = run.data.left_out.counts.media;
  if (!byName.size && !left) return null;
  const note = byName.size ? `The newest tables and images are shown; the record has ${number(left)} more.`
    : `The page has no room for the tables and images of the record, ${number(left)} in all.`;
  return el("div", {}, el("div", { class: "cards" }, ...[...byName.values()].map(mediaCard)),
    left ? el("p", { class: "note" }, note) : null);
}

/** Make the card of the tables or images of one name: the newest is shown, a slider chooses an earlier one. */
function mediaCard(all) {
  const last = all.length - 1, body = el("div", {}), shown = el("output", {});
  const slider = el("input", { type: "range", min: 0, max: last, value: last, "aria-label": "Step" });
  const show = (index) => {
    shown.textContent = number(all[index].step);
    slider.setAttribute("aria-valuetext", `step ${shown.textContent}`);
    body.replaceChildren(...(all[index].type === "image" ? [imageOf(all[index])] : tableOf(all[index])));
  };
  slider.addEventListener("input", () => show(Number(slider.value)));
  show(last);
  const hasLongText = (cells) => cells.some((cell) => String(cell).length > 150);
  const isWide = all.some(({ columns, rows }) => columns?.length > 6 || rows?.some(hasLongText));
  return el("figure", { class: `card${isWide ? " wide" : ""}` }, el("figcaption", {}, named("h4", all[last].name, 60),
    el("label", { class: "slide unit" }, "step ", last ? slider : null, shown)), body);
}

function imageOf({ name, step, png }) {
  const image = el("img", { alt: short(`${name} at step ${step}`, 200) });
  image.addEventListener("load", () => image.classList.toggle("tiny", image.naturalWidth < 128));
  image.src = `data:image/png;base64,${png}`;
  return image;
}

function tableOf({ kind, columns, rows, sums, total_rows: allRows, total_columns: allColumns }) {
  const value = (cell) => (["NaN", "Infinity", "-Infinity"].includes(cell) ? Number(cell) : cell);
  const lines = kind === "confusion_matrix" ? shaded(rows, sums) : rows.map((cells) => cells.map(value));
  const cut = [[rows.length, allRows, "row"], [columns.length, allColumns, "column"]];
  const notes = cut.filter(([shown, total]) => total > shown).map(([shown, total, noun]) => `the first ${number(shown)} of ${plural(total, noun)}`);
  return [table(columns.map(String), lines, MAX_CELL_LENGTH),
    ...(notes.length ? [el("p", { class: "note" }, notes.join(", "))] : [])];
}

/** Return the rows of a confusion matrix, each cell shaded by its share of the row's sum. */
function shaded(rows, sums) {
  return rows.map((cells, row) => {
    const total = sums[row];
    return el("tr", {}, ...cells.map((cell) => {
      if (typeof cell !== "number") return el("th", {}, named("span", cell ?? "–", 40));
      const shade = el("span", { class: "shade" });
      shade.style.opacity = String(total ? (0.75 * cell) / total : 0);
      return el("td", { class: "number shaded" }, shade, el("span", {}, number(cell)));
    }));
  });
}

function differences() {
  if (!page.differences.length) return [el("p", { class: "quiet" }, "Configs, hooks, environments and code of these runs are the same.")];
  // With spaces, so that a line can break between values.
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1).replace(/(?<=[[{])\n\s*|\n\s*(?=[\]}])/g, "").replace(/\n\s*/g, " "));
  const parts = groupBy(page.differences, (difference) => difference.section);
  return [compareRuns([...parts].map(([title, rows]) => [title, rows.map(({ key, values }) => [key, values.map(text)])]))];
}

function hookList(run) {
  const { hooks } = run.run;
  if (!hooks.length) return null;
  const text = (value) => (typeof value === "object" ? JSON.stringify(value) : value);
  const rows = hooks.map((hook) => {
    const given = Object.entries(hook.parameters ?? {}).filter(([, value]) => value !== null);
    const parameters = given.map(([name, value]) => `${name}=${text(value)}`).join(", ");
    const fields = [hook.name, hook.kind, hook.enabled ? "on" : "switched off", hook.schedule, hook.policy];
    const row = el("tr", {}, ...fields.map((field) => el("td", { class: "whole" }, named("span", field ?? "–", 40))),
      el("td", { class: "number" }, number(hook.failures ?? 0)),
      el("td", { class: "parameters" }, named("span", parameters, 200)));
    if (!places.hooks.has(hook.name)) places.hooks.set(hook.name, row);
    return row;
  });
  return table(["hook", "kind", "state", "schedule", "when it fails", "failures", "parameters"], rows);
}

function attempts({ run }) {
  if (!run.attempts.length) return [];
  const at = (text) => (text ? time(text) : "–");
  const rows = run.attempts.map(({ started, closed, outcome, reason, host, world_size: processes }, index) =>
    [index + 1, at(started), at(closed), outcome ?? "–", reason ?? "", host ?? "–", el("span", { class: "number" }, String(processes ?? 1))]);
  return [el("h4", {}, "Attempts"), table(["attempt", "started", "ended", "outcome", "reason", "host", "processes"], rows)];
}

function about(run) {
  const { environment, git, config_hash: hash, seed, lineage: from, lost } = run.run;
  const code = { ...git, "config hash": hash, seed, "lost lines": lost || null };
  const parts = [["Environment", environment], ["Code", code], ...(from ? [["Lineage", from]] : [])];
  const lists = parts.map(([title, fields]) => el("div", {}, el("h4", {}, title), facts(fields)));
  return el("div", {}, el("div", { class: "columns" }, ...lists), ...attempts(run));
}

function config(run) {
  if (!run.data.config) return null;
  return el("details", { open: !several }, el("summary", {}, "config.yaml"), el("pre", {}, visible(run.data.config)));
}

// ---- controls ---------------------------------------------------------------------------------------------------------

const KEYS = [
  ["/", "find a layer or a metric"], ["Tab", "go from plot to plot"],
  ["← →", "move the cursor in the focused plot; with Shift ten times as far"],
  ["↑ ↓", "choose a layer in a heat map"],
  ["Home End", "go to the first or the last step"],
  ["+ −", "zoom in or out around the cursor"], ["[ ]", "move the zoomed steps to the left or right"],
  ["0", "show all steps"], ["l", "log axis of the focused plot"], ["t", "light or dark"],
  ["Esc", "remove the cursor; leave the search"], ["?", "these keys"],
];

/** Show only the plots and layers whose name contains a text; a kind without any match stays as it is. */
function find(text) {
  view.search(text);
  const curvePlots = view.plots.filter((plot) => plot instanceof CurvePlot);
  const matching = curvePlots.filter((plot) => view.matches(plot.searched));
  for (const plot of curvePlots) plot.figure.hidden = matching.length > 0 && !matching.includes(plot);
  if (view.find) for (const { figure } of matching) figure.closest("details")?.setAttribute("open", "");
  for (const group of document.querySelectorAll(".group")) group.hidden = !group.querySelector("figure:not([hidden])");
  const tables = runs.flatMap((run) => [...run.layers.values(), ...run.histograms.values()]);
  const layerNames = new Set(tables.flatMap((table) => table.names).filter((name) => view.matches(name)));
  byId("found").textContent = view.find ? `${plural(layerNames.size, "layer")}, ${plural(matching.length, "plot")}` : "";
}

function connect() {
  byId("find").addEventListener("input", ({ target }) => find(target.value));
  byId("smoothing").addEventListener("input", ({ target }) => {
    byId("smoothing-value").textContent = target.value;
    view.setOptions({ smoothing: Number(target.value) });
  });
  byId("axis").append(...axes.map(({ name, label }) => el("option", { value: name }, label)));
  byId("axis").addEventListener("change", ({ target }) => view.setAxis(target.value));
  byId("log").addEventListener("change", ({ target }) => view.setOptions({ log: target.checked }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);
  const dialog = byId("keys");
  const keys = KEYS.flatMap(([key, what]) =>
    [el("dt", {}, ...key.split(" ").map((name) => el("kbd", {}, name))), el("dd", {}, what)]);
  dialog.append(el("h2", { id: "keys-title" }, "Keys"), el("dl", { class: "keys" }, ...keys),
    el("p", { class: "note" }, "With a mouse: drag over a plot to zoom, double-click to show all steps."),
    el("form", { method: "dialog" }, el("button", {}, "Close")));
  const actions = {
    "/": () => byId("find").focus(), "?": () => dialog.showModal(), 0: () => view.zoom(null),
    "+": () => view.zoomBy(0.5), "=": () => view.zoomBy(0.5), "-": () => view.zoomBy(2),
    "[": () => view.pan(-0.25), "]": () => view.pan(0.25),
    t: () => setTheme(isDark() ? "light" : "dark"),
    Escape: () => view.moveTo(null),
  };
  const buttons = { "zoom-in": "+", "zoom-out": "-", "zoom-all": "0", theme: "t", help: "?" };
  for (const [id, key] of Object.entries(buttons)) byId(id).addEventListener("click", actions[key]);
  document.addEventListener("keydown", (event) => {
    const { tagName, type } = event.target;
    const typing = ["INPUT", "SELECT", "TEXTAREA"].includes(tagName) && type !== "range" && type !== "checkbox";
    if (typing && event.key === "Escape") event.target.blur();
    if (typing || dialog.open || event.ctrlKey || event.metaKey || event.altKey) return;
    if (!Object.hasOwn(actions, event.key)) return;
    event.preventDefault();
    actions[event.key]();
  });
  // Plots that were never scrolled to are drawn for the printer, on white.
  const root = document.documentElement;
  let before = null, opened = [];
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    opened = [...document.querySelectorAll("details:not([open], .fields)")];
    for (const details of opened) details.open = true;
    before = setTheme("light");
    for (const plot of view.plots) plot.draw();
  });
  addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
    root.classList.remove("printing");
    setTheme(before);
  });
}

// ---- the page ---------------------------------------------------------------------------------------------------------

function build() {
  const title = several ? `${runs.length} runs` : runs[0].name;
  document.title = `${short(title, 80)} · Hookline report`;
  byId("title").replaceChildren(named("span", title, 60));
  const unnamed = runs[0].name === runs[0].id;
  const subtitle = several ? "Hookline comparison" : unnamed ? "Hookline report" : short(runs[0].id, 60);
  byId("subtitle").textContent = `${subtitle} · written ${time(page.written)}`;
  if (several) section("comparison", "Comparison", headlineCard(), metricTable());
  if (several) section("divergences", "Where the runs diverge", ...divergences());
  const { loss, others } = curves();
  section("alerts", several ? "Verdicts" : "Verdict", ...verdicts(), ...alerts(), ...tiles());
  if (several) section("overview", "Overview", overview()), section("differences", "Differences", ...differences());
  section("loss", "Loss", ...loss);
  section("layers", "Layers", ...layers(), ...leftOut("layers", "series"));
  section("flow", "Gradient flow", ...gradientFlow());
  section("histograms", "Histograms", ...histograms(), ...leftOut("histograms", "series"));
  section("curves", loss.length ? "Other curves" : "Curves", ...others, ...leftOut("curves", "metrics"));
  section("cost", "Cost", ...perRun(anatomy), ...perRun(hookCosts));
  section("media", "Tables and images", ...perRun(media));
  if (!several) section("overview", "Run", overview());
  section("events", "Events", ...perRun(events));
  section("hooks", "Hooks", ...perRun(hookList));
  section("about", "Environment", ...perRun(about));
  section("config", "Config", ...perRun(config));
  connect();
  themeChanged();
}

build();
requestAnimationFrame(() => setTimeout(() => (document.documentElement.dataset.drawn = String(Math.round(performance.now())))));

// What all plots share (zoom, cursor, search, theme), and curves over steps, drawn by uPlot.
// The mean is a line, and what lies between the lowest and the highest value a band.

import { axes, axis, extent, firstAtLeast, groupBy, markLook, markOf, nearest, runs, several } from "./data.js";
import { clamp, el, named, number, short, tick, words } from "./format.js";

export const view = {
  range: extent(), // what is shown of the axis
  step: null, // the place of the cursor on the axis
  pointed: null, // the plot under the mouse, if that moved the cursor
  smoothing: 0,
  log: false,
  find: "",
  hiddenMarks: new Set(),
  hidden: new Set(), // curves, or in a comparison runs
  plots: [], // everything that draws; see Plot

  zoom(range) {
    const [first, last] = extent(), least = axis.name === "step" ? Math.min(2, last - first) : (last - first) / 1000;
    if (range) {
      const middle = (range[0] + range[1]) / 2, half = Math.max(range[1] - range[0], least) / 2;
      range = [Math.max(first, middle - half), Math.min(last, middle + half)];
    }
    this.range = range && range[1] - range[0] < last - first ? range : [first, last];
    this.update((plot) => plot.showRange());
  },
  zoomBy(factor) {
    const [from, to] = this.range;
    const middle = this.step !== null && this.step >= from && this.step <= to ? this.step : (from + to) / 2;
    this.zoom([middle - (middle - from) * factor, middle + (to - middle) * factor]);
  },
  pan(share) {
    const width = this.range[1] - this.range[0], [first, last] = extent();
    const from = clamp(this.range[0] + share * width, first, last - width);
    this.zoom([from, from + width]);
  },
  moveTo(step, pointed = null) {
    this.pointed = pointed;
    this.step = step === null ? null : clamp(step, ...extent());
    this.update((plot) => plot.showStep());
  },
  setAxis(name) {
    Object.assign(axis, axes.find((known) => known.name === name));
    Object.assign(this, { range: extent(), step: null });
    this.update((plot) => plot.draw());
  },
  /** Set options that only curves have: smoothing, the log axis of all of them, or the marks that are hidden. */
  setOptions(options) {
    Object.assign(this, options);
    if ("log" in options) for (const plot of this.plots) plot.ownLog = null;
    this.update((plot) => plot.showOptions());
  },
  search(text) {
    this.find = text.trim().toLowerCase();
    this.update((plot) => plot.showSearch());
  },
  /** Change the plots on the screen; the others are drawn when they come into view. */
  update(change) {
    for (const plot of this.plots) {
      if (plot.isOnScreen) change(plot);
      else plot.stale = true;
    }
  },
  matches(name) {
    return name.toLowerCase().includes(this.find);
  },
  /** Return the places of the names that match the search; of all if none does. */
  matching(names) {
    const all = [...names.keys()], matching = all.filter((index) => this.matches(names[index]));
    return matching.length ? matching : all;
  },
  /** Return the place of the cursor among steps; without a cursor the last one, up to a given step. */
  placeIn({ at, steps }, last = null) {
    if (this.step !== null) return nearest(at, this.step);
    return last === null ? steps.length - 1 : Math.max(firstAtLeast(steps, last + 1) - 1, 0);
  },
};

/** Return where the cursor goes: on a whole step, or anywhere on another axis. */
export const asPlace = (value) => (axis.name === "step" ? Math.round(value) : value);

/** Something in a figure that draws into an element when that comes into view, and again when what it shows changes.
 * Subclasses have `timed`, over whose steps keys move the cursor, and draw in `paint`. */
export class Plot {
  constructor(figure, element) {
    Object.assign(this, { figure, element, stale: true, isOnScreen: false });
    element.plot = this;
    view.plots.push(this);
    seen.observe(element);
    resized.observe(element);
    figure.addEventListener("keydown", (event) => {
      if (event.target !== figure || event.ctrlKey || event.metaKey || event.altKey || !this.timed?.at.length) return;
      if (this.key(event.key, event.shiftKey ? 10 : 1)) event.preventDefault();
    });
  }

  draw() {
    const width = this.element.clientWidth;
    if (!width) return;
    Object.assign(this, { drawnWidth: width, stale: false });
    this.paint(width);
    this.showStep();
  }
  showRange() { this.draw(); }
  showSearch() { this.draw(); }
  showOptions() {} // of curves

  /** Move the cursor, and return whether the key was one that does so. */
  key(key, jump) {
    const { at } = this.timed, last = at.length - 1, here = view.step === null ? last : nearest(at, view.step);
    const places = { ArrowLeft: here - (view.step === null ? 0 : jump), ArrowRight: here + jump, Home: 0, End: last };
    if (!Object.hasOwn(places, key)) return false;
    view.moveTo(at[clamp(places[key], 0, last)]);
    return true;
  }

  /** Draw with uPlot, in the place of what it drew before. */
  drawChart(height, { axes, ...options }, data, element = this.element) {
    const line = { stroke: () => color("grid"), width: 1 };
    const axis = { stroke: () => color("muted"), font: FONT, labelFont: FONT, grid: line, ticks: { ...line, size: 4 } };
    const base = { width: element.clientWidth, height, legend: { show: false }, padding: [10, 14, 0, 0] };
    this.chart?.destroy();
    this.chart = new uPlot({ ...base, ...options, axes: axes.map((own) => ({ ...axis, ...own })) }, data, element);
  }
}

const seen = new IntersectionObserver((entries) => {
  for (const { target: { plot }, isIntersecting } of entries) {
    plot.isOnScreen = isIntersecting;
    if (isIntersecting && plot.stale) plot.draw();
  }
}, { rootMargin: "150px" });

const resized = new ResizeObserver((entries) => {
  for (const { target: { plot, clientWidth } } of entries) {
    if (clientWidth === plot.drawnWidth) continue;
    if (plot.isOnScreen) plot.draw();
    else plot.stale = true;
  }
});

// ---- colors -----------------------------------------------------------------------------------------------------------

export const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const LINE_COLORS = 16;
let colors = new Map();

/** Return a color of the style sheet, which has one set for light and one for dark. */
export function color(name) {
  if (!colors.has(name)) colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colors.get(name);
}

/** Return the name of the color, which is also a class, of the line with a number. */
export const lineName = (index) => `line-${index % LINE_COLORS}`;
export const lineColor = (index) => color(lineName(index));

/** Return a color like #1f77b4 as [r, g, b]. */
export const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
export const pale = (hex, opacity) => `rgba(${[...rgb(hex), opacity].join(", ")})`;

let chosenTheme = null;
export const isDark = () => document.documentElement.dataset.theme === "dark";

/** Switch to "light" or "dark", or to what the system prefers if null; return what was chosen before. */
export function setTheme(theme) {
  const before = chosenTheme;
  chosenTheme = theme;
  themeChanged();
  return before;
}

/** Use the colors of the theme that was chosen or that the system prefers, and draw everything again. */
export function themeChanged() {
  document.documentElement.dataset.theme = chosenTheme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  colors = new Map();
  document.getElementById("theme").textContent = isDark() ? "Light" : "Dark";
  view.update((plot) => plot.draw());
}

// ---- curves -----------------------------------------------------------------------------------------------------------

/** Return values with an exponential moving average that begins without a bias; gaps stay gaps. A value's weight falls with
 * the steps after it, in units of `unit` steps, so that curves with more and fewer points lag by as many steps. */
export function smooth(values, weight, steps, unit) {
  let sum = 0, total = 0, before = steps[0] - unit;
  return values.map((value, index) => {
    if (value === null) return null;
    const kept = weight ** ((steps[index] - before) / unit);
    before = steps[index];
    sum = kept * sum + (1 - kept) * value;
    total = kept * total + (1 - kept);
    return sum / total;
  });
}

/** Return whether a curve has so few points that each is drawn; it is not smoothed. */
const isSparse = ({ steps }) => steps.length <= 40;
const gapOf = ({ steps }) => (steps.length > 1 ? (steps.at(-1) - steps[0]) / (steps.length - 1) : Infinity);

/** Return the lowest and the highest value, without those beside which the others would take less than a tenth of the axis. */
export function usualRange(values) {
  const sorted = Float64Array.from(values).sort(), last = sorted.length - 1;
  const low = sorted[Math.ceil(0.02 * last)], high = sorted[Math.floor(0.98 * last)], room = 9 * (high - low);
  if (last < 7 || !(room > 0)) return [sorted[0], sorted[last]];
  return [sorted.find((value) => value >= low - room), sorted.findLast((value) => value <= high + room)];
}

/** Return what an axis can show: finite numbers, on a log axis those above 0; otherwise null, which is a gap. */
export const usable = (value, log) => (Number.isFinite(value) && (!log || value > 0) ? value : null);

/** Add two invisible series, and the band between them. */
export function addBand(series, bands, stroke, opacity, show = true) {
  for (let count = 0; count < 2; count++) series.push({ show, stroke: "transparent", width: 0, points: { show: false } });
  bands.push({ series: [series.length - 1, series.length - 2], fill: () => pale(stroke(), opacity) });
}

/** Give an element a color of the style sheet. */
export const inColor = (element, name) => (element.style.setProperty("color", `var(--${name})`), element);
export const swatch = (name, kind = "") => inColor(el("span", { class: `swatch ${kind}` }), name);

/** The plot of a few curves: one metric of every run, or a training metric with its validation metric. Of `more` curves, in
 * other units, the legend has the values. */
export class CurvePlot extends Plot {
  constructor(title, curves, more = []) {
    const log = el("button", { type: "button", class: "small", "aria-pressed": "false", title: "Log axis (l)" }, "log");
    const legend = el("ul", { class: "legend" }), body = el("div", { class: "plot" });
    const unit = curves[0].unit.unit;
    const figure = el("figure", { class: "card", tabindex: "0", "aria-label": `Curve ${short(title, 200)}; arrow keys move the cursor` },
      el("figcaption", {}, named("h4", title, 48), unit ? el("span", { class: "unit" }, unit) : null, log), body, legend);
    super(figure, body);
    const names = [...new Set(curves.map((curve) => curve.name))], listed = [...curves, ...more];
    const searched = listed.map((curve) => curve.name).join(" ");
    Object.assign(this, { curves, listed, names, searched, legend, button: log, ownLog: null, others: [], height: 220 });
    this.beyond = el("p", { class: "note", hidden: true });
    figure.insertBefore(this.beyond, body);
    this.tip = el("div", { class: "tip", hidden: true });
    log.addEventListener("click", () => this.toggleLog());
    this.entries = [];
    this.values = listed.map((curve, index) => {
      const value = el("span", { class: "value" });
      const label = !several ? curve.name : names.length > 1 ? `${curve.run.name} · ${curve.name}` : curve.run.name;
      const name = named("span", label, 40, { class: "name" });
      if (index >= curves.length) legend.append(el("li", {}, name, value));
      else {
        const line = swatch(this.lineOf(index), this.dashOf(curve) ? "dashed" : "");
        const click = () => (view.hidden.delete(this.owner(curve)) || view.hidden.add(this.owner(curve)), view.setOptions({}));
        this.entries.push(el("button", { type: "button", title: "Show or hide", on: { click } }, line, name));
        legend.append(el("li", {}, this.entries.at(-1), value));
      }
      return value;
    });
  }

  /** Say that metrics with other names have the same values, so that they need no plot of their own. */
  alike(names) {
    this.others.push(...names);
    this.searched += ` ${names.join(" ")}`;
    this.note ??= this.legend.appendChild(el("li", { class: "note" }));
    this.note.replaceChildren(named("span", `same values: ${this.others.join(", ")}`, 90));
  }

  /** What a legend hides: one curve, or in a comparison a run in all plots. */
  owner(curve) { return several ? curve.run : curve; }
  get shown() { return this.curves.filter((curve) => !view.hidden.has(this.owner(curve))); }
  get log() { return this.ownLog ?? view.log; }
  toggleLog() {
    this.ownLog = !this.log;
    this.draw();
  }
  lineOf(index) { return lineName(several ? this.curves[index].run.index : index); }
  /** Return the dashes of a curve: with several runs the color says which run, so the dashes say which metric. */
  dashOf(curve) { return several ? [null, [6, 4], [2, 3], [10, 3, 2, 3]][this.names.indexOf(curve.name) % 4] : null; }

  get timed() { return this.chart && { at: this.chart.data[0].filter((at) => at >= view.range[0] && at <= view.range[1]) }; }
  key(key, jump) {
    if (key !== "l") return super.key(key, jump);
    this.toggleLog();
    return true;
  }

  showRange() { this.chart?.setScale("x", { min: view.range[0], max: view.range[1] }); }
  showSearch() {} // which hides other figures, and changes nothing in this one
  showOptions() { this.draw(); }

  /** Return the values for uPlot: the steps of all curves, then for each curve mean, smoothed, lowest, highest. */
  makeData() {
    const read = (values) => Array.from(values, (value) => usable(value, this.log)), unit = Math.min(...this.curves.map(gapOf));
    const tables = this.curves.map((curve) => {
      const mean = read(curve.mean);
      const smoothed = this.isSmoothed(curve) ? smooth(mean, view.smoothing, curve.steps, unit) : mean.map(() => null);
      return [Array.from(curve.at), mean, smoothed, ...(curve.exact ? [] : [read(curve.lowest), read(curve.highest)])];
    });
    return tables.length === 1 ? tables[0] : uPlot.join(tables);
  }

  isSmoothed(curve) { return view.smoothing > 0 && !isSparse(curve); }

  /** Return the range of a linear axis, and name the values that are beyond it, which would flatten all others. */
  linearRange() {
    const [from, to] = view.range, isShown = (curve) => (place) => curve.at[place] >= from && curve.at[place] <= to;
    const points = this.shown.flatMap((curve) => [...curve.steps.keys()].filter(isShown(curve)).flatMap((place) =>
      [curve.lowest, curve.mean, curve.highest].map((values) => ({ curve, place, value: values[place] })))).filter(({ value }) => Number.isFinite(value));
    const [low, high] = usualRange(points.map(({ value }) => value)), beyond = points.filter(({ value }) => value < low || value > high);
    const worst = beyond.sort((a, b) => Math.abs(b.value) - Math.abs(a.value))[0];
    this.beyond.hidden = !worst;
    if (worst) {
      const { curve, place, value } = worst, known = [curve.data.greatest, curve.data.least].find((point) => point && Math.fround(point[1]) === value);
      const more = new Set(beyond.map((point) => point.place)).size - 1;
      this.beyond.textContent = `Beyond the axis: ${curve.unit.format(value)} at step ${number(known?.[0] ?? curve.steps[place])}${more ? ` and ${number(more)} more` : ""}; a log axis shows all`;
    }
    return yRange(low ?? null, high ?? null);
  }

  paint() {
    this.button.setAttribute("aria-pressed", String(this.log));
    this.beyond.hidden = true;
    this.entries.forEach((entry, index) => entry.setAttribute("aria-pressed", String(this.shown.includes(this.curves[index]))));
    const series = [{}], bands = [], factor = this.curves[0].unit.factor ?? 1;
    this.curves.forEach((curve, index) => {
      const stroke = () => color(this.lineOf(index)), dash = this.dashOf(curve);
      // With smoothing, the smoothed line is the strong one and the mean is pale behind it.
      const meanStroke = () => (this.isSmoothed(curve) ? pale(stroke(), 0.35) : stroke()), show = this.shown.includes(curve);
      series.push({ show, stroke: meanStroke, width: 1.6, dash, points: { show: isSparse(curve), size: 5, fill: stroke } });
      series.push({ show, stroke, width: 2, dash, points: { show: false } });
      if (!curve.exact) addBand(series, show ? bands : [], stroke, 0.22, show);
    });
    this.drawChart(this.height, {
      series, bands,
      scales: {
        x: { time: false, range: () => view.range },
        y: this.log ? { distr: 3, range: logRange } : { range: () => this.linearRange() },
      },
      axes: [
        { ...NAMED_AXIS, label: axis.label, values: (u, values) => values.map((v) => (Number.isInteger(v) || axis.name !== "step" ? tick(v) : "")) },
        { ...(this.log ? LOG_AXIS : {}), size: 58, gap: 4, values: (u, values) => values.map((v) => (v === null ? null : tick(v * factor))) },
      ],
      cursor: {
        y: false, drag: { x: true, y: false, setScale: false, dist: 5 }, points: { size: 7, width: 1.5 },
        bind: { mouseleave: () => null, dblclick: () => () => (view.zoom(null), null) },
      },
      hooks: {
        setSelect: [(u) => {
          if (u.select.width < 3) return;
          const from = u.posToVal(u.select.left, "x"), to = u.posToVal(u.select.left + u.select.width, "x");
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          view.zoom([from, to]);
        }],
        setCursor: [(u) => {
          if (!(u.cursor.left >= 0)) return;
          this.isPointed = true; // its own cursor stays under the mouse, also while a range is dragged
          view.moveTo(asPlace(u.posToVal(u.cursor.left, "x")), this);
          this.isPointed = false;
        }],
        draw: [(u) => this.drawMarks(u)],
      },
    }, this.makeData());
    this.chart.over.append(this.tip);
  }

  /** Show the values at the cursor, or the last ones, and place the cursor line. */
  showStep() {
    const { step } = view;
    this.listed.forEach((curve, index) => {
      const place = view.placeIn(curve);
      this.values[index].textContent = place < 0 ? "–" : `${step === null ? "last " : ""}${curve.text(place)}`;
    });
    if (!this.chart) return;
    const left = step === null ? -10 : this.chart.valToPos(step, "x");
    // The hook must not fire: moving the cursor here would move it again everywhere.
    if (!this.isPointed) this.chart.setCursor({ left: left >= 0 && left <= this.chart.over.clientWidth ? left : -10, top: 10 }, false);
    this.showTip(left);
  }

  /** Name the step of the cursor and the events next to it; of many plots only in the one under the mouse. */
  showTip(left) {
    this.tip.hidden = left < 0 || (view.pointed !== null && view.pointed !== this);
    if (this.tip.hidden) return;
    const near = marks().filter((event) => Math.abs(this.chart.valToPos(event.run.at(event.step), "x") - left) <= 5);
    const [curve] = this.shown, step = axis.name !== "step" && !several && curve ? ` · step ${number(curve.steps[view.placeIn(curve)])}` : "";
    const lines = [el("div", {}, axis.text(view.step) + step)];
    lines.push(...near.slice(0, 4).map((event) => el("div", {}, short(`${several ? event.run.name + ": " : ""}${words(event.kind)}, step ${number(event.step)}`, 70))));
    if (near.length > 4) lines.push(el("div", {}, `and ${near.length - 4} more`));
    this.tip.replaceChildren(...lines);
    const right = left > this.chart.over.clientWidth / 2;
    this.tip.style.left = right ? "" : `${left + 8}px`;
    this.tip.style.right = right ? `${this.chart.over.clientWidth - left + 8}px` : "";
  }

  /** Draw the events: checkpoints as ticks on the axis, everything else with its sign at the top and as lines. */
  drawMarks(u) {
    const { ctx } = u, { left, top, width, height } = u.bbox, ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left - 6 * ratio, top - 8 * ratio, width + 12 * ratio, height + 8 * ratio);
    ctx.clip();
    for (const [mark, events] of groupBy(marks(), markOf)) {
      const xs = events.map(({ run, step }) => Math.round(u.valToPos(run.at(step), "x", true))).filter((x) => x >= left - 2 && x <= left + width + 2);
      const { places, lines } = placeMarks(mark, xs, width, ratio);
      const look = markLook(mark);
      ctx.strokeStyle = ctx.fillStyle = color(look.color);
      ctx.lineWidth = ratio;
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      ctx.textAlign = "center";
      for (const x of places) {
        if (mark === "checkpoint") drawLine(ctx, x + 0.5, top + height - 7 * ratio, x + 0.5, top + height);
        else ctx.fillText(look.sign, x, top + 2 * ratio);
      }
      ctx.setLineDash([3 * ratio, 3 * ratio]);
      for (const x of lines) drawLine(ctx, x + 0.5, top, x + 0.5, top + height);
      ctx.setLineDash([]);
    }
    for (const curve of this.shown) {
      if (!curve.data.non_finite) continue;
      const x = u.valToPos(curve.run.at(curve.data.non_finite[0]), "x", true);
      ctx.fillStyle = color("nan");
      ctx.fillRect(x - 2 * ratio, top, 4 * ratio, 10 * ratio);
    }
    if (this.isMain) for (const run of runs) this.drawCause(u, run);
    ctx.restore();
  }

  /** Draw the step of what a verdict is about, with what came first; its card keeps the text apart from the lines. */
  drawCause(u, run) {
    const { health, step } = run.data.verdict, { ctx } = u, { left, top, width, height } = u.bbox, ratio = devicePixelRatio;
    if (step === null || health === "healthy" || view.hidden.has(run)) return;
    const x = u.valToPos(run.at(step), "x", true), isRight = x > left + width / 2, [worst] = run.alerts;
    if (x < left || x > left + width) return;
    ctx.strokeStyle = several ? lineColor(run.index) : color(health === "broken" ? "error" : "warning");
    ctx.lineWidth = 2 * ratio;
    drawLine(ctx, x, top, x, top + height);
    ctx.font = `600 ${12 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = isRight ? "right" : "left";
    const room = clamp(Math.floor((isRight ? x - left : left + width - x) / (7 * ratio)), 8, 70), y = top + (42 + 18 * run.index) * ratio; // below the step of the cursor
    const text = short((worst.parts[0] ?? worst).text, room), wide = ctx.measureText(text).width;
    ctx.fillStyle = pale(color("card"), 0.85);
    ctx.fillRect(x + (isRight ? -10 * ratio - wide : 2 * ratio), y - 13 * ratio, wide + 8 * ratio, 17 * ratio);
    ctx.fillStyle = ctx.strokeStyle;
    ctx.fillText(text, x + (isRight ? -6 : 6) * ratio, y);
  }
}

const eventsWithStep = runs.flatMap((run) => run.events).filter(({ step }) => typeof step === "number");
/** Return the events that have a step and are not hidden. */
export const marks = () => eventsWithStep.filter((event) => !view.hiddenMarks.has(markOf(event)));

/** Return where the events of a kind are marked, and which of these marks have a line over the plot; all in pixels. */
export function placeMarks(mark, xs, width, ratio) {
  const places = [];
  for (const x of xs.sort((a, b) => a - b)) if (!places.length || x - places.at(-1) >= 10 * ratio) places.push(x);
  // Many lines of one kind would hide the curve: only the first one is drawn.
  const lines = mark === "checkpoint" ? [] : places.length > width / ratio / 60 ? places.slice(0, 1) : places;
  return { places, lines };
}

export function drawLine(ctx, fromX, fromY, toX, toY) {
  ctx.stroke(new Path2D(`M ${fromX} ${fromY} L ${toX} ${toY}`));
}

// ---- axes -------------------------------------------------------------------------------------------------------------

export const NAMED_AXIS = { size: 22, labelSize: 16, labelGap: 2, gap: 2 };

/** Return the least of 1, 2 and 5, times a power of ten, that is not below a value. */
export function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((n) => n * power >= value) * power;
}

/** Return the values that have a line and a number on a log axis: decades if it has several, otherwise round numbers, as
 * many as there is room for. uPlot would have nine in each decade, and numbers beyond the ends. */
export function logSplits(u, _, min, max) {
  const most = Math.max(Math.floor(u.bbox.height / devicePixelRatio / 20), 2), count = Math.log10(max / min);
  const multiples = (unit, from, to) => {
    const first = Math.ceil(from / unit - 1e-9), last = Math.floor(to / unit + 1e-9);
    return Array.from({ length: Math.max(last - first + 1, 0) }, (_, index) => (first + index) * unit);
  };
  const exact = (value) => Number(value.toPrecision(12));
  if (count > 1.7) return multiples(Math.ceil(count / most), Math.log10(min), Math.log10(max)).map((power) => exact(10 ** power));
  if (count > 0.8) {
    const powers = [0, 1, 2, 3].map((more) => 10 ** (Math.floor(Math.log10(min)) + more));
    return powers.flatMap((power) => [power, 2 * power, 5 * power].map(exact)).filter((value) => value >= min && value <= max);
  }
  // The highest two numbers are the closest ones.
  return multiples(roundUp(max * (1 - (max / min) ** (-1 / most))), min, max).map(exact);
}
export const LOG_AXIS = { splits: logSplits, filter: (u, splits) => splits };

/** Return the range of a log axis: whole decades if there are several. */
export function logRange(u, low, high) {
  if (!(low > 0) || !Number.isFinite(high)) return [0.1, 10];
  if (low === high) return [low / 2, high * 2];
  return high / low > 30 ? uPlot.rangeLog(low, high, 10, true) : [low / (high / low) ** 0.06, high * (high / low) ** 0.06];
}

/** Return the range of a linear axis: what is drawn and a little more; a constant is in the middle. */
export function yRange(low, high) {
  if (low === null || high === null || !Number.isFinite(low)) return [0, 1];
  if (low === high) return low === 0 ? [-1, 1] : [low - Math.abs(low) * 0.1, low + Math.abs(low) * 0.1];
  const more = (high - low) * 0.06;
  return [low >= 0 && low - more < 0 ? 0 : low - more, high + more];
}

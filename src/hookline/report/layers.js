// Statistics per layer: heat maps of layer × step on a canvas, histograms over time, the gradient flow at a step.

import { axis, firstAtLeast, nearest, several } from "./data.js";
import { clamp, el, named, number, plural, short, tick } from "./format.js";
import {
  FONT, LOG_AXIS, NAMED_AXIS, Plot, addBand, asPlace, color, drawLine, lineColor, lineName, logRange, pale, rgb, roundUp, swatch, usable, view,
} from "./plots.js";

// Viridis and a blue–orange pair: both keep their order in gray and for color-blind readers.
const SEQUENTIAL = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"];
const DIVERGING = ["#0b4f8a", "#3d86bd", "#8fbfdc", "#d5e5ee", "#f4f1ec", "#f6d9bd", "#eda66a", "#cf6a1d", "#8a3d05"];

/** Return the color between two, each as [r, g, b]. */
const mixed = (from, to, share) => from.map((value, channel) => Math.round(value + (to[channel] - value) * share));

/** Return 256 opaque colors as [r, g, b, a] between the given ones. */
export function ramp(stops) {
  return Array.from({ length: 256 }, (_, index) => {
    const place = (index / 255) * (stops.length - 1), low = Math.min(Math.floor(place), stops.length - 2);
    return [...mixed(stops[low], stops[low + 1], place - low), 255];
  });
}
const RAMPS = { sequential: ramp(SEQUENTIAL.map(rgb)), diverging: ramp(DIVERGING.map(rgb)) };

/** A scale from values to 0 … 1 that suits them: linear or log, from the least to the greatest or around 0. */
export class ColorScale {
  constructor(values) {
    const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
    const least = sorted[0] ?? 0, greatest = sorted.at(-1) ?? 1;
    this.signed = least < 0 && greatest > 0;
    this.ramp = this.signed ? RAMPS.diverging : RAMPS.sequential;
    const sizes = least < 0 ? sorted.map(Math.abs).sort((a, b) => a - b) : sorted;
    const positive = sizes.slice(firstAtLeast(sizes, Number.MIN_VALUE));
    // A few values that are smaller than the rest by many decades would take most of a log scale: it begins where 2 % are
    // below. So does one around 0, because values that change their sign come near to 0 by chance.
    const usual = positive[Math.floor(positive.length * 0.02)] ?? 1, large = positive.at(-1) ?? 1;
    const small = this.signed || positive[0] < usual * 1e-4 ? usual : positive[0] ?? 1;
    this.log = (least >= 0 || this.signed) && large / (positive[Math.floor(positive.length / 2)] ?? 1) > 20;
    if (this.log) Object.assign(this, { small, large, hasBelow: sizes[0] < small });
    else if (this.signed) Object.assign(this, { low: -large, high: large });
    else Object.assign(this, { low: least, high: greatest });
  }
  /** Return the place of a value between 0 and 1. */
  place(value) {
    if (!this.log) return this.high > this.low ? (value - this.low) / (this.high - this.low) : 0.5;
    const size = Math.abs(value) <= this.small ? 0 : Math.log(Math.abs(value) / this.small) / Math.log(this.large / this.small);
    return this.signed ? 0.5 + (Math.sign(value) * size) / 2 : size;
  }
  /** Return the value at a place, for the legend. */
  value(place) {
    if (!this.log) return this.low + place * (this.high - this.low);
    if (!this.signed) return this.small * (this.large / this.small) ** place;
    const size = Math.abs(place - 0.5) * 2;
    return size === 0 ? 0 : Math.sign(place - 0.5) * this.small * (this.large / this.small) ** size;
  }
  color(value) {
    return this.ramp[clamp(Math.round(this.place(value) * 255), 0, 255)];
  }
}

const TOP = 6, AXIS_HEIGHT = 34;

/** A canvas of rows × steps with names at the left and steps below, of the table of one run, with a choice of what is
 * shown of it; subclasses say what a cell holds. */
class Grid extends Plot {
  constructor(name, tables, kind, keys, choice) {
    const canvas = el("canvas"), readout = el("output", { class: "readout", "aria-live": "polite" });
    const select = el("select", { "aria-label": choice }), run = several ? el("select", { "aria-label": "Run" }) : null;
    const figure = el("figure", { class: "card wide", tabindex: "0", "aria-label": `${kind} ${short(name, 200)}; arrow keys move over ${keys}` },
      el("figcaption", {}, named("h4", name), run, el("label", {}, `${choice.toLowerCase()} `, select)), readout);
    super(figure, el("div", { class: "heat" }, canvas));
    Object.assign(this, { table: tables[0], canvas, readout, select, row: null, rows: [], timed: tables[0] });
    run?.append(...tables.map((table, index) => el("option", { value: index }, short(table.run.name, 40))));
    run?.addEventListener("change", () => {
      this.table = tables[Number(run.value)];
      this.fillChoices();
      this.draw();
    });
    select.addEventListener("change", () => this.draw());
    this.fillChoices();
    canvas.addEventListener("mousemove", (event) => this.point(event));
    canvas.addEventListener("mousedown", (event) => (this.pressed = this.stepAt(event.offsetX)));
    canvas.addEventListener("mouseup", (event) => {
      const to = this.stepAt(event.offsetX), from = this.pressed ?? to;
      this.pressed = null;
      if (Math.abs(this.x(to) - this.x(from)) > 5) view.zoom([Math.min(from, to), Math.max(from, to)]);
    });
    canvas.addEventListener("dblclick", () => view.zoom(null));
  }

  /** The place of what is chosen, in the table. */
  get chosen() { return Number(this.select.value); }

  /** Offer the names at some places, and choose the one that was chosen before, or else the first of the preferred ones. */
  offer(names, places, preferred = []) {
    const before = this.select.selectedOptions[0]?.textContent, texts = places.map((place) => short(names[place], 60));
    this.select.replaceChildren(...places.map((place, index) => el("option", { value: place }, texts[index])));
    this.select.selectedIndex = [before, ...preferred].map((text) => texts.indexOf(text)).find((index) => index >= 0) ?? 0;
  }

  /** Return the place of the cursor among steps; by default the last one before a run was not finite. */
  placeIn(timed) { return view.placeIn(timed, this.table.run.data.last_finite); }
  x(step) { return this.left + ((step - view.range[0]) / (view.range[1] - view.range[0])) * this.width; }
  stepAt(x) { return view.range[0] + (clamp(x - this.left, 0, this.width) / this.width) * (view.range[1] - view.range[0]); }

  point(event) {
    const place = Math.floor((event.offsetY - TOP) / this.rowHeight);
    if (place >= 0 && place < this.rows.length) this.row = place;
    view.moveTo(asPlace(this.stepAt(event.offsetX)), this);
  }

  key(key, jump) {
    const rows = { ArrowUp: (this.row ?? 0) - jump, ArrowDown: (this.row ?? -1) + jump };
    if (!Object.hasOwn(rows, key) || !this.rows.length) return super.key(key, jump);
    this.row = clamp(rows[key], 0, this.rows.length - 1);
    view.moveTo(view.step ?? this.timed.at[this.placeIn(this.timed)]);
    return true;
  }

  /** Draw names, cells and the axis of steps. */
  paint(total) {
    this.prepare();
    const ratio = devicePixelRatio, count = this.rows.length, { canvas } = this;
    this.left = Math.round(Math.min(total < 500 ? total * 0.36 : 230, total * 0.45));
    this.width = Math.max(total - this.left - 12, 10);
    this.rowHeight = this.heightOfRows(count);
    const height = TOP + Math.max(count * this.rowHeight, 20) + AXIS_HEIGHT;
    canvas.width = total * ratio;
    canvas.height = height * ratio;
    canvas.style.width = `${total}px`;
    canvas.style.height = `${height}px`;
    this.drawn = new OffscreenCanvas(canvas.width, canvas.height); // what the cursor is drawn over
    const ctx = this.drawn.getContext("2d");
    ctx.scale(ratio, ratio);
    ctx.font = FONT;
    if (count && this.timed.at.length) this.drawCells(ctx, ratio);
    this.drawNames(ctx);
    this.drawAxis(ctx, height - AXIS_HEIGHT);
  }

  showStep() {
    if (!this.drawn) return;
    this.drawCursor();
    this.showValue();
  }

  /** Draw one pixel column after the other, each with the bucket of its step; of several buckets the farthest from 0. */
  drawCells(ctx, ratio) {
    const columns = Math.max(Math.round(this.width * ratio), 1), count = this.rows.length;
    const image = new ImageData(columns, count), bad = [...rgb(color("nan")), 255];
    const spans = new Map(); // by the steps at which layers were measured
    for (let row = 0; row < count; row++) {
      const timed = this.measured(this.rows[row]), { places } = timed;
      if (!spans.has(timed)) spans.set(timed, spansOf(timed, columns));
      spans.get(timed).forEach(([first, last], column) => {
        let chosen = NaN, there = false, wrong = false;
        for (let index = first; index < last; index++) {
          const value = this.cell(places[index], this.rows[row]);
          if (value === undefined) continue; // nothing was recorded
          if (!Number.isFinite(value)) wrong = true;
          else if (!there || Math.abs(value) > Math.abs(chosen)) chosen = value;
          there = true;
        }
        if (there) image.data.set(wrong ? bad : this.scale.color(chosen), 4 * (row * columns + column));
      });
    }
    const small = new OffscreenCanvas(columns, count);
    small.getContext("2d").putImageData(image, 0, 0);
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(small, 0, 0, columns, count, this.left, TOP, this.width, count * this.rowHeight);
  }

  /** Draw as many names as fit under each other. */
  drawNames(ctx, space) {
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    const every = Math.ceil(space / this.rowHeight);
    for (let row = 0; row < this.rows.length; row += every) {
      ctx.fillText(fitText(ctx, this.nameOf(this.rows[row]), this.left - 10), this.left - 6, TOP + (row + 0.5) * this.rowHeight);
    }
  }

  drawAxis(ctx, top) {
    ctx.font = FONT;
    ctx.fillStyle = color("muted");
    ctx.strokeStyle = color("grid");
    ctx.textBaseline = "top";
    const unit = Math.max(roundUp((view.range[1] - view.range[0]) / Math.max(Math.floor(this.width / 80), 2)), axis.name === "step" ? 1 : 0);
    for (let step = Math.ceil(view.range[0] / unit) * unit; step <= view.range[1]; step += unit) {
      const x = this.x(step), text = tick(step), half = ctx.measureText(text).width / 2;
      drawLine(ctx, x, top, x, top + 4);
      ctx.textAlign = x + half > this.left + this.width + 12 ? "right" : "center";
      ctx.fillText(text, x, top + 6);
    }
    ctx.textAlign = "center";
    ctx.fillText(axis.label, this.left + this.width / 2, top + 20);
  }

  drawCursor() {
    const ctx = this.canvas.getContext("2d"), { step, range } = view;
    ctx.setTransform(1, 0, 0, 1, 0, 0);
    ctx.clearRect(0, 0, this.canvas.width, this.canvas.height);
    ctx.drawImage(this.drawn, 0, 0);
    ctx.scale(devicePixelRatio, devicePixelRatio);
    ctx.strokeStyle = color("text");
    ctx.lineWidth = 1;
    if (step !== null && step >= range[0] && step <= range[1]) {
      ctx.setLineDash([4, 3]);
      drawLine(ctx, this.x(step), TOP, this.x(step), TOP + this.rows.length * this.rowHeight);
      ctx.setLineDash([]);
    }
    if (this.row !== null && this.row < this.rows.length) {
      ctx.strokeRect(this.left - 0.5, TOP + this.row * this.rowHeight + 0.5, this.width + 1, this.rowHeight - 1);
    }
  }
}

/** Return for each pixel column the first and the last bucket that it shows. */
export function spansOf({ at, steps }, columns) {
  const [left, right] = view.range, perPixel = (right - left) / columns, last = at.length - 1;
  const [gap, stepGap] = [at, steps].map((places) => (last > 0 ? (places[last] - places[0]) / last : right - left));
  // On an axis of time steps have different widths; between two that follow each other there is no gap.
  const follows = (place, next) => next >= 0 && next <= last && Math.abs(steps[next] - steps[place]) <= 1.5 * stepGap;
  return Array.from({ length: columns }, (_, column) => {
    const from = left + column * perPixel, to = from + perPixel, middle = (from + to) / 2;
    // A bucket is drawn around its step, so that what was recorded every 100 steps fills the 100 steps.
    const within = perPixel >= gap ? [firstAtLeast(at, from - gap / 2), firstAtLeast(at, to + gap / 2)] : [0, 0];
    if (within[0] < within[1]) return within;
    const first = nearest(at, middle);
    const isNear = first >= 0 && (Math.abs(at[first] - middle) <= gap * 0.75 || follows(first, middle < at[first] ? first - 1 : first + 1));
    return isNear ? [first, first + 1] : [0, 0];
  });
}

const fitted = new Map();
/** Return a name that fits into a width, cut in the middle. */
function fitText(ctx, text, width) {
  const key = `${ctx.font}|${width}|${text.slice(0, 300)}|${text.length}`;
  if (!fitted.has(key)) {
    let most = 120, cut = short(text, most);
    while (most > 4 && ctx.measureText(cut).width > width) cut = short(text, (most = Math.min(most - 1, cut.length - 1)));
    fitted.set(key, cut);
  }
  return fitted.get(key);
}

/** The heat map of one statistic of a series, layer × step. */
export class HeatMap extends Grid {
  constructor(name, tables) {
    super(name, tables, "Heat map", "layers and steps", "Statistic");
    this.legend = el("div", { class: "scale" });
    this.figure.append(el("div", { class: "scroll" }, this.element), this.legend);
  }

  fillChoices() {
    const { columns } = this.table;
    this.offer(columns, [...columns.keys()], ["norm", "std", "absmax"]);
  }

  prepare() {
    const { names, steps, run } = this.table, key = `${run.index}/${this.chosen}`;
    this.timed = this.table;
    this.rows = view.matching(names);
    if (this.row !== null && this.row >= this.rows.length) this.row = null;
    if (this.scaleKey === key) return;
    this.scaleKey = key;
    const values = [...steps.keys()].flatMap((step) => names.map((_, row) => this.cell(step, row)));
    this.scale = new ColorScale(values);
    this.drawLegend(values.some((value) => value !== undefined && !Number.isFinite(value)));
  }

  heightOfRows(count) { return clamp(Math.floor(500 / count), 2, 16); } // all rows at once, of up to 250 layers
  measured(row) { return this.table.measured(row, this.chosen); }
  cell(place, row) { return this.table.cell(place, row, this.chosen); }
  nameOf(row) { return this.table.names[row]; }
  drawNames(ctx) {
    ctx.fillStyle = color("text");
    ctx.font = this.rowHeight < 14 ? FONT.replace("12px", "10px") : FONT;
    super.drawNames(ctx, 12);
  }

  /** Select a layer and a statistic, for a link from an alert. */
  choose(name, column) {
    const { columns, names } = this.table;
    if (columns.includes(column)) this.select.value = String(columns.indexOf(column));
    const row = view.matching(names).indexOf(names.indexOf(name));
    this.row = row < 0 ? null : row;
    this.draw();
  }

  showValue() {
    const row = this.rows[this.row], { names, columns, steps } = this.table, timed = row === undefined ? { steps: [], at: [] } : this.measured(row);
    const place = this.placeIn(timed);
    this.readout.textContent = !timed.steps.length
      ? `${plural(this.rows.length, "layer")}, ${plural(steps.length, "step")}; point at a cell for its value`
      : `${short(names[row], 70)} · step ${number(timed.steps[place])} · ${short(columns[this.chosen], 30)} ${number(this.cell(timed.places[place], row))}`;
  }

  drawLegend(hasBad) {
    const bar = el("canvas", { width: 256, height: 1, class: "ramp", "aria-hidden": "true" }), ctx = bar.getContext("2d");
    const image = ctx.createImageData(256, 1);
    this.scale.ramp.forEach((shade, index) => image.data.set(shade, 4 * index));
    ctx.putImageData(image, 0, 0);
    const { log, signed, small, hasBelow } = this.scale, rounded = (value) => tick(Number(value.toPrecision(3)));
    const texts = [0, 0.25, 0.5, 0.75, 1].map((place) => rounded(this.scale.value(place)));
    if (hasBelow && !signed) texts[0] = `≤ ${texts[0]}`;
    const ticks = el("div", { class: "ticks" }, ...texts.map((text) => el("span", {}, text)));
    const note = !log ? "linear scale" : signed ? `log on both sides of 0, from ±${rounded(small)}` : "log scale";
    this.legend.replaceChildren(el("div", { class: "bar" }, bar, ticks), el("span", { class: "note" }, note),
      ...(hasBad ? [el("span", { class: "note" }, swatch("nan", "box"), "NaN or infinity")] : []));
  }
}

/** Histograms of one layer over time: bins × steps, and the histogram at the step of the cursor. */
export class HistogramPlot extends Grid {
  constructor(name, tables) {
    super(name, tables, "Histograms", "steps", "Layer");
    Object.assign(this, { bars: el("div", { class: "plot" }), scale: new ColorScale([0, 255]) });
    this.figure.append(el("div", { class: "two" }, this.element, this.bars));
  }

  fillChoices() {
    this.offer(this.table.names, view.matching(this.table.names));
    this.filledFor = view.find;
  }

  prepare() {
    if (this.filledFor !== view.find) this.fillChoices();
    this.timed = this.table.measured(this.chosen);
    const line = rgb(lineColor(0)), isUsed = (bin) => this.timed.places.some((place) => this.cell(place, bin));
    this.scale.ramp = ramp([mixed(rgb(color("card")), line, 0.12), line]);
    // From the greatest value at the top to the least; a row of null stands for bins that are empty at every step.
    this.rows = [];
    for (let bin = this.table.bins - 1; bin >= 0; bin--) {
      if (isUsed(bin)) this.rows.push(bin);
      else if (this.rows.length && this.rows.at(-1) !== null) this.rows.push(null);
    }
    if (this.rows.at(-1) === null) this.rows.pop();
  }

  heightOfRows(count) { return clamp(Math.floor(240 / Math.max(count, 1)), 2, 12); }
  measured() { return this.timed; }
  cell(place, bin) { return bin === null ? undefined : this.table.count(place, this.chosen, bin) || undefined; }
  nameOf(bin) { return bin === null ? "…" : this.table.label(this.chosen, bin); }
  drawNames(ctx) {
    ctx.fillStyle = color("muted");
    super.drawNames(ctx, 18);
    ctx.save();
    ctx.translate(10, TOP + (this.rows.length * this.rowHeight) / 2);
    ctx.rotate(-Math.PI / 2);
    ctx.textAlign = "center";
    ctx.fillText("value", 0, 0);
    ctx.restore();
  }

  showValue() {
    if (!this.timed.steps.length || !this.rows.length) {
      this.readout.textContent = "no values";
      return;
    }
    const place = this.placeIn(this.timed);
    this.readout.textContent = `${short(this.table.names[this.chosen], 70)} · histogram at step ${number(this.timed.steps[place])}, as a share of its fullest bin`;
    this.drawBars(this.timed.places[place]);
  }

  /** Draw the histogram of one step. */
  drawBars(place) {
    const bins = [...this.rows].reverse(), width = this.bars.clientWidth;
    const data = [[...bins.keys()], bins.map((bin) => (100 * (this.cell(place, bin) ?? 0)) / 255)];
    const key = [this.table.run.index, this.chosen, width, color("text"), bins.length].join();
    if (this.barsKey === key) return this.chart.setData(data);
    this.barsKey = key;
    this.drawChart(260, {
      cursor: { show: false },
      scales: { x: { time: false, range: () => [-0.5, bins.length - 0.5] }, y: { range: () => [0, 105] } },
      series: [{}, { stroke: () => lineColor(0), fill: () => pale(lineColor(0), 0.35), paths: uPlot.paths.bars({ size: [1, 40], gap: 0 }), points: { show: false } }],
      axes: [
        { ...NAMED_AXIS, label: "value", space: 55, values: (u, values) => values.map((v) => (v in bins ? this.nameOf(bins[v]) : "")) },
        { size: 50, values: (u, values) => values.map((v) => `${v} %`) },
      ],
    }, data, this.bars);
  }
}

/** The size of each layer's gradient in the model's order, at the step of the cursor; where it falls, training stops. */
export class GradientFlow extends Plot {
  constructor(tables) {
    const { steps, names } = tables[0];
    const slider = el("input", { type: "range", min: 0, max: Math.max(steps.length - 1, 0), value: 0, "aria-label": "Step" }), shown = el("output", {});
    const body = el("div", { class: "plot" }), legend = el("ul", { class: "legend" }), readout = el("output", { class: "readout" });
    const figure = el("figure", { class: "card wide", tabindex: "0", "aria-label": "Gradient flow; arrow keys move over steps" },
      el("figcaption", {}, el("h4", {}, "Gradient norm per layer"), el("label", { class: "slide" }, "step ", slider, shown)), readout, body, legend);
    super(figure, body);
    Object.assign(this, { tables, timed: tables[0], steps, names, slider, shown, legend, readout });
    slider.addEventListener("input", () => view.moveTo(this.timed.at[Number(slider.value)]));
    legend.append(...(several
      ? tables.map(({ run }) => el("li", {}, swatch(lineName(run.index)), named("span", run.name, 40)))
      : [el("li", {}, swatch("line-0"), "at this step"), el("li", {}, swatch("line-0", "box band"), "least to greatest over all steps")]));
  }

  /** Return the layers' numbers and, for each run, the norms at the step; of a single run, too, the least and the greatest
   * norms over all steps. */
  makeData() {
    const norm = (table, step, row) => usable(table.value(step, row, Math.max(table.columns.indexOf("norm"), 0)), true);
    const columns = this.tables.map((table) => this.rows.map((place) => {
      const row = table.names.indexOf(this.names[place]);
      if (row < 0) return null;
      const measured = table.measured(row, Math.max(table.columns.indexOf("norm"), 0));
      return measured.steps.length ? norm(table, measured.places[view.placeIn(measured, table.run.data.last_finite)], row) : null;
    }));
    if (several) return [[...this.rows.keys()], ...columns];
    this.extremes ??= this.names.map((_, row) => {
      const values = Array.from(this.steps, (_, step) => norm(this.tables[0], step, row)).filter((value) => value !== null);
      return values.length ? [Math.min(...values), Math.max(...values)] : [null, null];
    });
    return [[...this.rows.keys()], ...columns, ...[0, 1].map((end) => this.rows.map((row) => this.extremes[row][end]))];
  }

  showRange() {}
  showStep() {
    const places = this.tables.map((table) => view.placeIn(table, table.run.data.last_finite));
    this.slider.value = String(places[0]);
    const steps = this.tables.map((table, index) => number(table.steps[places[index]]));
    this.shown.textContent = [...new Set(steps)].join(", ");
    this.chart?.setData(this.makeData(), false);
    this.chart?.redraw();
  }

  paint(width) {
    this.rows = view.matching(this.names);
    const data = this.makeData(), count = this.rows.length, names = this.rows.map((row) => this.names[row]);
    const room = Math.min(30 + 6 * Math.max(...names.map((name) => name.length)), 165), series = [{}], bands = [];
    this.tables.forEach(({ run }) => {
      const stroke = () => lineColor(several ? run.index : 0);
      series.push({ stroke, width: 1.8, points: { show: count <= 120, size: 6, fill: stroke } });
      if (!several) addBand(series, bands, stroke, 0.15);
    });
    const most = Math.max(Math.floor((width - 70) / 16), 2), every = Math.ceil(count / most);
    this.drawChart(215 + room, {
      series, bands,
      scales: {
        x: { time: false, range: () => [-0.5, count - 0.5] },
        y: { distr: 3, range: logRange },
      },
      axes: [
        { size: room, rotate: -90, gap: 6, splits: () => data[0].filter((place) => place % every === 0), values: (u, places) => places.map((place) => short(names[place] ?? "", 22)) },
        { ...LOG_AXIS, size: 62, values: (u, values) => values.map((v) => (v === null ? null : tick(v))) },
      ],
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
      hooks: { setCursor: [(u) => {
        const place = u.cursor.idx, shown = this.tables.map((_, index) => number(u.data[index + 1][place]));
        this.readout.textContent = place === null || place === undefined ? "" : `${short(names[place], 70)} · ${shown.join(", ")}`;
      }] },
    }, data);
  }
}

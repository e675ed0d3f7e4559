// Statistics per layer: heat maps of layer × step on a canvas, the gradient flow at a step, histograms over time.

// Viridis and a blue–orange pair: both keep their order in grey and for colour-blind readers.
const SEQUENTIAL = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"];
const DIVERGING = ["#0b4f8a", "#3d86bd", "#8fbfdc", "#d5e5ee", "#f4f1ec", "#f6d9bd", "#eda66a", "#cf6a1d", "#8a3d05"];

/** Return 256 colours as [r, g, b] between the given ones. */
function ramp(stops) {
  const parsed = stops.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  return Array.from({ length: 256 }, (_, index) => {
    const place = (index / 255) * (stops.length - 1), low = Math.min(Math.floor(place), stops.length - 2);
    return parsed[low].map((value, channel) => Math.round(value + (parsed[low + 1][channel] - value) * (place - low)));
  });
}
const RAMPS = { sequential: ramp(SEQUENTIAL), diverging: ramp(DIVERGING) };

/** A scale from values to 0 … 1 that suits them: linear or log, from the least to the greatest or around 0. */
class ColourScale {
  constructor(values) {
    const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
    const least = sorted[0] ?? 0, greatest = sorted[sorted.length - 1] ?? 1;
    this.signed = least < 0 && greatest > 0;
    this.ramp = this.signed ? RAMPS.diverging : RAMPS.sequential;
    const sizes = this.signed || least < 0 ? sorted.map(Math.abs).sort((a, b) => a - b) : sorted;
    const positive = sizes.slice(firstAtLeast(sizes, Number.MIN_VALUE));
    // A few values that are smaller than the rest by many decades would take most of a log scale: it begins where 2 % are
    // below. So does one around 0, because values that change their sign come near to 0 by chance.
    const usual = positive[Math.floor(positive.length * 0.02)] ?? 1, large = positive[positive.length - 1] ?? 1;
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
  colour(value) {
    return this.ramp[Math.max(0, Math.min(255, Math.round(this.place(value) * 255)))];
  }
}

/** Return a colour between two, as text. */
function mixed(from, to, share) {
  const [a, b] = [from, to].map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  return `#${a.map((value, channel) => Math.round(value + (b[channel] - value) * share).toString(16).padStart(2, "0")).join("")}`;
}

const NAN_COLOUR = () => colour("nan").slice(1).match(/../g).map((hex) => parseInt(hex, 16));

/** A canvas of rows × steps with names at the left and steps below; subclasses say what a cell holds. */
class Grid extends Plot {
  constructor(figure, element) {
    super(element);
    this.canvas = el("canvas");
    element.append(this.canvas);
    Object.assign(this, { figure, row: null, top: 6, axisHeight: 34 });
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("mousedown", (event) => (this.pressed = this.stepAt(event.offsetX)));
    this.canvas.addEventListener("mouseup", (event) => {
      const to = this.stepAt(event.offsetX), from = this.pressed;
      this.pressed = null;
      if (from !== null && from !== undefined && Math.abs(this.x(to) - this.x(from)) > 5) view.zoom([Math.min(from, to), Math.max(from, to)]);
    });
    this.canvas.addEventListener("dblclick", () => view.zoom(null));
    figure.addEventListener("keydown", (event) => this.key(event));
  }

  changed(what) {
    if (what === "step") {
      this.drawCursor();
      this.showValue();
    } else if (!["smoothing", "log", "hiddenMarks"].includes(what)) this.draw();
  }

  x(step) { return this.left + ((step - view.range[0]) / (view.range[1] - view.range[0])) * this.width; }
  stepAt(x) { return view.range[0] + (Math.min(Math.max(x - this.left, 0), this.width) / this.width) * (view.range[1] - view.range[0]); }

  point(event) {
    const place = Math.floor((event.offsetY - this.top) / this.rowHeight);
    if (place >= 0 && place < this.rows.length) this.row = place;
    view.moveTo(Math.round(this.stepAt(event.offsetX)), this);
  }

  key(event) {
    if (event.target !== this.figure || !this.steps?.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const here = view.step === null ? this.steps.length - 1 : nearest(this.steps, view.step), jump = event.shiftKey ? 10 : 1;
    const places = { ArrowLeft: here - (view.step === null ? 0 : jump), ArrowRight: here + jump, Home: 0, End: this.steps.length - 1 };
    const rows = { ArrowUp: (this.row ?? 0) - jump, ArrowDown: (this.row ?? -1) + jump };
    if (event.key in places) view.moveTo(this.steps[Math.min(Math.max(places[event.key], 0), this.steps.length - 1)]);
    else if (event.key in rows && this.rows.length) {
      this.row = Math.min(Math.max(rows[event.key], 0), this.rows.length - 1);
      view.moveTo(view.step ?? this.steps[this.steps.length - 1]);
    } else return;
    event.preventDefault();
  }

  /** Draw names, cells and the axis of steps. */
  draw() {
    const total = this.element.clientWidth;
    if (!total) return;
    this.drawnWidth = total;
    this.stale = false;
    this.prepare();
    const ratio = devicePixelRatio, count = this.rows.length;
    this.left = Math.round(Math.min(total < 500 ? total * 0.36 : 230, total * 0.45));
    this.width = Math.max(total - this.left - 12, 10);
    this.rowHeight = this.heightOfRows(count);
    const height = this.top + Math.max(count * this.rowHeight, 20) + this.axisHeight;
    const { canvas } = this;
    canvas.width = total * ratio;
    canvas.height = height * ratio;
    this.drawn = new OffscreenCanvas(canvas.width, canvas.height); // what the cursor is drawn over
    const ctx = this.drawn.getContext("2d");
    canvas.style.width = `${total}px`;
    canvas.style.height = `${height}px`;
    ctx.scale(ratio, ratio);
    ctx.font = FONT;
    if (count && this.steps.length) this.drawCells(ctx, ratio);
    this.drawNames(ctx);
    this.drawAxis(ctx, height - this.axisHeight);
    this.drawCursor();
    this.showValue();
  }

  heightOfRows(count) { return count <= 40 ? 16 : count <= 100 ? 12 : 7; }

  /** Draw one pixel column after the other, each with the bucket of its step; of several buckets the farthest from 0. */
  drawCells(ctx, ratio) {
    const { steps } = this, columns = Math.max(Math.round(this.width * ratio), 1), count = this.rows.length;
    const image = new ImageData(columns, count), bad = NAN_COLOUR();
    const gap = steps.length > 1 ? (steps[steps.length - 1] - steps[0]) / (steps.length - 1) : allSteps[1] - allSteps[0];
    const perPixel = (view.range[1] - view.range[0]) / columns;
    for (let column = 0; column < columns; column++) {
      const from = view.range[0] + column * perPixel, to = from + perPixel;
      // A bucket is drawn around its step, so that what was recorded every 100 steps fills the 100 steps.
      let first = firstAtLeast(steps, from - gap / 2), last = firstAtLeast(steps, to + gap / 2);
      if (perPixel < gap) {
        first = nearest(steps, (from + to) / 2);
        if (Math.abs(steps[first] - (from + to) / 2) > gap * 0.75) continue;
        last = first + 1;
      }
      for (let row = 0; row < count; row++) {
        let chosen = NaN, there = false, wrong = false;
        for (let place = first; place < last; place++) {
          const value = this.cell(place, this.rows[row]);
          if (value === undefined) continue; // nothing was recorded
          if (!Number.isFinite(value)) wrong = true;
          else if (!there || Math.abs(value) > Math.abs(chosen)) chosen = value;
          there = true;
        }
        if (!there) continue;
        const [red, green, blue] = wrong ? bad : this.scale.colour(chosen), at = 4 * (row * columns + column);
        image.data[at] = red;
        image.data[at + 1] = green;
        image.data[at + 2] = blue;
        image.data[at + 3] = 255;
      }
    }
    const small = new OffscreenCanvas(columns, count);
    small.getContext("2d").putImageData(image, 0, 0);
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(small, 0, 0, columns, count, this.left, this.top, this.width, count * this.rowHeight);
  }

  drawNames(ctx) {
    ctx.fillStyle = colour("text");
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    ctx.font = this.rowHeight < 14 ? FONT.replace("12px", "10px") : FONT;
    const every = Math.ceil(12 / this.rowHeight);
    for (let row = 0; row < this.rows.length; row += every) {
      ctx.fillText(fitText(ctx, this.nameOf(this.rows[row]), this.left - 10), this.left - 6, this.top + (row + 0.5) * this.rowHeight);
    }
  }

  drawAxis(ctx, top) {
    ctx.font = FONT;
    ctx.fillStyle = colour("muted");
    ctx.strokeStyle = colour("grid");
    ctx.textBaseline = "top";
    const width = view.range[1] - view.range[0], most = Math.max(Math.floor(this.width / 80), 2);
    const unit = [1, 2, 5].flatMap((n) => [...Array(10).keys()].map((power) => n * 10 ** power)).sort((a, b) => a - b).find((n) => width / n <= most);
    for (let step = Math.ceil(view.range[0] / unit) * unit; step <= view.range[1]; step += unit) {
      const x = this.x(step), text = tick(step), half = ctx.measureText(text).width / 2;
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + 4);
      ctx.stroke();
      ctx.textAlign = x + half > this.left + this.width + 12 ? "right" : "center";
      ctx.fillText(text, x, top + 6);
    }
    ctx.textAlign = "center";
    ctx.fillText("step", this.left + this.width / 2, top + 20);
  }

  drawCursor() {
    if (!this.drawn) return;
    const ctx = this.canvas.getContext("2d");
    ctx.setTransform(1, 0, 0, 1, 0, 0);
    ctx.clearRect(0, 0, this.canvas.width, this.canvas.height);
    ctx.drawImage(this.drawn, 0, 0);
    ctx.scale(devicePixelRatio, devicePixelRatio);
    ctx.strokeStyle = colour("text");
    ctx.lineWidth = 1;
    if (view.step !== null && view.step >= view.range[0] && view.step <= view.range[1]) {
      ctx.setLineDash([4, 3]);
      ctx.beginPath();
      ctx.moveTo(this.x(view.step), this.top);
      ctx.lineTo(this.x(view.step), this.top + this.rows.length * this.rowHeight);
      ctx.stroke();
      ctx.setLineDash([]);
    }
    if (this.row !== null && this.row < this.rows.length) {
      ctx.strokeRect(this.left - 0.5, this.top + this.row * this.rowHeight + 0.5, this.width + 1, this.rowHeight - 1);
    }
  }
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
class HeatMap extends Grid {
  constructor(name, maps) {
    const value = el("output", { class: "readout", "aria-live": "polite" }), body = el("div", { class: "heat" });
    const legend = el("div", { class: "scale" });
    const column = el("select", { "aria-label": "Statistic" }), run = several ? runSelect(maps) : null;
    const figure = el("figure", { class: "card wide", tabindex: "0", "aria-label": `Heat map ${short(name, 200)}; arrow keys move over layers and steps` },
      el("figcaption", {}, named("h4", name), run, el("label", {}, "statistic ", column)), value, el("div", { class: "scroll" }, body), legend);
    super(figure, body);
    Object.assign(this, { name, maps, map: maps[0], readout: value, legend, column, steps: maps[0].steps, rows: [] });
    this.fillColumns();
    column.addEventListener("change", () => this.draw());
    run?.addEventListener("change", () => {
      this.map = maps[Number(run.value)];
      this.fillColumns();
      this.draw();
    });
  }

  fillColumns() {
    const before = this.column.selectedOptions[0]?.textContent;
    this.column.replaceChildren(...this.map.columns.map((name, index) => el("option", { value: index }, short(name, 40))));
    const wanted = [before, "norm", "std", "absmax"].map((name) => this.map.columns.indexOf(name)).find((index) => index >= 0);
    this.column.value = String(wanted ?? 0);
  }

  prepare() {
    this.steps = this.map.steps;
    const chosen = Number(this.column.value), { names } = this.map;
    this.rows = names.map((_, index) => index).filter((index) => view.matches(names[index]));
    if (!this.rows.length) this.rows = names.map((_, index) => index);
    if (this.row !== null && this.row >= this.rows.length) this.row = null;
    const key = `${this.map.run.index}/${chosen}`;
    if (this.scaleKey !== key) {
      const values = [];
      this.scaleKey = key;
      for (let step = 0; step < this.steps.length; step++) for (let row = 0; row < names.length; row++) values.push(this.cell(step, row));
      this.scale = new ColourScale(values);
      this.hasBad = values.some((one) => one !== undefined && !Number.isFinite(one));
      this.drawLegend();
    }
  }

  cell(place, row) { return this.map.cell(place, row, Number(this.column.value)); }
  nameOf(row) { return this.map.names[row]; }

  /** Select a layer and a statistic, for a link from an alert. */
  select(name, column) {
    const chosen = this.map.columns.indexOf(column);
    if (chosen >= 0) this.column.value = String(chosen);
    this.draw();
    const row = this.map.names.indexOf(name);
    this.row = row < 0 ? null : this.rows.indexOf(row);
    this.draw();
  }

  showValue() {
    if (this.row === null || this.row >= this.rows.length || !this.steps.length) {
      this.readout.textContent = `${plural(this.rows.length, "layer")}, ${plural(this.steps.length, "step")}; point at a cell for its value`;
      return;
    }
    const place = view.step === null ? this.steps.length - 1 : nearest(this.steps, view.step), row = this.rows[this.row];
    this.readout.textContent = `${short(this.map.names[row], 70)} · step ${number(this.steps[place])} · ${short(this.map.columns[Number(this.column.value)], 30)} ${number(this.cell(place, row))}`;
  }

  drawLegend() {
    const bar = el("canvas", { width: 256, height: 1, class: "ramp", "aria-hidden": "true" }), ctx = bar.getContext("2d");
    const image = ctx.createImageData(256, 1);
    this.scale.ramp.forEach(([red, green, blue], index) => image.data.set([red, green, blue, 255], 4 * index));
    ctx.putImageData(image, 0, 0);
    const { log, signed, small, hasBelow } = this.scale, rounded = (value) => tick(Number(value.toPrecision(3)));
    const texts = [0, 0.25, 0.5, 0.75, 1].map((place) => rounded(this.scale.value(place)));
    if (hasBelow && !signed) texts[0] = `≤ ${texts[0]}`;
    const ticks = el("div", { class: "ticks" }, ...texts.map((text) => el("span", {}, text)));
    const note = !log ? "linear scale" : signed ? `log on both sides of 0, from ±${rounded(small)}` : "log scale";
    this.legend.replaceChildren(el("div", { class: "bar" }, bar, ticks), el("span", { class: "note" }, note),
      ...(this.hasBad ? [el("span", { class: "note" }, el("span", { class: "swatch box nan" }), "NaN or infinity")] : []));
  }
}

function runSelect(items) {
  const select = el("select", { "aria-label": "Run" });
  items.forEach((one, index) => select.append(el("option", { value: index }, short(one.run.name, 40))));
  return select;
}

/** Histograms of one layer over time: bins × steps. */
class HistogramPlot extends Grid {
  constructor(name, maps) {
    const value = el("output", { class: "readout", "aria-live": "polite" }), body = el("div", { class: "heat" }), chart = el("div", { class: "plot" });
    const layer = el("select", { "aria-label": "Layer" }), run = several ? runSelect(maps) : null;
    const figure = el("figure", { class: "card wide", tabindex: "0", "aria-label": `Histograms ${short(name, 200)}; arrow keys move over steps` },
      el("figcaption", {}, named("h4", name), run, el("label", {}, "layer ", layer)), value, el("div", { class: "two" }, body, chart));
    super(figure, body);
    Object.assign(this, { name, maps, map: maps[0], readout: value, layer, chartElement: chart, steps: maps[0].steps, scale: new ColourScale([0, 255]) });
    layer.addEventListener("change", () => this.draw());
    run?.addEventListener("change", () => {
      this.map = maps[Number(run.value)];
      this.fillLayers();
      this.draw();
    });
    this.fillLayers();
  }

  fillLayers() {
    const before = this.layer.selectedOptions[0]?.textContent;
    const { names } = this.map, found = names.map((_, index) => index).filter((index) => view.matches(names[index]));
    const shown = found.length ? found : names.map((_, index) => index);
    this.layer.replaceChildren(...shown.map((index) => el("option", { value: index }, short(names[index], 60))));
    const same = [...this.layer.options].findIndex((option) => option.textContent === before);
    this.layer.selectedIndex = Math.max(same, 0);
    this.filledFor = view.find;
  }

  prepare() {
    if (this.filledFor !== view.find) this.fillLayers();
    this.steps = this.map.steps;
    this.chosen = Number(this.layer.value) || 0;
    this.scale.ramp = ramp([colour("card"), lineColour(0)].map((from, index) => (index ? from : mixed(from, lineColour(0), 0.12))));
    const used = new Set();
    for (let step = 0; step < this.steps.length; step++) {
      for (let bin = 0; bin < this.map.bins; bin++) if (this.map.count(step, this.chosen, bin)) used.add(bin);
    }
    // From the greatest value at the top to the least; a row of null stands for bins that are empty at every step.
    this.rows = [];
    for (let bin = this.map.bins - 1; bin >= 0; bin--) {
      if (used.has(bin)) this.rows.push(bin);
      else if (this.rows.length && this.rows[this.rows.length - 1] !== null) this.rows.push(null);
    }
    if (this.rows[this.rows.length - 1] === null) this.rows.pop();
  }

  heightOfRows(count) { return Math.max(2, Math.min(12, Math.floor(240 / Math.max(count, 1)))); }
  cell(place, bin) { return bin === null ? undefined : this.map.count(place, this.chosen, bin) || undefined; }
  nameOf(bin) { return bin === null ? "…" : this.map.label(this.chosen, bin); }
  drawNames(ctx) {
    ctx.fillStyle = colour("muted");
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    const every = Math.max(Math.ceil(18 / this.rowHeight), 1);
    for (let row = 0; row < this.rows.length; row += every) ctx.fillText(this.nameOf(this.rows[row]), this.left - 6, this.top + (row + 0.5) * this.rowHeight);
    ctx.save();
    ctx.translate(10, this.top + (this.rows.length * this.rowHeight) / 2);
    ctx.rotate(-Math.PI / 2);
    ctx.textAlign = "center";
    ctx.fillText("value", 0, 0);
    ctx.restore();
  }

  showValue() {
    if (!this.steps.length || !this.rows.length) {
      this.readout.textContent = "no values";
      return;
    }
    const place = view.step === null ? this.steps.length - 1 : nearest(this.steps, view.step);
    this.readout.textContent = `${short(this.map.names[this.chosen], 70)} · histogram at step ${number(this.steps[place])}, as a share of its fullest bin`;
    this.drawChart(place);
  }

  /** Draw the histogram of one step. */
  drawChart(place) {
    const bins = [...this.rows].reverse(), width = this.chartElement.clientWidth;
    if (!width || !bins.length) return;
    const data = [bins.map((_, index) => index), bins.map((bin) => (bin === null ? 0 : (100 * this.map.count(place, this.chosen, bin)) / 255))];
    const key = [this.map.run.index, this.chosen, width, colour("text"), bins.length].join();
    if (this.chartKey === key) return this.chart.setData(data);
    this.chartKey = key;
    this.chart?.destroy();
    const { axis, ...base } = baseOptions(this.chartElement, 260);
    this.chart = new uPlot({
      ...base, cursor: { show: false },
      scales: { x: { time: false, range: () => [-0.5, bins.length - 0.5] }, y: { range: () => [0, 105] } },
      series: [{}, { stroke: () => lineColour(0), fill: () => pale(lineColour(0), 0.35), paths: uPlot.paths.bars({ size: [1, 40], gap: 0 }), points: { show: false } }],
      axes: [
        { ...axis, size: 22, label: "value", labelSize: 16, labelGap: 2, gap: 2, space: 55, values: (u, values) => values.map((v) => (v in bins ? this.nameOf(bins[v]) : "")) },
        { ...axis, size: 50, values: (u, values) => values.map((v) => `${v} %`) },
      ],
    }, data, this.chartElement);
  }
}

/** The size of each layer's gradient in the model's order, at the step of the cursor; where it falls, training stops. */
class GradientFlow extends Plot {
  constructor(maps) {
    const slider = el("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "Step" }), shown = el("output", {});
    const body = el("div", { class: "plot" }), legend = el("ul", { class: "legend" }), readout = el("output", { class: "readout" });
    const figure = el("figure", { class: "card wide", tabindex: "0", "aria-label": "Gradient flow; arrow keys move over steps" },
      el("figcaption", {}, el("h4", {}, "Gradient norm per layer"), el("label", { class: "slide" }, "step ", slider, shown)), readout, body, legend);
    super(body);
    Object.assign(this, { maps, slider, shown, figure, legend, readout });
    slider.max = String(Math.max(maps[0].steps.length - 1, 0));
    slider.addEventListener("input", () => view.moveTo(maps[0].steps[Number(slider.value)]));
    figure.addEventListener("keydown", (event) => {
      if (event.target !== figure || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      const here = this.places()[0] + (event.key === "ArrowLeft" ? -1 : 1), { steps } = maps[0];
      view.moveTo(steps[Math.min(Math.max(here, 0), steps.length - 1)]);
      event.preventDefault();
    });
  }

  places() { return this.maps.map(({ steps }) => (view.step === null ? steps.length - 1 : nearest(steps, view.step))); }

  /** Return the layers' numbers and, for each run, the norms at the step, the least and the greatest over all steps. */
  makeData() {
    const usable = (value) => (Number.isFinite(value) && value > 0 ? value : null), { names } = this.maps[0];
    this.shownRows = names.map((_, index) => index).filter((index) => view.matches(names[index]));
    if (!this.shownRows.length) this.shownRows = names.map((_, index) => index);
    const columns = [this.shownRows.map((_, index) => index)], places = this.places();
    this.maps.forEach((map, index) => {
      const column = Math.max(map.columns.indexOf("norm"), 0);
      const rows = this.shownRows.map((row) => map.names.indexOf(names[row]));
      columns.push(rows.map((row) => (row < 0 ? null : usable(map.value(places[index], row, column)))));
      if (several) return;
      this.extremes ??= names.map((_, row) => {
        const values = Array.from(map.steps, (_, step) => usable(map.value(step, row, column))).filter((value) => value !== null);
        return values.length ? [Math.min(...values), Math.max(...values)] : [null, null];
      });
      columns.push(this.shownRows.map((row) => this.extremes[row][0]), this.shownRows.map((row) => this.extremes[row][1]));
    });
    return columns;
  }

  changed(what) {
    if (what === "step" && this.chart) {
      this.chart.setData(this.makeData(), false);
      this.chart.redraw();
      this.showStep();
    } else if (!["range", "smoothing", "log", "hiddenMarks", "step"].includes(what)) this.draw();
  }

  showStep() {
    const places = this.places();
    this.slider.value = String(places[0]);
    this.shown.textContent = this.maps.map((map, index) => number(map.steps[places[index]])).filter((text, index, all) => all.indexOf(text) === index).join(", ");
  }

  draw() {
    const width = this.element.clientWidth;
    if (!width || !this.maps[0].steps.length) return;
    this.drawnWidth = width;
    this.stale = false;
    const data = this.makeData(), count = this.shownRows.length;
    const names = this.shownRows.map((row) => this.maps[0].names[row]), room = Math.min(30 + 6 * Math.max(...names.map((name) => name.length)), 165);
    const { axis, ...base } = baseOptions(this.element, 215 + room);
    const series = [{}], bands = [];
    this.maps.forEach((map, index) => {
      const stroke = () => lineColour(several ? map.run.index : 0);
      series.push({ stroke, width: 1.8, points: { show: count <= 120, size: 6, fill: stroke } });
      if (several) return;
      series.push({ stroke: "transparent", width: 0, points: { show: false } }, { stroke: "transparent", width: 0, points: { show: false } });
      bands.push({ series: [series.length - 1, series.length - 2], fill: () => pale(stroke(), 0.15) });
    });
    this.legend.replaceChildren(...(several
      ? this.maps.map((map) => el("li", {}, el("span", { class: `swatch line-${map.run.index % COLOURS}` }), named("span", map.run.name, 40)))
      : [el("li", {}, el("span", { class: "swatch line-0" }), "at this step"), el("li", {}, el("span", { class: "swatch box band" }), "least to greatest over all steps")]));
    const most = Math.max(Math.floor((width - 70) / 16), 2), every = Math.ceil(count / most);
    this.chart?.destroy();
    this.chart = new uPlot({
      ...base, series, bands, padding: [10, 14, 0, 0],
      scales: {
        x: { time: false, range: () => [-0.5, count - 0.5] },
        y: { distr: 3, range: logRange },
      },
      axes: [
        { ...axis, size: room, rotate: -90, gap: 6, splits: () => data[0].filter((place) => place % every === 0), values: (u, places) => places.map((place) => short(names[place] ?? "", 22)) },
        { ...axis, ...LOG_AXIS, size: 62, values: (u, values) => values.map((v) => (v === null ? null : tick(v))) },
      ],
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
      hooks: { setCursor: [(u) => {
        const place = u.cursor.idx;
        this.readout.textContent = place === null || place === undefined ? "" : `${short(names[place], 70)} · ${this.maps.map((_, index) => number(u.data[several ? index + 1 : 1][place])).join(", ")}`;
      }] },
    }, data, this.element);
    this.showStep();
  }
}

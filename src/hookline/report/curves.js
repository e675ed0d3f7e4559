// Curves over steps, drawn by uPlot: the mean as a line, what lies between the lowest and the highest value as a band.

const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const finite = (value) => (Number.isFinite(value) ? value : null);

/** Return values with an exponential moving average that begins without a bias; gaps stay gaps. */
function smooth(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** Return the settings that all uPlot plots have in common. */
function baseOptions(element, height) {
  const axis = { stroke: () => colour("muted"), font: FONT, labelFont: FONT, grid: { stroke: () => colour("grid"), width: 1 },
    ticks: { stroke: () => colour("grid"), width: 1, size: 4 } };
  return { width: element.clientWidth, height, legend: { show: false }, padding: [10, 14, 0, 0], axis };
}

/** The plot of a few curves: one metric of every run, or a training metric with its validation metric. */
class CurvePlot extends Plot {
  constructor(title, curves) {
    const log = el("button", { type: "button", class: "small", "aria-pressed": "false", title: "Log axis (l)" }, "log");
    const legend = el("ul", { class: "legend" }), body = el("div", { class: "plot" });
    const unit = curves[0].unit.unit;
    const figure = el("figure", { class: "card", tabindex: "0", "aria-label": `Curve ${short(title, 200)}; arrow keys move the cursor` },
      el("figcaption", {}, named("h4", title, 48), unit ? el("span", { class: "unit" }, unit) : null, log), body, legend);
    super(body);
    Object.assign(this, { title, curves, legend, figure, button: log, tip: el("div", { class: "tip", hidden: true }) });
    this.ownLog = null;
    log.addEventListener("click", () => this.toggleLog());
    this.values = curves.map((curve, index) => {
      const value = el("span", { class: "value" });
      const label = several ? (new Set(curves.map((one) => one.name)).size > 1 ? `${curve.run.name} · ${curve.name}` : curve.run.name) : curve.name;
      const swatch = el("span", { class: `swatch line-${this.colourOf(index)}${this.dashOf(index) ? " dashed" : ""}` });
      legend.append(el("li", {}, swatch, named("span", label, 40, { class: "name" }), value));
      return value;
    });
    figure.addEventListener("keydown", (event) => this.key(event));
  }

  /** Say that metrics with other names have the same values, so that they need no plot of their own. */
  alike(names) {
    this.others = [...(this.others ?? []), ...names];
    this.searched += ` ${names.join(" ")}`;
    this.note ??= this.legend.appendChild(el("li", { class: "note" }));
    this.note.replaceChildren(named("span", `same values: ${this.others.join(", ")}`, 90));
  }

  get log() { return this.ownLog ?? view.log; }
  toggleLog() {
    this.ownLog = !this.log;
    this.draw();
  }
  colourOf(index) { return (several ? this.curves[index].run.index : index) % COLOURS; }
  /** Return the dashes of a curve: with several runs the colour says which run, so the dashes say which metric. */
  dashOf(index) {
    if (!several) return null;
    const names = [...new Set(this.curves.map((curve) => curve.name))];
    return [null, [6, 4], [2, 3], [10, 3, 2, 3]][names.indexOf(this.curves[index].name) % 4];
  }

  changed(what) {
    if (what === "step") this.showStep();
    else if (what === "range" && this.chart) this.chart.setScale("x", { min: view.range[0], max: view.range[1] });
    else if (what === "log") {
      this.ownLog = null;
      this.draw();
    } else if (what === "smoothing" && this.chart) this.chart.setData(this.makeData(), false), this.chart.setScale("x", { min: view.range[0], max: view.range[1] });
    else if (what === "hiddenMarks" && this.chart) this.chart.redraw(false);
    else if (what !== "find") this.draw();
  }

  /** Return the values for uPlot: the steps of all curves, then for each curve lowest, highest, mean, smoothed. */
  makeData() {
    const usable = this.log ? (value) => (value > 0 && Number.isFinite(value) ? value : null) : finite;
    this.smoothed = view.smoothing > 0;
    const tables = this.curves.map((curve) => {
      const mean = Array.from(curve.mean, usable);
      const columns = [Array.from(curve.steps), mean, this.smoothed ? smooth(mean, view.smoothing) : mean.map(() => null)];
      if (!curve.exact) columns.push(Array.from(curve.lowest, usable), Array.from(curve.highest, usable));
      return columns;
    });
    return tables.length === 1 ? tables[0] : uPlot.join(tables);
  }

  draw() {
    const element = this.element, width = element.clientWidth;
    if (!width) return;
    this.drawnWidth = width;
    this.stale = false;
    this.button.setAttribute("aria-pressed", String(this.log));
    const { axis, ...base } = baseOptions(element, 220);
    const series = [{}], bands = [], unit = this.curves[0].unit;
    this.curves.forEach((curve, index) => {
      const stroke = () => lineColour(this.colourOf(index)), dash = this.dashOf(index), width = 1.6;
      // With smoothing, the smoothed line is the strong one and the mean is pale behind it.
      series.push({ stroke: () => (this.smoothed ? pale(stroke(), 0.35) : stroke()), width, dash, points: { show: curve.steps.length <= 40, size: 5, fill: stroke } });
      series.push({ stroke, width: 2, dash, points: { show: false } });
      if (!curve.exact) {
        series.push({ stroke: "transparent", width: 0, points: { show: false } }, { stroke: "transparent", width: 0, points: { show: false } });
        bands.push({ series: [series.length - 1, series.length - 2], fill: () => pale(stroke(), 0.22) });
      }
    });
    const factor = unit.factor ?? 1;
    const options = {
      ...base, series, bands,
      scales: {
        x: { time: false, range: () => view.range },
        y: this.log ? { distr: 3, range: logRange } : { range: (u, low, high) => yRange(low, high) },
      },
      axes: [
        { ...axis, size: 22, label: "step", labelSize: 16, labelGap: 2, gap: 2, values: (u, values) => values.map((v) => (Number.isInteger(v) ? tick(v) : "")) },
        { ...axis, ...(this.log ? LOG_AXIS : {}), size: 58, gap: 4, values: (u, values) => values.map((v) => (v === null ? null : tick(v * factor))) },
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
          view.moveTo(Math.round(u.posToVal(u.cursor.left, "x")), this);
          this.isPointed = false;
        }],
        draw: [(u) => this.drawMarks(u)],
      },
    };
    this.chart?.destroy();
    this.chart = new uPlot(options, this.makeData(), element);
    this.chart.over.append(this.tip);
    this.showStep();
  }

  /** Show the values at the cursor, or the last ones, and place the cursor line. */
  showStep() {
    const { step } = view;
    this.curves.forEach((curve, index) => {
      const place = step === null ? curve.steps.length - 1 : curve.at(step);
      this.values[index].textContent = place < 0 ? "–" : `${step === null ? "last " : ""}${curve.text(place)}`;
    });
    if (!this.chart) return;
    const left = step === null ? -10 : this.chart.valToPos(step, "x");
    // The hook must not fire: moving the cursor here would move it again everywhere.
    if (!this.isPointed) this.chart.setCursor({ left: left >= 0 && left <= this.chart.over.clientWidth ? left : -10, top: 10 }, false);
    this.showTip(left);
  }

  /** Name the events next to the cursor; of many plots only in the one under the mouse. */
  showTip(left) {
    const near = left < 0 || (view.pointed && view.pointed !== this) ? [] : marks().filter((event) => Math.abs(this.chart.valToPos(event.step, "x") - left) <= 5);
    this.tip.hidden = !near.length;
    if (!near.length) return;
    const lines = near.slice(0, 4).map((event) => el("div", {}, short(`${several ? event.run.name + ": " : ""}${event.kind.replace(/_/g, " ")}, step ${number(event.step)}`, 70)));
    if (near.length > 4) lines.push(el("div", {}, `and ${near.length - 4} more`));
    this.tip.replaceChildren(...lines);
    const right = left > this.chart.over.clientWidth / 2;
    this.tip.style.left = right ? "" : `${left + 8}px`;
    this.tip.style.right = right ? `${this.chart.over.clientWidth - left + 8}px` : "";
  }

  /** Return by kind where events are marked, in pixels, and which of these marks have a line over the plot. */
  placeMarks(u) {
    const { left, width } = u.bbox, ratio = devicePixelRatio, places = new Map();
    for (const event of marks()) {
      const x = Math.round(u.valToPos(event.step, "x", true)), mark = markOf(event);
      if (x < left - 2 || x > left + width + 2) continue;
      if (!places.has(mark)) places.set(mark, []);
      places.get(mark).push(x);
    }
    return [...places].map(([mark, all]) => {
      const apart = thinned(all, 10 * ratio);
      // Many lines of one kind would hide the curve: only the first one is drawn.
      const lines = mark === "checkpoint" ? [] : apart.length > width / ratio / 60 ? apart.slice(0, 1) : apart;
      return { mark, places: apart, lines };
    });
  }

  /** Draw the events: checkpoints as ticks on the axis, everything else at the top and as lines. */
  drawMarks(u) {
    const { ctx } = u, { left, top, width, height } = u.bbox, ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left - 6 * ratio, top - 8 * ratio, width + 12 * ratio, height + 8 * ratio);
    ctx.clip();
    for (const { mark, places, lines } of this.placeMarks(u)) {
      ctx.strokeStyle = ctx.fillStyle = colour(markColour(mark));
      ctx.lineWidth = ratio;
      for (const x of places) {
        if (mark === "checkpoint") triangle(ctx, x, top + height, 4.5 * ratio, -1);
        else triangle(ctx, x, top - 5 * ratio, 5 * ratio, 1);
      }
      ctx.setLineDash([3 * ratio, 3 * ratio]);
      for (const x of lines) {
        ctx.beginPath();
        ctx.moveTo(x + 0.5, top);
        ctx.lineTo(x + 0.5, top + height);
        ctx.stroke();
      }
    }
    for (const curve of this.curves) {
      if (!curve.data.non_finite) continue;
      const x = u.valToPos(curve.data.non_finite[0], "x", true);
      ctx.fillStyle = colour("nan");
      ctx.fillRect(x - 2 * ratio, top, 4 * ratio, 10 * ratio);
    }
    ctx.restore();
  }

  key(event) {
    const steps = this.chart?.data[0];
    if (!steps?.length || event.ctrlKey || event.metaKey || event.altKey || event.target !== this.figure) return;
    const inside = steps.filter((step) => step >= view.range[0] && step <= view.range[1]);
    const here = view.step === null ? inside.length - 1 : nearest(inside, view.step), jump = event.shiftKey ? 10 : 1;
    const places = { ArrowLeft: view.step === null ? here : here - jump, ArrowRight: here + jump, Home: 0, End: inside.length - 1 };
    if (event.key in places && inside.length) view.moveTo(inside[Math.min(Math.max(places[event.key], 0), inside.length - 1)]);
    else if (event.key === "l") this.toggleLog();
    else return;
    event.preventDefault();
  }
}

const MARK_COLOURS = { checkpoint: "muted", restart: "line-0", "NaN or infinity": "nan", stop: "warning", "hook failure": "error", failure: "error", "loss spike": "warning" };
const markColour = (mark) => (Object.hasOwn(MARK_COLOURS, mark) ? MARK_COLOURS[mark] : "muted");

let markedEvents = null;
/** Return the events that have a step and are not hidden. */
function marks() {
  markedEvents ??= runs.flatMap((run) => run.events.filter((event) => typeof event.step === "number"));
  return markedEvents.filter((event) => !view.hiddenMarks.has(markOf(event)));
}

/** Return values in their order, without those that are nearer than a distance to the one before. */
function thinned(values, distance) {
  const kept = [];
  for (const value of values.sort((a, b) => a - b)) if (!kept.length || value - kept[kept.length - 1] >= distance) kept.push(value);
  return kept;
}

/** Fill a triangle whose base is at y; its tip points down (1) or up (-1). */
function triangle(ctx, x, y, size, direction) {
  ctx.setLineDash([]);
  ctx.beginPath();
  ctx.moveTo(x - size, y);
  ctx.lineTo(x + size, y);
  ctx.lineTo(x, y + direction * size * 1.5);
  ctx.closePath();
  ctx.fill();
}

/** Return the values that have a line and a number on a log axis: decades if it has several, otherwise round numbers, as
 * many as there is room for. uPlot would have nine in each decade, and numbers beyond the ends. */
function logSplits(u, axisIndex, min, max) {
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
  const least = max * (1 - (max / min) ** (-1 / most)), power = 10 ** Math.floor(Math.log10(least));
  return multiples([1, 2, 5, 10].find((n) => n * power >= least) * power, min, max).map(exact);
}
const LOG_AXIS = { splits: logSplits, filter: (u, splits) => splits };

/** Return the range of a log axis: whole decades if there are several. */
function logRange(u, low, high) {
  if (!(low > 0) || !Number.isFinite(high)) return [0.1, 10];
  if (low === high) return [low / 2, high * 2];
  return high / low > 30 ? uPlot.rangeLog(low, high, 10, true) : [low / (high / low) ** 0.06, high * (high / low) ** 0.06];
}

/** Return the range of a linear axis: what is drawn and a little more; a constant is in the middle. */
function yRange(low, high) {
  if (low === null || high === null || !Number.isFinite(low)) return [0, 1];
  if (low === high) return low === 0 ? [-1, 1] : [low - Math.abs(low) * 0.1, low + Math.abs(low) * 0.1];
  const more = (high - low) * 0.06;
  return [low >= 0 && low - more < 0 ? 0 : low - more, high + more];
}

/** Return a colour like #1f77b4 with an opacity. */
function pale(hex, opacity) {
  const value = parseInt(hex.slice(1), 16);
  return `rgba(${value >> 16}, ${(value >> 8) & 255}, ${value & 255}, ${opacity})`;
}

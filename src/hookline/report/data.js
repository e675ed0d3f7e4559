// The page's data: JSON in the page, with the arrays of numbers as base64.

import { clamp, duration, number, tick, unitOf } from "./format.js";

export const page = JSON.parse(document.getElementById("data").textContent);

const buffers = page.arrays.map((base64) => {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes.buffer;
});

/** What the horizontal axis shows; steps until a reader chooses another one of `axes`. */
export const axis = { name: "step", label: "step" };

class Run {
  constructor(data, index) {
    const { clock } = data, read64 = (place) => new Float64Array(buffers[place]);
    this.clock = { steps: read64(clock.steps), seconds: read64(clock.seconds), tokens: clock.tokens_per_step };
    Object.assign(this, { data, index, run: data.run, labels: data.labels, id: data.run_id, name: data.name });
    const read = (Type, tables) => new Map(Object.entries(tables).map(([name, table]) => [name, new Type(this, name, table)]));
    this.curves = read(Curve, data.curves);
    this.layers = read(Layers, data.layers);
    this.histograms = read(Histograms, data.histograms);
    this.events = data.events.map((fields, place) =>
      ({ fields, text: data.event_texts[place], step: fields.step, time: fields.time, kind: fields.kind, run: this }));
    this.alerts = data.alerts.map((alert) => ({ ...alert, run: this }));
  }

  /** Return the place of a step on the axis. */
  at(step) {
    if (axis.name === "step") return step;
    if (axis.name === "tokens") return step * this.clock.tokens;
    const { steps, seconds } = this.clock, after = clamp(firstAtLeast(steps, step), 1, steps.length - 1), before = after - 1;
    const share = (step - steps[before]) / (steps[after] - steps[before]);
    return Math.max(seconds[before] + share * (seconds[after] - seconds[before]), 0) / axis.seconds;
  }
}

/** Something that was measured at steps of a run; `places` are those in the table that it is a part of. */
class Timed {
  constructor(run, steps, places) {
    Object.assign(this, { run, steps, places });
  }
  /** The places of the steps on the axis. */
  get at() {
    if (this.atAxis !== axis.name) [this.atAxis, this.placed] = [axis.name, this.steps.map((step) => this.run.at(step))];
    return this.placed;
  }
  /** Return what was measured at those of the steps whose place in the table passes a test: several hooks may measure layers
   * of one series at other steps. */
  where(isMeasured) {
    const places = [...this.steps.keys()].filter(isMeasured);
    return new Timed(this.run, places.map((place) => this.steps[place]), places);
  }
}

class Curve extends Timed {
  constructor(run, name, data) {
    super(run, new Float64Array(buffers[data.steps]));
    Object.assign(this, { name, data, unit: unitOf(name) });
    [this.mean, this.lowest, this.highest] = [data.mean, data.lowest, data.highest].map((index) => new Float32Array(buffers[index]));
    this.exact = data.lowest === data.mean && data.highest === data.mean;
    this.key = `${run.index}/${data.steps}/${data.mean}/${data.lowest}/${data.highest}`;
  }
  get lastStep() { return this.steps.length ? Math.max(this.steps.at(-1), this.data.last?.[0] ?? 0) : 0; }

  /** Return the text for a bucket: its value, or its mean and extremes. */
  text(index) {
    const mean = this.unit.format(this.mean[index]);
    if (this.exact || this.lowest[index] === this.highest[index]) return mean;
    return `${mean} (${this.unit.format(this.lowest[index])} … ${this.unit.format(this.highest[index])})`;
  }
}

const COUNTS = ["nans", "infs", "zeros", "count", "units", "dead_units"]; // which are numbers beside NaN, too

class Layers extends Timed {
  constructor(run, name, data) {
    super(run, new Float64Array(buffers[data.steps]));
    Object.assign(this, { name, names: data.names.map(String), columns: data.columns.map(String), measuredAt: new Map() });
    this.values = new Float32Array(buffers[data.values]);
    this.counted = ["nans", "infs"].map((column) => this.columns.indexOf(column)).filter((index) => index >= 0);
    this.numbers = new Map();
  }
  value(step, row, column) {
    return this.values[(step * this.names.length + row) * this.columns.length + column];
  }

  /** Return a value, NaN if it was one, and undefined if nothing was recorded, for which the table has NaN, too. */
  cell(step, row, column) {
    const value = this.value(step, row, column);
    if (COUNTS.includes(this.columns[column]) && !Number.isNaN(value)) return value;
    if (this.counted.some((index) => index !== column && this.value(step, row, index) > 0)) return NaN;
    if (!Number.isNaN(value)) return value;
    if (this.counted.length) return undefined;
    // Without counts of NaN: other layers have a number of the kind at this step, or there is no number at all.
    const key = step * this.columns.length + column;
    if (!this.numbers.has(key)) {
      const inColumn = this.names.some((_, index) => !Number.isNaN(this.value(step, index, column)));
      const size = this.names.length * this.columns.length, all = this.values.subarray(step * size, (step + 1) * size);
      this.numbers.set(key, inColumn || all.every(Number.isNaN));
    }
    return this.numbers.get(key) ? NaN : undefined;
  }

  /** Return the steps at which a layer was measured: one object if these are all, so that heat maps share their spans. */
  measured(row, column) {
    const key = row * this.columns.length + column;
    if (!this.measuredAt.has(key)) {
      const some = this.where((place) => this.cell(place, row, column) !== undefined);
      this.everywhere ??= this.where(() => true);
      this.measuredAt.set(key, some.steps.length === this.steps.length ? this.everywhere : some);
    }
    return this.measuredAt.get(key);
  }
}

/** Histograms with one bin for each octave below 0, one for 0, and one for each octave above 0, for each layer from the
 * largest value that it had; the smallest octaves hold everything below them, too. */
class Histograms extends Timed {
  constructor(run, name, data) {
    super(run, new Float64Array(buffers[data.steps]));
    Object.assign(this, { name, names: data.names.map(String), tops: new Int16Array(buffers[data.tops]) });
    this.counts = new Uint8Array(buffers[data.counts]);
    this.bins = this.counts.length / Math.max(this.steps.length * this.names.length, 1);
    this.zero = (this.bins - 1) / 2;
  }
  start(step, row) { return (step * this.names.length + row) * this.bins; }
  count(step, row, bin) { return this.counts[this.start(step, row) + bin]; }

  /** Return the steps at which a layer has a histogram. */
  measured(row) {
    return this.where((step) => this.counts.subarray(this.start(step, row), this.start(step, row + 1)).some(Boolean));
  }

  /** Return the end of a bin that is nearer to 0, with what lies below the window named as such. */
  label(row, bin) {
    const below = this.zero - Math.abs(bin - this.zero); // how many octaves below the largest
    if (below === this.zero) return "0";
    const isLowest = below === this.zero - 1, value = 2 ** (this.tops[row] - below + (isLowest ? 1 : 0)), text = tick(Number(value.toPrecision(2)));
    return bin > this.zero ? `${isLowest ? "< " : ""}${text}` : `${isLowest ? "> " : ""}−${text}`;
  }
}

/** Return the index of the entry of a sorted array that is nearest to a value; -1 in an empty array. */
export function nearest(sorted, value) {
  const after = firstAtLeast(sorted, value);
  if (after === 0) return sorted.length ? 0 : -1;
  if (after === sorted.length) return sorted.length - 1;
  return value - sorted[after - 1] <= sorted[after] - value ? after - 1 : after;
}

/** Return the index of the first entry of a sorted array that is not below a value. */
export function firstAtLeast(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Return the items of each group, in the order in which they come. */
export function groupBy(items, groupOf) {
  const groups = new Map();
  for (const item of items) {
    const group = groupOf(item);
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(item);
  }
  return groups;
}

export const runs = page.runs.map((data, index) => new Run(data, index));
export const several = runs.length > 1;

/** The first and the last step of all runs. */
const allSteps = (() => {
  const tables = runs.flatMap((run) => [run.curves, run.layers, run.histograms].flatMap((map) => [...map.values()]));
  const withSteps = tables.filter(({ steps }) => steps.length);
  const first = withSteps.reduce((least, { steps }) => Math.min(least, steps[0]), Infinity);
  const last = withSteps.reduce((most, { steps, lastStep }) => Math.max(most, lastStep ?? steps.at(-1)), 0);
  return first < last ? [first, last] : [Math.max(0, last - 1), last + 1];
})();

/** Return the first and the last place of all runs on the axis. */
export function extent() {
  if (axis.name === "step") return allSteps;
  const ends = runs.map((run) => run.curves.size ? Math.max(...[...run.curves.values()].map(({ lastStep }) => lastStep)) : allSteps[1]);
  return [Math.min(...runs.map((run) => run.at(allSteps[0]))), Math.max(...runs.map((run, index) => run.at(ends[index])))];
}

/** The axes for which every run has the numbers: steps, the time since the first row, tokens at their average rate. */
export const axes = (() => {
  const longest = Math.max(...runs.map(({ clock }) => clock.seconds.at(-1) ?? 0));
  const [unit, seconds] = longest > 7200 ? ["h", 3600] : longest > 180 ? ["min", 60] : ["s", 1];
  const known = [{ name: "step", label: "step", text: (value) => `step ${number(value)}` }];
  if (runs.every(({ clock }) => clock.seconds.at(-1) > 0)) known.push({ name: "time", label: `time (${unit})`, seconds, text: (value) => duration(value * seconds) });
  if (runs.every(({ clock }) => clock.tokens > 0)) known.push({ name: "tokens", label: "tokens", text: (value) => `${tick(value)} tokens` });
  return known;
})();
Object.assign(axis, axes[0]);

// ---- events -----------------------------------------------------------------------------------------------------------

const MAX_OTHER_KINDS = 6;

/** The kinds of marks on the step axis: those of Python's table of events, and the most frequent ones of other events. */
export const markKinds = (() => {
  const events = runs.flatMap((run) => run.events).filter(({ kind }) => !Object.hasOwn(page.marks.kinds, kind));
  const others = [...groupBy(events, ({ kind }) => kind)].sort(([, a], [, b]) => b.length - a.length).slice(0, MAX_OTHER_KINDS);
  return [...Object.keys(page.marks.groups), ...others.map(([kind]) => kind), "other"];
})();

/** Return the kind of mark that an event gets on the step axis. */
export function markOf({ kind }) {
  return Object.hasOwn(page.marks.kinds, kind) ? page.marks.kinds[kind] : markKinds.includes(kind) ? kind : "other";
}

/** Return the sign of a kind of mark, and the name of its color; kinds that Python does not know have numbers. */
export function markLook(mark) {
  const { groups } = page.marks;
  const [sign, color] = Object.hasOwn(groups, mark) ? groups[mark] : [mark === "other" ? "●" : "①②③④⑤⑥"[markKinds.indexOf(mark) - Object.keys(groups).length], "muted"];
  return { sign, color };
}

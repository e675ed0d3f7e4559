// The page's data: JSON in the page, with the arrays of numbers as base64.

class Run {
  constructor(data, index) {
    Object.assign(this, { data, index, run: data.run ?? {}, labels: data.labels ?? {} });
    this.id = String(data.run_id ?? `run ${index + 1}`);
    this.name = String(data.name ?? this.id);
    this.curves = new Map(Object.entries(data.curves ?? {}).map(([name, curve]) => [name, new Curve(this, name, curve)]));
    this.layers = new Map(Object.entries(data.layers ?? {}).map(([name, one]) => [name, new Layers(this, name, one)]));
    this.histograms = new Map(Object.entries(data.histograms ?? {}).map(([name, one]) => [name, new Histograms(this, name, one)]));
    this.events = (data.events ?? []).map((fields, place) =>
      ({ fields, text: data.event_texts[place], step: fields.step, time: fields.time, kind: String(fields.kind), run: this }));
    this.alerts = (data.alerts ?? []).map((alert) => ({ ...alert, run: this }));
  }
}

const decoded = [];
/** Return an array of the page's data; decoded when it is needed first. */
function array(index, Type) {
  if (!decoded[index]) {
    const text = atob(page.arrays[index]), bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    decoded[index] = bytes.buffer;
  }
  return new Type(decoded[index]);
}

class Curve {
  constructor(run, name, data) {
    Object.assign(this, { run, name, data, unit: unitOf(name) });
    this.exact = data.lowest === data.mean && data.highest === data.mean;
    this.key = `${data.steps}/${data.mean}/${data.lowest}/${data.highest}`;
  }
  get steps() { return (this._steps ??= array(this.data.steps, Float64Array)); }
  get mean() { return (this._mean ??= array(this.data.mean, Float32Array)); }
  get lowest() { return (this._lowest ??= array(this.data.lowest, Float32Array)); }
  get highest() { return (this._highest ??= array(this.data.highest, Float32Array)); }
  get lastStep() { return this.steps.length ? Math.max(this.steps[this.steps.length - 1], this.data.last?.[0] ?? 0) : 0; }

  /** Return the bucket that holds a step, or the nearest one. */
  at(step) { return nearest(this.steps, step); }

  /** Return the text for a bucket: its value, or its mean and extremes. */
  text(index) {
    if (index < 0) return "–";
    const mean = this.unit.format(this.mean[index]);
    if (this.exact || this.lowest[index] === this.highest[index]) return mean;
    return `${mean} (${this.unit.format(this.lowest[index])} … ${this.unit.format(this.highest[index])})`;
  }
}

class Layers {
  constructor(run, name, data) {
    Object.assign(this, { run, name, data, names: data.names.map(String), columns: data.columns.map(String) });
  }
  get steps() { return (this._steps ??= array(this.data.steps, Float64Array)); }
  get values() { return (this._values ??= array(this.data.values, Float32Array)); }
  value(step, row, column) {
    return this.values[(step * this.names.length + row) * this.columns.length + column];
  }

  /** Return a value, NaN if it was one, and undefined if nothing was recorded, for which the table has NaN, too. */
  cell(step, row, column) {
    const value = this.value(step, row, column);
    this.counted ??= ["nans", "infs"].map((name) => this.columns.indexOf(name)).filter((index) => index >= 0);
    if (this.counted.some((index) => index !== column && this.value(step, row, index) > 0)) return NaN;
    if (!Number.isNaN(value)) return value;
    if (this.counted.length) return undefined;
    // Without counts of NaN: other layers have a number of the kind at this step, or there is no number at all.
    this.numbers ??= new Map();
    const key = step * this.columns.length + column;
    if (!this.numbers.has(key)) {
      const inColumn = this.names.some((_, index) => !Number.isNaN(this.value(step, index, column)));
      const size = this.names.length * this.columns.length, all = this.values.subarray(step * size, (step + 1) * size);
      this.numbers.set(key, inColumn || all.every(Number.isNaN));
    }
    return this.numbers.get(key) ? NaN : undefined;
  }
}

/** Histograms with one bin for each octave below 0, one for 0, and one for each octave above 0, for each layer from the
 * largest value that it had; the smallest octaves hold everything below them, too. */
class Histograms {
  constructor(run, name, data) {
    Object.assign(this, { run, name, data, names: data.names.map(String) });
  }
  get bins() { return (this._bins ??= this.counts.length / Math.max(this.steps.length * this.names.length, 1)); }
  get zero() { return (this.bins - 1) / 2; }
  get tops() { return (this._tops ??= array(this.data.tops, Int16Array)); }
  get steps() { return (this._steps ??= array(this.data.steps, Float64Array)); }
  get counts() { return (this._counts ??= array(this.data.counts, Uint8Array)); }
  count(step, row, bin) { return this.counts[(step * this.names.length + row) * this.bins + bin]; }

  /** Return the end of a bin that is nearer to 0, with what lies below the window named as such. */
  label(row, bin) {
    const below = this.zero - Math.abs(bin - this.zero); // how many octaves below the largest
    if (below === this.zero) return "0";
    const isLowest = below === this.zero - 1, value = 2 ** (this.tops[row] - below + (isLowest ? 1 : 0)), text = tick(Number(value.toPrecision(2)));
    return bin > this.zero ? `${isLowest ? "< " : ""}${text}` : `${isLowest ? "> " : ""}−${text}`;
  }
}

/** Return the index of the entry of a sorted array that is nearest to a value; -1 in an empty array. */
function nearest(sorted, value) {
  const after = firstAtLeast(sorted, value);
  if (after === 0) return sorted.length ? 0 : -1;
  if (after === sorted.length) return sorted.length - 1;
  return value - sorted[after - 1] <= sorted[after] - value ? after - 1 : after;
}

function firstAtLeast(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

const page = JSON.parse(document.getElementById("data").textContent);
const runs = page.runs.map((data, index) => new Run(data, index));
const several = runs.length > 1;

/** Return the first and the last step of all runs. */
const allSteps = (() => {
  let first = Infinity, last = 0;
  for (const run of runs) {
    for (const one of [...run.curves.values(), ...run.layers.values(), ...run.histograms.values()]) {
      if (!one.steps.length) continue;
      first = Math.min(first, one.steps[0]);
      last = Math.max(last, one.lastStep ?? one.steps[one.steps.length - 1]);
    }
  }
  return first < last ? [first, last] : [Math.max(0, last - 1), last + 1];
})();

const KIND_OF_EVENT = [
  [/^checkpoint_saved$/, "checkpoint"],
  [/^(resumed|begun_again|checkpoint_loaded)$/, "restart"],
  [/non_finite|not_finite|^crash$/, "NaN or infinity"],
  [/^stop_requested$/, "stop"],
  [/^(hook_failed|hook_disabled|sink_failed)$/, "hook failure"],
  [/^(exception|checkpoint_failed|loader_failed|stall|checkpoint_damaged)$/, "failure"],
  [/^loss_spike$/, "loss spike"],
];
const MOST_OTHER_KINDS = 6;

/** Return the kinds of marks on the step axis: those above, and the most frequent ones of other events. */
const markKinds = (() => {
  const counts = new Map();
  for (const { kind } of runs.flatMap((run) => run.events)) counts.set(kind, (counts.get(kind) ?? 0) + 1);
  const others = [...counts.keys()].filter((kind) => !KIND_OF_EVENT.some(([pattern]) => pattern.test(kind)));
  const frequent = others.sort((a, b) => counts.get(b) - counts.get(a)).slice(0, MOST_OTHER_KINDS);
  return [...KIND_OF_EVENT.map(([, mark]) => mark), ...frequent, "other"];
})();

/** Return the kind of mark that an event gets on the step axis. */
function markOf(event) {
  const known = KIND_OF_EVENT.find(([pattern]) => pattern.test(event.kind))?.[1];
  return known ?? (markKinds.includes(event.kind) ? event.kind : "other");
}

import assert from "node:assert/strict";
import { test } from "node:test";

import { base64, importScript, setPage } from "./stubs.js";

const curve = { steps: 0, mean: 1, lowest: 1, highest: 1, last: [100, 1], least: [1, 1], greatest: [1, 1], non_finite: null };
const clock = { steps: 0, seconds: 0, tokens_per_step: null };
const run = { clock, curves: { loss: curve }, layers: {}, histograms: {}, events: [], alerts: [] };
setPage({ arrays: [base64(new Float64Array([0, 100])), base64(new Float32Array([1, 1]))], runs: [run] });
const { logRange, logSplits, pale, placeMarks, roundUp, smooth, usable, usualRange, view, yRange } = await importScript("plots.js");

test("smoothing has no bias at the beginning and keeps gaps", () => {
  assert.deepEqual(smooth([4, null, 1], 0.5, [1, 2, 3], 1), [4, null, (0.25 * 0.5 * 4 + 0.75 * 1) / (0.25 * 0.5 + 0.75)]);
});

test("smoothing is per step: a curve with a tenth of the points lags by as many steps", () => {
  const steps = Array.from({ length: 1001 }, (_, step) => step), tenth = steps.filter((step) => step % 10 === 0);
  const lag = (at, values) => at.at(-1) - smooth(values, 0.99, at, 1).at(-1);
  assert.ok(Math.abs(lag(steps, steps) - lag(tenth, tenth)) < 6, `${lag(steps, steps)} and ${lag(tenth, tenth)}`);
});

test("a spike does not flatten everything, and a slow fall is no spike", () => {
  const usual = Array.from({ length: 100 }, (_, step) => 2 + (step % 10) / 10);
  assert.deepEqual([usualRange([...usual, 1e6]), usualRange([...usual, -1e6]), usualRange([...usual, 9])], [[2, 2.9], [2, 2.9], [2, 9]]);
  assert.deepEqual([usualRange([1, 1, 1, 1, 1, 1, 1, 1, 1, 5]), usualRange([1, 2, 100]), usualRange([])], [[1, 5], [1, 100], [undefined, undefined]]);
  const falling = usual.map((_, step) => 10 * 0.9 ** step);
  assert.deepEqual(usualRange(falling), [falling.at(-1), 10]);
});

test("what an axis cannot show is a gap", () => {
  assert.deepEqual([1, 0, -1, NaN, Infinity].map((value) => usable(value, false)), [1, 0, -1, null, null]);
  assert.deepEqual([1, 0, -1, NaN, Infinity].map((value) => usable(value, true)), [1, null, null, null, null]);
});

test("the units of an axis are round", () => {
  assert.deepEqual([0.7, 1, 1.1, 4, 5, 7, 1000, 0.03].map(roundUp), [1, 1, 2, 5, 5, 10, 1000, 0.05]);
});

for (const factor of [1.0001, 1.3, 4, 9, 25, 1e4, 1e15, 1e30]) {
  test(`numbers of a log axis over a factor of ${factor} do not overlap`, () => {
    const height = 180, [min, max] = logRange(null, 3e-11, 3e-11 * factor), splits = logSplits({ bbox: { height } }, 1, min, max);
    const places = splits.map((value) => (height * Math.log(value / min)) / Math.log(max / min));
    assert.ok(places.length >= 2, `${splits}`);
    assert.ok(places[0] >= -0.01 && places.at(-1) <= height + 0.01, `${places}`);
    for (let index = 1; index < places.length; index++) assert.ok(places[index] - places[index - 1] >= 15, `${places}`);
  });
}

test("the range of an axis suits its values", () => {
  assert.deepEqual([yRange(null, null), yRange(0, 0), yRange(2, 2), yRange(0, 100)], [[0, 1], [-1, 1], [1.8, 2.2], [0, 106]]);
  assert.deepEqual([logRange(null, null, null), logRange(null, 2, 2)], [[0.1, 10], [1, 4]]);
});

test("marks keep a distance, and many of a kind have one line", () => {
  assert.deepEqual(placeMarks("stop", [200, 0, 4, 15], 600, 1), { places: [0, 15, 200], lines: [0, 15, 200] });
  const many = Array.from({ length: 50 }, (_, index) => 12 * index);
  assert.deepEqual([placeMarks("stop", many, 600, 1).places.length, placeMarks("stop", many, 600, 1).lines], [50, [0]]);
  assert.deepEqual(placeMarks("checkpoint", many, 600, 1).lines, []);
});

test("colors get an opacity", () => assert.equal(pale("#0072b2", 0.5), "rgba(0, 114, 178, 0.5)"));

test("zooming stays within the steps and shows two of them at least", () => {
  const after = (change) => (change(), view.range);
  assert.deepEqual(after(() => view.zoom([-10, 50])), [0, 50]);
  assert.deepEqual(after(() => view.zoom([30, 30])), [29, 31]);
  assert.deepEqual(after(() => view.zoomBy(10)), [20, 40]);
  assert.deepEqual(after(() => view.pan(-5)), [0, 20]);
  assert.deepEqual(after(() => view.pan(50)), [80, 100]);
  assert.deepEqual(after(() => view.zoom(null)), [0, 100]);
});

test("the cursor stays within the steps; without one the last place is shown", () => {
  view.moveTo(1000);
  const timed = { at: [1, 99, 101], steps: [1, 99, 101] };
  assert.deepEqual([view.step, view.placeIn(timed, 50)], [100, 1]);
  view.moveTo(null);
  assert.deepEqual([view.step, view.placeIn(timed), view.placeIn(timed, 100), view.placeIn(timed, 0)], [null, 2, 1, 0]);
});

test("a search without a match leaves all names", () => {
  const places = ["MLP", "att", "attention", "none"].map((text) => (view.search(text), view.matching(["0.mlp", "0.attention", "1.mlp"])));
  assert.deepEqual(places, [[0, 2], [1], [1], [0, 1, 2]]);
});

test("plots on the screen change at once, the others when they come into view", () => {
  const changed = [], plot = (isOnScreen) => ({ isOnScreen, ownLog: true, showStep: () => changed.push("step"), showOptions: () => changed.push("options") });
  view.plots = [plot(true), plot(false)];
  view.moveTo(5);
  view.setOptions({ log: true });
  assert.deepEqual(changed, ["step", "options"]);
  assert.deepEqual(view.plots.map(({ stale, ownLog }) => [stale, ownLog]), [[undefined, null], [true, null]]);
});

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { importScript, setPage } from "./stubs.js";

// The page of a run that the test in Python has made.
setPage(JSON.parse(readFileSync(process.env.PAGE_DATA)));
const { axes, axis, extent, firstAtLeast, groupBy, markKinds, markLook, markOf, nearest, runs } = await importScript("data.js");
const [run] = runs;

test("the nearest entry of a sorted array", () => {
  const places = [-5, 1, 2.4, 2.5, 2.6, 9].map((value) => nearest([1, 2, 3, 5], value));
  assert.deepEqual(places, [0, 0, 1, 1, 2, 3]);
  assert.equal(nearest([], 1), -1);
  assert.deepEqual([0, 1, 1.5, 6].map((value) => firstAtLeast([1, 1, 2], value)), [0, 0, 2, 3]);
});

test("items are grouped in their order", () => {
  assert.deepEqual([...groupBy([3, 1, 5, 2], (value) => value % 2)], [[1, [3, 1, 5]], [0, [2]]]);
});

test("a bin has the name of its end nearer to 0, and the smallest one that of its other end", () => {
  const histograms = run.histograms.get("gradient_histograms"), filled = [];
  for (let bin = histograms.bins - 1; bin >= 0; bin--) {
    if (histograms.steps.some((_, step) => histograms.count(step, 0, bin))) filled.push(histograms.label(0, bin));
  }
  assert.deepEqual(filled, ["1", "< 1.4e−14", "0", "−4.7e−10"]); // a histogram reaches 31 octaves down
});

test("steps at which a layer has no histogram are not its steps", () => {
  const histograms = run.histograms.get("gradient_histograms");
  assert.deepEqual([...histograms.steps], [1, 2]);
  assert.deepEqual(histograms.names.map((_, row) => histograms.measured(row).places), [[0, 1], [1]]);
});

test("a value that was NaN is told from one that was not recorded", () => {
  const counted = run.layers.get("counted"), plain = run.layers.get("plain");
  assert.deepEqual([0, 1, 2].map((row) => counted.cell(0, row, 0)), [1, NaN, undefined]);
  assert.deepEqual([0, 1, 2].map((row) => counted.cell(0, row, 1)), [0, 2, 0]); // how many NaN there were is a number
  const ofTwo = run.layers.get("two hooks");
  assert.deepEqual([0, 1].map((row) => ofTwo.measured(row, 0).steps), [[1, 2], [2]]);
  assert.deepEqual([0, 1].map((row) => plain.cell(0, row, 0)), [2, NaN]);
});

test("a range of steps is written with its extremes", () => {
  const curve = run.curves.get("train/loss");
  assert.deepEqual([curve.exact, curve.text(0), curve.lastStep], [true, "3", 2]);
  Object.assign(curve, { exact: false, lowest: [1, 3], highest: [5, 3] });
  assert.deepEqual([curve.text(0), curve.text(1)], ["3 (1 … 5)", "2"]);
});

test("all steps of curves, layers and histograms are shown", () => {
  assert.deepEqual(extent(), [1, 2]);
});

test("steps have a place in time and in tokens", () => {
  assert.deepEqual(axes.map(({ name }) => name), ["step", "time", "tokens"]);
  Object.assign(run.clock, { steps: [1, 2], seconds: [0, 6], tokens: 50 });
  const curve = run.curves.get("train/loss");
  Object.assign(axis, { name: "time", seconds: 60 });
  assert.deepEqual([run.at(1.5), [...curve.at], extent()], [0.05, [0, 0.1], [0, 0.1]]);
  Object.assign(axis, { name: "tokens" });
  assert.deepEqual([...curve.at], [50, 100]);
  Object.assign(axis, { name: "step" });
});

test("events of Python's table have its marks, the most frequent other kinds one each", () => {
  const [saved, ...own] = run.events;
  assert.equal(markOf(saved), "checkpoint");
  assert.deepEqual(markLook("checkpoint"), { sign: "|", color: "muted" });
  const signs = markKinds.map((kind) => markLook(kind).sign);
  assert.equal(new Set(signs).size, signs.length);
  assert.deepEqual(own.slice(0, 2).map(markOf), ["own_0", "own_0"]);
  assert.equal(markOf(own.at(-1)), "other");
  assert.equal(markLook("constructor").color, "muted");
  assert.deepEqual(markKinds.slice(-7), ["own_0", "own_1", "own_2", "own_3", "own_4", "own_5", "other"]);
});

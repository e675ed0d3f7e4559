import assert from "node:assert/strict";
import { test } from "node:test";

import { importScript, setPage } from "./stubs.js";

setPage({});
const { ColorScale, ramp, spansOf } = await importScript("layers.js");
const { view } = await importScript("plots.js");

test("a ramp begins and ends with its colors", () => {
  const colors = ramp([[0, 0, 0], [100, 200, 50], [255, 255, 255]]);
  assert.deepEqual([colors.length, colors[0], colors[255]], [256, [0, 0, 0, 255], [255, 255, 255, 255]]);
  assert.deepEqual(colors[51], [40, 80, 20, 255]);
});

test("values of one size have a linear scale", () => {
  const scale = new ColorScale([1, 2, 3, NaN, undefined]);
  assert.deepEqual([scale.log, scale.signed, scale.place(1), scale.place(2), scale.value(1)], [false, false, 0, 0.5, 3]);
});

test("vanishing norms have a log scale from the smallest to the largest", () => {
  const norms = Array.from({ length: 12 }, (_, index) => 10 ** (-2 * index)), scale = new ColorScale(norms);
  assert.equal(scale.log, true);
  assert.ok(Math.abs(scale.value(0) / 1e-22 - 1) < 1e-6 && !scale.hasBelow);
  assert.equal(new Set(norms.map((value) => String(scale.color(value)))).size, 12);
});

test("a log scale begins where the usual values do, and says that some are below", () => {
  const scale = new ColorScale([...Array.from({ length: 100 }, (_, index) => 10 ** -(index % 5)), 1e-30, 0]);
  assert.deepEqual([scale.small, scale.hasBelow, scale.place(0), scale.place(1)], [1e-4, true, 0, 1]);
});

test("values on both sides of 0 have the middle of the ramp at 0", () => {
  for (const values of [[-1, 2], [-1000, -1, 0.5, 1, 2]]) {
    const scale = new ColorScale(values);
    assert.deepEqual([scale.signed, scale.place(0), scale.value(0.5)], [true, 0.5, 0]);
    for (const place of [0, 0.2, 0.9]) assert.ok(Math.abs(scale.place(scale.value(place)) - place) < 1e-9);
  }
});

test("values that are all alike, and none, have a color", () => {
  assert.equal(new ColorScale([2, 2]).place(2), 0.5);
  assert.equal(new ColorScale([]).color(0.5).length, 4);
});

test("steps of different widths leave no gaps, and steps without a measurement do", () => {
  view.range = [0, 10];
  const shown = (at, steps) => spansOf({ at, steps }, 10).map(([first, last]) => (first < last ? first : "-")).join("");
  assert.equal(shown([0, 1, 7, 9, 10], [1, 2, 3, 4, 5]), "0111222233"); // on an axis of time
  assert.equal(shown([0, 1, 2, 8, 9], [0, 1, 2, 8, 9]), "0122--3334"); // on that of steps
});

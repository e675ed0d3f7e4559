import assert from "node:assert/strict";
import { test } from "node:test";

import { importScript } from "./stubs.js";

const { duration, number, percent, plural, short, tick, time, unitOf, visible } = await importScript("format.js");

/** Compare what a function returns for each input. */
function check(format, expected) {
  for (const [text, ...inputs] of expected) assert.equal(format(...inputs), text, `of ${inputs}`);
}

test("numbers have a sensible count of digits", () => {
  check(number, [
    ["0", 0], ["−3", -3], ["1,234,567", 1234567], ["1e7", 1e7], ["1.235e7", 12345678], ["0.3333", 1 / 3], ["0.33", 1 / 3, 2],
    ["1.23e−4", 0.000123], ["−1.5e−10", -1.5e-10], ["12,350", 12345.6], ["4,923", 4922.7], ["−1,235", -1234.5], ["NaN", "NaN"], ["∞", "Infinity"], ["−∞", -Infinity],
    ["–", null], ["–", undefined],
  ]);
});

test("numbers of an axis are short", () => {
  check(tick, [["0", 0], ["20k", 20000], ["1.5M", 1.5e6], ["−2G", -2e9], ["1e12", 1e12], ["1e−6", 1e-6], ["0.1", 0.1], ["999", 999]]);
});

test("durations are in a unit that suits them", () => {
  check(duration, [
    ["12 µs", 12e-6], ["1.5 ms", 0.0015], ["2.3 s", 2.3456], ["15.0 s", 15], ["1 m 05 s", 65], ["1 m 00 s", 59.96], ["2 h 00 m", 7200],
    ["2 m 14 s", 134], ["1 d 01 h", 90000],
    ["–", null], ["∞", Infinity],
  ]);
});

test("the name of a metric says its unit", () => {
  const written = (value, name) => `${unitOf(name).format(value)} in ${unitOf(name).unit || "no unit"}`;
  check(written, [
    ["5 tokens/s in tokens/s", 5, "throughput/tokens_per_s"], ["5 steps/s in steps/s", 5, "steps_per_second"],
    ["2.0 s in s", 2, "throughput/step_seconds"], ["25 % in %", 0.25, "data_wait_share"], ["3 GiB in GiB", 3, "memory_GiB"],
    ["3 B in B", 3, "bytes"], ["3 MB in MB", 3, "peak/mb"], ["3 in no unit", 3, "train/loss"], ["3 in no unit", 3, "constructor"],
    ["3 in no unit", 3, "megabytes"],
  ]);
});

test("long names are cut in the middle, on one line", () => {
  check(short, [["abc", "abc", 5], ["ab…fg", "abcdefg", 5], ["a b c", "a\n b\tc"], ["abc…fg", "abcdefg", 6]]);
});

test("characters that change the direction or are invisible become visible", () => {
  check(visible, [["a\\u202eb", "a\u202eb"], ["\\u001b[31m", "\x1b[31m"], ["a\nb\tc", "a\nb\tc"], ["<b>", "<b>"]]);
});

test("other texts", () => {
  check(percent, [["12.5 %", 0.125], ["NaN %", "NaN"]]);
  check(plural, [["1 layer", 1, "layer"], ["0 layers", 0, "layer"], ["1,000 steps", 1000, "step"]]);
  check(time, [["2026-01-02 03:04:05 UTC", "2026-01-02T03:04:05+00:00"], ["1970-01-01 00:00:10 UTC", 10], ["long ago", "long ago"]]);
});

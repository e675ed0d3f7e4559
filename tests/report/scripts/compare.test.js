import assert from "node:assert/strict";
import { test } from "node:test";

import { importScript, setPage } from "./stubs.js";

setPage({});
const { changeText } = await importScript("compare.js");

test("changes are written as in a terminal", () => {
  const texts = [-0.0191, 0.25, 12.5, 1e-6, 0.005, 0, null, "Infinity"].map(changeText);
  assert.deepEqual(texts, ["−1.9 %", "+25 %", "+1,250 %", "+<0.01 %", "+0.50 %", "=", "", "+∞ %"]);
});

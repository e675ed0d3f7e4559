// Enough of a browser to import the page's scripts; nothing is drawn.

import { readFileSync } from "node:fs";
import { runInThisContext } from "node:vm";

const folder = new URL("../../../src/hookline/report/", import.meta.url);

/** Let the scripts read this data as that of the page. */
export function setPage(page) {
  const data = { marks: { kinds: {}, groups: {} }, arrays: [], runs: [], ...page };
  globalThis.document = { getElementById: () => ({ textContent: JSON.stringify(data) }) };
  globalThis.IntersectionObserver = globalThis.ResizeObserver = class { observe() {} };
  globalThis.devicePixelRatio = 1;
  globalThis.uPlot = runInThisContext(`${readFileSync(new URL("uPlot.iife.min.js", folder))}; uPlot`);
}

/** Return an array as the page has it. */
export const base64 = (array) => Buffer.from(array.buffer).toString("base64");

export const importScript = (name) => import(new URL(name, folder));

// The page: its sections in their order, the links between them, and the keys.

const main = document.getElementById("main");
const byId = (id) => document.getElementById(id);
const places = { curves: new Map(), series: new Map(), hooks: new Map(), events: new Map() }; // what alerts link to

/** Add a section with a heading and a link in the navigation; nothing is added if it has no content. */
function section(id, title, ...content) {
  const shown = content.filter(Boolean);
  if (!shown.length) return;
  const heading = el("h2", { id: `${id}-heading` }, title);
  main.append(el("section", { id, "aria-labelledby": `${id}-heading` }, heading, ...shown));
  byId("sections").append(el("a", { href: `#${id}` }, title));
}

/** Make a table of rows; cells are nodes, numbers or text. */
function table(heads, rows, attributes = {}) {
  const cell = (tag, content) => {
    const isNumber = typeof content === "number";
    const node = content instanceof Node ? content : isNumber ? number(content) : named("span", content ?? "–", 300);
    return el(tag, isNumber || content?.classList?.contains("number") ? { class: "number" } : {}, node);
  };
  return el("div", { class: "scroll" }, el("table", attributes,
    heads ? el("thead", {}, el("tr", {}, ...heads.map((head) => cell("th", head)))) : null,
    el("tbody", {}, ...rows.map((row) => (row instanceof Node ? row : el("tr", {}, ...row.map((content) => cell("td", content))))))));
}

const figures = (text) => el("span", { class: "number" }, text);

/** Make a list of names and values; nested values are indented, empty ones left out. */
function facts(value) {
  const entries = Object.entries(value ?? {}).filter(([, one]) => one !== null && one !== undefined && one !== "" && !(Array.isArray(one) && !one.length));
  return el("dl", { class: "facts" }, ...entries.flatMap(([name, one]) => [named("dt", name.replace(/_/g, " "), 60), el("dd", {}, factValue(one))]));
}

function factValue(one) {
  if (one instanceof Node) return one;
  if (Array.isArray(one)) return one.every((item) => typeof item !== "object" || item === null) ? named("span", one.join(" "), 400) : el("div", {}, ...one.map((item) => factValue(item)));
  if (typeof one === "object" && one !== null) return facts(one);
  return typeof one === "number" ? number(one, 6) : named("span", one, 400);
}

/** Make an element for each run, under its name if there are several. */
function perRun(make) {
  return runs.map((run) => {
    const content = make(run);
    if (!content || !several) return content;
    return el("div", { class: "of-run" }, runName(run, "h3"), content);
  }).filter(Boolean);
}

function runName(run, tag = "span") {
  return el(tag, { class: "run-name" }, el("span", { class: `swatch line-${run.index % COLOURS}` }), named("span", run.name, 50));
}

// ---- alerts and overview ----------------------------------------------------------------------------------------------

const SEVERITIES = { error: "Error", warning: "Warning", info: "Note" };

function alerts() {
  const rank = ({ severity }) => Math.max(Object.keys(SEVERITIES).indexOf(severity), 0);
  const all = runs.flatMap((run) => run.alerts).sort((a, b) => rank(a) - rank(b)); // those of each run are sorted already
  if (!all.length) return el("p", { class: "quiet" }, "Nothing was found that needs attention.");
  const items = all.map((alert) => {
    const severity = alert.severity in SEVERITIES ? alert.severity : "info";
    const link = el("a", { href: "#curves", on: { click: (event) => (event.preventDefault(), goTo(alert)) } }, visible(alert.text).slice(0, 500));
    const where = alert.step === null || alert.step === undefined ? "" : `step ${number(alert.step)}`;
    return el("li", { class: `alert ${severity}` }, el("span", { class: "severity" }, SEVERITIES[severity]), el("span", { class: "what" }, several ? runName(alert.run) : null, link), el("span", { class: "where" }, where));
  });
  const list = el("ul", { class: "alerts" }, ...items.slice(0, 12));
  if (items.length <= 12) return list;
  return el("div", {}, list, el("details", {}, el("summary", {}, `${items.length - 12} more`), el("ul", { class: "alerts" }, ...items.slice(12))));
}

/** Scroll to what an alert is about, with the cursor at its step. */
function goTo(alert) {
  const place = alert.place ?? {};
  let target = null;
  if ("curve" in place) target = places.curves.get(place.curve)?.figure;
  else if ("series" in place) {
    const map = places.series.get(place.series);
    map?.select(place.name, place.column);
    target = map?.figure;
  } else if ("hook" in place) target = places.hooks.get(place.hook);
  else if ("event" in place) target = places.events.get(`${alert.run.index}/${place.event}/${alert.step}`) ?? places.events.get(`${alert.run.index}/${place.event}`);
  target ??= byId("curves") ?? byId("overview");
  target.closest("details")?.setAttribute("open", "");
  target.scrollIntoView({ block: "center", behavior: "instant" });
  if (!target.hasAttribute("tabindex")) target.setAttribute("tabindex", "-1");
  target.focus({ preventScroll: true });
  if (typeof alert.step === "number") {
    if (alert.step < view.range[0] || alert.step > view.range[1]) view.zoom(null);
    view.moveTo(alert.step);
  }
}

const LESS_IS_BETTER = /loss|perplexity|error|mse|mae/i;

/** Return the metrics that a reader asks for first, with their last and their best value. */
function headline(run) {
  const wanted = [...run.curves.values()].filter(({ name }) => /^val\//.test(name) || name === "train/loss").slice(0, 6);
  return wanted.map((curve) => {
    const less = LESS_IS_BETTER.test(curve.name), best = less ? curve.data.least : curve.data.greatest;
    return { curve, best, word: less ? "lowest" : "highest" };
  });
}

function overview() {
  const rows = [["outcome", (run) => outcome(run)], ["reason", (run) => run.run.reason],
    ["steps", (run) => run.run.counters?.step ?? (run.curves.size ? Math.max(...[...run.curves.values()].map((curve) => curve.lastStep)) : null)],
    ["epochs", (run) => run.run.counters?.epoch || null], ["duration", (run) => (run.run.counters ? duration(run.run.counters.seconds) : null)],
    ["tokens", (run) => run.run.counters?.tokens_seen], ["started", (run) => (run.run.started ? time(run.run.started) : null)],
    ["run id", (run) => run.id], ["name", (run) => (several ? run.labels.name : null)], ["tags", (run) => (run.labels.tags?.length ? run.labels.tags.join(", ") : null)],
    ["notes", (run) => (run.labels.notes ? el("span", { class: "notes" }, visible(run.labels.notes)) : null)],
    ["resumed from", (run) => lineage(run)], ["attempts", (run) => (run.run.attempts?.length > 1 ? run.run.attempts.length : null)]];
  if (several) {
    const names = [...new Set(runs.flatMap((run) => headline(run).map(({ curve }) => curve.name)))];
    for (const name of names) rows.push([name, (run) => {
      const found = headline(run).find(({ curve }) => curve.name === name);
      return found ? `${found.curve.unit.format(found.curve.data.last?.[1])} (${found.word} ${found.curve.unit.format(found.best?.[1])} at step ${number(found.best?.[0])})` : null;
    }]);
    const filled = rows.map(([label, read]) => [label, runs.map(read)]).filter(([, values]) => values.some((value) => value !== null && value !== undefined && value !== ""));
    return table(["", ...runs.map((run) => runName(run))], filled.map(([label, values]) => [el("span", { class: "row-label" }, short(label)), ...values]), { class: "compare" });
  }
  const [run] = runs;
  const tiles = headline(run).map(({ curve, best, word }) => el("div", { class: "tile" }, named("span", curve.name, 30, { class: "tile-name" }),
    el("span", { class: "tile-value" }, curve.unit.format(curve.data.last?.[1])), el("span", { class: "tile-note" }, best ? `${word} ${curve.unit.format(best[1])} at step ${number(best[0])}` : "")));
  return el("div", {}, tiles.length ? el("div", { class: "tiles" }, ...tiles) : null, facts(Object.fromEntries(rows.map(([label, read]) => [label, read(run)]))));
}

function outcome(run) {
  const text = run.run.outcome ?? "still running, or killed, when this was written";
  const good = text === "completed", bad = ["failed", "non_finite"].includes(text);
  return el("span", { class: `outcome ${good ? "good" : bad ? "bad" : "open"}` }, text === "non_finite" ? "non-finite weights" : short(text));
}

function lineage(run) {
  const from = run.run.lineage;
  if (!from) return null;
  return typeof from === "object" ? short(Object.entries(from).map(([name, value]) => `${name}: ${value}`).join(", "), 200) : short(from, 200);
}

// ---- curves -----------------------------------------------------------------------------------------------------------

const ANATOMY = ["data_wait", "forward_backward", "optimizer", "hooks"];

/** Group the metrics: training with validation and the learning rate, throughput, then by what stands before the "/". */
function groupCurves() {
  const groups = new Map([["Training and validation", new Map()], ["Throughput", new Map()]]);
  const names = [...new Set(runs.flatMap((run) => [...run.curves.keys()]))];
  for (const name of names) {
    const [, prefix, rest] = /^([^/]*)\/(.*)$/s.exec(name) ?? [null, "", name];
    let group = "Other", title = name;
    if (/^(train\/|val\/)?lr(\/|$|-)|^lr_/.test(name)) group = "Training and validation";
    else if (prefix === "train" || prefix === "val") {
      group = "Training and validation";
      title = names.includes(`train/${rest}`) && names.includes(`val/${rest}`) ? rest : name;
    } else if (prefix === "throughput") group = "Throughput";
    else if (prefix) group = prefix;
    if (!groups.has(group)) groups.set(group, new Map());
    const plots = groups.get(group);
    plots.set(title, [...(plots.get(title) ?? []), name]);
  }
  return groups;
}

function curves() {
  const content = [];
  for (const [group, plots] of groupCurves()) {
    if (!plots.size) continue;
    const drawn = new Map(); // by the values: a metric that is recorded twice, as lr and train/lr, is drawn once
    const order = (title) => (title === "loss" || title === "train/loss" ? 0 : /^(train\/)?lr/.test(title) ? 1 : 2);
    for (const [title, names] of [...plots].sort(([a], [b]) => order(a) - order(b))) {
      const found = [...names].sort().flatMap((name) => runs.map((run) => run.curves.get(name)).filter(Boolean));
      const key = found.map((curve) => `${curve.run.index}:${curve.key}`).join();
      const same = drawn.get(key);
      if (same) {
        for (const name of names) places.curves.set(name, same);
        same.alike(names);
        continue;
      }
      const plot = new CurvePlot(title, found);
      plot.searched = names.join(" ");
      if (title === "loss" || (title === "train/loss" && !drawn.size)) plot.figure.classList.add("main");
      drawn.set(key, plot);
      for (const name of names) places.curves.set(name, plot);
    }
    content.push(el("div", { class: "group" }, named("h3", group, 60), el("div", { class: "cards" }, ...[...drawn.values()].map((plot) => plot.figure))));
  }
  if (!content.length) return [el("p", { class: "quiet" }, "No metrics were recorded.")];
  return [eventLegend(), ...content];
}

/** Make the legend of the events' marks; a click hides those of a kind. */
function eventLegend() {
  const counts = new Map();
  for (const event of marks()) counts.set(markOf(event), (counts.get(markOf(event)) ?? 0) + 1);
  if (!counts.size) return null;
  const buttons = EVENT_KINDS.filter((kind) => counts.has(kind)).map((kind) => el("button", { type: "button", class: "chip", "aria-pressed": "true", title: "Show or hide these marks", on: { click: ({ currentTarget }) => {
    const hide = !view.hiddenMarks.has(kind);
    view.hiddenMarks[hide ? "add" : "delete"](kind);
    currentTarget.setAttribute("aria-pressed", String(!hide));
    view.update("hiddenMarks");
  } } }, el("span", { class: `mark ${MARK_COLOURS[kind]}` }, kind === "checkpoint" ? "▲" : "▼"), `${kind} (${number(counts.get(kind))})`));
  return el("div", { class: "chips", role: "group", "aria-label": "Events on the time axis" }, el("span", { class: "note" }, "Events on the step axis:"), ...buttons);
}

// ---- layers -----------------------------------------------------------------------------------------------------------

function collect(kind) {
  const names = [...new Set(runs.flatMap((run) => [...run[kind].keys()]))];
  return names.map((name) => [name, runs.map((run) => run[kind].get(name)).filter((one) => one && one.names.length)]).filter(([, maps]) => maps.length);
}

function layers() {
  const maps = collect("layers").map(([name, found]) => {
    const map = new HeatMap(name, found);
    places.series.set(name, map);
    return map.figure;
  });
  return maps.length ? [el("div", { class: "cards" }, ...maps)] : [];
}

function gradientFlow() {
  const found = collect("layers").find(([name, maps]) => /grad/i.test(name) && maps[0].columns.includes("norm") && maps[0].steps.length);
  return found ? [new GradientFlow(found[1]).figure] : [];
}

const histograms = () => collect("histograms").map(([name, found]) => new HistogramPlot(name, found).figure);

// ---- cost -------------------------------------------------------------------------------------------------------------

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** Return the parts of a step with their share of its time over the whole run. */
function anatomy(run) {
  const seconds = (name) => {
    const curve = run.curves.get(`throughput/${name}_seconds`), values = curve ? Array.from(curve.mean).filter(Number.isFinite) : [];
    return values.length ? mean(values) : null;
  };
  const step = seconds("step");
  if (!step) return null;
  const parts = ANATOMY.map((name) => [name.replace(/_/g, " "), seconds(name)]).filter(([, value]) => value !== null);
  if (!parts.some(([name]) => name === "hooks") && run.run.costs?.length && run.run.counters?.step) {
    parts.push(["hooks", run.run.costs.reduce((sum, cost) => sum + (toNumber(cost.seconds) || 0), 0) / run.run.counters.step]);
  }
  const rest = Math.max(step - parts.reduce((sum, [, value]) => sum + value, 0), 0);
  if (rest > step * 0.001) parts.push([parts.some(([name]) => name === "forward backward") ? "other" : "model and optimizer", rest]);
  const total = Math.max(step, parts.reduce((sum, [, value]) => sum + value, 0));
  const bar = el("div", { class: "stack", role: "img", "aria-label": parts.map(([name, value]) => `${name} ${PERCENT.format(value / total)}`).join(", ") },
    ...parts.map(([, value], index) => {
      const part = el("span", { class: `fill-${index % COLOURS}` });
      part.style.width = `${(100 * value) / total}%`;
      return part;
    }));
  const legend = el("ul", { class: "legend" }, ...parts.map(([name, value], index) => el("li", {}, el("span", { class: `swatch box line-${index % COLOURS}` }), `${name} ${duration(value)} (${PERCENT.format(value / total)})`)));
  return el("div", { class: "card wide" }, el("h4", {}, `A step takes ${duration(step)} on average`), bar, legend);
}

function hookCosts(run) {
  const costs = (run.run.costs ?? []).filter((cost) => cost && typeof cost === "object");
  if (!costs.length) return null;
  const total = toNumber(run.run.counters?.seconds) || null, most = Math.max(...costs.map((cost) => toNumber(cost.seconds) || 0));
  const rows = costs.map((cost) => {
    const seconds = toNumber(cost.seconds) || 0, bar = el("span", { class: "cost" });
    bar.style.width = `${most ? (100 * seconds) / most : 0}%`;
    const row = el("tr", {}, el("td", {}, named("span", cost.hook, 40)), el("td", {}, short(cost.kind ?? "", 40)), el("td", { class: "number" }, number(cost.calls)),
      el("td", { class: "number" }, duration(seconds)), el("td", { class: "number" }, cost.calls ? duration(seconds / cost.calls) : "–"),
      el("td", { class: "number" }, total ? PERCENT.format(seconds / total) : "–"), el("td", { class: "bar-cell" }, bar));
    if (!places.hooks.has(cost.hook)) places.hooks.set(cost.hook, row);
    return row;
  });
  return el("div", { class: "card wide" }, el("h4", {}, "Time in hooks"), table(["hook", "kind", figures("calls"), figures("total"), figures("per call"), figures("of the run"), ""], rows));
}

// ---- events, tables and images, config --------------------------------------------------------------------------------

function events(run) {
  if (!run.events.length) return null;
  const rows = run.events.map((event) => {
    const row = el("tr", {}, el("td", { class: "number" }, typeof event.step === "number" ? number(event.step) : "–"), el("td", {}, el("span", { class: `mark ${MARK_COLOURS[markOf(event)]}` }, "● "), short(event.kind.replace(/_/g, " "), 40)),
      el("td", { class: "text" }, named("span", eventText(event), 240)), el("td", { class: "time" }, typeof event.time === "number" ? time(event.time) : "–"));
    places.events.set(`${run.index}/${event.kind}/${event.step}`, row);
    if (!places.events.has(`${run.index}/${event.kind}`)) places.events.set(`${run.index}/${event.kind}`, row);
    if (typeof event.step === "number") row.addEventListener("click", () => view.moveTo(event.step));
    return row;
  });
  const heads = [figures("step"), "event", "what", "time"];
  const left = (run.data.event_count ?? rows.length) - rows.length;
  const first = el("div", {}, table(heads, rows.slice(0, 20)), left > 0 ? el("p", { class: "note" }, `Of ${number(run.data.event_count)} events, the first and the last ${number(rows.length / 2)} are here.`) : null);
  return rows.length <= 20 ? first : el("div", {}, first, el("details", {}, el("summary", {}, `${number(rows.length - 20)} more`), table(heads, rows.slice(20))));
}

function media(run) {
  const items = (run.data.media ?? []).map((one) => {
    const caption = el("figcaption", {}, named("h4", one.name, 60), el("span", { class: "unit" }, `step ${number(one.step)}`));
    if (one.type === "image") {
      const image = el("img", { alt: short(`${one.name} at step ${one.step}`, 200), loading: "lazy" });
      image.addEventListener("load", () => image.classList.toggle("tiny", image.naturalWidth < 128));
      image.src = `data:image/png;base64,${one.png}`;
      return el("figure", { class: "card" }, caption, image);
    }
    const more = one.total_rows > one.rows.length ? el("p", { class: "note" }, `the first ${number(one.rows.length)} of ${plural(one.total_rows, "row")}`) : null;
    const rows = one.kind === "confusion_matrix" ? shaded(one.rows) : one.rows.map((cells) => cells.map((cell) => (["NaN", "Infinity", "-Infinity"].includes(cell) ? Number(cell) : typeof cell === "number" ? cell : cell === null ? "–" : String(cell))));
    return el("figure", { class: `card${one.columns.length > 6 ? " wide" : ""}` }, caption, table(one.columns.map(String), rows), more);
  });
  return items.length ? el("div", { class: "cards" }, ...items) : null;
}

/** Return the rows of a confusion matrix, each cell shaded by its share of the row. */
function shaded(rows) {
  return rows.map((cells) => {
    const total = cells.reduce((sum, cell) => sum + (typeof cell === "number" ? cell : 0), 0);
    return el("tr", {}, ...cells.map((cell) => {
      if (typeof cell !== "number") return el("th", {}, named("span", cell ?? "–", 40));
      const shade = el("span", { class: "shade" });
      shade.style.opacity = String(total ? (0.75 * cell) / total : 0);
      return el("td", { class: "number shaded" }, shade, el("span", {}, number(cell)));
    }));
  });
}

function differences() {
  const settings = runs.map((run) => run.data.settings ?? {});
  const paths = [...new Set(settings.flatMap((one) => Object.keys(one)))];
  const text = (value) => (value === undefined ? "–" : value === null ? "null" : String(value));
  const differing = paths.filter((path) => new Set(settings.map((one) => text(one[path]))).size > 1);
  if (!differing.length) return [el("p", { class: "quiet" }, "The configs of these runs are the same.")];
  return [table(["setting", ...runs.map((run) => runName(run))], differing.map((path) => [el("span", { class: "row-label" }, short(path, 80)), ...settings.map((one) => text(one[path]))]), { class: "compare" })];
}

function hookList(run) {
  const hooks = (run.run.hooks ?? []).filter((hook) => hook && typeof hook === "object");
  if (!hooks.length) return null;
  const rows = hooks.map((hook) => {
    const values = Object.entries(hook.parameters ?? {}).filter(([, value]) => value !== null).map(([name, value]) => `${name}=${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
    const row = el("tr", {}, ...[hook.name, hook.kind, hook.enabled ? "on" : "switched off", hook.schedule, hook.policy].map((text) => el("td", {}, named("span", text ?? "–", 40))),
      el("td", { class: "number" }, number(hook.failures ?? 0)), el("td", { class: "parameters" }, named("span", values, 200)));
    if (!places.hooks.has(hook.name)) places.hooks.set(hook.name, row);
    return row;
  });
  return table(["hook", "kind", "state", "schedule", "when it fails", figures("failures"), "parameters"], rows);
}

function attempts(run) {
  const all = (run.run.attempts ?? []).filter((one) => one && typeof one === "object");
  if (!all.length) return null;
  const rows = all.map((one, index) => [index + 1, one.started ? time(one.started) : "–", one.closed ? time(one.closed) : "–", one.outcome ?? "–", one.reason ?? "", one.host ?? "–", figures(String(one.world_size ?? 1))]);
  return table([figures("attempt"), "started", "ended", "outcome", "reason", "host", figures("processes")], rows);
}

function about(run) {
  const { environment, git, config_hash: hash, seed, lineage: from, lost } = run.run;
  const parts = [["Environment", facts(environment)], ["Code", facts({ ...git, "config hash": hash, seed, "lost lines": lost || null })]];
  if (from) parts.push(["Lineage", facts(typeof from === "object" ? from : { from })]);
  const lists = el("div", { class: "columns" }, ...parts.map(([title, content]) => el("div", {}, el("h4", {}, title), content)));
  const list = attempts(run);
  return el("div", {}, lists, ...(list ? [el("h4", {}, "Attempts"), list] : []));
}

const config = (run) => (run.data.config ? el("details", { open: !several }, el("summary", {}, "config.yaml"), el("pre", {}, visible(run.data.config))) : null);

// ---- controls ---------------------------------------------------------------------------------------------------------

const KEYS = [["/", "find a layer or a metric"], ["Tab", "go from plot to plot"], ["← →", "move the cursor in the focused plot; with Shift ten times as far"], ["↑ ↓", "choose a layer in a heat map"], ["Home End", "go to the first or the last step"],
  ["+ −", "zoom in or out around the cursor"], ["[ ]", "move the zoomed steps to the left or right"], ["0", "show all steps"], ["l", "log axis of the focused plot"], ["t", "light or dark"], ["Esc", "remove the cursor; leave the search"], ["?", "these keys"]];

/** Show only the plots and layers whose name contains a text; a kind without any match stays as it is. */
function find(text) {
  view.find = text.trim().toLowerCase();
  const curvePlots = view.plots.filter((plot) => plot instanceof CurvePlot);
  const found = curvePlots.filter((plot) => view.matches(plot.searched));
  for (const plot of curvePlots) plot.figure.hidden = found.length > 0 && !found.includes(plot);
  for (const group of document.querySelectorAll(".group")) group.hidden = ![...group.querySelectorAll("figure")].some((figure) => !figure.hidden);
  const layerNames = new Set(runs.flatMap((run) => [...run.layers.values(), ...run.histograms.values()].flatMap((map) => map.names)));
  const count = [...layerNames].filter((name) => view.matches(name)).length;
  byId("found").textContent = view.find ? `${plural(count, "layer")}, ${plural(found.length, "plot")}` : "";
  view.update("find");
}

function connect() {
  byId("find").addEventListener("input", ({ target }) => find(target.value));
  byId("smoothing").addEventListener("input", ({ target }) => {
    byId("smoothing-value").textContent = target.value;
    view.set("smoothing", Number(target.value));
  });
  byId("log").addEventListener("change", ({ target }) => view.set("log", target.checked));
  byId("zoom-in").addEventListener("click", () => view.zoomBy(0.5));
  byId("zoom-out").addEventListener("click", () => view.zoomBy(2));
  byId("zoom-all").addEventListener("click", () => view.zoom(null));
  byId("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);
  const dialog = byId("keys");
  dialog.append(el("h2", { id: "keys-title" }, "Keys"), el("dl", { class: "keys" }, ...KEYS.flatMap(([key, what]) => [el("dt", {}, ...key.split(" ").map((one) => el("kbd", {}, one))), el("dd", {}, what)])),
    el("p", { class: "note" }, "With a mouse: drag over a plot to zoom, double-click to show all steps."), el("form", { method: "dialog" }, el("button", {}, "Close")));
  byId("help").addEventListener("click", () => dialog.showModal());
  const actions = { "/": () => byId("find").focus(), "?": () => dialog.showModal(), "+": () => view.zoomBy(0.5), "=": () => view.zoomBy(0.5), "-": () => view.zoomBy(2), "[": () => view.pan(-0.25), "]": () => view.pan(0.25),
    0: () => view.zoom(null), t: () => setTheme(isDark() ? "light" : "dark"), Escape: () => view.moveTo(null) };
  document.addEventListener("keydown", (event) => {
    const typing = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName) && event.target.type !== "range" && event.target.type !== "checkbox";
    if (typing && event.key === "Escape") event.target.blur();
    if (typing || dialog.open || event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(actions, event.key)) return;
    event.preventDefault();
    actions[event.key]();
  });
  // Plots that were never scrolled to are drawn for the printer, on white.
  let before = null;
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme ?? "";
    document.documentElement.dataset.theme = "light";
    document.documentElement.classList.add("printing");
    colours = new Map();
    for (const details of document.querySelectorAll("details:not([open])")) details.dataset.closed = details.open = true;
    for (const plot of view.plots) plot.draw();
  });
  addEventListener("afterprint", () => {
    for (const details of document.querySelectorAll("details[data-closed]")) details.open = false, delete details.dataset.closed;
    document.documentElement.classList.remove("printing");
    setTheme(before || null);
  });
}

// ---- the page ---------------------------------------------------------------------------------------------------------

function build() {
  const title = several ? `${runs.length} runs` : runs[0].name;
  document.title = `${short(title, 80)} · Hookline report`;
  byId("title").replaceChildren(named("span", title, 60));
  byId("subtitle").textContent = `${several ? "Hookline comparison" : runs[0].name === runs[0].id ? "Hookline report" : short(runs[0].id, 60)} · written ${time(page.written)}`;
  section("alerts", "Alerts", alerts());
  section("overview", "Overview", overview());
  if (several) section("differences", "Config differences", ...differences());
  section("curves", "Curves", ...curves());
  section("layers", "Layers", ...layers());
  section("flow", "Gradient flow", ...gradientFlow());
  section("histograms", "Histograms", ...histograms());
  section("cost", "Cost", ...perRun(anatomy), ...perRun(hookCosts));
  section("media", "Tables and images", ...perRun(media));
  section("events", "Events", ...perRun(events));
  section("hooks", "Hooks", ...perRun(hookList));
  section("about", "Environment", ...perRun(about));
  section("config", "Config", ...perRun(config));
  connect();
  themeChanged();
}

build();
requestAnimationFrame(() => setTimeout(() => (document.documentElement.dataset.drawn = String(Math.round(performance.now())))));

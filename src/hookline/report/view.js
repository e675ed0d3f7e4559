// What all plots share: the zoomed steps, the step of the cursor, smoothing, the log axis, the search and the theme.

const view = {
  range: allSteps, // the steps that are shown
  step: null, // of the cursor
  pointed: null, // the plot under the mouse, if that moved the cursor
  smoothing: 0,
  log: false,
  find: "",
  hiddenMarks: new Set(),
  plots: [], // everything that draws; see Plot
  visible: new Set(), // the plots on the screen

  zoom(range) {
    const [first, last] = allSteps, least = Math.min(2, last - first);
    if (range) {
      const middle = (range[0] + range[1]) / 2, half = Math.max(range[1] - range[0], least) / 2;
      range = [Math.max(first, middle - half), Math.min(last, middle + half)];
    }
    this.range = range && range[1] - range[0] < last - first ? range : allSteps;
    this.update("range");
  },
  zoomBy(factor) {
    const [from, to] = this.range;
    const middle = this.step !== null && this.step >= from && this.step <= to ? this.step : (from + to) / 2;
    this.zoom([middle - (middle - from) * factor, middle + (to - middle) * factor]);
  },
  pan(share) {
    const width = this.range[1] - this.range[0], [first, last] = allSteps;
    const from = Math.min(Math.max(this.range[0] + share * width, first), last - width);
    this.zoom([from, from + width]);
  },
  moveTo(step, pointed = null) {
    this.pointed = pointed;
    this.step = step === null ? null : Math.min(Math.max(step, allSteps[0]), allSteps[1]);
    this.update("step");
  },
  set(name, value) {
    this[name] = value;
    this.update(name);
  },
  /** Update the plots on the screen; the others do so when they come into view. */
  update(what) {
    for (const plot of this.plots) {
      if (this.visible.has(plot)) plot.changed(what);
      else plot.stale = true;
    }
  },
  matches(name) {
    return !this.find || name.toLowerCase().includes(this.find);
  },
};

/** Something that draws into an element when it comes into view, and again when what it shows has changed. */
class Plot {
  constructor(element) {
    this.element = element;
    this.stale = true;
    element.plot = this;
    view.plots.push(this);
    seen.observe(element);
    resized.observe(element);
  }
  /** Draw if that was not done since the last change. */
  show() {
    if (!this.stale) return;
    this.stale = false;
    this.draw();
  }
  changed() { this.draw(); }
}

const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) {
      view.visible.add(target.plot);
      target.plot.show();
    } else view.visible.delete(target.plot);
  }
}, { rootMargin: "150px" });

const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const width = target.clientWidth;
    if (width === target.plot.drawnWidth) continue;
    if (view.visible.has(target.plot)) target.plot.changed("size");
    else target.plot.stale = true;
  }
});

// ---- colours --------------------------------------------------------------------------------------------------------

let colours = new Map();

/** Return a colour of the style sheet, which has one set for light and one for dark. */
function colour(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}

const COLOURS = 8;
const lineColour = (index) => colour(`line-${index % COLOURS}`);

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Switch to "light" or "dark", or to what the system prefers if null, and draw everything again. */
function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  themeChanged();
}

function themeChanged() {
  colours = new Map();
  document.getElementById("theme").textContent = isDark() ? "Light" : "Dark";
  view.update("theme");
}

"""The report in a real browser: what is plotted, searching, zooming, keys, printing, and hostile names."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import Browser
from report_page import write_record
from small_config import config_with

from hookline import read_layers, read_metrics
from hookline.cli import main
from hookline.record import Record
from hookline.stats.histograms import histograms

TEXT = {  # of hostile input, each of which becomes a part of every name and text of a run
    "markup": "<img src=x onerror=pwned()><svg/onload=pwned()><b>",
    "end of the script": "</script><script>pwned()</script><!--<script>",
    "template": "{{data}}${pwned()}'\"`;pwned()//\\u003cscript>",
    "control characters": "\x00\x07\x1b[31m\r\n\u202e\u2028\u2066\ufeff",
    "object": "__proto__",
    "long": "x" * 10_000,
}
SPY = """
window.pwned = () => { window.isPwned = true; };
addEventListener("securitypolicyviolation", (event) => (window.violations ??= []).push(event.blockedURI));
"""
INJECT = """(() => {
  const script = document.createElement("script"), box = document.createElement("div");
  script.textContent = "window.isPwned = true";
  box.innerHTML = '<img src="https://example.invalid/x.png" onerror="window.isPwned = true"><p style="color: red">';
  document.body.append(script, box);
})()"""
STRANGE = "main svg, main b, main script, main iframe, main img:not([src^='data:image/png'])"
TOO_WIDE = """[...document.querySelectorAll("main figure, main canvas")].filter(
  (one) => !one.closest(".scroll") && one.getBoundingClientRect().right > innerWidth).length"""
SMOOTH = """(() => {
  const slider = document.querySelector("#smoothing");
  slider.value = 0.5;
  slider.dispatchEvent(new Event("input"));
})()"""
PLOTS = "[...document.querySelectorAll('.plot, .heat')].map((one) => one.plot).filter(Boolean)"
PLOT_OF = "{plots}.find((plot) => plot.title === '{title}')"


def plot(title: str) -> str:
    """Return the expression for the plot with a title."""
    return PLOT_OF.format(plots=PLOTS, title=title)


def show(browser: Browser, expression: str) -> None:
    """Scroll to a plot and wait until it is drawn."""
    browser.run(f"{expression}.element.scrollIntoView({{ block: 'center' }})")
    browser.wait(f"{expression}.stale === false")
    browser.frames()


def plotted(browser: Browser, title: str, column: int) -> list[tuple[float, float]]:
    """Return the points that uPlot draws of a curve."""
    show(browser, plot(title))
    data: Any = browser.run(f"{plot(title)}.chart.data.map((column) => Array.from(column, (value) => value ?? null))")
    return [(step, value) for step, value in zip(data[0], data[column], strict=True) if value is not None]


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a tiny model with monitors, and return the run's directory."""
    root = tmp_path_factory.mktemp("real")
    config = config_with("{name: gradient_monitor, log_frequency: 2, log_histogram: true}, {name: lr_monitor}")
    forward = "{name: monitor, modules: '*', metrics: [mean, std], every: 2}"
    (root / "a.yaml").write_text(f"{config}  forward: [{forward}]\n")
    words = ["trainer.max_steps=12", "trainer.validate_every=4", "--output", str(root / "runs")]
    assert main(["train", str(root / "a.yaml"), *words]) == 0
    return next((root / "runs").iterdir())


def test_a_real_run_is_plotted_as_it_was_recorded(chromium: Browser, real_run: Path) -> None:
    """The curves, heat maps and the gradient flow show the numbers of the record."""
    chromium.open(real_run / "report.html")
    rows = [row for row in read_metrics(real_run) if "train/loss" in row]
    assert plotted(chromium, "loss", 1) == [(row["step"], pytest.approx(row["train/loss"])) for row in rows]
    validated = [(row["step"], row["val/loss"]) for row in read_metrics(real_run) if "val/loss" in row]
    assert plotted(chromium, "loss", 3) == [(step, pytest.approx(loss)) for step, loss in validated]
    gradients = read_layers(real_run)["gradients"]
    norms = gradients.values[-1, :, gradients.columns.index("norm")].tolist()
    flow = "[...document.querySelectorAll('#flow .plot')][0].plot"
    show(chromium, flow)
    assert chromium.run(f"{flow}.chart.data[1]") == pytest.approx(norms)
    heat = "document.querySelector('#layers .heat').plot"
    show(chromium, heat)
    shown = chromium.run(f"{heat}.rows.map((row) => {heat}.cell({heat}.steps.length - 1, row))")
    assert shown == pytest.approx(norms)
    assert chromium.problems() == []


def test_searching_a_layer(chromium: Browser, real_run: Path) -> None:
    """A search leaves the layers whose name contains the text; / goes to the box, Escape leaves it."""
    chromium.open(real_run / "report.html")
    chromium.key("/")
    for letter in "mlp.widen":
        chromium.key(letter)
    assert chromium.run("document.activeElement.id") == "find"
    names = [name for name in read_layers(real_run)["gradients"].names if "mlp.widen" in name]
    heat = "document.querySelector('#layers .heat').plot"
    show(chromium, heat)
    assert chromium.run(f"{heat}.rows.map((row) => {heat}.nameOf(row))") == names
    assert f"{len(set(names)) + 1} layers" in chromium.run("document.querySelector('#found').textContent")
    chromium.key("Escape")
    assert chromium.run("document.activeElement.id") != "find"


def test_zoom_by_drag_and_by_keys(chromium: Browser, real_run: Path) -> None:
    """Dragging over one plot zooms all of them; + and - zoom, and 0 shows all steps."""
    chromium.open(real_run / "report.html", height=2000)
    show(chromium, plot("loss"))
    area: Any = chromium.run(f"{plot('loss')}.chart.over.getBoundingClientRect().toJSON()")
    left, top, width, height = (area[name] for name in ("left", "top", "width", "height"))
    scale = f"{plot('lr')}.chart.scales.x"
    before = chromium.run(f"[{scale}.min, {scale}.max]")
    chromium.mouse("mouseMoved", left + width * 0.25, top + height / 2)
    chromium.mouse("mousePressed", left + width * 0.25, top + height / 2, "left")
    chromium.mouse("mouseMoved", left + width * 0.5, top + height / 2, "left")
    chromium.mouse("mouseReleased", left + width * 0.5, top + height / 2, "left")
    chromium.frames()
    first, last = before
    quarter = (last - first) / 4
    assert chromium.run(f"[{scale}.min, {scale}.max]") == pytest.approx([first + quarter, first + 2 * quarter], abs=0.1)
    chromium.key("0")
    assert chromium.run(f"[{scale}.min, {scale}.max]") == before
    chromium.key("+")
    zoomed: Any = chromium.run(f"[{scale}.min, {scale}.max]")
    assert zoomed[1] - zoomed[0] == pytest.approx((last - first) / 2)
    chromium.key("-")
    assert chromium.run(f"[{scale}.min, {scale}.max]") == pytest.approx(before)


def test_the_cursor_is_linked_and_moved_by_keys(chromium: Browser, real_run: Path) -> None:
    """Arrow keys move the cursor of the focused plot, and every plot shows its value at that step."""
    chromium.open(real_run / "report.html", height=2000)
    show(chromium, plot("loss"))
    chromium.run(f"{plot('loss')}.figure.focus()")
    chromium.key("Home")
    chromium.key("ArrowRight")
    rows = {row["step"]: row for row in read_metrics(real_run) if "lr" in row}
    shown = chromium.run(f"{plot('lr')}.legend.querySelector('.value').textContent")
    assert float(shown) == pytest.approx(rows[2]["lr"], rel=1e-3)
    chromium.key("Escape")
    assert chromium.run(f"{plot('lr')}.legend.querySelector('.value').textContent").startswith("last ")


def test_smoothing_and_log_axis(chromium: Browser, real_run: Path) -> None:
    """Smoothing is a moving average without a bias at the beginning; the log axis is one of uPlot's."""
    chromium.open(real_run / "report.html")
    raw = [value for _, value in plotted(chromium, "loss", 1)]
    chromium.run(SMOOTH)
    chromium.frames()
    smoothed = [value for _, value in plotted(chromium, "loss", 2)]
    assert smoothed[0] == pytest.approx(raw[0]) and smoothed[1] == pytest.approx((0.25 * raw[0] + 0.5 * raw[1]) / 0.75)
    chromium.run(f"{plot('loss')}.figure.focus()")
    chromium.key("l")
    assert chromium.run(f"{plot('loss')}.chart.scales.y.distr") == 3


def test_a_comparison_draws_runs_over_each_other(chromium: Browser, tmp_path: Path) -> None:
    """Each run is a line with its own colour, and the settings that differ are listed."""
    runs = [write_record(tmp_path, name, lr=lr) for name, lr in (("first", 0.1), ("second", 0.2))]
    assert main(["report", *map(str, runs), "--output", str(tmp_path / "both.html")]) == 0
    chromium.open(tmp_path / "both.html")
    for column, run in ((1, runs[0]), (3, runs[1])):
        rows = [(row["step"], pytest.approx(row["lr"])) for row in read_metrics(run) if "lr" in row]
        assert plotted(chromium, "lr", column) == rows
    strokes = chromium.run(f"[1, 3].map((index) => {plot('lr')}.chart.series[index].stroke())")
    assert len(set(strokes)) == 2
    assert "optimizer.lr" in chromium.run("document.querySelector('#differences').innerText")
    assert chromium.problems() == []


def test_a_comparison_says_where_runs_part_and_why(chromium: Browser, tmp_path: Path) -> None:
    """The first section says for each run at which step it parts from the first one, with the likely cause."""
    names = (("first", 0.1), ("second", 0.2), ("third", 0.1))
    runs = [write_record(tmp_path, name, lr=lr) for name, lr in names]
    assert main(["report", *map(str, runs), "--output", str(tmp_path / "all.html")]) == 0
    chromium.open(tmp_path / "all.html")
    assert chromium.run("document.querySelector('main section').id") == "partings"
    second, third = chromium.run("[...document.querySelectorAll('.parting')].map((one) => one.innerText)")
    assert "first and second part at step 1, where train/loss differs: " in second
    assert "optimizer.lr: 0.1 and 0.2" in second
    # The norms of layers are random numbers, which the seed of the test does not fix.
    assert "first and third part at step 10, where gradients" in third and "the 9 steps before it are the same" in third


@pytest.mark.parametrize("width", [1280, 400])
def test_a_comparison_is_readable_on_any_screen(chromium: Browser, tmp_path: Path, width: int) -> None:
    """Names break only where they have a dot, and every metric of a validation is in the overview."""
    runs = [write_record(tmp_path, name, lr=lr) for name, lr in (("first", 0.1), ("second", 0.2))]
    for run in runs:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 60, **{f"val/metric{index}": index for index in range(20)}}) + "\n")
    assert main(["report", *map(str, runs), "--output", str(tmp_path / "both.html")]) == 0
    chromium.open(tmp_path / "both.html", width=width)
    text: Any = chromium.run("document.querySelector('#overview').innerText")
    assert all(f"val/metric{index}" in text for index in range(20))
    setting = "[...document.querySelectorAll('#differences .setting')].find((one) => one.innerText === 'optimizer.lr')"
    assert chromium.run(f"{setting}.getBoundingClientRect().height") < 40
    assert chromium.run("document.documentElement.scrollWidth") == width


def test_metrics_without_a_known_direction_show_both_extremes(chromium: Browser, tmp_path: Path) -> None:
    """A loss has its lowest value, another metric of a validation the lowest and the highest."""
    run = write_record(tmp_path, "one")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "val/own": 5}\n{"step": 2, "val/own": 3}\n')
    assert main(["report", str(run)]) == 0
    chromium.open(run / "report.html")
    tiles: Any = chromium.run("[...document.querySelectorAll('.tile')].map((tile) => tile.innerText)")
    assert any("val/loss" in tile and "lowest" in tile and "highest" not in tile for tile in tiles)
    assert any("val/own" in tile and "lowest 3 at step 2, highest 5 at step 1" in tile for tile in tiles)


def test_images_of_one_name_share_a_card(chromium: Browser, tmp_path: Path) -> None:
    """The newest is shown, and a slider shows the earlier ones."""
    record = Record.on_disk(tmp_path, config={}, seed=1, run_id="one")
    record.start([])
    for step in (5, 10):
        record.log_table(step, 0, "samples", ["text"], [[f"of step {step} " + "x" * 2000]])
        record.log_image(step, 0, "map", torch.full((4, 4), step / 10))
    record.close("completed", None, [], [], {"step": 10, "tokens_seen": 0})
    assert main(["report", str(tmp_path / "one")]) == 0
    chromium.open(tmp_path / "one" / "report.html")
    cards = "[...document.querySelectorAll('#media figure')]"
    assert chromium.run(f"{cards}.length") == 2
    assert "tokens" not in chromium.run("document.querySelector('#overview').innerText")
    text: Any = chromium.run(f"{cards}[0].innerText")
    assert "of step 10" in text and 1000 <= len(text) < 1100
    chromium.run(f"{cards}[0].querySelector('input').value = 0")
    chromium.run(f"{cards}[0].querySelector('input').dispatchEvent(new Event('input'))")
    assert "of step 5" in chromium.run(f"{cards}[0].innerText")
    assert chromium.problems() == []


@pytest.mark.parametrize("value", [None, 5, "abc", {}, {"a": 1}, [1], [{"name": 1, "hook": [], "seconds": "x"}]])
def test_fields_of_other_types_do_not_stop_the_script(chromium: Browser, tmp_path: Path, value: Any) -> None:
    """A run.json that was edited, or that another program wrote, is shown as far as it goes."""
    run = write_record(tmp_path, "one")
    fields = json.loads((run / "run.json").read_text())
    changed = ("hooks", "costs", "attempts", "counters", "environment", "git", "lineage", "reason", "started", "seed")
    (run / "run.json").write_text(json.dumps({**fields, **dict.fromkeys(changed, value)}))
    assert main(["report", str(run)]) == 0
    chromium.open(run / "report.html")
    assert chromium.problems() == []
    assert chromium.run("document.querySelector('#config') !== null")


def test_alerts_lead_to_their_place(chromium: Browser, tmp_path: Path) -> None:
    """Alerts come first; one about a layer goes to its heat map, selects the layer and moves the cursor there."""
    run = write_record(tmp_path, "one")
    assert main(["report", str(run)]) == 0
    chromium.open(run / "report.html")
    assert chromium.run("document.querySelector('main section').id") == "alerts"
    link = "[...document.querySelectorAll('.alert a')].find((link) => link.textContent.includes('blocks.1'))"
    chromium.run(f"{link}.click()")
    chromium.frames()
    heat = "document.querySelector('#layers .heat').plot"
    assert chromium.run(f"document.activeElement === {heat}.figure")
    assert "blocks.1.mlp · step 40 · nans 5" in chromium.run(f"{heat}.readout.textContent")
    show(chromium, plot("loss"))
    chromium.run("document.querySelector('#events tr:nth-child(4)').click()")
    assert "stop requested, step 50" in chromium.run(f"{plot('loss')}.tip.textContent")


def test_a_value_that_was_nan_has_its_own_colour(chromium: Browser, tmp_path: Path) -> None:
    """A cell whose layer had NaN is marked as such, not as missing."""
    run = write_record(tmp_path, "one")
    assert main(["report", str(run)]) == 0
    chromium.open(run / "report.html")
    heat = "document.querySelector('#layers .heat').plot"
    show(chromium, heat)
    cells = chromium.run(f"{heat}.rows.map((row) => String({heat}.cell(3, row)))")
    assert cells[1] == "NaN" and all(math.isfinite(float(cell)) for place, cell in enumerate(cells) if place != 1)
    assert "NaN or infinity" in chromium.run("document.querySelector('#layers .scale').textContent")


def test_frequent_events_have_a_kind_and_do_not_hide_the_curves(chromium: Browser, tmp_path: Path) -> None:
    """The legend names the kinds, and of many events of one kind a single line is drawn."""
    run = write_record(tmp_path, "one")
    with (run / "events.jsonl").open("a") as file:
        for step in range(1, 60):
            file.write(json.dumps({"kind": "gradient_flow", "step": step, "by": "watch", "parameters": {}}) + "\n")
    assert main(["report", str(run)]) == 0
    chromium.open(run / "report.html")
    legend: Any = chromium.run("document.querySelector('.chips').innerText")
    assert "gradient flow (59)" in legend and "hook failure (1)" in legend and "other" not in legend
    show(chromium, plot("loss"))
    lines = f"{plot('loss')}.placeMarks({plot('loss')}.chart).map(({{ mark, lines }}) => [mark, lines.length])"
    counts = {"checkpoint": 0, "hook failure": 1, "NaN or infinity": 1, "stop": 1, "gradient_flow": 1}
    assert dict(chromium.run(lines)) == counts


def test_events_are_sentences_with_the_other_fields_behind_them(chromium: Browser, tmp_path: Path) -> None:
    run = write_record(tmp_path, "one")
    assert main(["report", str(run)]) == 0
    chromium.open(run / "report.html")
    row = "[...document.querySelectorAll('#events tbody tr')].find((row) => row.innerText.includes('hook failed'))"
    assert "watch: raised" in chromium.run(f"{row}.innerText") and "on_step_end" not in chromium.run(f"{row}.innerText")
    chromium.run(f"{row}.querySelector('summary').click()")
    chromium.frames()
    fields: Any = chromium.run(f"[...{row}.querySelectorAll('dd')].map((one) => one.innerText)")
    assert fields == ["on_step_end", "E"]


def test_metrics_that_never_change_share_a_line(chromium: Browser, tmp_path: Path) -> None:
    """They need no plot, except a learning rate; one that is NaN at times is plotted."""
    run = write_record(tmp_path, "one")
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(1, 5):
            row = {"step": step, "own/zeros": 0, "own/nan": 0 if step > 1 else "NaN", "train/lr": 0.5}
            file.write(json.dumps(row) + "\n")
    assert main(["report", str(run)]) == 0
    chromium.open(run / "report.html")
    line: Any = chromium.run("document.querySelector('.constants').innerText")
    assert "own/zeros 0" in line and "own/nan" not in line
    titles: Any = chromium.run(f"{PLOTS}.map((plot) => plot.title)")
    assert {"own/nan", "train/lr"} <= set(titles) and "own/zeros" not in titles


def test_small_costs_share_a_row(chromium: Browser, tmp_path: Path) -> None:
    run = write_record(tmp_path, "one")
    fields = json.loads((run / "run.json").read_text())
    fields["attempts"][0] |= {"started": "2026-01-01T00:00:00+00:00", "closed": "2026-01-01T00:01:00+00:00"}
    small = [{"hook": f"small{index}", "kind": "lifecycle", "calls": 10, "seconds": 0.02} for index in range(3)]
    (run / "run.json").write_text(json.dumps({**fields, "costs": [*fields["costs"], *small]}))
    assert main(["report", str(run)]) == 0
    chromium.open(run / "report.html")
    texts = "[...document.querySelectorAll('#cost tbody tr')].map((row) => row.innerText)"
    rows = [text.split() for text in chromium.run(texts)]
    assert [row[0] for row in rows] == ["watch", "3"]
    assert rows[1][:5] == ["3", "others", "30", "60", "ms"]


def test_heads_of_tables_are_aligned_as_their_columns(chromium: Browser, tmp_path: Path) -> None:
    """A column of numbers is right-aligned with its head, and one with other values, too, is not."""
    record = Record.on_disk(tmp_path, config={}, seed=1, run_id="one")
    record.start([])
    record.log_table(1, 0, "t", ["numbers", "both", "missing"], [[1, 2, 3.5], [1, "x", None]])
    record.close("completed", None, [], [], {"step": 10, "tokens_seen": 0})
    assert main(["report", str(tmp_path / "one")]) == 0
    chromium.open(tmp_path / "one" / "report.html")
    cells = "[...row.cells].map((cell) => getComputedStyle(cell).textAlign)"
    align = f"[...document.querySelectorAll('#media tr')].map((row) => {cells})"
    assert chromium.run(align) == [["right", "left", "right"]] * 3


def open_norms(browser: Browser, root: Path, norms: list[float]) -> None:
    """Open the report of a run whose layers have these gradient norms."""
    record = Record.on_disk(root, config={}, seed=1, run_id="norms")
    record.start([])
    names = [f"layer{index}" for index in range(len(norms))]
    for step in (1, 2):
        record.log(step, 0, "train/loss", 1.3 + step / 10)
        record.log_layers("gradients", step, names, ["norm"], torch.tensor(norms).unsqueeze(1))
    record.close("completed", None, [], [], {"step": 2})
    assert main(["report", str(root / "norms")]) == 0
    browser.open(root / "norms" / "report.html")


def test_layers_of_vanishing_gradients_have_different_colours(chromium: Browser, tmp_path: Path) -> None:
    """The colours cover the norms from the smallest to the largest one, and what is below them is labelled."""
    norms = [10.0**-power for power in range(0, 24, 2)]
    heat = "document.querySelector('#layers .heat').plot"
    legend = "document.querySelector('#layers .ticks').innerText.replaceAll('\\u2212', '-')"
    open_norms(chromium, tmp_path / "all", norms)
    show(chromium, heat)
    assert len(set(chromium.run(f"{heat}.rows.map((row) => String({heat}.scale.colour({heat}.cell(0, row))))"))) == 12
    assert chromium.run(legend).startswith("1e-22")
    open_norms(chromium, tmp_path / "zero", [*norms, 0.0])
    show(chromium, heat)
    assert chromium.run(legend).startswith("≤ 1e-22")
    open_norms(chromium, tmp_path / "few", [*[10.0 ** -(index % 5) for index in range(100)], 1e-30])
    show(chromium, heat)
    assert chromium.run(legend).startswith("≤ 1e-4")


def test_histograms_name_the_sizes_of_values_and_what_is_below_them(chromium: Browser, tmp_path: Path) -> None:
    """A bin has the name of its end nearer to 0, and the smallest one that of its other end."""
    record = Record.on_disk(tmp_path, config={}, seed=1, run_id="one")
    record.start([])
    for step, values in enumerate([[-3e-12, 0.0, 1.5], [2.0**-60]], start=1):
        counted = histograms([torch.tensor(values)])
        record.log_layers("gradients", step, ["a"], ["top_octave"], counted.tops.unsqueeze(1))
        record.log_layers("gradient_histograms", step, ["a"], ["count"], counted.counts.unsqueeze(1).float())
    record.close("completed", None, [], [], {"step": 2})
    assert main(["report", str(tmp_path / "one")]) == 0
    chromium.open(tmp_path / "one" / "report.html")
    heat = "document.querySelector('#histograms .heat').plot"
    show(chromium, heat)
    names: Any = chromium.run(f"{heat}.rows.map((row) => {heat}.nameOf(row).replaceAll('\\u2212', '-'))")
    assert names == ["1", "…", "< 1.4e-14", "0", "…", "-4.7e-10"]  # a histogram reaches 31 octaves down


@pytest.mark.parametrize("factor", [1.0001, 1.3, 4, 9, 25, 1e4, 1e15, 1e30])
def test_numbers_of_a_log_axis_do_not_overlap(chromium: Browser, tmp_path: Path, factor: float) -> None:
    """However small or large the range is, there are at least two numbers, inside of it and apart from each other."""
    open_norms(chromium, tmp_path, [3e-11, 3e-11 * factor])
    flow = "document.querySelector('#flow .plot').plot"
    show(chromium, flow)
    scale, chart = f"{flow}.chart.scales.y", f"{flow}.chart"
    splits = f"{chart}.axes[1].splits({chart}, 1, {scale}.min, {scale}.max)"
    values = f"[{scale}.max, ...{splits}.reverse(), {scale}.min]"
    low, *places, high = chromium.run(f"{values}.map((one) => {chart}.valToPos(one, 'y'))")
    assert len(places) >= 2 and min(places) >= low - 0.01 and max(places) <= high + 0.01
    assert all(second - first >= 15 for first, second in pairwise(places))


@pytest.mark.parametrize("text", list(TEXT.values()), ids=list(TEXT))
def test_no_script_of_a_run_is_executed(chromium: Browser, tmp_path: Path, text: str) -> None:
    """Hostile names and texts are shown as text: no script runs, and the page's policy has nothing to block."""
    run = write_record(tmp_path, "hostile", text=text)
    assert main(["report", str(run)]) == 0
    chromium.open(run / "report.html", height=12_000, script=SPY)
    chromium.frames()
    assert chromium.run("[window.isPwned, window.violations, {}.polluted]") == [None, None, None]
    assert chromium.problems() == []
    assert chromium.run(f'document.querySelectorAll("{STRANGE}").length') == 0
    assert "Events" in chromium.run("document.body.innerText")
    assert chromium.run("document.documentElement.scrollWidth") <= 1280


def test_the_policy_blocks_injected_code(chromium: Browser, real_run: Path) -> None:
    """Even if markup got into the page, neither its script nor its style nor its image would be loaded."""
    chromium.open(real_run / "report.html", script=SPY)
    chromium.run(INJECT)
    chromium.wait("(window.violations ?? []).length >= 3")
    assert chromium.run("window.isPwned ?? null") is None


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_the_page(chromium: Browser, real_run: Path, width: int) -> None:
    """The page fits on a desktop and on a phone, and it follows the system's theme."""
    chromium.open(real_run / "report.html", width=width, height=6000, dark=True)
    chromium.frames()
    assert chromium.run("document.documentElement.scrollWidth") == width
    assert chromium.run(TOO_WIDE) == 0
    assert chromium.run("document.querySelector('#theme').textContent") == "Light"
    chromium.key("t")
    assert chromium.run("document.documentElement.dataset.theme") == "light"


def test_printing_draws_every_plot(chromium: Browser, real_run: Path, tmp_path: Path) -> None:
    """Plots that were never scrolled to are on paper, too."""
    chromium.open(real_run / "report.html", height=600)
    assert chromium.run(f"{PLOTS}.some((plot) => plot.stale)")
    chromium.print(tmp_path / "report.pdf")
    assert chromium.run(f"{PLOTS}.every((plot) => plot.drawnWidth > 0)")
    assert (tmp_path / "report.pdf").stat().st_size > 20_000

"""The report in a real browser: what is plotted, searching, zooming, keys, printing, and hostile names."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import Browser
from records import close_record, start_record
from report_page import write_record
from small_config import config_with

from hookline import read_layers, read_metrics
from hookline.cli import main
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
TITLES = "[...document.querySelectorAll('#curves h4')].map((title) => title.textContent)"
HEAT_MAP, HISTOGRAMS, FLOW = "#layers figure", "#histograms figure", "#flow figure"


def curve(title: str) -> str:
    """Return the selector of the figure of a curve."""
    return f"figure[aria-label^='Curve {title};']"


def element(selector: str) -> str:
    """Return the expression for an element of the page."""
    return f'document.querySelector("{selector}")'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a record with everything that a report shows."""
    return write_record(tmp_path, "one")


def open_report(browser: Browser, run: Path, **window: Any) -> None:
    """Make the report of a run and open it."""
    assert main(["report", str(run)]) == 0
    browser.open(run / "report.html", **window)


def show(browser: Browser, figure: str) -> None:
    """Scroll to a figure and wait until it is drawn."""
    browser.run(f"{element(figure)}.scrollIntoView({{ block: 'center' }})")
    drawn = "figure.querySelector('.legend .value, .readout')?.textContent || figure.querySelector('.u-over')"
    browser.wait(f"((figure) => Boolean({drawn}))({element(figure)})")
    browser.frames()


def text_in(browser: Browser, selector: str) -> str:
    """Return the text of an element that is not hidden, with the minus that computers know."""
    text = browser.run(f"{element(selector)}.checkVisibility() ? {element(selector)}.textContent : ''")
    return str(text).replace("\u2212", "-")


def legend(browser: Browser, title: str) -> dict[str, float]:
    """Return the numbers in the legend of a curve by name."""
    items = f"{element(curve(title))}.querySelectorAll('.legend li')"
    texts: Any = browser.run(
        f"[...{items}].map((item) => [...item.children].slice(-2).map((part) => part.textContent))"
    )
    return {name: float(value.replace("\u2212", "-").removeprefix("last ")) for name, value in texts}


def plotted(browser: Browser, title: str, steps: int) -> list[dict[str, float]]:
    """Return the legend of a curve at each of its steps, over which the arrow keys move."""
    show(browser, curve(title))
    browser.run(f"{element(curve(title))}.focus()")
    browser.key("Home")
    seen = [legend(browser, title)]
    for _ in range(steps - 1):
        browser.key("ArrowRight")
        seen.append(legend(browser, title))
    return seen


def cells(browser: Browser, count: int, key: str = "ArrowDown") -> list[tuple[str, str]]:
    """Return the name and the value of the first cells of the first heat map, over which the arrow keys move."""
    show(browser, HEAT_MAP)
    browser.run(f"{element(HEAT_MAP)}.focus()")
    seen = []
    for _ in range(count):
        browser.key(key)
        parts = text_in(browser, f"{HEAT_MAP} .readout").split(" \u00b7 ")
        seen.append((parts[0], parts[-1].rpartition(" ")[2]))
    return seen


def point_at(browser: Browser, selector: str, x: float, kind: str = "mouseMoved", button: str = "none") -> None:
    """Use the mouse in the middle of an element's height, at a share of its width."""
    area: Any = browser.run(f"{element(selector)}.getBoundingClientRect().toJSON()")
    browser.mouse(kind, area["left"] + x * area["width"], area["top"] + area["height"] / 2, button)
    browser.frames()


def shown_steps(browser: Browser) -> list[float]:
    """Return the first and the last step that a curve with the steps as values shows."""
    seen = []
    for x in (0.001, 0.999):
        point_at(browser, f"{curve('mine/number')} .u-over", x)
        seen.append(7 * legend(browser, "mine/number")["mine/number"])
    return seen


def row_colors(browser: Browser, row: int, figure: str = HEAT_MAP) -> list[str]:
    """Return the colors of the cells in a row of a heat map from left to right; "0,0,0,0" where nothing is drawn."""
    canvas = f"{element(f'{figure} canvas')}"
    data = f"{canvas}.getContext('2d').getImageData(230, {6 + 16 * row + 8}, {canvas}.width - 242, 1).data"
    pixels: Any = browser.run(f"Array.from({data})")
    return [",".join(map(str, pixels[at : at + 4])) for at in range(0, len(pixels), 4)]


def picture(browser: Browser, figure: str) -> str:
    """Return what is drawn in a figure."""
    return str(browser.run(f"{element(f'{figure} canvas')}.toDataURL()"))


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
    losses = {row["step"]: row["train/loss"] for row in read_metrics(real_run) if "train/loss" in row}
    validated = {row["step"]: row["val/loss"] for row in read_metrics(real_run) if "val/loss" in row}
    assert list(losses) == [*range(1, 13)] and list(validated) == [4, 8, 12]
    shown = plotted(chromium, "loss", 12)
    assert [values["train/loss"] for values in shown] == pytest.approx([*losses.values()], rel=1e-3)
    assert [shown[step - 1]["val/loss"] for step in validated] == pytest.approx([*validated.values()], rel=1e-3)
    chromium.key("Escape")
    gradients = read_layers(real_run)["gradients"]
    norms = gradients.values[-1, :, gradients.columns.index("norm")].tolist()
    named = cells(chromium, len(norms))
    assert [name for name, _ in named] == list(gradients.names)
    assert [float(norm) for _, norm in named] == pytest.approx(norms, rel=1e-3)
    show(chromium, FLOW)
    for index, norm in enumerate(norms):
        point_at(chromium, f"{FLOW} .u-over", (index + 0.5) / len(norms))
        name, _, value = text_in(chromium, f"{FLOW} .readout").partition(" \u00b7 ")
        assert (name, float(value)) == (gradients.names[index], pytest.approx(norm, rel=1e-3))
    chromium.run(f"{element(FLOW)}.focus()")
    chromium.key("Home")
    point_at(chromium, f"{FLOW} .u-over", 0.5 / len(norms))
    first = gradients.values[0, 0, gradients.columns.index("norm")].item()
    assert float(text_in(chromium, f"{FLOW} .readout").split()[-1]) == pytest.approx(first, rel=1e-3)
    assert chromium.problems() == []


def test_searching_a_layer(chromium: Browser, real_run: Path) -> None:
    """A search leaves the layers whose name contains the text; / goes to the box, Escape leaves it."""
    chromium.open(real_run / "report.html")
    chromium.key("/")
    for letter in "mlp.widen":
        chromium.key(letter)
    assert chromium.run("document.activeElement.id") == "find"
    names = [name for name in read_layers(real_run)["gradients"].names if "mlp.widen" in name]
    assert f"{len(set(names)) + 1} layers" in text_in(chromium, "#found")
    chromium.key("Escape")
    assert chromium.run("document.activeElement.id") != "find"
    show(chromium, HEAT_MAP)
    assert text_in(chromium, f"{HEAT_MAP} .readout").startswith(f"{len(names)} layers")
    assert [name for name, _ in cells(chromium, len(names))] == names


def test_zoom_by_drag_and_by_keys(chromium: Browser, run: Path) -> None:
    """Dragging over one plot zooms all of them; + and - zoom, and 0 shows all steps."""
    open_report(chromium, run, height=6000)
    show(chromium, curve("mine/number"))
    assert shown_steps(chromium) == pytest.approx([1, 60], abs=0.1)
    over = f"{curve('loss')} .u-over"
    point_at(chromium, over, 0.25)
    point_at(chromium, over, 0.25, "mousePressed", "left")
    point_at(chromium, over, 0.5, "mouseMoved", "left")
    point_at(chromium, over, 0.5, "mouseReleased", "left")
    assert shown_steps(chromium) == pytest.approx([1 + 59 / 4, 1 + 59 / 2], abs=0.6)
    chromium.key("0")
    assert shown_steps(chromium) == pytest.approx([1, 60], abs=0.1)
    chromium.key("Escape")
    chromium.key("+")
    assert shown_steps(chromium) == pytest.approx([1 + 59 / 4, 60 - 59 / 4], abs=0.6)
    chromium.key("Escape")
    chromium.key("]")
    assert shown_steps(chromium) == pytest.approx([1 + 59 * 3 / 8, 60 - 59 / 8], abs=0.6)
    chromium.key("Escape")
    chromium.key("-")
    assert shown_steps(chromium) == pytest.approx([1 + 59 / 8, 60], abs=0.6)


def test_the_cursor_is_linked_and_moved_by_keys(chromium: Browser, real_run: Path) -> None:
    """Arrow keys move the cursor of the focused plot, and every plot shows its value at that step."""
    chromium.open(real_run / "report.html", height=6000)
    show(chromium, curve("loss"))
    chromium.run(f"{element(curve('loss'))}.focus()")
    chromium.key("Home")
    chromium.key("ArrowRight")
    rows = {row["step"]: row for row in read_metrics(real_run) if "lr" in row}
    assert legend(chromium, "lr")["lr"] == pytest.approx(rows[2]["lr"], rel=1e-3)
    chromium.key("Escape")
    assert text_in(chromium, f"{curve('lr')} .value").startswith("last ")


def test_smoothing_and_log_axis(chromium: Browser, run: Path) -> None:
    """Both change what is drawn; a plot has its own log axis until that of all plots is switched."""
    open_report(chromium, run)
    show(chromium, curve("loss"))
    plain, button = picture(chromium, curve("loss")), f"{element(curve('loss'))}.querySelector('button').ariaPressed"
    chromium.run(SMOOTH)
    chromium.frames()
    smoothed = picture(chromium, curve("loss"))
    assert smoothed != plain and text_in(chromium, "#smoothing-value") == "0.5"
    chromium.run(f"{element(curve('loss'))}.focus()")
    chromium.key("l")
    assert picture(chromium, curve("loss")) not in (plain, smoothed) and chromium.run(button) == "true"
    for state in ("true", "false"):
        chromium.run("document.querySelector('#log').click()")
        chromium.frames()
        assert chromium.run(button) == state
    assert picture(chromium, curve("loss")) == smoothed


def test_a_comparison_draws_runs_over_each_other(chromium: Browser, tmp_path: Path) -> None:
    """Each run is a line with its own colour, and the settings that differ are listed."""
    runs = [write_record(tmp_path, name, lr=lr) for name, lr in (("first", 0.1), ("second", 0.2))]
    assert main(["report", *map(str, runs), "--output", str(tmp_path / "both.html")]) == 0
    chromium.open(tmp_path / "both.html")
    rates = [[row["lr"] for row in read_metrics(run) if "lr" in row] for run in runs]
    shown = plotted(chromium, "lr", 12)
    for run, expected in zip(runs, rates, strict=True):
        assert [values[run.name] for values in shown] == pytest.approx(expected[:12], rel=1e-3)
    swatches = f"[...{element(curve('lr'))}.querySelectorAll('.swatch')]"
    assert len(set(chromium.run(f"{swatches}.map((swatch) => getComputedStyle(swatch).borderTopColor)"))) == 2
    assert "optimizer.lr" in chromium.run("document.querySelector('#differences').innerText")
    choice, pictures = element(f"{HEAT_MAP} select[aria-label=Run]"), set()
    cells(chromium, 1)  # from now on a row is marked
    for index, run in enumerate(runs):
        chromium.run(f"{choice}.value = {index}; {choice}.dispatchEvent(new Event('change'))")
        chromium.key("Escape")
        pictures.add(picture(chromium, HEAT_MAP))
        ((_, shown_norm),) = cells(chromium, 1, "ArrowUp")
        assert float(shown_norm) == pytest.approx(float(read_layers(run)["gradients"].values[2, 0, 1]), rel=1e-3)
    assert len(pictures) == 2
    assert chromium.problems() == []


def test_a_comparison_says_where_runs_diverge_and_why(chromium: Browser, tmp_path: Path) -> None:
    """The first section says which run is better, the second for each one where it diverges from the first, and why."""
    names = (("first", 0.1), ("second", 0.2), ("third", 0.1))
    runs = [write_record(tmp_path, name, lr=lr) for name, lr in names]
    assert main(["report", *map(str, runs), "--output", str(tmp_path / "all.html")]) == 0
    chromium.open(tmp_path / "all.html")
    sections = chromium.run("[...document.querySelectorAll('main section')].map(({ id }) => id)")
    assert sections[:2] == ["comparison", "divergences"]
    said = chromium.run("document.querySelector('.headline').innerText")
    assert said.splitlines()[0] == "first, second and third are equal: val/loss 1.23."
    second, third = chromium.run("[...document.querySelectorAll('.divergence')].map((one) => one.innerText)")
    assert "first and second diverge at step 1 (the first step): train/loss is " in second
    assert "optimizer.lr: 0.1 and 0.2" in second
    # The norms of layers are random numbers, which the seed of the test does not fix.
    assert "first and third diverge at step 10 (the 9 steps before it are the same): gradients" in third


@pytest.mark.parametrize("width", [1280, 400])
def test_a_comparison_is_readable_on_any_screen(chromium: Browser, tmp_path: Path, width: int) -> None:
    """Names break only where they have a dot, and every metric of a validation is in the comparison."""
    runs = [write_record(tmp_path, name, lr=lr) for name, lr in (("first", 0.1), ("second", 0.2))]
    for run in runs:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 60, **{f"val/metric{index}": index for index in range(20)}}) + "\n")
    assert main(["report", *map(str, runs), "--output", str(tmp_path / "both.html")]) == 0
    chromium.open(tmp_path / "both.html", width=width)
    text: Any = chromium.run("document.querySelector('#comparison').innerText")
    assert all(f"val/metric{index}" in text for index in range(20))
    setting = "[...document.querySelectorAll('#differences .setting')].find((one) => one.innerText === 'optimizer.lr')"
    assert chromium.run(f"{setting}.getBoundingClientRect().height") < 40
    assert chromium.run("document.documentElement.scrollWidth") == width


def test_numbers_of_many_runs_are_whole_on_a_phone(chromium: Browser, tmp_path: Path) -> None:
    """A table that is too wide is scrolled; a number in two lines would be read as another one."""
    runs = [write_record(tmp_path, f"number-{index}", lr=0.1 * index) for index in range(1, 7)]
    for index, run in enumerate(runs):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 60, "val/metric": 0.1234 + index / 1000}) + "\n")
    assert main(["report", *map(str, runs), "--output", str(tmp_path / "all.html")]) == 0
    chromium.open(tmp_path / "all.html", width=400)
    values = "[...document.querySelectorAll('#comparison td.number > *')]"
    lines: Any = chromium.run(f"{values}.map((value) => value.getClientRects().length)")
    assert len(lines) > 10 and set(lines) == {1}
    assert chromium.run("document.documentElement.scrollWidth") == 400


def test_metrics_without_a_known_direction_show_both_extremes(chromium: Browser, run: Path) -> None:
    """A loss has its lowest value, another metric of a validation the lowest and the highest."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "val/own": 5}\n{"step": 2, "val/own": 3}\n')
    open_report(chromium, run)
    tiles: Any = chromium.run("[...document.querySelectorAll('.tile')].map((tile) => tile.innerText)")
    assert any("val/loss" in tile and "lowest" in tile and "highest" not in tile for tile in tiles)
    assert any("val/own" in tile and "lowest 3 at step 2, highest 5 at step 1" in tile for tile in tiles)


def test_images_of_one_name_share_a_card(chromium: Browser, tmp_path: Path) -> None:
    """The newest is shown, and a slider shows the earlier ones."""
    record = start_record(tmp_path, "one", seed=1)
    for step in (5, 10):
        record.log_table(step, 0, "samples", ["text"], [[f"of step {step} " + "x" * 2000]])
        record.log_image(step, 0, "map", torch.full((4, 4), step / 10))
    close_record(record, step=10, tokens_seen=0)
    open_report(chromium, tmp_path / "one")
    cards = "[...document.querySelectorAll('#media figure')]"
    assert chromium.run(f"{cards}.length") == 2
    assert "tokens" not in chromium.run("document.querySelector('#overview').innerText")
    text: Any = chromium.run(f"{cards}[0].innerText")
    assert "of step 10" in text and 1000 <= len(text) < 1100
    chromium.run(f"{cards}[0].querySelector('input').value = 0")
    chromium.run(f"{cards}[0].querySelector('input').dispatchEvent(new Event('input'))")
    assert "of step 5" in chromium.run(f"{cards}[0].innerText")
    assert chromium.problems() == []


def test_alerts_lead_to_their_place(chromium: Browser, run: Path) -> None:
    """Alerts come first; one about a layer goes to its heat map, selects the layer and moves the cursor there."""
    open_report(chromium, run)
    assert chromium.run("document.querySelector('main section').id") == "alerts"
    alert = "[...document.querySelectorAll('.alert')].find((alert) => alert.textContent.includes('blocks.1'))"
    chromium.run(f"{alert}.querySelector('a').click()")
    chromium.frames()
    assert chromium.run(f"document.activeElement === {element(HEAT_MAP)}")
    assert "blocks.1.mlp · step 40 · nans 5" in text_in(chromium, f"{HEAT_MAP} .readout")
    show(chromium, curve("loss"))
    chromium.run("document.querySelector('#events tr:nth-child(4)').click()")
    assert "stop requested, step 50" in text_in(chromium, f"{curve('loss')} .tip")


def test_a_value_that_was_nan_has_its_own_color(chromium: Browser, run: Path) -> None:
    """A cell whose layer had NaN is marked as such, not as missing."""
    open_report(chromium, run)
    show(chromium, HEAT_MAP)
    nan = "194,24,155,255"  # --nan of report.css
    assert [nan in row_colors(chromium, row) for row in range(6)] == [False, True, False, False, False, False]
    assert "NaN or infinity" in text_in(chromium, "#layers .scale")
    chromium.run("document.querySelector('#events tr:nth-child(3)').click()")  # at step 40
    values = [float(value) for _, value in cells(chromium, 6)]
    assert [place for place, value in enumerate(values) if math.isnan(value)] == [1]


def test_frequent_events_have_a_kind_and_do_not_hide_the_curves(chromium: Browser, run: Path) -> None:
    """The legend names the kinds, and hides the marks of one; scripts/plots.test.js counts the lines."""
    with (run / "events.jsonl").open("a") as file:
        for step in range(1, 60):
            file.write(json.dumps({"kind": "gradient_flow", "step": step, "by": "watch", "parameters": {}}) + "\n")
    open_report(chromium, run)
    legend: Any = chromium.run("document.querySelector('.chips').innerText")
    assert "gradient flow (59)" in legend and "hook failure (1)" in legend and "other" not in legend
    show(chromium, curve("loss"))
    pictures = [picture(chromium, curve("loss"))]
    for _ in range(2):
        chromium.run("document.querySelector('.chip:last-child').click()")
        chromium.frames()
        pictures.append(picture(chromium, curve("loss")))
    assert pictures[0] == pictures[2] != pictures[1]


def test_events_are_sentences_with_the_other_fields_behind_them(chromium: Browser, run: Path) -> None:
    open_report(chromium, run)
    row = "[...document.querySelectorAll('#events tbody tr')].find((row) => row.innerText.includes('hook failed'))"
    assert "watch: raised" in chromium.run(f"{row}.innerText") and "on_step_end" not in chromium.run(f"{row}.innerText")
    chromium.run(f"{row}.querySelector('summary').click()")
    chromium.frames()
    fields: Any = chromium.run(f"[...{row}.querySelectorAll('dd')].map((one) => one.innerText)")
    assert fields == ["on_step_end", "E"]


def test_metrics_that_never_change_share_a_line(chromium: Browser, run: Path) -> None:
    """They need no plot, except a learning rate; one that is NaN at times is plotted."""
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(1, 5):
            row = {"step": step, "own/zeros": 0, "own/nan": 0 if step > 1 else "NaN", "train/lr": 0.5}
            file.write(json.dumps(row) + "\n")
    open_report(chromium, run)
    line: Any = chromium.run("document.querySelector('.constants').innerText")
    assert "own/zeros 0" in line and "own/nan" not in line
    titles: Any = chromium.run(TITLES)
    assert {"own/nan", "train/lr"} <= set(titles) and "own/zeros" not in titles


def test_metrics_with_the_same_values_share_a_plot(chromium: Browser, run: Path) -> None:
    """The plot names the others, and a search for one of them finds it."""
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(1, 5):
            file.write(json.dumps({"step": step, "own/first": step, "own/second": step}) + "\n")
    open_report(chromium, run)
    titles: Any = chromium.run(TITLES)
    assert "own/first" in titles and "own/second" not in titles
    assert text_in(chromium, f"{curve('own/first')} .legend").endswith("same values: own/second")
    chromium.key("/")
    for letter in "own/second":
        chromium.key(letter)
    shown: Any = chromium.run(
        "[...document.querySelectorAll('#curves figure:not([hidden]) h4')].map((h) => h.innerText)"
    )
    assert shown == ["own/first"]


def test_small_costs_share_a_row(chromium: Browser, run: Path) -> None:
    fields = json.loads((run / "run.json").read_text())
    fields["attempts"][0] |= {"started": "2026-01-01T00:00:00+00:00", "seconds": 60.0}
    small = [{"hook": f"small{index}", "kind": "lifecycle", "calls": 10, "seconds": 0.02} for index in range(3)]
    (run / "run.json").write_text(json.dumps({**fields, "costs": [*fields["costs"], *small]}))
    open_report(chromium, run)
    texts = "[...document.querySelectorAll('#cost tbody tr')].map((row) => row.innerText)"
    rows = [text.split() for text in chromium.run(texts)]
    assert [row[0] for row in rows] == ["watch", "3"]
    assert rows[1][:5] == ["3", "others", "30", "60", "ms"]


def test_heads_of_tables_are_aligned_as_their_columns(chromium: Browser, tmp_path: Path) -> None:
    """A column of numbers is right-aligned with its head, and one with other values, too, is not."""
    record = start_record(tmp_path, "one", seed=1)
    record.log_table(1, 0, "t", ["numbers", "both", "missing"], [[1, 2, 3.5], [1, "x", None]])
    close_record(record, step=10, tokens_seen=0)
    open_report(chromium, tmp_path / "one")
    cells = "[...row.cells].map((cell) => getComputedStyle(cell).textAlign)"
    align = f"[...document.querySelectorAll('#media tr')].map((row) => {cells})"
    assert chromium.run(align) == [["right", "left", "right"]] * 3


def open_norms(browser: Browser, root: Path, norms: list[float]) -> None:
    """Open the report of a run whose layers have these gradient norms."""
    record = start_record(root, "norms", seed=1)
    names = [f"layer{index}" for index in range(len(norms))]
    for step in (1, 2):
        record.log(step, 0, "train/loss", 1.3 + step / 10)
        record.log_layers("gradients", step, names, ["norm"], torch.tensor(norms).unsqueeze(1))
    close_record(record, step=2)
    open_report(browser, root / "norms")


def test_layers_of_vanishing_gradients_have_different_colours(chromium: Browser, tmp_path: Path) -> None:
    """The colours cover the norms from the smallest to the largest one, and what is below them is labelled."""
    norms = [10.0**-power for power in range(0, 24, 2)]
    open_norms(chromium, tmp_path / "all", norms)
    show(chromium, HEAT_MAP)
    assert len({row_colors(chromium, row)[100] for row in range(12)}) == 12
    assert text_in(chromium, "#layers .ticks").startswith("1e-22")
    open_norms(chromium, tmp_path / "zero", [*norms, 0.0])
    show(chromium, HEAT_MAP)
    assert text_in(chromium, "#layers .ticks").startswith("≤ 1e-22")
    open_norms(chromium, tmp_path / "few", [*[10.0 ** -(index % 5) for index in range(100)], 1e-30])
    show(chromium, HEAT_MAP)
    assert text_in(chromium, "#layers .ticks").startswith("≤ 1e-4")


def test_histograms_have_the_steps_at_which_their_layer_was_measured(chromium: Browser, tmp_path: Path) -> None:
    """Of two hooks that measure layers at other steps, neither leaves gaps in the histograms of the other's layers."""
    record = start_record(tmp_path, "one", seed=1)
    for step in range(1, 41):
        for name in ["often", "seldom"] if step % 10 == 0 else ["often"]:
            counted = histograms([torch.tensor([1.5, -0.5, 0.0])])
            record.log_layers("gradients", step, [name], ["top_octave"], counted.tops.unsqueeze(1))
            record.log_layers("gradient_histograms", step, [name], ["count"], counted.counts.unsqueeze(1).float())
    close_record(record, step=40)
    open_report(chromium, tmp_path / "one")
    show(chromium, HISTOGRAMS)
    steps, bare = {}, {}
    for name, count in (("often", 40), ("seldom", 4)):
        select = element(f"{HISTOGRAMS} select")
        index = f"[...{select}.options].findIndex((option) => option.textContent === '{name}')"
        chromium.run(f"{select}.selectedIndex = {index}; {select}.dispatchEvent(new Event('change'))")
        chromium.run(f"{element(HISTOGRAMS)}.focus()")
        chromium.key("Home")
        steps[name] = []
        for _ in range(count):
            steps[name].append(int(text_in(chromium, f"{HISTOGRAMS} .readout").split("at step ")[1].split(",")[0]))
            chromium.key("ArrowRight")
        chromium.key("Escape")
        canvas = f"{element(f'{HISTOGRAMS} canvas')}"
        data = f"{canvas}.getContext('2d').getImageData(230, 8, {canvas}.width - 242, 1).data"
        bare[name] = chromium.run(f"{data}.filter((value, place) => place % 4 === 3 && value === 0).length")
    assert steps == {"often": [*range(1, 41)], "seldom": [10, 20, 30, 40]}
    width: Any = chromium.run(f"{element(f'{HISTOGRAMS} canvas')}.width - 242")
    assert bare["often"] == 0 and bare["seldom"] < 0.15 * width  # the steps long before the first are empty


@pytest.mark.parametrize("text", list(TEXT.values()), ids=list(TEXT))
def test_no_script_of_a_run_is_executed(chromium: Browser, tmp_path: Path, text: str) -> None:
    """Hostile names and texts are shown as text: no script runs, and the page's policy has nothing to block."""
    run = write_record(tmp_path, "hostile", text=text)
    open_report(chromium, run, height=12_000, script=SPY)
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
    undrawn = "[...document.querySelectorAll('.plot')].filter((plot) => !plot.querySelector('canvas')).length"
    assert chromium.run(undrawn) > 0
    chromium.print(tmp_path / "report.pdf")
    assert chromium.run(undrawn) == 0
    assert (tmp_path / "report.pdf").stat().st_size > 20_000


def write_metrics(root: Path, rows: list[dict[str, Any]], **run: Any) -> Path:
    """Write the record of a run with these metrics."""
    record = start_record(root, "one", seed=1)
    for row in rows:
        for name, value in row.items():
            if name != "step":
                record.log(row["step"], 0, name, value)
    close_record(record, **{"step": rows[-1]["step"], **run})
    return root / "one"


def test_the_first_screen(chromium: Browser, run: Path) -> None:
    """The verdict with its story, five tiles and the loss come first, then the layers, then everything else."""
    open_report(chromium, run)
    sections: Any = chromium.run("[...document.querySelectorAll('main section')].map((one) => one.id)")
    assert sections[:3] == ["alerts", "loss", "layers"] and sections.index("curves") > sections.index("flow")
    verdict = text_in(chromium, ".verdict")
    assert verdict.startswith("Broken") and "1 error" in verdict
    assert chromium.run("document.querySelectorAll('.tile').length") <= 5
    assert chromium.run("document.querySelector('.tiles').getBoundingClientRect().bottom < innerHeight")
    assert chromium.run(f"{element(curve('loss'))}.querySelector('canvas').clientHeight") >= 300
    assert chromium.run("document.querySelector('#loss h4').innerText") == "loss"


def test_a_healthy_run_says_so(chromium: Browser, real_run: Path) -> None:
    chromium.open(real_run / "report.html")
    assert text_in(chromium, ".verdict").startswith("Healthy")


def test_a_story_is_told_in_its_order(chromium: Browser, tmp_path: Path) -> None:
    """One line for each kind of thing that went wrong, with its step; the others are folded."""
    rows: list[dict[str, Any]] = [{"step": step, "train/loss": 0.98**step} for step in range(1, 101)]
    rows += [{"step": 5 * step, "val/accuracy": 0.8 if step <= 10 else 0.2} for step in range(1, 21)]
    run = write_metrics(tmp_path, sorted(rows, key=lambda row: row["step"]))
    spike = {"kind": "loss_spike", "by": "loss_spike", "loss": 20.0, "median": 0.1}
    with (run / "events.jsonl").open("a") as file:
        for step in (52, 53, 54):
            file.write(json.dumps({**spike, "step": step, "spreads": float(step)}) + "\n")
    open_report(chromium, run)
    assert chromium.run("document.querySelectorAll('.alert').length") == 1
    assert text_in(chromium, ".alert a").startswith("loss_spike: the loss rose to 20, 52 spreads")
    assert text_in(chromium, ".alert .story").startswith("step 55 got worse and did not recover: val/accuracy")
    assert text_in(chromium, ".alert details").startswith("2 more")
    assert "step 54 loss_spike" in text_in(chromium, ".alert details")


def test_a_dark_page_is_dark_before_its_script_runs(chromium: Browser, run: Path) -> None:
    """The parser hands the page's header to observers before it runs a script."""
    colors = "getComputedStyle(document.body).backgroundColor"
    script = f"""new MutationObserver((_, observer) => {{
      if (document.querySelector("header") && !document.documentElement.dataset.theme) window.early ??= {colors};
    }}).observe(document, {{ childList: true, subtree: true }})"""
    for dark, expected in ((False, "rgb(246, 247, 249)"), (True, "rgb(18, 22, 27)")):
        assert main(["report", str(run)]) == 0
        chromium.open(run / "report.html", dark=dark, script=script)
        assert chromium.run(f"[window.early, {colors}]") == [expected, expected]


def test_the_verdict_is_near_the_top_of_a_phone(chromium: Browser, run: Path) -> None:
    """The controls are one row, which can be scrolled as that of the sections."""
    open_report(chromium, run, width=400, height=800)
    assert chromium.run("document.querySelector('.verdict').getBoundingClientRect().bottom") < 270
    assert chromium.run("document.querySelector('.controls').scrollWidth > innerWidth")
    assert not chromium.run("document.documentElement.scrollWidth > innerWidth")


def test_a_spike_does_not_flatten_a_curve(chromium: Browser, tmp_path: Path) -> None:
    """It is named beside the curve; a log axis shows it."""
    losses = [2 + (step % 7) / 7 for step in range(1, 61)]
    losses[29] = 1e6
    run = write_metrics(tmp_path, [{"step": step, "train/loss": loss} for step, loss in enumerate(losses, start=1)])
    open_report(chromium, run)
    show(chromium, curve("train/loss"))
    note = f"{curve('train/loss')} p.note"
    assert "1,000,000 at step 30" in text_in(chromium, note)
    chromium.run(f"{element(curve('train/loss'))}.focus()")
    chromium.key("l")
    assert chromium.run(f"{element(note)}.hidden") is True


def test_the_cursor_names_its_step(chromium: Browser, run: Path) -> None:
    open_report(chromium, run)
    show(chromium, curve("loss"))
    chromium.run(f"{element(curve('loss'))}.focus()")
    chromium.key("Home")
    assert text_in(chromium, f"{curve('loss')} .tip") == "step 1"


def test_smoothing_leaves_curves_of_few_points(chromium: Browser, run: Path) -> None:
    """Those of a validation stay where they were measured; scripts/plots.test.js checks the others."""
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(10, 60, 10):
            file.write(json.dumps({"step": step, "val/own": 10 - step / 7}) + "\n")
    open_report(chromium, run, height=6000)
    pictures = []
    for smooth in (False, True):
        if smooth:
            chromium.run(SMOOTH)
        for title in ("val/own", "mine/number"):
            show(chromium, curve(title))
            pictures.append(picture(chromium, curve(title)))
    assert pictures[0] == pictures[2] and pictures[1] != pictures[3]


def test_a_legend_hides_a_curve(chromium: Browser, run: Path) -> None:
    open_report(chromium, run)
    show(chromium, curve("loss"))
    entry = f"{element(curve('loss'))}.querySelector('.legend button')"
    pictures, states = [picture(chromium, curve("loss"))], []
    for _ in range(2):
        chromium.run(f"{entry}.click()")
        chromium.frames()
        pictures.append(picture(chromium, curve("loss")))
        states.append(chromium.run(f"{entry}.ariaPressed"))
    assert pictures[0] == pictures[2] != pictures[1] and states == ["false", "true"]


def test_twelve_runs_have_twelve_colors(chromium: Browser, tmp_path: Path) -> None:
    """And in a comparison a legend hides its run in every plot."""
    runs = [write_record(tmp_path, f"run{index}", 20, lr=0.1 + index / 100) for index in range(12)]
    assert main(["report", *map(str, runs), "--output", str(tmp_path / "all.html")]) == 0
    chromium.open(tmp_path / "all.html", height=9000)
    show(chromium, curve("lr"))
    swatches = f"[...{element(curve('lr'))}.querySelectorAll('.swatch')]"
    assert len(set(chromium.run(f"{swatches}.map((swatch) => getComputedStyle(swatch).borderTopColor)"))) == 12
    chromium.run(f"{element(curve('lr'))}.querySelector('.legend button').click()")
    chromium.frames()
    assert chromium.run(f"{element(curve('loss'))}.querySelector('.legend button').ariaPressed") == "false"


def test_heat_maps_of_many_layers_are_not_cut(chromium: Browser, tmp_path: Path) -> None:
    open_report(chromium, write_record(tmp_path, "one", layers=120))
    show(chromium, HEAT_MAP)
    box = element(f"{HEAT_MAP} .scroll")
    assert chromium.run(f"{box}.scrollHeight <= {box}.clientHeight")


def test_layers_of_several_hooks_have_no_gaps(chromium: Browser, tmp_path: Path) -> None:
    """A layer that is measured every ten steps is drawn as one that is measured at each."""
    record = start_record(tmp_path, "one", seed=1)
    for step in range(1, 41):
        for name in ["often", "seldom"] if step % 10 == 0 else ["often"]:
            record.log_layers("gradients", step, [name], ["norm", "nans"], torch.tensor([[float(step), 0.0]]))
    close_record(record, step=40)
    open_report(chromium, tmp_path / "one")
    show(chromium, HEAT_MAP)
    often, seldom = (row_colors(chromium, row) for row in range(2))
    assert "0,0,0,0" not in often and seldom.count("0,0,0,0") < 0.15 * len(seldom)
    show(chromium, FLOW)
    point_at(chromium, f"{FLOW} .u-over", 0.75)
    assert text_in(chromium, f"{FLOW} .readout").startswith("seldom")


def test_searching_leaves_the_header_as_it_is(chromium: Browser, run: Path) -> None:
    for width in (1280, 400):
        open_report(chromium, run, width=width)
        height = "document.querySelector('header').getBoundingClientRect().height"
        before = chromium.run(height)
        chromium.key("/")
        chromium.key("m")
        assert text_in(chromium, "#found") and chromium.run(height) == before


def test_touch_targets_on_a_phone(chromium: Browser, run: Path) -> None:
    """What a finger can press is 44 pixels high and wide; a checkbox has its label."""
    open_report(chromium, run, width=400, height=6000)
    chromium.frames()
    small = """[...document.querySelectorAll('button, select, input, a, summary')].filter((one) => {
      const { width, height } = (one.type === 'checkbox' ? one.closest('label') : one).getBoundingClientRect();
      return height && (height < 44 || width < 44);
    }).map((one) => one.outerHTML.slice(0, 80))"""
    assert chromium.run(small) == []
    beside = """[...document.querySelectorAll('.legend button')].every((one) => {
      const [line, name] = [...one.children].map((part) => part.getBoundingClientRect());
      return Math.abs((line.top + line.bottom) - (name.top + name.bottom)) < 6;
    })"""
    assert chromium.run(beside) is True  # a curve's color and its name


def test_parts_of_a_step_do_not_exceed_it(chromium: Browser, tmp_path: Path) -> None:
    """Hooks run inside of the other parts, so that their time is named beside them."""
    parts = {"step": 0.1, "data_wait": 0.01, "forward_backward": 0.07, "optimizer": 0.02, "hooks": 0.05}
    rows = [{"step": step, **{f"throughput/{name}_seconds": value for name, value in parts.items()}} for step in (1, 2)]
    open_report(chromium, write_metrics(tmp_path, rows))
    assert "A step takes 100 ms" in text_in(chromium, "#cost")
    shares: Any = chromium.run("[...document.querySelectorAll('#cost .legend li')].map((one) => one.innerText)")
    assert [text.partition(" (")[2] for text in shares] == ["10 %)", "70 %)", "20 %)"]
    assert "Hooks take 50 ms of it (50 %)" in text_in(chromium, "#cost .note")


def test_throughput_is_one_chart(chromium: Browser, tmp_path: Path) -> None:
    """The times of a step's parts are lines; the legend has the speeds and shares."""
    rows = [
        {
            "step": step,
            **{f"throughput/{name}": step / 7 for name in ("step_seconds", "hooks_seconds", "samples_per_s")},
        }
        for step in range(1, 9)
    ]
    open_report(chromium, write_metrics(tmp_path, rows))
    assert chromium.run(TITLES) == ["Time of a step"]
    texts: Any = chromium.run("[...document.querySelectorAll('#curves .legend li')].map((one) => one.innerText)")
    assert len(texts) == 3 and chromium.run("document.querySelectorAll('#curves .legend button').length") == 2


def test_time_and_tokens_as_axes(chromium: Browser, tmp_path: Path) -> None:
    """Curves and the cursor follow the axis that is chosen; only those are offered that the record has."""
    run = write_metrics(tmp_path, [{"step": step, "train/loss": 1 / step} for step in range(1, 11)], tokens_seen=1000)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = [{**line, "time": 1e9 + 10 * line["step"] ** 2} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timed))
    open_report(chromium, run)
    options = "[...document.querySelectorAll('#axis option')].map((one) => one.textContent)"
    assert chromium.run(options) == ["step", "time (min)", "tokens"]
    seen = []
    for name in ("time", "tokens"):
        select = element("#axis")
        chromium.run(f"{select}.value = '{name}'; {select}.dispatchEvent(new Event('change'))")
        show(chromium, curve("train/loss"))
        point_at(chromium, f"{curve('train/loss')} .u-over", 0.5)
        seen.append(text_in(chromium, f"{curve('train/loss')} .tip"))
    assert seen[0].endswith("step 7") and seen[1].endswith(("tokens · step 5", "tokens · step 6"))
    assert chromium.problems() == []

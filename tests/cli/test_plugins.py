"""Packages that offer names: what `hookline hooks` prints of them; the template in examples/, installed and used."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Captured, error_of, json_of, output_of, python
from small_config import config_with

from hookline.core import plugins

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "examples" / "hookline-plugin"
EMA_REFUSED = "the hook 'ema' of other 1.0 is refused: a package cannot replace a built-in"
ACME = """
class Echoes:
    'Repeats.'
    def on_step_end(self): ...

def level(output, batch):
    'Loud.'
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package with good and broken names, and another with the same name and one of a built-in."""
    offers = {
        "acme": "[hookline.hooks]\nechoes = acme:Echoes\ngone = acme_gone:Hook\ntwice = acme:Echoes\n"
        "[hookline.metrics]\nlevel = acme:level\n[hookline.sinks]\ndatabase = acme:Database\n",
        "other": "[hookline.hooks]\nema = other:Average\ntwice = other:Average\n"
        "[hookline.metrics]\nlost = other:lost\n",
    }
    for package, text in offers.items():
        meta = tmp_path / "site" / f"{package}-1.0.dist-info"
        meta.mkdir(parents=True)
        (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (meta / "entry_points.txt").write_text(text)
    (tmp_path / "site" / "acme.py").write_text(ACME)
    (tmp_path / "site" / "other.py").write_text("raise SystemExit('no GPU')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for table in plugins.TABLES:
        monkeypatch.setitem(vars(table), "plugins", plugins.PluginTable(table.noun, table.plural).plugins)
    yield
    for module in ("acme", "other"):  # other tests have packages of these names
        sys.modules.pop(module, None)


def test_every_name_says_where_it_comes_from(packages: None, capsys: Captured) -> None:
    """A package's names have its version, also metrics; broken and refused ones have the reason, and hide no others."""
    out = output_of(capsys, ["hooks"])
    assert "echoes  lifecycle, acme 1.0\n    Repeats.\n" in out
    assert "level  metric, acme 1.0\n    Loud.\n" in out
    words = " ".join(out.split())
    assert "gone broken, acme 1.0 the hook 'gone' of acme 1.0 (acme_gone:Hook) cannot be loaded: Module" in words
    assert "twice broken, acme 1.0 and other 1.0 the hook 'twice' has several sources (acme 1.0, other 1.0)" in words
    assert "lost broken, other 1.0 the metric 'lost' of other 1.0 (other:lost) cannot be loaded: SystemExit" in words
    assert EMA_REFUSED in words
    assert "database not read, acme 1.0 there is no group 'hookline.sinks'; sinks, trackers and transforms are" in words
    assert "ema  lifecycle, built-in\n" in out and "json_log  lifecycle, built-in\n" in out


def test_programs_read_where_a_name_comes_from(packages: None, capsys: Captured) -> None:
    """`origin`, `refused` and `error` have what the text has."""
    hooks = {hook["name"]: hook for hook in json_of(capsys, "hooks")}
    assert [hooks[name]["origin"] for name in ("ema", "echoes", "gone")] == ["built-in", "acme 1.0", "acme 1.0"]
    assert hooks["ema"]["refused"] == EMA_REFUSED and hooks["echoes"]["refused"] is None
    assert "No module named 'acme_gone'" in hooks["gone"]["error"]
    assert EMA_REFUSED in " ".join(output_of(capsys, ["hooks", "ema"]).split())


def test_a_refused_name_is_reported_where_a_config_uses_it(
    packages: None, capsys: Captured, caplog: pytest.LogCaptureFixture
) -> None:
    """The built-in is used, and one warning names the package; a run that does not use the name says nothing."""
    for name, warnings in {"echoes": [], "ema": [EMA_REFUSED]}.items():
        Path("c.yaml").write_text(config_with(name))
        assert error_of(capsys, ["train", "c.yaml"], 0) == ""
        assert [record.getMessage() for record in caplog.records] == warnings
    for name, reason in (("twice", "has several sources"), ("gone", "No module named 'acme_gone'")):
        Path("c.yaml").write_text(config_with(name))
        assert reason in error_of(capsys, ["train", "c.yaml"])


def test_the_template_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed by pip, its names are listed with its version, a run uses all four, and its own tests pass."""
    source, site = tmp_path / "template", tmp_path / "site"
    shutil.copytree(TEMPLATE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    options = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation")
    python("-m", "pip", "install", *options, "--target", site, source, check=True)
    monkeypatch.syspath_prepend(str(site))

    listed = python("-m", "hookline", "hooks", check=True).stdout
    for name, kind in {"weight_norm": "lifecycle", "lines": "lifecycle", "unit_rms": "update"}.items():
        assert f"\n{name}  {kind}, hookline-plugin 0.1.0\n" in listed
    assert "\nconfidence  metric, hookline-plugin 0.1.0\n" in listed

    trained = python("-m", "hookline", "train", source / "train.yaml", check=True)
    assert trained.stderr == ""
    (lines,) = Path("runs").glob("*/lines.txt")
    written = lines.read_text().splitlines()
    assert [line.split()[:2] for line in written if "weight_norm" in line] == [
        [str(step), "train/weight_norm"] for step in (1, 2, 3)
    ]
    assert any(line.startswith("3 val/confidence 0.") for line in written) and written[-1] == "completed"

    # Named, because an environment that was made before Hookline had a plugin does not know of it.
    options = ("-q", "-p", "pytest_hookline", "-p", "no:cacheprovider", "-k", "not lifecycle or on_epoch_end")
    python("-m", "pytest", *options, source / "tests", check=True)


def test_the_page_shows_the_template() -> None:
    """The lines of pyproject.toml and the config in docs/how-to/plugins.md are those of the template."""
    page = (ROOT / "docs" / "how-to" / "plugins.md").read_text(encoding="utf-8")
    project, config = ((TEMPLATE / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "train.yaml"))
    assert page.partition("```toml\n")[2].partition("```")[0] in project
    assert page.partition("```yaml\n")[2].partition("```")[0] in config

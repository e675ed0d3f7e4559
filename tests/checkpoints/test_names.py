"""Test checkpoint names: filled from metrics, and safe whatever the template and the metrics look like."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookline.checkpoints.names import NameTemplate
from hookline.errors import ConfigError

SAFE = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*")


@pytest.mark.req("002-25", "002-26")
@pytest.mark.parametrize(
    ("template", "with_names", "name"),
    [
        ("epoch_{epoch}_loss_{val/loss:.2f}", False, "epoch_3_loss_0.12"),
        ("epoch_{epoch}_loss_{val/loss:.2f}", True, "epoch_epoch=3_loss_val_loss=0.12"),
        ("{epoch}-{step:06d}", True, "epoch=3-step=000120"),
        ("step-{step:08d}", False, "step-00000120"),
        ("{val/loss}", False, "0.1234"),
        ("{val/accuracy:.1f}", False, "none"),
        ("fixed", True, "fixed"),
        ("{odd name}", False, "1e_16"),
        ("{bad:.1e}", False, "nan"),
    ],
)
def test_templates(template: str, with_names: bool, name: str) -> None:
    """Epoch, step and metrics are filled in, optionally with their names in front."""
    metrics = {"val/loss": 0.1234, "odd name": 1e16, "bad": float("nan")}
    assert NameTemplate(template, with_names).fill(3, 120, metrics) == name


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("../{epoch}", "'/' cannot be in a name"),
        ("a/b", "'/' cannot be"),
        ("a\\b", "cannot be in a name"),
        ("a b", "' ' cannot be"),
        (".hidden", "without a leading dot"),
        ("", "not empty"),
        ("x" * 151, "at most 150"),
        ("best", "not best or last"),
        ("manifest.json", "not best or last or manifest.json"),
        ("{epoch", "write fields as"),
        ("{}", "a field is a metric's name"),
        ("{epoch!r}", "a field is a metric's name"),
        ("{epoch:.2f}{val/loss:d}", "'d' is not a format for val/loss; try '.2f'"),
        ("{step:1000000000d}", "not a format for step; try '08d'"),
        ("{val/loss:{step}}", "not a format for val/loss"),
        ("{epoch:%}", "not a format"),
    ],
)
def test_invalid_templates_raise_at_construction(template: str, words: str) -> None:
    """The error names the parameter, the template and the remedy, long before the first save."""
    with pytest.raises(ConfigError) as caught:
        NameTemplate(template)
    assert caught.value.path == "filename" and words in caught.value.problem


def test_a_field_is_looked_up_and_never_evaluated() -> None:
    """Attributes and items of values are out of reach: such a field is a metric that was not measured."""
    for template in ("{epoch.__class__}", "{step.real}", "{epoch[0]}"):
        assert NameTemplate(template).fill(1, 2, {}) == "none"


@given(key=st.text(min_size=1, max_size=20), value=st.floats(), with_names=st.booleans())
def test_no_metric_leads_out_of_the_directory(key: str, value: float, with_names: bool) -> None:
    """Whatever a metric is called and whatever its value is, the name is one plain file name."""
    try:
        template = NameTemplate("{" + key + "}", with_names)
    except ConfigError:
        return
    name = template.fill(0, 1, {key: value})
    assert SAFE.fullmatch(name) and len(name) <= 150 and name not in ("best", "last")

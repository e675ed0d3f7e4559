"""A reference in the place of a number is that number; in the place of a text it stays text."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional, Union

import pytest
import torch

from hookline.build import trainer_from_config
from hookline.cli import main
from hookline.config.references import Resolved, resolve_references, without_values
from hookline.errors import ConfigError, RegistrationError
from hookline.registry.loading import make_hook
from hookline.registry.loading_references import as_expected, expected_kinds

NOTHING = inspect.Parameter.empty


def parameter(annotation: Any = NOTHING, default: Any = NOTHING) -> inspect.Parameter:
    """A parameter of some function."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter("rate", kind, annotation=annotation, default=default)


def config(**changes: Any) -> dict[str, Any]:
    """A run of one step that is soon over."""
    return {
        "model": {"name": "char_gpt", "context": 16, "width": 8, "heads": 2, "layers": 1},
        "data": {"name": "stdlib_text", "context": 16, "batch_size": 2, "max_bytes": 60_000},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "trainer": {"max_steps": 1, "validate_every": None, "sanity_batches": 0, "console": False},
        **changes,
    }


@pytest.mark.parametrize(
    ("annotation", "kinds"),
    [
        ("float | None", {"float", "None"}),
        (float | torch.Tensor, {"float", "Tensor"}),
        (Optional[int], {"int", "None"}),  # noqa: UP045 - as many people write it
        ("Union[int, typing.List[float]]", {"int", "List"}),
        (Union[int, str], {"int", "str"}),  # noqa: UP007
        (tuple[float | torch.Tensor, ...], {"tuple"}),
        ("Sequence[str] | str", {"Sequence", "str"}),
        ("Optional[Union[int, list[str | int]]]", {"int", "list", "None"}),
        (NOTHING, set()),
    ],
)
def test_what_a_parameter_takes(annotation: Any, kinds: set[str]) -> None:
    """The alternatives by their outer names, from types and from their text."""
    assert expected_kinds(parameter(annotation)) == kinds


@pytest.mark.parametrize(
    ("annotation", "default", "text", "value"),
    [
        (float, NOTHING, "3e-4", 3e-4),
        ("float | Tensor", 0.1, "1", 1),
        (int, NOTHING, "12", 12),
        ("int | None", None, "null", None),
        (bool, False, "true", True),
        ("bool | None", None, "off", False),
        ("Sequence[float]", (), "[0.5, 0.9]", [0.5, 0.9]),
        ("Iterable[int]", NOTHING, "[1, 2]", [1, 2]),
        (NOTHING, 4, "0.5", 0.5),
        (NOTHING, True, "no", False),
        (str, NOTHING, "123", "123"),
        ("str | None", None, "null", "null"),
        ("int | str", 0, "12", "12"),
        (Path, NOTHING, "12", "12"),
        ("Any", None, "12", "12"),
        ("Literal['1', '2']", "1", "1", "1"),
        (NOTHING, NOTHING, "12", "12"),
        (NOTHING, None, "12", "12"),
        (NOTHING, "word", "12", "12"),
        (NOTHING, 4, "four", "four"),
        (Sequence[str], (), "[hunter2, hunter3]", "[hunter2, hunter3]"),
        ("torch.Tensor | None", None, "12", "12"),
    ],
)
def test_a_reference_is_read_as_the_parameter_takes_it(annotation: Any, default: Any, text: str, value: Any) -> None:
    """Numbers, switches and lists of them are read as YAML reads them; what may be meant as text is left alone."""
    found = as_expected(Resolved(text, "${env:X}"), parameter(annotation, default))
    assert found == value and type(found) is (Resolved if isinstance(value, str) else type(value))


@pytest.mark.parametrize(
    ("annotation", "text"),
    [("float", "fast"), (int, "2.5"), (int, ""), (bool, "1"), ("float", "null"), (int, "9" * 40), (int, "[1")],
)
def test_a_reference_to_something_else_is_refused(annotation: Any, text: str) -> None:
    """What was expected is said; what was found is a secret perhaps."""
    with pytest.raises(ValueError, match=r"^expected (float|int|bool)$"):
        as_expected(Resolved(text, "${env:X}"), parameter(annotation))


def test_only_a_reference_that_stands_alone_is_read() -> None:
    """A text around it makes a text of it, and a word that somebody wrote is what he wrote."""
    with pytest.raises(ValueError, match="expected int"):
        as_expected(Resolved("12", "1${env:X}"), parameter(int))
    assert as_expected("12", parameter(int)) == "12"


def test_every_part_of_a_run_takes_numbers_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizer, scheduler, model, data and hooks; the record has the references, and in no file the numbers."""
    given = {"LR": "0.0123456789", "BETAS": "[0.5, 0.75]", "WARMUP": "3", "LAYERS": "2", "BATCH": "3", "NORM": "0.625"}
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    parts = config(
        optimizer={"name": "adam", "lr": "${env:LR}", "betas": "${env:BETAS}"},
        scheduler={"name": "warmup_cosine", "warmup_steps": "${env:WARMUP}"},
        hooks={"update": [{"name": "clip_norm", "max_norm": "${env:NORM}"}]},
    )
    parts["model"]["layers"], parts["data"]["batch_size"] = "${env:LAYERS}", "${env:BATCH}"
    trainer = trainer_from_config(parts)
    group = trainer.optimizers[0].param_groups[0]
    assert (group["initial_lr"], list(group["betas"])) == (0.0123456789, [0.5, 0.75])
    assert trainer.hooks.get("clip_norm").max_norm == 0.625
    trainer.train()
    assert trainer.run_dir is not None and trainer.step == 1
    written = {path.name: path.read_text(encoding="utf-8") for path in trainer.run_dir.iterdir() if path.is_file()}
    assert [name for name in given if f"${{env:{name}}}" not in written["config.yaml"]] == []
    assert "${env:NORM}" in written["run.json"]
    assert [name for name, text in written.items() if "0.0123456789" in text or "0.625" in text] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": {"name": "sgd", "lr": "${env:X}"}}, r"^optimizer\.lr: expected float \| torch\.Tensor, "),
        ({"scheduler": {"name": "step", "step_size": "${env:X}"}}, r"^scheduler\.step_size: expected int, "),
        ({"hooks": {"lifecycle": [{"name": "ema", "warmup": "${env:X}"}]}}, r"EMAHook\.warmup: expected bool, "),
    ],
)
def test_a_wrong_variable_is_named_and_not_shown(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameter, what it takes, and the reference."""
    monkeypatch.setenv("X", "hunter2")
    with pytest.raises((ConfigError, RegistrationError), match=message + r"which \$\{env:X\} does not hold") as caught:
        trainer_from_config(config(**change))
    assert "hunter2" not in str(caught.value)


def test_what_a_constructor_refuses_is_told_with_the_reference() -> None:
    """A number that is none for the hook: its parameters are shown as they were written."""
    with pytest.raises(RegistrationError, match=r"cannot be made with patience='\$\{env:X\}': patience: expected"):
        make_hook("early_stopping", {"patience": Resolved("-1", "${env:X}")})


ELEMENTS = [
    ("Iterable[int]", NOTHING, [Resolved("3", "${env:N}"), 5], [3, 5]),
    (tuple[float | torch.Tensor, float], NOTHING, (0.9, Resolved("1e-2", "${env:B}")), [0.9, 0.01]),
    ("list[float] | None", None, [Resolved("2", "${env:N}")], [2]),
    (NOTHING, NOTHING, [0.5, Resolved("7", "${env:N}")], [0.5, 7]),
    ("Optional[list[int]]", None, [Resolved("3", "${env:N}")], [3]),
    ("Union[int, Sequence[int]]", NOTHING, [Resolved("3", "${env:N}")], [3]),
    ("list[str]", NOTHING, [Resolved("3", "${env:N}"), "b"], ["3", "b"]),
    (NOTHING, NOTHING, [Resolved("3", "${env:N}")], ["3"]),
]


@pytest.mark.parametrize(("annotation", "default", "given", "wanted"), ELEMENTS)
def test_references_in_lists(annotation: Any, default: Any, given: Any, wanted: list[Any]) -> None:
    """Each is read where numbers are taken: by the annotation, or as all others in the list are."""
    assert as_expected(given, parameter(annotation, default)) == wanted


def test_a_word_in_a_list_of_numbers_is_refused_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the reference, wherever it stands, and not its value."""
    monkeypatch.setenv("SECRET", "s3cr3tpass")
    with pytest.raises(ConfigError) as caught:
        trainer_from_config(config(optimizer={"name": "adamw", "betas": ["${env:SECRET}", 0.9]}))
    assert "optimizer.betas: expected tuple[float | " in str(caught.value)
    assert "got ['${env:SECRET}', 0.9]" in str(caught.value) and "s3cr3t" not in str(caught.value)


def test_milestones_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that got them as texts would never move the rate."""
    monkeypatch.setenv("FIRST", "1")
    trainer = trainer_from_config(
        config(
            scheduler={"name": "multistep", "milestones": ["${env:FIRST}", 5]},
            trainer={"max_steps": 3, "console": False},
        )
    )
    trainer.train()
    assert trainer.lr == pytest.approx(0.01)


@pytest.mark.parametrize(
    "words",
    [
        ["hooks.lifecycle=[{name: lr_monitor, every: '${env:SECRET}'}]"],
        ["optimizer.name=${env:SECRET}"],
        ["optimizer.lr=${env:RATE}"],
    ],
)
def test_the_command_line_prints_no_values(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever quotes what a reference stood for, the reference is shown."""
    monkeypatch.setenv("SECRET", "s3cr3tpass")
    monkeypatch.setenv("RATE", "-98765.4321")
    assert main(["train", *words]) == 2
    shown = capsys.readouterr().err
    assert "${env:" in shown and "s3cr3t" not in shown and "98765" not in shown


def test_values_are_hidden_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are and as a repr has them; what was put in their place is left alone."""
    secrets = {"A": "pass\\word'\"1", "B": "SECRET_TOKEN", "SECRET_TOKEN": "abcdefgh1234"}
    resolve_references({name: f"${{env:{name}}}" for name in secrets}, secrets)
    assert without_values(f"{secrets['A']} and {secrets['A']!r}") == "${env:A} and '${env:A}'"
    assert without_values("SECRET_TOKEN abcdefgh1234") == "${env:B} ${env:SECRET_TOKEN}"


def test_the_place_of_a_problem_is_shown_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variable may hold a word of the config."""
    monkeypatch.setenv("PLACE", "optimizer")
    assert main(["train", "trainer.output_dir=${env:PLACE}", "optimizer.lr=-1"]) == 2
    assert "error: optimizer: adamw cannot be made with" in capsys.readouterr().err

"""Constructing what a config names: parameters by name, and text and references checked against annotations."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Optional, Union

import pytest
import torch
from commands import error_of

from hookline import (
    HooklineError,
    Trainer,
    TrainingHook,
    register_data,
    register_hook,
    register_model,
    register_scheduler,
    trainer_from_config,
)
from hookline.cli import main
from hookline.core import plugins
from hookline.errors import ConfigError, RegistrationError

if TYPE_CHECKING:
    pass

NOTHING: Any = object()


class Speed(IntEnum):
    """A type that takes numbers and is looked up by name."""

    FAST = 1


class Probe(TrainingHook):
    """Keeps the value that it is made with."""

    def __init__(self, rate: Any) -> None:
        self.rate = rate

    def on_train_end(self) -> None: ...


def build(**changes: Any) -> Trainer:
    """Make a trainer of the smallest parts, some of which are changed."""
    parts = {
        "model": {"name": "torch.nn.Linear", "in_features": 1, "out_features": 1},
        "data": "one",
        "optimizer": {"name": "sgd", "lr": 0.1},
        "trainer": {"max_steps": 7, "record": False, "console": False},
    }
    return trainer_from_config({**parts, **changes})


def read(value: Any, annotation: Any = NOTHING, default: Any = NOTHING) -> Any:
    """Return what a function with one parameter of this kind receives for a value of a config."""

    def probe(rate: Any) -> Probe:
        return Probe(rate)

    if annotation is NOTHING:
        del probe.__annotations__["rate"]
    else:
        probe.__annotations__["rate"] = annotation
    probe.__defaults__ = None if default is NOTHING else (default,)
    register_hook("probe")(probe)
    return build(hooks={"lifecycle": [{"name": "probe", "rate": value}]}).hooks.get("probe").rate


@pytest.fixture(autouse=True)
def own_data() -> None:
    """Register data with one batch."""
    register_data("one")(lambda: SimpleNamespace(train=[torch.zeros(1, 1)]))


@pytest.fixture(autouse=True)
def forget_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the values of references after each test: later tests may print the same words."""
    monkeypatch.setattr("hookline.config.references._references", {})


def config(**changes: Any) -> dict[str, Any]:
    """Return the config of a run of one step."""
    return {
        "model": {"name": "char_gpt", "context": 16, "width": 8, "heads": 2, "layers": 1},
        "data": {"name": "stdlib_text", "context": 16, "batch_size": 2, "max_bytes": 60_000},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "trainer": {"max_steps": 1, "validate_every": None, "sanity_batches": 0, "console": False},
        **changes,
    }


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
        ("Iterable[int]", NOTHING, "[1, 2]", [1, 2]),  # not imported here, as in torch
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
        (Optional[int], None, "12", 12),  # noqa: UP045 - as many people write it
        ("Union[int, Sequence[float]]", NOTHING, "[1, 2]", [1, 2]),
        (Union[int, str], NOTHING, "12", "12"),  # noqa: UP007
        ("Collection[int]", NOTHING, "[1, 2]", [1, 2]),
        ("float | np.ndarray", NOTHING, "0.5", 0.5),  # np is imported for type checkers only
        ("Optional[Callable[[float], float]]", None, "12", "12"),
        ("not even Python", NOTHING, "12", "12"),
    ],
)
def test_a_reference_is_read_as_the_parameter_takes_it(
    annotation: Any, default: Any, text: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers, bools and lists of them are read as YAML; where text is valid, the value stays text."""
    monkeypatch.setenv("X", text)
    result = read("${env:X}", annotation, default)
    assert result == value and (isinstance(result, str) or type(result) is type(value))


@pytest.mark.parametrize(
    ("annotation", "text"),
    [("float", "fast"), (int, "2.5"), (int, ""), (bool, "1"), ("float", "null"), (int, "9" * 40), (int, "[1")],
)
def test_a_reference_of_the_wrong_type_is_refused(annotation: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what was expected, and not the value, which may be a secret."""
    monkeypatch.setenv("X", text)
    expected = r"probe\.rate: expected (float|int|bool), which \$\{env:X\} does not hold$"
    with pytest.raises(RegistrationError, match=rf"^hooks\.lifecycle\.0: {expected}"):
        read("${env:X}", annotation)


def test_only_a_reference_without_text_around_it_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference with text around it is text."""
    monkeypatch.setenv("X", "2")
    with pytest.raises(RegistrationError, match="expected int"):
        read("1${env:X}", int)


@pytest.mark.parametrize(
    ("annotation", "value", "valid"),
    [
        (int, "12", False),
        ("float | None", "high", False),
        (bool, "no", False),
        (float | torch.Tensor, "high", False),
        (float, None, True),  # everything but text is left to the function
        (int, 0.5, True),
        (str, "word", True),
        ("Sequence[str] | str", "word", True),
        ("torch.device | None", "cuda", True),
        (Path, "there", True),
        (NOTHING, "word", True),
        ("list[float] | float", "all", True),
        (Speed, "FAST", True),  # the function may look it up by name
    ],
)
def test_text_is_rejected_where_only_numbers_are_valid(annotation: Any, value: Any, valid: bool) -> None:
    """Text is rejected early, because it would fail much later, in the middle of a run."""
    if valid:
        assert read(value, annotation) is value
    else:
        with pytest.raises(RegistrationError, match=r"probe\.rate: expected .*, got '.*' \(str\)$"):
            read(value, annotation)


def test_every_part_of_a_run_takes_numbers_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every component and hook can take numbers from the environment; the record contains the references only."""
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
        ({"hooks": {"lifecycle": [{"name": "ema", "warmup": "${env:X}"}]}}, r"ema\.warmup: expected true or false, "),
    ],
)
def test_a_wrong_variable_is_named_and_not_shown(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the parameter, what it takes, and the reference."""
    monkeypatch.setenv("X", "hunter2")
    with pytest.raises((ConfigError, RegistrationError), match=message + r"which \$\{env:X\} does not hold") as caught:
        trainer_from_config(config(**change))
    assert "hunter2" not in str(caught.value)


def test_errors_of_a_constructor_show_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a hook rejects a number, the message names the reference that it came from."""
    monkeypatch.setenv("X", "-1")
    with pytest.raises(RegistrationError, match=r"at least 0, got -1 \(int\), from \$\{env:X\}$"):
        build(hooks={"lifecycle": [{"name": "early_stopping", "patience": "${env:X}"}]})


ELEMENTS = [
    ("Iterable[int]", NOTHING, ["${env:N}", 5], [3, 5]),
    (tuple[float | torch.Tensor, float], NOTHING, [0.9, "${env:B}"], [0.9, 0.01]),
    ("list[float] | None", None, ["${env:N}"], [3]),
    (NOTHING, NOTHING, [0.5, "${env:N}"], [0.5, 3]),
    ("Optional[list[int]]", None, ["${env:N}"], [3]),
    ("Union[int, Sequence[int]]", NOTHING, ["${env:N}"], [3]),
    ("list[str]", NOTHING, ["${env:N}", "b"], ["3", "b"]),
    (NOTHING, NOTHING, ["${env:N}"], ["3"]),
]


@pytest.mark.parametrize(("annotation", "default", "given", "wanted"), ELEMENTS)
def test_references_in_lists(
    annotation: Any, default: Any, given: Any, wanted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """References in a list are read as numbers if the annotation, or the other elements, are numbers."""
    monkeypatch.setenv("N", "3")
    monkeypatch.setenv("B", "1e-2")
    assert list(read(given, annotation, default)) == wanted


def test_a_word_in_a_list_of_numbers_is_refused_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message shows the reference at its place in the list, and not its value."""
    monkeypatch.setenv("SECRET", "s3cr3tpass")
    with pytest.raises(ConfigError) as caught:
        trainer_from_config(config(optimizer={"name": "adamw", "betas": ["${env:SECRET}", 0.9]}))
    assert "optimizer.betas: expected tuple[float | " in str(caught.value)
    assert "got ['${env:SECRET}', 0.9]" in str(caught.value) and "s3cr3t" not in str(caught.value)


def test_milestones_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milestones become numbers; a scheduler that got text would never change the rate."""
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
    """Messages of any library show the reference, not its value."""
    monkeypatch.setenv("SECRET", "s3cr3tpass")
    monkeypatch.setenv("RATE", "-98765.4321")
    shown = error_of(capsys, ["train", *words])
    assert "${env:" in shown and "s3cr3t" not in shown and "98765" not in shown


def test_values_are_hidden_in_one_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Values are hidden as they are and as a repr shows them; what replaces them is not searched again."""
    for name, value in {"A": "pass\\word'\"1", "B": "SECRET_TOKEN", "SECRET_TOKEN": "abcdefgh1234"}.items():
        monkeypatch.setenv(name, value)
    for written in ("${env:A}", "${env:B} ${env:SECRET_TOKEN}"):
        assert f"there is no optimizer named '{written}'; " in error_of(capsys, ["train", f"optimizer.name={written}"])


def test_the_place_of_a_problem_is_shown_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path of an error is not hidden, even if a variable's value is a word in it."""
    monkeypatch.setenv("PLACE", "optimizer")
    assert main(["train", "trainer.output_dir=${env:PLACE}", "optimizer.lr=-1"]) == 2
    assert "error: optimizer: adamw cannot be created with" in capsys.readouterr().err


# ---- components ----------------------------------------------------------------------------------------------------


class Thing:
    """A factory with one of everything."""

    def __init__(self, first: Any, width: int, depth: int = 1, total_steps: int = 0) -> None:
        if depth < 0:
            raise HooklineError("depth is negative")
        self.given = (width + 0, depth, total_steps)

    def step(self) -> None: ...


def make(**parameters: Any) -> Any:
    """Return what the factory gets with these parameters; a run also offers its length, as total_steps and T_max."""
    register_scheduler("thing")(Thing)
    return build(scheduler={"name": "thing", **parameters}).schedulers[0].given


@pytest.mark.parametrize("kind", ["MODELS", "DATA", "OPTIMIZERS", "SCHEDULERS", "LOSSES"])
def test_every_built_in_name_has_a_factory(kind: str) -> None:
    """Each built-in name can be imported and called."""
    table = getattr(plugins, kind)
    assert table.built_in
    assert all(callable(table.find(name)) for name in table.built_in)


def test_defaults_fill_what_the_config_leaves_out() -> None:
    """A default is passed if the factory takes it and the config does not set it."""
    assert make(width=3) == (3, 1, 7)


def test_the_config_wins_over_a_default() -> None:
    """What the config sets is passed."""
    assert make(width=3, total_steps=4) == (3, 1, 4)


@pytest.mark.parametrize(
    ("parameters", "path", "words"),
    [
        ({"width": 1, "dpeth": 2}, "scheduler.dpeth", "did you mean 'depth'"),
        ({}, "scheduler.width", "thing needs the parameter 'width'"),
        ({"width": "x"}, "scheduler.width", "expected int, got 'x' (str)"),
        ({"width": []}, "scheduler", "thing cannot be created with total_steps=7, width=[]: "),
        ({"width": 1, "depth": -1}, "scheduler", "depth is negative"),
        ({"width": 1, "first": 2}, "scheduler.first", "thing has no parameter 'first'"),
    ],
)
def test_wrong_parameters_are_named(parameters: dict[str, Any], path: str, words: str) -> None:
    """A parameter that is unknown, missing or rejected is named with its path."""
    with pytest.raises(ConfigError) as caught:
        make(**parameters)
    assert caught.value.path == path
    assert words in caught.value.problem


def test_errors_of_torch_are_shown_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of torch are shown with the parameters, and a resolved reference as the reference."""
    monkeypatch.setenv("B", "hunter2")

    @register_model("m")
    def fail(**given: Any) -> Any:
        raise RuntimeError("negative dimension")

    with pytest.raises(ConfigError, match=r"model: m cannot be created with a=-1, b='\$\{env:B\}': negative dimension"):
        build(model={"name": "m", "a": -1, "b": "${env:B}"})
    with pytest.raises(ConfigError, match="model: m cannot be created with its defaults: negative"):
        build(model="m")


def test_a_factory_with_kwargs_takes_any_parameter() -> None:
    """`**kwargs` accepts every parameter."""
    received: list[dict[str, Any]] = []

    @register_data("open")
    def open_data(**given: Any) -> Any:
        received.append(given)
        return SimpleNamespace(train=[torch.zeros(1, 1)])

    build(data={"name": "open", "a": 1})
    assert received == [{"a": 1}]


def test_dotted_paths_are_for_code() -> None:
    """A dotted path is valid in code, and in a file only under an allowed prefix; an error names the nearest."""
    linear = {"name": "torch.nn.Linear", "in_features": 1, "out_features": 1}
    parts = {"model": linear, "data": "one", "optimizer": {"name": "sgd", "lr": 0.1}}
    assert isinstance(trainer_from_config(parts).model, torch.nn.Linear)
    assert isinstance(trainer_from_config(parts, allow=("torch.nn",), from_file=True).model, torch.nn.Linear)
    assert isinstance(trainer_from_config(parts, allow="torch.nn", from_file=True).model, torch.nn.Linear)
    with pytest.raises(ConfigError, match=r"^model\.name: .*not allowed"):
        trainer_from_config(parts, allow=("tor",), from_file=True)
    with pytest.raises(ConfigError, match=r"did you mean 'char_gpt'.*--import MODULE"):
        trainer_from_config({**parts, "model": "chr_gpt"}, from_file=True)
    with pytest.raises(ConfigError, match=r"^model\.name: .*no 'Linea'"):
        trainer_from_config({**parts, "model": "torch.nn.Linea"})

"""Building trainers from configs."""

import inspect
import json
import random
import sys
from collections import Counter
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import hookline
from hookline import (
    ForwardHook,
    GenericTrainer,
    HooklineError,
    HookManager,
    HookRegistry,
    HooksConfig,
    RunConfig,
    SimpleTrainer,
    Trainer,
    TrainingHook,
    get_trainer,
    load_config,
    register_data,
    register_model,
    trainer_from_config,
)
from hookline.cli import main
from hookline.config.hooks import read_hook_specs
from hookline.config.schema import as_run_config
from hookline.core.plugins import HOOKS
from hookline.errors import ConfigError
from hookline.record import Record

DEFAULT = Path(__file__).parents[1] / "src" / "hookline" / "demo" / "default.yaml"


@pytest.fixture(autouse=True)
def tiny_parts() -> None:
    """Register a model and data that are small enough for a unit test."""
    register_model("tiny")(lambda vocab_size, width=4: torch.nn.Sequential(torch.nn.Linear(vocab_size, width)))
    register_data("pairs")(tiny_data)


def tiny_data(batches: int = 4, vocab: int = 3, width: int = 4) -> SimpleNamespace:
    """Make pairs of inputs and targets, with a vocabulary."""
    pair = (torch.ones(2, vocab), torch.zeros(2, width))
    return SimpleNamespace(train=[pair] * batches, validation=[pair], vocab=["a"] * vocab)


class Noisy(TrainingHook):
    """A hook with a secret."""

    def __init__(self, url: str = "") -> None:
        self.url = url

    def on_train_end(self) -> None: ...


class Halve(ForwardHook):
    """A hook that changes activations."""

    intervene = True

    def on_forward(self, output: torch.Tensor) -> torch.Tensor:
        return output / 2


def settings(**more: Any) -> dict[str, Any]:
    """Return the config of a small run."""
    return {
        "model": "tiny",
        "data": "pairs",
        "optimizer": {"name": "sgd", "lr": 0.1},
        "loss": "mse",
        "trainer": {"max_steps": 3, "console": False, "record": False, "seed": 5},
        **more,
    }


def test_a_whole_run_comes_from_a_dict() -> None:
    """Model, data, optimizer and loss are made, the vocabulary is passed to the hooks, and the run trains."""
    trainer = trainer_from_config(settings())
    assert trainer.hook_data["vocab"] == ["a"] * 3
    assert isinstance(trainer.config, RunConfig)
    assert trainer.config.debug is False
    assert "identity" in trainer.hooks
    trainer.train()
    assert trainer.step == 3


def test_a_run_config_is_accepted() -> None:
    """A RunConfig made in code gives the same resolved config as the dict."""
    config = settings(hooks={"update": [{"name": "clip_norm", "max_norm": 1.0}]})
    assert trainer_from_config(RunConfig(**config)).describe() == trainer_from_config(config).describe()


def test_the_initial_weights_are_seeded() -> None:
    """Two trainers of one config begin with the same weights, whatever was drawn before."""
    torch.rand(random.randrange(5) + 1)
    first = trainer_from_config(settings()).model
    torch.rand(3)
    second = trainer_from_config(settings()).model
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "trainer", "attribute", "length"),
    [
        ("cosine", {"max_steps": 30}, "T_max", 30),
        ("cosine", {"max_epochs": 3, "accumulate": 3}, "T_max", 6),
        ("cosine", {"max_steps": 5, "max_epochs": 1}, "T_max", 5),
    ],
)
def test_a_scheduler_gets_the_run_s_length(name: str, trainer: dict[str, Any], attribute: str, length: int) -> None:
    """A scheduler that takes the number of steps gets it if the config does not set it."""
    made = trainer_from_config(settings(scheduler=name, trainer=trainer))
    assert getattr(made.schedulers[0], attribute) == length


def test_a_length_in_the_config_wins() -> None:
    """A length in the config is not replaced."""
    made = trainer_from_config(settings(scheduler={"name": "cosine", "T_max": 7}))
    assert made.schedulers[0].T_max == 7


def test_a_trial_run_may_be_shorter_than_its_warm_up() -> None:
    """Three steps with a warm-up of a hundred use the first three rates of that warm-up."""
    made = trainer_from_config(settings(scheduler={"name": "warmup_cosine", "warmup_steps": 100}))
    made.train()
    assert made.lr == pytest.approx(0.1 * 4 / 100)


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"model": {"name": "tiny", "widht": 3}}, "model.widht", "did you mean 'width'"),
        ({"model": "tinny"}, "model.name", "did you mean 'tiny'"),
        ({"optimizer": {"name": "sgd", "lr": "fast"}}, "optimizer.lr", "expected float | torch.Tensor, got 'fast'"),
        ({"scheduler": "step"}, "scheduler.step_size", "step needs the parameter 'step_size'"),
        ({"scheduler": {"name": "warmup_cosine", "warmup_steps": "x"}}, "scheduler.warmup_steps", "expected int"),
        ({"data": {"name": "builtins.dict"}}, "data", "no `train` to iterate over; return an object with `train`"),
        ({"hooks": {"lifecycle": ["consol_log"]}}, "hooks.lifecycle.0.name", "did you mean 'console_log'"),
        ({"trainer": {"max_stesp": 1}}, "trainer.max_stesp", "did you mean 'max_steps'"),
    ],
)
def test_wrong_configs_name_the_path(changes: dict[str, Any], path: str, words: str) -> None:
    """Every mistake is a ConfigError with the dotted path."""
    with pytest.raises(ConfigError) as caught:
        trainer_from_config(settings(**changes))
    assert caught.value.path == path
    assert words in caught.value.problem


def test_a_hook_s_wrong_parameter_is_a_config_error() -> None:
    """An error of a hook's constructor becomes a HooklineError."""
    with pytest.raises(HooklineError, match="hooks"):
        trainer_from_config(settings(hooks={"update": [{"name": "clip_norm", "max_norm": "abc"}]}))


def test_a_file_cannot_name_code() -> None:
    """Dotted paths of a file are refused before anything is made, unless their prefix is allowed."""
    config = settings(model={"name": "torch.nn.Linear", "in_features": 3, "out_features": 4})
    with pytest.raises(ConfigError, match=r"model\.name: .*not allowed"):
        trainer_from_config(config, from_file=True)
    assert isinstance(trainer_from_config(config, from_file=True, allow=["torch"]).model, torch.nn.Linear)
    with pytest.raises(ConfigError, match="not allowed"):
        trainer_from_config(settings(hooks={"lifecycle": ["os.system"]}), from_file=True)


def test_max_grad_norm_adds_a_clip_hook() -> None:
    """`trainer.max_grad_norm` of a config appends a clip_norm hook."""
    trainer = trainer_from_config(settings(trainer={"max_grad_norm": 0.5}))
    assert trainer.hooks.get("clip_norm").max_norm == 0.5


def test_interventions_are_enabled_by_the_config() -> None:
    """`trainer.enable_intervention` applies to the hooks; without it, one that intervenes is refused."""
    hooks = {"forward": [{"name": f"{__name__}.Halve"}]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hookline.config.factory.import_module", lambda name: __import__("sys").modules[__name__])
        with pytest.raises(HooklineError, match="interventions are disabled"):
            trainer_from_config(settings(hooks=hooks))
        allowed = {"enable_intervention": True, "console": False, "record": False}
        assert trainer_from_config(settings(hooks=hooks, trainer=allowed)).hooks.is_enabled("halve")


def test_secrets_stay_out_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook gets the value; all files of the record have the reference."""
    monkeypatch.setenv("MY_URL", "https://host/s3cret")
    entry = {"name": f"{__name__}.Noisy", "url": "${env:MY_URL}"}
    monkeypatch.setattr("hookline.config.factory.import_module", lambda name: __import__("sys").modules[__name__])
    config = settings(hooks={"lifecycle": [entry]}, trainer={"max_steps": 1, "console": False, "seed": 1})
    trainer = trainer_from_config(config)
    assert trainer.hooks.get("noisy").url == "https://host/s3cret"
    trainer.train()
    assert trainer.run_dir is not None
    written = {path.name: path.read_text(encoding="utf-8") for path in trainer.run_dir.iterdir() if path.is_file()}
    assert "${env:MY_URL}" in written["config.yaml"]
    assert not [name for name, text in written.items() if "s3cret" in text]


def test_the_recorded_config_can_be_run_again() -> None:
    """config.yaml of a run is a config with the same meaning."""
    config = settings(trainer={"max_steps": 1, "console": False}, hooks={"update": []})
    first = trainer_from_config(config)
    first.train()
    assert first.run_dir is not None
    again, from_file = load_config(first.run_dir / "config.yaml")
    assert trainer_from_config(again, from_file=from_file).describe() == first.describe()
    assert json.loads((first.run_dir / "run.json").read_text(encoding="utf-8"))["config_hash"]


def test_the_default_config_is_valid() -> None:
    """The default config passes the schema, and its model and hooks can be made."""
    tree = yaml.safe_load(DEFAULT.read_text(encoding="utf-8"))
    tree["optimizer"]["lr"] = float(tree["optimizer"]["lr"])
    config, from_file = load_config(DEFAULT, ["data.max_bytes=200000", "trainer.record=false"])
    assert config["optimizer"] == tree["optimizer"]
    trainer = trainer_from_config(config, from_file=from_file)
    assert [hook.name for hook in trainer.hooks.list_hooks()].count("clip_norm") == 1
    assert trainer.options.max_steps == 1300
    assert trainer.config.hooks == HooksConfig(**config["hooks"])


@pytest.mark.parametrize("name", ["HookManager", "HookRegistry", "HookRunner"])
def test_every_trainer_takes_the_hooks_under_every_name(name: str) -> None:
    """A manager is used as it is; beside a config that lists hooks it is refused, because one of them would be lost."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, calls = [torch.ones(2, 3)] * 2, list[int]()
    options: dict[str, Any] = {"loss_fn": lambda output, batch: output.mean(), "record": False, "console": False}
    manager = getattr(hookline, name)()
    manager.register(lambda step: calls.append(step), "ear", event="on_step_end")
    for make in (
        lambda hooks: SimpleTrainer(model, loader, optimizer, "cpu", hooks=hooks, **options),
        lambda hooks: GenericTrainer(
            {"max_epochs": 1}, model, optimizer, device="cpu", hooks=hooks, train_loaders=loader, **options
        ),
        lambda hooks: get_trainer("simple", model, loader, optimizer, "cpu", hooks=hooks, **options),
        lambda hooks: get_trainer("generic", model, loader, optimizer, "cpu", hooks=hooks, **options),
    ):
        trainer = make(manager)
        trainer.fit()
        assert trainer.hooks is manager and calls == [1, 2]
        calls.clear()
    with pytest.raises(ConfigError, match="hooks: the config also lists hooks; pass them in only one place"):
        GenericTrainer(HooksConfig(lifecycle=[]), model, optimizer, hooks=manager)


def test_a_config_read_from_a_file_stays_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dotted path in a file is refused by every function that takes a config, unless its package is allowed."""
    (tmp_path / "evilpkg.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "hooks.yaml"
    path.write_text("hooks:\n  lifecycle:\n    - name: evilpkg.Hook\n")
    config, from_file = load_config(path)
    assert from_file
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for doorway in (
        lambda: GenericTrainer(config, model, optimizer, allow=["other"]),
        lambda: SimpleTrainer(model, [], optimizer, "cpu", hooks=config["hooks"]),
        lambda: HookRegistry(config["hooks"]),
    ):
        with pytest.raises(HooklineError, match="not allowed"):
            doorway()


def test_training_from_the_command_line_makes_everything_once() -> None:
    """In one `hookline train`, the config is read once, and every part and every hook is made once."""
    names = ("console_log", "json_log", "checkpoint", "clip_norm")
    hooks = [HOOKS.find(name) for name in names]
    once = {
        **{inspect.unwrap(cls.__init__).__code__: cls.__name__ for cls in (HookManager, Trainer, Record, *hooks)},
        **{reader.__code__: reader.__name__ for reader in (load_config, as_run_config, read_hook_specs, tiny_data)},
    }
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in once:
            calls[once[frame.f_code]] += 1

    text = yaml.safe_dump(settings(trainer={"max_steps": 2, "console": False}, hooks={"lifecycle": [*names[:3]]}))
    Path("run.yaml").write_text(text)
    sys.setprofile(count)
    try:
        assert main(["train", "run.yaml", "trainer.max_grad_norm=1.0"]) == 0
    finally:
        sys.setprofile(None)
    assert calls == Counter(once.values())


@pytest.mark.parametrize(("name", "right"), [("train_loaders", "'dataloader'"), ("optimizers", "'optimizer'")])
def test_a_keyword_of_the_other_trainer_is_explained(name: str, right: str) -> None:
    """`SimpleTrainer` has other names for two arguments of `GenericTrainer`."""
    model = torch.nn.Linear(3, 1)
    with pytest.raises(ConfigError, match=rf"^trainer\.{name}: .*{right}"):
        SimpleTrainer(model, optimizer=torch.optim.SGD(model.parameters(), 0.1), **{name: []})  # type: ignore[arg-type]

"""`Trainer.load` makes the trainer of a recorded run, ready to validate and to predict."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_trainer

from hookline import EMAHook, Trainer, read_metrics, trainer_from_config
from hookline.core import plugins
from hookline.demo.char_gpt import CharGPT
from hookline.demo.stdlib_text import stdlib_text
from hookline.errors import CheckpointError, ConfigError, HooklineError, RecordError, TrainingError

CONFIG: dict[str, Any] = {
    "model": {"name": "char_gpt", "context": 16, "width": 8, "heads": 2, "layers": 1, "dropout": 0.3},
    "data": {"name": "stdlib_text", "context": 16, "batch_size": 2, "max_bytes": 60000},
    "optimizer": {"name": "adamw", "lr": 1e-2},
    "trainer": {"max_steps": 4, "validate_every": 4, "seed": 1, "name": "base", "report": False, "console": False},
}


def train(*lifecycle: Any, forward: Any = (), **options: Any) -> Trainer:
    hooks = {"lifecycle": [{"name": "checkpoint", "save_every_n_steps": 2}, *lifecycle], "forward": [*forward]}
    config = {**CONFIG, "trainer": {**CONFIG["trainer"], **options}, "hooks": hooks}
    trainer = trainer_from_config(config, device="cpu")
    trainer.train()
    return trainer


def measured(run: Path | None) -> dict[str, float]:
    return {name: value for name, value in read_metrics(run)[-1].items() if name.startswith("val/")}


def test_a_trainer_that_validates_and_predicts() -> None:
    """The model has the weights of the run; the caller's random streams and the directory stay as they are."""
    trained = train()
    torch.manual_seed(7)
    expected = torch.rand(3)
    files = sorted(Path().rglob("*"))
    torch.manual_seed(7)
    trainer = Trainer.load("base", device="cpu")
    assert torch.equal(torch.rand(3), expected)
    for name, weight in trained.model.state_dict().items():
        assert torch.equal(weight, trainer.model.state_dict()[name])
    assert trainer.validate() == measured(trained.run_dir)
    outputs = trainer.predict()
    assert len(outputs) == len(list(trainer.val_loaders["val"])) and outputs[0]["logits"].shape[:2] == (2, 16)
    assert sorted(Path().rglob("*")) == files
    earlier = Trainer.load("base", checkpoint=2, device="cpu")
    assert earlier.validate() != measured(trained.run_dir)
    assert Trainer.load("base/step-00000002", device="cpu").validate() == earlier.validate()


def test_a_loaded_trainer_does_not_train() -> None:
    """It would begin a new run without the hooks of the one that it was loaded from; the error says what to do."""
    trained = train()
    trainer, files = Trainer.load("base", device="cpu"), sorted(Path().rglob("*"))
    run = f"runs/{trained.run_dir.name}"
    batch = next(iter(trainer.train_loaders["train"]))
    for start in (trainer.train, lambda: trainer.fit(resume="base"), lambda: trainer.training_step(batch)):
        with pytest.raises(TrainingError, match=f"`hookline resume {run}`.* init_from='{run}'"):
            start()
    assert sorted(Path().rglob("*")) == files and trainer.validate() == measured(trained.run_dir)


def test_overrides() -> None:
    """Single values of the config may differ from the run's."""
    train()
    trainer = Trainer.load("latest", ["data.batch_size=5", "trainer.precision=bf16"], device="cpu")
    assert trainer.options.precision == "bf16" and len(trainer.predict()[0]["logits"]) == 5


def test_averaged_weights_are_what_was_validated() -> None:
    """With `ema`, the model has the average, unless the hook was disabled."""
    trained = train({"name": "ema", "decay": 0.5, "as": "mean"})
    trainer = Trainer.load("base", device="cpu")
    average = EMAHook.weights_in("base", "mean")
    weights = trainer.model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in average.items())
    assert trainer.validate() == measured(trained.run_dir)
    assert list(trainer.hooks) == []
    disabled = train({"name": "ema", "decay": 0.5, "enabled": False}, name="plain")
    assert Trainer.load("plain", device="cpu").validate() == measured(disabled.run_dir)


def test_hooks_that_change_activations_stay() -> None:
    """They were part of what the run measured; observers are not made."""
    forward = [{"name": "scale_activation", "modules": "blocks.0.mlp", "factor": 3.0}, "activation_stats"]
    trained = train("json_log", forward=forward, enable_intervention=True)
    trainer = Trainer.load("base", device="cpu")
    assert list(trainer.hooks) == ["scale_activation"]
    assert trainer.validate() == measured(trained.run_dir)


def test_the_frozen_weights_of_init_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint without the frozen weights takes them from where the run took them."""
    monkeypatch.setattr(plugins.MODELS, "_added", dict(plugins.MODELS._added))

    @plugins.register_model("half")
    def half(vocab_size: int, frozen: bool = True) -> torch.nn.Module:
        model = CharGPT(vocab_size, context=16, width=8, heads=2, layers=1)
        model.blocks.requires_grad_(not frozen)
        return model

    monkeypatch.setitem(CONFIG, "model", {"name": "half", "frozen": False})
    source = train(name="source")
    monkeypatch.setitem(CONFIG, "model", {"name": "half"})
    trained = train(name="tuned", init_from="source", trainable_only=True)
    trainer = Trainer.load("tuned", device="cpu")
    assert trainer.options.init_from is not None and source.run_id in trainer.options.init_from
    assert trainer.validate() == measured(trained.run_dir)


def test_what_cannot_be_loaded() -> None:
    """A run made in code, a checkpoint without its run, a run without one, and a name that no run has."""
    coded = make_trainer(record=True, report=False, name="coded")
    coded.add_hook("checkpoint", every=2)
    coded.train()
    remedy = "that run was created in code; build the same trainer there and call trainer.load_checkpoint('"
    with pytest.raises(HooklineError, match=re.escape(remedy)):
        Trainer.load("coded")
    trained = train()
    assert trained.checkpoint_dir is not None
    shutil.copytree(trained.checkpoint_dir / "step-00000004", "alone")
    with pytest.raises(HooklineError, match="alone does not belong to a run, so there is no config"):
        Trainer.load("alone")
    assert Trainer.load("base", checkpoint="alone", device="cpu").validate() == measured(trained.run_dir)
    with pytest.raises(RecordError, match="no run in runs/ has this path, id or name"):
        Trainer.load("nope")
    shutil.rmtree(trained.checkpoint_dir)
    with pytest.raises(CheckpointError, match="no undamaged checkpoint"):
        Trainer.load("base")
    trainer_from_config({**CONFIG, "trainer": {**CONFIG["trainer"], "name": "unsaved"}}, device="cpu").train()
    with pytest.raises(CheckpointError, match=r"has no checkpoint; the hook `checkpoint` saves them"):
        Trainer.load("unsaved")


def test_a_vocabulary_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data with another vocabulary than the model's is refused, unless its function takes that one."""
    monkeypatch.setattr(plugins.DATA, "_added", dict(plugins.DATA._added))

    @plugins.register_data("own_text")
    def own_text(path: str | None = None) -> Any:
        return stdlib_text(16, 2, 60000, path=path, pattern="*.py")

    Path("texts").mkdir()
    for name in "abcdefghij":
        Path("texts", f"{name}.py").write_text("zebra " * 100)
    monkeypatch.setitem(CONFIG, "data", {"name": "own_text"})
    train()
    assert Trainer.load("base", ["data.path=null"], device="cpu").validate()
    with pytest.raises(ConfigError, match=r"data: 'own_text' builds a different vocabulary .* parameter `vocab`"):
        Trainer.load("base", ["data.path=texts"], device="cpu")

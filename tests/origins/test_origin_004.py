"""Document 004's code blocks, as written there; only the import lines are ours."""

import copy
import dataclasses
import json
import math
import pickle
import sys
import types

import builders
import pytest
import torch
from torch import nn

from hookline import (
    GenericTrainer,
    HookRunner,
    SimpleTrainer,
    StepContext,
    TrainerConfig,
    TrainingHook,
    trainer_from_config,
)


class MyHook(TrainingHook):
    """The document's interface block, recording what it gets."""

    def __init__(self):
        self.calls = []

    def on_train_begin(self, config):
        self.calls.append(("train_begin", config))

    def on_step_end(self, ctx: StepContext):
        self.calls.append(("step_end", ctx.step))

    def on_eval_end(self, metrics: dict[str, float], step: int):
        self.calls.append(("eval_end", dict(metrics), step))

    def on_checkpoint_save(self, step: int, path: str):
        self.calls.append(("checkpoint_save", step, path))

    def on_train_end(self, step: int, tokens_seen: int):
        self.calls.append(("train_end", step, tokens_seen))


class TinyLM(nn.Module):
    """A language model small enough for tests."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11)

    def forward(self, input_ids):
        logits = self.head(self.embed(input_ids))
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())}


def token_batches(count):
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, 11, (2, 6), generator=generator)} for _ in range(count)]


def make_trainer(count=6, **options):
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"loss_fn": None, **options}
    return builders.make_trainer(model=model, data=token_batches(count), optimizer=optimizer, **options)


@pytest.mark.req("004-03", "004-04", "004-09", "004-24")
def test_runner_block_dispatches_positionally():
    """HookRunner([…]) passes the document's five calls, by position, to every hook of its list."""

    class MyHook1(MyHook):
        pass

    class MyHook2(MyHook):
        pass

    first, second = MyHook1(), MyHook2()
    model = nn.Linear(1, 1)
    ctx = StepContext(7, 0.5, 1.0, 1e-3, 100, model, torch.optim.SGD(model.parameters(), lr=1e-3))

    hook_runner = HookRunner([first, second])
    hook_runner.on_train_begin({"lr": 1})
    hook_runner.on_step_end(ctx)
    hook_runner.on_eval_end({"eval/loss": 0.4}, 7)
    hook_runner.on_checkpoint_save(7, "checkpoints")
    hook_runner.on_train_end(7, 100)

    expected = [
        ("train_begin", {"lr": 1}),
        ("step_end", 7),
        ("eval_end", {"eval/loss": 0.4}, 7),
        ("checkpoint_save", 7, "checkpoints"),
        ("train_end", 7, 100),
    ]
    assert first.calls == expected and second.calls == expected


@pytest.mark.req("004-10", "004-25")
def test_empty_runner_returns_at_once():
    """HookRunner() has no hooks, and its methods return before they read their arguments."""
    hook_runner = HookRunner()
    assert not hook_runner.hooks
    hook_runner.on_step_end(object())
    hook_runner.on_train_end("anything", "at", "all")


@pytest.mark.req("004-11", "004-12", "004-13")
def test_step_context_is_the_documented_dataclass():
    """Seven fields in the documented order; model and optimizer are live references."""
    assert [field.name for field in dataclasses.fields(StepContext)] == [
        "step", "loss", "grad_norm", "lr", "tokens_seen", "model", "optimizer",
    ]  # fmt: skip
    kept = []

    class Keeper(TrainingHook):
        def on_step_end(self, ctx):
            kept.append((ctx, next(iter(ctx.optimizer.state.values()))["exp_avg"].clone()))

    trainer = make_trainer()
    trainer.add_hook(Keeper())
    trainer.train()
    assert all(ctx.model is trainer.model and ctx.optimizer is trainer.optimizers[0] for ctx, _ in kept)
    assert kept[0][1].abs().sum() > 0


@pytest.mark.req("004-05", "004-17", "004-18", "004-07")
def test_interface_block_runs_in_training(tmp_path):
    """Every method of the block is called with what it names: at steps, at evaluations, and at the end."""
    hook = MyHook()
    trainer = make_trainer(val_dataloader=token_batches(2), max_epochs=2)
    trainer.add_hook(hook)
    trainer.train()
    assert [step for kind, step, *_ in hook.calls if kind == "step_end"] == list(range(1, 13))
    rounds = [(set(metrics), step) for kind, metrics, step in (e for e in hook.calls if e[0] == "eval_end")]
    assert rounds == [({"eval/loss", "eval/perplexity"}, 6), ({"eval/loss", "eval/perplexity"}, 12)]
    assert hook.calls[-1] == ("train_end", 12, 12 * 12)


@pytest.mark.req("004-18")
def test_the_metrics_of_an_evaluation_are_those_of_its_data():
    """eval/loss is the model's loss on the validation data at that step, eval/perplexity its exponential."""
    hook = MyHook()
    trainer = make_trainer(val_dataloader=(batches := token_batches(1)), max_epochs=1)
    trainer.add_hook(hook)
    trainer.train()
    with torch.no_grad():
        loss = trainer.model(**batches[0])["loss"].item()
    (metrics,) = [entry[1] for entry in hook.calls if entry[0] == "eval_end"]
    assert metrics == pytest.approx({"eval/loss": loss, "eval/perplexity": math.exp(loss)}, rel=1e-5)


@pytest.mark.req("004-15", "004-14", "004-22")
def test_gradients_are_gone_at_step_end_and_logs_belong_to_the_step():
    """At on_step_end the gradients are zeroed, the scheduler has advanced, and logs are in the step's record."""
    seen = []

    class Logger(TrainingHook):
        def on_step_end(self, ctx, trainer):
            seen.append(([p.grad is None for p in ctx.model.parameters()], ctx.lr, trainer.lr))
            trainer.log("from_hook", ctx.step)

    trainer = make_trainer()
    trainer.schedulers = [torch.optim.lr_scheduler.ExponentialLR(trainer.optimizers[0], 0.5)]
    trainer.add_hook(Logger())
    trainer.train()
    assert all(all(gone) for gone, _, _ in seen)
    assert seen[0][1:] == (1e-2, 5e-3)  # ctx.lr is what the step used; the scheduler has moved on
    records = {record["step"]: record for record in trainer.record.metrics}
    assert all(records[step]["from_hook"] == step and "train/loss" in records[step] for step in range(1, 7))


@pytest.mark.req("004-23", "004-21", "004-06", "004-19")
def test_checkpoint_save_comes_after_step_end(tmp_path):
    """On a checkpoint step on_step_end comes first; path is the directory that holds the checkpoints."""
    hook = MyHook()
    trainer = make_trainer(record=True, output_dir=str(tmp_path), val_dataloader=token_batches(1), validate_every=3)
    trainer.add_hook("checkpoint", save_every_n_epochs=None, save_every_n_steps=3)
    trainer.add_hook(hook)
    trainer.train()
    kinds = [entry[0] for entry in hook.calls]
    at_three = kinds.index("step_end") + 2
    assert kinds[at_three : at_three + 3] == ["step_end", "eval_end", "checkpoint_save"]
    saves = [entry[1:] for entry in hook.calls if entry[0] == "checkpoint_save"]
    assert saves == [(3, str(trainer.checkpoint_dir)), (6, str(trainer.checkpoint_dir))]


@pytest.mark.req("004-16", "004-20")
def test_train_begin_gets_the_config_and_train_end_always_comes():
    """on_train_begin gets the full config once; on_train_end is called after a failure, too."""
    hook = MyHook()
    trainer = make_trainer(step_fn=lambda model, batch: 1 / 0)
    trainer.add_hook(hook)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert [kind for kind, *_ in hook.calls] == ["train_begin", "train_end"]
    assert hook.calls[0][1] == {**dataclasses.asdict(trainer.config), "checkpoint": {"dir": None}}


def simple(folder):
    return make_trainer(max_steps=2, output_dir=str(folder), record=True)


def generic(folder):
    model = nn.Linear(3, 1)
    data = [(torch.randn(2, 3), torch.randn(2, 1))] * 2
    config = TrainerConfig(max_steps=2, output_dir=str(folder), console=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return GenericTrainer(config, model, optimizer, train_loaders=data, loss_fn=nn.functional.mse_loss)


def from_config(folder):
    return trainer_from_config(
        {
            "model": {"name": "char_gpt", "width": 8, "layers": 1, "heads": 1, "context": 8},
            "data": {"name": "stdlib_text", "context": 8, "batch_size": 2, "max_bytes": 20_000},
            "optimizer": {"name": "sgd", "lr": 0.1},
            "trainer": {"max_steps": 2, "output_dir": str(folder), "console": False, "validate_every": None},
        }
    )


@pytest.mark.req("004-16", "004-38")
@pytest.mark.parametrize("make", [simple, generic, from_config])
def test_the_config_says_where_the_checkpoints_are(make, tmp_path):
    """config.checkpoint.dir can be read in on_train_begin, and is the path that on_checkpoint_save gets."""
    seen = []

    class Reader(TrainingHook):
        def on_train_begin(self, config):
            seen.append(config.checkpoint.dir)
            seen.append(config["checkpoint"]["dir"])
            seen.append(dict(config)["checkpoint"]["dir"])

        def on_checkpoint_save(self, step, path):
            seen.append(path)

    trainer = make(tmp_path)
    trainer.add_hook(Reader())
    trainer.add_checkpointing(save_every_n_steps=2, save_every_n_epochs=None)
    trainer.train()
    assert len(seen) == 4 and set(seen) == {str(trainer.run_dir / "checkpoints")}


def test_the_config_is_read_only_and_keeps_its_attributes(tmp_path):
    """A misspelt key names the nearest one; options are attributes and items."""
    configs = []
    for make in (simple, from_config):
        trainer = make(tmp_path)
        trainer.on("train_begin")(lambda config: configs.append(config))
        trainer.train()
    config, of_run = configs
    assert config.max_steps == config["max_steps"] == 2 and config.get("nothing") is None and config.debug is False
    with pytest.raises(AttributeError, match="the config has no 'chekpoint'; did you mean 'checkpoint'"):
        print(config.chekpoint)
    with pytest.raises(AttributeError, match="the config is read-only; 'max_steps' can be set before"):
        config.max_steps = 3
    assert of_run.optimizer.name == of_run["optimizer"]["name"] == "sgd" and of_run.trainer.max_steps == 2
    assert copy.deepcopy(config) == config == dict(config) and config != of_run


def test_a_config_of_the_users_own(tmp_path):
    """A mapping keeps its own checkpoint section and can be written as JSON; an object is passed as it is."""
    seen = []

    class Own:
        """A config without any of our methods."""

    for config in ({"checkpoint": {"every": 5}, "update": [1]}, own := Own()):
        trainer = make_trainer(config=config, record=True, output_dir=str(tmp_path))
        trainer.on("train_begin")(lambda config: seen.append(config))
        trainer.train()
    view, same = seen
    assert same is own
    assert (view.checkpoint.every, view["checkpoint"]["every"], view.update) == (5, 5, [1])
    assert json.loads(json.dumps(view)) == view and pickle.loads(pickle.dumps(view)) == view


@pytest.mark.req("004-16")
def test_train_begin_gets_the_full_configuration_before_the_first_batch(tmp_path, monkeypatch):
    """Every part of the config can be read there: model, data, optimizer, trainer and hooks."""
    order = []
    config = {
        "model": {"name": "char_gpt", "context": 16, "width": 8, "heads": 2, "layers": 1},
        "data": {"name": "stdlib_text", "context": 16, "batch_size": 2, "max_bytes": 60000},
        "optimizer": {"name": "sgd", "lr": 0.01},
        "trainer": {"max_steps": 2, "validate_every": None, "sanity_batches": 0, "console": False},
        "hooks": {"lifecycle": [{"name": "lr_monitor"}]},
    }
    trainer = trainer_from_config(config)
    trainer.on("train_begin", name="begin")(lambda config: order.append(config))
    trainer.on("train_batch_start", name="batch")(lambda: order.append("batch"))
    trainer.train()
    seen, *rest = order
    assert rest == ["batch", "batch"]
    assert (seen.model.name, seen.data.name, seen.optimizer.name) == ("char_gpt", "stdlib_text", "sgd")
    assert (seen.model.width, seen.optimizer.lr) == (8, 0.01)
    assert (seen.trainer.max_steps, seen.trainer.validate_every) == (2, None)
    assert [spec["name"] for spec in seen.hooks.lifecycle] == ["lr_monitor"]


class GradHistogramHook(TrainingHook):
    """Stash pre-clip grad norms during backward, log them in on_step_end.

    This requires adding a forward hook during on_train_begin because
    gradients are zeroed by the time on_step_end fires.
    """

    def __init__(self) -> None:
        self._norms: dict[str, float] = {}

    def on_train_begin(self, config) -> None:
        # Subclass or patch training loop to populate _norms during backward
        pass

    def on_step_end(self, ctx: StepContext) -> None:
        if self._norms:
            wandb.log(  # noqa: F821 - the document's own call; the test provides it
                {f"grad_norm/{n}": v for n, v in self._norms.items()},
                step=ctx.step,
            )
            self._norms.clear()


class PopulatedGradHistogramHook(GradHistogramHook):
    """Does in one method what the document says needs a patched loop."""

    def on_gradients_ready(self, grads) -> None:
        self._norms.update({name: grad.norm().item() for name, grad in grads.items()})


@pytest.mark.req("004-36", "004-31", "004-28")
def test_grad_histogram_hook_is_really_populated(monkeypatch):
    """The norms it logs are those before clipping, for every parameter, at the right step."""
    logged = []
    wandb = types.SimpleNamespace(log=lambda values, step: logged.append((step, values)))
    monkeypatch.setattr(sys.modules[__name__], "wandb", wandb, raising=False)
    trainer = make_trainer(max_grad_norm=1e-4)
    trainer.add_hook(PopulatedGradHistogramHook())
    clipped = []
    trainer.on("gradient_clip")(lambda grad_norm: clipped.append(grad_norm))
    trainer.train()
    assert [step for step, _ in logged] == [1, 2, 3, 4, 5, 6]
    names = {f"grad_norm/{name}" for name, _ in trainer.model.named_parameters()}
    for (_, values), norm in zip(logged, clipped, strict=True):
        assert set(values) == names
        assert sum(value**2 for value in values.values()) ** 0.5 == pytest.approx(norm, rel=1e-5)
        assert norm > 1e-4


@pytest.mark.req("004-31", "004-36")
def test_the_gradient_monitor_sees_what_the_hook_stashes(monkeypatch):
    """The built-in monitor records the same norms before clipping, and those after it, which the document lacked."""
    logged = {}
    wandb = types.SimpleNamespace(log=lambda values, step: logged.update({step: values}))
    monkeypatch.setattr(sys.modules[__name__], "wandb", wandb, raising=False)
    trainer = make_trainer(max_grad_norm=1e-4)
    trainer.add_hook(PopulatedGradHistogramHook())
    trainer.add_hook("gradient_monitor", log_frequency=1)
    trainer.train()
    layers = {one.step: one for one in trainer.record.layer_rows}
    assert sorted(layers) == sorted(logged) == [1, 2, 3, 4, 5, 6]
    for step, found in layers.items():
        norms = dict(zip(found.header.names, found.values[:, found.header.columns.index("norm")].tolist(), strict=True))
        assert {f"grad_norm/{name}": pytest.approx(norm, rel=1e-5) for name, norm in norms.items()} == logged[step]
        final = found.values[:, found.header.columns.index("final_norm")]
        assert final.norm().item() == pytest.approx(1e-4, rel=0.02)


@pytest.mark.req("004-29", "004-30", "004-01")
def test_heartbeat_and_upload_are_hooks(tmp_path):
    """A heartbeat on every step and an upload after every save need a hook each and no fork."""
    beats, uploaded = [], []

    class Heartbeat(TrainingHook):
        def on_step_end(self, ctx):
            beats.append(ctx.step)

    class Upload(TrainingHook):
        def on_checkpoint_save(self, checkpoint_path):
            uploaded.append(sorted(path.name for path in __import__("pathlib").Path(checkpoint_path).iterdir()))

    trainer = make_trainer(record=True, output_dir=str(tmp_path))
    trainer.add_checkpointing()
    trainer.add_hook(Heartbeat())
    trainer.add_hook(Upload())
    trainer.train()
    assert beats == [1, 2, 3, 4, 5, 6]
    assert len(uploaded) == 1 and "manifest.json" in uploaded[0] and "model.safetensors" in uploaded[0]


@pytest.mark.req("004-32")
def test_pre_optimizer_step_and_own_step():
    """A hook acts just before the optimizer step, and a custom optimizer step can be injected."""
    calls, stepped = [], []

    class Before(TrainingHook):
        def on_pre_optimizer_step(self, grads, optimizer_idx):
            calls.append(len(grads))

    def own_step(optimizer):
        stepped.append(optimizer)
        optimizer.step()

    trainer = make_trainer(optimizer_step=own_step)
    trainer.add_hook(Before())
    trainer.train()
    assert calls == [3] * 6 and stepped == trainer.optimizers * 6


@pytest.mark.req("004-33")
def test_loss_function_changes_in_mid_run_and_is_recorded():
    """Assigning trainer.loss_fn takes effect at the next batch and is in the run's events."""

    class Switch(TrainingHook):
        def on_step_end(self, step, trainer):
            if step == 2:
                trainer.loss_fn = nn.functional.l1_loss

    losses = []
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    batches = [(torch.ones(1, 2), torch.full((1, 1), 10.0))] * 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = SimpleTrainer(
        model, batches, optimizer, "cpu", loss_fn=nn.functional.mse_loss, record=False, console=False
    )
    trainer.add_hook(Switch())
    trainer.on("batch_end")(lambda loss: losses.append(loss))
    trainer.train()
    assert losses[0] == losses[1] and losses[2] == losses[3]
    assert losses[0] == pytest.approx(losses[2] ** 2, rel=1e-5)
    changed = [event for event in trainer.record.events if event["kind"] == "loss_fn_changed"]
    assert [(event["step"], event["old"], event["new"]) for event in changed] == [(2, "mse_loss", "l1_loss")]


@pytest.mark.req("004-34")
def test_a_learning_rate_schedule_comes_from_a_registry(monkeypatch):
    """A custom schedule is registered under a name; no hook is needed."""
    from hookline import register_scheduler
    from hookline.core.plugins import SCHEDULERS

    monkeypatch.setattr(SCHEDULERS, "_added", {})

    @register_scheduler("halving")
    def halving(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    trainer = make_trainer()
    trainer.schedulers = [SCHEDULERS.find("halving")(trainer.optimizers[0])]
    trainer.train()
    assert trainer.lr == pytest.approx(1e-2 * 0.5**6)


@pytest.mark.req("004-35")
def test_hooks_observe_unless_they_say_otherwise():
    """A hook that changes the step declares it and is listed as such; an observer is not."""
    trainer = make_trainer(max_grad_norm=1.0)
    trainer.add_hook(MyHook())
    marked = {hook.name: hook.intervenes for hook in trainer.hooks.list_hooks()}
    assert marked == {"my_hook": False, "identity": False, "clip_norm": True}


@pytest.mark.req("004-02", "004-08", "004-26")
def test_base_class_is_concrete():
    """TrainingHook has empty methods and needs no arguments; a subclass overrides only what it needs."""

    class OneEvent(TrainingHook):
        def on_eval_end(self, metrics, step): ...

    hook = OneEvent()
    TrainingHook().on_step_end(None)
    hook.on_step_end(None)
    hook.on_train_end(3, 4)
    runner = HookRunner()
    runner.register(hook)
    runner.on_step_end(None)
    assert runner.hooks == (hook,)

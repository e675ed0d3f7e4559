"""The average is right; validation uses it, and training is unchanged."""

from functools import partial
from typing import Any

import builders
import pytest
import torch
from builders import make_batches, make_model, weights_of
from torch import nn

from hookline import EarlyStopping, EMAHook, HooklineError, Trainer
from hookline.errors import CheckpointError, ConfigError

with_batch_norm = partial(make_model, 3, 4, 1, between=partial(nn.BatchNorm1d, 4))
OPTIONS: dict[str, Any] = {
    "model": with_batch_norm, "data": make_batches(6), "optimizer": partial(torch.optim.AdamW, lr=0.05),
    "val_dataloader": make_batches(2), "sanity_batches": 0,
}  # fmt: skip
make_trainer, train = partial(builders.make_trainer, **OPTIONS), partial(builders.train, **OPTIONS)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("warmup", [True, False])
def test_the_average_is_that_of_the_formula(warmup: bool) -> None:
    """After every step: decay * average + (1 - decay) * weights, starting with the weights."""
    trainer, expected = make_trainer(hook := EMAHook(0.9, warmup)), {}

    @trainer.on("step_end")
    def follow(step: int, model: nn.Module) -> None:
        decay = min(0.9, step / (9 + step)) if warmup else 0.9
        for name, weight in weights_of(model).items():
            expected[name] = decay * expected.get(name, weight).double() + (1 - decay) * weight.double()

    trainer.train()
    assert hook.updates == 6 and hook.average.keys() == expected.keys()
    for name, average in hook.average.items():
        torch.testing.assert_close(average.double(), expected[name], rtol=1e-6, atol=1e-7)


def test_a_subclass_may_override_an_event_with_other_arguments() -> None:
    """The other events do not call it with the arguments of the base class."""

    class CountsSkips(EMAHook):
        skips = 0

        def on_step_skipped(self, reason: str) -> None:
            self.skips += 1

    train(hook := CountsSkips(0.9))
    assert hook.updates == 6 and hook.skips == 0


def test_validation_uses_the_average_and_training_does_not() -> None:
    """Inside a validation the weights are the average; before and after they are training's own, bit for bit."""
    trainer = make_trainer(hook := EMAHook(0.9), max_epochs=3)
    seen: list[tuple[str, dict[str, torch.Tensor]]] = []
    for event in ("step_end", "validation_batch_start", "validation_end", "epoch_end"):
        trainer.on(event, name=event)(lambda model, event=event: seen.append((event, weights_of(model))))
    averages: list[dict[str, torch.Tensor]] = []
    trainer.on("validation_start", name="averages")(
        lambda: averages.append({name: average.clone() for name, average in hook.average.items()})
    )
    trainer.train()
    steps = [weights for event, weights in seen if event == "step_end"]
    for epoch in range(3):
        inside = [weights for event, weights in seen if event.startswith("validation")][3 * epoch : 3 * epoch + 3]
        assert all(same(weights, averages[epoch]) for weights in inside)
        after = [weights for event, weights in seen if event == "epoch_end"][epoch]
        assert same(after, steps[6 * epoch + 5]) and not same(after, averages[epoch])


@pytest.mark.parametrize("buffers", [False, True])
def test_training_is_bit_for_bit_the_same(buffers: bool) -> None:
    """Weights, buffers and optimizer state end where they end without it, with a validation after every step."""
    results = []
    for hooks in ((), (EMAHook(0.9, buffers=buffers),)):
        trainer = train(*hooks, max_epochs=2, validate_every=1)
        state = trainer.optimizers[0].state_dict()["state"]
        results.append([*trainer.model.state_dict().values(), *(entry["exp_avg"] for entry in state.values())])
    assert all(map(torch.equal, *results))


@pytest.mark.hooks_fail(raises=RuntimeError)
def test_weights_are_restored_after_a_failed_validation() -> None:
    """The model has its own weights again, whether the failure ends the run or is only reported."""
    for forgiven in (True, False):
        trainer = make_trainer(EMAHook(0.5), validate_every=None)
        kept: list[dict[str, torch.Tensor]] = []

        @trainer.on("step_end", at=3, name="asks", on_error="warn" if forgiven else "raise")
        def validate(trainer: Trainer, model: nn.Module, kept: Any = kept) -> None:
            kept.append(weights_of(model))
            trainer.validate([(torch.ones(4, 7), torch.ones(4, 1))])  # of the wrong shape

        @trainer.on("before_backward", at=4, name="looks")
        def look(model: nn.Module, kept: Any = kept) -> None:
            kept.append(weights_of(model))

        if forgiven:
            trainer.train()
            assert same(kept[0], kept[1])
        else:
            with pytest.raises(RuntimeError):
                trainer.train()
            assert same(kept[0], weights_of(trainer.model))


def test_weights_are_restored_after_a_failed_nested_validation() -> None:
    """At the end of the outer one: a checkpoint that comes next has training's own weights."""
    tried: list[int] = []
    trainer = make_trainer(EMAHook(0.5, warmup=False), validate_every=2)

    @trainer.on("validation_end", name="tries")
    def tries(trainer: Trainer, step: int) -> None:
        with pytest.raises(RuntimeError):
            trainer.validate([(torch.ones(4, 7), torch.ones(4, 1))])  # of the wrong shape
        tried.append(step)

    own: dict[int, dict[str, torch.Tensor]] = {}
    trainer.on("after_optimizer_step")(lambda step, model: own.update({step: weights_of(model)}))
    after = trainer.stepper()
    for step in range(1, 7):
        next(after)
        assert same(weights_of(trainer.model), own[step]), step
    after.close()
    assert tried == [2, 4, 6]


def test_weights_are_restored_after_a_validation_that_fails_while_the_average_is_applied() -> None:
    """A validation inside `applied` does not have to end for the block to restore the weights."""
    trainer = train(hook := EMAHook())
    own, loss_fn = weights_of(trainer.model), trainer.loss_fn
    with pytest.raises(ZeroDivisionError), hook.applied(trainer.model):
        assert same(weights_of(trainer.model), hook.average)
        trainer.loss_fn = lambda prediction, target: 1 / 0
        trainer.validate()
    assert same(weights_of(trainer.model), own)
    trainer.loss_fn = loss_fn
    with hook.applied(trainer.model):
        trainer.validate()
        assert same(weights_of(trainer.model), hook.average)
    assert same(weights_of(trainer.model), own)


def test_a_validation_in_the_middle_of_a_step_does_not_affect_it() -> None:
    """Also between forward and backward: the graph is unchanged."""
    results = []
    for hooks in ((), (EMAHook(0.9),)):
        trainer = make_trainer(*hooks, validate_every=None)
        trainer.on("before_backward", name="asks")(lambda trainer: trainer.validate())
        trainer.train()
        results.append(weights_of(trainer.model))
    assert same(*results)


def test_half_precision_weights_are_averaged_in_float32() -> None:
    """In bfloat16, changes of a thousandth would be rounded away."""
    model = nn.Linear(2, 1).to(torch.bfloat16)
    hook = EMAHook(0.999, warmup=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    hook.update(model)
    with torch.no_grad():
        model.weight.fill_(2.0)
    for _ in range(10):
        hook.update(model)
    assert hook.average["weight"].dtype is torch.float32
    assert hook.average["weight"][0, 0].item() == pytest.approx(2 - 0.999**10)
    with hook.applied(model):
        assert model.weight.dtype is torch.bfloat16 and 1.0 < model.weight[0, 0].item() < 1.02
    assert model.weight[0, 0].item() == 2.0


def test_another_model_can_be_given_the_average_during_a_run() -> None:
    """Copying to another model does not affect the average of the first."""
    trainer, other = make_trainer(hook := EMAHook(0.9)), with_batch_norm()
    trainer.on("step_end", at=3, name="copies")(lambda: hook.copy_to(other))
    plain = make_trainer(EMAHook(0.9))
    trainer.train()
    plain.train()
    assert same(weights_of(trainer.model), weights_of(plain.model))
    assert same(hook.average, plain.hooks.get("ema").average)
    assert not same(weights_of(other), weights_of(with_batch_norm()))


def test_a_skipped_step_does_not_change_the_average() -> None:
    """Skipped steps leave the average alone; of several optimizers, one that stepped is enough, and they count once."""
    trainer = make_trainer(hook := EMAHook())
    trainer.on("update", name="guard")(lambda grads, trainer: trainer.skip_step("no") or grads)
    trainer.train()
    assert hook.updates == 0 and hook.average == {}
    model = with_batch_norm()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    trainer = train(hook := EMAHook(), model=model, optimizer=optimizers)
    assert hook.updates == 6


def test_the_average_continues_after_a_resume() -> None:
    """Saved and resumed, the average is bit for bit that of the uninterrupted run."""
    whole = train(EMAHook(0.9), max_epochs=3)
    first = train(EMAHook(0.9), "checkpoint", max_epochs=1, record=True)
    second = make_trainer(EMAHook(0.9), "checkpoint", record=True)
    second.fit(max_epochs=3, resume=first.run_dir)
    assert second.hooks.get("ema").updates == 18
    assert same(second.hooks.get("ema").average, whole.hooks.get("ema").average)


def test_the_average_is_read_from_a_checkpoint() -> None:
    """weights_in gives what a model can load; a checkpoint without one says which hooks it knows."""
    trainer = train(hook := EMAHook(0.9), "checkpoint", record=True)
    path = trainer.checkpoint_dir / "step-00000006"
    model = with_batch_norm()
    model.load_state_dict(EMAHook.weights_in(path), strict=False)
    assert same(weights_of(model), hook.average)
    other = with_batch_norm()
    hook.copy_to(other)
    assert same(weights_of(other), hook.average)
    with pytest.raises(CheckpointError, match="no averaged weights from a hook 'em'; did you mean 'ema'"):
        EMAHook.weights_in(path, "em")


def test_a_checkpoint_has_the_weights_of_training() -> None:
    """Also one that is saved because a validation failed, while the model had the average."""
    trainer = make_trainer(EMAHook(0.5), record=True, validate_every=3)
    trainer.add_hook("checkpoint", save_on_exception=True, save_every_n_epochs=None)
    kept: list[dict[str, torch.Tensor]] = []
    trainer.on("step_end", name="keep")(lambda model: kept.append(weights_of(model)))
    trainer.on("validation_batch_start", name="fail", on_error="raise")(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    again = make_trainer(EMAHook(0.5))
    again.load_checkpoint(trainer.run_dir)
    assert same(weights_of(again.model), kept[-1])


@pytest.mark.parametrize("ema_first", [True, False])
@pytest.mark.parametrize("check_on_train_epoch_end", [True, False])
def test_early_stopping_keeps_the_weights_that_were_validated(ema_first: bool, check_on_train_epoch_end: bool) -> None:
    """Its best weights are the average, in any order of the two, even if it checks after training's were restored."""
    options = {"mode": "max", "min_delta": 1e9, "check_on_train_epoch_end": check_on_train_epoch_end}
    hooks = [EMAHook(0.5), EarlyStopping(restore_best_weights=True, **options)]
    trainer = make_trainer(*(hooks if ema_first else reversed(hooks)), max_epochs=2)
    kept: list[dict[str, torch.Tensor]] = []
    trainer.on("validation_end", name="keep")(lambda model: kept.append(weights_of(model)))
    trainer.train()
    assert same(weights_of(trainer.model), kept[0])


@pytest.mark.parametrize("event", ["validation_start", "validation_batch_end", "validation_end"])
@pytest.mark.parametrize("how", ["disable_hook", "remove_hook"])
def test_disabling_it_during_a_validation_restores_the_weights(event: str, how: str) -> None:
    """At whichever of its events, the model has its own weights again, and training is what it would be without."""
    results = []
    for off in (False, True):
        trainer = make_trainer(EMAHook(0.5), max_epochs=3)

        @trainer.on(event, name="off")
        def switch_off(trainer: Trainer, epoch: int, off: bool = off) -> None:
            if off and epoch == 0 and "ema" in trainer.hooks:
                getattr(trainer, how)("ema")

        trainer.train()
        results.append(weights_of(trainer.model))
    assert same(*results)


def test_its_failure_ends_the_run() -> None:
    """A partly applied average would corrupt training silently."""
    assert make_trainer(EMAHook()).hooks.entry("ema").policy == "raise"


def test_invalid_options_are_rejected() -> None:
    """The decay must be between 0 and 1."""
    with pytest.raises(ConfigError, match=r"decay: expected a finite number, at least 0 and at most 1, got 1\.5"):
        EMAHook(1.5)
    with pytest.raises(HooklineError, match="has no parameter 'decays'; did you mean 'decay'"):
        make_trainer().add_hook("ema", decays=0.5)


def test_of_two_hooks_the_first_is_validated() -> None:
    """Restoring another hook's average would corrupt training."""
    bare = train(max_epochs=3)
    first, second = EMAHook(decay=0.5), EMAHook(decay=0.9)
    trainer = make_trainer(max_epochs=3)
    trainer.add_hook(first, "first")
    trainer.add_hook(second, "second")
    seen: list[bool] = []
    trainer.on("validation_batch_end")(
        lambda model: seen.append(torch.equal(model[0].weight, first.average["0.weight"]))
    )
    trainer.train()
    assert all(seen) and len(seen) == 6
    assert first.updates == second.updates == 18
    for name, weight in weights_of(bare.model).items():
        assert torch.equal(weight, weights_of(trainer.model)[name])


def test_another_model_starts_another_average() -> None:
    """The same model continues its average."""
    first = train(hook := EMAHook(decay=0.9))
    train(hook, model=first.model)
    assert hook.updates == 12
    other = make_model(3, 7, 1)
    train(hook, model=other, optimizer=None, lr=0.0)
    assert hook.updates == 6 and hook.average.keys() == dict(other.named_parameters()).keys()
    torch.testing.assert_close(hook.average["0.weight"], other[0].weight.detach())


def test_trainable_only_leaves_frozen_parameters_out() -> None:
    """A parameter gets an average when it is unfrozen, and is still validated with it when it is frozen again."""
    frozen_at_first = ["0.weight", "0.bias"]
    averages = []
    for trainable_only in (True, False):
        model = with_batch_norm()
        model[0].requires_grad_(False)
        hook = EMAHook(0.5, buffers=True, trainable_only=trainable_only)
        trainer = make_trainer(hook, model=model, max_epochs=3)
        names: list[list[str]] = []
        validated: list[tuple[int, bool]] = []

        @trainer.on("epoch_end")
        def switch(model: nn.Sequential, hook: EMAHook = hook, names: list[list[str]] = names) -> None:
            names.append([name for name in frozen_at_first if name in hook.average])
            model[0].weight.requires_grad_(len(names) == 1)

        @trainer.on("validation_batch_end")
        def compare(epoch: int, model: nn.Sequential, hook: EMAHook = hook, validated: list[Any] = validated) -> None:
            if "0.weight" in hook.average:
                validated.append((epoch, torch.equal(model[0].weight, hook.average["0.weight"])))

        trainer.train()
        assert validated[-2:] == [(2, True), (2, True)]
        assert names == ([[], ["0.weight"], ["0.weight"]] if trainable_only else [frozen_at_first] * 3)
        assert {"1.running_mean", "1.weight", "2.bias"} <= hook.average.keys()
        averages.append({name: average for name, average in hook.average.items() if name not in frozen_at_first})
    assert same(*averages)


@pytest.mark.parametrize("trainable_only", [True, False])
def test_resuming_a_model_with_frozen_parameters(trainable_only: bool) -> None:
    """The average in a checkpoint is that of the trained parameters, and the resumed run's is that of one run."""

    def make(**options: Any) -> tuple[Trainer, EMAHook]:
        model = with_batch_norm()
        model[0].requires_grad_(False)
        hook = EMAHook(0.5, trainable_only=trainable_only)
        trainer = make_trainer(hook, model=model, record=True, trainable_only=trainable_only, **options)
        trainer.add_checkpointing()
        return trainer, hook

    uninterrupted, whole = make(max_epochs=2)
    uninterrupted.train()
    begun, _ = make()
    begun.train()
    resumed, hook = make()
    resumed.fit(resume=begun.run_dir, max_epochs=2)
    assert same(hook.average, whole.average) and same(weights_of(resumed.model), weights_of(uninterrupted.model))
    saved = EMAHook.weights_in(next(begun.checkpoint_dir.iterdir()))
    assert saved.keys() == {name for name in weights_of(begun.model) if not (trainable_only and name.startswith("0."))}


def test_an_update_at_which_everything_is_frozen() -> None:
    """Nothing has an average then, and validation uses the model's weights."""
    trainer = make_trainer(hook := EMAHook(0.5, trainable_only=True))
    trainer.on("after_backward", name="off")(lambda model: model.requires_grad_(False))
    trainer.on("train_batch_start", name="on")(lambda model: model.requires_grad_(True))
    trainer.train()
    assert (hook.updates, hook.average) == (6, {})

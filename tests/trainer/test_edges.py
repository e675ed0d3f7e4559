"""Edge cases: unusual models, unusual times, second runs, hooks that interfere."""

from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from builders import make_batches, make_trainer, train
from torch import nn

from hookline import HooklineError, HookManager, StopTraining, TrainingHook, UpdateHook
from hookline.errors import CheckpointError, TrainingError


def test_a_model_in_eval_mode_is_trained_in_train_mode() -> None:
    """As models from a hub come; a module left in eval mode on purpose stays so when the model itself trains."""
    model = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5))
    train(model=model.eval())
    assert model.training and model[1].training
    model[1].eval()
    train(model=model)
    assert not model[1].training


@pytest.mark.parametrize(
    ("option", "nearest"),
    [
        ({"scheduler_interval": "epochs"}, "'epoch'"),
        ({"loss_weight": "token"}, "'tokens'"),
        ({"precision": "bfloat16"}, "bf16"),
        ({"record": "no"}, "true or false"),
    ],
    ids=str,
)
def test_invalid_choices_are_rejected_in_code_too(option: dict[str, Any], nearest: str) -> None:
    """A typo must not change how a run is run."""
    with pytest.raises(HooklineError, match=nearest):
        make_trainer(**option)


def test_forgetting_the_loss_function_is_explained() -> None:
    """The model's own TypeError carries a note that says what is missing."""
    with pytest.raises(TypeError) as caught:
        train(loss_fn=None)
    assert any("without a loss_fn" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"loss_fn": nn.MSELoss}, "pass an instance"), ({"loss_fn": "mse"}, "expected a function"),
     ({"scheduler": "cosine"}, "expected a scheduler"), ({"optimizer": [1]}, "got an int")],
    ids=str,
)  # fmt: skip
def test_wrong_things_are_rejected_by_the_constructor(wrong: dict[str, Any], said: str) -> None:
    """Not after the first step."""
    with pytest.raises(TrainingError, match=said):
        make_trainer(**wrong)


def test_a_plateau_scheduler_moves_with_the_runs_own_validation_only() -> None:
    """A probe of a hook or a manual validate() is no epoch; without validation it is refused."""
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0)
    trainer = make_trainer(lr=1.0, scheduler=plateau, val_dataloader=make_batches(1))
    for _ in range(4):
        trainer.validate()
    assert trainer.lr == 1.0
    with pytest.raises(TrainingError, match="ReduceLROnPlateau needs"):
        train(scheduler=plateau)


def test_keys_added_at_validation_batches_are_averaged() -> None:
    """metrics["acc"] of each batch becomes val/acc, weighted by samples, numpy numbers included."""
    numpy = pytest.importorskip("numpy")

    class Accuracy(TrainingHook):
        def on_validation_batch_end(self, metrics: dict[str, Any], batch_idx: int) -> None:
            metrics["acc"] = numpy.float32(batch_idx)

    trainer = make_trainer(Accuracy(), val_dataloader=make_batches(3))
    assert trainer.validate()["val/acc"] == pytest.approx(1.0)


def test_a_token_schedule_covers_its_whole_step() -> None:
    """A hook that is due in the middle of a window gets the step's end, too."""
    data = [{"input_ids": torch.randint(0, 5, (5, 5))} for _ in range(32)]

    class LM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 1)

        def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.embed(input_ids).pow(2).mean()}

    trainer = make_trainer(data=data, model=LM(), loss_fn=None, accumulate=4)
    received: list[int] = []
    trainer.on("step_end", name="tokens", every="100 tokens")(lambda step: received.append(step))
    trainer.train()
    assert received == list(range(1, 9))


def test_reserved_names_in_metrics_are_the_hooks_fault() -> None:
    """'step' is a field of every record: the key is taken out and the hook is named."""

    class Rude(TrainingHook):
        def on_train_batch_end(self, metrics: dict[str, Any]) -> None:
            metrics["step"] = 1

    trainer = train(Rude())
    (event,) = [event for event in trainer.record.events if event["kind"] == "hook_overruled"]
    assert event["hook"] == "rude" and "'step'" in event["message"]


def test_a_hook_that_cannot_make_its_state_is_rejected_at_registration() -> None:
    """Not at the first step."""

    class Broken(UpdateHook):
        def init(self, params: Any) -> dict[str, Any]:
            raise ValueError("no state")

        def on_update(self, grads: Any) -> Any:
            return grads

    with pytest.raises(ValueError, match="no state"):
        make_trainer().add_hook(Broken())


def test_a_save_requested_at_the_very_end_is_written() -> None:
    """trainer.save() in on_train_end writes at once, and on_checkpoint_save comes before the end has been told."""
    received: list[str] = []

    class Final(TrainingHook):
        def on_train_end(self, trainer: Any) -> None:
            trainer.save()
            received.append("end")

        def on_checkpoint_save(self) -> None:
            received.append("saved")

    train(Final(), record=True)
    assert received == ["saved", "end"]


def test_half_a_step_cannot_be_saved() -> None:
    """save_checkpoint() inside a window is refused and says what waits for its end."""
    caught: list[Exception] = []

    class Eager(TrainingHook):
        def on_after_backward(self, trainer: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                try:
                    trainer.save_checkpoint()
                except CheckpointError as error:
                    caught.append(error)

    train(Eager(), record=True, accumulate=4)
    assert "in the middle of a step; call trainer.save(), which waits for its end" in str(caught[0])


def test_saving_before_there_is_a_run_says_so() -> None:
    """There is no directory yet."""
    with pytest.raises(CheckpointError, match="no run has begun yet"):
        make_trainer(record=True).save_checkpoint()


def test_a_failed_step_is_not_counted() -> None:
    """The outcome counts completed steps, and the next run continues from there."""

    class Fails(TrainingHook):
        on_error = "raise"

        def on_after_backward(self, batch_idx: int) -> None:
            if batch_idx == 2:
                raise RuntimeError("broken")

    trainer = make_trainer()
    handle = trainer.add_hook(Fails())
    with pytest.raises(RuntimeError):
        trainer.train()
    assert trainer.record.run["counters"]["step"] == 2
    handle.remove()
    trainer.fit(max_epochs=1)
    assert trainer.progress.steps_done == 3  # the failed batch was consumed; the last one remained


def test_determinism_mode_is_left_alone() -> None:
    """A run that did not ask for it does not touch torch's setting, warn_only included."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        train()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_interrupt_in_one_hooks_end_does_not_silence_the_others() -> None:
    """Every hook gets the end; then the interrupt propagates."""
    received: list[str] = []

    class Interrupts(TrainingHook):
        def on_train_end(self) -> None:
            raise KeyboardInterrupt

    class Listens(TrainingHook):
        def on_train_end(self) -> None:
            received.append("end")

    trainer = make_trainer(Interrupts(), Listens())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert received == ["end"]


def test_a_new_loss_function_is_checked_like_the_first() -> None:
    """A loss of one element in a row is taken; one without a graph is refused with our words."""
    trainer = make_trainer(data=make_batches(6))

    class Switch(TrainingHook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 2:
                trainer.loss_fn = lambda out, target: (out - target).pow(2).mean().reshape(1)
            if step == 4:
                trainer.loss_fn = lambda out, target: (out - target).pow(2).mean().detach()

    trainer.add_hook(Switch())
    with pytest.raises(TrainingError, match="does not require grad"):
        trainer.train()
    assert trainer.progress.steps_done == 4


def test_stop_training_without_a_trainer_reaches_the_caller() -> None:
    """Only the owner of the loop can stop it."""
    from hookline import ForwardHook

    class Stop(ForwardHook):
        modules = "0"

        def on_forward(self) -> None:
            raise StopTraining("enough")

    model, manager = nn.Sequential(nn.Linear(2, 2)), HookManager()
    manager.watch(model)
    manager.register(Stop())
    with pytest.raises(StopTraining):
        model(torch.ones(1, 2))


def test_a_second_run_sets_closed_hooks_up_again() -> None:
    """setup and close come in pairs, once for each run."""
    calls: list[str] = []

    class Paired(TrainingHook):
        def setup(self) -> None:
            calls.append("setup")

        def close(self) -> None:
            calls.append("close")

    trainer = train(Paired())
    trainer.fit(max_epochs=2)
    assert calls == ["setup", "close", "setup", "close"]


def test_a_run_with_nothing_left_to_do_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A second train() trains nothing, makes no record and says how to continue."""
    trainer = train()
    record = trainer.record
    trainer.train()
    assert "nothing is left to train" in caplog.text and trainer.record is record


def test_state_during_validation_is_trainings_own() -> None:
    """latest_loss and current_batch_idx do not become those of a validation batch."""
    seen: list[tuple[float, int]] = []
    losses: list[float] = []

    class Look(TrainingHook):
        def on_train_batch_end(self, loss: float) -> None:
            losses.append(loss)

        def on_validation_end(self, state: dict[str, Any]) -> None:
            seen.append((state["latest_loss"], state["current_batch_idx"]))

    train(Look(), val_dataloader=make_batches(2))
    assert seen == [(losses[-1], 3)]


def test_a_list_of_hooks_can_be_given_to_the_constructor() -> None:
    """hooks=[…] registers them; the default update hook is there as well."""

    class Mine(TrainingHook):
        def on_train_end(self) -> None: ...

    trainer = make_trainer(hooks=[Mine()])
    assert [hook.name for hook in trainer.hooks.list_hooks()] == ["mine", "identity"]


def test_clipping_twice_is_rejected() -> None:
    """max_grad_norm beside a clip_norm hook would be a surprise either way."""
    with pytest.raises(HooklineError, match="already a clip_norm hook"):
        make_trainer(hooks={"update": [{"name": "clip_norm", "max_norm": 1.0}]}, max_grad_norm=0.5)


def test_what_moves_the_step_is_in_the_record() -> None:
    """train/lr where a scheduler moves it, train/grad_norm where something clips."""
    halving = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    records = train(lr=1.0, scheduler=halving, max_grad_norm=1.0).record.metrics
    assert [record["train/lr"] for record in records] == [1.0, 0.5, 0.25, 0.125]
    assert all(record["train/grad_norm"] > 0 for record in records)


def test_an_iterator_that_is_used_up_is_explained() -> None:
    """A generator has one epoch in it."""
    with pytest.raises(TrainingError, match="can be read only once"):
        train(data=(batch for batch in make_batches()), max_epochs=2)


def test_the_default_link_is_not_called_in_steps_with_scheduled_hooks() -> None:
    """Where a scheduled hook is due, nothing is done for the sake of a cost that is nothing."""
    trainer = make_trainer(data=make_batches(40))
    due: list[bool] = []
    trainer.on("before_optimizer_step", every=4)(lambda: due.append(trainer.hooks.slots.on_update is not None))
    trainer.train()
    assert due == [False] * 10


@pytest.mark.parametrize("asks", [True, False])
def test_gradients_do_not_outlive_their_step_for_hooks_that_read_their_norm(asks: bool) -> None:
    """The norm is computed before they are cleared, if a hook names `grad_norm` or `ctx` at on_step_end."""
    trainer, alive, norms = make_trainer(), [], []
    grads: list[Any] = []
    trainer.on("gradients_ready", name="notes")(lambda model: grads.append(ref(model[0].weight.grad)))
    trainer.on("train_batch_end", name="looks")(lambda step: alive.append(grads[-1]() is not None))
    if asks:
        trainer.on("step_end")(lambda grad_norm: norms.append(grad_norm))
    trainer.train()
    assert alive == [False] * 4
    assert len(norms) == 4 * asks and all(norm > 0 for norm in norms)


def test_reading_a_loss_keeps_its_graph_no_longer_than_not_reading_it() -> None:
    """Until the next loss is there, not until the next one is read."""
    trainer, losses = make_trainer(data=make_batches(6)), []

    @trainer.on("train_batch_end", at=2)
    def read(loss: float, metrics: dict[str, Any]) -> None:
        assert loss == metrics["loss"] > 0

    trainer.on("before_backward", name="notes")(lambda: losses.append(ref(trainer.event_args.live_loss)))
    for step, _ in enumerate(trainer.stepper(), 1):
        assert [place for place, loss in enumerate(losses, 1) if loss() is not None] == [step]
    assert trainer.event_args.loss > 0


def test_a_hook_may_start_to_read_the_norm_while_training_runs() -> None:
    """A hook that comes and goes while training runs; afterwards nothing is kept for it."""
    trainer, norms = make_trainer(data=make_batches(6)), []

    @trainer.on("train_batch_end")
    def come_and_go(step: int) -> None:
        if step == 2:
            trainer.on("step_end", name="asks")(lambda ctx: norms.append((ctx.step, ctx.grad_norm)))
        if step == 5:
            trainer.hooks.remove("asks")

    trainer.train()
    assert [step for step, norm in norms if norm > 0] == [3, 4]


def test_a_hook_gets_the_rate_that_the_step_used() -> None:
    """Also if another hook changes the rate before the end of the step."""
    trainer, seen = make_trainer(), []

    @trainer.on("train_batch_end")
    def change_the_rate(trainer: Any) -> None:
        trainer.lr = trainer.lr / 2

    trainer.on("step_end", name="asks")(lambda lr: seen.append((lr, trainer.lr)))
    trainer.train()
    assert [used / now for used, now in seen] == [2.0] * 4


@pytest.mark.req("000-19", "000-20", "000-21")
def test_the_default_identity_link_passes_the_gradients_on() -> None:
    """It is there without being asked for, and changes nothing: also beside another hook it is not called."""
    trainer, bare = make_trainer(data=make_batches(20)), make_trainer(data=make_batches(20))
    for run in (trainer, bare):
        run.add_hook("clip_norm", max_norm=1e9)
    bare.disable_hook("identity")
    trainer.train()
    bare.train()
    assert torch.equal(trainer.model[0].weight, bare.model[0].weight)
    calls = {row["hook"]: row["calls"] for row in trainer.record.run["costs"]}
    assert (calls["clip_norm"], calls["identity"]) == (20, 0)


def test_schedulers_move_only_when_their_optimizers_stepped() -> None:
    """Under a scaler all step or none, also one without gradients; one skipped step is counted once."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    used, unused = torch.optim.SGD(model[0].parameters(), lr=1e-3), torch.optim.SGD(model[1].parameters(), lr=1.0)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (used, unused)]

    def step(model: nn.Sequential, batch: Any) -> torch.Tensor:
        return model[0](batch[0]).pow(2).mean()  # the second module gets no gradients

    trainer = make_trainer(model=model, optimizer=[used, unused], scheduler=schedulers, step_fn=step, precision="fp16")
    stepped: list[int] = []
    trainer.on("after_optimizer_step", name="stepped")(lambda optimizer_idx: stepped.append(optimizer_idx))
    trainer.train()
    steps = 4 - trainer.skipped_steps  # the scaler may have to find its scale first
    assert steps > 0 and stepped == [0, 1] * steps
    assert used.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.5**steps)
    assert unused.param_groups[0]["lr"] == pytest.approx(0.5**steps)

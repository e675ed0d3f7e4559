"""What users get wrong on their first day: each gets one error that says what would be right, before the first step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from builders import make_batches, make_model, make_trainer
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, StepLR

from hookline import GenericTrainer, HooklineError, HooksConfig, TrainingHook, get_trainer, load_run
from hookline.cli import main
from hookline.errors import CheckpointError, ConfigError, RegistrationError, TrainingError

Adam, RMSprop, SGD = torch.optim.Adam, torch.optim.RMSprop, torch.optim.SGD


def build(model: Any = None, optimizer: Any = None, **options: Any) -> None:
    """Make a trainer of what is given, as it is."""
    model = make_model() if model is None else model
    optimizer = SGD(model.parameters(), 0.1) if optimizer is None else optimizer
    get_trainer("simple", model, make_batches(), optimizer, "cpu", **options)


def with_scheduler_of_another_optimizer() -> None:
    """Make a trainer whose scheduler belongs to an optimizer that it does not have."""
    model = make_model()
    other = SGD(model.parameters(), 0.1)
    make_trainer(model=model, optimizer=SGD(model.parameters(), 0.1), scheduler=StepLR(other, 1))


def with_plateau_of_an_accuracy() -> None:
    """Make a trainer whose scheduler waits for a metric to rise, and gets one that falls."""
    optimizer = SGD((model := make_model()).parameters(), 0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max")
    make_trainer(model=model, optimizer=optimizer, scheduler=plateau, val_loaders=make_batches(1))


def with_swapped_arguments() -> None:
    """Pass the optimizer where the loader belongs."""
    model = make_model()
    get_trainer("simple", model, SGD(model.parameters(), 0.1), make_batches(), "cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: build(nn.Linear, SGD([torch.zeros(1)])), r"got the class Linear; pass an object, Linear\(…\)"),
        (lambda: build(optimizer=SGD), r"got the class SGD; pass an object, SGD\(model.parameters\(\), lr=…\)"),
        (lambda: build(scheduler=StepLR), r"got the class StepLR; pass an object, StepLR\(optimizer, …\)"),
        (with_scheduler_of_another_optimizer, "create it with the optimizer that you pass"),
        (with_swapped_arguments, "got a SGD; check the argument order.*model, dataloader, optimizer"),
        (lambda: build(model=make_batches(), optimizer=SGD([torch.zeros(1)])), "got list; check the argument order"),
        (lambda: make_trainer(optimizer=make_batches()), "got a tuple; check the argument order"),
        (lambda: get_trainer(make_model(), make_batches(), SGD([torch.zeros(1)]), "cpu"), "got a Sequential; check"),  # type: ignore[arg-type]
        (lambda: make_trainer().train(max_epochs=2), r"call fit\(max_epochs=…\)"),  # type: ignore[call-arg]
        (lambda: make_trainer().fit(ckpt_path="x"), r"did you mean 'fit\(resume=…\)'"),
        (lambda: make_trainer().fit(max_epoch=2), "did you mean 'max_epochs'"),
        (lambda: make_trainer().fit(resume=3), r"expected a run or a checkpoint, .* got 3 \(int\)"),  # type: ignore[arg-type]
        (lambda: make_trainer().validate(ckpt_path="best"), r"'ckpt_path'; call load_checkpoint\(…\) before"),
        (lambda: make_trainer().predict(dataloaders=[]), "did you mean 'loaders'"),
        (lambda: make_trainer().fit(make_model()), "is a Sequential, not something to iterate over"),  # type: ignore[arg-type]
        (lambda: make_trainer().fit(torch.utils.data.TensorDataset(torch.ones(4, 3))), "; pass a DataLoader of it"),
        (lambda: build(scheduler=SGD([torch.zeros(1)])), "SGD is an optimizer; list all as optimizers"),
        (with_plateau_of_an_accuracy, "monitors val/loss, where lower is better; create it with mode='min'"),
        (lambda: build(init_from=""), "is empty; name a run or a checkpoint, or write null for none"),
        (lambda: make_trainer(device=nn.functional.mse_loss), r"is not a device, such as 'cpu' or 'cuda:0': [^\n]*$"),
        (lambda: GenericTrainer(make_model(), HooksConfig(), []), r"a HooksConfig or a dict, got Sequential\( \(0\)"),  # type: ignore[arg-type]
    ],
    ids=[
        "model class", "optimizer class", "scheduler class", "foreign scheduler", "loader and optimizer swapped",
        "batches as model", "batches as optimizer", "no kind", "train(max_epochs)", "fit(ckpt_path)", "fit(max_epoch)",
        "fit(resume=3)", "validate(ckpt_path)", "predict(dataloaders)", "fit(model)", "fit(dataset)",
        "optimizer as scheduler", "plateau of an accuracy", "empty init_from", "loss as device", "model as config",
    ],
)  # fmt: skip
def test_wrong_arguments(attempt: Callable[[], None], message: str) -> None:
    """The error has the remedy, and not the contents of tensors."""
    with pytest.raises((TrainingError, CheckpointError, ConfigError), match=message) as raised:
        attempt()
    assert "tensor(" not in str(raised.value)


@pytest.mark.parametrize("retain_graph", [False, True])
def test_step_fn_that_calls_backward(retain_graph: bool) -> None:
    """It fails at the first batch, also where torch would add up the gradients twice without a word."""

    def step_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        return loss

    trainer = make_trainer(step_fn=step_fn)
    before = [param.clone() for param in trainer.model.parameters()]
    with pytest.raises(TrainingError, match=r"step_fn has called backward\(\); return the loss"):
        trainer.train()
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_step_fn_that_does_the_whole_step() -> None:
    """Where the graph is kept, every batch would otherwise be trained on twice, without a word."""

    def step_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        trainer.optimizers[0].step()
        trainer.optimizers[0].zero_grad()
        return loss

    trainer = make_trainer(step_fn=step_fn)
    with pytest.raises(TrainingError, match=r"step_fn has called optimizer.step\(\); return the loss"):
        trainer.train()


def test_a_model_that_calls_backward() -> None:
    """It is told as a step_fn is: its gradients would count twice."""

    class CallsBackward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model()

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.inner(inputs), targets)
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            return loss

    with pytest.raises(TrainingError, match=r"the forward pass of the model has called backward\(\)"):
        make_trainer(model=CallsBackward(), loss_fn=None).train()


def test_a_step_fn_with_other_parameters() -> None:
    """The error that Python raises has a note with the call."""
    for step_fn in (lambda batch, model: model(batch[0]).mean(), lambda batch: batch):
        with pytest.raises(TypeError) as raised:
            make_trainer(step_fn=step_fn).train()
        assert "Hookline calls step_fn(model, batch)" in raised.value.__notes__


def test_a_loss_fn_with_other_parameters() -> None:
    with pytest.raises(TypeError) as raised:
        make_trainer(loss_fn=lambda output: output.mean()).train()
    assert "Hookline calls loss_fn(model(batch[0]), batch[1])" in raised.value.__notes__


@pytest.mark.parametrize("name", ["init_from", "load_checkpoint", "resume"])
def test_weights_that_torch_has_saved(name: str) -> None:
    """A file is not a checkpoint of a run; the error says how its weights are loaded."""
    torch.save(make_model().state_dict(), "mine.pt")
    trainer = make_trainer(init_from="mine.pt" if name == "init_from" else None)
    with pytest.raises(CheckpointError, match=r"mine\.pt is a file, .*model\.load_state_dict\(torch\.load\(…\)\)"):
        {"init_from": trainer.train, "resume": lambda: trainer.fit(resume="mine.pt")}.get(
            name, lambda: trainer.load_checkpoint("mine.pt")
        )()


def test_step_fn_after_gradients_of_a_hook() -> None:
    """Gradients that were there before the forward pass are not taken for those of step_fn."""

    class OwnGradients(TrainingHook):
        def on_train_batch_start(self, model: nn.Module) -> None:
            for param in model.parameters():
                param.grad = torch.zeros_like(param)

    trainer = make_trainer(OwnGradients(), step_fn=lambda model, batch: model(batch[0]).mean())
    trainer.train()
    assert trainer.step == 4


def test_a_misspelt_argument_with_a_default() -> None:
    """It would be None forever; a default that the function brings along, or of another event, is fine."""

    class Misspelt(TrainingHook):
        def on_train_batch_end(self, los: Any = None) -> None: ...

    with pytest.raises(RegistrationError, match="no argument 'los', so it would always be None; did you mean 'loss'"):
        make_trainer(Misspelt())
    seen: list[int] = []
    trainer = make_trainer()
    trainer.on("epoch_start")(lambda epoch, grad_norm=None, epochs=seen: epochs.append(epoch))
    trainer.train()
    assert seen == [0]


def test_should_stop_stops() -> None:
    """`trainer.should_stop = True`, as in Lightning, is a stop with its hook's name; it cannot be taken back."""
    trainer = make_trainer(record=True)

    @trainer.on("step_end")
    def stop(trainer: Any) -> None:
        trainer.should_stop = True

    trainer.train()
    assert (trainer.step, trainer.should_stop) == (1, True)
    (event,) = [event for event in load_run(trainer.run_dir).events if event["kind"] == "stop_requested"]
    assert (event["by"], event["reason"]) == ("stop", "should_stop was set")
    with pytest.raises(HooklineError, match="cannot be undone"):
        trainer.should_stop = False


def test_settings_of_a_hook_that_is_not_switched_on() -> None:
    """They would have no effect; an explicit false keeps them, also in the recorded config of the run."""
    model, settings = make_model(), {"early_stopping_config": {"patience": 2}}
    with pytest.raises(ConfigError, match="has no effect without enable_early_stopping_hook; set it to true"):
        GenericTrainer(HooksConfig(**settings), model, SGD(model.parameters(), 0.1))  # type: ignore[arg-type]
    off = HooksConfig(enable_early_stopping_hook=False, **settings)  # type: ignore[arg-type]
    trainer = GenericTrainer(off, model, SGD(model.parameters(), 0.1))
    assert "early_stopping" not in trainer.hooks


def test_the_rate_by_another_name(capsys: pytest.CaptureFixture[str]) -> None:
    """`optimizer.learning_rate` is `lr`."""
    assert main(["train", "optimizer.learning_rate=0.1"]) == 2
    assert "did you mean 'lr'?" in capsys.readouterr().err


def test_no_loss_for_batches_of_inputs_and_targets() -> None:
    """The model's TypeError has a note that names loss_fn, and `loss:` of a config."""
    with pytest.raises(TypeError) as raised:
        make_trainer(loss_fn=None).train()
    assert "pass loss_fn, in a config `loss: mse`" in "".join(raised.value.__notes__)


def test_resuming_with_another_optimizer() -> None:
    """The error names what differs, before anything of the trainer is changed."""
    first = make_trainer(record=True)
    first.add_checkpointing()
    first.train()
    model = make_model(seed=1)
    before = [param.clone() for param in model.parameters()]
    again = make_trainer(model=model, optimizer=torch.optim.AdamW(model.parameters()), record=True, max_epochs=2)
    with pytest.raises(CheckpointError, match=r"another kind of optimizer: it has dampening.*AdamW has amsgrad, betas"):
        again.fit(resume=first.run_dir)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(
    ("then", "now", "missing"),
    [
        (partial(Adam, amsgrad=False), partial(Adam, amsgrad=True), "max_exp_avg_sq"),
        (Adam, torch.optim.Adamax, "exp_inf"),
        (RMSprop, partial(RMSprop, momentum=0.9), "momentum_buffer"),
    ],
    ids=["another option", "another kind", "a momentum"],
)
def test_resuming_with_an_optimizer_that_keeps_more(then: Any, now: Any, missing: str) -> None:
    """torch's KeyError, in the first step, has a note with the remedy, and the run is as it was."""
    model = make_model()
    first = make_trainer(model=model, optimizer=then(model.parameters()), record=True)
    first.add_checkpointing()
    first.train()
    assert first.run_dir is not None
    before = {path: path.read_bytes() for path in first.run_dir.rglob("*") if path.is_file()}
    model = make_model()
    again = make_trainer(model=model, optimizer=now(model.parameters()), record=True, max_epochs=2)
    with pytest.raises(KeyError, match=missing) as raised:
        again.fit(resume=first.run_dir)
    assert "resume with the original optimizer, or start a new run" in "".join(raised.value.__notes__)
    assert before == {path: path.read_bytes() for path in first.run_dir.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (partial(StepLR, step_size=2), partial(ExponentialLR, gamma=0.9), "has step_size, ExponentialLR has nothing"),
        (partial(ExponentialLR, gamma=0.9), partial(StepLR, step_size=2), "has nothing else, StepLR has step_size"),
        (partial(StepLR, step_size=2), partial(OneCycleLR, max_lr=0.1, total_steps=9), "OneCycleLR has .*total_steps"),
        (partial(LambdaLR, lr_lambda=lambda step: 0.5), partial(StepLR, step_size=2), "it has lr_lambdas, StepLR has"),
    ],
    ids=["less", "more", "other", "a function"],
)
def test_resuming_with_another_scheduler(then: Any, now: Any, message: str) -> None:
    """It would continue with the settings of the old one, or of both."""
    optimizer = SGD((model := make_model()).parameters(), 0.1)
    first = make_trainer(model=model, optimizer=optimizer, scheduler=then(optimizer), record=True)
    first.add_checkpointing()
    first.train()
    optimizer = SGD((model := make_model(seed=1)).parameters(), 0.1)
    before = [param.clone() for param in model.parameters()]
    again = make_trainer(model=model, optimizer=optimizer, scheduler=now(optimizer), record=True, max_epochs=2)
    with pytest.raises(CheckpointError, match=message):
        again.fit(resume=first.run_dir)
    assert all(map(torch.equal, before, model.parameters()))


def test_the_state_of_a_users_scheduler_may_change_its_keys() -> None:
    """Only torch's schedulers are known to keep theirs."""

    class Warm:
        steps = 0

        def __init__(self, optimizer: SGD) -> None:
            self.optimizer = optimizer

        def step(self) -> None:
            self.steps += 1

        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.steps} if self.steps else {"fresh": True}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.steps = state["steps"]

    def make(epochs: int) -> Any:
        optimizer = SGD((model := make_model()).parameters(), 0.1)
        return make_trainer(model=model, optimizer=optimizer, scheduler=Warm(optimizer), record=True, max_epochs=epochs)

    first = make(1)
    first.add_checkpointing()
    first.train()
    again = make(2)
    again.fit(resume=first.run_dir)
    assert again.schedulers[0].steps == again.step == 2 * first.step


def test_a_key_error_of_the_users_own_step_gets_no_advice_about_checkpoints() -> None:
    with pytest.raises(KeyError, match="my_setting") as raised:
        make_trainer(optimizer_step=lambda optimizer: {}["my_setting"]).fit()
    assert not any("checkpoint" in note for note in getattr(raised.value, "__notes__", ()))


def test_resuming_with_other_groups_of_parameters() -> None:
    """The error says how many parameters each group has, then and now."""
    first = make_trainer(record=True)
    first.add_checkpointing()
    first.train()
    model = make_model()
    groups = SGD([{"params": part.parameters()} for part in (model[0], model[2])], 0.1)
    again = make_trainer(model=model, optimizer=groups, record=True, max_epochs=2)
    with pytest.raises(
        CheckpointError, match="groups of SGD had 4 parameters, and have 2 and 2; pass it the parameters"
    ):
        again.fit(resume=first.run_dir)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (make_model(3, 8, 1), r"size mismatch: 0\.weight was \[4, 3\], and is \[8, 3\], and 2 more; build the model"),
        (nn.Sequential(*make_model(), nn.Linear(1, 1)), r"fit the model: 3\.weight is not among them, and 1 more;"),
        (nn.Sequential(make_model()[0]), r"the model has no 2\.weight, and 1 more;"),
    ],
    ids=["width", "a layer more", "a layer less"],
)
def test_weights_of_another_model(model: nn.Module, message: str) -> None:
    """One line names the first tensor that does not fit, where torch lists all of them."""
    first = make_trainer(record=True)
    first.add_checkpointing()
    first.train()
    with pytest.raises(CheckpointError, match=message):
        make_trainer(model=model).load_checkpoint(str(first.run_dir))


def test_a_reason_may_be_any_object() -> None:
    """Hooks pass the exception they caught, for instance."""
    trainer = make_trainer()
    trainer.on("gradients_ready", at=2)(lambda trainer: trainer.skip_step(ValueError("too large")))
    trainer.on("step_end", at=3)(lambda trainer: trainer.request_stop(ValueError("enough")))
    trainer.train()
    assert (trainer.skipped_steps, trainer.step, trainer.stop_reason) == (1, 3, "enough")

"""Observers change nothing: losses, parameters, optimizer state and random streams are the same, bit for bit."""

import inspect
import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_batches, make_trainer
from tracked_runs import OFFLINE

from hookline import ForwardHook, HooklineError, Trainer, TrainingHook
from hookline.core.plugins import HOOKS

BATCHES = make_batches(12, 5, 6)


@dataclass
class Result:
    """The outcome of a training run."""

    losses: list[float]
    parameters: list[torch.Tensor]
    optimizer: dict[Any, Any]
    streams: tuple[torch.Tensor, Any, Any]

    def differs_from(self, other: "Result") -> list[str]:
        """Return the names of what differs in at least one bit."""
        checks = {
            "losses": self.losses == other.losses,
            "parameters": all(map(torch.equal, self.parameters, other.parameters)),
            "optimizer": same(self.optimizer, other.optimizer),
            "torch stream": torch.equal(self.streams[0], other.streams[0]),
            "python stream": self.streams[1] == other.streams[1],
            "numpy stream": repr(self.streams[2]) == repr(other.streams[2]),
        }
        return [name for name, fine in checks.items() if not fine]


def same(first: Any, second: Any) -> bool:
    """Compare nested state that contains tensors."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def seed_all() -> None:
    """Seed every random stream."""
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)


def make_model() -> torch.nn.Module:
    """Make a model with dropout, so that every step draws."""
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
    )


def noisy_step(model: Callable[..., Any], batch: Any) -> torch.Tensor:
    """Compute a loss with draws from Python's and NumPy's streams, too."""
    noise = random.random() + float(np.random.standard_normal())
    return torch.nn.functional.mse_loss(model(batch[0]) + 0.01 * noise, batch[1])


def streams() -> tuple[torch.Tensor, Any, Any]:
    """Return the state of every random stream."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def bare(epochs: int = 2) -> Result:
    """Train with a plain PyTorch loop, without Hookline."""
    seed_all()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(epochs):
        for batch in BATCHES:
            loss = noisy_step(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return Result(losses, parameters_of(model), optimizer.state_dict(), streams())


def parameters_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return copies of parameters and buffers."""
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def trained(dress: Callable[[Trainer], Any] | None = None, **options: Any) -> Result:
    """Run the same training with Hookline and some hooks."""
    seed_all()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[float] = []

    def step(model: Any, batch: Any) -> torch.Tensor:
        loss = noisy_step(model, batch)
        if loss.requires_grad:
            losses.append(loss.item())
        return loss

    options = {"data": BATCHES, "max_epochs": 2, **options}
    trainer = make_trainer(model=model, optimizer=optimizer, loss_fn=None, step_fn=step, **options)
    if dress is not None:
        dress(trainer)
    trainer.train()
    return Result(losses, parameters_of(model), optimizer.state_dict(), streams())


@pytest.fixture(scope="module")
def reference() -> Result:
    """Return the result of the plain loop."""
    return bare()


class Everything(TrainingHook):
    """Listens to many events, names many arguments, and changes nothing."""

    def on_train_batch_start(self, batch: Any, batch_idx: int, state: Any) -> None: ...
    def on_before_backward(self, loss: torch.Tensor) -> None: ...
    def on_after_backward(self, loss: float) -> None: ...
    def on_gradients_ready(self, grads: Any) -> None: ...
    def on_before_optimizer_step(self, grad_norm: float) -> None: ...
    def on_after_optimizer_step(self, lr: float) -> None: ...
    def on_train_batch_end(self, metrics: Any, state: Any) -> None: ...
    def on_step_end(self, ctx: Any) -> None:
        self.seen = ctx.loss, ctx.grad_norm


class Vandal(ForwardHook):
    """Writes into what it receives and returns something else."""

    def on_forward(self, inputs: Any, output: Any) -> Any:
        inputs[0].zero_()
        output.mul_(100).add_(1)
        return torch.zeros_like(output)


def no_hooks(trainer: Trainer) -> None:
    """Remove even the default update hook."""
    trainer.remove_hook("identity")


def observing_built_ins(trainer: Trainer) -> None:
    """Add every built-in hook that only observes."""
    trainer.add_hook("console_log", log_every_n_batches=1, stream=io.StringIO())
    trainer.add_hook("json_log", log_every_n_batches=1, path="log.jsonl")
    trainer.add_hook("activation_stats")
    trainer.add_hook("gradient_monitor", log_frequency=1, log_histogram=True, percentiles=[50], log_update_ratio=True)


def vandals(trainer: Trainer) -> None:
    """Add forward hooks that write and return values, at two positions in the order."""
    trainer.add_hook(Vandal(), "first_vandal")
    trainer.add_hook(Everything())
    trainer.add_hook(Vandal(), "second_vandal", every=3)


def disabled(trainer: Trainer) -> None:
    """Add disabled hooks, also some that intervene."""
    trainer.add_hook(Vandal(), enabled=False)
    trainer.add_hook("clip_norm", max_norm=1e-6, enabled=False)
    trainer.add_hook(Everything())
    trainer.disable_hook("everything")


def changing_set(trainer: Trainer) -> None:
    """Add and remove hooks during the run."""
    trainer.add_hook(Everything())

    @trainer.on("step_end", every=5)
    def flip(step: int) -> None:
        (trainer.disable_hook if trainer.hooks.is_enabled("everything") else trainer.enable_hook)("everything")


def failing(trainer: Trainer) -> None:
    """Add a hook that fails at every event."""
    trainer.on("after_backward", name="broken")(lambda: 1 / 0)


def running_the_model(trainer: Trainer) -> None:
    """Add a hook that samples from the model, with the random stream of dropout preserved."""

    @trainer.on("step_end", every=2)
    def sample() -> None:
        with trainer.inference() as model:
            model(torch.randn(3, 6))
            random.random(), np.random.rand()


def validating_in_an_event(trainer: Trainer) -> None:
    """Add a hook that validates in the middle of a step."""
    trainer.on("after_backward", every=4, name="validator")(lambda trainer: trainer.validate(BATCHES[:2]))


def drawing(trainer: Trainer) -> None:
    """Add observers that draw from every random stream, at events inside a step and inside the forward pass."""

    def draw() -> None:
        torch.randn(3), random.random(), np.random.rand()

    class Draws(ForwardHook):
        def on_forward(self, output: torch.Tensor) -> None:
            draw()

    trainer.add_hook(Draws())
    for event in ("train_start", "train_batch_start", "before_backward", "gradients_ready", "step_end", "epoch_end"):
        trainer.on(event, name=f"draws_at_{event}")(draw)


DRESSES = [
    no_hooks, None, observing_built_ins, vandals, disabled, changing_set, failing, running_the_model,
    validating_in_an_event, drawing,
]  # fmt: skip


@pytest.mark.req("000-15", "000-22", "000-37", "000-39")
@pytest.mark.parametrize("dress", DRESSES, ids=lambda dress: getattr(dress, "__name__", "identity"))
@pytest.mark.hooks_fail(raises=ZeroDivisionError)
def test_training_equals_a_bare_loop(dress: Callable[[Trainer], Any] | None, reference: Result) -> None:
    """With any of these hooks, training with dropout equals a plain PyTorch loop, bit for bit."""
    assert trained(dress).differs_from(reference) == []


@pytest.mark.req("000-42", "000-38", "001-27")
def test_record_checkpoints_and_validation_change_nothing(reference: Result, tmp_path: Path) -> None:
    """A run that records, validates, saves and prints ends exactly as the plain loop."""

    def dress(trainer: Trainer) -> None:
        observing_built_ins(trainer)
        vandals(trainer)
        trainer.add_checkpointing()

    result = trained(dress, record=True, val_dataloader=BATCHES[:3], output_dir=str(tmp_path / "runs"))
    assert result.differs_from(reference) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow uses what SQLAlchemy 2.1 deprecates
def test_all_observing_built_ins_change_nothing(
    reference: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all observing built-ins, a record and validations, the result is that of the plain loop."""
    for key, value in {**OFFLINE, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}.items():
        monkeypatch.setenv(key, value)

    def dress(trainer: Trainer) -> None:
        for name in HOOKS.built_in.keys() - {"trackio"}:  # a package that the tests do without
            hook = HOOKS.find(name)
            if name not in trainer.hooks and not hook.intervenes and not needs_parameters(hook):
                trainer.add_hook(name)
        assert {"checkpoint", "early_stopping", "ema", "lr_monitor", "profiler", "throughput"} <= set(trainer.hooks)

    options = {"val_dataloader": BATCHES[:3], "validate_every": 5, "output_dir": str(tmp_path / "runs")}
    assert trained(dress, record=True, **options).differs_from(reference) == []


def needs_parameters(hook: Any) -> bool:
    """Return True if a hook cannot be created without parameters."""
    return any(parameter.default is parameter.empty for parameter in inspect.signature(hook).parameters.values())


def test_the_comparison_can_fail(reference: Result) -> None:
    """A control: doubled gradients, or one epoch less, are noticed."""

    def double(trainer: Trainer) -> None:
        trainer.on("update")(lambda grads: {name: grad * 2 for name, grad in grads.items()})

    assert "parameters" in trained(double).differs_from(reference)
    assert set(bare(1).differs_from(reference)) >= {
        "losses",
        "optimizer",
        "torch stream",
        "python stream",
        "numpy stream",
    }


def test_accumulating_equals_a_bare_accumulating_loop() -> None:
    """Windows of four give exactly what `(loss / 4).backward()` four times gives."""

    def bare_accumulating() -> list[torch.Tensor]:
        seed_all()
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for index, batch in enumerate(BATCHES, 1):
            (noisy_step(model, batch) / 4).backward()
            if index % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
        return parameters_of(model)

    result = trained(vandals, accumulate=4, max_epochs=1)
    assert all(map(torch.equal, result.parameters, bare_accumulating()))


def test_clipping_equals_torch() -> None:
    """max_grad_norm gives exactly what clip_grad_norm_ gives."""
    seed_all()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in BATCHES:
        noisy_step(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    result = trained(max_grad_norm=0.5, max_epochs=1)
    assert all(map(torch.equal, result.parameters, parameters_of(model)))


@pytest.mark.req("003-33", "004-35")
def test_an_intervention_must_be_enabled(reference: Result) -> None:
    """A hook with intervene=True is refused until interventions are enabled, and then changes training."""

    class Zero(ForwardHook):
        modules = "0"
        intervene = True

        def on_forward(self, output: torch.Tensor) -> torch.Tensor:
            return output * 0

    with pytest.raises(HooklineError, match="interventions are disabled"):
        trained(lambda trainer: trainer.add_hook(Zero()))
    changed = trained(lambda trainer: trainer.add_hook(Zero()), enable_intervention=True)
    assert "parameters" in changed.differs_from(reference)

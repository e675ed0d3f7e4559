"""With trainable_only, checkpoints leave out frozen parameters, and restore everything or say what differs."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from builders import make_batches
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hookline import EarlyStopping, Trainer, TrainingHook, replay_crash
from hookline.checkpoints.store import read_checkpoint
from hookline.cli import main
from hookline.errors import CheckpointError

ADAPTERS = ["0.down.weight", "0.up.weight", "2.down.weight", "2.up.weight"]
BUFFERS = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
BASE = ["0.base.weight", "0.base.bias", "1.weight", "1.bias", "2.base.weight", "2.base.bias"]


class Adapted(nn.Module):
    """A linear layer whose weights are frozen, with a trained adapter of rank 2 beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def make_model(base_seed: int = 0, width: int = 64) -> nn.Sequential:
    """Two adapted layers and a batch norm with frozen weights; only the base depends on the seed."""
    torch.manual_seed(base_seed)
    model = nn.Sequential(Adapted(3, width), nn.BatchNorm1d(width).requires_grad_(False), Adapted(width, 1))
    torch.manual_seed(1)
    for name in ADAPTERS:
        nn.init.normal_(model.get_parameter(name))
    return model


def adam_of_trained(params: Iterator[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW([param for param in params if param.requires_grad], lr=0.01)


OPTIONS: dict[str, Any] = {
    "model": make_model, "data": make_batches(3), "optimizer": adam_of_trained, "trainable_only": True, "max_epochs": 2,
    "record": True,
}  # fmt: skip
make_trainer = partial(builders.make_trainer, "checkpoint", **OPTIONS)
train = partial(builders.train, "checkpoint", **OPTIONS)


def newest(trainer: Trainer) -> Path:
    return max(trainer.checkpoint_dir.iterdir())


def saved_names(path: Path) -> set[str]:
    return set(read_checkpoint(path)[0]["model"])


def same_state(first: nn.Module, second: nn.Module) -> bool:
    ours, theirs = first.state_dict(), second.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=["waiting", "async_save"])
def test_the_file_holds_adapters_and_buffers(options: dict[str, Any]) -> None:
    """All checkpoints of a run are alike, and smaller by the frozen parameters."""
    whole, trainer = train(trainable_only=False), make_trainer(**options)
    trainer.on("step_end")(lambda trainer, step: trainer.save("mine") if step == 2 else None)
    trainer.train()
    paths = sorted(trainer.checkpoint_dir.iterdir())
    assert [path.name for path in paths] == ["mine", "step-00000003", "step-00000006"]
    for path in paths:
        assert saved_names(path) == {*ADAPTERS, *BUFFERS}
    assert saved_names(newest(whole)) == {*ADAPTERS, *BUFFERS, *BASE}
    smaller = [path / "model.safetensors" for path in (newest(whole), newest(trainer))]
    frozen = sum(trainer.model.get_parameter(name).nbytes for name in BASE)
    assert smaller[0].stat().st_size - smaller[1].stat().st_size > frozen
    assert main(["verify-checkpoint", str(newest(trainer))]) == 0


def test_the_checkpoint_of_a_failed_run_is_like_the_others() -> None:
    """It is written in the middle of a step, and the run resumes from it."""
    trainer = make_trainer()
    trainer.add_checkpointing(save_on_exception=True)

    @trainer.on("after_backward", on_error="raise")
    def fail(step: int) -> None:
        if step == 5:
            raise ValueError("no gradients today")

    with pytest.raises(ValueError, match="no gradients today"):
        trainer.train()
    path = trainer.run_dir / "exception" / "step-00000004"
    assert saved_names(path) == {*ADAPTERS, *BUFFERS}
    make_trainer().load_checkpoint(path)


class Falling(TrainingHook):
    """Measures a score at each validation that falls, so that the first one is the best."""

    def on_validation_end(self, metrics: dict[str, Any], step: int) -> None:
        metrics["val/score"] = -step


def with_best_weights(**options: Any) -> Trainer:
    """The best weights are those of the first validation; a layer of the base is trained, once it is unfrozen."""
    model = make_model()
    params = [*(param for param in model.parameters() if param.requires_grad), model[2].base.weight]
    stopping = EarlyStopping("val/score", mode="max", restore_best_weights=True, patience=9)
    options = {"val_dataloader": make_batches(1), "sanity_batches": 0, **options}
    return make_trainer(Falling(), stopping, model=model, optimizer=torch.optim.AdamW(params, lr=0.1), **options)


@pytest.mark.parametrize("unfreeze_at", [None, 4])
def test_the_best_weights_are_saved_without_the_base(unfreeze_at: int | None) -> None:
    """They are restored whole, also by a run that resumes, and also if a layer of the base was trained since."""
    first = with_best_weights(max_epochs=2)
    best: dict[str, Any] = {}
    first.on("step_end", name="copy")(lambda model, step: step == 3 and best.update(copy.deepcopy(model.state_dict())))
    if unfreeze_at is not None:
        first.on("step_end", name="unfreeze")(lambda model, step: step == 3 and model[2].base.weight.requires_grad_())
    first.train()
    saved = read_checkpoint(newest(first))[0]["hooks"]["early_stopping"]["best_weights"]
    assert {*saved} == {*ADAPTERS, *BUFFERS, *(["2.base.weight"] if unfreeze_at else [])}
    second = with_best_weights(max_epochs=3)
    second.fit(resume=first.run_dir)
    for trainer in (first, second):
        state = trainer.model.state_dict()
        assert [name for name in best if not torch.equal(state[name], best[name])] == []


class Copies(TorchDispatchMode):
    """Counts how often each parameter of a model is copied."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {param.data_ptr(): name for name, param in model.named_parameters()}
        self.copied: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            self.copied[self._names.get(args[0].data_ptr(), "another tensor")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("trainable_only", [True, False])
def test_a_resumed_run_copies_only_what_the_best_weights_lack(trainable_only: bool) -> None:
    """That is what the checkpoint left out; a copy of the whole model would need its memory twice."""
    first = with_best_weights(max_epochs=1, trainable_only=trainable_only)
    first.train()
    second = with_best_weights(max_epochs=2, trainable_only=trainable_only)
    copies, copied = Copies(second.model), []
    second.on("epoch_start", name="count")(lambda: copied.append({*copies.copied} - {"another tensor"}))
    with copies:
        second.fit(resume=first.run_dir)
    assert copied == [{*BASE} if trainable_only else set()]


def test_a_crash_folder_is_without_the_base() -> None:
    """It is replayed in a model with the same base, and refused in another one."""
    trainer = make_trainer(data=make_batches(3))  # of which one batch is overwritten
    hook = trainer.hooks.get(trainer.add_hook("nan_forensics", stop_run=True))
    trainer.on("train_batch_start", at=2)(lambda batch: batch[0].fill_(torch.nan))
    trainer.train()
    assert saved_names(hook.crash / "state") == {*ADAPTERS, *BUFFERS}
    assert replay_crash(hook.crash, make_trainer(record=False)).same
    with pytest.raises(CheckpointError, match=r"without its frozen parameters .* 0\.base\.weight has different values"):
        replay_crash(hook.crash, make_trainer(model=make_model(base_seed=9), record=False))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("then", [True, False])
def test_a_run_resumes_bit_for_bit(first: bool, then: bool) -> None:
    """Also if the option is switched on or off in between."""
    uninterrupted = train(max_epochs=4)
    begun = train(trainable_only=first)
    resumed = make_trainer(trainable_only=then)
    resumed.fit(resume=begun.run_dir, max_epochs=4)
    assert same_state(resumed.model, uninterrupted.model)
    again = make_trainer()
    again.load_checkpoint(newest(resumed))
    assert same_state(again.model, uninterrupted.model) and again.step == 12


def without_base(model: nn.Sequential) -> nn.Module:
    model[2].base = nn.Identity()
    return model


OTHER_BASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "values": (
        lambda: make_model(base_seed=5),
        r"0\.base\.weight has different values, .*, and 1 more; build the model",
    ),
    "shape": (lambda: make_model(width=32), r"0\.base\.weight has the shape \[32, 3\] instead of \[64, 3\], "),
    "dtype": (lambda: make_model().bfloat16(), r"has the dtype torch\.bfloat16 instead of torch\.float32"),
    "missing": (lambda: without_base(make_model()), r"2\.base\.weight is missing, 2\.base\.bias is missing; "),
}


@pytest.mark.parametrize("kind", OTHER_BASES)
@pytest.mark.parametrize("how", ["resume", "init_from"])
def test_another_base_is_refused(kind: str, how: str) -> None:
    """The error names what differs, and the model is left as it was."""
    first = train()
    make, message = OTHER_BASES[kind]
    model, before = make(), make()
    trainer = make_trainer(model=model, **{"init_from": str(first.run_dir)} if how == "init_from" else {})
    with pytest.raises(CheckpointError, match=message):
        trainer.fit(resume=first.run_dir if how == "resume" else None)
    assert same_state(model, before)


def test_a_trained_parameter_that_is_missing_is_refused() -> None:
    """Only what was left out is taken from the model; for the rest, an error says what does not fit."""
    first = train()
    model = make_model()
    model.append(nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match=r"3\.weight is not among them, and 1 more"):
        make_trainer(model=model).load_checkpoint(newest(first))


def test_a_compiled_base_is_left_out_and_fits_the_plain_one() -> None:
    """Names in a checkpoint are those of the model, whatever wraps a part of it."""
    model = make_model()
    model[0].base = torch.compile(model[0].base, backend="eager")
    first = train(model=model)
    assert saved_names(newest(first)) == {*ADAPTERS, *BUFFERS}
    plain = make_trainer()
    plain.load_checkpoint(newest(first))
    assert torch.equal(plain.model[2].up.weight, model[2].up.weight)


def test_init_from_takes_the_adapters() -> None:
    """On the same base; the new run's checkpoints may hold all parameters."""
    first = train()
    second = train(trainable_only=False, init_from=str(first.run_dir), max_steps=0)
    assert same_state(second.model, first.model)


def test_what_changes_is_saved_although_it_is_frozen() -> None:
    """Code of the user may write to a parameter without a gradient, as to the target network of a momentum encoder."""

    def follow(trainer: Trainer) -> None:
        @trainer.on("step_end")
        def update(model: nn.Sequential) -> None:
            model[0].base.weight.data.mul_(0.5).add_(model[0].up.weight.detach().sum())

    uninterrupted, begun, resumed = make_trainer(max_epochs=4), make_trainer(), make_trainer()
    for trainer in (uninterrupted, begun, resumed):
        follow(trainer)
    uninterrupted.train()
    begun.train()
    assert saved_names(newest(begun)) == {*ADAPTERS, *BUFFERS, "0.base.weight"}
    resumed.fit(resume=begun.run_dir, max_epochs=4)
    assert same_state(resumed.model, uninterrupted.model)


@pytest.mark.parametrize("how", ["resume", "load_checkpoint"])
def test_weights_from_another_checkpoint_are_saved(how: str) -> None:
    """A base that only a checkpoint had cannot be left out: the next process would not have it."""
    first = train(model=make_model(base_seed=5), trainable_only=False)
    second = make_trainer()
    if how == "load_checkpoint":
        second.load_checkpoint(newest(first))
    second.fit(resume=first.run_dir if how == "resume" else None, fork=True, max_epochs=3)
    third = make_trainer()
    third.load_checkpoint(newest(second))
    assert same_state(third.model, second.model)


def test_the_optimizer_may_own_frozen_parameters() -> None:
    """As AdamW(model.parameters()) does; what is frozen counts."""
    trainer = train(optimizer=torch.optim.AdamW)
    assert saved_names(newest(trainer)) == {*ADAPTERS, *BUFFERS}


@pytest.mark.parametrize("off_at_first", [True, False])
def test_a_trained_parameter_whose_gradient_is_off_is_saved(off_at_first: bool) -> None:
    """Networks that train by turns switch `requires_grad` off and on."""
    model = make_model()
    trainer = make_trainer(model=model, optimizer=torch.optim.AdamW(model.parameters()))

    def switch(on: bool) -> None:
        for name in ADAPTERS[:2]:
            model.get_parameter(name).requires_grad_(on)

    switch(not off_at_first)
    trainer.on("train_batch_start", name="on")(lambda: switch(True))
    trainer.on("after_backward", name="off")(lambda: switch(False))
    trainer.train()
    assert saved_names(newest(trainer)) == {*ADAPTERS, *BUFFERS}


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.uint8, torch.bool, torch.float8_e4m3fn], ids=str
)
def test_frozen_parameters_of_any_dtype(dtype: torch.dtype) -> None:
    """Of odd lengths, in views that begin anywhere, transposed, empty and tied."""

    def make(value: int) -> nn.Sequential:
        model = make_model()
        values = torch.arange(30).remainder(2 + value).to(dtype)
        for name, tensor in {"odd": values[1:14], "turned": values.view(5, 6).t(), "none": values[:0]}.items():
            model[0].register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        model[0].register_parameter("tied", model[0].odd)
        return model

    first = train(model=make(0))
    assert saved_names(newest(first)) == {*ADAPTERS, *BUFFERS}
    make_trainer(model=make(0)).load_checkpoint(newest(first))
    if dtype != torch.bool:  # every other number is True either way
        with pytest.raises(
            CheckpointError, match=r"0\.odd has different values, 0\.turned has different values, 0\.tied has"
        ):
            make_trainer(model=make(1)).load_checkpoint(newest(first))

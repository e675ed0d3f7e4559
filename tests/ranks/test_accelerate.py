"""AccelerateTrainer: the same loop, events and hooks, with what an Accelerator prepares."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from rank_processes import DEVICE, run_on_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from hookline import AccelerateTrainer, HookManager, HookRunner, SimpleTrainer, Trainer, TrainingHook, get_trainer
from hookline.errors import HooklineError

SAMPLES = 22
pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the Accelerators of these tests are on the CPU")


@pytest.fixture(autouse=True)
def fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each test make an Accelerator with its own settings, which are otherwise those of the process."""
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"):
        monkeypatch.setenv(name, "false")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


class Numbered(Dataset[Any]):
    """Samples that contain their own index; each read draws noise from torch's stream."""

    def __init__(self, noise: float = 0.0) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.tensor([index / SAMPLES, index % 5 - 2.0, 1.0])
        return features + self.noise * torch.randn(3), torch.tensor([float(index % 7)])


def make_loader(noise: float = 0.0, shuffle: bool = True, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(Numbered(noise), batch_size, shuffle=shuffle)


OPTIONS: dict[str, Any] = {"loss_fn": nn.MSELoss(), "seed": 5, "console": False, "record": False}


def parts(**loading: Any) -> tuple[nn.Module, DataLoader[Any], torch.optim.Optimizer]:
    model = make_model()
    return model, make_loader(**loading), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def weights(trainer: Trainer) -> list[float]:
    return [number for param in trainer.params.values() for number in param.detach().flatten().tolist()]


class Everything(TrainingHook):
    """Records events in their order, with what they say."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_start(self, step: int) -> None:
        self.seen.append(("train start", step))

    def on_epoch_start(self, epoch: int) -> None:
        self.seen.append(("epoch", epoch))

    def on_train_batch_end(self, batch_idx: int, loss: float) -> None:
        self.seen.append(("batch", batch_idx, loss))

    def on_gradient_clip(self, grad_norm: float) -> None:
        self.seen.append(("clip", grad_norm))

    def on_step_end(self, step: int, lr: float, loss: float) -> None:
        self.seen.append(("step", step, lr, loss))

    def on_validation_end(self, metrics: dict[str, float]) -> None:
        self.seen.append(("validation", metrics["val/loss"]))

    def on_train_end(self, step: int) -> None:
        self.seen.append(("train end", step))


def schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


@pytest.mark.req("001-11", "001-44")
@pytest.mark.parametrize("options", [{}, {"accumulate": 4, "max_grad_norm": 0.1, "max_epochs": 2}])
def test_events_and_numbers_are_those_of_the_simple_trainer(options: dict[str, Any]) -> None:
    """Accumulation and clipping, too, are the options of every trainer."""
    hooks = [Everything(), Everything()]
    trained = []
    for kind, hook in zip(("simple", "accelerate"), hooks, strict=True):
        model, loader, optimizer = parts(noise=0.1)
        trainer = get_trainer(
            kind, model, loader, optimizer, "cpu", hooks=[hook], val_dataloader=make_loader(shuffle=False),
            scheduler=schedule(optimizer), **OPTIONS, **options,
        )  # fmt: skip
        trainer.train()
        trained.append(weights(trainer))
    assert hooks[0].seen == hooks[1].seen
    assert len([one for one in hooks[0].seen if one[0] == "batch"]) >= 6
    assert trained[0] == trained[1]


@pytest.mark.req("001-11")
def test_hooks_get_the_prepared_objects() -> None:
    """`AccelerateTrainer` is a `Trainer`; `state` has the prepared model and optimizer."""
    model, loader, optimizer = parts()
    trainer = AccelerateTrainer(model, loader, optimizer, accelerator=Accelerator(cpu=True), **OPTIONS)
    states: list[dict[str, Any]] = []
    trainer.on("step_end", name="look")(lambda state: states.append(state))
    trainer.train()
    assert isinstance(trainer, Trainer)
    assert states[-1]["model"] is trainer.model is model
    assert isinstance(states[-1]["optimizer"], AcceleratedOptimizer)
    assert states[-1]["optimizer"].optimizer is optimizer


def test_what_is_prepared_is_not_prepared_again() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, loader, optimizer = parts()
    prepared = accelerator.prepare(model, optimizer, loader, schedule(optimizer))
    forward = prepared[0].forward
    trainer = get_trainer(
        "accelerate", prepared[0], prepared[2], prepared[1], accelerator=accelerator, scheduler=prepared[3], **OPTIONS
    )
    assert trainer.model is prepared[0]
    assert trainer.model.forward is forward
    assert trainer.optimizers == [prepared[1]]
    trainer.train()
    assert trainer.step == 6
    assert trainer.lr == pytest.approx(0.05 * 0.5**6)


def test_precision_and_device_are_the_accelerators() -> None:
    """The weights after a bf16 run are those of a plain loop with Accelerate, bit for bit."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, loader, optimizer = accelerator.prepare(*parts(shuffle=False))
    model.eval()
    for inputs, target in loader:
        accelerator.backward(nn.functional.mse_loss(model(inputs), target))
        optimizer.step()
        optimizer.zero_grad()
    expected = [number for param in model.parameters() for number in param.detach().flatten().tolist()]

    raw, loader, optimizer = parts(shuffle=False)
    raw[2].p = 0.0
    trainer = get_trainer("accelerate", raw, loader, optimizer, accelerator=accelerator, **OPTIONS)
    kinds: set[torch.dtype] = set()
    raw[0].register_forward_hook(lambda module, inputs, output: kinds.add(output.dtype))
    trainer.train()
    assert kinds == {torch.bfloat16}
    assert trainer.options.precision == "bf16"
    assert trainer.device == torch.device("cpu")
    assert weights(trainer) == expected


def test_the_grad_scaler_is_the_accelerators() -> None:
    """Gradients are unscaled once, and an overflow skips the step and halves the Accelerator's own scale."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)  # Accelerate makes none on a CPU
    losses = iter([1.0, float("inf"), 1.0, 1.0, 1.0, 1.0])
    options = {**OPTIONS, "loss_fn": lambda output, target: (output - target).square().mean() * next(losses)}
    trainer = get_trainer("accelerate", *parts(), accelerator=accelerator, **options)
    trainer.train()
    assert trainer.skipped_steps == 1
    assert accelerator.scaler.get_scale() == 2.0**19

    def step(optimizer: torch.optim.Optimizer) -> None:
        if plain.step != 2:
            optimizer.step()

    options = {**OPTIONS, "loss_fn": lambda output, target: (output - target).square().mean()}
    plain = SimpleTrainer(*parts(), "cpu", optimizer_step=step, **options)
    plain.train()
    assert weights(trainer) == weights(plain)  # exactly: the scale is a power of two


# ---- loaders ---------------------------------------------------------------------------------------------------------


class Stop(TrainingHook):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, step: int, trainer: Any) -> None:
        if step == self.at:
            trainer.save()
            trainer.request_stop("enough")


def losses_of(trainer: Trainer) -> list[float]:
    found: list[float] = []
    trainer.on("step_end", name="losses")(lambda loss: found.append(loss))
    return found


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("stop", [9, 12])
def test_a_run_resumes_exactly(seedable: bool, prepared: bool, stop: int, tmp_path: Path) -> None:
    """Inside an epoch and between two, shuffled, with dropout, and a data set that draws from the run's streams."""
    loading = DataLoaderConfiguration(use_seedable_sampler=seedable)
    options = {**OPTIONS, "record": True, "output_dir": str(tmp_path), "max_epochs": 3}

    def make() -> Trainer:
        accelerator = Accelerator(cpu=True, dataloader_config=loading)
        model, loader, optimizer = parts(noise=0.1)
        if prepared:
            loader = accelerator.prepare_data_loader(loader)
        return get_trainer("accelerate", model, loader, optimizer, accelerator=accelerator, **options)

    whole, first, second = make(), make(), make()
    expected, before = losses_of(whole), losses_of(first)
    whole.train()
    first.add_hook(Stop(stop))
    first.train()
    assert len(before) == stop
    after = losses_of(second)
    second.fit(resume=first.run_dir)
    assert before + after == expected
    assert weights(second) == weights(whole)


def resume_shares(rank: int, folder: str) -> list[list[float]]:
    options = {**OPTIONS, "record": True, "output_dir": folder, "max_epochs": 3}

    def make() -> Trainer:
        accelerator = Accelerator(cpu=True)
        model, loader, optimizer = parts(noise=0.1)
        prepared = accelerator.prepare(model, optimizer, loader)
        return get_trainer("accelerate", prepared[0], prepared[2], prepared[1], accelerator=accelerator, **options)

    whole, first, second = make(), make(), make()
    expected, before, after = losses_of(whole), losses_of(first), losses_of(second)
    whole.train()
    first.add_hook(Stop(4))
    first.train()
    second.fit(resume=first.run_dir)
    return [expected, before + after, weights(whole), weights(second)]


def test_a_run_on_two_ranks_resumes_exactly(tmp_path: Path) -> None:
    """Inside an epoch of prepared loaders that are shuffled, with dropout, and a data set that draws."""
    for result in run_on_ranks(resume_shares, 2, str(tmp_path)):
        expected, resumed, whole, second = result.value
        assert len(expected) == 9
        assert resumed == expected
        assert second == whole


def train_shares(rank: int, how: str) -> dict[str, Any]:
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=how == "split", even_batches=True)
    )
    model, loader, optimizer = parts(shuffle=True)
    model[2].p = 0.0
    scheduler = schedule(optimizer)
    torch.manual_seed(rank)  # other streams on each rank, which have to shuffle alike
    options = {**OPTIONS, "seed": None, "val_dataloader": make_loader(shuffle=False), "max_epochs": 2}
    if how == "prepared":
        model, optimizer, loader, scheduler, options["val_dataloader"] = accelerator.prepare(
            model, optimizer, loader, scheduler, options["val_dataloader"]
        )
    trainer = get_trainer(
        "accelerate",
        model,
        loader,
        optimizer,
        accelerator=accelerator,
        scheduler=scheduler,
        sanity_batches=0,
        **options,
    )
    found: dict[str, list[Any]] = {"train": [], "val": [], "rates": []}

    def numbers(batch: Any) -> list[int]:
        return [round(float(value) * SAMPLES) for value in batch[0][:, 0]]

    trainer.on("train_batch_end", name="train")(lambda batch: found["train"].append(numbers(batch)))
    trainer.on("validation_batch_end", name="val")(lambda batch: found["val"].append(numbers(batch)))
    trainer.on("step_end", name="rates")(lambda lr: found["rates"].append(lr))
    trainer.train()
    assert isinstance(trainer.model, nn.parallel.DistributedDataParallel)
    assert not isinstance(trainer.model.module, nn.parallel.DistributedDataParallel)
    return {**found, "weights": weights(trainer)}


@pytest.mark.parametrize("how", ["bare", "prepared", "split"])
def test_two_ranks_share_the_data_and_the_model(how: str) -> None:
    """Both shuffle alike, a validation has each sample once, schedulers move once a step, and the weights are equal."""
    one, other = (result.value for result in run_on_ranks(train_shares, 2, how))
    assert one["weights"] == other["weights"]
    steps = 6 if how == "split" else 3
    assert len(one["train"]) == len(other["train"]) == 2 * steps
    for epoch in range(2):
        seen = [number for rank in (one, other) for batch in rank["train"][epoch * steps :][:steps] for number in batch]
        assert sorted(set(seen)) == list(range(SAMPLES))
        assert len(seen) == 24  # two are repeated, so that both ranks have equally many
    assert one["train"][:steps] != one["train"][steps:]
    validated = [number for rank in (one, other) for batch in rank["val"] for number in batch]
    assert sorted(validated) == sorted([*range(SAMPLES), *range(SAMPLES)])
    assert one["rates"] == pytest.approx([0.05 * 0.5**step for step in range(2 * steps)])


def train_globally(rank: int, world_size: int) -> list[float]:
    model = make_model()
    model[2].p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(Numbered(), 8 // world_size, drop_last=True)
    trainer = get_trainer("accelerate", model, loader, optimizer, "cpu", **OPTIONS, max_epochs=3, max_grad_norm=0.5)
    trainer.train()
    return weights(trainer)


def test_two_ranks_train_as_one_process_on_the_global_batch() -> None:
    alone = train_globally(0, 1)
    for result in run_on_ranks(train_globally, 2, 2):
        assert result.value == pytest.approx(alone, rel=1e-5)


def test_a_loader_that_is_divided_already_is_not_divided_again() -> None:
    sampler = torch.utils.data.DistributedSampler(Numbered(), num_replicas=2, rank=1, shuffle=False)
    loader = DataLoader(Numbered(), 4, sampler=sampler)
    model, _, optimizer = parts()
    trainer = get_trainer("accelerate", model, loader, optimizer, "cpu", **OPTIONS)
    assert trainer.train_loaders["train"] is loader


# ---- own loops -------------------------------------------------------------------------------------------------------


class Count(TrainingHook):
    def __init__(self) -> None:
        self.steps = 0

    def on_epoch_end(self, epoch: int) -> None:
        self.steps += 1


def run_own_loop(rank: int) -> list[list[int]]:
    found = []
    for make in (HookRunner, HookManager):
        registry, hooks = make(), {name: Count() for name in ("all", "zero", "one")}
        for name, ranks in (("all", None), ("zero", "zero"), ("one", [1])):
            registry.register(hooks[name], name, ranks=ranks)
        for step in range(3):
            registry.on_epoch_end(epoch=step)
        found.append([hook.steps for hook in hooks.values()])
    return found


def test_own_loops_know_their_rank() -> None:
    results = [result.value for result in run_on_ranks(run_own_loop, 2)]
    assert results == [[[3, 3, 0], [3, 3, 0]], [[3, 0, 3], [3, 0, 3]]]


# ---- clear errors ----------------------------------------------------------------------------------------------------


class OnTPU(Accelerator):
    distributed_type = "XLA"


class WithDeepSpeed(Accelerator):
    distributed_type = "DEEPSPEED"


def with_context_parallelism() -> Accelerator:
    accelerator = Accelerator(cpu=True)
    accelerator.state.parallelism_config = ParallelismConfig(cp_size=2)
    return accelerator


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            lambda: Accelerator(cpu=True, gradient_accumulation_steps=4),
            {},
            "gradient_accumulation_steps=4.*accumulate=4",
        ),
        (
            lambda: Accelerator(cpu=True),
            {"precision": "bf16"},
            "trainer.precision: 'bf16', but the Accelerator has .*'no'",
        ),
        (lambda: Accelerator(cpu=True, mixed_precision="bf16"), {"precision": "fp32"}, "'fp32', but .*'bf16'"),
        (lambda: Accelerator(cpu=True, mixed_precision="fp16"), {}, "mixed_precision='fp16', but on 'cpu'.*fp32"),
        (lambda: Accelerator(cpu=True), {"device": "meta"}, "device: 'meta', but the Accelerator uses 'cpu'"),
        (lambda: Accelerator(cpu=True), {"parallel": "ddp"}, "trainer.parallel: the Accelerator decides"),
        (lambda: OnTPU(cpu=True), {}, "configured for TPUs .*not supported"),
        (lambda: WithDeepSpeed(cpu=True), {}, "configured for DeepSpeed, which is not supported"),
        (with_context_parallelism, {}, "cp_size.*context and sequence parallelism are not supported"),
        (lambda: "cpu", {}, "accelerator: expected an accelerate.Accelerator, got str"),
    ],
)
def test_what_an_accelerator_cannot_do_here_is_one_clear_error(
    make: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(HooklineError, match=message):
        get_trainer("accelerate", *parts(), accelerator=make(), **{**OPTIONS, **options})


@pytest.mark.parametrize(("name", "what"), [("DEEPSPEED", "DeepSpeed"), ("MEGATRON_LM", "Megatron-LM")])
def test_launchers_that_ask_for_other_engines_are_refused(
    name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(HooklineError, match=f"configured for {what}, which is not supported"):
        get_trainer("accelerate", *parts(), **OPTIONS)


def test_an_accelerator_that_cannot_be_made_is_one_clear_error() -> None:
    Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(HooklineError, match=r"no Accelerator can be created: .*already been initialized"):
        get_trainer("accelerate", *parts(), "cpu", precision="fp32", **OPTIONS)


def ask_for_fsdp(rank: int) -> str:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    with pytest.raises(HooklineError) as caught:
        get_trainer("accelerate", *parts(), accelerator=accelerator, **OPTIONS)
    return str(caught.value)


def test_fsdp_that_accelerate_does_not_do_on_a_cpu_is_one_clear_error() -> None:
    for result in run_on_ranks(ask_for_fsdp, 2):
        assert "was asked for FSDP, but uses MULTI_CPU: every process would have the whole model" in result.value


def make_one_that_is_alone(rank: int) -> str:
    with pytest.raises(HooklineError) as caught:
        get_trainer("accelerate", *parts(), accelerator=Accelerator(), **OPTIONS)
    return str(caught.value)


def test_an_accelerator_that_knows_of_one_process_only_is_one_clear_error() -> None:
    """What Accelerate does without GPUs unless it is told to use the CPU: every process would train alone."""
    for result in run_on_ranks(make_one_that_is_alone, 2):
        assert "2 processes were started, but the Accelerator knows of only one" in result.value


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (Numbered()[index] for index in range(SAMPLES))


def validate_a_stream(rank: int) -> str:
    model, loader, optimizer = parts()
    with pytest.raises(HooklineError) as caught:
        get_trainer("accelerate", model, loader, optimizer, "cpu", val_dataloader=DataLoader(Stream(), 4), **OPTIONS)
    stream = DataLoader(Stream(), 4)  # training needs a limit, because nothing says that it ends alike on all ranks
    trainer = get_trainer("accelerate", model, stream, optimizer, "cpu", limit_train_batches=3, **OPTIONS)
    trainer.train()
    assert trainer.step == 3
    whole = DataLoader(Stream(), 4, drop_last=True)  # the remedy that the error names for a stream
    get_trainer("accelerate", model, loader, optimizer, "cpu", val_dataloader=whole, **OPTIONS).validate()
    return str(caught.value)


def validate_dispatched_batches(rank: int) -> str:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    model, loader, optimizer = parts()
    # Accelerate does not show that a loader of a dataset with a length drops its last batch.
    held_out = accelerator.prepare_data_loader(DataLoader(Numbered(), 4, drop_last=True))
    with pytest.raises(HooklineError) as caught:
        get_trainer("accelerate", model, loader, optimizer, accelerator=accelerator, val_dataloader=held_out, **OPTIONS)
    return str(caught.value)


def test_the_error_for_dispatched_batches_names_a_remedy_that_works() -> None:
    """`drop_last=True` helps a stream only."""
    for result in run_on_ranks(validate_dispatched_batches, 2):
        assert "a dataset with a length and no dispatch_batches" in result.value


def test_a_validation_that_would_count_samples_twice_is_one_clear_error() -> None:
    """Training on a stream is possible."""
    for result in run_on_ranks(validate_a_stream, 2):
        assert "repeats samples" in result.value


@pytest.mark.filterwarnings("ignore::FutureWarning:torch", "ignore:.isinstance.treespec")
def test_a_pipeline_is_one_clear_error() -> None:
    from torch.distributed.pipelining import SplitPoint, pipeline

    model = make_model()
    stages = pipeline(model, (torch.zeros(2, 3),), split_spec={"3": SplitPoint.BEGINNING})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for kind in ("simple", "accelerate"):
        with pytest.raises(HooklineError, match="Pipe is split into pipeline stages, which is not supported"):
            get_trainer(kind, stages, make_loader(), optimizer, "cpu", **OPTIONS)


def test_a_list_of_batches_is_each_processs_own() -> None:
    data = TensorDataset(torch.randn(6, 3), torch.randn(6, 1))
    batches = list(DataLoader(data, 2))
    model, _, optimizer = parts()
    trainer = AccelerateTrainer(model, batches, optimizer, "cpu", **OPTIONS)
    assert trainer.fit(max_steps=2, val_loaders={"a": DataLoader(data, 2), "b": batches})["status"] == "completed"
    assert sorted(trainer.validate()) == ["val/a/loss", "val/b/loss", "val/loss"]

"""Loaders that take turns: the declared order, names and counters in every event, and exact resuming anywhere."""

import multiprocessing
import random
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count, cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import builders
import numpy as np
import pytest
import torch
from builders import batches_of, make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from read_batches import ONE_WINDOW, Boastful, Reader, Unknown, make_reader
from stopped_runs import bits_of, curve_of, run_in_parts
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from hookline import GenericTrainer, ResumableSampler, SimpleTrainer, TrainingHook, read_metrics
from hookline.errors import CheckpointError, ConfigError, TrainingError

Sample = tuple[torch.Tensor, torch.Tensor]
SCHEDULES = [(schedule, end) for schedule in ("round_robin", "weighted") for end in ("longest", "shortest")]
KINDS = (list, Unknown, Boastful)


# ---- the order -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixture:
    """Lengths and kinds of some loaders, and the options that mix them."""

    lengths: list[int]
    kinds: list[type]
    schedule: str
    end: str
    weights: dict[str, float] | None = None
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        return {
            "loader_schedule": self.schedule, "loader_end": self.end, "loader_weights": self.weights,
            "seed": self.seed, "max_epochs": 2,
        }  # fmt: skip

    def loaders(self) -> dict[str, Any]:
        """Make loaders named by their index, whose batches say where they come from."""
        return {
            str(index): kind([(index, number) for number in range(length)])
            for index, (length, kind) in enumerate(zip(self.lengths, self.kinds, strict=True))
        }

    def turns(self, epoch: int) -> Iterator[int]:
        """Return the declared order of an epoch's loaders, without end."""
        if self.schedule == "round_robin":
            return cycle(range(len(self.lengths)))
        bounds = list(accumulate((self.weights or {}).get(name, 1.0) for name in self.loaders()))
        drawn = random.Random(f"loaders of epoch {epoch}, seed {self.seed}")
        return (bisect(bounds, drawn.random() * bounds[-1]) for _ in count())

    def epoch(self, epoch: int) -> list[tuple[int, int]]:
        """Return the declared batches of an epoch as (loader, batch), computed in the plainest way."""
        given, order = [0] * len(self.lengths), list[tuple[int, int]]()
        for turn in self.turns(epoch):
            if self.end == "shortest" and given[turn] == self.lengths[turn]:
                break
            order.append((turn, given[turn] % self.lengths[turn]))
            given[turn] += 1
            if self.end == "longest" and all(have >= want for have, want in zip(given, self.lengths, strict=True)):
                break
        return order


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    """Two to four loaders."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=2, max_size=4))
    kinds = [draw(st.sampled_from(KINDS)) for _ in lengths]
    schedule, end = draw(st.sampled_from(SCHEDULES))
    drawn = st.fixed_dictionaries({str(index): st.integers(1, 5) for index in range(len(lengths))})
    weights = draw(st.none() | drawn) if schedule == "weighted" else None
    return Mixture(lengths, kinds, schedule, end, weights, draw(st.integers(0, 99)))


@given(mixtures())
@settings(deadline=None, max_examples=100)
def test_a_mixture_is_what_was_declared(mixture: Mixture) -> None:
    """Over random lengths, kinds, weights and ends: order, names, and which batch is known to be an epoch's last."""
    expected = [mixture.epoch(0), mixture.epoch(1)]
    read = Reader(mixture.loaders(), accumulate=ONE_WINDOW, **mixture.options)
    assert read.by_epoch() == expected
    assert read.loaders == [(index, str(index)) for index, _ in expected[0] + expected[1]]
    if mixture.schedule == "round_robin" and set(mixture.kinds) == {list}:
        assert make_reader(mixture.loaders(), **mixture.options).total_steps == sum(map(len, expected))


@given(mixtures(), st.data())
@settings(deadline=None, max_examples=25)
def test_a_mixture_is_resumed_anywhere(mixture: Mixture, data: st.DataObject) -> None:
    """The position after any number of batches leads to the rest, with new loaders, and again from there."""
    order = mixture.epoch(0) + mixture.epoch(1)
    first, second = sorted(data.draw(st.tuples(*[st.integers(1, len(order) - 1)] * 2)))
    with TemporaryDirectory() as root:
        read = Reader(mixture.loaders(), first, root=Path(root), **mixture.options)
        assert read.batches == order[:first]
        if second > first:
            read = Reader(mixture.loaders(), second - first, read, **mixture.options)
            assert read.batches == order[first:second]
        assert Reader(mixture.loaders(), resume=read, **mixture.options).batches == order[second:]


def test_only_what_must_is_read_ahead() -> None:
    """No batch is read before its turn, unless only that tells whether the epoch is over."""
    known, unknown = DataLoader(Watched(4), batch_size=1), Unknown([1, 2, 3, 4])
    Reader({"a": known, "b": unknown}, loader_schedule="round_robin", max_steps=4)
    assert (known.dataset.read, unknown.read) == (2, 2)
    known, unknown = DataLoader(Watched(1), batch_size=1), Unknown([1, 2, 3, 4])
    Reader({"a": known, "b": unknown}, loader_schedule="round_robin", max_steps=4)
    assert (known.dataset.read, unknown.read) == (2, 3)


@pytest.mark.parametrize("end", ["longest", "shortest"])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_mixture_draws_in_the_order_of_a_plain_loop(end: str, accumulate: int) -> None:
    """Streams of one length that take turns, and a forward pass that draws, use one random stream in plain order."""
    torch.manual_seed(7)
    expected = [torch.rand(2).tolist() for _ in range(8)]  # a batch and its forward pass, eight times

    class Stream(IterableDataset[float]):
        def __iter__(self) -> Iterator[float]:
            return (torch.rand(()).item() for _ in range(4))

    drawn: list[list[float]] = []

    def step(model: Any, batch: float) -> torch.Tensor:
        drawn.append([batch, torch.rand(()).item()])
        return model.weight.sum()

    options = {"loader_schedule": "round_robin", "loader_end": end, "accumulate": accumulate}
    trainer = make_reader({"a": Stream(), "b": Stream()}, step_fn=step, **options)
    torch.manual_seed(7)
    trainer.train()
    assert drawn == [pytest.approx(pair) for pair in expected]


class Watched(Dataset[torch.Tensor]):
    """Counts what is read of it."""

    def __init__(self, size: int) -> None:
        self.size, self.read = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        return torch.tensor(index)


@pytest.mark.parametrize(
    ("items", "said"), [([], "check the dataset"), (None, "an iterator, which can be read only")], ids=str
)
def test_a_loader_that_gives_nothing_is_named(items: Any, said: str) -> None:
    """Found at its turn when its length is not known; an iterator has nothing left when it should begin again."""
    loader = Unknown([]) if items is not None else iter([1])
    with pytest.raises(TrainingError, match=f"the training loader 'b' yielded no batch.*{said}"):
        Reader({"a": [1, 2, 3], "b": loader}, loader_schedule="round_robin")


def test_another_schedule_or_other_loaders_cannot_resume(tmp_path: Path) -> None:
    """Half an epoch says nothing about the rest of another one."""
    read = Reader({"a": [1, 2], "b": [3]}, 1, root=tmp_path, loader_schedule="round_robin")
    with pytest.raises(CheckpointError, match="loader_schedule='round_robin', which is 'weighted' now"):
        Reader({"a": [1, 2], "b": [3]}, resume=read, loader_schedule="weighted")
    with pytest.raises(CheckpointError, match="loader_schedule='round_robin', which is 'sequential' now"):
        Reader({"a": [1, 2], "b": [3]}, resume=read)
    with pytest.raises(CheckpointError, match="was mixing the loaders a, b; now there are b, a"):
        Reader({"b": [3], "a": [1, 2]}, resume=read, loader_schedule="round_robin")


@pytest.mark.parametrize(("kind", "left"), [*((kind, 1) for kind in KINDS), (list, 2)], ids=str)
def test_a_mixture_does_not_resume_with_a_shorter_loader(kind: type, left: int, tmp_path: Path) -> None:
    """Shorter than what was trained on, or than a certain length had been: it is named, with both numbers."""
    read = Reader({"a": kind([1, 2, 3]), "b": kind([4, 5, 6])}, 4, root=tmp_path, loader_schedule="round_robin")
    loaders = {"a": kind([1, 2, 3]), "b": kind([4, 5, 6][:left])}
    with pytest.raises(
        CheckpointError, match=f"trained on 2 batches of the loader 'b'.* has only {left}: resume with the"
    ):
        Reader(loaders, resume=read, loader_schedule="round_robin")


@pytest.mark.parametrize(("before", "now"), [(list, Unknown), (Unknown, list)])
def test_a_loader_that_was_a_list_may_resume_as_another(before: type, now: type, tmp_path: Path) -> None:
    """What was read ahead then and is not now, or the other way round, comes all the same."""
    read = Reader({"a": before([1, 2, 3]), "b": before([4, 5, 6])}, 3, root=tmp_path, loader_schedule="round_robin")
    loaders = {"a": now([1, 2, 3]), "b": now([4, 5, 6])}
    assert Reader(loaders, resume=read, loader_schedule="round_robin").batches == [5, 3, 6]


def test_a_mixture_is_not_resumed_after_its_limit(tmp_path: Path) -> None:
    """A resumed run may have a lower limit for its epochs."""
    loaders, options = {"a": [1, 2, 3], "b": [4, 5, 6]}, {"loader_schedule": "round_robin"}
    read = Reader(loaders, 4, root=tmp_path, **options)
    with pytest.raises(CheckpointError, match="had read 4 batches of an epoch, and epochs are cut off after 3 now"):
        Reader(loaders, resume=read, limit_train_batches=3, **options)


# ---- in a run ------------------------------------------------------------------------------------------------------


def numbered(count: int, first: int = 0) -> list[Sample]:
    return [(torch.full((2, 1), float(first + number)), torch.zeros(2, 1)) for number in range(count)]


def make_small(loaders: Any, **options: Any) -> SimpleTrainer:
    """A model that learns nothing, so that a batch's loss says which batch it was."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return builders.make_trainer(model=model, data=loaders, lr=0.0, **{"loader_schedule": "round_robin", **options})


@pytest.mark.req("002-42", "002-56", "002-57")
def test_every_event_knows_its_loader() -> None:
    """Index and name are those of the batch, at every event of it and under both spellings, validation in between."""

    class Watch(TrainingHook):
        def __init__(self) -> None:
            self.seen: list[tuple[str, int, str, float]] = []

        def note(self, event: str, index: int, name: str, batch: Any) -> None:
            self.seen.append((event, index, name, batch[0][0].item()))

        def on_train_batch_start(self, batch: Any, dataloader_idx: int, dataloader_name: str) -> None:
            self.note("start", dataloader_idx, dataloader_name, batch)

        def on_after_backward(self, batch: Any, dataloader_idx: int, dataloader_name: str) -> None:
            self.note("backward", dataloader_idx, dataloader_name, batch)

        def on_train_batch_end(self, batch: Any, loader_idx: int, loader_name: str) -> None:
            self.note("end", loader_idx, loader_name, batch)

        def on_step_end(self, batch: Any, loader_idx: int, loader_name: str) -> None:
            self.note("step", loader_idx, loader_name, batch)

    trainer = make_small({"a": numbered(2), "b": numbered(3, 10)}, val_loaders=numbered(1), validate_every=1)
    trainer.add_hook(watch := Watch())
    trainer.train()
    expected = [(0, "a", 0.0), (1, "b", 10.0), (0, "a", 1.0), (1, "b", 11.0), (0, "a", 0.0), (1, "b", 12.0)]
    assert watch.seen == [(event, *where) for where in expected for event in ("start", "backward", "end", "step")]


def test_losses_and_counters_by_loader() -> None:
    """train/<loader>/loss at the steps of that loader; batches counted over epochs; both in the record."""
    trainer = make_small({"a": numbered(2, 1), "b": numbered(3, 10)}, max_epochs=2)
    trainer.train()
    lines = [line for line in trainer.record.metrics if "train/loss" in line]
    told = [{name: value for name, value in line.items() if name.endswith("/loss")} for line in lines[:2]]
    assert told == [{"train/loss": 1.0, "train/a/loss": 1.0}, {"train/loss": 100.0, "train/b/loss": 100.0}]
    assert trainer.loader_batches == {"a": 6, "b": 6}
    assert trainer.record.run["counters"]["loader_batches"] == {"a": 6, "b": 6}


def test_a_window_of_several_loaders() -> None:
    """Each loader's loss is the weighted mean over its own micro-batches of the step."""
    loaders = {"a": [(torch.ones(1, 1), torch.zeros(1, 1)), (torch.full((3, 1), 2.0), torch.zeros(3, 1))],
               "b": [(torch.full((2, 1), 3.0), torch.zeros(2, 1))]}  # fmt: skip
    trainer = make_small(loaders, accumulate=3, loss_weight="samples", limit_train_batches=3)
    trainer.train()
    (line,) = [line for line in trainer.record.metrics if "train/loss" in line]
    assert line["train/a/loss"] == pytest.approx((1 * 1 + 3 * 4) / 4)
    assert line["train/b/loss"] == pytest.approx(9.0)
    assert line["train/loss"] == pytest.approx((1 + 12 + 18) / 6)


def test_one_loader_has_no_separate_loss() -> None:
    """Its loss is train/loss already; its batches are counted under its name all the same."""
    trainer = make_small(numbered(3))
    trainer.train()
    names = {name for line in trainer.record.metrics for name in line}
    assert "train/train/loss" not in names
    assert trainer.loader_batches == {"train": 3}


@pytest.mark.parametrize("schedule", ["sequential", "round_robin", "weighted"])
def test_a_schedule_by_loader(schedule: str) -> None:
    """Due at every second batch of b, and at no other batch in between; counted over epochs."""
    trainer = make_small({"a": numbered(4), "b": numbered(3, 10)}, loader_schedule=schedule, max_epochs=3)
    all_names: list[str] = []
    due: list[int] = []
    trainer.on("train_batch_end", name="all")(lambda dataloader_name: all_names.append(dataloader_name))
    trainer.on("train_batch_end", name="some", every="2 batches of b")(lambda: due.append(len(all_names) - 1))
    trainer.train()
    of_b = [index for index, name in enumerate(all_names) if name == "b"]
    assert due == of_b[1::2] and len(due) >= 4


def test_a_schedule_of_a_loader_that_is_not_there() -> None:
    """Refused when the run begins, and of a hook that is added later when it is added."""
    trainer = make_small({"books": numbered(2), "web": numbered(2)})
    handle = trainer.add_hook(lambda: None, "probe", event="step_end", every="2 batches of book")
    with pytest.raises(ConfigError, match=r"probe\.every: every 2 batches of book: .*did you mean 'books'"):
        trainer.train()
    handle.remove()
    seen: list[str] = []

    @trainer.on("train_start")
    def add(trainer: Any) -> None:
        try:
            trainer.add_hook(lambda: None, "late", event="step_end", start="2 batches of webs")
        except ConfigError as error:
            seen.append(str(error))

    trainer.train()
    assert "did you mean 'web'" in seen[0]


@pytest.mark.parametrize(("schedule", "end"), SCHEDULES)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_loaders_without_a_length(schedule: str, end: str, accumulate: int) -> None:
    """The same batches come as from lists, the last window of an epoch short if need be."""

    def seen(kind: type) -> tuple[list[float], int]:
        loaders = {"a": kind(numbered(2)), "b": kind(numbered(5, 10))}
        trainer = make_small(loaders, loader_schedule=schedule, loader_end=end, accumulate=accumulate, max_epochs=2)
        values: list[float] = []
        trainer.on("train_batch_end")(lambda batch: values.append(batch[0][0].item()))
        trainer.train()
        return values, trainer.step

    assert seen(Unknown) == seen(list) == seen(Boastful)


def test_mixed_epochs_can_be_cut_short() -> None:
    """After a count or a share of what the turns come to; a share of drawn turns is refused; overfitting holds some."""
    loaders = {"a": numbered(2), "b": numbered(6)}
    for options, steps in (({"limit_train_batches": 5}, 5), ({"limit_train_batches": 0.5}, 6), ({}, 12)):
        trainer = make_small(loaders, **options)
        assert trainer.total_steps == steps
        trainer.train()
        assert trainer.step == steps
    trainer = make_small({"a": numbered(2), "b": Unknown(numbered(6))}, overfit_batches=3)
    assert trainer.total_steps == 6
    trainer.train()
    assert trainer.loader_batches == {"a": 3, "b": 3}
    with pytest.raises(TrainingError, match=r"limit_train_batches=0\.5: loaders are drawn by weight; pass an integer"):
        make_small(loaders, loader_schedule="weighted", limit_train_batches=0.5)


@pytest.mark.req("002-49")
def test_fit_takes_one_a_list_or_a_dict() -> None:
    """And the weights are checked against what is given."""
    model = nn.Linear(1, 1)
    config = {"loader_schedule": "weighted", "loader_weights": {"0": 3, "1": 1.5}, "record": False, "console": False}
    trainer = GenericTrainer(
        config, model, torch.optim.SGD(model.parameters(), 0.1), device="cpu", loss_fn=nn.functional.mse_loss
    )
    trainer.fit([DataLoader(Pairs()), DataLoader(Pairs())], max_steps=4)
    assert set(trainer.loader_batches) == {"0", "1"}
    with pytest.raises(ConfigError, match=r"loader_weights\.0: no such loader"):
        trainer.fit({"a": numbered(2), "b": numbered(2)}, max_steps=8)


class Pairs(Dataset[Sample]):
    """Sixteen samples; draws from torch's and NumPy's global streams for each, as augmentations do."""

    def __init__(self, seed: int = 1) -> None:
        ((self.x, self.y),) = batches_of(16, features=1, seed=seed)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Sample:
        return self.x[index] + 0.1 * torch.randn(1) + float(np.random.rand()), self.y[index]


# ---- resuming -------------------------------------------------------------------------------------------------------


class Stateful:
    """Saves its position; starts again after its end, in another order each time."""

    def __init__(self) -> None:
        self.epoch, self.given, self.restored = 0, 0, False

    def __iter__(self) -> Iterator[Sample]:
        self.given = self.given if self.restored else 0
        self.restored = False
        order = torch.randperm(5, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.given < 5:
            self.given += 1
            yield numbered(5)[order[self.given - 1]]
        self.epoch, self.given = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.given, self.restored = state["epoch"], state["given"], True


class Stream(Unknown):
    """Of unknown length, shuffled by the global stream, and every batch is augmented by it."""

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(len(self.items)).tolist():
            x, y = self.items[index]
            yield x + torch.randn(1), y


def shuffling(size: int, **more: Any) -> DataLoader[Any]:
    return DataLoader(Subset(Pairs(size), range(size)), batch_size=2, **{"shuffle": True, **more})


def shared() -> dict[str, Any]:
    """Two loaders that share one generator."""
    stream = torch.Generator().manual_seed(3)
    return {"a": shuffling(6, generator=stream), "b": shuffling(10, generator=stream)}


def computed() -> dict[str, Any]:
    data = Subset(Pairs(), range(6))
    sampler = ResumableSampler(data, seed=2)
    return {"a": DataLoader(data, batch_size=2, sampler=sampler), "b": shuffling(10)}


LOADERS: dict[str, Any] = {
    "shuffled": lambda: {"a": shuffling(6), "b": shuffling(10), "c": shuffling(3)},
    "one generator": shared,
    "computed order": computed,
    "unknown length": lambda: {"a": Stream(numbered(3)), "b": shuffling(10), "c": Stream(numbered(4, 10))},
    "stateful": lambda: {"a": Stateful(), "b": shuffling(6)},
}


def make_trainer(loaders: Any, root: Path, **options: Any) -> SimpleTrainer:
    options = {
        "optimizer": partial(torch.optim.AdamW, lr=1e-2), "max_epochs": 3, "seed": 5, "sanity_batches": 0,
        "val_loaders": {"x": numbered(2), "y": numbered(1)}, "validate_every": 4, **options,
    }  # fmt: skip
    model = make_model(1, 8, 1, between=partial(nn.Dropout, 0.5))
    return builders.make_trainer(model=model, data=loaders, record=True, output_dir=str(root), **options)


class Tally(TrainingHook):
    """Called at every third batch of b, also over resumes."""

    saves = ("received",)

    def __init__(self) -> None:
        self.received: list[int] = []

    def on_train_batch_end(self, step: int) -> None:
        self.received.append(step)


def fingerprint(trainer: SimpleTrainer) -> dict[str, Any]:
    """The whole curve, every bit of the model, the counters, and when the hook was due."""
    bits, received = bits_of(trainer.model.state_dict().values()), trainer.hooks.get("tally").received
    return {"curve": curve_of(trainer), "bits": bits, "batches": trainer.loader_batches, "received": received}


def stopped(make_loaders: Any, root: Path, stops: list[int], **options: Any) -> SimpleTrainer:
    """The run with its scheduled hook, stopped at each of the steps."""

    def make() -> SimpleTrainer:
        trainer = make_trainer(make_loaders(), root, **options)
        trainer.add_hook(Tally(), "tally", every="3 batches of b")
        return trainer

    return run_in_parts(make, stops)


@pytest.mark.parametrize(
    ("kind", "accumulate"), [*((kind, 1) for kind in LOADERS), ("unknown length", 2), ("stateful", 2)], ids=str
)
@pytest.mark.parametrize(("schedule", "end"), SCHEDULES)
def test_a_mixture_resumes_bit_for_bit(kind: str, schedule: str, end: str, accumulate: int, tmp_path: Path) -> None:
    """Stopped three times, twice inside an epoch: the same curve, weights, counters and due hooks."""
    options = {"loader_schedule": schedule, "loader_end": end, "accumulate": accumulate}
    whole = stopped(LOADERS[kind], tmp_path / "whole", [], **options)
    parts = stopped(LOADERS[kind], tmp_path / "parts", [2, whole.step // 2, whole.step - 1], **options)
    assert parts.step == whole.step >= 4
    assert fingerprint(parts) == fingerprint(whole)


IN_SEQUENCE: dict[str, Any] = {
    "both stateful": lambda: {"a": Stateful(), "b": Stateful()},
    "the first stateful": lambda: {"a": Stateful(), "b": numbered(3)},
    "the second stateful": lambda: {"a": numbered(3), "b": Stateful()},
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", IN_SEQUENCE)
def test_loaders_in_sequence_resume_with_the_states_of_all(kind: str, accumulate: int, tmp_path: Path) -> None:
    """Stopped inside the first loader of an epoch and inside the second, those before and after keep their orders."""
    options = {"loader_schedule": "sequential", "accumulate": accumulate, "max_epochs": 3}
    whole = Reader(IN_SEQUENCE[kind](), **options).batches
    read = Reader(IN_SEQUENCE[kind](), 2, root=tmp_path, **options)
    parts = read.batches
    for stop_at in (7, 9, 13, 17, None):
        read = Reader(IN_SEQUENCE[kind](), stop_at and max(stop_at - len(parts), 1), resume=read, **options)
        parts = parts + read.batches
    assert [x[0].item() for x, _ in parts] == [x[0].item() for x, _ in whole]


def test_with_workers(tmp_path: Path) -> None:
    """Each loader's workers draw from separate streams, which are restored."""

    def loaders() -> dict[str, Any]:
        return {"a": shuffling(4, num_workers=1), "b": shuffling(6, num_workers=1)}

    options = {"loader_schedule": "round_robin", "max_epochs": 2}
    whole = stopped(loaders, tmp_path / "whole", [], **options)
    parts = stopped(loaders, tmp_path / "parts", [5], **options)
    assert fingerprint(parts) == fingerprint(whole)


@pytest.mark.parametrize("schedule", ["sequential", "round_robin"])
def test_no_worker_outlives_a_run_that_stops_inside_an_epoch(schedule: str) -> None:
    """Workers that are left to the garbage collector would take seconds to end."""
    loaders = {"a": shuffling(8, num_workers=1), "b": shuffling(8, num_workers=1)}
    make_small(loaders, loader_schedule=schedule, max_steps=3).train()
    assert multiprocessing.active_children() == []


class Endless(IterableDataset[Any]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[Sample]:
        return cycle(Pairs())


WITH_WORKERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "one loader": (lambda: shuffling(8, num_workers=1), {}),
    "unknown length": (lambda: DataLoader(Endless(), 2, num_workers=1), {"accumulate": 2}),
    **{
        schedule: (lambda: [shuffling(8, num_workers=1), shuffling(8, num_workers=1)], {"loader_schedule": schedule})
        for schedule in ("sequential", "round_robin")
    },
}


@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_no_worker_outlives_a_run_that_fails(kind: str) -> None:
    """Workers end before on_train_end, although the exception's traceback still holds the frames of the loop."""
    make_loaders, options = WITH_WORKERS[kind]
    trainer, workers = make_small(make_loaders(), max_steps=4, **options), []

    @trainer.on("step_end", on_error="raise")
    def fail(step: int) -> None:
        if step == 2:
            raise ValueError(f"{len(multiprocessing.active_children())} workers")

    @trainer.on("train_end")
    def count() -> None:
        workers.extend(multiprocessing.active_children())

    with pytest.raises(ValueError, match=r"[12] workers"):
        trainer.train()
    assert workers == []


@pytest.mark.parametrize("kind", ["shuffled", "stateful"])
@pytest.mark.parametrize(("schedule", "end"), SCHEDULES)
def test_a_mixture_resumes_between_epochs(kind: str, schedule: str, end: str, tmp_path: Path) -> None:
    """The next epoch is that of the uninterrupted run, also with loaders that were left inside their data."""
    options = {"loader_schedule": schedule, "loader_end": end}
    whole = stopped(LOADERS[kind], tmp_path / "whole", [], **options)
    ends = [int(line["step"]) for line in read_metrics(whole.run_dir) if "train/epoch_loss" in line]
    parts = stopped(LOADERS[kind], tmp_path / "parts", [2, ends[0], ends[0] + 1, ends[1]], **options)
    assert len(ends) == 3 and fingerprint(parts) == fingerprint(whole)


@pytest.mark.parametrize("what", ["random streams", "turns"])
def test_the_comparison_can_fail(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders that begin otherwise, or turns that are not restored, give another curve."""
    options = {"loader_schedule": "weighted"}
    whole = stopped(LOADERS["shuffled"], tmp_path / "whole", [], **options)
    if what == "turns":
        monkeypatch.setattr("hookline.trainer.data.loaders.Weighted.restore", lambda turns, state: None)
    else:
        monkeypatch.setattr("hookline.trainer.data.epoch_batches.restore_start", lambda loaders, state: None)
    parts = stopped(LOADERS["shuffled"], tmp_path / "parts", [5], **options)
    assert fingerprint(parts) != fingerprint(whole)


def test_fit_continues_in_the_same_process(tmp_path: Path) -> None:
    """A run that was stopped inside an epoch and is fitted again takes the turns that are left."""
    options = {"loader_schedule": "round_robin"}
    whole = make_trainer(LOADERS["shuffled"](), tmp_path / "whole", seed=None, **options)
    parts = make_trainer(LOADERS["shuffled"](), tmp_path / "parts", seed=None, **options)
    seen: dict[Any, list[str]] = {whole: [], parts: []}
    for trainer, names in seen.items():
        trainer.on("train_batch_end", name="eye")(lambda dataloader_name, names=names: names.append(dataloader_name))
        torch.manual_seed(4), np.random.seed(4)
        if trainer is parts:
            trainer.fit(max_steps=7)
        trainer.fit(max_steps=20)
    assert seen[whole] == seen[parts]
    assert [p.tolist() for p in whole.model.parameters()] == [p.tolist() for p in parts.model.parameters()]

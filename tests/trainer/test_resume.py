"""A run that is stopped anywhere resumes to the same curve, weights and optimizer state, bit for bit."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import builders
import numpy as np
import pytest
import torch
from builders import batches_of, make_batches
from fresh_process import start, status_of
from read_batches import make_reader
from stopped_runs import SaveAndStop, bits_of, curve_of, run_in_parts
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from hookline import CheckpointHook, EarlyStopping, ResumableSampler, SimpleTrainer, TrainingHook, read_metrics
from hookline.errors import CheckpointError
from hookline.record import read_json

BATCHES = 8  # of an epoch; there are two
Sample = tuple[torch.Tensor, torch.Tensor]


def samples(seed: int = 1) -> TensorDataset:
    return TensorDataset(*batches_of(32, seed=seed)[0])


class Augmented(Dataset[Sample]):
    """Draws from torch's and NumPy's global streams for every sample, as augmentations do."""

    def __init__(self) -> None:
        self.plain = samples()

    def __len__(self) -> int:
        return len(self.plain)

    def __getitem__(self, index: int) -> Sample:
        x, y = self.plain[index]
        return x + 0.1 * torch.randn(3) + float(np.random.rand()), y


class StatefulLoader:
    """Saves its position, also in the middle of an epoch; starts again when iterated after its end."""

    def __init__(self) -> None:
        self.epoch, self.given, self.restored = 0, 0, False

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Sample]:
        if not self.restored:
            self.given = 0
        self.restored = False
        order = torch.randperm(32, generator=torch.Generator().manual_seed(self.epoch))
        while self.given < BATCHES:
            rows = order[4 * self.given : 4 * self.given + 4]
            self.given += 1
            yield samples()[rows]
        self.epoch, self.given = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.given, self.restored = state["epoch"], state["given"], True


class Counting(Sampler[int]):
    """A sampler whose order depends on how often it was used, and which can say so."""

    def __init__(self) -> None:
        self.used = 0

    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Iterator[int]:
        self.used += 1
        return iter(torch.randperm(32, generator=torch.Generator().manual_seed(self.used)).tolist())

    def state_dict(self) -> dict[str, int]:
        return {"used": self.used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.used = state["used"]


class Modest(Sampler[list[int]]):
    """Draws its batches, and gives more of them than it says."""

    def __init__(self, first: int, size: int) -> None:
        self.first, self.size = first, size

    def __len__(self) -> int:
        return self.size // 4 - 2

    def __iter__(self) -> Iterator[list[int]]:
        order = (torch.randperm(self.size) + self.first).tolist()
        return (order[start : start + 4] for start in range(0, self.size, 4))


def modest(first: int = 0, size: int = 32) -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_sampler=Modest(first, size))


def shuffling(data: Any = None, **more: Any) -> DataLoader[Any]:
    more = {"shuffle": True, "batch_size": 4, **more}
    return DataLoader(samples() if data is None else data, **more)


def counted(data: Any, **more: Any) -> DataLoader[Any]:
    draws = more.pop("dataset_draws", False)
    return shuffling(data, shuffle=False, sampler=ResumableSampler(data, seed=4, dataset_draws=draws), **more)


LOADERS: dict[str, Any] = {
    "global stream": shuffling,
    "own generator": lambda: shuffling(generator=torch.Generator().manual_seed(7)),
    "augmented": lambda: shuffling(Augmented()),
    "two loaders": lambda: {"a": shuffling(torch.utils.data.Subset(Augmented(), range(16))),
                            "b": shuffling(torch.utils.data.Subset(Augmented(), range(16, 32)))},
    "counted": lambda: counted(Augmented()),
    "modest": modest,
    "two modest": lambda: {"a": modest(0, 16), "b": modest(16, 16)},
    "stateful loader": StatefulLoader,
    "stateful sampler": lambda: shuffling(shuffle=False, sampler=Counting()),
    "workers": lambda: shuffling(Augmented(), num_workers=2),
    "workers, counted": lambda: counted(Augmented(), num_workers=2, dataset_draws=True),
    "workers, counted, no draws": lambda: counted(samples(), num_workers=2),
}  # fmt: skip


def make_trainer(loaders: Any, root: Path, *hooks: Any, **options: Any) -> SimpleTrainer:
    torch.manual_seed(0)
    options = {
        "model": nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)),
        "optimizer": partial(torch.optim.AdamW, lr=1e-2), "scheduler": partial(CosineAnnealingLR, T_max=16),
        "max_epochs": 2, "seed": 5, "val_dataloader": [samples(2)[:8], samples(2)[8:]], **options,
    }  # fmt: skip
    return builders.make_trainer(*hooks, data=loaders, record=True, output_dir=str(root), **options)


def train(loaders: Any, root: Path, *hooks: Any, **options: Any) -> SimpleTrainer:
    trainer = make_trainer(loaders, root, *hooks, **options)
    trainer.train()
    return trainer


def fingerprint(trainer: SimpleTrainer) -> dict[str, Any]:
    """The whole curve, and every bit of model and optimizer."""
    state = trainer.optimizers[0].state_dict()["state"]
    tensors = [*trainer.model.state_dict().values(), *(value for entry in state.values() for value in entry.values())]
    return {"curve": curve_of(trainer), "bits": bits_of(tensors)}


def stopped(make_loaders: Any, root: Path, stops: list[int], **options: Any) -> SimpleTrainer:
    """The run, stopped at each of the steps."""
    return run_in_parts(lambda: make_trainer(make_loaders(), root, **options), stops)


STOPS = {
    "once": [3], "twice": [3, 5], "five times in an epoch": [1, 2, 4, 5, 7], "between epochs": [8], "both": [7, 8, 9],
}  # fmt: skip
CASES = [(kind, stops) for kind in LOADERS for stops in (["both"] if "workers" in kind else STOPS)]


@pytest.mark.parametrize(("kind", "stops"), CASES)
def test_a_stopped_run_ends_where_an_unbroken_one_does(kind: str, stops: str, tmp_path: Path) -> None:
    """Shuffling, augmentation, dropout, batch norm, schedule, optimizer and the streams of workers continue."""
    whole = train(LOADERS[kind](), tmp_path / "whole")
    parts = stopped(LOADERS[kind], tmp_path / "parts", STOPS[stops])
    assert parts.step == whole.step == 2 * BATCHES
    assert fingerprint(parts) == fingerprint(whole)


@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16"}, {"precision": "fp16"}, {"accumulate": 3}, {"accumulate": 2, "precision": "fp16"},
     {"validate_every": 3, "max_grad_norm": 0.1}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", [name for name in LOADERS if "workers" not in name and "stream" not in name])
def test_with_other_options(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Mixed precision with and without a scaler, windows (and reading ahead for them), clipping, validation."""
    whole = train(LOADERS[kind](), tmp_path / "whole", **options)
    middle = whole.step // 2
    parts = stopped(LOADERS[kind], tmp_path / "parts", [1, middle, middle + 1], **options)
    assert fingerprint(parts) == fingerprint(whole)


def test_the_comparison_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the restored random streams the curve is another one."""
    whole = train(shuffling(), tmp_path / "whole")
    monkeypatch.setattr("hookline.trainer.sections.restore_rng", lambda state: None)
    assert fingerprint(stopped(shuffling, tmp_path / "parts", [3])) != fingerprint(whole)


# ---- counters --------------------------------------------------------------------------------------------------------


def counters(root: Path, stops: list[int]) -> tuple[dict[str, Any], Any]:
    """Return the counters of a run in three epochs of seven batches, and what its hooks saw; stopped at each step.

    Each epoch has an infinite loss, every step but the last of an epoch has two batches, and two steps are skipped.
    """
    every_fourth: list[tuple[int, int]] = []
    at_the_end: list[int] = []

    def make() -> SimpleTrainer:
        batches = [torch.tensor(value) for value in (1.0, torch.inf, 3.0, 4.0, 5.0, 6.0, 7.0)]
        trainer = make_reader(
            batches, step_fn=lambda model, batch: model.weight.sum() + batch, count_tokens=lambda batch: 5,
            record=True, output_dir=str(root), max_epochs=3, accumulate=2,
        )  # fmt: skip
        skips = ["2 steps", "7 steps"]
        trainer.on("gradients_ready", name="skips", at=skips)(lambda trainer: trainer.skip_step("tested"))
        trainer.on("train_batch_end", name="fourth", every="4 batches")(
            lambda epoch, batch_idx: every_fourth.append((epoch, batch_idx))
        )
        trainer.on("train_end", name="end")(lambda tokens_seen: at_the_end.append(tokens_seen))
        return trainer

    trainer = run_in_parts(make, stops)
    described = read_json(trainer.run_dir / "run.json")["counters"]
    assert described.pop("seconds") >= 0
    return described, (every_fourth, at_the_end[-1])


@pytest.mark.req("004-20")
@pytest.mark.parametrize("stops", [[3], [4], [6], [9], [2, 4, 7, 10]], ids=str)
def test_counters_continue_after_a_resume(stops: list[int], tmp_path: Path) -> None:
    """Tokens, batches, skipped steps and non-finite losses, and the batches at which a scheduled hook is due."""
    described, (every_fourth, at_the_end) = counters(tmp_path, stops)
    assert described == {
        "step": 12, "epoch": 2, "batches": 21, "tokens_seen": 105, "skipped_steps": 2, "failed_saves": 0,
        "non_finite_losses": 3, "hook_failures": 0,
    }  # fmt: skip
    assert every_fourth == [(0, 3), (1, 0), (1, 4), (2, 1), (2, 5)]  # batches 4, 8, 12, 16 and 20 of the run
    assert at_the_end == 105


@pytest.mark.parametrize("stops", [[], [3], [3, 7, 9]], ids=str)
def test_elapsed_seconds_continue_after_a_resume(
    stops: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of earlier attempts count for schedules and in the record; the time between two attempts does not."""
    now, due = [0.0], list[int]()
    monkeypatch.setattr("hookline.run.progress.monotonic", lambda: now[0])

    def make() -> SimpleTrainer:
        now[0] += 1000.0
        trainer = make_trainer(shuffling(), tmp_path)
        trainer.on("train_batch_start", name="clock")(lambda: now.append(now.pop() + 10.0))  # a step takes ten seconds
        trainer.on("step_end", name="due", every="40 seconds")(lambda step: due.append(step))
        return trainer

    trainer = run_in_parts(make, stops)
    assert read_json(trainer.run_dir / "run.json")["counters"]["seconds"] == 160.0
    assert due == [5, 9, 13]  # decided when a batch begins, after 40, 80 and 120 seconds


# ---- what can be resumed ---------------------------------------------------------------------------------------------


def test_only_the_run_that_was_resumed_says_so(tmp_path: Path) -> None:
    """The next run of the same trainer continues the count, and is not a resumed one."""
    first = make_trainer(shuffling(), tmp_path)
    first.add_checkpointing(save_every_n_steps=2)
    first.train()
    again, seen = make_trainer(shuffling(), tmp_path), list[bool]()
    again.on("train_start")(lambda resumed: seen.append(resumed))
    again.fit(resume=first.run_dir, max_epochs=3)
    again.fit(max_epochs=4)
    assert seen == [True, False]


def test_a_shorter_loader_cannot_resume(tmp_path: Path) -> None:
    """In a new trainer or the same one: the message has both numbers. What is just long enough is welcome."""
    batches = list(shuffling())
    first = train(batches, tmp_path, SaveAndStop(4), max_epochs=1)
    said = "the run had trained on 4 batches of the loader 'train', inside an epoch, and now this loader has only 3:"
    with pytest.raises(CheckpointError, match=said):
        make_trainer(batches[:3], tmp_path).fit(resume=first.run_dir)
    with pytest.raises(CheckpointError, match="had read 4 batches of an epoch, and epochs are cut off after 3 now"):
        make_trainer(batches, tmp_path, limit_train_batches=3).fit(resume=first.run_dir)
    with pytest.raises(CheckpointError, match=said):
        first.fit(batches[:3])
    first.fit(batches[:5])
    assert first.step == 5


def test_a_counted_sampler_reads_nothing_twice(tmp_path: Path) -> None:
    """A resumed run begins in the middle of the epoch; a drawing sampler's batches are read again and thrown away."""

    class Watched(Augmented):
        def __getitem__(self, index: int) -> Sample:
            read.append(index)
            return super().__getitem__(index)

    counts = {}
    for name, make in (("counted", counted), ("drawn", shuffling)):
        read: list[int] = []
        stopped(lambda make=make: make(Watched()), tmp_path / name, [5])
        counts[name] = len(read)
    assert counts == {"counted": 64, "drawn": 64 + 20}


class Stream(IterableDataset[Sample]):
    def __iter__(self) -> Iterator[Sample]:
        return iter([samples()[index] for index in range(32)])


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (lambda: DataLoader(Stream(), batch_size=4), "has an IterableDataset without state_dict"),
        (lambda: iter([samples()[:4]] * 8), "is an iterator, which can be read only once"),
        (lambda: shuffling(num_workers=1, persistent_workers=True), "keeps its workers between epochs"),
        (lambda: shuffling(num_workers=1, in_order=False), "returns batches as they become ready"),
        (StatefulLoader, "is cut off before its end"),
        (shuffling, None),
        (StatefulLoader, None),
        (lambda: [samples()[:4]] * 8, None),
    ],
    ids=["iterable dataset", "iterator", "kept workers", "out of order", "cut off", "shuffling", "stateful", "list"],
)
def test_what_cannot_be_exact_is_said_at_the_start(
    loader: Any, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the log and in the record, before the first step; and not of loaders that can."""
    trainer = make_trainer(loader(), tmp_path, max_steps=1, limit_train_batches=5 if "cut off" in str(said) else None)
    told: list[str] = []
    trainer.on("train_start")(lambda: told.append(caplog.text))
    trainer.train()
    assert (f"may not be exact: loader 'train' {said}" in told[0]) if said else "exact" not in told[0]
    assert ("resume_not_exact" in (trainer.run_dir / "events.jsonl").read_text()) is bool(said)


def test_a_run_without_a_checkpoint_begins_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the same directory, and loudly; the curve is the unbroken run's."""
    whole = train(shuffling(), tmp_path / "whole")
    first = train(shuffling(), tmp_path, max_steps=3)
    again = make_trainer(shuffling(), tmp_path)
    again.fit(resume=first.run_dir)
    assert again.run_id == first.run_id and "has no checkpoint yet" in caplog.text
    assert fingerprint(again) == fingerprint(whole)


def test_a_run_that_begins_again_discards_its_first_rows(tmp_path: Path) -> None:
    """Steps of the first attempt that the second does not reach are not part of the run."""
    first = make_trainer(shuffling(), tmp_path, max_steps=3)
    first.train()
    make_trainer(shuffling(), tmp_path, max_steps=2).fit(resume=first.run_dir)
    assert [row["step"] for row in read_metrics(first.run_dir) if "train/loss" in row] == [1, 2]


def test_a_fork_is_a_new_run_with_a_lineage(tmp_path: Path) -> None:
    """It begins from the checkpoint, in its own directory, and says whose it is; its checkpoints say so, too."""
    first = train(shuffling(), tmp_path, SaveAndStop(3))
    fork = make_trainer(shuffling(), tmp_path, SaveAndStop(5))
    fork.fit(resume=first.run_dir, fork=True)
    assert fork.run_id != first.run_id and fork.step == 5
    lineage = fork.record.run["lineage"]
    assert lineage == {
        "run_id": first.run_id, "step": 3, "checkpoint": str(first.checkpoint_dir / "step-00000003"),
    }  # fmt: skip
    again = make_trainer(shuffling(), tmp_path)
    again.fit(resume=fork.run_dir)
    assert again.record.run["lineage"] == lineage


# ---- a run that is killed while it stops -----------------------------------------------------------------------------


def stopping_trainer(root: Path, why: str, kill: bool = False, patience: int = 1, **options: Any) -> SimpleTrainer:
    """Make a trainer of 16 steps that saves each one and stops at the sixth; `kill` ends its process after that."""
    torch.manual_seed(0)
    trainer = make_trainer(shuffling(), root, val_loaders=[next(iter(shuffling()))], validate_every=2, **options)
    trainer.add_checkpointing(save_every_n_steps=1)
    if why == "early_stopping":
        trainer.on("validation_end", name="worse")(lambda metrics, step: metrics.update({"val/score": -step}))
        trainer.add_hook(EarlyStopping("val/score", mode="max", patience=patience, warmup=3))
    else:
        trainer.on("step_end", name="stop", at=6)(lambda trainer: trainer.request_stop("seen enough"))
    if kill:
        trainer.on("checkpoint_save", name="kill")(
            lambda step: os.kill(os.getpid(), signal.SIGKILL) if step == 6 else 0
        )
    return trainer


def train_until_killed(root: Path, why: str, **options: Any) -> None:
    """Train until the process is killed while the run stops."""
    stopping_trainer(root, why, kill=True, **options).train()


def killed_while_stopping(root: Path, why: str, **options: Any) -> Path:
    """Return the directory of such a run."""
    assert status_of(start(train_until_killed, root, why, **options)) == -signal.SIGKILL
    (run,) = root.iterdir()
    return run


def outcome_of(run: Path) -> tuple[str, str]:
    described = read_json(run / "run.json")
    return described["outcome"], described["reason"]


@pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=["waiting", "async_save"])
@pytest.mark.parametrize("why", ["early_stopping", "request_stop"])
def test_a_run_that_is_killed_while_it_stops_stays_stopped(why: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Its stop is part of the checkpoint: the resumed run ends there, for the same reason. Resumed again, it trains."""
    whole = stopping_trainer(tmp_path / "whole", why)
    whole.train()
    assert whole.step == 6
    run = killed_while_stopping(tmp_path / "killed", why, **options)
    resumed = stopping_trainer(tmp_path / "killed", why)
    resumed.fit(resume=run)
    assert (resumed.step, outcome_of(run)) == (6, outcome_of(whole.run_dir))
    assert bits_of(resumed.model.state_dict().values()) == bits_of(whole.model.state_dict().values())
    again = stopping_trainer(tmp_path / "killed", why)
    again.fit(resume=run)
    assert again.step > 6


@pytest.mark.parametrize("change", [{"max_steps": 20}, {"patience": 3}, {"fork": True}], ids=str)
def test_a_stop_under_other_terms_is_not_repeated(change: dict[str, Any], tmp_path: Path) -> None:
    """Another length of the run, another patience or a fork ask for more steps."""
    run = killed_while_stopping(tmp_path, "early_stopping")
    fork, options = change.pop("fork", False), {"max_epochs": None, **change} if "max_steps" in change else change
    resumed = stopping_trainer(tmp_path, "early_stopping", **options)
    resumed.fit(resume=run, fork=fork)
    assert resumed.step > 6


class StopWithKey(TrainingHook):
    """Stops the run; one of its parameters is a secret."""

    def __init__(self, api_key: str) -> None:
        self.api_key = api_key

    def on_step_end(self, trainer: SimpleTrainer, step: int) -> None:
        if step == 2:
            trainer.request_stop("enough")


def test_the_terms_of_a_stop_are_not_readable(tmp_path: Path) -> None:
    """A checkpoint may be published, so it must not hold a hook's parameters."""
    trainer = make_trainer(shuffling(), tmp_path)
    trainer.add_checkpointing(save_every_n_steps=1)
    trainer.add_hook(StopWithKey(api_key="sk-0123456789abcdefghij"))
    trainer.train()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"enough" in path.read_bytes() for path in files if "checkpoints" in path.parts)
    assert [path for path in files if b"sk-0123456789" in path.read_bytes()] == []


def test_a_signal_stops_only_this_attempt(tmp_path: Path) -> None:
    """But a stop that a hook requested in the same step is the run's."""
    for why, steps in (("early_stopping", 6), ("nothing", 16)):
        trainer = stopping_trainer(tmp_path, why) if steps == 6 else make_trainer(shuffling(), tmp_path)
        trainer.on("after_backward", name="signal", at=6)(lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(SystemExit):
            trainer.train()
        assert outcome_of(trainer.run_dir)[0] == "interrupted"
        resumed = stopping_trainer(tmp_path, why) if steps == 6 else make_trainer(shuffling(), tmp_path)
        resumed.fit(resume=trainer.run_dir)
        assert resumed.step == steps


def fail_at_the_end() -> None:
    raise ValueError("at the end")


@pytest.mark.parametrize("ending", ["failed", "non_finite"])
def test_a_stop_that_ended_in_another_outcome_is_not_repeated(ending: str, tmp_path: Path) -> None:
    """The stop was carried out, although the run is recorded as failed or with bad weights: resuming trains on."""

    def train_until_stopped(resume: Path | None = None) -> SimpleTrainer:
        trainer = stopping_trainer(tmp_path, "request_stop")
        if ending == "failed":
            trainer.on("train_end", name="fail", on_error="raise")(fail_at_the_end)
        else:
            trainer.on("after_optimizer_step", name="spoil")(lambda model: model[0].bias.data.fill_(torch.nan))
        with suppress(ValueError):
            trainer.fit(resume=resume)
        assert outcome_of(trainer.run_dir)[0] == ending
        return trainer

    first = train_until_stopped()
    assert first.step == 6
    assert train_until_stopped(first.run_dir).step > 6


@pytest.mark.parametrize(("event", "repeated"), [("validation_end", [1, 2]), ("epoch_end", [2])], ids=str)
def test_an_epoch_whose_end_failed_steps_its_scheduler_once(event: str, repeated: list[int]) -> None:
    """A failed validation is repeated, with the end of its epoch; after a failed on_epoch_end the epoch is over."""

    def make(fails: bool) -> SimpleTrainer:
        trainer = builders.make_trainer(
            CheckpointHook(save_on_exception=True), data=make_batches(3), val_loaders=make_batches(1), sanity_batches=0,
            max_epochs=3, lr=1.0, scheduler=partial(ExponentialLR, gamma=0.5), scheduler_interval="epoch", record=True,
        )  # fmt: skip
        if fails:
            trainer.on(event, on_error="raise")(lambda epoch: 1 / 0 if epoch == 1 else None)
        return trainer

    whole, failed, resumed = make(False), make(True), make(False)
    whole.train()
    with pytest.raises(ZeroDivisionError):
        failed.train()
    rates: list[float] = []
    ended: list[int] = []
    resumed.on("step_end", name="rates")(lambda lr: rates.append(lr))
    resumed.on("epoch_end", name="ended")(lambda epoch: ended.append(epoch))
    resumed.fit(resume=failed.run_dir)
    assert rates == [0.25] * 3 and ended == repeated
    assert resumed.lr == whole.lr == 0.125 and torch.equal(resumed.model[0].weight, whole.model[0].weight)

"""The one loop: windows, weights, schedules, stops, and who moves what when."""

import math
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import builders
import pytest
import torch
from builders import Batch, batches_of, make_batches, make_model
from torch import nn
from torch.optim.lr_scheduler import StepLR

from hookline import EarlyStopping, StopTraining, Trainer, TrainingHook, read_metrics
from hookline.errors import TrainingError

make_trainer = partial(builders.make_trainer, data=make_batches(2))
train = partial(builders.train, data=make_batches(2))


def weights(trainer: Trainer) -> list[torch.Tensor]:
    """The parameters, copied."""
    return [param.detach().clone() for param in trainer.model.parameters()]


def close(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """The same up to rounding."""
    return all(map(partial(torch.allclose, atol=1e-6), first, second))


def events(trainer: Trainer, kind: str) -> list[dict[str, Any]]:
    """Return the recorded events of one kind."""
    return [event for event in trainer.record.events if event["kind"] == kind]


# ---- windows and weights -----------------------------------------------------------------------------------


def trained(data: list[Batch], **options: Any) -> list[torch.Tensor]:
    """Return the weights after one epoch."""
    return weights(train(data=data, **options))


def joined(batches: list[Batch]) -> Batch:
    """All batches as one."""
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def test_accumulating_equals_one_big_batch() -> None:
    """Four batches of four in one window move the weights as one batch of sixteen."""
    batches = batches_of(4, 4, 4, 4)
    assert close(trained(batches, accumulate=4), trained([joined(batches)]))


def test_a_short_window_is_the_mean_of_what_was_in_it() -> None:
    """Six batches in windows of four: the second window of two has the weight of one batch."""
    batches = batches_of(4, 4, 4, 4, 4, 4)
    assert close(trained(batches, accumulate=4), trained([joined(batches[:4]), joined(batches[4:])]))


@pytest.mark.parametrize(("weight", "equal"), [("samples", True), ("batches", False)])
def test_weighting_by_samples(weight: str, equal: bool) -> None:
    """Batches of different size equal one big batch exactly when samples are what weighs."""
    batches = batches_of(7, 1, 4)
    assert close(trained(batches, accumulate=3, loss_weight=weight), trained([joined(batches)])) is equal


def test_weighting_by_tokens() -> None:
    """With loss_weight='tokens' long and short sequences in one window equal one pass over all tokens."""
    generator = torch.Generator().manual_seed(2)
    long, short = (torch.randint(6, (1, length), generator=generator) for length in (9, 3))

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6))

    def step(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    window = make_trainer(data=[long, short], model=model(), step_fn=step, accumulate=2, loss_weight="tokens")
    whole = make_trainer(data=[torch.cat([long, short], dim=1)], model=model(), step_fn=step)
    losses: list[float] = []
    for trainer in (window, whole):
        trainer.on("step_end")(lambda ctx: losses.append(ctx.loss))
        trainer.train()
    assert close(weights(window), weights(whole))
    assert losses[0] == pytest.approx(losses[1])
    assert window.progress.tokens_seen == whole.progress.tokens_seen == 12


class LanguageModel(nn.Module):
    """Logits, or the mean loss over labels that are not -100, as Hugging Face's models return it."""

    def __init__(self, shifts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shifts = shifts
        self.embedding, self.head = nn.Embedding(9, 5), nn.Linear(5, 9)
        self.double()

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, labels: Any = None) -> Any:
        logits = self.head(self.embedding(input_ids).cumsum(1))
        if labels is None:
            return logits
        if self.shifts:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index)


class PaddedLoss(nn.CrossEntropyLoss):
    """A loss module over sequences."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(logits.flatten(0, -2), labels.flatten())


class Smoothed(nn.Module):
    """A loss module that calls the first of its children."""

    def __init__(self, *losses: nn.Module) -> None:
        super().__init__()
        self.losses = nn.ModuleList(losses)

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.losses[0](logits, labels)


def padded_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return eight sequences of 1 to 12 tokens, padded with zeros to 12, and where the tokens are."""
    lengths = torch.tensor([12, 2, 7, 1, 9, 9, 3, 4])
    mask = (torch.arange(12) < lengths[:, None]).long()
    return torch.randint(1, 9, mask.shape, generator=torch.Generator().manual_seed(3)) * mask, mask


def causal(rows: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": rows, "attention_mask": mask, "labels": rows.masked_fill(mask == 0, -100)}


def answers_only(rows: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Only the second half of each row has labels, so that some rows have none."""
    return {"input_ids": rows, "labels": rows.masked_fill((mask == 0) | (torch.arange(12) < 6), -100)}


def masked(rows: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every other token is hidden and to be found, the first among them."""
    hidden = (torch.arange(12) % 2 == 0) & (mask == 1)
    return {"input_ids": rows.masked_fill(hidden, 0), "labels": rows.masked_fill(~hidden, -100)}


def shifted_pair(rows: torch.Tensor, mask: torch.Tensor, pad: int = -100) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and the tokens after them, as nanoGPT's batches are."""
    return rows[:, :-1], rows.masked_fill(mask == 0, pad)[:, 1:]


WEIGHTED_BY_TOKENS: dict[str, tuple[Any, dict[str, Any]]] = {
    "causal, shifted in the model": (causal, {"model": lambda: LanguageModel(shifts=True)}),
    "answers only": (answers_only, {"model": lambda: LanguageModel(shifts=True)}),
    "labels without shift": (masked, {"model": LanguageModel}),
    "step_fn": (causal, {"model": lambda: LanguageModel(True), "step_fn": lambda model, batch: model(**batch)["loss"]}),
    "pair": (shifted_pair, {"model": LanguageModel, "loss_fn": cross_entropy}),
    "ignore_index of a module": (
        partial(shifted_pair, pad=0), {"model": LanguageModel, "loss_fn": PaddedLoss(ignore_index=0)},
    ),
    "ignore_index of a partial": (
        partial(shifted_pair, pad=0), {"model": LanguageModel, "loss_fn": partial(cross_entropy, ignore_index=0)},
    ),
    "ignore_index of a module in a module": (
        partial(shifted_pair, pad=0),
        {"model": LanguageModel, "loss_fn": Smoothed(PaddedLoss(ignore_index=0), nn.NLLLoss())},
    ),
    "ignore_index of a parameter": (
        partial(shifted_pair, pad=0),
        {"model": LanguageModel, "loss_fn": lambda *two, ignore_index=0: cross_entropy(*two, ignore_index)},
    ),
    "attention mask": (
        lambda rows, mask: {"input_ids": rows, "attention_mask": mask},
        {"model": LanguageModel,
         "step_fn": lambda model, batch: cross_entropy(model(**batch), batch["input_ids"], ignore_index=0)},
    ),
    "classes": (
        lambda rows, mask: (rows[:, :1], rows[:, 0].masked_fill(mask[:, 1] == 0, -100)),
        {"model": LanguageModel, "loss_fn": lambda logits, classes: cross_entropy(logits[:, 0], classes)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WEIGHTED_BY_TOKENS)
@pytest.mark.parametrize("count_tokens", [{}, {"count_tokens": None}], ids=str)
def test_weighting_by_tokens_leaves_out_padding_and_ignored_labels(case: str, count_tokens: dict[str, Any]) -> None:
    """Unequal micro-batches with padding, one of them without a label, give loss and gradient of the whole batch."""
    collate, options = WEIGHTED_BY_TOKENS[case]
    rows, mask = padded_rows()

    def train_on(parts: list[list[int]], **more: Any) -> tuple[float, list[torch.Tensor]]:
        batches = [collate(rows[part], mask[part]) for part in parts]
        trainer = make_trainer(data=batches, **{"loss_fn": None, **options, **more})
        seen: list[Any] = []
        trainer.on("step_end", name="loss")(lambda loss: seen.append(loss))
        trainer.on("gradients_ready", name="grads")(lambda grads: seen.extend(grad.clone() for grad in grads.values()))
        trainer.train()
        *gradients, loss = seen
        return loss, gradients

    loss, gradients = train_on([[0], [1, 2], [3], [4, 5, 6, 7]], accumulate=4, loss_weight="tokens", **count_tokens)
    expected_loss, expected = train_on([list(range(8))])
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    torch.testing.assert_close(gradients, expected, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(("index", "warns"), [(-1, True), (-100, False), (0, False)])
def test_labels_that_seem_to_be_ignored_are_warned_of_once(
    index: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What a function ignores cannot be seen; a negative label is no class, so that the loss must ignore it."""
    batches = [shifted_pair(*padded_rows(), pad=index)] * 3
    loss_fn = lambda logits, labels: cross_entropy(logits, labels, ignore_index=index)  # noqa: E731
    train(data=batches, model=LanguageModel(), loss_fn=loss_fn, loss_weight="tokens")
    said = [record.getMessage() for record in caplog.records if "count as tokens" in record.getMessage()]
    assert len(said) == warns
    assert not warns or "labels that are -1 count as tokens; only -100 is ignored" in said[0]


def test_an_encoder_decoder_that_copies_does_not_shift_its_labels() -> None:
    """Its labels equal its inputs, and each of them is predicted."""

    class Copies(LanguageModel):
        config = SimpleNamespace(is_encoder_decoder=True)

    rows, mask = padded_rows()
    weights_seen: list[float] = []
    trainer = make_trainer(data=[causal(rows[:2], mask[:2])], model=Copies(), loss_fn=None, loss_weight="tokens")
    trainer.on("step_end")(lambda trainer: weights_seen.extend(part.weight for part in trainer.window()))
    trainer.train()
    assert weights_seen == [14.0]


def test_tokens_seen_counts_padding() -> None:
    """It reads only a shape, even if the loss is weighted by what is not padding."""
    rows, mask = padded_rows()
    trainer = train(data=[causal(rows, mask)], model=LanguageModel(True), loss_fn=None, loss_weight="tokens")
    assert trainer.progress.tokens_seen == rows.numel() == 96


@pytest.mark.parametrize("length", [{"max_epochs": 3}, {"max_steps": 2}, {"max_steps": 2, "accumulate": 2}], ids=str)
def test_weighting_by_tokens_without_tokens_is_rejected(length: dict[str, Any]) -> None:
    """Tuples have no tokens; weights of nothing would train nothing, silently."""
    batches = batches_of(4, 4, 4, 4)
    with pytest.raises(TrainingError, match=r"loss_weight='tokens': nothing was counted .* pass count_tokens="):
        train(data=batches, loss_weight="tokens", **length)
    train(data=batches, loss_weight="tokens", count_tokens=lambda batch: len(batch[0]), **length)


def test_nothing_counts_in_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    """It is skipped as a later one is, with a warning, because the batches may not be understood."""
    batches = batches_of(4, 4, 4)
    count = lambda batch: 0 if batch is batches[0] else 4  # noqa: E731
    trainer = make_trainer(data=batches, loss_weight="tokens", count_tokens=count)
    before = weights(trainer)
    trainer.train()
    assert (trainer.step, trainer.skipped_steps) == (3, 1) and not close(before, weights(trainer))
    (warning,) = [record.getMessage() for record in caplog.records if "nothing was counted" in record.getMessage()]
    assert warning.startswith("step 1 is skipped: loss_weight='tokens': nothing was counted")


def test_a_run_that_is_stopped_before_anything_counts_has_not_failed() -> None:
    """The batches that count may have been those that follow."""
    trainer = make_trainer(data=batches_of(4, 4, 4), loss_weight="tokens", count_tokens=lambda batch: 0)
    trainer.on("step_end", at=1)(lambda trainer: trainer.request_stop("seen enough"))
    trainer.train()
    assert (trainer.status, trainer.step, trainer.skipped_steps) == ("completed", 1, 1)


def test_nothing_counts_in_a_manual_step() -> None:
    """It is an error at once, because nothing tells when manual steps end."""
    batches = batches_of(4)
    trainer = make_trainer(data=batches, loss_weight="tokens", count_tokens=lambda batch: 0)
    with pytest.raises(TrainingError, match="would train nothing: loss_weight='tokens': nothing was counted"):
        trainer.training_step(batches[0])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(("accumulate", "ignored", "skipped"), [(1, {2}, 1), (2, {2}, 0), (2, {2, 3, 4}, 1)], ids=str)
def test_batches_whose_labels_are_all_ignored(accumulate: int, ignored: set[int], skipped: int, precision: str) -> None:
    """Their mean loss is NaN: they train nothing, a step of nothing else is skipped, and no mean becomes NaN."""
    rows, mask = padded_rows()
    batches = {"a": [causal(rows[:4], mask[:4]) for _ in range(6)], "b": [causal(rows[4:], mask[4:]) for _ in range(2)]}
    for index in ignored:
        batches["a"][index]["labels"] = torch.full_like(batches["a"][index]["labels"], -100)
    options = {"loss_weight": "tokens", "accumulate": accumulate, "precision": precision, "max_grad_norm": 1.0}
    model = LanguageModel(True).float()
    trainer = make_trainer(data=batches, model=model, loss_fn=None, record=True, **options)
    reasons: list[str] = []
    trainer.on("step_skipped")(lambda reason: reasons.append(reason))
    trainer.on("step_end", name="norms")(lambda ctx: (ctx.loss, ctx.grad_norm))
    trainer.train()
    assert reasons.count("no token counts") == skipped
    assert precision == "fp16" or trainer.run_status.skipped_steps == skipped  # the first scales of fp16 overflow
    assert trainer.step == 8 // accumulate and trainer.run_status.non_finite_losses == 0
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    lines = read_metrics(trainer.run_dir)
    losses = [value for line in lines for name, value in line.items() if name.endswith("loss")]
    assert losses and all(isinstance(loss, float) and math.isfinite(loss) for loss in losses)


@pytest.mark.req("004-07")
def test_tokens_seen() -> None:
    """Counted by the function given, this batch's included, and told at the end."""
    trainer = make_trainer(data=batches_of(4, 2), count_tokens=lambda batch: 10 * len(batch[0]))
    seen: list[tuple[int, int]] = []

    class Count(TrainingHook):
        def on_train_batch_start(self, step: int, tokens_seen: int) -> None:
            seen.append((step, tokens_seen))

        def on_train_end(self, step: int, tokens_seen: int) -> None:
            seen.append((step, tokens_seen))

    trainer.add_hook(Count())
    trainer.train()
    assert seen == [(1, 40), (2, 60), (2, 60)]


class Sometimes:
    """A loader that promises more batches than it gives."""

    def __init__(self, batches: list[Batch], promised: int | None) -> None:
        self.batches, self.promised = batches, promised

    def __len__(self) -> int:
        if self.promised is None:
            raise TypeError("no length")
        return self.promised

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


@pytest.mark.parametrize("promised", [None, 8])
def test_windows_never_cross_an_epoch(promised: int | None) -> None:
    """Without a known length, or with a wrong one, the last window of an epoch is closed all the same."""
    batches = batches_of(4, 4, 4)
    trainer = train(data=Sometimes(batches, promised), accumulate=2, max_epochs=2)
    assert trainer.step == 4
    assert close(weights(trainer), trained(batches, accumulate=2, max_epochs=2))


# ---- how long ----------------------------------------------------------------------------------------------


@pytest.mark.req("001-17")
@pytest.mark.parametrize(
    ("options", "steps", "epochs_ended"),
    [
        ({}, 2, 1),
        ({"max_epochs": 3}, 6, 3),
        ({"max_steps": 3}, 3, 1),
        ({"max_steps": 4}, 4, 2),
        ({"max_steps": 9, "max_epochs": 2}, 4, 2),
        ({"max_epochs": 0}, 0, 0),
        ({"max_steps": 0}, 0, 0),
        ({"max_steps": 3, "accumulate": 2}, 3, 3),
    ],
    ids=str,
)
def test_how_long_a_run_is(options: dict[str, Any], steps: int, epochs_ended: int) -> None:
    """Whichever of max_epochs and max_steps comes first; an epoch that was not finished has no end."""
    trainer = make_trainer(**options)
    ended: list[int] = []
    trainer.on("epoch_end")(lambda epoch: ended.append(epoch))
    trainer.train()
    assert trainer.step == steps
    assert ended == list(range(epochs_ended))


@pytest.mark.parametrize("way", ["raise", "ask"])
def test_a_stop_completes_the_window(way: str) -> None:
    """Requested at a window's first micro-batch, the run ends after its last, and other hooks get the rest."""
    trainer = make_trainer(data=batches_of(4, 4, 4, 4), accumulate=2)
    received: list[str] = []

    @trainer.on("train_batch_start", name="stopper")
    def stop(trainer: Trainer, batch_idx: int) -> None:
        if way == "raise":
            raise StopTraining("seen enough")
        trainer.request_stop("seen enough", by="stopper")

    trainer.on("train_batch_start", name="other")(lambda: received.append("start"))
    trainer.on("step_end", name="end")(lambda: received.append("step"))
    trainer.on("train_end", name="last")(lambda reason: received.append(reason))
    state = trainer.train()
    assert received == ["start", "start", "step", "stopped by stopper: seen enough"]
    assert state["status"] == "completed"
    assert trainer.record.run["outcome"] == "stopped"
    first = events(trainer, "stop_requested")[0]
    assert (first["by"], first["reason"]) == ("stopper", "seen enough")


@pytest.mark.parametrize("event", ["train_start", "epoch_start", "epoch_end", "validation_end"])
def test_a_stop_from_the_outer_events(event: str) -> None:
    """Before the first step none is made; after an epoch no other begins."""
    trainer = make_trainer(max_epochs=5, val_dataloader=batches_of(2))
    trainer.on(event)(lambda trainer: trainer.request_stop("now"))
    trainer.train()
    assert trainer.step == {"train_start": 0, "epoch_start": 1}.get(event, 2)


# ---- schedulers and learning rates -------------------------------------------------------------------------


def test_a_scheduler_moves_once_per_step_after_it() -> None:
    """The first step uses the first learning rate; a window of two micro-batches moves the scheduler once."""
    halving = partial(StepLR, step_size=1, gamma=0.5)
    trainer = make_trainer(data=make_batches(4), lr=1e-3, scheduler=halving, accumulate=2)
    used: list[float] = []
    trainer.on("step_end")(lambda ctx: used.append(ctx.lr))
    trainer.train()
    assert used == [1e-3, 5e-4]
    assert trainer.schedulers[0].last_epoch == 2


def test_a_scheduler_by_epoch() -> None:
    """scheduler_interval='epoch' moves it at the end of each epoch, after its validation."""
    scheduler = partial(StepLR, step_size=1, gamma=0.1)
    trainer = make_trainer(lr=1.0, scheduler=scheduler, scheduler_interval="epoch", max_epochs=2)
    used: list[float] = []
    trainer.on("step_end")(lambda lr: used.append(lr))
    trainer.train()
    assert used == pytest.approx([1.0, 1.0, 0.1, 0.1])


def test_a_scheduler_waits_when_the_step_was_skipped() -> None:
    """It moves only when the optimizer did; the step is counted all the same."""
    trainer = make_trainer(data=make_batches(3), lr=1.0, scheduler=partial(StepLR, step_size=1, gamma=0.1))
    before = weights(trainer)
    trainer.on("gradients_ready", name="guard")(
        lambda trainer, step: trainer.skip_step("not this one") if step == 1 else None
    )
    moved: list[bool] = []
    trainer.on("step_end", name="watch")(lambda: moved.append(not close(before, weights(trainer))))
    trainer.train()
    assert moved == [False, True, True]
    assert (trainer.step, trainer.skipped_steps, trainer.schedulers[0].last_epoch) == (3, 1, 2)
    assert [(event["step"], event["reason"]) for event in events(trainer, "step_skipped")] == [(1, "not this one")]


@pytest.mark.req("002-44")
@pytest.mark.parametrize("event", ["train_batch_start", "before_optimizer_step"])
def test_a_learning_rate_that_a_hook_writes_is_used(event: str) -> None:
    """Halving every group's lr before the step halves the movement, and ctx.lr tells the lr that was used."""
    moved, used = [], []
    for factor in (1.0, 0.5):
        trainer = make_trainer(data=batches_of(4))

        @trainer.on(event, name="writer")
        def write(trainer: Trainer, factor: float = factor) -> None:
            for optimizer in trainer.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] *= factor

        trainer.on("step_end")(lambda ctx: used.append(ctx.lr))
        before = weights(trainer)
        trainer.train()
        moved.append([after - start for after, start in zip(weights(trainer), before, strict=True)])
    assert close([delta * 0.5 for delta in moved[0]], moved[1])
    assert used == [0.1, 0.05]


# ---- what changes the step ---------------------------------------------------------------------------------


@pytest.mark.req("000-18", "000-23", "000-24", "000-25")
@pytest.mark.parametrize("factor", [2.0, 0.0])
def test_the_gradients_an_update_hook_returns_are_used(factor: float) -> None:
    """With SGD a doubling hook doubles the movement and a zeroing one stops it."""
    plain, changed = make_trainer(data=batches_of(4)), make_trainer(data=batches_of(4))
    changed.on("update", name="scale")(lambda grads: {name: grad * factor for name, grad in grads.items()})
    start = weights(plain)
    plain.train()
    changed.train()
    wanted = [before + factor * (after - before) for before, after in zip(start, weights(plain), strict=True)]
    assert close(weights(changed), wanted)


@pytest.mark.req("000-26", "000-16")
def test_training_step_calls_update_and_forward_hooks() -> None:
    """One call of training_step reaches both, with gradients and activations."""
    trainer = make_trainer()
    seen: list[Any] = []
    trainer.on("forward", name="see")(lambda name, output: seen.append((name, tuple(output.shape))))

    @trainer.on("update")
    def see_gradients(grads: Any) -> Any:
        seen.append(sorted(grads))
        return grads

    loss = trainer.training_step(batches_of(4)[0])
    assert seen == [("0", (4, 4)), ("1", (4, 4)), ("2", (4, 1)), ["0.bias", "0.weight", "2.bias", "2.weight"]]
    assert not loss.requires_grad and loss.shape == ()


@pytest.mark.req("004-32")
def test_an_injected_optimizer_step() -> None:
    """optimizer_step= is called in the place of optimizer.step, with the events around it."""
    called: list[Any] = []

    def own(optimizer: torch.optim.Optimizer) -> None:
        called.append("own")
        optimizer.step()

    trainer = make_trainer(data=batches_of(4), optimizer_step=own)
    trainer.on("before_optimizer_step", name="before")(lambda optimizer_idx: called.append("before"))
    trainer.on("after_optimizer_step", name="after")(lambda optimizer_idx: called.append("after"))
    trainer.train()
    assert called == ["before", "own", "after"]
    assert close(weights(trainer), trained(batches_of(4)))


@pytest.mark.req("004-33")
def test_a_loss_function_changed_in_mid_run() -> None:
    """It takes effect at the next batch and is in the record with both names."""
    trainer = make_trainer(data=batches_of(4, 4))
    losses: list[float] = []

    def nothing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sum() * 0.0

    @trainer.on("train_batch_end", at=1)
    def change(trainer: Trainer) -> None:
        trainer.loss_fn = nothing

    trainer.on("train_batch_end", name="watch")(lambda loss: losses.append(loss))
    trainer.train()
    assert losses[0] > 0 and losses[1] == 0.0
    (event,) = events(trainer, "loss_fn_changed")
    assert (event["step"], event["old"]) == (1, "mse_loss")
    assert event["new"].endswith("nothing")


@pytest.mark.req("002-64", "002-65", "002-66")
def test_several_optimizers_clip_together() -> None:
    """The norm spans all of them once, and each steps with its own learning rate."""
    model = make_model()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.5), torch.optim.SGD(model[2].parameters(), lr=0.25)]
    trainer = make_trainer(data=batches_of(4), model=model, optimizer=optimizers, max_grad_norm=0.01)
    norms: list[float] = []
    trainer.on("gradient_clip")(lambda trainer, grad_norm: norms.append(grad_norm))
    trainer.train()

    reference = make_model()
    nn.functional.mse_loss(reference(batches_of(4)[0][0]), batches_of(4)[0][1]).backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    with torch.no_grad():
        for param, lr in zip(reference.parameters(), (0.5, 0.5, 0.25, 0.25), strict=True):
            param.sub_(lr * param.grad)
    assert norms == pytest.approx([norm.item()])
    assert close(weights(trainer), [param.detach() for param in reference.parameters()])


def test_gradients_that_no_optimizer_owns_do_not_pile_up() -> None:
    """Training only the head, the body's gradients are those of one step, so that the norm means something."""
    model = make_model()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.0)
    trainer = make_trainer(data=batches_of(4) * 3, model=model, optimizer=optimizer)
    norms: list[float] = []
    trainer.on("step_end")(lambda ctx: norms.append(ctx.grad_norm))
    trainer.train()
    assert norms[0] == pytest.approx(norms[1]) == pytest.approx(norms[2])
    assert all(param.grad is None for param in model.parameters())


def test_step_metrics() -> None:
    """Numbers that step_fn returns beside the loss are in metrics and in the record, and only where they were."""

    def step(model: Any, batch: Batch) -> Any:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        return {"loss": loss, "size": torch.tensor(len(batch[0]))} if len(batch[0]) > 2 else loss

    trainer = make_trainer(data=batches_of(4, 2, 3), step_fn=step)
    seen: list[Any] = []
    trainer.on("train_batch_end")(lambda metrics: seen.append(metrics.get("size")))
    trainer.train()
    assert seen == [4, None, 3]
    lines = trainer.record.metrics
    assert {line["step"]: line.get("train/size") for line in lines if "train/loss" in line} == {1: 4, 2: None, 3: 3}


# ---- what cannot be trained --------------------------------------------------------------------------------


def test_a_loader_that_gives_nothing() -> None:
    """Without a length this is known when the run begins."""
    with pytest.raises(TrainingError, match="the training loader yielded no batches"):
        train(data=Sometimes([], None))


def test_a_loss_without_a_graph_is_rejected_before_the_first_step() -> None:
    """With frozen parameters, or a detached loss, nothing would be trained."""
    trainer = make_trainer(step_fn=lambda model, batch: model(batch[0]).sum().detach())
    before = weights(trainer)
    with pytest.raises(TrainingError, match="nothing would be trained"):
        trainer.train()
    assert close(before, weights(trainer))


@pytest.mark.parametrize("read", [True, False])
def test_non_finite_losses_are_reported(read: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """They are counted in the record and in the closing line, whether anybody read the loss or not."""
    batches = batches_of(4, 4, 4)
    batches[1] = (batches[1][0], torch.full((4, 1), math.nan))
    trainer = make_trainer(data=batches, lr=0.0, console=True)
    trainer.on("gradients_ready", name="guard")(lambda trainer, step: trainer.skip_step("guard") if step == 2 else None)
    if read:
        trainer.on("train_batch_end", name="reader")(lambda loss: None)
    trainer.train()
    assert trainer.non_finite_losses == 1
    assert [event["count"] for event in events(trainer, "non_finite_losses")] == [1]
    assert [event["batch_idx"] for event in events(trainer, "non_finite_loss")] == [1]
    assert [event["step"] for event in events(trainer, "non_finite_loss")] == [2]
    assert "1 non-finite loss" in capsys.readouterr().out


def test_a_non_finite_loss_before_a_failure_is_reported() -> None:
    """Also when the run fails at the very last batch of an epoch."""
    trainer = make_trainer(data=[(torch.ones(2, 3), torch.full((2, 1), math.nan))])
    trainer.on("step_end", on_error="raise")(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert trainer.non_finite_losses == 1


def test_metrics_of_a_window_are_averaged_as_its_loss_is() -> None:
    """They are averaged over the micro-batches that have them; record and hooks get the mean."""
    values = iter([0.0, 1.0, 5.0, None])

    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        value = next(values)
        return {"loss": model(batch).mean(), **({} if value is None else {"mine": value})}

    stopping = EarlyStopping(monitor="train/mine", check_every_n_steps=1, mode="max", patience=9)
    trainer = train(stopping, data=[torch.ones(3, 3)] * 4, loss_fn=None, step_fn=step, accumulate=2)
    assert [line["train/mine"] for line in trainer.record.metrics if "train/mine" in line] == [0.5, 5.0]
    assert (stopping.best, stopping.best_step) == (5.0, 2)

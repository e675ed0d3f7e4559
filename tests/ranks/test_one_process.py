"""Numbers of several ranks are those of one process on the global batch, even if the ranks' parts of it are uneven."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_on_ranks
from rank_runs import DEVICE, FEATURES, layers_of, make_mesh, make_model, make_trainer, metrics_of
from torch import nn

from hookline.activations.monitor import Monitor
from hookline.runs.media import read_media

IGNORED = -100
ENDS = {1: [0, 24], 2: [0, 11, 24], 4: [0, 2, 11, 12, 24]}  # where the shares of a global batch end
LAST_ENDS = {1: [0, 7], 2: [0, 4, 7], 4: [0, 2, 4, 6, 7]}  # of the last batch, as at the end of an epoch
EXACT = ("zeros", "nans", "infs", "count", "histogram_top", "counts")


def shares(rank: int, world_size: int, steps: int) -> list[slice]:
    """Return which samples of each global batch a rank has."""
    ends = [*[ENDS[world_size]] * (steps - 1), LAST_ENDS[world_size]]
    return [slice(end[rank], end[rank + 1]) for end in ends]


def batches_of(rank: int, world_size: int, steps: int = 5) -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(steps, 24, FEATURES, generator=generator)
    return [
        (one[here], one[here].sum(-1, keepdim=True))
        for one, here in zip(inputs, shares(rank, world_size, steps), strict=True)
    ]


def step(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    output = model(batch[0])
    mark = batch[2] if len(batch) > 2 else 1.0
    return {"loss": ((output - batch[1]) * mark * 1e-3).square().mean(), "high": (output > 0).double().mean()}


def watch(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> None:
    """Train in float64, so that the order of additions does not show, with everything that is measured of gradients."""
    torch.set_default_dtype(torch.float64)
    options, model = dict(options), make_model()
    if options.pop("frozen", False):
        for part in (model[0], model[2]):  # type: ignore[index]
            part.requires_grad_(False)
    more: dict[str, Any] = {}
    if options.pop("even", False):
        more["batches"] = [(one[rank::world_size], other[rank::world_size]) for one, other in batches_of(0, 1)[:-1]]
    else:
        more["batches"] = batches_of(rank, world_size)
    for place, batch in enumerate(more["batches"]):
        mark = batch[1] * 0 + 1.0
        if options.get("masked"):  # some ranks have gradients of zero only in batch 1, all of them in batch 2
            mark = torch.where(batch[1] > 0, 1.0, 0.0) if place == 1 else mark * (place != 2)
        more["batches"][place] = (*batch, mark)
    if options.pop("broken", False):
        more["batches"] = more["batches"][:1]
        more["batches"][0][1][:] = torch.inf
    options.pop("masked", None)
    if options.pop("two", False):
        more["batches"] = {"first": more["batches"], "second": more["batches"][1:]}
    trainer = make_trainer(
        "ddp", rank, world_size, folder, model=model, loss_fn=None, step_fn=step, max_epochs=2, max_grad_norm=0.5,
        val_loaders=batches_of(rank, world_size, 2), **more, **options,
    )  # fmt: skip
    trainer.add_hook(Monitor("*", ("mean", "std", "absmax", "count", "zeros", "histogram"), gradients=True), "monitor")
    trainer.add_hook("gradient_monitor", every=2, log_histogram=True, percentiles=[10, 90])
    trainer.train()


def run(world_size: int, folder: Path, job: Any, *arguments: Any) -> Path:
    run_on_ranks(job, world_size, world_size, str(folder), *arguments)
    (found,) = folder.iterdir()
    return found


CASES: dict[str, dict[str, Any]] = {
    "samples": {"loss_weight": "samples"},
    "samples, accumulated": {"loss_weight": "samples", "accumulate": 2},
    "samples of two loaders": {"loss_weight": "samples", "two": True},
    "zeros": {"masked": True, "even": True},
    "zeros, samples": {"masked": True, "loss_weight": "samples"},
    "infinite": {"broken": True, "even": True, "validate_every": None},
    "frozen": {"frozen": True, "even": True},
    "frozen, samples": {"frozen": True, "loss_weight": "samples"},
}


def check_equal(alone: Path, together: Path) -> None:
    expected, found = layers_of(alone), layers_of(together)
    assert found.keys() == expected.keys()
    for key, values in found.items():
        tolerance = 0.0 if key[2].removeprefix("grad_") in EXACT else 1e-9
        torch.testing.assert_close(values, expected[key], rtol=tolerance, atol=1e-12, equal_nan=True, msg=str(key))
    expected_metrics, found_metrics = metrics_of(alone), metrics_of(together)
    assert found_metrics.keys() == expected_metrics.keys()
    for one, value in found_metrics.items():
        assert value == pytest.approx(expected_metrics[one], rel=1e-9, abs=1e-12, nan_ok=True), one


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_outputs_and_means_of_epochs_are_those_of_one_process(
    case: str, world_size: int, tmp_path: Path
) -> None:
    check_equal(*(run(size, tmp_path / str(size), watch, CASES[case]) for size in (1, world_size)))


class CausalModel(nn.Module):
    """A language model with the interface of Hugging Face's: it shifts the labels, and takes the mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(input_ids))[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        return {"loss": loss, "logits": logits}


def tokens_of(rank: int, world_size: int, steps: int = 5) -> list[dict[str, torch.Tensor]]:
    """Return token batches whose rows have different lengths, padded; the labels of padding are ignored."""
    inputs = torch.randint(1, 7, (steps, 24, 9), generator=torch.Generator().manual_seed(4))
    labels = inputs.clone()
    for row in range(24):
        inputs[:, row, 2 + row % 8 :], labels[:, row, 2 + row % 8 :] = 0, IGNORED
    return [
        {"input_ids": one[here], "labels": other[here]}
        for one, other, here in zip(inputs, labels, shares(rank, world_size, steps), strict=True)
    ]


def train_language_model(rank: int, world_size: int, folder: str) -> None:
    torch.set_default_dtype(torch.float64)
    trainer = make_trainer(
        "ddp", rank, world_size, folder, model=CausalModel(), loss_fn=None, batches=tokens_of(rank, world_size),
        loss_weight="tokens", max_epochs=2, val_loaders=tokens_of(rank, world_size, 3),
    )  # fmt: skip
    trainer.train()


@pytest.mark.parametrize("world_size", [2, 4])
def test_losses_of_a_language_model_are_means_over_tokens(world_size: int, tmp_path: Path) -> None:
    alone, together = (run(size, tmp_path / str(size), train_language_model) for size in (1, world_size))
    check_equal(alone, together)
    assert {"train/epoch_loss", "val/loss", "val/perplexity"} <= {name for _, name in metrics_of(alone)}


def train_in_two_dimensions(rank: int, world_size: int, folder: str, kind: str) -> None:
    """Train with FSDP2 over pairs of ranks that share each batch by tensor parallelism."""
    torch.set_default_dtype(torch.float64)
    model, place, parts = make_model(), 0, 1
    if world_size > 1:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = make_mesh(data=world_size // 2, tensor=2) if kind == "fsdp2 and tensor" else make_mesh(tensor=world_size)
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if kind == "fsdp2 and tensor":
            fully_shard(model, mesh=mesh["data"])
            place, parts = mesh["data"].get_local_rank(), world_size // 2
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(6, 16, FEATURES, generator=generator)
    batches = [(one[place::parts], one[place::parts].sum(-1, keepdim=True)) for one in inputs]
    labels = [(one, (one[:, 0] > 0).long()) for one, _ in batches[:2]]
    trainer = make_trainer(
        "ready", rank, world_size, folder, model=model, batches=batches, count_tokens=lambda batch: batch[0].numel(),
        val_loaders=labels, seed=3,
    )  # fmt: skip
    trainer.loss_fn = nn.MSELoss()
    trainer.add_hook(Monitor(["4"], ("mean", "std", "count"), gradients=True), "monitor")
    trainer.add_hook("confusion_matrix", classes=["low", "high"], threshold=0.5)
    trainer.add_hook("throughput", every=3)
    trainer.train()


@pytest.mark.skipif(DEVICE == "cuda", reason="torch's functional collectives crash over gloo on a GPU (torch 2.11)")
@pytest.mark.parametrize("kind", ["fsdp2 and tensor", "tensor"])
def test_a_batch_counts_once_however_many_ranks_have_it(kind: str, tmp_path: Path) -> None:
    world_size = 4 if kind == "fsdp2 and tensor" else 2
    alone, together = (run(size, tmp_path / str(size), train_in_two_dimensions, kind) for size in (1, world_size))
    expected, found = layers_of(alone), layers_of(together)
    assert found.keys() == expected.keys()
    for key, values in found.items():
        torch.testing.assert_close(values, expected[key], rtol=1e-9, atol=1e-12, msg=str(key))
    counters = [json.loads((path / "run.json").read_text())["counters"] for path in (alone, together)]
    assert counters[0]["tokens_seen"] == counters[1]["tokens_seen"] == 6 * 16 * FEATURES
    tables = [[row.content for row in read_media(path)] for path in (alone, together)]
    assert tables[0] == tables[1]
    assert tables[0]

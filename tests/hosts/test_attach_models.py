"""Attached models of every kind: on several ranks, prepared by Accelerate, compiled, checkpointed."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from own_loops import Calls, Events, assert_same, batches, loss_of, make, rows_of, state_of, train
from rank_processes import run_on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline
from hookline import ClipNorm, HooklineError

OBSERVERS = ["gradient_monitor", "activation_stats", "ema", "lr_monitor"]

# ---- several ranks ---------------------------------------------------------------------------------------------------


def wrap(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    if kind == "ddp":
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)  # type: ignore[assignment]
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.05)


def numbers_of(model: nn.Module) -> list[float]:
    whole = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in model.parameters()]
    return torch.cat([param.detach().flatten() for param in whole]).tolist()  # type: ignore[no-any-return]


def on_a_rank(rank: int, kind: str, folder: str) -> dict[str, Any]:
    """Train with torch's own clipping, and attached with a hook that clips."""
    results = []
    for attached in (False, True):
        model, optimizer = wrap(kind)
        mine = batches(8)[rank::2]
        if not attached:
            for batch in mine:
                loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        else:
            events, calls = Events(), Calls()
            hooks = [ClipNorm(0.1), events, calls, *OBSERVERS]
            with hookline.attach(model, optimizer, hooks=hooks, output_dir=f"{folder}/runs") as hl:
                train(model, optimizer, hl.batches(mine), hl)
        results.append(numbers_of(model))
    losses = [row["train/loss"] for row in rows_of(hl)] if hl.run.run_dir else None
    return {
        "same": results[0] == results[1], "steps": hl.run.step, "calls": sorted({name for *_, name in calls.seen}),
        "params": list(hl.run.params), "losses": losses, "printed": hl.run.prints,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_several_ranks(kind: str, tmp_path: Path) -> None:
    """Clipping by a hook is that of torch, names are the model's own, and each rank's record has its own losses."""
    first, second = (result.value for result in run_on_ranks(on_a_rank, 2, kind, str(tmp_path)))
    assert first["same"] and second["same"] and first["steps"] == second["steps"] == 4
    assert first["params"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert first["calls"] == second["calls"] == ["0", "1", "2"]
    assert len(first["losses"]) == len(second["losses"]) == 4 and first["losses"] != second["losses"]
    assert first["printed"] and not second["printed"]


def sharded(rank: int, folder: str) -> list[str]:
    """Ask for what needs the whole weights."""
    refusals = []
    for hook in ("checkpoint", "nan_forensics"):
        try:
            hookline.attach(*wrap("fsdp2"), hooks=[hook], output_dir=folder)
        except HooklineError as error:
            refusals.append(str(error))
    return refusals


def test_what_a_sharded_model_cannot_do(tmp_path: Path) -> None:
    """One rank has a part of the weights: it can neither save them nor run the model alone."""
    (first, second), _ = (result.value for result in run_on_ranks(sharded, 2, str(tmp_path)))
    assert "'checkpoint' needs a run that can save" in first and "FSDP2 has sharded" in first
    assert "'nan_forensics' needs a run that can run a batch again" in second


def by_its_own_clock(rank: int, folder: str) -> list[str]:
    """Ask for hooks that all ranks have to call at the same step, by the clock of each."""
    refusals = []
    for kind, hook in (("ddp", "clip_norm"), ("fsdp2", "gradient_monitor"), ("fsdp2", "gradient_flow")):
        manager = hookline.HookManager()
        manager.register(hook, every="30 s", **({"max_norm": 1.0} if hook == "clip_norm" else {}))
        try:
            hookline.attach(*wrap(kind), hooks=manager, output_dir=folder)
        except HooklineError as error:
            refusals.append(str(error))
    manager = hookline.HookManager()
    manager.register("gradient_monitor", every="30 s")
    hookline.attach(*wrap("ddp"), hooks=manager, output_dir=folder)  # It reads what this process has.
    return refusals


def test_ranks_do_not_change_training_by_their_own_clocks(tmp_path: Path) -> None:
    """Their weights would part, or one would wait for the others' shards of a gradient."""
    results = [result.value for result in run_on_ranks(by_its_own_clock, 2, str(tmp_path))]
    words = "runs every 30 seconds, which each process counts for itself, but it has to run on all of them at once"
    expected = [f"'{hook}' {words}; count steps" for hook in ("clip_norm", "gradient_monitor", "gradient_flow")]
    assert results == [expected, expected]


def blame(rank: int, folder: str) -> dict[str, Any]:
    """Train under DDP until one rank's batch overflows."""
    model, optimizer = wrap("ddp")
    mine = batches(8)[rank::2]
    if rank == 1:
        mine[2] = (mine[2][0] * float("inf"), mine[2][1])
    with hookline.attach(model, optimizer, hooks=["nan_forensics"], output_dir=f"{folder}/{rank}") as hl:
        for batch in mine:
            train(model, optimizer, [batch])
            if hl.should_stop:
                break
    return {"step": hl.run.step, "autopsy": str(hl.run.hooks.get("nan_forensics").autopsy)}


def test_nan_forensics_under_ddp(tmp_path: Path) -> None:
    """Gradients are NaN on all ranks at once; each runs its own call again, without waiting for the others."""
    first, second = (result.value for result in run_on_ranks(blame, 2, str(tmp_path)))
    assert first["step"] == second["step"] == 3
    assert "the model's outputs are finite" in first["autopsy"]
    assert "the batch itself is not finite in args[0]" in second["autopsy"] and "module '0'" in second["autopsy"]


# ---- Accelerate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_is", ["prepared", "inner"])
@pytest.mark.parametrize("lines", ["none", "all"])
def test_accelerate(optimizer_is: str, lines: str) -> None:
    """Attach to what was prepared or to the optimizer inside: a step is one that Accelerate makes."""
    pytest.importorskip("accelerate")
    expected, losses, _ = train_prepared(lines, "prepared", None)
    events = Events()
    weights, _, hl = train_prepared(lines, optimizer_is, [events])
    assert_same(weights, expected)
    assert hl.run.step == 3 and events.names().count("step_end") == 3
    if lines == "all":
        assert events.names().count("train_batch_end") == 6
        means = [sum(losses[at : at + 2]) / 2 for at in (0, 2, 4)]  # Accelerate divides what it is passed.
        assert [row["train/loss"] for row in rows_of(hl)] == pytest.approx(means)


def train_prepared(
    lines: str, optimizer_is: str, hooks: list[Any] | None
) -> tuple[dict[str, torch.Tensor], list[float], Any]:
    """Train with accumulation and clipping by Accelerate, attached if there are hooks; return the losses, too."""
    import accelerate

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, inner = make()
    loader = torch.utils.data.DataLoader(batches(), batch_size=None)  # type: ignore[arg-type, var-annotated]
    prepared, optimizer, loader = accelerator.prepare(model, inner, loader)
    given = optimizer if optimizer_is == "prepared" else inner
    attached: Any = nullcontext()
    losses: list[float] = []
    if hooks is not None:
        attached = hookline.attach(prepared, given, hooks=hooks, accelerator=accelerator)
    with attached as hl:
        reports = hl is not None and lines == "all"
        for batch in hl.batches(loader) if reports else loader:
            with accelerator.accumulate(prepared):
                loss = loss_of(prepared, batch)
                losses.append(loss.item())
                (hl if reports else accelerator).backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return state_of(model), losses, hl


# ---- compiled models -------------------------------------------------------------------------------------------------


def graphs(how: str, backend: str, hooks: list[Any] | None) -> tuple[int, int, Any]:
    """Return the graphs and the breaks of a compiled training, and its weights."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, optimizer = make()
    trained: Any = model
    if how == "torch.compile":
        trained = torch.compile(model, backend=backend)
    elif how == "model.compile":
        model.compile(backend=backend)  # type: ignore[no-untyped-call]
    forward = torch.compile(loss_of, backend=backend) if how == "a function" else loss_of

    def loop() -> None:
        for batch in batches():
            forward(trained, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    if hooks is None:
        loop()
    else:
        with hookline.attach(trained, optimizer, hooks=hooks):
            loop()
    counts = torch._dynamo.utils.counters
    return counts["stats"]["unique_graphs"], sum(counts["graph_break"].values()), state_of(model)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["torch.compile", "model.compile", "a function"])
@pytest.mark.parametrize("hooks", ["none", "observers"])
def test_compiled_models_keep_their_graphs(how: str, backend: str, hooks: str) -> None:
    """Neither more graphs nor breaks, and the same bits: no hook on the model runs inside of compiled code."""
    plain = graphs(how, backend, None)
    attached = graphs(how, backend, [] if hooks == "none" else [*OBSERVERS, Events()])
    assert attached[:2] == plain[:2] and plain[0]
    assert_same(attached[2], plain[2])


def test_forensics_of_compiled_models() -> None:
    """The hook that records calls stands outside of the graph. Where it cannot, the loop is told what to do."""
    plain, recorded = (graphs("torch.compile", "eager", hooks) for hooks in ([], ["nan_forensics"]))
    assert recorded[:2] == plain[:2]
    assert_same(recorded[2], plain[2])
    for how in ("model.compile", "a function"):
        with pytest.raises(HooklineError, match="all the model itself, outside of compiled functions"):
            graphs(how, "eager", ["nan_forensics"])


# ---- gradient checkpointing ------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Repeats its first part in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.last, self.reentrant = make()[0], nn.Linear(2, 2), reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(self.inner, inputs.requires_grad_(), use_reentrant=self.reentrant)
        return self.last(inner)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    """What the backward pass repeats is not seen twice, and nothing of the training changes."""
    results = []
    for hooks in (None, [*OBSERVERS, "nan_forensics"]):
        torch.manual_seed(0)
        model = Checkpointed(reentrant)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        if hooks is None:
            train(model, optimizer, batches())
        else:
            calls = Calls()
            with hookline.attach(model, optimizer, hooks=[*hooks, calls]) as hl:
                train(model, optimizer, hl.batches(batches()))
        results.append(state_of(model))
    assert_same(*results)
    for name in ("inner.first", "last"):
        assert [(step, phase) for step, phase, called in calls.seen if called == name] == [
            (step, "train") for step in range(1, 7)
        ]

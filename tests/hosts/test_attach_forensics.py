"""`nan_forensics` in a loop of the user's own: the model's recorded call is run again, without the loss."""

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from own_loops import assert_same, batches, events_of, loss_of, make, state_of, train
from torch import nn
from torch.nn import functional

import hookline
from hookline import HooklineError, NanForensics, replay_crash


class Fragile(nn.Module):
    """Fails for large numbers."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(100 - inputs)


class Masked(nn.Module):
    """Has infinities inside that do no harm, as a mask of attention."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.index_fill(-1, torch.tensor([0]), -torch.inf)


def make_fragile() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    parts = nn.Linear(8, 16), nn.Dropout(0.2), Fragile(), Masked(), nn.Softmax(-1), nn.Linear(16, 2)
    model = nn.Sequential(*parts)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def with_bad(at: int = 4) -> list[Any]:
    data = batches()
    return [(inputs * 1e5 if number == at else inputs, target) for number, (inputs, target) in enumerate(data, 1)]


def loop(lines: str, hl: Any, model: Any, optimizer: Any, data: Any, spoils_loss: bool = False) -> None:
    for number, batch in enumerate(hl.batches(data) if "batches" in lines else data, 1):
        loss = functional.cross_entropy(model(batch[0]), batch[1]) * (torch.nan if spoils_loss and number == 4 else 1)
        if lines == "none":
            loss.backward()
        else:
            hl.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if hl.should_stop:
            break


@pytest.mark.parametrize("lines", ["none", "backward", "batches", "batches and step_fn"])
def test_the_module_of_the_forward_pass_is_found(lines: str) -> None:
    """In every loop, with whatever it reports; the step is skipped, the run stops, and the crash can be replayed."""
    model, optimizer = make_fragile()
    step_fn = loss_of if "step_fn" in lines else None
    with hookline.attach(model, optimizer, hooks=["nan_forensics"], step_fn=step_fn) as hl:
        loop(lines, hl, model, optimizer, with_bad())
    hook = hl.run.hooks.get("nan_forensics")
    assert hook.autopsy.module == "2" and "the first NaN came out of module '2'" in str(hook.autopsy)
    assert hl.run.step == 4 and hl.run.skipped_steps == 1 and hl.run.record.run["outcome"] == "non_finite"
    assert all(param.isfinite().all() for param in model.parameters())
    assert [event["module"] for event in events_of(hl) if event["kind"] == "crash"] == ["2"]
    report = json.loads((hook.crash / "crash.json").read_text())
    assert report["reason"] == ("non-finite gradients" if lines == "none" else "loss nan")
    again = hookline.attach(*make_fragile(), step_fn=step_fn)
    if step_fn is None:
        assert report["autopsy"]["loss"] is None and replay_crash(hook.crash, again.run).same


def test_a_loss_that_is_to_blame() -> None:
    """The model's outputs are finite then: what is not known is said, with what would tell."""
    model, optimizer = make_fragile()
    with hookline.attach(model, optimizer, hooks=["nan_forensics"]) as hl:
        loop("none", hl, model, optimizer, batches(), spoils_loss=True)
    autopsy = hl.run.hooks.get("nan_forensics").autopsy
    assert autopsy.module is None and "0.weight" in autopsy.gradients
    assert "the cause is the loss or the backward pass, which can be run again only with step_fn" in str(autopsy)


def test_it_changes_nothing_while_all_is_well() -> None:
    """Weights, running means and random streams, also under gradient accumulation and with validations in between."""
    results = []
    for hooks in (None, [NanForensics(stop_run=False)]):
        model, optimizer = make()

        def mine(model: Any = model, optimizer: Any = optimizer) -> None:
            for number, batch in enumerate(batches(), 1):
                (loss_of(model, batch) / 2).backward()  # type: ignore[no-untyped-call]
                if number % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                with torch.no_grad():
                    model.eval()(batch[0])
                model.train()

        if hooks is None:
            mine()
        else:
            with hookline.attach(model, optimizer, hooks=hooks) as hl:
                mine()
                assert len(hl.run.calls) == 2, "those of the step that has not ended, and none of a validation"
        results.append(state_of(model))
    assert_same(*results)


def test_one_of_several_calls() -> None:
    """Of a step with several micro-batches the one that went wrong is found, and written."""
    model, optimizer = make_fragile()
    with hookline.attach(model, optimizer, hooks=["nan_forensics"]) as hl:
        for batch in with_bad(at=2)[:4]:
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    hook = hl.run.hooks.get("nan_forensics")
    assert hook.autopsy.module == "2" and hl.run.skipped_steps == 1


def test_autocast_is_repeated() -> None:
    """A module that overflows in fp16 and not in fp32 is found only there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    nn.init.constant_(model[0].weight, 1e3)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hookline.attach(model, optimizer, hooks=["nan_forensics"]) as hl:
        with torch.autocast("cpu", torch.float16):
            output = model(torch.full((4, 8), 1e2))
        functional.mse_loss(output.float(), torch.zeros(4, 2)).backward()
        optimizer.step()
    assert hl.run.hooks.get("nan_forensics").autopsy.first_inf == "0"


@pytest.mark.parametrize("lines", ["none", "backward"])
def test_gradients_that_a_scaler_overflows_are_no_crash(lines: str) -> None:
    """Running the model again tells an overflow, which the scaler handles, from a NaN of the model."""
    for data, crashes in ((batches(), 0), (with_bad(), 1)):
        model, optimizer = make_fragile()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        with hookline.attach(model, optimizer, hooks=["nan_forensics"], scaler=scaler) as hl:
            for batch in data:
                loss = loss_of(model, batch) * 8
                hl.backward(loss) if lines == "backward" else scaler.scale(loss).backward()
                hl.optimizer_step()
                scaler.update()
                optimizer.zero_grad()
                if hl.should_stop:
                    break
        assert [event["kind"] for event in events_of(hl)].count("crash") == crashes
        assert hl.run.skipped_steps >= 1, "the scale begins too high"


def test_a_model_that_is_never_called_is_refused() -> None:
    """As that of a GAN whose parts are called: nothing was recorded that could be run again."""
    model, optimizer = make()
    refused = pytest.raises(HooklineError, match=r"'nan_forensics' needs a run that can run a batch again.*step_fn=")
    with refused, hookline.attach(model, optimizer, hooks=["nan_forensics"]):
        model.last(torch.randn(4, 16)).sum().backward()
        optimizer.step()


def test_the_record_of_calls_ends_with_their_step() -> None:
    """Their inputs are not kept longer than they may be needed."""
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=["nan_forensics"]) as hl:
        train(model, optimizer, batches(3), hl)
        assert len(hl.run.calls) == 1
        assert not hl.should_stop and not hl.run.calls


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_loop_may_copy_the_model_whose_calls_are_recorded(copied: Any) -> None:
    """As one that keeps its best model does; the copy is not recorded."""
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=["nan_forensics"], output_dir=None) as hl:
        train(model, optimizer, batches(3), hl)
        twin = copied(model)
        assert_same(state_of(twin), state_of(model))
        before = len(hl.run.calls)
        twin(batches(1)[0][0])
        assert len(hl.run.calls) == before

"""A hook that calls collectives declares it; one that does not is refused, and so is a rank that would wait alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_on_ranks
from rank_runs import DEVICE, make_batches, make_mesh, make_model, make_trainer, make_watch_patient, whole_weights
from torch import distributed

from hookline import HookManager, TrainingHook
from hookline.errors import RankError, RegistrationError
from hookline.ranks import Ranks


class SumOfRanks(TrainingHook):
    collective = True
    fails_on: int | None = None

    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == 3 and trainer.ranks.rank == self.fails_on:
            raise ValueError("boom")
        own = torch.tensor([float(trainer.ranks.rank + 1)])
        distributed.all_reduce(own, group=trainer.ranks.group)
        self.sums.append(own.item())


def sum_ranks(rank: int, folder: str, fails_on: int | None) -> list[float]:
    make_watch_patient()
    trainer = make_trainer("ddp", rank, 2, folder)
    hook = SumOfRanks()
    hook.fails_on = fails_on
    trainer.add_hook(hook, "sums")
    trainer.train()
    return hook.sums


def test_a_collective_hook_adds_up_over_the_ranks_and_its_failure_ends_the_run(tmp_path: Path) -> None:
    assert [one.value for one in run_on_ranks(sum_ranks, 2, str(tmp_path / "good"), None)] == [[3.0] * 8] * 2
    failed = run_on_ranks(sum_ranks, 2, str(tmp_path / "bad"), 1, check=False)
    assert [one.exit_code for one in failed] == [1, 1]
    run = json.loads(next((tmp_path / "bad").glob("*/run.json")).read_text())
    assert "raised by hook 'sums' in on_step_end, step 3, rank 1" in run["reason"]


def test_a_collective_hook_takes_no_other_policy_and_no_choice_of_ranks() -> None:
    trainer = make_trainer("none", 0, 1, None)
    for options in ({"on_error": "warn"}, {"ranks": "zero"}):
        with pytest.raises(RegistrationError, match="collective"):
            trainer.add_hook(SumOfRanks(), **options)


class Agreed(TrainingHook):
    same_on_all_ranks = True

    def on_step_end(self) -> None: ...


ON_ALL_RANKS = (
    "activation_stats", "checkpoint", "debug_training", "early_stopping", "ema", "gradient_flow", "gradient_monitor",
    "monitor", "nan_forensics",
)  # fmt: skip


def choose_ranks(rank: int) -> dict[str, str]:
    HookManager().register("monitor", ranks="zero")  # in a user's own loop it measures its own rank
    trainer = make_trainer("ddp", rank, 2, None)
    refused = {}
    for hook in (*ON_ALL_RANKS, Agreed(), "throughput", "loss_spike"):
        try:
            trainer.add_hook(hook, ranks="zero")
        except RegistrationError as error:
            refused[str(hook if isinstance(hook, str) else hook.__class__.__name__)] = str(error)
    return refused


def test_a_hook_that_all_ranks_must_call_takes_no_choice_of_ranks() -> None:
    for result in run_on_ranks(choose_ranks, 2):
        assert list(result.value) == [*ON_ALL_RANKS, "Agreed"]
        assert all("must be called on all of them; leave out its `ranks`" in one for one in result.value.values())


def test_a_choice_of_ranks_is_refused_when_the_hooks_get_a_run_on_several_ranks() -> None:
    hooks = HookManager()
    hooks.register("nan_forensics", ranks="zero")
    several = Ranks()
    several.act_together = True
    with pytest.raises(RegistrationError, match="'nan_forensics' needs every rank"):
        hooks.set_ranks(several)


class EveryKind(TrainingHook):
    """Tries every kind of collective without declaring any."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def on_train_start(self, trainer: Any) -> None:
        ones = torch.ones(2)
        for call in (
            lambda: distributed.all_reduce(ones),
            lambda: distributed.broadcast(ones, 0),
            lambda: distributed.barrier(),
            lambda: distributed.all_gather_object([None, None], "x"),
            lambda: distributed.all_gather([ones, ones], ones),
            lambda: next(iter(trainer.params.values())).full_tensor(),
            lambda: trainer.ranks.decide(True),
            lambda: trainer.model(make_batches(0, 2)[0][0]),
        ):
            try:
                call()
            except RankError as error:
                self.refused.append(str(error))


class ReadNorm(TrainingHook):
    """Reads a number on one rank that all ranks compute."""

    ranks = "zero"

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_step_end(self, ctx: Any) -> None:
        self.norms.append(ctx.grad_norm)


def try_every_kind(rank: int) -> list[Any]:
    trainer = make_trainer("fsdp2", rank, 2, None)
    hook, norms = EveryKind(), ReadNorm()
    trainer.add_hook(hook, "careless")
    trainer.add_hook(norms)
    trainer.train()
    return [hook.refused, norms.norms]


def test_every_kind_of_collective_is_refused_in_a_hook_that_does_not_declare_it() -> None:
    for rank, result in enumerate(run_on_ranks(try_every_kind, 2)):
        refused, norms = result.value
        assert len(refused) == 8
        assert all("hook 'careless' calls a collective in on_train_start" in one for one in refused)
        assert len(norms) == (0 if rank else 8)


class InMethods(TrainingHook):
    """Tries collectives in methods that are not events: on a group of its own, and over the shards of the gradients."""

    def __init__(self) -> None:
        self.own, self.refused = distributed.new_group(backend="gloo"), dict[str, list[str]]()

    def _try(self, where: str) -> None:
        said = self.refused.setdefault(where, [])
        for call in (
            lambda: distributed.all_reduce(torch.ones(2), group=self.own),
            lambda: torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0),
        ):
            try:
                call()
            except RankError as error:
                said.append(str(error))

    def on_gradients_ready(self, model: Any) -> None:
        self.model = model
        self.gradients = {name: param.grad for name, param in model.named_parameters()}
        self._try("on_gradients_ready")

    def state_dict(self) -> dict[str, Any]:
        for name, param in self.model.named_parameters():
            param.grad = self.gradients[name]
        self._try("state_dict")
        self.model.zero_grad(set_to_none=True)
        return {}

    def close(self) -> None:
        self._try("close")


def try_in_methods(rank: int, folder: str) -> dict[str, list[str]]:
    trainer = make_trainer("fsdp2", rank, 2, folder, max_steps=1)
    hook = InMethods()
    trainer.add_hook(hook, "careless", on_error="raise")
    trainer.add_hook("checkpoint")
    trainer.train()
    return hook.refused


def test_collectives_on_a_group_of_its_own_and_over_shards_are_refused_in_every_method(tmp_path: Path) -> None:
    for result in run_on_ranks(try_in_methods, 2, str(tmp_path)):
        assert {where: len(said) for where, said in result.value.items()} == {
            "on_gradients_ready": 2, "state_dict": 2, "close": 1
        }  # fmt: skip
        for where, said in result.value.items():
            assert all(f"hook 'careless' calls a collective in {where} (" in one for one in said)


class InsideOthers(TrainingHook):
    """Tries a collective inside of what all ranks take part in, and validates, which it may."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def _act(self) -> None:
        try:
            distributed.all_reduce(torch.ones(1))
        except RankError as error:
            self.refused.append(str(error).split("(")[0])

    on_validation_batch_start = on_validation_end = on_checkpoint_save = _act

    def on_train_end(self, trainer: Any) -> None:
        trainer.validate()
        self._act()


def try_inside_others(rank: int, folder: str) -> list[str]:
    trainer = make_trainer(
        "ddp", rank, 2, folder, val_loaders=make_batches(rank, 2, 1), sanity_batches=0, validate_every=8
    )
    hook = InsideOthers()
    trainer.add_hook(hook, "careless", on_error="raise")
    trainer.add_hook("checkpoint")
    trainer.train()
    return hook.refused


def test_a_collective_is_refused_inside_of_a_validation_and_a_checkpoint_as_well(tmp_path: Path) -> None:
    validation = ["on_validation_batch_start", "on_validation_end"]
    for result in run_on_ranks(try_inside_others, 2, str(tmp_path)):
        said = [one.removeprefix("hook 'careless' calls a collective in ").strip() for one in result.value]
        assert said == [*validation, "on_checkpoint_save", *validation, "on_train_end"]


class OnOneRank(TrainingHook):
    """Calls what all ranks take part in, on one rank."""

    ranks = "zero"

    def __init__(self) -> None:
        self.refused: list[str] = []

    def on_step_end(self, trainer: Any, step: int) -> None:
        for call in (lambda: run_model(trainer), trainer.validate, trainer.save_checkpoint) if step == 2 else ():
            try:
                call()
            except RankError as error:
                self.refused.append(str(error))


def run_model(trainer: Any) -> None:
    with trainer.inference() as model:
        model(make_batches(0, 2)[0][0].to(DEVICE))


class OnAllRanks(TrainingHook):
    """Runs the model between the backward pass and the optimizer step, and validates; it declares nothing."""

    def on_gradients_ready(self, trainer: Any) -> None:
        run_model(trainer)

    def on_step_end(self, trainer: Any) -> None:
        trainer.validate()


def train_sharded(rank: int, with_hooks: bool) -> list[Any]:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(
        make_model(), mesh=make_mesh(shard=2)
    )  # in one piece, which FSDP leaves whole after a forward pass
    trainer = make_trainer("none", rank, 2, None, model=model, val_loaders=make_batches(rank, 2), validate_every=None)
    hook = OnOneRank()
    if with_hooks:
        trainer.add_hook(hook, "careless")
        trainer.add_hook(OnAllRanks(), on_error="raise")
    trainer.train()
    return [hook.refused, whole_weights(trainer)]


def test_what_all_ranks_take_part_in_is_refused_in_a_hook_that_some_do_not_call_and_else_harmless() -> None:
    plain, hooked = (run_on_ranks(train_sharded, 2, with_hooks)[0].value for with_hooks in (False, True))
    assert hooked[1] == plain[1]
    for one, what in zip(hooked[0], ["inference() of a sharded model", "validate()", "save_checkpoint()"], strict=True):
        assert f"hook 'careless' calls {what}, which needs all ranks, but it is called on ranks [0] only" in one


class Careless(TrainingHook):
    def on_step_end(self, step: int) -> None:
        if step == 2:
            distributed.all_reduce(torch.ones(1))


class InferOnRank0(TrainingHook):
    ranks = "zero"

    def on_step_end(self, trainer: Any) -> None:
        run_model(trainer)


def call_a_collective(rank: int, folder: str) -> None:
    make_watch_patient()
    trainer = make_trainer("ddp", rank, 2, folder)
    trainer.add_hook(InferOnRank0(), on_error="raise")  # each rank has the whole model
    trainer.add_hook(Careless(), "careless")  # under its policy, warn
    trainer.train()


def test_an_undeclared_collective_ends_the_run_whatever_the_policy(tmp_path: Path) -> None:
    results = run_on_ranks(call_a_collective, 2, str(tmp_path), check=False)
    assert [one.exit_code for one in results] == [1, 1]
    run = json.loads(next(tmp_path.glob("*/run.json")).read_text())
    assert "hook 'careless' calls a collective in on_step_end" in run["reason"]

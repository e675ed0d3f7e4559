"""Hooks that draw random numbers leave training's alone, are found, and get streams of their own."""

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_batches, make_trainer

from hookline import ForwardHook, HookRegistry, SimpleTrainer, TrainingHook, UpdateHook
from hookline.gradients.transforms import Identity, LinkNorms
from hookline.record import read_jsonl


def drawing_trainer(*hooks: Any, steps: int = 12, **options: Any) -> SimpleTrainer:
    """A model with dropout, so that training itself draws at every step."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    options = {"data": make_batches(12), "max_steps": steps, "seed": 5, "record": True, **options}
    return make_trainer(*hooks, model=model, **options)


def outcome(trainer: Any) -> tuple[list[bytes], Any]:
    """The parameters bit for bit, and where every stream stands."""
    params = [param.detach().numpy().tobytes() for param in trainer.model.parameters()]
    position = np.random.get_state()
    return params, (torch.get_rng_state().numpy().tobytes(), random.getstate(), position[1].tobytes(), position[2:])


def trained(*hooks: Any, **options: Any) -> Any:
    trainer = drawing_trainer(*hooks, **options)
    trainer.train()
    return trainer


def drew(trainer: Any) -> list[tuple[str, str]]:
    """Who was found to draw, and at which event."""
    lines = [json.loads(line) for line in (trainer.run_dir / "events.jsonl").read_text().splitlines()]
    return [(line["hook"], line["on"]) for line in lines if line["kind"] == "hook_drew"]


class Draws(TrainingHook):
    """Draws from all three libraries at every batch."""

    def __init__(self) -> None:
        self.drawn: list[tuple[float, float, float]] = []

    def on_train_batch_end(self) -> None:
        self.drawn.append((torch.randn(1).item(), random.gauss(0, 1), float(np.random.standard_normal())))


class Quiet(TrainingHook):
    """A hook of the same event that draws nothing."""

    def __init__(self) -> None:
        self.called = 0

    def on_train_batch_end(self) -> None:
        self.called += 1


def test_training_is_unchanged_and_the_hook_is_named() -> None:
    """Losses, parameters and every stream are those of a run without the hook; the record says who drew."""
    plain = outcome(trained())
    hook, quiet = Draws(), Quiet()
    trainer = trained(quiet, hook)
    assert outcome(trainer) == plain
    assert drew(trainer) == [("draws", "on_train_batch_end")]
    assert quiet.called == len(hook.drawn) == 12


def test_a_hook_that_draws_continues_drawing_new_numbers() -> None:
    """Never merely rewound: from the third draw on, at the latest, every number is new."""
    hook = Draws()
    trained(Quiet(), hook)
    for column in zip(*hook.drawn[1:], strict=True):
        assert len(set(column)) == 11


def test_its_numbers_are_the_same_in_every_run_and_with_other_hooks_beside_it() -> None:
    """They come from the run's seed and the hook's name; finding out takes one event more in company."""
    alone, again, in_company = Draws(), Draws(), Draws()
    trained(alone)
    trained(again)
    trained(Quiet(), in_company)
    assert alone.drawn == again.drawn
    assert in_company.drawn[2:] == alone.drawn[1:-1]


def test_a_hook_alone_at_its_event_is_identified_at_once() -> None:
    """No second event is needed to find out who it was."""
    hook = Draws()
    trainer = trained(hook, steps=1)
    assert drew(trainer) == [("draws", "on_train_batch_end")]


def test_two_that_draw_are_both_found_and_draw_apart() -> None:
    """Each gets separate streams, under its name."""
    one, two = Draws(), Draws()
    trainer = drawing_trainer()
    trainer.add_hook(one, name="one")
    trainer.add_hook(two, name="two")
    trainer.train()
    assert sorted(hook for hook, _ in drew(trainer)) == ["one", "two"]
    assert not set(one.drawn[2:]) & set(two.drawn[2:])
    assert outcome(trainer) == outcome(trained())


def test_forward_and_update_hooks_are_watched_too() -> None:
    """Wherever a user's code runs."""

    class Watch(ForwardHook):
        modules = "0"

        def on_forward(self, output: Any) -> None:
            torch.rand(3)

    class Noise(UpdateHook):
        def on_update(self, grads: Any) -> Any:
            random.random()
            return grads

    plain = outcome(trained())
    trainer = trained(Watch(), Noise())
    assert outcome(trainer) == plain
    assert sorted(drew(trainer)) == [("noise", "on_update"), ("watch", "on_forward")]


def test_seeding_is_undone_unless_the_hook_sets_isolate_rng_false() -> None:
    """With `isolate_rng = False` it is listed as an intervener, and training follows its seed."""

    class Seeds(TrainingHook):
        def on_train_start(self) -> None:
            torch.manual_seed(123)

    class SeedsOnPurpose(Seeds):
        isolate_rng = False

    plain = outcome(trained())
    assert outcome(trained(Seeds())) == plain
    on_purpose = trained(SeedsOnPurpose(), Quiet())
    assert outcome(on_purpose) != plain
    listed = {record.name: record.intervenes for record in on_purpose.hooks.list_hooks()}
    assert listed["seeds_on_purpose"] and not listed["quiet"]


def test_others_at_the_event_of_a_seeder_are_still_watched() -> None:
    """The seeder's effect stays; what the other draws does not count."""

    class Seeds(TrainingHook):
        isolate_rng = False

        def on_train_batch_end(self, batch_idx: int) -> None:
            torch.manual_seed(batch_idx)

    alone = outcome(trained(Seeds()))
    trainer = trained(Seeds(), Draws())
    assert outcome(trainer) == alone
    assert drew(trainer) == [("draws", "on_train_batch_end")]


@pytest.mark.req("002-82")
def test_a_sampling_hook_processes_its_share() -> None:
    """Under save-and-restore alone it would see the same number every time, and process all batches or none."""

    class Sampler(TrainingHook):
        def __init__(self) -> None:
            self.processed = 0

        def on_train_batch_end(self) -> None:
            self.processed += torch.rand(1).item() < 0.1

    hook = Sampler()
    trained(hook, steps=300, max_epochs=100)
    assert 10 < hook.processed < 60


def test_a_resumed_run_draws_on() -> None:
    """The hooks' streams are saved with the run: what comes after a resume is what would have come."""

    class Remembers(Draws):
        saves = ("drawn",)

    whole, first, second = Remembers(), Remembers(), Remembers()
    trained(whole)
    stopped = drawing_trainer(first, steps=6)
    stopped.add_hook("checkpoint", save_every_n_steps=6)
    stopped.train()
    resumed = drawing_trainer(second)
    resumed.add_hook("checkpoint", save_every_n_steps=6)
    resumed.fit(resume=stopped.run_dir)
    assert second.drawn == whole.drawn


def test_without_a_run_nothing_is_watched(registry: HookRegistry) -> None:
    """A registry that a user fires manually has no training to protect."""
    registry.register(Draws())
    before = torch.get_rng_state()
    registry.on_train_batch_end()
    assert not torch.equal(torch.get_rng_state(), before)


def test_built_in_hooks_are_not_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are proven not to draw, and cost nothing here."""
    from hookline.core.rng_guard import TrainingStreams

    snapshots = []
    monkeypatch.setattr(TrainingStreams, "snapshot", lambda self, positions: snapshots.append(1))
    trainer = drawing_trainer()
    trainer.add_json_logging(log_every_n_batches=1)
    trainer.train()
    assert not snapshots


def test_a_guarded_hook_that_passes_gradients_through_is_still_known_as_one() -> None:
    """Its norms before and after are the same and are not logged, whether it is checked for drawing or not."""

    class Mine(Identity):
        built_in = False
        name = "mine"

    class Seeds(UpdateHook):
        isolate_rng = False  # so that every other hook of the event is checked by itself

        def on_update(self, grads: Any) -> Any:
            return grads

    trainer = trained(Mine(), Seeds(), LinkNorms(), steps=2)
    metrics, _ = read_jsonl(trainer.run_dir / "metrics.jsonl")
    assert sorted(name for name in metrics[0] if name.startswith("update/")) == [
        "update/seeds/norm_after",
        "update/seeds/norm_before",
    ]

"""Who hears a model when its run is over: nobody that was closed with it, until the next run begins."""

import torch
from torch import nn

from hookline import SimpleTrainer

BATCHES = [(torch.randn(4, 4), torch.randint(0, 2, (4,))) for _ in range(3)]


def test_hooks_that_were_closed_with_a_run_hear_nothing_until_the_next() -> None:
    """A capture would go on keeping states that nobody could read, and no budget counted."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    options = {"loss_fn": nn.functional.cross_entropy, "console": False, "record": False, "max_epochs": 1}
    trainer = SimpleTrainer(model, BATCHES, torch.optim.SGD(model.parameters(), 0.1), "cpu", **options)
    trainer.hooks.register_capture_hook("*", "kept")
    capture, seen = trainer.hooks.get("kept"), []
    trainer.on("train_end", name="look")(lambda trainer: seen.append(len(trainer.hooks.get_captured_states("kept"))))
    trainer.train()
    model(BATCHES[0][0])
    assert len(capture._shelf) == 0
    trainer.options.max_epochs = 2
    trainer.train()
    assert seen == [9, 9]


def test_a_hook_that_has_nothing_to_close_hears_the_model_on() -> None:
    """A validation after the run, for one."""
    model = nn.Sequential(nn.Linear(4, 2))
    options = {"loss_fn": nn.functional.cross_entropy, "console": False, "record": False, "max_epochs": 1}
    trainer = SimpleTrainer(model, BATCHES, torch.optim.SGD(model.parameters(), 0.1), "cpu", **options)
    phases: list[str] = []
    trainer.on("forward", name="hears")(lambda name, phase: phases.append(phase) if name == "0" else None)
    trainer.train()
    trainer.validate(BATCHES)
    assert len(phases) == 6

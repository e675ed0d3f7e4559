"""Hooks that fail under load: at random in every event, in a thread, by hoarding, while they are removed.

Training ends where it would have ended without them, and every failure is counted once: by the hook that caused it, in
the list of hooks, in events.jsonl and in run.json's counters.
"""

import gc
import json
import logging
import queue
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_batches, make_trainer
from torch import nn

from hookline import ForwardHook, Trainer, TrainingHook, UpdateHook
from hookline.core.catalog import CATALOG

STRIKES = 3  # failures in a row after which a hook is disabled
EVENTS = [event.name for event in CATALOG.values() if event.kind == "lifecycle"]
NOT_HERE = {"on_exception", "on_checkpoint_load"}  # nothing fails but hooks, and nothing is resumed
LENGTHS = [500, pytest.param(10_000, marks=pytest.mark.soak)]


class Trouble:
    """Raises at random, at one event at most `most` times in a row, and counts its failures."""

    def __init__(self, seed: int, share: float, gives_up_at: int = STRIKES, most: int = STRIKES) -> None:
        self.chance, self.share, self.gives_up_at, self.most = random.Random(seed), share, gives_up_at, most
        self.raised = self.switched_off = 0
        self.calls: Counter[str] = Counter()
        self.row: Counter[str] = Counter()

    def perhaps_fail(self, event: str) -> None:
        self.calls[event] += 1
        if self.chance.random() >= self.share or self.row[event] == self.most:
            self.row[event] = 0
            return
        self.raised += 1
        self.row[event] += 1
        if self.row[event] == self.gives_up_at:
            self.switched_off += 1
            self.row.clear()
        raise RuntimeError(f"trouble in {event}")


def everywhere() -> type[Trouble]:
    """Make a lifecycle hook that listens to every event, and may fail at it."""

    def method(event: str) -> Callable[[Any], None]:
        return lambda self: self.perhaps_fail(event)

    return type("Everywhere", (Trouble, TrainingHook), {name: method(name) for name in EVENTS})


class InForward(Trouble, ForwardHook):
    """Fails inside the forward pass."""

    modules = "*"

    def on_forward(self) -> None:
        self.perhaps_fail("on_forward")


class InUpdate(Trouble, UpdateHook):
    """Fails in the update chain; the gradients stay as they were."""

    def on_update(self, grads: Any) -> Any:
        self.perhaps_fail("on_update")
        return grads


class Quitter(TrainingHook):
    """Removes itself during its own call, and then fails."""

    def __init__(self, trainer: Trainer, name: str) -> None:
        self.trainer, self.called, self.raised = trainer, name, 0

    def on_train_batch_end(self) -> None:
        self.trainer.remove_hook(self.called)
        self.raised += 1
        raise RuntimeError("and I am gone")


class Hanging(TrainingHook):
    """Passes work to a thread that never does it."""

    def __init__(self) -> None:
        self.work: queue.Queue[int] = queue.Queue(maxsize=10)
        self.let_go = threading.Event()
        self.thread = threading.Thread(target=self.let_go.wait, daemon=True)
        self.thread.start()

    def on_step_end(self, step: int) -> None:
        self.work.put_nowait(step)


class Hoarder(TrainingHook):
    """Keeps everything it receives, up to a limit, and then fails."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_gradients_ready(self, grads: Any, batch: Any) -> None:
        self.kept.append((grads, batch))
        if len(self.kept) > 200:
            raise MemoryError("enough")


def train(steps: int, root: Path, dress: Callable[[Trainer], Any] | None = None) -> Trainer:
    """Run training with every event: it validates, saves, clips, and skips some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    batches = make_batches(50)
    batches[40] = (torch.full((4, 3), torch.inf), torch.zeros(4, 1))
    trainer = make_trainer(
        "skip_nonfinite", model=model, data=batches, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        max_steps=steps, val_dataloader=batches[:2], validate_every=steps // 10, record=True, output_dir=str(root),
        warn_above=None,
    )  # fmt: skip
    trainer.add_hook("clip_norm", max_norm=1.0)
    trainer.add_hook("checkpoint", save_every_n_epochs=None, save_every_n_steps=steps // 5)
    if dress is not None:
        dress(trainer)
    torch.manual_seed(1)
    trainer.train()
    return trainer


def events_of(trainer: Trainer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (trainer.run_dir / "events.jsonl").read_text().splitlines()]


def run_json(trainer: Trainer) -> dict[str, Any]:
    return json.loads((trainer.run_dir / "run.json").read_text())


def counted(trainer: Trainer, kind: str) -> Counter[str]:
    """Return how many events of a kind the record has for each hook."""
    return Counter(event["hook"] for event in events_of(trainer) if event["kind"] == kind)


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.hooks_fail(raises=RuntimeError)
def test_failures_at_random_in_every_event(steps: int, tmp_path: Path) -> None:
    """Each failure and each disabled hook is counted once under every policy; training is as without the hooks."""
    hooks: dict[str, Any] = {
        "rare": everywhere()(1, 0.01),
        "often": everywhere()(2, 0.3),
        "once": everywhere()(3, 0.01, gives_up_at=1),
        "in_forward": InForward(4, 0.2),
        "in_update": InUpdate(5, 0.3),
    }

    def dress(trainer: Trainer) -> None:
        for name, hook in hooks.items():
            trainer.add_hook(hook, name, on_error="disable" if name == "once" else "warn")

        @trainer.on("step_end", every=25)
        def nurse() -> None:
            for name in hooks:
                trainer.enable_hook(name)

    trainer = train(steps, tmp_path / "runs", dress)
    raised = {name: hook.raised for name, hook in hooks.items()}
    assert trainer.step == steps and run_json(trainer)["outcome"] == "completed"
    assert set().union(*(hook.calls for hook in hooks.values())) >= set(EVENTS) - NOT_HERE  # a control
    assert min(raised.values()) > 10 and sum(hook.switched_off > 0 for hook in hooks.values()) >= 4  # and another
    assert counted(trainer, "hook_failed") == raised
    assert counted(trainer, "hook_disabled") == Counter({name: hook.switched_off for name, hook in hooks.items()})
    listed = {row["name"]: row["failures"] for row in run_json(trainer)["hooks"] if row["name"] in hooks}
    assert listed == raised
    assert run_json(trainer)["counters"]["hook_failures"] == sum(raised.values())
    calm = train(steps, tmp_path / "calm")
    assert all(map(torch.equal, trainer.model.state_dict().values(), calm.model.state_dict().values()))
    assert trainer.skipped_steps == calm.skipped_steps > 0


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.hooks_fail(raises=RuntimeError)
def test_hooks_removed_while_they_run(steps: int, tmp_path: Path) -> None:
    """No failure is lost when a hook is removed during a failing call, by itself or by another thread."""
    quitters: list[Quitter] = []
    troubled: list[Trouble] = []
    ended = threading.Event()

    def dress(trainer: Trainer) -> None:
        @trainer.on("step_end", every=5)
        def recruit(step: int) -> None:
            quitters.append(Quitter(trainer, f"quitter_{step}"))
            trainer.add_hook(quitters[-1], f"quitter_{step}")

        def come_and_go() -> None:
            while not ended.is_set():
                troubled.append(everywhere()(len(troubled), 0.3))
                with trainer.add_hook(troubled[-1], f"passing_{len(troubled)}"):
                    ended.wait(0.02)

        thread = threading.Thread(target=come_and_go)
        trainer.on("train_start", name="opening")(thread.start)
        trainer.on("train_end", name="closing")(lambda: (ended.set(), thread.join()))

    trainer = train(steps, tmp_path, dress)
    caused = sum(hook.raised for hook in (*quitters, *troubled))
    assert trainer.step == steps and run_json(trainer)["outcome"] == "completed"
    assert len(quitters) == steps // 5 and all(hook.raised == 1 for hook in quitters[:-1])
    assert sum(hook.raised for hook in troubled) > 10  # a control
    assert sum(counted(trainer, "hook_failed").values()) == caused
    assert run_json(trainer)["counters"]["hook_failures"] == caused
    assert not any(name.startswith(("quitter", "passing")) for name in list(trainer.hooks)[:-1])


@pytest.mark.hooks_fail(raises=queue.Full)
def test_a_hook_with_a_hanging_thread(tmp_path: Path) -> None:
    """The hook fails when its queue is full, is disabled, and the run ends although its thread still hangs."""
    hook = Hanging()
    trainer = train(500, tmp_path, lambda trainer: trainer.add_hook(hook))
    assert trainer.step == 500 and hook.thread.is_alive()
    assert counted(trainer, "hook_failed") == {"hanging": STRIKES}
    assert counted(trainer, "hook_disabled") == {"hanging": 1}
    hook.let_go.set()


@pytest.mark.hooks_fail(raises=MemoryError)
def test_a_hook_that_keeps_everything(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A hook that keeps everything is disabled when it fails, and is freed when it is removed."""
    caplog.set_level(logging.CRITICAL, "hookline")  # a logged traceback would lead to the hook, and be kept
    trainer = train(500, tmp_path, lambda trainer: trainer.add_hook(Hoarder()))
    assert trainer.step == 500 and len(trainer.hooks.get("hoarder").kept) == 200 + STRIKES
    assert run_json(trainer)["counters"]["hook_failures"] == STRIKES
    there = weakref.ref(trainer.remove_hook("hoarder"))
    gc.collect()
    assert there() is None

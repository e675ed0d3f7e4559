"""Document 001's code blocks, as written there; only the import lines are ours."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookline
from hookline import BaseTrainer, CheckpointHook, ConsoleLogHook, HookManager, JSONLogHook, SimpleTrainer


class Classifier(nn.Module):
    """A model that returns its own loss, so that five positional arguments are enough."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs, targets):
        return {"loss": nn.functional.cross_entropy(self.layer(inputs), targets)}


@pytest.fixture
def parts():
    torch.manual_seed(0)
    model = Classifier()
    data = TensorDataset(torch.randn(120, 4), torch.randint(0, 2, (120,)))
    dataloader = DataLoader(data, batch_size=1)
    return model, dataloader, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu")


def quick_start(model, dataloader, optimizer, device):
    from hookline import get_trainer

    # Create trainer
    trainer = get_trainer("simple", model, dataloader, optimizer, device)

    # Add built-in hooks
    trainer.add_console_logging(log_every_n_batches=10)
    trainer.add_json_logging(log_every_n_batches=100)
    trainer.add_checkpointing(save_every_n_epochs=1)

    # Train with hooks
    trainer.train()
    return trainer


@pytest.mark.req("001-02", "001-03", "001-07", "001-43")
def test_quick_start_runs_as_written(parts, capsys):
    """The quick start trains one epoch with five positional arguments, and each of its three hooks has an effect."""
    trainer = quick_start(*parts)
    printed = capsys.readouterr().out
    assert printed.count("  loss ") == 12  # every 10 of 120 batches
    lines = [json.loads(line) for line in (trainer.run_dir / "log.jsonl").read_text().splitlines()]
    assert [line["current_batch_idx"] for line in lines if line["event"] == "batch_end"] == [99]
    assert len(list((trainer.run_dir / "checkpoints").iterdir())) == 1


@pytest.mark.req("001-04", "001-05", "001-06")
def test_quick_start_methods_configure_the_hooks(parts):
    """The three add_ methods pass their argument to the built-in hook."""
    trainer = hookline.get_trainer("simple", *parts, record=False, console=False)
    trainer.add_console_logging(log_every_n_batches=7)
    trainer.add_json_logging(log_every_n_batches=70)
    trainer.add_checkpointing(save_every_n_epochs=3)
    assert trainer.hooks.get("console_log").log_every_n_batches == 7
    assert trainer.hooks.get("json_log").log_every_n_batches == 70
    assert trainer.hooks.get("checkpoint").save_every_n_epochs == 3


def custom_hook():
    from hookline import TrainingHook

    class CustomHook(TrainingHook):
        def __init__(self):
            super().__init__("my_custom_hook")
            self.losses = []

        def on_batch_end(self, batch_idx, loss, state):
            self.losses.append(loss)
            if batch_idx % 100 == 0:
                print(f"Average loss: {sum(self.losses) / len(self.losses):.4f}")

    return CustomHook


@pytest.mark.req("001-19", "001-20", "001-21", "001-24")
def test_custom_hook_is_called_under_its_name(parts):
    """A hook that overrides one event is called, and has the name it gave to super().__init__."""
    CustomHook = custom_hook()
    trainer = hookline.get_trainer("simple", *parts, record=False, console=False)
    trainer.add_hook(CustomHook())
    trainer.train()
    assert len(trainer.hooks.get("my_custom_hook").losses) == 120


@pytest.mark.req("001-22", "001-23")
def test_custom_hook_computes_with_what_it_gets(parts, capsys):
    """batch_idx supports %, loss supports sum(), / and formats, and the list of losses persists between calls."""
    CustomHook = custom_hook()
    trainer = hookline.get_trainer("simple", *parts, record=False, console=False)
    trainer.add_hook(CustomHook())
    trainer.train()
    hook = trainer.hooks.get("my_custom_hook")
    first, at_100 = [float(line.split(": ")[1]) for line in capsys.readouterr().out.splitlines()]
    assert first == pytest.approx(hook.losses[0], abs=1e-4)
    assert at_100 == pytest.approx(sum(hook.losses[:101]) / 101, abs=1e-4)
    assert all(type(loss) is float for loss in hook.losses)


@pytest.mark.req("001-25", "001-26", "001-27")
def test_built_in_hooks_have_the_documented_defaults():
    """The three built-ins exist under their documented names with the documented defaults."""
    assert ConsoleLogHook().log_every_n_batches == 10
    assert JSONLogHook().log_every_n_batches == 100
    assert CheckpointHook().save_every_n_epochs == 1


@pytest.mark.req("001-28", "001-29", "001-33")
def test_hook_management_runs_as_written(parts, capsys):
    """The management block runs as written; the list names every hook with its status."""
    trainer = hookline.get_trainer("simple", *parts, record=False, console=False)
    trainer.add_json_logging()
    trainer.add_checkpointing()
    my_hook = custom_hook()()

    # Add hooks
    trainer.add_hook(my_hook)
    trainer.add_console_logging()

    # Manage hooks
    trainer.remove_hook("console_log")
    trainer.disable_hook("json_log")
    trainer.enable_hook("json_log")

    # List active hooks
    print(trainer.hooks.list_hooks())

    listed = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in listed] == [
        "my_custom_hook: enabled",
        "identity: enabled",
        "json_log: enabled",
        "checkpoint: enabled",
    ]


@pytest.mark.req("001-30")
@pytest.mark.parametrize("is_added", [False, True], ids=["default", "added"])
def test_a_removed_console_prints_no_progress(parts, capsys, is_added):
    """After remove_hook("console_log") a run prints no progress, whether the hook was added or is the default one."""
    trainer = hookline.get_trainer("simple", *parts, record=False)
    if is_added:
        trainer.add_console_logging()
    trainer.remove_hook("console_log")
    trainer.train()
    assert "loss" not in capsys.readouterr().out
    trainer.add_console_logging()
    trainer.fit(max_epochs=2)
    assert capsys.readouterr().out.count("loss ") == 12


@pytest.mark.req("001-30")
def test_a_console_removed_in_a_run_stays_away(parts, capsys):
    """The default one is listed during the run, and removing it there holds for later runs of the trainer."""
    trainer = hookline.get_trainer("simple", *parts, record=False)
    origins = []

    @trainer.on("train_begin")
    def remove():
        origins.extend(hook.origin for hook in trainer.hooks.list_hooks() if hook.name == "console_log")
        trainer.remove_hook("console_log")

    trainer.train()
    trainer.remove_hook("remove")
    trainer.fit(max_epochs=2)
    assert origins == ["default"] and "loss" not in capsys.readouterr().out


@pytest.mark.req("001-30", "001-31")
def test_the_default_console_can_be_disabled_and_enabled(parts, capsys):
    """Before the run that adds it; the choice holds for later runs, too."""
    trainer = hookline.get_trainer("simple", *parts, record=False)
    trainer.disable_hook("console_log")
    trainer.train()
    trainer.fit(max_epochs=2)
    assert "loss" not in capsys.readouterr().out
    trainer.enable_hook("console_log")
    trainer.fit(max_epochs=3)
    assert "loss" in capsys.readouterr().out


@pytest.mark.req("001-30", "001-31", "001-32")
def test_removed_and_disabled_hooks_are_not_called(parts, tmp_path, capsys):
    """A removed hook and a disabled one are not called in training; one that is enabled again is."""
    trainer = hookline.get_trainer("simple", *parts, record=False, console=False)
    trainer.add_console_logging(log_every_n_batches=1)
    trainer.add_json_logging(log_every_n_batches=60, path=str(tmp_path / "log.jsonl"))
    trainer.remove_hook("console_log")
    trainer.disable_hook("json_log")
    trainer.train()
    assert capsys.readouterr().out == "" and not (tmp_path / "log.jsonl").exists()
    trainer.enable_hook("json_log")
    trainer.fit(max_epochs=2)
    assert "batch_end" in (tmp_path / "log.jsonl").read_text()


@pytest.mark.req("001-12", "001-13", "001-14", "001-16")
def test_lifecycle_dispatchers_run_as_written(parts):
    """The five dispatchers of the lifecycle diagram call the hooks, which may name batch or batch_idx."""
    calls = []

    class Listener(hookline.TrainingHook):
        def on_train_begin(self, state):
            calls.append(("train_begin", state["status"]))

        def on_epoch_begin(self, epoch, state):
            calls.append(("epoch_begin", epoch))

        def on_batch_end(self, batch, batch_idx, loss, state):
            calls.append(("batch_end", batch, batch_idx, loss))

        def on_epoch_end(self, epoch, state):
            calls.append(("epoch_end", epoch))

        def on_train_end(self, state):
            calls.append(("train_end", state["status"]))

    hooks = HookManager()
    hooks.register(Listener())
    state = {"status": "training", "current_batch_idx": 4}
    epoch, batch, loss = 3, "the batch", 0.5

    hooks.on_train_begin(state)  # Training starts
    hooks.on_epoch_begin(epoch, state)  # Each epoch starts
    hooks.on_batch_end(batch, loss, state)  # After each batch
    hooks.on_epoch_end(epoch, state)  # Each epoch ends
    hooks.on_train_end(state)  # Training complete

    assert calls == [
        ("train_begin", "training"),
        ("epoch_begin", 3),
        ("batch_end", "the batch", 4, 0.5),
        ("epoch_end", 3),
        ("train_end", "training"),
    ]


@pytest.mark.req("001-18")
def test_the_dispatchers_of_a_trainer_call_its_hooks(parts, tmp_path, capsys):
    """Fired by hand on trainer.hooks, the five events reach a user's hook and the built-ins beside it."""
    calls = []

    class Listener(hookline.TrainingHook):
        def on_train_begin(self, state):
            calls.append(("train_begin", state["status"]))

        def on_epoch_begin(self, epoch):
            calls.append(("epoch_begin", epoch))

        def on_batch_end(self, batch, loss):
            calls.append(("batch_end", batch, loss))

        def on_epoch_end(self, epoch):
            calls.append(("epoch_end", epoch))

        def on_train_end(self, state):
            calls.append(("train_end", state["status"]))

    trainer = hookline.get_trainer("simple", *parts, console=False)
    trainer.add_console_logging(log_every_n_batches=1)
    trainer.add_json_logging(log_every_n_batches=1, path=str(tmp_path / "log.jsonl"))
    trainer.add_checkpointing()
    trainer.add_hook(Listener())
    state = {"status": "training"}

    trainer.hooks.on_train_begin(state)
    trainer.hooks.on_epoch_begin(3, state)
    trainer.hooks.on_batch_end("the batch", 0.5, state)
    trainer.hooks.on_epoch_end(3, state)
    trainer.hooks.on_train_end(state)

    assert calls == [
        ("train_begin", "training"),
        ("epoch_begin", 3),
        ("batch_end", "the batch", 0.5),
        ("epoch_end", 3),
        ("train_end", "training"),
    ]
    assert sum(hook.failures for hook in trainer.hooks.list_hooks()) == 0
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["train_start", "batch_end", "epoch_end", "train_end"]
    assert "What each hook cost" in capsys.readouterr().out


@pytest.mark.req("001-15", "001-17")
def test_training_drives_the_dispatchers_in_their_nesting(parts):
    """train() fires begin, epochs, batches and end in the diagram's nesting, through trainer.hooks."""
    calls = []

    class Listener(hookline.TrainingHook):
        def on_train_begin(self):
            calls.append("<")

        def on_epoch_begin(self):
            calls.append("(")

        def on_batch_end(self):
            calls.append(".")

        def on_epoch_end(self):
            calls.append(")")

        def on_train_end(self):
            calls.append(">")

    trainer = hookline.get_trainer("simple", *parts, record=False, console=False, max_epochs=2)
    trainer.hooks.register(Listener())
    trainer.train()
    assert "".join(calls) == "<(" + "." * 120 + ")(" + "." * 120 + ")>"


@pytest.mark.req("001-01", "001-08", "001-09", "001-10")
def test_architecture_is_the_documented_one(parts):
    """TrainingHook → HookManager → BaseTrainer → SimpleTrainer: hooks add behaviour without changes to the trainer."""
    trainer = hookline.get_trainer("simple", *parts, record=False, console=False)
    assert isinstance(trainer, SimpleTrainer) and issubclass(SimpleTrainer, BaseTrainer)
    assert isinstance(trainer.hooks, HookManager)
    seen = []

    class Added(hookline.TrainingHook):
        def on_batch_end(self, loss):
            seen.append(loss)

    trainer.add_hook(Added())
    trainer.train()
    assert len(seen) == 120


@pytest.mark.req("001-34", "001-35", "001-36", "001-37")
def test_state_has_the_live_objects(parts):
    """The state dictionary has the live model, optimizer and device, and the current epoch."""
    model, _, optimizer, device = parts
    states = []

    class Keeper(hookline.TrainingHook):
        def on_batch_end(self, state):
            states.append(dict(state))

    trainer = hookline.get_trainer("simple", *parts, record=False, console=False, max_epochs=2)
    trainer.add_hook(Keeper())
    trainer.train()
    assert states[0]["model"] is model and states[0]["optimizer"] is optimizer and states[0]["device"] == device
    assert [states[index]["current_epoch"] for index in (0, 119, 120, 239)] == [0, 0, 1, 1]


@pytest.mark.req("001-38", "001-39", "001-40", "001-41")
def test_state_has_the_numbers(parts):
    """Batch index, latest loss, the epoch's running mean and the parameter count are available during training."""
    states = []

    class Keeper(hookline.TrainingHook):
        def on_batch_end(self, state):
            states.append(dict(state))

    trainer = hookline.get_trainer("simple", *parts, record=False, console=False)
    trainer.add_hook(Keeper())
    trainer.train()
    assert [state["current_batch_idx"] for state in states] == list(range(120))
    losses = [state["latest_loss"] for state in states]
    assert all(type(loss) is float for loss in losses)
    for index in (0, 1, 60, 119):
        assert states[index]["avg_loss"] == pytest.approx(sum(losses[: index + 1]) / (index + 1), rel=1e-6)
    assert states[0]["model_params"] == 4 * 2 + 2


@pytest.mark.req("001-42")
def test_status_is_one_of_three_words(parts):
    """status is 'training', then 'completed', or 'error' when training fails."""
    statuses = []

    class Watch(hookline.TrainingHook):
        def on_batch_end(self, state):
            statuses.append(state["status"])

        def on_train_end(self, state):
            statuses.append(state["status"])

    trainer = hookline.get_trainer("simple", *parts, record=False, console=False)
    trainer.add_hook(Watch())
    trainer.train()
    assert set(statuses[:-1]) == {"training"} and statuses[-1] == "completed"

    def fails(model, batch):
        raise ValueError("broken")

    trainer = hookline.get_trainer("simple", *parts, record=False, console=False, step_fn=fails)
    trainer.add_hook(Watch())
    with pytest.raises(ValueError, match="broken"):
        trainer.train()
    assert statuses[-1] == "error"

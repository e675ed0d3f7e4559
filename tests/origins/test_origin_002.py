"""Document 002's code blocks, as written there; only the import lines are ours.

Blocks on the gradient monitor, checkpoints by metric, early stopping and the lr monitor stand with their hooks.
"""

import json
import random
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from runpy import run_path
from unittest.mock import Mock

import pytest
import torch
from builders import make_batches
from torch import nn

import hookline
from hookline import GenericTrainer, HooksConfig, StopTraining, TrainerHooks

# ---- the blocks ------------------------------------------------------------------------------------------------------


class MyCustomHook(TrainerHooks):
    def __init__(self, threshold=10.0):
        super().__init__()
        self.threshold = threshold
        self.high_loss_count = 0

    def on_train_start(self, trainer):
        """Called once at the beginning of training."""
        print("Training started!")
        self.start_time = time.time()

    def on_epoch_start(self, trainer, epoch):
        """Called at the start of each epoch."""
        print(f"Starting epoch {epoch}")
        self.epoch_start_time = time.time()

    def on_train_batch_end(self, trainer, batch, loader_idx, loader_name, metrics):
        """Called after each training batch."""
        if metrics.get("loss", 0) > self.threshold:
            self.high_loss_count += 1
            print(f"High loss detected: {metrics['loss']:.4f}")

            if self.high_loss_count > 10:
                print("Too many high loss batches, reducing learning rate")
                for optimizer in trainer.optimizers:
                    for param_group in optimizer.param_groups:
                        param_group["lr"] *= 0.5

    def on_validation_end(self, trainer, epoch, metrics):
        """Called after validation."""
        print(f"Validation metrics: {metrics}")

        # Custom metric computation
        if "val/accuracy" in metrics:
            improvement = metrics["val/accuracy"] - trainer.best_accuracy
            print(f"Accuracy improvement: {improvement:.4f}")
            trainer.best_accuracy = max(trainer.best_accuracy, metrics["val/accuracy"])

    def on_training_end(self, trainer):
        """Called once at the end of training."""
        total_time = time.time() - self.start_time
        print(f"Training completed in {total_time:.2f} seconds")


class StatefulHook(TrainerHooks):
    def __init__(self):
        super().__init__()
        self.batch_losses = []
        self.epoch_losses = []

    def on_train_batch_end(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name, metrics):
        self.batch_losses.append(metrics.get("loss", 0))

    def on_epoch_end(self, trainer, epoch):
        avg_loss = sum(self.batch_losses) / len(self.batch_losses)
        self.epoch_losses.append(avg_loss)
        self.batch_losses = []  # Reset for next epoch

        # Detect training plateau
        if len(self.epoch_losses) > 5:
            recent_losses = self.epoch_losses[-5:]
            if max(recent_losses) - min(recent_losses) < 0.001:
                print("Training plateau detected!")


class ProducerHook(TrainerHooks):
    def on_epoch_end(self, trainer, epoch):
        # Store data for other hooks
        trainer.hook_data = {"important_metric": 0.95}


class ConsumerHook(TrainerHooks):
    def on_epoch_end(self, trainer, epoch):
        # Read data from other hooks
        if hasattr(trainer, "hook_data"):
            metric = trainer.hook_data.get("important_metric")
            print(f"Received metric: {metric}")


class ConditionalHook(TrainerHooks):
    def __init__(self, enable_after_epoch=10):
        super().__init__()
        self.enable_after_epoch = enable_after_epoch
        self.enabled = False

    def on_epoch_start(self, trainer, epoch):
        if epoch >= self.enable_after_epoch:
            self.enabled = True

    def on_train_batch_end(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name, metrics):
        if not self.enabled:
            return

        # Hook logic only runs after specified epoch
        self._analyze_metrics(metrics)


class SlackNotificationHook(TrainerHooks):
    def __init__(self, webhook_url, notify_on=["training_end", "best_model"]):  # noqa: B006 - as written in the document
        super().__init__()
        self.webhook_url = webhook_url
        self.notify_on = notify_on
        self.best_metric = float("inf")

    def on_validation_end(self, trainer, epoch, metrics):
        val_loss = metrics.get("val/loss", float("inf"))
        if val_loss < self.best_metric:
            self.best_metric = val_loss
            if "best_model" in self.notify_on:
                self._send_notification(f"New best model! Epoch {epoch}, Loss: {val_loss:.4f}")

    def on_training_end(self, trainer):
        if "training_end" in self.notify_on:
            self._send_notification(f"Training completed! Best loss: {self.best_metric:.4f}")

    def _send_notification(self, message):
        import requests

        try:
            # Add timeout to prevent hanging
            requests.post(self.webhook_url, json={"text": message}, timeout=10)
        except requests.exceptions.Timeout:
            print("Warning: Webhook notification timed out")
        except requests.exceptions.RequestException as e:
            print(f"Warning: Failed to send webhook notification: {e}")


class DebugHook(TrainerHooks):
    def __init__(self, break_on_nan=True, log_shapes=False):
        super().__init__()
        self.break_on_nan = break_on_nan
        self.log_shapes = log_shapes

    def on_train_batch_start(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name):
        if self.log_shapes:
            for i, item in enumerate(batch):
                if torch.is_tensor(item):
                    print(f"Batch item {i} shape: {item.shape}")

    def on_after_backward(self, trainer):
        # Check for NaN gradients
        for name, param in trainer.model.named_parameters():
            if param.grad is not None and torch.isnan(param.grad).any():
                print(f"NaN gradient detected in {name}")
                if self.break_on_nan:
                    import pdb

                    pdb.set_trace()

    def on_train_batch_end(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name, metrics):
        # Check for NaN loss
        if torch.isnan(torch.tensor(metrics.get("loss", 0))):
            print(f"NaN loss at batch {batch_idx}")
            if self.break_on_nan:
                import pdb

                pdb.set_trace()


class ConfigurableHook(TrainerHooks):
    def __init__(self, config=None):
        super().__init__()
        config = config or {}
        self.enabled = config.get("enabled", True)
        self.frequency = config.get("frequency", 100)
        self.verbose = config.get("verbose", False)

    def should_run(self, step):
        return self.enabled and step % self.frequency == 0


class RobustHook(TrainerHooks):
    def on_train_batch_end(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name, metrics):
        try:
            # Hook logic that might fail
            self._process_metrics(metrics)
        except Exception as e:
            # Log error but don't crash training
            print(f"Hook error (non-fatal): {e}")
            if trainer.config.debug:
                import traceback

                traceback.print_exc()


class EfficientHook(TrainerHooks):
    def __init__(self, sample_rate=0.1):
        super().__init__()
        self.sample_rate = sample_rate

    def on_train_batch_end(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name, metrics):
        # Only run for a sample of batches
        if random.random() > self.sample_rate:
            return

        # Expensive computation only on sampled batches
        self._expensive_analysis(metrics)


class TrainerHooksInterface(TrainerHooks):
    """The complete hook interface of the document: every method with its full signature, recording its calls."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_start(self, trainer):
        self.calls.append(("on_train_start", trainer))

    def on_train_end(self, trainer):
        self.calls.append(("on_train_end", trainer))

    def on_epoch_start(self, trainer, epoch):
        self.calls.append(("on_epoch_start", trainer, epoch))

    def on_epoch_end(self, trainer, epoch):
        self.calls.append(("on_epoch_end", trainer, epoch))

    def on_train_batch_start(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name):
        self.calls.append(("on_train_batch_start", trainer, batch, batch_idx, dataloader_idx, dataloader_name))

    def on_train_batch_end(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name, metrics):
        self.calls.append(("on_train_batch_end", trainer, batch, batch_idx, dataloader_idx, dataloader_name, metrics))

    def on_validation_start(self, trainer, epoch):
        self.calls.append(("on_validation_start", trainer, epoch))

    def on_validation_end(self, trainer, epoch, metrics):
        self.calls.append(("on_validation_end", trainer, epoch, metrics))

    def on_validation_batch_start(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name):
        self.calls.append(("on_validation_batch_start", trainer, batch, batch_idx, dataloader_idx, dataloader_name))

    def on_validation_batch_end(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name, metrics):
        self.calls.append(
            ("on_validation_batch_end", trainer, batch, batch_idx, dataloader_idx, dataloader_name, metrics)
        )

    def on_before_backward(self, trainer, loss):
        self.calls.append(("on_before_backward", trainer, loss))

    def on_after_backward(self, trainer):
        self.calls.append(("on_after_backward", trainer))

    def on_before_optimizer_step(self, trainer, optimizer_idx):
        self.calls.append(("on_before_optimizer_step", trainer, optimizer_idx))

    def on_after_optimizer_step(self, trainer, optimizer_idx):
        self.calls.append(("on_after_optimizer_step", trainer, optimizer_idx))

    def on_gradient_clip(self, trainer, grad_norm):
        self.calls.append(("on_gradient_clip", trainer, grad_norm))

    def on_checkpoint_save(self, trainer, checkpoint_path):
        self.calls.append(("on_checkpoint_save", trainer, checkpoint_path))

    def on_checkpoint_load(self, trainer, checkpoint_path):
        self.calls.append(("on_checkpoint_load", trainer, checkpoint_path))

    def on_exception(self, trainer, exception):
        self.calls.append(("on_exception", trainer, exception))

    def of(self, event):
        return [call[1:] for call in self.calls if call[0] == event]


# ---- the setting -----------------------------------------------------------------------------------------------------


def batches(count=12, nan_at=None):
    made = make_batches(count)
    if nan_at is not None:
        made[nan_at] = (made[nan_at][0] * float("nan"), made[nan_at][1])
    return made


def accuracy_step(model, batch):
    inputs, targets = batch
    return {"loss": nn.functional.mse_loss(model(inputs), targets), "accuracy": 0.75}


def make_trainer(config=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01)]
    options = {"record": False, "console": False, "loss_fn": nn.functional.mse_loss, "device": "cpu", **options}
    return GenericTrainer(config if config is not None else HooksConfig(), model, optimizers, **options)


# ---- custom hooks ----------------------------------------------------------------------------------------------------


@pytest.mark.req("002-39", "002-40", "002-41", "002-47")
def test_basic_custom_hook_runs_as_written(capsys):
    """The document's basic hook is called once at the start, at each epoch and at the end."""
    trainer = make_trainer()
    trainer.hook_manager.register_hook(MyCustomHook(threshold=1e9))
    trainer.fit(batches(), max_epochs=2)
    printed = capsys.readouterr().out
    assert printed.count("Training started!") == 1
    assert [f"Starting epoch {epoch}" in printed for epoch in (0, 1, 2)] == [True, True, False]
    assert printed.count("Training completed in ") == 1


@pytest.mark.req("002-42", "002-43", "002-44", "002-04")
def test_basic_custom_hook_reduces_the_learning_rate(capsys):
    """With the short batch_end signature it reads metrics, and the rates that it sets take effect."""
    trainer = make_trainer()
    trainer.hook_manager.register_hook(MyCustomHook(threshold=-1.0))
    trainer.fit(batches(13), max_epochs=1)
    assert capsys.readouterr().out.count("High loss detected: ") == 13
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**3)


@pytest.mark.req("002-45", "002-46")
def test_basic_custom_hook_tracks_the_best_accuracy(capsys):
    """best_accuracy can be read before it is set, and what the hook writes stays."""
    trainer = make_trainer(step_fn=accuracy_step, loss_fn=None)
    trainer.hook_manager.register_hook(MyCustomHook(threshold=1e9))
    trainer.fit(batches(), batches(3), max_epochs=1)
    printed = capsys.readouterr().out
    assert "'val/accuracy': 0.75" in printed and "val/loss" in printed
    assert "Accuracy improvement: inf" in printed
    assert trainer.best_accuracy == 0.75


# ---- registering -----------------------------------------------------------------------------------------------------


@pytest.fixture
def mypackage(tmp_path, monkeypatch):
    """Write a user's package with the document's hook in it."""
    package = tmp_path / "mypackage"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "hooks.py").write_text(
        "from hookline import TrainerHooks\n"
        "class MyCustomHook(TrainerHooks):\n"
        "    def __init__(self, threshold=10.0):\n"
        "        super().__init__()\n"
        "        self.threshold = threshold\n"
        "        self.calls = 0\n"
        "    def on_train_batch_end(self, trainer, batch, loader_idx, loader_name, metrics):\n"
        "        self.calls += 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.startswith("mypackage")]:
        del sys.modules[name]


@pytest.mark.req("002-07", "002-48")
def test_register_by_class_path(mypackage):
    """hook_classes imports by class path, and hook_configs under that path are passed to the constructor."""
    config = HooksConfig(
        hook_classes=["mypackage.hooks.MyCustomHook"],
        hook_configs={"mypackage.hooks.MyCustomHook": {"threshold": 5.0}},
    )
    trainer = make_trainer(config)
    trainer.fit(batches(), max_epochs=1)
    hook = trainer.hook_manager.get("my_custom_hook")
    assert hook.threshold == 5.0 and hook.calls == 12


@pytest.mark.req("002-85")
def test_the_three_ways_in_one_program(mypackage, capsys):
    """The block as written: a class path in the config, an object of a class with that name, and another class."""
    from mypackage.hooks import MyCustomHook

    model = nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01)]
    # 1. Via configuration (using class path)
    config = HooksConfig(
        hook_classes=["mypackage.hooks.MyCustomHook"],
        hook_configs={"mypackage.hooks.MyCustomHook": {"threshold": 5.0}},
    )

    # 2. Direct registration after trainer creation
    trainer = GenericTrainer(config, model, optimizers)
    trainer.hook_manager.register_hook(MyCustomHook(threshold=5.0))

    # 3. Register a class explicitly
    class AutoRegisteredHook(TrainerHooks):
        def on_epoch_end(self, trainer, epoch):
            print(f"Epoch {epoch} completed")

    trainer.hook_manager.register_hook(AutoRegisteredHook())
    trainer.loss_fn = nn.functional.mse_loss
    trainer.fit(batches(), max_epochs=1)
    hooks = [trainer.hook_manager.get(name) for name in ("my_custom_hook", "my_custom_hook_2")]
    assert hooks[0] is not hooks[1] and [hook.calls for hook in hooks] == [12, 12]
    assert "Epoch 0 completed" in capsys.readouterr().out


@pytest.mark.req("002-49", "002-50", "002-51")
def test_register_directly_and_by_class(capsys):
    """A generic trainer accepts hooks after construction, as objects and as classes."""
    config = HooksConfig()
    model = nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01)]

    # 2. Direct registration after trainer creation
    trainer = GenericTrainer(config, model, optimizers)
    trainer.hook_manager.register_hook(MyCustomHook(threshold=5.0))

    # 3. Register a class explicitly
    class AutoRegisteredHook(TrainerHooks):
        def on_epoch_end(self, trainer, epoch):
            print(f"Epoch {epoch} completed")

    trainer.hook_manager.register_hook(AutoRegisteredHook())
    trainer.hook_manager.register_hook(AutoRegisteredHook, name="by_class")

    trainer.loss_fn = nn.functional.mse_loss
    trainer.fit(batches(), max_epochs=1)
    assert capsys.readouterr().out.count("Epoch 0 completed") == 2


@pytest.mark.req("002-08", "002-01", "002-02")
def test_logging_hook_logs_progress(capsys):
    """enable_logging_hook enables basic logging of training progress."""
    config = HooksConfig(enable_logging_hook=True)
    make_trainer(config).fit(batches(20), max_epochs=1)
    lines = [line for line in capsys.readouterr().out.splitlines() if "loss" in line]
    assert len(lines) == 2 and "step 20" in lines[-1]


# ---- the interface ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interface_run(tmp_path_factory):
    hook = TrainerHooksInterface()
    trainer = make_trainer(record=True, output_dir=str(tmp_path_factory.mktemp("runs")), max_grad_norm=1e-3)
    trainer.hook_manager.register_hook(hook)
    trainer.add_checkpointing()
    trainer.fit({"first": batches(2), "second": batches(3)}, batches(2), max_epochs=2)
    trainer.load_checkpoint(trainer.run_dir)
    return trainer, hook


@pytest.mark.req("002-52", "002-53", "002-54", "002-55")
def test_interface_run_and_epochs(interface_run):
    """The methods for the run and for epochs get the trainer and the epoch."""
    trainer, hook = interface_run
    assert hook.of("on_train_start") == [(trainer,)] and hook.of("on_train_end") == [(trainer,)]
    assert hook.of("on_epoch_start") == [(trainer, 0), (trainer, 1)] == hook.of("on_epoch_end")


@pytest.mark.req("002-56", "002-57")
def test_interface_training_batches(interface_run):
    """Training batches come with their index and with the index and name of their loader; metrics contain the loss."""
    _trainer, hook = interface_run
    starts = hook.of("on_train_batch_start")
    expected = [(0, 0, "first"), (1, 0, "first"), (2, 1, "second"), (3, 1, "second"), (4, 1, "second")]
    assert [call[2:] for call in starts] == expected * 2
    ends = hook.of("on_train_batch_end")
    assert [call[2:5] for call in ends] == expected * 2
    assert all(torch.equal(end[1][0], start[1][0]) for end, start in zip(ends, starts, strict=True))
    assert all(type(call[5]["loss"]) is float for call in ends)


@pytest.mark.req("002-58", "002-59", "002-60", "002-61")
def test_interface_validation(interface_run):
    """Validation's four methods get epoch, batch, indices and metrics."""
    trainer, hook = interface_run
    assert hook.of("on_validation_start") == [(trainer, 0), (trainer, 1)]
    assert [(call[1], set(call[2])) for call in hook.of("on_validation_end")] == [(0, {"val/loss"}), (1, {"val/loss"})]
    assert [call[2:] for call in hook.of("on_validation_batch_start")] == [(0, 0, "val"), (1, 0, "val")] * 2
    assert [call[2:5] for call in hook.of("on_validation_batch_end")] == [(0, 0, "val"), (1, 0, "val")] * 2
    assert all("loss" in call[5] for call in hook.of("on_validation_batch_end"))


@pytest.mark.req("002-62", "002-63", "002-64", "002-65")
def test_interface_backward_and_optimizer(interface_run):
    """Backward gets the live loss; the optimizer's methods get its index."""
    trainer, hook = interface_run
    losses = [loss for _, loss in hook.of("on_before_backward")]
    assert len(losses) == 10 and all(isinstance(loss, torch.Tensor) and loss.requires_grad for loss in losses)
    assert hook.of("on_after_backward") == [(trainer,)] * 10
    assert hook.of("on_before_optimizer_step") == [(trainer, 0)] * 10 == hook.of("on_after_optimizer_step")


@pytest.mark.req("002-66", "002-67", "002-68")
def test_interface_clip_and_checkpoints(interface_run):
    """Clipping gives the norm before it; saving and loading give the checkpoint's path."""
    _trainer, hook = interface_run
    norms = [norm for _, norm in hook.of("on_gradient_clip")]
    assert len(norms) == 10 and all(norm > 1e-3 for norm in norms)
    saved = [path for _, path in hook.of("on_checkpoint_save")]
    assert [path.endswith(("step-00000005", "step-00000010")) for path in saved] == [True, True]
    assert [path for _, path in hook.of("on_checkpoint_load")] == [saved[-1]]


@pytest.mark.req("002-69")
def test_interface_exception():
    """on_exception gets the exception that ends the run."""
    hook = TrainerHooksInterface()
    trainer = make_trainer(step_fn=lambda model, batch: 1 / 0)
    trainer.hook_manager.register_hook(hook)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(batches())
    assert [type(exception) for _, exception in hook.of("on_exception")] == [ZeroDivisionError]


@pytest.mark.req("002-70", "002-71", "002-72")
def test_execution_order_is_users_first(capsys):
    """User hooks run in registration order, and before built-ins that were registered earlier."""
    calls = []

    class CustomHook1(TrainerHooks):
        def on_validation_end(self, metrics):
            calls.append("first")
            metrics["val/added"] = 1.0

    class CustomHook2(TrainerHooks):
        def on_validation_end(self, metrics):
            calls.append("second")

    trainer = make_trainer(HooksConfig(enable_logging_hook=True))
    trainer.hook_manager.register_hook(CustomHook1())  # Executes first
    trainer.hook_manager.register_hook(CustomHook2())  # Executes second
    # Built-in hooks execute last
    trainer.fit(batches(), batches(2), max_epochs=1)
    assert calls == ["first", "second"]
    assert "val/added 1.0000" in capsys.readouterr().out  # the console hook saw what the user's hook had added


# ---- advanced usage --------------------------------------------------------------------------------------------------


@pytest.mark.req("002-73")
def test_stateful_hook_runs_as_written(capsys):
    """It averages each epoch's losses, which have no graph, and detects a plateau over five epochs."""
    trainer = make_trainer()
    trainer.optimizers[0].param_groups[0]["lr"] = 0.0
    hook = StatefulHook()
    trainer.hook_manager.register_hook(hook)
    trainer.hook_manager.register_hook(lambda batch_idx: None, event="train_batch_end", name="other")
    trainer.fit(batches(), max_epochs=6)
    assert len(hook.epoch_losses) == 6 and hook.batch_losses == []
    assert all(type(loss) is float for loss in hook.epoch_losses)
    assert capsys.readouterr().out.count("Training plateau detected!") == 1


@pytest.mark.req("002-74", "002-75")
def test_hooks_communicate_through_the_trainer(capsys):
    """What the producer assigns to trainer.hook_data, the consumer reads in the same event."""
    trainer = make_trainer()
    trainer.hook_manager.register_hook(ProducerHook())
    trainer.hook_manager.register_hook(ConsumerHook())
    trainer.fit(batches(), max_epochs=1)
    assert capsys.readouterr().out == "Received metric: 0.95\n"


@pytest.mark.req("002-76")
def test_conditional_hook_runs_as_written():
    """A hook with an attribute `enabled` is called while it is False, and can set it to True again."""
    analyzed = []
    hook = ConditionalHook(enable_after_epoch=2)
    hook._analyze_metrics = analyzed.append
    trainer = make_trainer()
    trainer.hook_manager.register_hook(hook)
    trainer.fit(batches(), max_epochs=3)
    assert len(analyzed) == 12 and hook.enabled


class _Webhook(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def webhook():
    server = HTTPServer(("127.0.0.1", 0), _Webhook)
    server.received = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.req("002-77", "002-05")
def test_slack_hook_runs_as_written(webhook):
    """It posts the best model and the end of training to a real HTTP server."""
    pytest.importorskip("requests")
    trainer = make_trainer()
    trainer.hook_manager.register_hook(SlackNotificationHook(f"http://127.0.0.1:{webhook.server_port}/hook"))
    trainer.fit(batches(), batches(2), max_epochs=1)
    texts = [message["text"] for message in webhook.received]
    assert texts[0].startswith("New best model! Epoch 0, Loss: ")
    assert texts[-1].startswith("Training completed! Best loss: ")


@pytest.mark.req("002-77")
def test_slack_hook_only_warns_when_the_server_is_down(webhook, capsys):
    """A refused connection is a warning; training ends as usual."""
    pytest.importorskip("requests")
    port = webhook.server_port
    webhook.shutdown()
    webhook.server_close()
    trainer = make_trainer()
    trainer.hook_manager.register_hook(SlackNotificationHook(f"http://127.0.0.1:{port}/hook"))
    assert trainer.fit(batches(), max_epochs=1)["status"] == "completed"
    assert "Warning: Failed to send webhook notification" in capsys.readouterr().out


@pytest.mark.req("002-78", "002-06")
def test_debug_hook_runs_as_written(capsys):
    """It prints shapes at batch start and finds NaN gradients after backward and the NaN loss at batch end."""
    trainer = make_trainer()
    trainer.hook_manager.register_hook(DebugHook(break_on_nan=False, log_shapes=True))
    trainer.fit(batches(3, nan_at=1), max_epochs=1)
    printed = capsys.readouterr().out
    assert printed.count("Batch item 0 shape: torch.Size([4, 3])") == 3
    assert "NaN gradient detected in weight" in printed and "NaN loss at batch 1" in printed


# ---- best practices --------------------------------------------------------------------------------------------------


@pytest.mark.req("002-80")
def test_configurable_hook_runs_as_written():
    """Its config dictionary has the documented defaults, and should_run follows it."""
    hook = ConfigurableHook()
    assert (hook.enabled, hook.frequency, hook.verbose) == (True, 100, False)
    assert [step for step in range(1, 301) if hook.should_run(step)] == [100, 200, 300]
    assert not ConfigurableHook({"enabled": False}).should_run(100)


@pytest.mark.req("002-80")
@pytest.mark.parametrize(
    ("config", "expected"),
    [(None, [100, 200]), ({"frequency": 60}, [60, 120, 180, 240]), ({"enabled": False}, [])],
    ids=["default", "frequency", "disabled"],
)
def test_configurable_hook_decides_for_itself_in_a_run(config, expected):
    """Its own `enabled` and `frequency` mean what the hook makes of them; Hookline calls it at every step."""
    steps, called = [], []

    class Reporting(ConfigurableHook):  # the block has no event yet, and a hook that is never called is refused
        def on_step_end(self, step):
            called.append(step)
            if self.should_run(step):
                steps.append(step)

    trainer = make_trainer()
    trainer.hook_manager.register_hook(Reporting(config))
    trainer.fit(batches(250), max_epochs=1)
    assert steps == expected and len(called) == 250
    assert [hook.enabled for hook in trainer.hooks.list_hooks() if hook.name == "reporting"] == [True]


@pytest.mark.req("002-81")
@pytest.mark.parametrize("debug", [False, True])
def test_robust_hook_runs_as_written(debug, capsys):
    """Its own error handling works, and trainer.config.debug decides whether it prints the traceback."""
    trainer = make_trainer()
    trainer.config.debug = debug
    trainer.hook_manager.register_hook(RobustHook())
    trainer.fit(batches(2), max_epochs=1)
    captured = capsys.readouterr()
    assert captured.out.count("Hook error (non-fatal): 'RobustHook' object has no attribute '_process_metrics'") == 2
    assert ("Traceback" in captured.err) is debug


@pytest.mark.req("002-81")
@pytest.mark.hooks_fail(raises=RuntimeError)
def test_a_hook_without_error_handling_does_not_crash_training_either():
    """The registry handles errors of every hook as RobustHook does itself."""

    class Fragile(TrainerHooks):
        def on_train_batch_end(self, metrics):
            raise RuntimeError("broken hook")

    trainer = make_trainer()
    trainer.hook_manager.register_hook(Fragile())
    assert trainer.fit(batches(), max_epochs=1)["status"] == "completed"


@pytest.mark.req("002-82")
def test_efficient_hook_runs_as_written():
    """It processes about a tenth of the batches."""
    random.seed(0)
    analyzed = []
    hook = EfficientHook(sample_rate=0.1)
    hook._expensive_analysis = analyzed.append
    trainer = make_trainer()
    trainer.hook_manager.register_hook(hook)
    trainer.fit(batches(400), max_epochs=1)
    assert 20 <= len(analyzed) <= 70


def create_test_model():
    return nn.Linear(2, 1)


class SixArgumentHook(MyCustomHook):
    """The document's own test calls its hook with six values; this is the hook with the six-argument signature."""

    def on_train_batch_end(self, trainer, batch, batch_idx, dataloader_idx, dataloader_name, metrics):
        super().on_train_batch_end(trainer, batch, dataloader_idx, dataloader_name, metrics)


@pytest.mark.req("002-83")
def test_custom_hook():
    """The document's own test of a hook with a mock trainer, with the six-argument hook it calls."""
    # Create mock trainer
    mock_trainer = Mock()
    mock_trainer.model = create_test_model()
    mock_trainer.optimizers = [torch.optim.Adam(mock_trainer.model.parameters())]

    # Test hook
    hook = SixArgumentHook(threshold=5.0)

    # Test lifecycle methods
    hook.on_train_start(mock_trainer)
    assert hasattr(hook, "start_time")

    # Test batch processing
    metrics = {"loss": 15.0}
    hook.on_train_batch_end(mock_trainer, None, 0, 0, "test", metrics)
    assert hook.high_loss_count == 1

    # Test threshold behavior
    for _ in range(10):
        hook.on_train_batch_end(mock_trainer, None, 0, 0, "test", metrics)

    # Check if learning rate was reduced
    assert mock_trainer.optimizers[0].param_groups[0]["lr"] < 0.001


@pytest.mark.req("002-03")
@pytest.mark.parametrize("way", ["request_stop", "StopTraining"])
def test_any_hook_can_stop_the_run_with_a_reason(way):
    """A user's hook ends the run after the step is complete; the record has its name and its reason."""

    class Enough(TrainerHooks):
        def on_train_batch_end(self, trainer, batch_idx):
            if batch_idx == 3:
                if way == "StopTraining":
                    raise StopTraining("good enough")
                trainer.request_stop("good enough")

    trainer = make_trainer()
    trainer.hook_manager.register_hook(Enough())
    assert trainer.fit(batches(), max_epochs=5)["status"] == "completed"
    assert trainer.step == 4
    assert trainer.record.run["outcome"] == "stopped"
    assert trainer.record.run["reason"] == "stopped by enough: good enough"


@pytest.mark.req("002-84")
def test_see_also_leads_to_the_guide_the_reference_and_examples():
    """The page on hooks ends with links to these three; the reference has every public name and every event."""
    docs = Path(__file__).resolve().parents[2] / "docs"
    section = (docs / "how-to" / "write-a-hook.md").read_text().partition("## See also")[2]
    guide, reference, examples = (docs / "how-to" / target for target in re.findall(r"\]\(([^)]+)\)", section))
    assert all(f"`{name}`" in guide.read_text() for name in ("console_log", "throughput", "events.jsonl", "profiler"))
    assert [name for name in hookline.__all__ if f"| `{name}` |" not in reference.read_text()] == []
    assert len(list(examples.glob("*.py"))) >= 4


@pytest.mark.req("002-84")
@pytest.mark.parametrize(
    ("name", "printed"),
    [("heartbeat", "heartbeat ended: completed"), ("upload_after_save", "step 20: uploaded step-00000020, ")],
)
def test_the_example_hooks_work(name, printed, capsys):
    """A run of each example has the effect that its hook is for."""
    path = Path(__file__).resolve().parents[2] / "examples" / f"{name}.py"
    run_path(str(path))["main"]()
    assert printed in capsys.readouterr().out

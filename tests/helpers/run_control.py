"""A host of hooks that is not a trainer: `PlainRun` implements `RunControl`, `train` is a plain loop over batches."""

from contextlib import contextmanager

import torch

from hookline import HookManager
from hookline.checkpoints import write_checkpoint
from hookline.gradients.view import Gradients
from hookline.ranks import OneProcess
from hookline.record import Record


class PlainRun:
    """A run of a tiny model that keeps in lists and dicts what hooks log, note and request."""

    config, run_id, loader_names, device, saving, skipped = None, "plain", (), torch.device("cpu"), None, None
    ranks = OneProcess()
    total_epochs, epoch_batches = 1, 6
    total_steps, step, epoch, tokens_seen, validations_in_progress, lr = 6, 0, 0, 0, 0, 0.1
    status, running, stop_reason, stopped_by = "training", True, None, None
    has_validation, validates_on_schedule = True, True
    is_trial_run, uses_grad_scaler, gradients_overflowed = False, False, False
    ranks, data_ranks, means_of_ranks = OneProcess(), 1, dict

    def __init__(self, run_dir=None, model=None):
        self.model, self.loss_fn = model or torch.nn.Linear(3, 1), torch.nn.MSELoss()
        self.params = dict(self.model.named_parameters())
        self.optimizers = [torch.optim.SGD(self.params.values(), lr=self.lr)]
        self.hooks, self.hook_data, self.requested_checkpoints = HookManager(), {}, set()
        self.run_dir, self.checkpoint_dir = run_dir, run_dir and run_dir / "checkpoints"
        self.logged, self.layers, self.notes, self.tables, self.images = {}, {}, [], {}, {}
        self.record = Record.in_memory()
        self.record.start([])
        self.state = {"model": self.model, "optimizer": self.optimizers[0], "current_epoch": 0, "status": "training"}
        self.window, self.step_metrics, self.describe, self.random_state = tuple, dict, dict, torch.get_rng_state
        self.unsaved_parameters = dict
        self.step_loss, self.latest_metrics = lambda: self.state["latest_loss"], lambda since=None: {}
        self.epoch_metrics = lambda: {"train/epoch_loss": self.step_loss()}
        self.count_tokens = lambda batch: batch[0].numel()
        self.skip_step = lambda reason: vars(self).update(skipped=reason)
        self.request_stop = lambda reason, by=None: vars(self).update(stop_reason=reason, stopped_by=by)
        self.note = lambda kind, step=None, **fields: self.notes.append({"kind": kind, **fields})
        self.log_layers = lambda series, names, columns, values, step: self.layers.update({(series, step): values})
        self.log_image = lambda name, image, *, step=None: self.images.update({name: image})
        self.inference = lambda: self.rerunning(self.random_state())

    def log(self, name, value, step=None, reduce="mean"):
        self.logged[name, self.step if step is None else step] = value

    def log_table(self, name, columns, rows, *, step=None, kind=None):
        self.tables[name] = (tuple(columns), [tuple(row) for row in rows])

    @property
    def rank_tokens(self):
        return self.tokens_seen

    def share(self, part):
        raise NotImplementedError("for several ranks")

    def fire(self, event, **values):
        run = {"trainer": self, "step": self.step, "tokens_seen": self.tokens_seen, "state": self.state}
        getattr(self.hooks, event)(**run, **values)

    def save(self, name=None):
        path = write_checkpoint(self.checkpoint_dir, name(), {"model": self.model.state_dict()}, {"step": self.step})
        self.fire("on_checkpoint_save", checkpoint_path=str(path), path=str(self.checkpoint_dir))

    def validate(self, **metrics):
        self.validations_in_progress = 1
        self.fire("on_validation_start")
        batch = torch.eye(3), torch.tensor([[0.0], [1.0], [1.0]])
        at = {"batch": batch, "batch_idx": 0, "dataloader_name": "val", "metrics": {"loss": 1.0}}
        self.fire("on_validation_batch_end", output=self.model(batch[0]), target=batch[1], **at)
        self.fire("on_validation_end", metrics=metrics)
        self.validations_in_progress = 0

    @contextmanager
    def rerunning(self, random_state):
        with torch.random.fork_rng(), self.hooks.silenced():
            torch.set_rng_state(random_state)
            yield lambda batch: self.loss_fn(self.model(batch[0]), batch[1])


def train(run, batches):
    """Make one step per batch, then one validation, and end the epoch and the run."""
    run.fire("on_train_start", resumed=False)
    run.fire("on_epoch_start")
    for index, batch in enumerate(batches):
        run.step, run.tokens_seen = index + 1, run.tokens_seen + run.count_tokens(batch)
        at = {"batch": batch, "batch_idx": index, "dataloader_name": "train"}
        run.fire("on_train_batch_start", **at)
        loss = run.loss_fn(run.model(batch[0]), batch[1])
        run.state |= {"latest_loss": loss.item(), "avg_loss": loss.item()}
        run.fire("on_before_backward", loss=loss, **at)
        loss.backward()
        run.fire("on_gradients_ready", grads=Gradients(run.params), **at)
        run.fire("on_before_optimizer_step", optimizer_idx=0, **at)
        if run.skipped is None:
            run.optimizers[0].step()
        run.fire("on_after_optimizer_step" if run.skipped is None else "on_step_skipped", optimizer_idx=0, **at)
        run.optimizers[0].zero_grad()
        run.fire("on_train_batch_end", metrics={"loss": loss.item()}, **at)
        run.fire("on_step_end", **at)
        if run.stop_reason is not None:
            break
    run.validate(**{"val/loss": 1.0})
    run.fire("on_epoch_end")
    run.status = "completed"
    run.fire("on_train_end", reason="completed")
    run.hooks.close()
    run.record.close("completed", None, [], [], {})
    run.running = False

"""A host of hooks that is not our trainer: `PlainRun` is a `Run`, and `train` a plain loop over batches."""

from contextlib import contextmanager

import torch

from hookline.checkpoints.store import write_checkpoint
from hookline.run.rng import preserve_rng, restore_rng
from hookline.run.run import Run


class PlainRun(Run):
    """A run of a tiny model that can validate, save and run a batch again, with its record in memory.

    It counts as running from the start, so that a test may call the methods of a hook without a loop.
    """

    can_save = can_validate = knows_validation_batches = can_rerun = True
    # What each host knows in its own way; attributes, so that tests can set them.
    loss_fn, device, run_dir, checkpoint_dir = torch.nn.MSELoss(), torch.device("cpu"), None, None
    total_steps, total_epochs, epoch_batches = 6, 1, 6

    def __init__(self, run_dir=None, model=None):
        model = model or torch.nn.Linear(3, 1)
        super().__init__(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        self.run_dir, self.checkpoint_dir = run_dir, run_dir and run_dir / "checkpoints"
        self.reset_steps()
        self.record.start([])
        self.run_status.begin()

    def open(self, record=None):
        self.run_status.end()
        super().open(record)

    def count_tokens(self, batch):
        return batch[0].numel()

    def save(self, name=None):
        path = write_checkpoint(self.checkpoint_dir, name(), {"model": self.model.state_dict()}, {"step": self.step})
        self.event_args.set_checkpoint(str(path))
        if handler := self.hooks.slots.on_checkpoint_save:
            handler(self.event_args)

    def validate(self, **measured):
        with self.validation() as metrics:
            inputs, target = self.begin_validation_batch((torch.eye(3), torch.tensor([[0.0], [1.0], [1.0]])), 0)
            output = self.model(inputs)
            self.end_validation_batch(self.loss_fn(output, target), output=output, target=target)
            metrics.update(measured)

    @contextmanager
    def rerunning(self, random_state):
        with preserve_rng(), self.hooks.silenced():
            restore_rng(random_state)
            yield lambda batch: self.loss_fn(self.model(batch[0]), batch[1])

    # ---- what was recorded -------------------------------------------------------------------------------------------

    @property
    def notes(self):
        """The events, without their time and step."""
        return [{key: row[key] for key in row if key not in ("time", "step")} for row in self.record.events]

    @property
    def logged(self):
        """What hooks have logged, by name and step: not the metrics that a run records by itself."""
        self.record.flush(wait=True)
        own = ("step", "epoch", "time", "train/loss", "train/epoch_loss", "val/loss")
        return {(key, row["step"]): row[key] for row in self.record.metrics for key in row if key not in own}

    @property
    def layers(self):
        """The numbers per layer, by series and step."""
        self.record.flush(wait=True)
        return {(row.series, row.step): row.values for row in self.record.layer_rows}

    @property
    def tables(self):
        """The columns and the rows of the last table of each name."""
        self.record.flush(wait=True)
        return {row.name: (row.content.columns, row.content.rows) for row in self.record.media}


@contextmanager
def in_progress(run):
    """Open and begin a run before the block, and end it afterwards, with the exception that leaves the block."""
    run.open()
    try:
        run.begin()
        yield run
        run.finish()
    except BaseException as error:
        run.end(error)
        raise
    run.end()


def train(run, batches):
    """Train as a user's own loop does: a step per batch, then a validation if the run can validate."""
    with in_progress(run):
        run.begin_epoch()
        for batch in batches:
            inputs, target = run.begin_batch(batch)
            run.backward(torch.nn.functional.mse_loss(run.model(inputs), target))
            if run.window_is_complete():
                if run.gradients_ready():
                    run.step_optimizer(run.optimizers[0])
                run.end_optimizers()
                run.optimizers[0].zero_grad()
            run.end_batch()
            if run.at_boundary():
                break
        if run.can_validate:
            run.validate(**{"val/loss": 1.0})
        run.end_epoch()

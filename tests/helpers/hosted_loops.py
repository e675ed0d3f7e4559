"""One small training in every host of hooks: the same model, data, seed and optimizer."""

import gc
import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import hookline
from hookline import GenericTrainer, HooksConfig
from hookline.core.catalog import CATALOG
from hookline.hosts.options import Options
from hookline.hosts.watch import Watch

HOSTS = ("trainer", "attach", "accelerate", "lightning", "transformers", "ignite")
FOREIGN = HOSTS[1:]
ADAPTERS = HOSTS[3:]
Batch = dict[str, torch.Tensor]


class Net(nn.Module):
    """A model that computes its loss, as those of transformers do; its modules have the names of a `Sequential`'s."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 1)]
        for index, layer in enumerate(layers):
            self.add_module(str(index), layer)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = inputs
        for layer in self.children():
            logits = layer(logits)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


def make_batches(count: int = 4, seed: int = 1) -> list[Batch]:
    """Make batches whose losses are large enough for clipping to matter."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(4, 4, generator=generator) for _ in range(count)]
    return [{"inputs": batch, "labels": 3 * batch.sum(1, keepdim=True)} for batch in inputs]


def mean_loss(model: nn.Module, data: list[Batch]) -> float:
    with torch.no_grad():
        return sum(float(model(**batch)["loss"]) for batch in data) / max(len(data), 1)


def digest(model: nn.Module) -> str:
    """Return a hash of every bit of the weights."""
    return hashlib.sha256(b"".join(param.detach().numpy().tobytes() for param in model.parameters())).hexdigest()


class Recorder(hookline.TrainingHook):
    """Writes down the events of a run, and the numbers of its steps and validations."""

    on_error = "raise"

    def __init__(self) -> None:
        self.events: list[str] = []
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.validated: list[float] = []

    def on_step_end(self, ctx: hookline.StepContext) -> None:
        self.events.append("on_step_end")
        self.losses.append(ctx.loss)
        self.norms.append(ctx.grad_norm)

    def on_validation_end(self, metrics: Mapping[str, Any]) -> None:
        self.events.append("on_validation_end")
        self.validated.append(float(metrics["val/loss"]))


def _noter(event: str) -> Callable[[Recorder], None]:
    def note(self: Recorder) -> None:
        self.events.append(event)

    return note


for _name, _event in CATALOG.items():
    if _event.kind == "lifecycle" and _name not in vars(Recorder):
        setattr(Recorder, _name, _noter(_name))


@dataclass
class Loop:
    """A training to be, and after `run` its model, optimizer and run."""

    host: str
    config: Any = None
    hooks: list[Any] = field(default_factory=list)
    epochs: int = 2
    data: list[Batch] = field(default_factory=make_batches)
    val_data: list[Batch] = field(default_factory=list)
    accumulate: int = 1
    dropout: float = 0.0
    """Random numbers are the same within a host, and not between hosts: some draw them to shuffle."""
    attaches: bool = True
    """Whether Hookline takes part."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the host's trainer, or of the loop below."""
    attach_options: dict[str, Any] = field(default_factory=dict)
    """Of what attaches the hooks."""
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.AdamW(
        model.parameters(), lr=1e-2
    )

    def run(self) -> "Loop":
        """Train."""
        self.model = Net(self.dropout)
        self.optimizer = self.make_optimizer(self.model)
        self.control: Any = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hosts' advice about faster settings, and what they use of torch
            getattr(self, f"_{self.host}")()
        return self

    def given(self) -> dict[str, Any]:
        return {"config": self.config, "hooks": self.hooks, **self.attach_options}

    def _trainer(self) -> None:
        trainer = GenericTrainer(
            HooksConfig(**(self.config or {})) if self.attaches else None, self.model, self.optimizer, device="cpu",
            step_fn=lambda model, batch: model(**batch), accumulate=self.accumulate, console=False, **self.options,
        )  # fmt: skip
        for hook in self.hooks if self.attaches else ():
            trainer.add_hook(hook)
        torch.manual_seed(0)
        trainer.fit(self.data, self.val_data or None, max_epochs=self.epochs)
        self.control = trainer

    def _attach(self, accelerator: Any = None) -> None:
        model, optimizer = self.model, self.optimizer
        if accelerator is not None:
            model, optimizer = accelerator.prepare(model, optimizer)
        attached: Any = nullcontext()
        if self.attaches:
            attached = hookline.attach(model, optimizer, accelerator=accelerator, **self.given())
        torch.manual_seed(0)
        with attached as hl:
            self.control = hl and hl.run
            for _ in range(self.epochs):
                for index, batch in enumerate(hl.batches(self.data) if hl else self.data, 1):
                    loss = model(**batch)["loss"] / self.accumulate
                    hl.backward(loss) if hl else loss.backward()
                    if index % self.accumulate == 0:
                        optimizer.step()
                        optimizer.zero_grad()
                if self.val_data:
                    model.eval()
                    with hl.validation() if hl else nullcontext():
                        loss = mean_loss(model, self.val_data)
                        if hl:
                            hl.log("val/loss", loss)
                    model.train()

    def _bare(self) -> None:
        """Train with `attach` and none of its optional lines."""
        torch.manual_seed(0)
        with hookline.attach(self.model, self.optimizer, **self.given()) as hl:
            self.control = hl.run
            self._train_unaware()

    def _run(self) -> None:
        """Train as `hookline run` watches it, in this process; the optimizers of other tests are over."""
        Path("watched.yaml").write_text(json.dumps({"hooks": self.config or {}}))
        alive = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
        options = Options(hooks="watched.yaml", output=str(Path("runs").absolute()), allow_changes=True)
        self.watch = watch = Watch(options, prints=False, owns_process=False)
        watch._former.update(each for each in alive if each is not self.optimizer)
        watch.start()
        try:
            torch.manual_seed(0)
            self._train_unaware()
        finally:
            self.control = watch.attached and watch.attached.run
            watch.end()
            watch.stop()

    def _train_unaware(self) -> None:
        """Train in a loop that knows nothing of hooks."""
        for _ in range(self.epochs):
            for batch in self.data:
                self.model(**batch)["loss"].backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            mean_loss(self.model.eval(), self.val_data)
            self.model.train()

    def _accelerate(self) -> None:
        from accelerate import Accelerator

        self._attach(Accelerator(cpu=True))

    def _lightning(self) -> None:
        import lightning

        from hookline.lightning import Hooks

        loop = self

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                for name, layer in loop.model.named_children():
                    self.add_module(name, layer)

            def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
                loss = Net.forward(self, **batch)["loss"]
                self.log("seen", loss.detach() * 0 + batch_idx)
                return loss

            def validation_step(self, batch: Batch, batch_idx: int) -> None:
                self.log("val_loss", Net.forward(self, **batch)["loss"], batch_size=4)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return loop.optimizer

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        callback = Hooks(**self.given())
        options = {"logger": False, "enable_checkpointing": False, "log_every_n_steps": 1} | self.options
        fit_options = {"ckpt_path": options.pop("ckpt_path", None)}
        self.host_trainer = trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=self.epochs, enable_progress_bar=False, num_sanity_val_steps=0,
            enable_model_summary=False, accumulate_grad_batches=self.accumulate,
            callbacks=[*options.pop("callbacks", []), *([callback] if self.attaches else [])], **options,
        )  # fmt: skip
        torch.manual_seed(0)
        try:
            trainer.fit(Module(), _loader(self.data), _loader(self.val_data) if self.val_data else None, **fit_options)
        finally:
            self.callback, self.control = callback, getattr(callback, "run", None)

    def _transformers(self) -> None:
        import transformers
        from transformers.trainer_callback import PrinterCallback

        from hookline.transformers import Hooks

        class ReadyMade(transformers.Trainer):
            def get_train_dataloader(self) -> Any:
                return _loader(loop.data)

            def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
                return _loader(loop.val_data)

        loop = self
        options = {
            "eval_strategy": "epoch" if self.val_data else "no", "save_strategy": "no", "logging_steps": 1,
            "max_grad_norm": 0.0,
        } | self.options  # fmt: skip
        resume, scaler, late = (options.pop(name, None) for name in ("resume", "scaler", "late"))
        callback = Hooks(**self.given())
        callbacks = [*options.pop("callbacks", []), *([callback] if self.attaches and not late else [])]
        args = transformers.TrainingArguments(
            "hf", num_train_epochs=self.epochs, use_cpu=True, report_to=[], disable_tqdm=True, seed=0,
            gradient_accumulation_steps=self.accumulate, lr_scheduler_type="constant", **options,
        )  # fmt: skip
        self.host_trainer = trainer = ReadyMade(
            self.model, args, optimizers=(self.optimizer, None), callbacks=callbacks, eval_dataset=self.val_data or None
        )
        trainer.remove_callback(PrinterCallback)
        if late:
            trainer.add_callback(callback)
        trainer.accelerator.scaler = scaler  # fp16 itself is refused on the CPU
        torch.manual_seed(0)
        try:
            trainer.train(resume_from_checkpoint=resume)
        finally:
            self.callback, self.control = callback, getattr(callback, "run", None)

    def _ignite(self) -> None:
        from ignite.engine import Engine, Events
        from ignite.handlers import Checkpoint
        from ignite.metrics import Average

        import hookline.ignite

        tells_loss = self.options.get("tells_loss", True)

        def update(engine: Engine, batch: Batch) -> float:
            self.model.train()
            loss = self.model(**batch)["loss"] / self.accumulate
            hl.backward(loss) if hl and tells_loss else loss.backward()
            if engine.state.iteration % self.accumulate == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            return float(loss) * self.accumulate

        def validate(engine: Engine, batch: Batch) -> float:
            self.model.eval()
            return mean_loss(self.model, [batch])

        logging.getLogger("ignite").setLevel(logging.CRITICAL)
        self.engine, evaluator, hl = Engine(update), Engine(validate), None
        Average().attach(evaluator, "loss")
        if self.attaches:
            hl = hookline.ignite.attach(
                self.engine, self.model, self.optimizer, evaluator=evaluator if self.val_data else None, **self.given()
            )
        if self.val_data:
            self.engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(self.val_data))
        for event, handler in self.options.get("handlers", ()):
            self.engine.add_event_handler(event, handler)
        self.callback = hl
        if checkpoint := self.options.get("checkpoint"):
            parts = {"engine": self.engine, "model": self.model, "optimizer": self.optimizer, "hooks": hl}
            Checkpoint.load_objects(parts, checkpoint)
        torch.manual_seed(0)
        try:
            self.engine.run(self.data, max_epochs=self.epochs)
        finally:
            self.control = getattr(hl, "run", None)


def _loader(data: list[Batch]) -> DataLoader[Any]:
    """Return a loader of ready-made batches, of which a trainer that resumes can skip some."""
    return DataLoader(data, batch_size=1, collate_fn=lambda batches: batches[0])  # type: ignore[arg-type]

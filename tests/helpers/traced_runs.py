"""Small runs whose every event, record and printed line is written as text, one text per scenario of `SCENARIOS`.

``python tests/helpers/traced_runs.py DIRECTORY [SCENARIO ...]`` writes the texts into a directory. Those in
tests/golden_traces say what a run does; write them again only where a change of that is intended.

Times, ids and paths are left out, and floats have four digits. A record is also written by the clock, so its metrics
are merged by step.
"""

from __future__ import annotations

import inspect
import io
import json
import logging
import re
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rank_processes import run_on_ranks
from rank_runs import agree_each_step
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from hookline import (
    ForwardHook,
    HookManager,
    HookRegistry,
    HookRunner,
    SimpleTrainer,
    StepContext,
    StopTraining,
    Trainer,
    TrainingHook,
    UpdateHook,
)
from hookline.core.catalog import CATALOG, Event

Batch = tuple[torch.Tensor, torch.Tensor]
# Objects, and values that depend on the clock or on the machine.
NEVER_NAMED = {"model", "optimizer", "device", "config", "module", "seconds", "memory", "live_output", "path"}
EXPENSIVE = {"loss", "metrics", "state", "ctx", "grad_norm", "grads", "inputs", "kwargs", "output", "target"}
SELDOM_NAMED = {"state", "inputs", "kwargs", "tokens_seen", "batch", "dataloader_idx"}
TIMED = {"time", "seconds", "started", "closed", "pid", "host", "hosts", "bytes", "sha256", "traceback"}
MOST_ITEMS = 50
TRAINER_STATE = (
    "step", "epoch", "rank_tokens", "status", "running", "run_ended", "stop_reason", "stopped_by", "saving",
)  # fmt: skip
HOOK_FIELDS = ("name", "kind", "enabled", "policy", "schedule", "failures", "overruled")

# ---- values as text --------------------------------------------------------------------------------------------------

RUN_ID = re.compile(r"\b\d{8}-\d{6}-[a-z0-9]{8}\b")
SECONDS = re.compile(r"\b\d+(\.\d+)? (s|ms|min)\b")
SPEED = re.compile(r"  [\d.,]+ (\w+/s|s/\w+)\b.*")  # with the rest of its line: where the time goes, and the time left
FLOAT = re.compile(r"-?\b\d+\.\d{5,}(?:e[+-]?\d+)?\b")  # the console has four decimals
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b|\b[0-9a-f]{64}\b")  # of an object, or a sha256
PLACE = re.compile(r"\(?[^\s(]*/([\w.-]+\.py)(:| line )\d+\)?")


def cleaned(text: str) -> str:
    """Replace what differs between two runs of one program in a text for people."""
    text = RUN_ID.sub("<id>", SPEED.sub("  <speed>", text).replace(f"{Path.cwd()}/", "").replace(f"{Path.cwd()}", "."))
    text = PLACE.sub(r"\1", ADDRESS.sub("<hex>", SECONDS.sub("<time>", text)))
    return FLOAT.sub(lambda match: f"{float(match[0]):.4g}", text)


def show(value: Any) -> str:
    """Return a value as short text, without digits that depend on the processor."""
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (str, Path)):
        return cleaned(str(value))
    if isinstance(value, BaseException):
        return cleaned(f"{type(value).__name__}({value})")
    if isinstance(value, torch.Tensor):
        return f"tensor({value.item():.4g})" if value.dim() == 0 else f"tensor{list(value.shape)}"
    if isinstance(value, StepContext):
        return show({name: getattr(value, name) for name in ("step", "loss", "grad_norm", "lr", "tokens_seen")})
    if isinstance(value, Mapping):
        shown = {key: show(item) for key, item in value.items() if key not in NEVER_NAMED | TIMED}
        return "{" + ", ".join(f"{key}={text}" for key, text in shown.items()) + "}"
    if isinstance(value, (tuple, list)):
        if len(value) > MOST_ITEMS:  # the words of a random generator
            return f"<{len(value)} items>"
        return "(" + ", ".join(map(show, value)) + ")"
    return type(value).__name__


def gradients_of(model: nn.Module) -> str:
    """Return a letter for each parameter, G with a gradient and - without, and the norm of the gradients."""
    grads = [param.grad for param in model.parameters()]
    there = [grad.detach().flatten() for grad in grads if grad is not None]
    norm = f" norm={torch.cat(there).norm().item():.4g}" if there else ""
    return "".join("-" if grad is None else "G" for grad in grads) + norm


# ---- hooks that write every event ------------------------------------------------------------------------------------


def trace_method(event: Event, say: Callable[[str], None], names: list[str], optional: bool) -> Callable[..., Any]:
    """Return a hook's method that names arguments of an event and writes them."""

    def hear(self: Any, **values: Any) -> Any:
        trainer, grads = values.pop("trainer", None), values.get("grads")
        if grads is not None:
            values["grads"] = len(grads)
        words = [event.name, *(f"{name}={show(value)}" for name, value in values.items())]
        if trainer is not None:
            words += ["|", gradients_of(trainer.model)]
            # Only what differs from the usual, to have short lines.
            words += [] if trainer.model.training else ["eval"]
            words += [] if trainer.status == "training" else [trainer.status]
            words += [] if trainer.running else ["not running"]
            words += [f"stop={trainer.stop_reason} by={trainer.stopped_by}"] if trainer.stop_reason else []
        words += [] if torch.is_grad_enabled() else ["no_grad"]
        say(" ".join(words))
        return grads

    # A loop of the user's own passes what it likes; a parameter with a default is not needed.
    default = None if optional else inspect.Parameter.empty
    keyword = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY, default=default)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    hear.__signature__ = inspect.Signature([own, *(keyword(name) for name in names)])
    return hear


def trace_hooks(say: Callable[[str], None], named: str, optional: bool = False) -> list[Any]:
    """Return a lifecycle, a forward and an update hook that together write every event of the catalog.

    Args:
        say: Writes a line.
        named: The arguments that they name: 'all', 'most' (the lines are shorter), or 'cheap' ones that nothing has to
            be computed for, so that the run takes its shortest way.
        optional: Whether the parameters have defaults, for loops that do not pass everything.
    """
    left_out = {"all": set(), "most": SELDOM_NAMED, "cheap": EXPENSIVE | {"batch", "dataloader_idx"}}[named]

    def names(event: Event) -> list[str]:
        # Without its gradients an update hook would have nothing to return. Rare events may have long lines.
        shown = {"grads"} if event.kind == "update" else set() if event.inner else {"state", "tokens_seen"}
        without = left_out - shown
        return [name for name in event.attributes if name not in without | NEVER_NAMED]

    hooks = []
    for kind, base in (("lifecycle", TrainingHook), ("forward", ForwardHook), ("update", UpdateHook)):
        events = [event for event in CATALOG.values() if event.kind == kind]
        methods = {event.name: trace_method(event, say, names(event), optional) for event in events}
        own = {"modules": ["0", "1"], "runs_in_sanity_check": named == "all", "on_error": "warn"}
        hooks.append(type(f"Trace{kind.title()}", (base,), {**methods, **own})())
    return hooks


# ---- what a run leaves behind ----------------------------------------------------------------------------------------


def keys_of(value: Any, depth: int = 3) -> str:
    """Return the keys of a JSON value, and the keys inside them; everything else is left out."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and depth:
        return "[" + ", ".join(keys_of(item, depth - 1) for item in value) + "]"
    if not isinstance(value, dict) or not depth:
        return ""
    return "{" + ", ".join(f"{key}{keys_of(item, depth - 1)}" for key, item in value.items() if key not in TIMED) + "}"


def checkpoint_lines(directory: Path) -> Iterator[str]:
    """Describe a checkpoint: its files, the sections in them with their keys, and its counters."""
    for path in sorted(directory.rglob("*")):
        if path.suffix == ".safetensors":
            data = path.read_bytes()
            (length,) = struct.unpack("<Q", data[:8])
            header = json.loads(data[8 : 8 + length])
            tensors = [f"{name} {item['dtype']}{item['shape']}" for name, item in header.items() if "dtype" in item]
            yield f"  {path.name}: " + ", ".join(sorted(tensors))
        elif path.suffix == ".json":
            content = json.loads(path.read_text())
            yield f"  {path.name}: {keys_of(content)}"
            for name in ("progress", "position", "losses", "counts", "schedulers", "scaler", "hook_names"):
                if name in content.get("sections", {}):
                    yield f"    {name}: {show(content['sections'][name])}"
            yield f"    meta: {show(content.get('meta'))}"


def metrics_lines(path: Path) -> Iterator[str]:
    """Describe metrics.jsonl, one line per step of each attempt."""
    steps: dict[tuple[int, int, int], dict[str, Any]] = {}
    attempt = 0
    for line in path.read_text().splitlines():
        row = json.loads(line)
        attempt += "resumed" in row
        measured = {key: "<time>" for key in row if key.startswith("ranks/")}
        steps.setdefault((attempt, row["step"], row["epoch"]), {}).update(row | measured)
    for row in steps.values():
        yield f"  {show(dict(sorted(row.items())))}"


def record_lines(run_dir: Path) -> Iterator[str]:
    """Describe the files of a run's directory."""
    files = [str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()]
    yield "files: " + " ".join(sorted(files))
    run = json.loads((run_dir / "run.json").read_text())
    yield f"run.json: {' '.join(run)}"
    yield f"outcome={run['outcome']} reason={show(run['reason'])} lineage={show(run['lineage'])}"
    attempts = [{key: value for key, value in attempt.items() if key != "ranks"} for attempt in run["attempts"]]
    yield f"attempts: {show(attempts)}"  # `ranks` has the machine's name
    yield f"counters: {show(run['counters'])}"
    for hook in run["hooks"]:
        yield f"  {show({name: hook[name] for name in HOOK_FIELDS})}"
    for name, lines in (("metrics.jsonl", metrics_lines), ("events.jsonl", event_lines)):
        if (run_dir / name).exists():
            yield f"{name}:"
            yield from lines(run_dir / name)
    for manifest in sorted(run_dir.rglob("manifest.json")):
        yield f"checkpoint {manifest.parent.relative_to(run_dir)}:"
        yield from checkpoint_lines(manifest.parent)


def event_lines(path: Path) -> Iterator[str]:
    """Describe events.jsonl, one line per event."""
    for line in path.read_text().splitlines():
        yield f"  {event_text(json.loads(line))}"


def event_text(event: Mapping[str, Any]) -> str:
    """Return an event of the record as text."""
    return show({key: Path(value).name if key == "path" else value for key, value in event.items() if key not in TIMED})


# ---- a scenario and its text -----------------------------------------------------------------------------------------


def make_model(outputs: int = 1) -> nn.Sequential:
    """Return two linear layers with fixed weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, outputs))


def batches(count: int, rows: int = 2, seed: int = 1) -> list[Batch]:
    """Return fixed batches."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(rows, 3, generator=generator), torch.randn(rows, 1, generator=generator)) for _ in range(count)
    ]


def labeled(counts: list[int]) -> list[Batch]:
    """Return batches of four samples with classes, of which so many count; the others are ignored."""
    inputs = [batch[0] for batch in batches(len(counts), rows=4)]
    labels = [torch.tensor([row % 2 if row < count else -100 for row in range(4)]) for count in counts]
    return list(zip(inputs, labels, strict=True))


def sgd(model: nn.Module, **parameters: float) -> torch.optim.Optimizer:
    """Return an optimizer of all parameters."""
    return torch.optim.SGD(model.parameters(), lr=0.05, **parameters)


class Lines(io.TextIOBase):
    """A stream that is not a terminal, and passes on whole lines."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.rest = say, ""

    def write(self, text: str) -> int:
        """Pass on the lines that are complete."""
        *whole, self.rest = (self.rest + text).split("\n")
        for line in whole:
            self.say(line)
        return len(text)


class Scene:
    """The text of a scenario, and what its runs have in common."""

    def __init__(self, has_files: bool = True) -> None:
        self.lines: list[str] = []
        self.has_files = has_files

    def say(self, text: str) -> None:
        """Write a line."""
        self.lines.append(text.rstrip())

    def say_printed(self, text: str) -> None:
        """Write a line that the run printed."""
        self.say(f"> {cleaned(text)}")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Write what is printed, logged and warned about inside the block."""
        handler = logging.Handler()
        handler.emit = lambda record: self.say_printed(f"{record.levelname}: {record.getMessage()}")
        log, stream = logging.getLogger("hookline"), Lines(self.say_printed)
        handlers, propagates = log.handlers, log.propagate
        log.handlers, log.propagate = [handler], False

        def show_warning(message: Any, category: Any, *_: Any, **__: Any) -> None:
            self.say_printed(f"{category.__name__}: {message}")

        try:
            with warnings.catch_warnings(), redirect_stdout(stream), redirect_stderr(stream):
                warnings.simplefilter("always")
                warnings.showwarning = show_warning
                yield
        finally:
            log.handlers, log.propagate = handlers, propagates

    def trainer(
        self,
        data: Any = 4,
        *,
        named: str = "most",
        on: Mapping[str, Callable[..., Any]] | None = None,
        add: list[Any] | None = None,
        optimizer: Callable[[Any], Any] | None = None,
        scheduler: Callable[[Any], Any] | None = None,
        model: nn.Module | None = None,
        **options: Any,
    ) -> Trainer:
        """Make a trainer with the hooks that write its events.

        Args:
            data: The batches, or their number.
            named: The arguments that these hooks name, as `trace_hooks` has it; '' for a run without them.
            on: Functions by event, which are called after the hooks that write.
            add: More hooks: names or objects, or pairs of one and its options.
            optimizer: Makes the optimizers of the model.
            scheduler: Makes the schedulers of the optimizers.
            model: The model, instead of two linear layers.
            **options: Options of the trainer.
        """
        model = make_model() if model is None else model
        optimizers = (optimizer or partial(sgd, momentum=0.5))(model)
        if scheduler is not None:
            options["scheduler"] = scheduler(optimizers)
        options = {"loss_fn": mse_loss, "seed": 7, "warn_above": None, **options}
        data = batches(data) if isinstance(data, int) else data
        trainer = SimpleTrainer(model, data, optimizers, "cpu", **options)
        for hook in trace_hooks(self.say, named) if named else []:
            trainer.add_hook(hook)
        for event, function in (on or {}).items():
            trainer.add_hook(function, f"own_{event}", event=event)
        for hook in add or []:
            name, parameters = hook if isinstance(hook, tuple) else (hook, {})
            trainer.add_hook(name, **parameters)
        return trainer

    def attempt(self, call: Callable[[], Any]) -> Any:
        """Call a function, and write what it raises."""
        try:
            return call()
        except BaseException as error:
            self.say(f"raised {show(error)}")
            for note in getattr(error, "__notes__", []):
                self.say_printed(f"note: {note}")

    def fit(self, *args: Any, **options: Any) -> Trainer:
        """Make a trainer, train, and write what the run has left behind."""
        trainer = self.trainer(*args, **options)
        self.run(trainer)
        return trainer

    def run(self, trainer: Trainer, **arguments: Any) -> None:
        """Train, and write what the run has left behind."""
        self.say(f"--- fit({', '.join(f'{name}={show(value)}' for name, value in arguments.items())})")
        self.attempt(lambda: trainer.fit(**arguments))
        self.describe(trainer)

    def describe(self, trainer: Trainer) -> None:
        """Write a trainer's state, and the record of its last run."""
        self.say("--- afterwards")
        self.say(" ".join(f"{name}={show(getattr(trainer, name))}" for name in TRAINER_STATE))
        rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        self.say(f"lr={show(rates)} loader_batches={show(trainer.loader_batches)} {gradients_of(trainer.model)}")
        params = {name: param.detach().abs().sum().item() for name, param in trainer.model.named_parameters()}
        self.say(f"parameters: {show(params)}")
        if trainer.run_dir is not None:
            self.lines += record_lines(trainer.run_dir) if self.has_files else []
        else:
            self.lines += [f"  {event_text(event)}" for event in trainer.record.events]


# ---- the scenarios ---------------------------------------------------------------------------------------------------


def at_step(number: int, act: Callable[[Any], Any]) -> Callable[..., None]:
    """Return a hook that acts on the trainer at one step."""

    def hook(trainer: Any, step: int) -> None:
        if step == number:
            act(trainer)

    return hook


def raising(error: BaseException, call: int) -> Callable[..., torch.Tensor]:
    """Return a step_fn that raises at one of its calls."""
    calls: list[int] = []

    def step_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        calls.append(1)
        if len(calls) == call:
            raise error
        return mse_loss(model(batch[0]), batch[1])

    return step_fn


def with_metrics(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the loss with numbers beside it."""
    output = model(batch[0])
    return {"loss": mse_loss(output, batch[1]), "size": output.abs().mean(), "rows": len(output), "output": output}


def two_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Return an optimizer for each layer."""
    return [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[1].parameters(), lr=0.01)]


def two_schedulers(optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    """Return a scheduler for each optimizer."""
    schedulers = torch.optim.lr_scheduler
    return [schedulers.StepLR(optimizers[0], 2, 0.5), schedulers.ExponentialLR(optimizers[1], 0.9)]


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    """Return a scheduler that needs the validation loss."""
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)


def skip(trainer: Any) -> None:
    """Skip the current step."""
    trainer.skip_step("not this one")


def stop_training(trainer: Any) -> None:
    """Stop the run as a hook may."""
    raise StopTraining("enough")


def fail() -> None:
    """Fail as a hook with a defect."""
    raise ValueError("a defect")


def failing_hooks(scene: Scene, **policies: str) -> None:
    """Train with hooks that fail, by their policies."""
    trainer = scene.trainer(6)
    for name, policy in policies.items():
        trainer.add_hook(lambda step: fail() if step > 1 else None, name, event="on_step_end", on_error=policy)
    scene.run(trainer)


def overflow(scene: Scene) -> None:
    """Train with a GradScaler and a batch whose gradients overflow."""
    data = batches(5)
    data[2] = (data[2][0] * 1e30, data[2][1])
    trainer = scene.trainer(data, precision="fp16")
    trainer.engine.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scene.run(trainer)


def continued(scene: Scene) -> None:
    """Stop in the middle of an epoch, and train on in a second run of the same trainer."""
    trainer = scene.trainer(4, accumulate=2, max_epochs=3)
    scene.run(trainer, max_steps=3)
    scene.run(trainer, max_steps=5)
    scene.run(trainer, max_steps=5)


def resumed(scene: Scene, fork: bool) -> None:
    """Resume in the middle of an epoch: the run, or a new one from one of its checkpoints."""
    data = partial(
        torch.utils.data.DataLoader,
        torch.utils.data.TensorDataset(*map(torch.cat, zip(*batches(4), strict=True))),
        batch_size=2,
        shuffle=True,
    )
    first = scene.trainer(
        data(), named="cheap", max_steps=6, max_epochs=9, on={"on_step_end": at_step(5, lambda trainer: trainer.save())}
    )
    scene.run(first)
    assert first.run_dir is not None
    second = scene.trainer(data(), max_steps=8, max_epochs=9)
    scene.run(second, resume=first.run_dir / "checkpoints" / "step-00000005" if fork else first.run_dir, fork=fork)


def scheduled(scene: Scene) -> None:
    """Train with hooks on schedules."""
    trainer = scene.trainer(6, named="", accumulate=2, max_epochs=4)
    schedules: dict[str, dict[str, Any]] = {
        "every 3": {"every": 3}, "every 2 epochs": {"every": "2 epochs"}, "at": {"at": [2, "5 batches", "3 epochs"]},
        "start and stop": {"start": 4, "stop": 6}, "every 2 from 5": {"every": 2, "start": 5},
        "every 5 batches": {"every": "5 batches"},
    }  # fmt: skip
    for event in ("on_train_batch_end", "on_step_end", "on_forward", "on_epoch_end"):
        for name, schedule in schedules.items():

            def hook(step: int, epoch: int, event: str = event, name: str = name) -> None:
                scene.say(f"{event} {name}: step={step} epoch={epoch}")

            hook.__signature__ = inspect.Signature(list(inspect.signature(hook).parameters.values())[:2])
            trainer.add_hook(hook, f"{event}, {name}", event=event, **schedule)
    scene.run(trainer)


def by_hand(scene: Scene) -> None:
    """Call training_step, validate and predict outside of a run, then train and call them again."""
    trainer = scene.trainer(4, accumulate=2, val_loaders=batches(2, seed=2))

    def use() -> None:
        for batch in batches(3):
            scene.say(f"--- training_step: {show(trainer.training_step(batch))}")
        scene.say(f"--- validate: {show(trainer.validate())}")
        scene.say(f"--- predict: {show(trainer.predict([batch[0] for batch in batches(2)]))}")

    use()
    scene.describe(trainer)
    scene.run(trainer)
    use()
    scene.describe(trainer)


def stepped(scene: Scene) -> None:
    """Take a few steps of a run, and close it; then take all."""
    trainer = scene.trainer(3)
    steps = trainer.stepper()
    for _ in range(2):
        scene.say(f"--- next: {show(next(steps))}")
    scene.attempt(steps.close)
    scene.describe(trainer)
    for loss in trainer.stepper():
        scene.say(f"--- loss: {show(loss)}")
    scene.describe(trainer)


def inside(scene: Scene) -> None:
    """Validate, infer and run a batch again from a hook."""

    def act(trainer: Any, step: int, batch: Batch) -> None:
        if step == 2:
            scene.say(f"validate: {show(trainer.validate({'other': batches(1, seed=3)}))}")
            with trainer.inference() as model:
                scene.say(f"inference: {show(model(batch[0]))} {model.training} {torch.is_grad_enabled()}")
            with trainer.rerunning(trainer.random_state()) as forward:
                scene.say(f"rerunning: {show(forward(batch))} {trainer.model.training} {torch.is_grad_enabled()}")

    scene.fit(3, on={"on_train_batch_end": act}, val_loaders=batches(1, seed=2))


def assigned(scene: Scene) -> None:
    """Assign the learning rate and the loss function from a hook."""

    def act(trainer: Any) -> None:
        trainer.lr = 0.02
        trainer.loss_fn = nn.functional.l1_loss
        trainer.log("own", 1.5)

    scene.fit(4, on={"on_step_end": at_step(2, act)})


def broken_loader(scene: Scene) -> None:
    """Train on a loader that raises in its second epoch's middle."""

    class Loader:
        calls = 0

        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[Batch]:
            for batch in batches(3):
                self.calls += 1
                if self.calls == 5:
                    raise OSError("the disk is gone")
                yield batch

    scene.fit(Loader(), max_epochs=2)


def frozen(scene: Scene) -> None:
    """Save without the frozen layer, and resume."""

    def make() -> Trainer:
        model = make_model()
        model[0].requires_grad_(False)
        return scene.trainer(
            2, model=model, optimizer=lambda model: torch.optim.AdamW(model[1].parameters()),
            trainable_only=True, add=["checkpoint"],
        )  # fmt: skip

    first = make()
    scene.run(first)
    scene.run(make(), resume=first.run_dir, max_epochs=2)


def changing_hooks(scene: Scene) -> None:
    """Add, disable, enable and remove hooks from a hook, and order them."""

    def hook(name: str) -> Callable[..., None]:
        return lambda step: scene.say(f"{name} step={step}")

    def change(trainer: Any, step: int) -> None:
        if step == 2:
            trainer.add_hook(hook("late"), "late", event="on_step_end", before="last")
            trainer.add_hook(hook("every 2"), "every 2", event="on_train_batch_end", every=2)
        elif step in (3, 5):
            (trainer.disable_hook if step == 3 else trainer.enable_hook)("trace_lifecycle")
        elif step == 4:
            trainer.remove_hook("late")

    trainer = scene.trainer(6, named="cheap")
    trainer.add_hook(hook("last"), "last", event="on_step_end", last=True)
    trainer.add_hook(change, "change", event="on_step_end", after="first")
    trainer.add_hook(hook("first"), "first", event="on_step_end", before="trace_lifecycle")
    scene.run(trainer)
    scene.lines += trainer.hooks.explain("on_step_end").splitlines()


class Counts(TrainingHook):
    """Counts the steps, and draws random numbers; both are saved."""

    saves = ("count",)

    def __init__(self, say: Callable[[str], None]) -> None:
        self.count, self._say = 0, say

    def on_step_end(self, trainer: Any) -> None:
        """Count a step, and save the second one."""
        self.count += 1
        self._say(f"count={self.count} drew {show(torch.rand(()))}")
        if self.count == 2:
            trainer.save()

    def close(self) -> None:
        """Say that the run is over."""
        self._say("closed")


def saved_hooks(scene: Scene) -> None:
    """Resume with a hook that has a state and draws random numbers."""
    models = [make_model().insert(1, nn.Dropout(0.5)) for _ in range(2)]
    trainers = [scene.trainer(4, named="", model=model, add=[Counts(scene.say), "grokfast"]) for model in models]
    scene.run(trainers[0])
    scene.run(trainers[1], resume=trainers[0].run_dir, max_epochs=2)


class Doubles(ForwardHook):
    """Changes the output of the first layer."""

    modules, intervene = "0", True

    def on_forward(self, output: Any) -> Any:
        """Return another output."""
        return output * 2


def write_weights(trainer: Any) -> None:
    """Change the weights as a hook that should not."""
    with torch.no_grad():
        trainer.model[1].bias += 1


def own_loop(scene: Scene, make: Callable[[], HookManager], with_steps: bool) -> None:
    """Fire events from a user's own loop, on a registry with schedules."""
    registry, model = make(), make_model()
    optimizer = sgd(model)
    lifecycle, forward, update = trace_hooks(scene.say, "most", optional=True)
    registry.watch(model)
    for name, hook in (("lifecycle", lifecycle), ("update", update), ("forward", forward)):
        registry.register(hook, name)
    for event in ("on_train_batch_end", "on_step_end", "on_forward"):
        registry.register(lambda event=event: scene.say(f"  {event}, every 2"), f"{event}_2", event=event, every=2)
    registry.register("clip_norm", max_norm=0.1)
    registry.on_train_start(state={"model": model})
    number = 0
    for epoch in range(2):
        registry.on_epoch_start(epoch=epoch)
        for index, batch in enumerate(batches(3)):
            number += 1
            where = {"step": number, "epoch": epoch} if with_steps else {}
            place = {**where, "batch_idx": index} if with_steps else where
            registry.on_train_batch_start(batch=batch, **place)
            loss = mse_loss(model(batch[0]), batch[1])
            registry.on_before_backward(loss=loss, **place)
            loss.backward()
            registry.on_after_backward(**place)
            grads = {name: param.grad for name, param in model.named_parameters()}
            registry.on_gradients_ready(grads=grads, **place)
            if epoch:
                registry.on_update(grads, model=model, **where)
            else:
                for name, grad in registry.on_update(grads, **where).items():
                    model.get_parameter(name).grad = grad
            scene.say(f"  after on_update: {gradients_of(model)}")
            registry.on_before_optimizer_step(optimizer_idx=0, **place)
            optimizer.step()
            registry.on_after_optimizer_step(optimizer_idx=0, **place)
            optimizer.zero_grad()
            registry.on_train_batch_end(batch, loss.item(), **place)
            registry.on_step_end(StepContext(number, loss.item(), 1.0, 0.1, 0, model, optimizer), **where)
        registry.on_validation_start(epoch=epoch)
        with torch.no_grad():
            model(batches(1)[0][0])
        registry.on_validation_end(metrics={"val/loss": 1.0}, epoch=epoch)
        registry.on_epoch_end(epoch=epoch)
    registry.on_train_end(state={})
    registry.close()
    for hook in registry.list_hooks():
        scene.say(f"{hook.name} {hook.kind} enabled={hook.enabled} failures={hook.failures}")


def trace_rank(rank: int, name: str, folder: str) -> list[str]:
    """Run a scenario of several ranks on one of them, and return its lines."""
    torch.set_num_threads(1)
    agree_each_step()
    scene = Scene(has_files=False)  # They are complete when all ranks have ended.
    model = nn.parallel.DistributedDataParallel(make_model(2 if name == "ranks_tokens" else 1))
    with chdir(folder), scene.listening():
        if name == "ranks_stop":
            stop = at_step(2, lambda trainer: trainer.request_stop("rank 1 has enough") if rank else None)
            scene.fit(batches(6, seed=rank + 1), model=model, on={"on_step_end": stop}, add=["checkpoint"])
        else:
            data = labeled([4, 3, 0, 2, 1] if rank else [1, 0, 0, 4, 4])
            scene.fit(data, model=model, loss_fn=cross_entropy, accumulate=2, loss_weight="tokens", max_epochs=2)
    return scene.lines


def on_two_ranks(scene: Scene, name: str) -> None:
    """Write what each of two ranks sees, and the record of their run."""
    folder = str(Path.cwd())
    with chdir(tempfile.gettempdir()):  # The process that forks ranks stays where it was started.
        results = run_on_ranks(trace_rank, 2, name, folder)
    for rank, result in enumerate(results):
        scene.lines += [f"====== rank {rank}", *result.value]
    (run_dir,) = Path("runs").iterdir()
    scene.lines += ["====== record", *record_lines(run_dir)]


def huge(scene: Scene) -> None:
    """Train until the weights are not finite."""
    data = batches(4)
    data[2] = (data[2][0] * 1e30, data[2][1])
    scene.fit(data, max_epochs=2)


def skipping_update(grads: Any, step: int, trainer: Any) -> Any:
    """Skip a step as an update hook."""
    if step == 2:
        skip(trainer)
    return grads


CLIP = ("clip_norm", {"max_norm": 0.1})
SAVES_ON_EXCEPTION = ("checkpoint", {"save_on_exception": True})
DATA = batches(4)
TWO = {"a": batches(2, seed=3), "b": batches(4, seed=4)}
VALIDATION = {"near": batches(2, seed=5), "far": batches(1, rows=3, seed=6)}
CLASSES = labeled([4, 4, 4])
EMPTY = [*batches(2), (torch.zeros(0, 3), torch.zeros(0, 1)), *batches(2, rows=3)]

SCENARIOS: dict[str, Callable[[Scene], Any]] = {
    "plain": lambda scene: scene.fit(max_epochs=2),
    "plain_all_arguments": lambda scene: scene.fit(3, named="all", val_loaders=batches(1, seed=2)),
    "plain_cheap_arguments": lambda scene: scene.fit(named="cheap", max_epochs=2),
    "no_hooks": lambda scene: scene.fit(named="", max_epochs=2, val_loaders=batches(2, seed=2), add=["checkpoint"]),
    "no_hooks_accumulate": lambda scene: scene.fit(5, named="", accumulate=2, max_grad_norm=0.1, max_epochs=2),
    "not_recorded": lambda scene: scene.fit(2, record=False, console=False),
    "accumulate": lambda scene: scene.fit(7, accumulate=3, max_epochs=2),
    "accumulate_cheap_arguments": lambda scene: scene.fit(5, named="cheap", accumulate=3),
    "weight_tokens": lambda scene: scene.fit(
        labeled([4, 1, 0, 3, 0]), model=make_model(2), loss_fn=cross_entropy, accumulate=2, loss_weight="tokens"
    ),
    "weight_samples": lambda scene: scene.fit(EMPTY, accumulate=2, loss_weight="samples"),
    "scaler_overflow": overflow,
    "bf16": lambda scene: scene.fit(2, precision="bf16", named="cheap"),
    "tokens": lambda scene: scene.fit(
        [{"input_ids": torch.ones(2, 3, dtype=torch.int64)}] * 3, named="all", accumulate=2,
        step_fn=lambda model, batch: model(batch["input_ids"].float()).mean(),
    ),
    "two_optimizers_step": lambda scene: scene.fit(optimizer=two_optimizers, scheduler=two_schedulers, max_epochs=2),
    "two_optimizers_epoch": lambda scene: scene.fit(
        3, optimizer=two_optimizers, scheduler=two_schedulers, scheduler_interval="epoch", max_epochs=2
    ),
    "plateau": lambda scene: scene.fit(
        2, scheduler=plateau, scheduler_interval="epoch", val_loaders=batches(1, seed=2), max_epochs=4, named="cheap"
    ),
    "loaders_sequential": lambda scene: scene.fit(TWO, accumulate=4, max_epochs=2),
    "loaders_round_robin": lambda scene: scene.fit(TWO, loader_schedule="round_robin", max_epochs=2, named="cheap"),
    "loaders_shortest": lambda scene: scene.fit(TWO, loader_schedule="round_robin", loader_end="shortest"),
    "loaders_weighted": lambda scene: scene.fit(
        TWO, loader_schedule="weighted", loader_weights={"a": 1, "b": 3}, max_epochs=2, named="cheap"
    ),
    "validate_steps": lambda scene: scene.fit(5, val_loaders=VALIDATION, validate_every=2),
    "validate_epochs": lambda scene: scene.fit(
        2, val_loaders=VALIDATION, validate_every="2 epochs", max_epochs=4, sanity_batches=1
    ),
    "validate_never": lambda scene: scene.fit(2, val_loaders=VALIDATION, validate_every=None),
    "metrics_by_name": lambda scene: scene.fit(
        CLASSES, model=make_model(2), loss_fn=cross_entropy, metrics=["accuracy", "f1"], val_loaders=CLASSES[:2],
        accumulate=2,
    ),
    "step_fn_metrics": lambda scene: scene.fit(
        5, step_fn=with_metrics, loss_fn=None, accumulate=2, val_loaders=batches(1, seed=2)
    ),
    "added_metrics": lambda scene: scene.fit(
        3, on={"on_train_batch_end": lambda metrics, step: metrics.update(added=step / 2)}
    ),
    "limit_train_batches": lambda scene: scene.fit(5, limit_train_batches=2, accumulate=2, max_epochs=2),
    "continued": continued,
    "resumed": partial(resumed, fork=False),
    "forked": partial(resumed, fork=True),
    "request_stop": lambda scene: scene.fit(
        on={"on_after_backward": at_step(2, lambda trainer: trainer.request_stop("seen enough"))},
        val_loaders=batches(1, seed=2), add=["checkpoint"],
    ),
    "stop_training": lambda scene: scene.fit(on={"on_train_batch_start": at_step(2, stop_training)}),
    "stop_training_at_start": lambda scene: scene.fit(on={"on_train_start": stop_training}),
    "stop_in_validation": lambda scene: scene.fit(
        2, max_epochs=3, val_loaders=batches(2, seed=2), on={"on_validation_end": at_step(4, stop_training)}
    ),
    "skip_at_gradients_ready": lambda scene: scene.fit(on={"on_gradients_ready": at_step(2, skip)}, add=[CLIP]),
    "skip_in_update": lambda scene: scene.fit(on={"on_update": skipping_update}, add=[CLIP]),
    "skip_before_optimizer": lambda scene: scene.fit(
        on={"on_before_optimizer_step": at_step(2, skip)}, optimizer=two_optimizers, scheduler=two_schedulers
    ),
    "clip": lambda scene: scene.fit(add=[CLIP, ("clip_value", {"max_value": 0.01})], max_grad_norm=0.005),
    "scheduled": scheduled,
    "failing_warn": partial(failing_hooks, warns="warn"),
    "failing_disable": partial(failing_hooks, disables="disable"),
    "failing_raise": partial(failing_hooks, raises="raise"),
    "failing_outside_steps": lambda scene: scene.fit(
        2, on=dict.fromkeys(("on_train_start", "on_epoch_end", "on_train_end"), fail)
    ),
    "exception": lambda scene: scene.fit(step_fn=raising(ValueError("a defect"), 3), add=[SAVES_ON_EXCEPTION]),
    "exception_in_window": lambda scene: scene.fit(step_fn=raising(ValueError("a defect"), 4), accumulate=3),
    "exception_in_validation": lambda scene: scene.fit(
        2, step_fn=raising(ValueError("a defect"), 4), val_loaders=batches(2, seed=2), sanity_batches=0
    ),
    "keyboard_interrupt": lambda scene: scene.fit(step_fn=raising(KeyboardInterrupt(), 3)),
    "broken_loader": broken_loader,
    "nan_loss": lambda scene: scene.fit(
        step_fn=lambda model, batch: mse_loss(model(batch[0]), batch[1]) * (float("nan") if batch is DATA[1] else 1.0),
        data=DATA, add=["skip_nonfinite"],
    ),
    "non_finite_weights": huge,
    "checkpoints": lambda scene: scene.fit(3, max_epochs=2, accumulate=2, add=["checkpoint"]),
    "async_save": lambda scene: scene.fit(4, async_save=True, on={"on_step_end": lambda trainer: trainer.save()}),
    "save_by_a_hook": lambda scene: scene.fit(
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        on={"on_step_end": at_step(2, lambda trainer: trainer.save("mine"))},
        add=[("ema", {"decay": 0.5}), ("grokfast", {})],
    ),
    "trainable_only": frozen,
    "fast_dev_run": lambda scene: scene.fit(
        6, fast_dev_run=2, val_loaders=batches(3, seed=2), add=["checkpoint"], max_epochs=3
    ),
    "overfit_batches": lambda scene: scene.fit(6, overfit_batches=2, max_epochs=2, val_loaders=batches(3, seed=2)),
    "by_hand": by_hand,
    "stepper": stepped,
    "inside": inside,
    "assigned": assigned,
    "built_in_hooks": lambda scene: scene.fit(
        named="cheap", max_epochs=2, val_loaders=batches(1, seed=2),
        add=[("early_stopping", {"monitor": "val/loss", "patience": 1}), "lr_monitor", ("ema", {"decay": 0.9}),
             ("gradient_monitor", {"every": 2}), ("activation_stats", {"modules": "*", "every": 2}), "loss_spike",
             ("freeze", {"params": "1.bias"})],
    ),
    "unowned_parameters": lambda scene: scene.fit(
        2, optimizer=lambda model: sgd(model[1]), accumulate=2, max_epochs=2, max_grad_norm=0.5
    ),
    "optimizer_step": lambda scene: scene.fit(2, optimizer_step=lambda optimizer: optimizer.step()),
    "own_metrics": lambda scene: scene.fit(
        2, metrics={"size": lambda output, batch: output.abs().mean()}, val_loaders=VALIDATION
    ),
    "changing_hooks": changing_hooks,
    "saved_hooks": saved_hooks,
    "intervention": lambda scene: scene.fit(2, add=[Doubles()], enable_intervention=True),
    "written_weights": lambda scene: scene.fit(3, on={"on_train_batch_end": at_step(1, write_weights)}),
    "debug": lambda scene: scene.fit(3, debug=True, on={"on_step_end": at_step(2, lambda trainer: fail())}),
    "own_loop_runner": partial(own_loop, make=HookRunner, with_steps=True),
    "own_loop_runner_without_steps": partial(own_loop, make=HookRunner, with_steps=False),
    "own_loop_registry": partial(own_loop, make=HookRegistry, with_steps=True),
    "own_loop_manager": partial(own_loop, make=HookManager, with_steps=True),
    "own_loop_manager_without_steps": partial(own_loop, make=HookManager, with_steps=False),
    "ranks_stop": partial(on_two_ranks, name="ranks_stop"),
    "ranks_tokens": partial(on_two_ranks, name="ranks_tokens"),
}  # fmt: skip


def trace(name: str) -> str:
    """Run a scenario in an empty directory, and return its text."""
    torch.set_num_threads(1)
    scene = Scene()
    with tempfile.TemporaryDirectory() as folder, chdir(folder), scene.listening():
        SCENARIOS[name](scene)
    return "\n".join(scene.lines) + "\n"


def write(directory: Path, names: list[str]) -> None:
    """Write the texts of scenarios, of all by default."""
    directory.mkdir(exist_ok=True, parents=True)
    for name in names or SCENARIOS:
        (directory / f"{name}.txt").write_text(trace(name))


if __name__ == "__main__":
    write(Path(sys.argv[1]).resolve(), sys.argv[2:])

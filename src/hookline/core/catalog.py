"""The event catalog: all events, the arguments that a hook may name at each, and what a run must be able to do.

Each row is a method of `Events`. Its decorator says which arguments a hook may name, how often the event fires, what is
true of the gradients then and what a run must be able to do to fire it; assignments below it are other spellings. Base
classes, dispatch, `hookline events`, the docs page and the event-order test all derive from these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from hookline._words import nearest
from hookline.errors import RegistrationError

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Argument:
    """A value that hooks may name, and what it costs to compute it."""

    name: str
    meaning: str
    cost: str = "free"

    @property
    def free(self) -> bool:
        """Whether computing it costs nothing."""
        return self.cost == "free"


HOST_READ = "host read"  # Waits for the device; paid only at events where a due hook names the argument.

_ARGUMENTS = [
    Argument("trainer", "the run's control: model, optimizers, log, request_stop, save, lr, hook_data"),
    Argument("model", "the live model"),
    Argument("optimizer", "the event's optimizer; the first one for events without one"),
    Argument("optimizer_idx", "its place in trainer.optimizers"),
    Argument("device", "the device that batches are moved to"),
    Argument(
        "config",
        "the full run configuration, read-only: attributes or items; config.checkpoint.dir is the same as `path`",
    ),
    Argument("step", "optimizer steps, counted from 1; 0 before the first"),
    Argument("epoch", "counted from 0"),
    Argument("batch", "the micro-batch, on the device"),
    Argument("batch_idx", "micro-batches of this epoch, counted from 0"),
    Argument("dataloader_idx", "which loader the batch came from"),
    Argument("dataloader_name", "its name"),
    Argument("tokens_seen", "tokens of all batches so far"),
    Argument("lr", "learning rate the step uses or used: first group of the event's optimizer, else of the first"),
    Argument("loss", "this micro-batch's loss as a float; in on_before_backward the live tensor", HOST_READ),
    Argument("metrics", "numbers of the batch, validation or epoch; keys that hooks add are recorded", HOST_READ),
    Argument(
        "state",
        "the run as one plain dict: latest_loss, avg_loss, status, …; in on_update the hook's own state",
        HOST_READ,
    ),
    Argument("ctx", "a StepContext; its loss and grad_norm are read when you first use them", "device work"),
    Argument("grad_norm", "global norm of the gradients before clipping, as a float", f"device work + {HOST_READ}"),
    Argument("grads", "the gradients by parameter name, live"),
    Argument("reason", "why it happened, in words"),
    Argument("checkpoint_path", "the checkpoint's own directory"),
    Argument("path", "the directory that holds the run's checkpoints"),
    Argument("resumed", "whether the run was resumed from a checkpoint"),
    Argument("exception", "what ended the run"),
    Argument("name", "the module's name in the model"),
    Argument("module", "the module that ran"),
    Argument("inputs", "the module's positional inputs, as copy-on-write views", "a view per tensor"),
    Argument("kwargs", "the module's keyword inputs, as copy-on-write views", "a view per tensor"),
    Argument(
        "output",
        "the module's output or, at the end of a batch, the model's or step_fn's 'output'; as copy-on-write views",
        "a view per tensor",
    ),
    Argument(
        "target",
        "a tuple batch's second item, a dict's 'labels' or step_fn's 'target', as copy-on-write views; else None",
        "a view per tensor",
    ),
    Argument("live_output", "the output itself, read-only: a write is detected and ends the run"),
    Argument("seconds", "host time of the module's forward", "a clock before and after"),
    Argument(
        "memory", "bytes the call left allocated on CUDA; elsewhere the bytes of its output", "read before and after"
    ),
    Argument("phase", "'train', 'validation' or 'inference'"),
]
ARGUMENTS: dict[str, Argument] = {argument.name: argument for argument in _ARGUMENTS}
ARGUMENT_ALIASES = {"loader_idx": "dataloader_idx", "loader_name": "dataloader_name"}
MOST_LISTED = 4  # Events that a message lists.

CAPABILITIES = {
    "can_skip_steps": "can skip an optimizer step",
    "can_stop": "can stop before its last step",
    "can_save": "can save checkpoints",
    "can_validate": "can validate",
    "can_rerun": "can run a batch again",
    "knows_loss": "knows the loss",
    "knows_batches": "knows the batches",
    "knows_validation_batches": "knows the validation batches, and what the model returned for them",
    "knows_windows": "knows the micro-batches of a step",
    "has_unscaled_gradients": "has unscaled gradients before the optimizer step",
}
"""Something that a run may be able to do, as an attribute of the run and in words; events and hooks may need it."""


@dataclass(frozen=True)
class Event:
    """One row of the catalog."""

    name: str
    doc: str
    attributes: dict[str, str]  # Argument -> attribute of the event arguments that holds it.
    order: tuple[str, ...]  # Positional order when fired manually.
    fires: str  # How often, in words.
    gradients: str = "none"  # What is true of them, in words.
    kind: str = "lifecycle"
    inner: bool = False  # The event repeats inside the run, so schedules apply to it.
    of_step: bool = False  # An inner event of a whole step, not of one of its micro-batches.
    closing: bool = False  # Every hook is called, whatever the others do; failures become notes.
    needs: str = ""  # One of the `CAPABILITIES`; a run without it never fires the event.
    aliases: tuple[str, ...] = ()
    respelled: dict[str, dict[str, str]] = field(default_factory=dict)
    """Spelling -> arguments that have another attribute under it."""

    def attribute(self, argument: str, spelling: str) -> str | None:
        """Return the attribute that holds an argument, for a method with this spelling; None if there is none."""
        canonical = ARGUMENT_ALIASES.get(argument, argument)
        return self.respelled.get(spelling, {}).get(canonical) or self.attributes.get(canonical)

    def arguments_of(self, attributes: Iterable[str]) -> list[str]:
        """Return the names that hooks use for attributes of the event arguments."""
        respelled = {source: name for names in self.respelled.values() for name, source in names.items()}
        names = {source: name for name, source in self.attributes.items()} | respelled
        return [names[attribute] for attribute in attributes]

    def free(self, argument: str) -> bool:
        """Return whether an argument costs nothing at this event."""
        return ARGUMENTS[argument].free or self.attributes[argument] in ("live_loss", "own_state")

    def unknown_argument(self, name: str) -> str:
        """Explain that hooks cannot name an argument here, and name the events that have it or the nearest argument."""
        problem = f"{self.name} has no argument {name!r}"
        wanted = ARGUMENT_ALIASES.get(name, name)
        others = [event for event in CATALOG.values() if wanted in (*event.attributes, *event.attributes.values())]
        if not others or wanted in self.attributes.values():
            see = f"`hookline events --event {self.name}`"
            return f"{problem}; {nearest(name, self.argument_names, see)}"
        called = wanted if wanted in ARGUMENTS else others[0].arguments_of([wanted])[0]
        renamed = f", as {called!r}" if called != name else ""
        more = f" and {len(others) - MOST_LISTED} others" if len(others) > MOST_LISTED else ""
        listed = ", ".join(event.name for event in others[:MOST_LISTED])
        return f"{problem}; available in {listed}{more}{renamed}"

    @property
    def argument_names(self) -> list[str]:
        """Everything a hook may name here, including aliases."""
        return [*self.attributes, *(alias for alias, name in ARGUMENT_ALIASES.items() if name in self.attributes)]


_rows: dict[str, Event] = {}


def event(names: str, *, order: str = "", **fields: Any) -> Callable[[Method], Method]:
    """Return a decorator that makes a method a row of the catalog.

    Args:
        names: The event's arguments; ``loss=live_loss`` reads one from another attribute.
        order: The positional order when it is fired manually.
        **fields: Other fields of `Event`.
    """

    def add(method: Method) -> Method:
        pairs = [item.partition("=") for item in ("trainer " + names).split()]
        attributes = {name: source or name for name, _, source in pairs}
        doc = (method.__doc__ or "").strip()
        row = Event(method.__name__, doc, attributes, tuple(order.split()), **fields)
        _rows[method.__name__] = row
        lines = [f"    {name}: {ARGUMENTS[ARGUMENT_ALIASES.get(name, name)].meaning}" for name in row.argument_names]
        method.__doc__ = "\n".join([doc, "", f"Fires: {row.fires}. A hook may name these arguments:", "", *lines])
        return method

    return add


inner_event, step_event = partial(event, inner=True), partial(event, inner=True, of_step=True)
RUN = "model optimizer device config step epoch tokens_seen state"
BATCH = "model optimizer device config step epoch tokens_seen state batch batch_idx dataloader_idx dataloader_name"
PARTIAL = "include this micro-batch's share; may be partial, scaled, local to the rank"


class Events:
    """Every event of a run, in the order of a run. Override what you need, with the arguments you need.

    The signatures are open on purpose: a hook names what it wants and gets exactly that.
    """

    @event(RUN + " resumed", order="state", fires="once")
    def on_train_start(self, *args: Any, **kwargs: Any) -> None:
        """Everything is set up, nothing has run."""

    on_train_begin = on_train_start

    @event(RUN, order="epoch state", fires="every epoch", needs="knows_batches")
    def on_epoch_start(self, *args: Any, **kwargs: Any) -> None:
        """An epoch begins; not repeated for an epoch entered half-way after a resume."""

    on_epoch_begin = on_epoch_start

    @inner_event(
        BATCH,
        order="trainer batch batch_idx dataloader_idx dataloader_name",
        fires="every micro-batch",
        gradients="those of the window so far; none at its first micro-batch",
        needs="knows_batches",
    )
    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """A micro-batch is on the device, before its forward pass."""

    on_batch_start = on_batch_begin = on_train_batch_start

    @inner_event(
        "name module inputs kwargs output live_output seconds memory step epoch phase model",
        kind="forward",
        order="name output",
        fires="every call of a selected module",
        gradients="as at on_train_batch_start",
    )
    def on_forward(self, *args: Any, **kwargs: Any) -> Any:
        """A selected module has run; inside the model, before the loss."""

    @inner_event(
        BATCH + " loss=live_loss",
        order="trainer loss",
        fires="every micro-batch",
        gradients="as at on_train_batch_start",
        needs="knows_loss",
    )
    def on_before_backward(self, *args: Any, **kwargs: Any) -> None:
        """The loss is available as a live tensor, before division for accumulation and before scaling."""

    @inner_event(BATCH + " loss", order="trainer", fires="every micro-batch", gradients=PARTIAL, needs="knows_loss")
    def on_after_backward(self, *args: Any, **kwargs: Any) -> None:
        """The backward pass is done."""

    @step_event(
        BATCH + " grads loss",
        order="trainer grads",
        fires="every optimizer step",
        gradients="complete, unscaled, reduced over ranks; before the update chain",
        needs="has_unscaled_gradients",
    )
    def on_gradients_ready(self, *args: Any, **kwargs: Any) -> None:
        """The window is complete; update hooks and clipping come next."""

    @step_event(
        "grads state=own_state step epoch model",
        kind="update",
        order="grads state",
        fires="every optimizer step that is not skipped",
        gradients="complete, unscaled, reduced; as the update hooks before this one left them",
        needs="has_unscaled_gradients",
    )
    def on_update(self, *args: Any, **kwargs: Any) -> Any:
        """An update hook's turn in the chain: return the gradients for the optimizer."""

    @step_event(
        BATCH + " grad_norm=clipped_norm",
        order="trainer grad_norm",
        fires="after each update hook that clips",
        gradients="clipped; grad_norm is the norm before it",
        needs="has_unscaled_gradients",
    )
    def on_gradient_clip(self, *args: Any, **kwargs: Any) -> None:
        """An update hook that clips has run."""

    @step_event(
        BATCH + " grads grad_norm loss optimizer_idx lr=optimizer_lr",
        order="trainer optimizer_idx",
        fires="every optimizer step, once per optimizer",
        gradients="final: what the optimizer uses",
    )
    def on_before_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer steps next."""

    on_pre_optimizer_step = on_before_optimizer_step

    @step_event(
        BATCH + " grads grad_norm loss optimizer_idx lr=optimizer_lr",
        order="trainer optimizer_idx",
        fires="every optimizer step, once per optimizer",
        gradients="still there, as the optimizer used them",
    )
    def on_after_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer has stepped; the scheduler and zero_grad come next."""

    @step_event(
        BATCH + " loss optimizer_idx reason",
        order="trainer optimizer_idx",
        fires="instead of on_after_optimizer_step when AMP or a guard skipped the step",
        gradients="still there, unused",
        needs="can_skip_steps",
    )
    def on_step_skipped(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer was not stepped: the gradients were not finite, or a hook skipped the step."""

    @inner_event(
        BATCH + " loss metrics output=model_output target",
        order="batch loss state",
        fires="every micro-batch",
        gradients="cleared if a step was made, otherwise those of the window so far",
        needs="knows_batches",
    )
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """A micro-batch is done, including its optimizer step."""

    on_batch_end = on_train_batch_end

    @step_event(
        BATCH + " ctx loss=window_loss grad_norm lr",
        order="ctx",
        fires="every optimizer step, made or skipped",
        gradients="cleared; ctx.grad_norm still has their norm",
    )
    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """A step is done and its metrics are recorded; validation and checkpoints come after it."""

    @event(RUN, order="trainer epoch", fires="every validation", needs="can_validate")
    def on_validation_start(self, *args: Any, **kwargs: Any) -> None:
        """Validation begins: the model is in eval mode, gradients are off."""

    on_eval_start = on_eval_begin = on_validation_start

    @event(
        BATCH,
        order="trainer batch batch_idx dataloader_idx dataloader_name",
        fires="every validation batch",
        needs="knows_validation_batches",
    )
    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """A validation batch is on the device."""

    @event(
        BATCH + " loss metrics output=model_output target",
        order="trainer batch batch_idx dataloader_idx dataloader_name metrics",
        fires="every validation batch",
        needs="knows_validation_batches",
    )
    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """A validation batch is done."""

    @event(
        RUN + " metrics=val_metrics",
        order="trainer epoch metrics",
        fires="every validation",
        respelled={"on_eval_end": {"metrics": "eval_metrics"}},
        needs="can_validate",
    )
    def on_validation_end(self, *args: Any, **kwargs: Any) -> None:
        """Validation is done: 'val/…' keys, or 'eval/…' for a method spelled on_eval_end."""

    on_eval_end = on_validation_end

    @event(RUN + " metrics=epoch_metrics", order="epoch state", fires="every epoch", needs="knows_batches")
    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        """An epoch is done, including its validation; its checkpoint comes after."""

    @event(RUN + " checkpoint_path path", order="trainer checkpoint_path", fires="every checkpoint", needs="can_save")
    def on_checkpoint_save(self, *args: Any, **kwargs: Any) -> None:
        """A checkpoint is durable on disk."""

    @event(RUN + " checkpoint_path path", order="trainer checkpoint_path", fires="every load", needs="can_save")
    def on_checkpoint_load(self, *args: Any, **kwargs: Any) -> None:
        """A checkpoint has been loaded, including hook state."""

    @event(RUN + " exception", order="trainer exception", fires="when the run fails", gradients="unknown", closing=True)
    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        """Something ended the run. Every hook is called, whatever the others do."""

    @event(RUN + " reason", order="state", fires="once, always, last", gradients="unknown", closing=True)
    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """The run is over: a normal end, a stop, a signal or an error."""

    on_training_end = on_train_end


CATALOG: dict[str, Event] = {}
for _name, _row in _rows.items():
    _spellings = [spelling for spelling, method in vars(Events).items() if method is vars(Events)[_name]]
    CATALOG[_name] = replace(_row, aliases=tuple(spelling for spelling in _spellings if spelling != _name))
SPELLINGS: dict[str, Event] = {spelling: row for row in CATALOG.values() for spelling in (row.name, *row.aliases)}


def find_event(spelling: str) -> Event:
    """Return the row for any spelling, with or without 'on_'.

    Raises:
        RegistrationError: If there is none; the message suggests the nearest name.
    """
    row = SPELLINGS.get(spelling) or SPELLINGS.get(f"on_{spelling}")
    if row is None:
        raise RegistrationError(f"{spelling!r} is not an event; {nearest(spelling, SPELLINGS, '`hookline events`')}")
    return row

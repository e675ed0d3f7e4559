"""What torch looks at before each run of a graph of a whole model, to see whether it fits.

By itself it looks into the hook dictionaries of every module, and at the torch hooks there: with 75 watched modules
that takes twice as long as everything else it looks at. A graph that was made of one model fits no other. So for such a
graph it looks instead whether the modules are the same, and at one text that says which torch hooks of ours they have.

Torch gathers what it will look at while it traces. It is given another collection there, which leaves out what is about
hook dictionaries when torch reads it. A module with a torch hook of somebody else's is looked at as ever.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._guards import Guard, GuardsSet, Source, TracingContext

BEHIND = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
OTHERS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks")
DICTIONARIES = frozenset((*BEHIND, *OTHERS))
CALL_OF_THE_CLASS = ("__mro__", "_compiled_call_impl")  # None, for ever; at a module without hooks nobody looks there


def edition_of(model: torch.nn.Module | None) -> str:
    """A text for the torch hooks behind the modules of a model; the same again when they are."""
    modules = () if model is None else model.modules()
    return str(hash(tuple(map(_tells, modules))))


def look_at_edition(model: torch.nn.Module) -> bool:
    """Have the graph that is being traced tied to the modules of a model; False if it is not made of that model.

    It must also have looked at a text that changes whenever `edition_of` does.
    """
    if not all(map(_has_only_ours, model.modules())):
        return False
    try:
        if not _is_traced(model):
            return False
        gathered = TracingContext.get().guards_context
        without = WithoutHooks(gathered.dynamo_guards.inner)
        list(without)
    except (AttributeError, ImportError, TypeError):  # a torch that is made otherwise: let it look as ever
        return False
    gathered.dynamo_guards = without
    return True


class WithoutHooks(GuardsSet):
    """Of what torch looks at, all but hook dictionaries; in their place, which modules they are of."""

    def __iter__(self) -> Iterator[Guard]:
        from torch._dynamo.guards import GuardBuilder

        modules: dict[Source, None] = {}
        for guard in self.inner:
            source = guard.originating_source
            module = _module_of_hooks(source)
            if module is not None:
                modules[module] = None
            elif not all(part in source.name for part in CALL_OF_THE_CLASS):
                yield guard
        for module in modules:
            yield module.make_guard(GuardBuilder.ID_MATCH)


def _module_of_hooks(source: Source | None) -> Source | None:
    """The module, of those below the traced one, that something was read from a hook dictionary of; None if none."""
    while source is not None:
        base: Source | None = getattr(source, "base", None)
        if getattr(source, "member", None) in DICTIONARIES:
            return base if base is not None and base.name.startswith("L['self']") else None
        source = base
    return None


def _is_traced(model: torch.nn.Module) -> bool:
    """Whether the code that is being traced is the model's own."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output.local_scope.get("self") is model


def _tells(module: torch.nn.Module) -> tuple[object, ...]:
    """What the torch hooks of ours behind a module tell of themselves; None stands for one that is not ours."""
    return tuple([getattr(hook, "tells", None) for hook in module._forward_hooks.values()])


def _has_only_ours(module: torch.nn.Module) -> bool:
    return None not in _tells(module) and not any(getattr(module, name) for name in OTHERS)

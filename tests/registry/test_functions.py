"""Functions of gradients that a config names."""

from typing import Any

from hookline.registry.functions import FunctionHook, is_update_function
from hookline.registry.registry import HookRegistry


def double(grads: Any, step: int, factor: float = 2.0) -> Any:
    """Multiplies."""
    return {name: grad * factor for name, grad in grads.items()}


def test_it_goes_by_its_functions_name_and_takes_parameters() -> None:
    """What the event has comes from the run, the rest from the config."""
    registry = HookRegistry()
    registry.register(FunctionHook(double, {"factor": 3.0}))
    entry = registry.entry("double")
    assert entry.kinds == ["update"] and entry.listeners["on_update"].wanted == ("grads", "step")
    assert entry.hook.on_update({"a": 1}, step=1) == {"a": 3.0}


def test_attributes_of_the_function_count_as_those_of_a_class() -> None:
    """So a function can select parameters, too."""

    def picky(grads: Any) -> Any:
        return grads

    picky.params, picky.on_error = "*.weight", "raise"  # type: ignore[attr-defined]
    hook = FunctionHook(picky, {})
    assert hook.params == "*.weight" and hook.on_error == "raise"
    assert FunctionHook(double, {}).params is None


def test_only_functions_of_gradients_are_hooks_themselves() -> None:
    """A factory makes one, a class is one."""

    def factory(scale: float) -> Any:
        return scale

    class Link:
        def __init__(self, grads: Any) -> None: ...

    assert is_update_function(double) and not is_update_function(factory) and not is_update_function(Link)

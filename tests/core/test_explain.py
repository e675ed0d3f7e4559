"""What can be read about hooks: who hears an event and why, and who is calling."""

from typing import Any

from hookline.core.base import TrainingHook
from hookline.core.registry import HookRegistry


def test_explain_shows_the_order_the_reasons_and_the_source() -> None:
    """What will happen at an event can be read."""
    registry = HookRegistry()
    registry.register(lambda loss: None, "a", event="batch_end", every=10)
    registry.register(lambda step: None, "b", event="batch_end", enabled=False)
    shown = registry.explain("batch_end", source=True)
    assert "1. a (every 10 steps): user hook, registered as number 1; names loss" in shown
    assert "2. b [disabled]" in shown and "def on_train_batch_end(m):" in shown and "call0(loss)" in shown
    assert "nobody hears it" in registry.explain("on_exception")


class Asks(TrainingHook):
    """Asks, from some calls below, who it is."""

    def __init__(self, registry: HookRegistry) -> None:
        self.registry = registry
        self.answer: Any = None

    def on_step_end(self) -> None:
        self.answer = (lambda: self.registry.calling_hook())()


def test_a_caller_is_found_on_the_stack() -> None:
    """A method's hook and a function's are named; where no hook is on the stack, nobody is."""
    registry = HookRegistry()
    answers: list[Any] = []
    hook = Asks(registry)
    registry.register(hook, "object")
    registry.on("step_end", name="function")(lambda: answers.append(registry.calling_hook()))
    assert registry.calling_hook() is None
    registry.on_step_end()
    assert (hook.answer, answers) == ("object", ["function"])

"""Arguments by name: signatures are read once, and what an event does not have is rejected."""

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hookline import HookRegistry, HookRunner, Identity
from hookline.errors import RegistrationError


class Everything:
    """Event arguments whose values are their names."""

    def __getattr__(self, name: str) -> str:
        return name


def listen(call: Callable[..., Any], event: str = "on_train_batch_end") -> HookRegistry:
    """Register a function at an event."""
    registry = HookRegistry()
    registry.register(call, "Owner", event=event)
    return registry


def called(call: Callable[..., Any], event: str = "on_train_batch_end", **values: Any) -> Any:
    """Fire an event with these arguments and return what the function returned; reading another argument fails."""
    returned: list[Any] = []

    @functools.wraps(call)
    def hook(*args: Any, **kwargs: Any) -> None:
        returned.append(call(*args, **kwargs))

    registry = listen(hook, event)
    registry.failures.debug = True
    slot = "on_validation_end" if event == "on_eval_end" else event
    getattr(registry.slots, slot)(SimpleNamespace(**values) if values else Everything())
    (only,) = returned
    return only


def test_names_may_come_in_any_order_and_number() -> None:
    """A hook gets exactly what it named, in the order of its own signature."""

    def hook(batch_idx, loss, state):
        return batch_idx, loss, state

    assert called(hook, batch_idx=3, loss=0.5, state={}) == (3, 0.5, {})
    assert called(lambda: "nothing") == "nothing"


def test_arguments_that_no_hook_names_are_never_read() -> None:
    """Event arguments without `loss` are enough for a hook that does not name it."""
    assert called(lambda step: step, step=7) == 7


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("metrics", "available in on_train_batch_end, on_validation_batch_end, on_validation_end, on_epoch_end$"),
        ("val_metrics", "available in on_validation_end, as 'metrics'$"),
        ("exception", "available in on_exception$"),
        ("live_output", "available in on_forward$"),
    ],
)
def test_an_argument_of_other_events_is_rejected_with_their_names(name: str, remedy: str) -> None:
    """What is valid elsewhere is not misspelt: the message says where it is valid."""
    message = rf"on_step_end has no argument '{name}'; {remedy}"
    with pytest.raises(RegistrationError, match=message):
        listen(eval(f"lambda {name}: None"), "on_step_end")
    with pytest.raises(TypeError, match=message):
        HookRunner([Identity()]).on_step_end(**{name: 1})


def test_an_argument_of_most_events_is_rejected_with_some_of_them() -> None:
    """A long list is cut."""
    with pytest.raises(RegistrationError, match=r"; available in on_train_batch_start, .* and \d+ others$"):
        listen(lambda batch: None, "on_epoch_end")


def test_an_unknown_argument_is_rejected_with_the_nearest_name() -> None:
    """The message names the function, the event, the bad argument and the right one."""

    def report(los: float) -> None: ...

    message = r"^report \(on_train_batch_end\): on_train_batch_end has no argument 'los'; did you mean 'loss'"
    with pytest.raises(RegistrationError, match=message):
        listen(report)


def test_an_unknown_argument_with_a_default_keeps_it() -> None:
    """A parameter of the hook's own stays at its default; the later ones still arrive."""

    def hook(scale=2.0, loss=0.0, step=0):
        return scale, loss, step

    assert called(hook, loss=0.5, step=4) == (2.0, 0.5, 4)


def test_a_default_is_overridden_when_the_event_has_the_name() -> None:
    """Parameters with a default are injected where the event knows them."""
    assert called(lambda step=-1: step, step=4) == 4
    assert called(lambda exception=None: exception) is None


def test_positional_only_parameters_work_and_keep_defaults_out_of_order() -> None:
    """A positional-only parameter behind one that stays at its default cannot be passed, so it keeps its own."""

    def plain(loss, step, /):
        return loss, step

    def behind_a_default(mine=1, step=-1, /):
        return mine, step

    assert called(plain, loss=0.5, step=2) == (0.5, 2)
    assert called(behind_a_default, step=2) == (1, -1)


def test_keyword_only_parameters_come_by_keyword() -> None:
    """`*, loss` is a name like any other."""

    def hook(*, loss, mine=3):
        return loss, mine

    assert called(hook, loss=0.25) == (0.25, 3)


def test_open_keywords_get_only_what_costs_nothing() -> None:
    """**kwargs never triggers a host read and never repeats what was named."""

    def hook(step, **rest):
        return rest

    rest = called(hook)
    assert not {"loss", "metrics", "state", "grad_norm", "step"} & set(rest)
    assert {"batch_idx", "trainer", "epoch", "tokens_seen"} <= set(rest)
    assert all(name == value for name, value in rest.items())


def test_open_keywords_do_not_repeat_an_alias() -> None:
    """A hook that names loader_idx does not get dataloader_idx on top."""

    def hook(loader_idx, **rest):
        return rest

    assert "dataloader_idx" not in called(hook)


@pytest.mark.parametrize("refused", ["args", "async", "async generator", "generator", "async call", "builtin"])
def test_what_cannot_be_called_by_name_is_rejected(refused: str) -> None:
    """*args, async def, generators and callables without a signature are rejected at registration."""

    def with_args(*args):
        raise AssertionError

    async def with_await() -> None: ...

    async def with_await_and_yield() -> AsyncIterator[int]:
        yield 1

    def with_yield() -> Iterator[int]:
        yield 1

    class AsyncCall:
        async def __call__(self) -> None: ...

    calls: dict[str, Any] = {
        "args": with_args, "async": with_await, "async generator": with_await_and_yield, "generator": with_yield,
        "async call": AsyncCall(), "builtin": 3,
    }  # fmt: skip
    with pytest.raises(RegistrationError, match=r"is refused, because|signature cannot be read"):
        listen(calls[refused])


def test_a_partial_of_an_async_function_is_rejected_too() -> None:
    """Wrapping does not get a coroutine past the check."""

    async def later(loss: float) -> None: ...

    with pytest.raises(RegistrationError, match="async"):
        listen(functools.partial(later))


def test_partials_lambdas_bound_methods_and_callable_objects_are_read_alike() -> None:
    """One function reads all kinds of callables."""

    class Callable_:
        def __call__(self, loss: float) -> float:
            return loss + 1

        def method(self, loss: float) -> float:
            return loss + 2

    def scaled(factor: float, loss: float) -> float:
        return factor * loss

    def offset(loss: float, by: float) -> float:
        return loss + by

    made: list[Callable[..., Any]] = [
        functools.partial(scaled, 3.0), functools.partial(offset, by=10.0), Callable_(), Callable_().method,
    ]  # fmt: skip
    assert [called(call, loss=2.0) for call in made] == [6.0, 12.0, 3.0, 4.0]


def test_a_wrapped_function_shows_the_signature_it_wraps() -> None:
    """functools.wraps keeps the names, so decorated hooks work."""

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return "counted", function(*args, **kwargs)

        return wrapper

    @counted
    def hook(step, loss):
        return step, loss

    assert called(hook, step=1, loss=0.5) == ("counted", (1, 0.5))


def test_aliases_of_arguments_are_the_same_value() -> None:
    """loader_idx and dataloader_idx may be named by different hooks of one event."""
    assert called(lambda loader_idx: loader_idx, dataloader_idx=2) == 2
    assert called(lambda dataloader_idx: dataloader_idx, dataloader_idx=2) == 2


def test_the_spelling_of_the_method_chooses_the_metrics() -> None:
    """The same function listens to val/ or eval/ keys by the name it was registered under."""
    values = {"val_metrics": {"val/loss": 1.0}, "eval_metrics": {"eval/loss": 1.0}}
    assert called(lambda metrics: metrics, "on_validation_end", **values) == {"val/loss": 1.0}
    assert called(lambda metrics: metrics, "on_eval_end", **values) == {"eval/loss": 1.0}

"""Arguments by name: signatures are read once, and what an event does not have is refused."""

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hookline.core.base import StepContext
from hookline.core.catalog import CATALOG
from hookline.core.signature import Listener, by_hand, read_signature
from hookline.errors import RegistrationError

BATCH_END = CATALOG["on_train_batch_end"]


def listen(call: Callable[..., Any], event: str = "on_train_batch_end", spelling: str = "") -> Listener:
    """The listener of a function at an event."""
    return read_signature(call, CATALOG[event], spelling or event, "Owner")


def moment(**values: Any) -> SimpleNamespace:
    """A moment with these attributes only: reading another one fails."""
    return SimpleNamespace(**values)


def test_names_may_come_in_any_order_and_number() -> None:
    """A hook gets exactly what it named, in the order of its own signature."""

    def hook(batch_idx, loss, state):  # type: ignore[no-untyped-def]
        return batch_idx, loss, state

    assert listen(hook)(moment(batch_idx=3, loss=0.5, state={})) == (3, 0.5, {})
    assert listen(lambda: "nothing")(moment()) == "nothing"


def test_what_nobody_names_is_never_read() -> None:
    """A moment without `loss` serves a hook that does not name it."""
    assert listen(lambda step: step).wanted == ("step",)
    assert listen(lambda step: step)(moment(step=7)) == 7


def test_an_unknown_argument_is_refused_with_the_nearest_name() -> None:
    """The message names owner, event, the bad argument and the right one."""
    with pytest.raises(
        RegistrationError, match=r"Owner.*on_train_batch_end has no argument 'los'; did you mean 'loss'"
    ):
        listen(lambda los: None)


def test_an_unknown_argument_with_a_default_keeps_it() -> None:
    """A parameter of the hook's own stays at its default; the later ones still arrive."""

    def hook(scale=2.0, loss=0.0, step=0):  # type: ignore[no-untyped-def]
        return scale, loss, step

    assert listen(hook)(moment(loss=0.5, step=4)) == (2.0, 0.5, 4)


def test_a_default_is_overridden_when_the_event_has_the_name() -> None:
    """Parameters with a default are injected where the event knows them."""
    assert listen(lambda step=-1: step)(moment(step=4)) == 4
    assert listen(lambda exception=None: exception)(moment()) is None


def test_positional_only_parameters_work_and_keep_defaults_out_of_order() -> None:
    """A positional-only parameter behind one that stays at its default cannot be passed, so it keeps its own."""

    def plain(loss, step, /):  # type: ignore[no-untyped-def]
        return loss, step

    def behind_a_default(mine=1, step=-1, /):  # type: ignore[no-untyped-def]
        return mine, step

    assert listen(plain)(moment(loss=0.5, step=2)) == (0.5, 2)
    assert listen(behind_a_default)(moment(step=2)) == (1, -1)


def test_keyword_only_parameters_come_by_keyword() -> None:
    """`*, loss` is a name like any other."""

    def hook(*, loss, mine=3):  # type: ignore[no-untyped-def]
        return loss, mine

    assert listen(hook)(moment(loss=0.25)) == (0.25, 3)


def test_open_keywords_get_only_what_costs_nothing() -> None:
    """**kwargs never triggers a host read and never repeats what was named."""

    def hook(step, **rest):  # type: ignore[no-untyped-def]
        return rest

    rest = listen(hook).keywords
    assert not {"loss", "metrics", "state", "grad_norm", "step"} & set(rest)
    assert {"batch_idx", "trainer", "epoch", "tokens_seen"} <= set(rest)


def test_open_keywords_do_not_repeat_an_alias() -> None:
    """A hook that names loader_idx does not get dataloader_idx on top."""

    def hook(loader_idx, **rest):  # type: ignore[no-untyped-def]
        return rest

    assert "dataloader_idx" not in listen(hook).keywords


@pytest.mark.parametrize("refused", ["args", "async", "async generator", "generator", "async call", "builtin"])
def test_what_cannot_be_called_by_name_is_refused(refused: str) -> None:
    """*args, async def, generators and callables without a signature are refused at registration."""

    def with_args(*args):  # type: ignore[no-untyped-def]
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
    with pytest.raises(RegistrationError, match="Owner"):
        listen(calls[refused])


def test_a_partial_of_an_async_function_is_refused_too() -> None:
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

    now = moment(loss=2.0)
    made: list[Callable[..., Any]] = [
        functools.partial(scaled, 3.0), functools.partial(offset, by=10.0), Callable_(), Callable_().method,
    ]  # fmt: skip
    assert [listen(call)(now) for call in made] == [6.0, 12.0, 3.0, 4.0]


def test_a_wrapped_function_shows_the_signature_it_wraps() -> None:
    """functools.wraps keeps the names, so decorated hooks work."""

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return "counted", function(*args, **kwargs)

        return wrapper

    @counted
    def hook(step, loss):  # type: ignore[no-untyped-def]
        return step, loss

    assert listen(hook)(moment(step=1, loss=0.5)) == ("counted", (1, 0.5))


def test_aliases_of_arguments_are_the_same_value() -> None:
    """loader_idx and dataloader_idx may be named by different hooks of one event."""
    now = moment(dataloader_idx=2)
    assert listen(lambda loader_idx: loader_idx)(now) == listen(lambda dataloader_idx: dataloader_idx)(now) == 2


def test_the_spelling_of_the_method_chooses_the_metrics() -> None:
    """The same function hears val/ or eval/ keys by the name it was registered under."""
    now = moment(val_metrics={"val/loss": 1.0}, eval_metrics={"eval/loss": 1.0})
    assert listen(lambda metrics: metrics, "on_validation_end")(now) == {"val/loss": 1.0}
    assert listen(lambda metrics: metrics, "on_validation_end", "on_eval_end")(now) == {"eval/loss": 1.0}


def test_by_hand_positions_get_their_names() -> None:
    """An event fired by hand has one positional order."""
    values = by_hand(BATCH_END, BATCH_END.order, ("the batch", 0.5), {"step": 3})
    assert (values["batch"], values["loss"], values["step"]) == ("the batch", 0.5, 3)


def test_by_hand_too_many_twice_and_unknown_are_type_errors() -> None:
    """The caller's slips are told to the caller, with the right order or the nearest name."""
    with pytest.raises(TypeError, match=r"takes 3 values by position \(batch, loss, state\), got 4"):
        by_hand(BATCH_END, BATCH_END.order, (1, 2, 3, 4), {})
    with pytest.raises(TypeError, match="got 'loss' twice"):
        by_hand(BATCH_END, BATCH_END.order, (1, 2), {"loss": 2})
    with pytest.raises(TypeError, match=r"no argument 'losss'; did you mean 'loss'"):
        by_hand(BATCH_END, BATCH_END.order, (), {"losss": 2})


def test_by_hand_ctx_is_taken_apart() -> None:
    """A hook naming `loss` or `step` gets it from the ctx that the loop passed."""
    ctx = StepContext(7, 0.5, 1.5, 1e-3, 640, "model", "optimizer")  # type: ignore[arg-type]
    values = by_hand(CATALOG["on_step_end"], ("ctx",), (ctx,), {})
    assert (values["step"], values["loss"], values["grad_norm"], values["tokens_seen"]) == (7, 0.5, 1.5, 640)
    assert values["ctx"] is ctx


def test_by_hand_state_is_taken_apart_and_gives_way_to_what_was_passed() -> None:
    """state fills in what the call left out; it never overrides what the call said."""
    state = {"latest_loss": 9.0, "current_epoch": 2, "current_batch_idx": 4, "model": "m"}
    values = by_hand(BATCH_END, BATCH_END.order, ("batch", 0.5, state), {})
    assert (values["loss"], values["epoch"], values["batch_idx"], values["model"]) == (0.5, 2, 4, "m")
    assert values["metrics"] == {"loss": 0.5}


def test_by_hand_aliases_are_accepted() -> None:
    """loader_name by hand is dataloader_name."""
    row = CATALOG["on_train_batch_start"]
    assert by_hand(row, row.order, (), {"loader_name": "a"})["dataloader_name"] == "a"

"""A graph of a whole model with statistics in it is quickly seen to fit, and is not used where it does not."""

from collections.abc import Iterator
from typing import Any

import pytest
from tallies_on_cpu import COMPILING, INPUT, Model, kernels_on_the_cpu, watching, whole
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters

from hookline import HookManager
from hookline.activations import adding_up
from hookline.activations.looks import edition_of
from hookline.activations.monitor import Monitor

pytestmark = COMPILING


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU has kernels, and the compiler has seen nothing."""
    yield from kernels_on_the_cpu(monkeypatch)


def graphs() -> int:
    """How many graphs have been compiled."""
    return int(counters["stats"]["unique_graphs"])


def looks_of(model: nn.Module) -> list[str]:
    """What is looked at before each run of the only graph of a model, a line for each."""
    (entry,) = _debug_get_cache_entry_list(type(model).forward.__code__)
    return str(entry.guard_manager).splitlines()


def counts(monitor: Monitor) -> dict[str, float]:
    """How many elements each module gave."""
    return {name: values["count"] for name, values in monitor.latest().items()}


@pytest.fixture
def monitor() -> Monitor:
    """One for the inner layers and the head."""
    return Monitor(["blocks.*.up", "head"], metrics=["count"])


def test_no_hook_dictionary_is_looked_at(monitor: Monitor) -> None:
    """Instead, that each module is the same, and one text."""
    model = Model().eval()
    watching(model, monitor)
    whole(model)(INPUT)
    looks = looks_of(model)
    assert not [line for line in looks if "_forward_hooks" in line and "_global" not in line]
    assert len([line for line in looks if "_editions['statistics" in line and "EQUALS_MATCH" in line]) == 1
    same = [line for line in looks if "ID_MATCH: ___check_obj_id(L['self']._modules" in line]
    assert len(same) == 10 * 4 + 1  # every module that is called


def test_hooks_that_come_and_go_are_seen(monitor: Monitor) -> None:
    """One that comes makes a graph; when it is off and on again, the graphs that are there serve."""
    model = Model().eval()
    manager = watching(model, monitor)
    run = whole(model)
    manager.tap.run.step = 1
    run(INPUT)
    manager.register_capture_hook("blocks.3.drop", "late", max_captured_states=10)
    run(INPUT)
    assert len(manager.get_captured_states("late")) == 1 and graphs() == 2
    for _ in range(2):
        manager.disable("late")
        run(INPUT)
        manager.enable("late")
        run(INPUT)
    assert len(manager.get_captured_states("late")) == 3 and graphs() <= 3
    assert counts(monitor)["head"] == 6 * 48


def test_a_hook_of_another_manager_is_seen(monitor: Monitor) -> None:
    """Two managers may watch one model."""
    model, other = Model().eval(), HookManager()
    watching(model, monitor)
    run = whole(model)
    run(INPUT)
    other.register_capture_hook(model.head, "head")
    run(INPUT)
    assert len(other.get_captured_states("head")) == 2  # it runs twice
    other.remove("head")
    run(INPUT)
    assert graphs() == 2


def test_another_model_gets_its_own_graph(monitor: Monitor) -> None:
    """Although it shares the code, and a watched module with the first; nothing it gives is added up elsewhere."""
    model, other = Model().eval(), Model().eval()
    other.blocks[0] = model.blocks[0]
    manager = watching(model, monitor)
    run, run_other = whole(model), whole(other)
    manager.tap.run.step = 1
    run(INPUT)
    run_other(INPUT)
    run(INPUT)
    assert counts(monitor) == {"head": 96, "blocks.0.up": 3 * 48, **{f"blocks.{n}.up": 96 for n in range(1, 10)}}


def test_a_module_that_was_replaced_is_not_taken_for_the_old_one(monitor: Monitor) -> None:
    """The graph is made anew without what was on the old one."""
    model = Model().eval()
    manager = watching(model, monitor)
    run = whole(model)
    manager.tap.run.step = 1
    run(INPUT)
    model.blocks[4] = Model().blocks[4]
    run(INPUT)
    assert counts(monitor)["blocks.4.up"] == 48 and counts(monitor)["blocks.5.up"] == 96 and graphs() == 2


def test_with_torch_hooks_of_others_all_is_looked_at_as_ever(monitor: Monitor) -> None:
    """Theirs are seen to go."""
    model = Model().eval()
    watching(model, monitor)
    heard: list[Any] = []
    handle = model.blocks[2].register_forward_hook(lambda *_: None)
    run = whole(model)
    run(INPUT)
    assert [line for line in looks_of(model) if "_forward_hooks" in line and "_global" not in line]
    handle.remove()
    model.blocks[2].register_forward_hook(lambda *call: heard.append(1))
    run(INPUT)
    assert heard and graphs() == 2


def test_an_edition_is_the_same_again_when_the_hooks_are(monitor: Monitor) -> None:
    """And another one with others."""
    model = Model()
    without = edition_of(model)
    manager = watching(model, monitor)
    edition = edition_of(model)
    manager.tap.lift()
    assert edition_of(model) == without != edition
    manager.tap.put_back()
    assert edition_of(model) == edition


def test_texts_of_ledgers_that_are_gone_are_forgotten() -> None:
    """A program that makes managers all day keeps nothing of them."""
    manager = watching(Model(), Monitor("head"))
    (title,) = [wants for wants, book in adding_up._books.items() if book is manager.tap.ledger]
    adding_up.renew_editions()
    assert title in adding_up._editions
    manager.remove("hook0")
    assert title not in adding_up._editions

"""What a module that is given as it is is called: what each hook calls it, whoever was there before."""

import torch
from torch import nn

from hookline import HookManager

BATCH = torch.ones(2, 4)


def test_each_hook_calls_a_module_by_its_own_id() -> None:
    """Not by that of the hook that was the first there."""
    module, manager = nn.Linear(4, 4), HookManager()
    manager.register_debug_hook(module, "guard", conditions={"absmax": ">= 0"})
    manager.register_monitoring_hook(module, "head", metrics=["mean"])
    manager.register_monitoring_hook(module, "cost", metrics=["time"])
    manager.register_capture_hook(module, "kept")
    module(BATCH)
    assert list(manager.get("head").latest()) == ["head"] and list(manager.get("cost").latest()) == ["cost"]
    assert manager.get("guard").findings[0].module == "guard"
    assert manager.get_captured_states("kept")[0].name == "kept"
    assert {row.hook: row.module for row in manager.fire_report().rows} == {
        name: name for name in ("guard", "head", "cost", "kept")
    }


def test_a_hook_that_is_gone_leaves_no_name() -> None:
    """The next one on the module has its own."""
    module, manager = nn.Linear(4, 4), HookManager()
    for name in ("first", "second"):
        with manager.register_capture_hook(module, name):
            module(BATCH)
            assert [state.name for state in manager.get_captured_states(name)] == [name]


def test_a_watched_model_gives_the_name() -> None:
    """To all hooks on its modules."""
    model, manager = nn.Sequential(nn.Linear(4, 4)), HookManager()
    manager.register_capture_hook(model[0], "before")
    manager.watch(model)
    manager.register_capture_hook(model[0], "after")
    model(BATCH)
    assert [manager.get_captured_states(hook)[0].name for hook in ("before", "after")] == ["0", "0"]

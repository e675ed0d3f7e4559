"""One watched module: torch hooks as wanted, and nothing left behind."""

import copy
import gc
import weakref
from typing import Any

import torch
from torch import nn

from hookline.activations.hooked_modules import HookedModule
from hookline.core.dispatch import EventSlots

INPUT = torch.ones(1, 2)


def hooks_on(module: nn.Module) -> tuple[int, int, int]:
    """Torch hooks before and behind a module, and how many of these take keywords."""
    return len(module._forward_pre_hooks), len(module._forward_hooks), len(module._forward_hooks_with_kwargs)


def test_attached_measuring_and_detached() -> None:
    """Each change leaves what is wanted; asking twice is asking once."""
    module = nn.Linear(2, 2)
    site = HookedModule("it", module, EventSlots())
    for measures, expected in ((False, (0, 1, 1)), (True, (1, 1, 1)), (True, (1, 1, 1)), (False, (0, 1, 1))):
        site.attach(measures)
        assert hooks_on(module) == expected and site.attached
    site.detach()
    site.detach()
    assert hooks_on(module) == (0, 0, 0) and not site.attached


def test_torch_hooks_of_others_keep_their_places() -> None:
    """Ours has a key of its own among them."""
    module, order = nn.Linear(2, 2), []
    fire = EventSlots()
    fire.on_forward = lambda *_: order.append("ours")  # type: ignore[method-assign]
    site = HookedModule("it", module, fire)
    module.register_forward_hook(lambda *_: order.append("first"))
    site.attach(False)
    last = module.register_forward_hook(lambda *_: order.append("last"))
    module(INPUT)
    last.remove()
    site.detach()
    module(INPUT)
    assert order == ["first", "ours", "last", "first"]


def test_calls_are_counted_and_told() -> None:
    """With the module that ran; a copy of it is nobody's concern."""
    module, heard = nn.Linear(2, 2), []
    fire = EventSlots()
    site = HookedModule("it", module, fire)
    site.attach(True)
    module(INPUT)

    def on_forward(*told: Any) -> None:
        heard.append(told)

    fire.on_forward = on_forward  # type: ignore[method-assign]
    twin = copy.deepcopy(module)
    module(INPUT)
    twin(INPUT)
    assert site.calls == 2 and [told[1] for told in heard] == [module]
    assert all(told[0] is site and told[5].seconds > 0 for told in heard)


def test_a_module_is_not_kept_alive() -> None:
    """And a site without one can still be asked to attach and detach."""
    module = nn.Linear(2, 2)
    site, gone = HookedModule("it", module, EventSlots()), weakref.ref(module)
    site.attach(False)
    del module
    gc.collect()
    assert gone() is None and site.module is None
    site.attach(True)
    site.detach()


def test_a_torch_hook_that_is_taken_off_while_the_module_runs_is_silent() -> None:
    """Torch has its hooks at hand already, and asks only then whether they take keyword inputs."""
    module, heard = nn.Linear(2, 2), []
    fire = EventSlots()
    fire.on_forward = lambda *told: heard.append(told)  # type: ignore[method-assign]
    site = HookedModule("it", module, fire)
    module.register_forward_hook(lambda *_: site.detach())
    site.attach(False)
    module(INPUT)
    assert heard == [] and site.calls == 0 and not site.attached

"""What the calls of a module cost."""

import threading
import time

from torch import nn

from hookline.activations.hooked_modules import MAX_NESTED_CALLS, ModuleTimer


def test_calls_inside_each_other_are_told_apart() -> None:
    """The inner one took less."""
    meter, module = ModuleTimer(), nn.Linear(1, 1)
    meter.begin(module)
    time.sleep(0.002)
    meter.begin(module)
    inner, outer = meter.end(module), meter.end(module)
    assert inner is not None and outer is not None
    assert 0 < inner.seconds < outer.seconds and outer.seconds > 0.002 and outer.memory == -1


def test_an_end_without_a_beginning_tells_nothing() -> None:
    """The hook may have come while the module ran; another thread's beginning is none of ours."""
    meter, module = ModuleTimer(), nn.Linear(1, 1)
    thread = threading.Thread(target=meter.begin, args=(module,))
    thread.start()
    thread.join()
    assert meter.end(module) is None


def test_beginnings_that_never_ended_do_not_pile_up() -> None:
    """Calls that raised leave them."""
    meter, module = ModuleTimer(), nn.Linear(1, 1)
    for _ in range(3 * MAX_NESTED_CALLS):
        meter.begin(module)
    assert len(meter._started) <= MAX_NESTED_CALLS + 1

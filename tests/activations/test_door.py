"""Learning in time that there is a compiler."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import hookline
from hookline.activations.door import Door

INPUT = torch.ones(1, 2)

NOT_LOADED_YET = """
import sys, torch
from torch import nn
from hookline import ForwardHook, HookManager

class Watch(ForwardHook):
    modules = "1.0"
    heard = 0
    def on_forward(self):
        self.heard += 1

model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(3)))
manager, hook = HookManager(), Watch()
manager.watch(model)
manager.register(hook)
model(torch.ones(1, 2))
assert hook.heard == 1 and "torch._dynamo" not in sys.modules, "a forward hook imports no compiler"
for block in model:
    block.compile(backend="eager")
with torch.no_grad():
    model(torch.ones(1, 2))
assert hook.heard == 2, "the second of blocks that share a graph is heard"
assert not model._forward_pre_hooks, "the door is gone"
"""


def test_it_waits_at_one_model_at_a_time() -> None:
    """And nowhere when there is none."""
    opened: list[int] = []
    door, first, second = Door(lambda: opened.append(1)), nn.Linear(2, 2), nn.Linear(2, 2)
    for model, expected in ((first, (1, 0)), (first, (1, 0)), (second, (0, 1)), (None, (0, 0))):
        door.wait_at(model)
        assert (len(first._forward_pre_hooks), len(second._forward_pre_hooks)) == expected
    door.wait_at(first)
    import torch._dynamo  # noqa: F401

    first(INPUT)
    assert opened == [1]


def test_hooks_that_came_before_the_compiler_are_heard_in_compiled_code() -> None:
    """In a process of its own, where nothing has imported it."""
    environment = {**os.environ, "PYTHONPATH": str(Path(hookline.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", NOT_LOADED_YET], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr

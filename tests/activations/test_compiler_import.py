"""Learning at once that there is a compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hookline

BEGINNING = """
import sys, torch
from torch import nn
from hookline import ForwardHook, HookManager

class Watch(ForwardHook):
    def __init__(self, modules):
        self.modules, self.heard = modules, 0
    def on_forward(self):
        self.heard += 1

model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(3)))
manager = HookManager()
"""

WATCHED_MODEL = """
hook = Watch("1.0")
manager.watch(model)
manager.register(hook)
model(torch.ones(1, 2))
assert hook.heard == 1 and "torch._dynamo" not in sys.modules, "a forward hook imports no compiler"
assert not model._forward_pre_hooks and not model._forward_hooks, "nothing stands at the others"
for block in model:
    block.compile(backend="eager")
with torch.no_grad():
    model(torch.ones(1, 2))
assert hook.heard == 2, "the second of blocks that share a graph is heard"
"""

MODULES_ALONE = """
hook = Watch([model[1][0]])
manager.register(hook)
assert "torch._dynamo" not in sys.modules
for block in model:
    block.compile(backend="eager")
with torch.no_grad():
    model(torch.ones(1, 2))
assert hook.heard == 1, "also where nobody has named the model around it"
"""

ONE_GRAPH = """
hook = Watch("*")
manager.watch(model)
manager.register(hook)
from torch._dynamo.testing import CompileCounter
counter = CompileCounter()
compiled = torch.compile(model, backend=counter)
for _ in range(3):
    compiled(torch.ones(1, 2))
assert counter.frame_count == 1, counter.frame_count
assert hook.heard == 3 * 6, "three times, three blocks and what is in them"
"""

ASKED_FOR_BEFORE = """
import importlib.util
manager.watch(model)
manager.register(Watch("*"))
assert importlib.util.find_spec("torch._dynamo") is not None and "torch._dynamo" not in sys.modules
torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 2))
"""

NOT_LEFT_BEHIND = """
manager.watch(model)
manager.register(Watch("*"))
before = list(sys.meta_path)
import torch._dynamo
assert [one for one in before if one not in sys.meta_path], "somebody waited"
assert all(not type(one).__module__.startswith("hookline") for one in sys.meta_path)
assert type(torch._dynamo.__spec__.loader).__module__.startswith("_frozen"), torch._dynamo.__spec__.loader
"""

FAILURE = """
import logging
from hookline.activations.compiler_import import when_imported
class Fails:
    def sync(self):
        1 / 0
fails = Fails()
when_imported(fails.sync)
import torch._dynamo
assert torch._dynamo.reset
"""


@pytest.mark.parametrize(
    "program", [WATCHED_MODEL, MODULES_ALONE, ONE_GRAPH, ASKED_FOR_BEFORE, NOT_LEFT_BEHIND, FAILURE]
)
def test_in_a_process_where_nothing_has_imported_it(program: str) -> None:
    """Hooks that came before it are heard in compiled code, without a break; afterwards no trace is left."""
    environment = {**os.environ, "PYTHONPATH": str(Path(hookline.__file__).parents[1])}
    words = [sys.executable, "-c", BEGINNING + program]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert ("ZeroDivisionError" in done.stderr) == (program is FAILURE)

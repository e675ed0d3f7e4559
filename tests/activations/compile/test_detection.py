"""Detecting that `torch.compile` is in use, without importing it and without changing anything before."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hookline
from hookline.activations.compile import detection

BEGINNING = """
import sys, torch
from torch import nn
from hookline import ForwardHook, HookManager, SimpleTrainer

class Count(ForwardHook):
    def __init__(self, modules="*"):
        self.modules, self.calls = modules, 0
    def on_forward(self, output):
        self.calls += 1

def imported():
    light = ("hookline.activations.compile", "hookline.activations.compile.detection")
    return [name for name in sys.modules if name.startswith(light[0]) and name not in light]

model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(3)))
manager = HookManager()
"""

NOTHING_COMPILED = """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
import torch._dynamo
settings = torch._dynamo.config.save_config()
batches = [(torch.ones(4, 2), torch.ones(4, 2)) for _ in range(3)]
options = dict(loss_fn=nn.functional.mse_loss, record=False, console=False)
trainer = SimpleTrainer(model, batches, optimizer, "cpu", **options)
hook = Count()
trainer.add_hook(hook)
trainer.add_hook("monitor", modules="*")
trainer.train()
with manager.capturing(model) as cache:
    model(torch.ones(1, 2))
assert hook.calls == 3 * 6 and len(cache) == 6, (hook.calls, len(cache))
assert imported() == [], imported()
assert torch._dynamo.config.save_config() == settings, "no setting of Dynamo may change"
assert not hasattr(torch.ops.hookline, "call_hooks"), "no operator may be defined"
"""

NO_COMPILER = """
manager.watch(model)
manager.register(Count())
model(torch.ones(1, 2))
assert imported() == [] and "torch._dynamo" not in sys.modules
"""

IMPORTED_AFTER_THE_HOOK = """
hook = Count()
manager.watch(model)
manager.register(hook)
assert "torch._dynamo" not in sys.modules
from torch._dynamo.testing import CompileCounter
counter = CompileCounter()
compiled = torch.compile(model, backend=counter, fullgraph=True)
for _ in range(3):
    compiled(torch.ones(1, 2))
assert counter.frame_count == 1, counter.frame_count
assert hook.calls == 3 * 6
assert not torch._dynamo.config.skip_nnmodule_hook_guards
late = Count("1.0")
manager.register(late, "late")
compiled(torch.ones(1, 2))
assert late.calls == 1, "graphs check for hooks that are added later"
"""

IMPORTED_BEFORE_THE_HOOK = """
import torch._dynamo
hook = Count("1.0")
manager.watch(model)
manager.register(hook)
assert imported() == [] and torch._dynamo.config.skip_nnmodule_hook_guards
for block in model:
    block.compile(backend="eager")
with torch.no_grad():
    model(torch.ones(1, 2))
assert hook.calls == 1, "a hook on the second of several blocks that share a graph is called"
"""

WATCHED_AGAIN = """
hook = Count("1.0")
manager.watch(model)
manager.register(hook)
for block in model:
    block.compile(backend="eager")
manager.watch(model)
with torch.no_grad():
    model(torch.ones(1, 2))
assert hook.calls == 1, "watching again after the import of the compiler is as good as before"
"""


@pytest.mark.parametrize(
    "program",
    [NOTHING_COMPILED, NO_COMPILER, IMPORTED_AFTER_THE_HOOK, IMPORTED_BEFORE_THE_HOOK, WATCHED_AGAIN],
    ids=["nothing_compiled", "no_compiler", "imported_after", "imported_before", "watched_again"],
)
def test_in_a_new_process(program: str) -> None:
    """Nothing is imported or changed before something is compiled; then every hook is called."""
    environment = {**os.environ, "PYTHONPATH": str(Path(hookline.__file__).parents[1])}
    words = [sys.executable, "-c", BEGINNING + program]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_dispatcher_that_cannot_be_prepared_does_not_end_the_compilation(caplog: pytest.LogCaptureFixture) -> None:
    """It is reported once, and the others are prepared."""

    class Fails:
        def sync(self, compiling: bool) -> None:
            raise ImportError("torch has changed")

    class Works:
        prepared = 0

        def sync(self, compiling: bool) -> None:
            self.prepared += compiling

    fails, works = Fails(), Works()
    import torch._dynamo

    for dispatcher in (fails, works):
        detection.prepare_before_compiling(dispatcher)
    for number in range(2):
        torch.compile(lambda x, number=number: x + number, backend="eager")(torch.ones(1))
    assert works.prepared == 1 and detection.has_compiled()
    assert [record.message for record in caplog.records if record.name == "hookline"] == [
        "forward hooks may not be called in compiled code"
    ]


def test_models_run_uncompiled_in_nested_blocks() -> None:
    """The outermost block decides, and what is compiled serves again afterwards."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        return lambda *args: graphs.append(1) or graph(*args)

    compiled = torch.compile(torch.nn.Linear(2, 2), backend=backend)
    compiled(torch.ones(1, 2))
    with detection.run_uncompiled():
        with detection.run_uncompiled():
            compiled(torch.ones(1, 2))
        compiled(torch.ones(1, 2))
    assert graphs == [1]
    compiled(torch.ones(1, 2))
    assert graphs == [1, 1]

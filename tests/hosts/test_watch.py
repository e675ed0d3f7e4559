"""The watch of a process, without one: which optimizers and models it finds, and what it takes for one run."""

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.optim.optimizer import register_optimizer_step_pre_hook

import hookline
from hookline.hosts import search
from hookline.hosts.calls import BackwardWatch
from hookline.hosts.options import Options
from hookline.hosts.watch import Watch
from hookline.hosts.watched import Watched


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.fixture(autouse=True)
def former() -> list[torch.optim.Optimizer]:
    """The optimizers that earlier tests have left: the walk would find what they trained."""
    return [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever earlier tests have compiled in this process."""
    for name in ("watch", "watched"):
        monkeypatch.setattr(f"hookline.hosts.{name}.has_compiled", lambda: False)


@pytest.fixture
def watch(former: list[torch.optim.Optimizer]) -> Any:
    """Watch this process, with the hooks of an empty config."""
    Path("none.yaml").write_text("hooks: {}\n")
    watch = Watch(Options(hooks="none.yaml", output=str(Path("runs").absolute())), prints=False, owns_process=False)
    watch._former.update(former)
    watch.start()
    yield watch
    watch.end()
    watch.stop()


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 4)).pow(2).mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def test_optimizers_that_step_after_one_backward_pass_step_together(watch: Watch) -> None:
    """As Muon and AdamW do: one step for both, with one loss."""
    model = make_model()
    both = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters())]
    for _ in range(5):
        step(model, *both)
    run = watch.attached.run
    run.settle()
    assert (run.progress.steps_done, run.optimizers, run.progress.batches) == (5, both, 5)


def test_an_optimizer_made_again_takes_the_place_of_the_first(watch: Watch) -> None:
    """The run goes on with its model, and does not keep the old one."""
    model = make_model()
    for _ in range(3):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer)
    run = watch.attached.run
    run.settle()
    assert (run.progress.steps_done, run.optimizers) == (3, [optimizer])


def test_the_model_of_another_training_is_not_in_the_next_run(watch: Watch) -> None:
    """Although its optimizer is alive; its run has ended."""
    first, second = make_model(), make_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    step(first, optimizers[0])
    assert set(watch.attached.run.model.children()) == {first, second}  # they may train in turns, as those of a GAN
    third = make_model()
    step(third, torch.optim.SGD(third.parameters(), lr=0.1))
    assert first not in set(watch.attached.run.model.modules())
    assert third in set(watch.attached.run.model.modules()) and len(list(Path("runs").iterdir())) == 2


def test_each_training_of_a_search_is_a_run(watch: Watch) -> None:
    """With all of its steps and losses, however many there were before, and none of another one."""
    for steps in (25, 30, 25, 25, 30, 25):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            step(model, optimizer)
    watch.end()
    runs = sorted(Path("runs").iterdir())
    counters = [json.loads((run / "run.json").read_text())["counters"] for run in runs]
    assert [(each["step"], each["skipped_steps"]) for each in counters] == [(n, 0) for n in (25, 30, 25, 25, 30, 25)]
    assert [(run / "metrics.jsonl").read_text().count("train/loss") for run in runs] == [25, 30, 25, 25, 30, 25]


def test_short_trainings_without_number_are_a_few_runs(watch: Watch) -> None:
    """Those of an inner loop, whose losses are not those of the model that is trained around it."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(40):
        inner = make_model()
        for _ in range(2):
            step(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
        step(model, optimizer)
    watch.end()
    runs = sorted(Path("runs").iterdir())
    assert len(runs) <= 8
    assert all(json.loads((run / "run.json").read_text())["counters"]["skipped_steps"] == 0 for run in runs)


@pytest.mark.parametrize("fails", ["before_step", "after_step"])
def test_the_hooks_of_others_are_called_when_the_record_fails(
    fails: str, watch: Watch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torch goes through its hooks at that moment, and raises if one of them leaves."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    called: list[str] = []
    handles = (
        register_optimizer_step_pre_hook(lambda *_: called.append("global")),
        optimizer.register_step_pre_hook(lambda *_: called.append("pre")),
        optimizer.register_step_post_hook(lambda *_: called.append("post")),
    )

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr(watch.attached.run, fails, fail)
    try:
        step(model, optimizer)
        step(model, optimizer)
    finally:
        for handle in handles:
            handle.remove()
    assert called == ["global", "pre", "post"] * 2
    assert capsys.readouterr().err == "hookline: the record ends here: on purpose\n"


def test_the_outermost_module_is_the_model(former: Any) -> None:
    """Copies, criterions and modules without these parameters are none of it."""
    inner = make_model()
    model = nn.Sequential(inner, nn.ReLU())
    others = torch.optim.swa_utils.AveragedModel(model), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    training = search.find_training(optimizer, former)
    assert training is not None and training.model is model and others


def test_a_proxy_is_not_asked_what_it_stands_for(former: Any) -> None:
    """`isinstance` would ask it."""

    class Proxy:
        @property
        def __class__(self) -> type:
            raise AssertionError("woken")

    proxy, model = Proxy(), make_model()
    assert search.find_training(torch.optim.SGD(model.parameters(), lr=0.1), former).model is model and proxy


def test_a_model_is_looked_for_at_steps_1_2_4_8(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """An inner loop that makes optimizers without number costs a few walks."""
    walks: list[Any] = []
    monkeypatch.setattr(search, "find_training", lambda optimizer, former: walks.append(optimizer))
    for _ in range(100):
        weight = torch.ones(3, requires_grad=True)
        weight.sum().backward()
        torch.optim.SGD([weight], lr=0.1).step()
    assert len(walks) == 7  # at 1, 2, 4, 8, 16, 32 and 64


def test_the_step_of_a_wrapped_optimizer_counts_once(watch: Watch) -> None:
    """A wrapper whose own step calls that of the optimizer inside."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    model = make_model()
    wrapper = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        step(model, wrapper)
    run = watch.attached.run
    run.settle()
    assert (run.progress.steps_done, run.optimizers) == (4, [wrapper])


@pytest.mark.parametrize("mode", ["plain", "under a mode", "in a checkpoint"])
def test_a_loss_is_reported_once(mode: str) -> None:
    """Modes of torch call backward inside of itself; a checkpointed block runs one of its own."""
    losses: list[Any] = []
    stop = BackwardWatch(losses.append, lambda: losses.append("end")).start()
    model, inputs = make_model(), torch.randn(8, 4, requires_grad=True)
    try:
        if mode == "in a checkpoint":
            output = torch.utils.checkpoint.checkpoint(model, inputs, use_reentrant=True)
            loss = output.sum()
            loss.backward()
        elif mode == "under a mode":
            with torch.device("cpu"):
                loss = model(inputs).sum()
                loss.backward()
        else:
            loss = model(inputs).sum()
            torch.autograd.backward([loss])
    finally:
        stop()
    assert losses == [loss, "end"]


def test_a_loss_is_reported_again_after_a_backward_pass_that_failed() -> None:
    """A script may catch the error and try once more, and the next loss may have the same place in memory."""
    losses: list[Any] = []
    stop = BackwardWatch(losses.append, lambda: losses.append("end")).start()
    try:
        weight = torch.ones(3, requires_grad=True)
        handle = weight.register_hook(lambda grad: 1 / 0)
        loss = weight.sum()
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        loss.backward()
    finally:
        stop()
    assert losses == [loss, loss, "end"]


def test_the_loss_of_a_backward_pass_with_a_gradient_is_what_it_differentiates() -> None:
    """As in WGANs, which pass minus one, and for losses of many elements. Two threads do not disturb each other."""
    losses: list[Any] = []
    stop = BackwardWatch(losses.append, lambda: losses.append("end")).start()
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    other = weight.mul(10).sum()

    def train_elsewhere(grad: torch.Tensor) -> None:
        thread = threading.Thread(target=other.backward)
        thread.start()
        thread.join()

    try:
        weight.sum().backward(torch.tensor(-1.0))
        weight.mul(2).backward(gradient=torch.tensor([1.0, 0.5]))
        torch.autograd.backward([weight.sum()], [None])
        weight.mul(2).backward([torch.ones(2)])
        reported = list(losses)
        losses.clear()
        loss = weight.mul(1)
        loss.register_hook(train_elsewhere)
        loss.sum().backward()
    finally:
        stop()
    assert reported == [-3.0, "end", 4.0, "end", 3.0, "end", 6.0, "end"]
    assert losses == [3.0, 30.0, "end", "end"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_backward_pass_whose_tensors_have_no_shape_is_made_without_a_loss() -> None:
    """As that of strided nested tensors."""
    losses: list[Any] = []
    stop = BackwardWatch(losses.append, lambda: losses.append("end")).start()
    weight = torch.ones(2, 4, requires_grad=True)
    try:
        output = torch.nested.as_nested_tensor([weight, weight]) * 3
        output.backward(torch.ones_like(output))
    finally:
        stop()
    assert weight.grad is not None and weight.grad.eq(6).all() and losses == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_loss_of_a_backward_pass_with_a_gradient_does_not_overflow(dtype: torch.dtype) -> None:
    """A sum in half precision would be infinite, or rounded."""
    losses: list[torch.Tensor] = []
    stop = BackwardWatch(losses.append, lambda: None).start()
    try:
        weight = torch.full((90_001,), 2.0, dtype=dtype, requires_grad=True)
        weight.mul(1).backward(torch.ones_like(weight))
    finally:
        stop()
    assert losses == [180_002.0]
    assert losses[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_the_optimizers_of_a_gan_step_separately_also_with_gradients_of_their_losses(watch: Watch) -> None:
    """The generator's step is no part of the discriminator's, whose loss comes first."""
    models = make_model(), make_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.randn(8, 4)).mean().backward(torch.tensor(-1.0))
            optimizer.step()
            optimizer.zero_grad()
    watch.end()
    (run,) = Path("runs").iterdir()
    assert json.loads((run / "run.json").read_text())["counters"]["step"] == 8
    assert (run / "metrics.jsonl").read_text().count("train/loss") == 8


def test_of_several_threads_that_train_one_is_recorded(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its steps and losses only; and the training of a later thread, when that one has ended."""

    def train_in_threads(count: int, steps: int) -> None:
        turns = threading.Barrier(count)

        def train() -> None:
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(steps):
                model(torch.randn(8, 4)).pow(2).mean().backward()
                turns.wait()
                optimizer.step()
                turns.wait()
                optimizer.zero_grad()

        threads = [threading.Thread(target=train) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    train_in_threads(3, steps=30)
    train_in_threads(1, steps=5)
    watch.end()
    runs = sorted(Path("runs").iterdir())
    assert [json.loads((run / "run.json").read_text())["counters"]["step"] for run in runs] == [30, 5]
    assert [(run / "metrics.jsonl").read_text().count("train/loss") for run in runs] == [30, 5]
    assert capsys.readouterr().err == ""


def in_thread(function: Any) -> None:
    """Call a function in a thread of its own, and wait for its end; what it raises fails the test."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(function).result()


@pytest.fixture(params=["on all modules", "on each module"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward hooks are on each module if something was compiled before the run began."""
    monkeypatch.setattr("hookline.hosts.watched.has_compiled", lambda: request.param == "on each module")


@pytest.mark.usefixtures("either_way")
def test_what_another_thread_computes_meanwhile_is_not_of_the_run(watch: Watch, tmp_path: Path) -> None:
    """Its model is found with the other one, and it calls it while a step of the run is in progress."""
    seen: list[bool] = []

    class Seen(hookline.ForwardHook):
        modules = "*"

        def on_forward(self) -> None:
            seen.append(threading.current_thread() is threading.main_thread())

    watch.options = Options(output=watch.options.output)
    models = make_model(), make_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    step(models[0], optimizers[0])
    watch.attached.run.hooks.register(Seen())
    watch.attached._is_always_due = True
    for _ in range(3):
        step(models[0], optimizers[0])
        in_thread(lambda: step(models[1], optimizers[1]))
    assert seen and all(seen)
    watch.end()
    (run,) = Path("runs").iterdir()
    assert json.loads((run / "run.json").read_text())["counters"]["step"] == 4
    assert (run / "metrics.jsonl").read_text().count("train/loss") == 4


def train_in_turns(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Compute each loss in a thread of its own, and step in this one."""
    for _ in range(5):
        in_thread(lambda: step(model))
        optimizer.step()
        optimizer.zero_grad()


def train_elsewhere_after_a_bare_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As some do for the sake of a scheduler, or of the optimizer's state."""
    optimizer.step()
    in_thread(lambda: [step(model, optimizer) for _ in range(5)])


def train_here_and_then_elsewhere(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The first loss of the other thread is known before its first step."""
    for _ in range(2):
        step(model, optimizer)
    in_thread(lambda: [step(model, optimizer) for _ in range(2)])
    step(model, optimizer)


def train_here_and_then_in_turns(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Another training that began meanwhile is none of it."""
    other = make_model()
    optimizer_of_other = torch.optim.SGD(other.parameters(), lr=0.1)
    with ThreadPoolExecutor(1) as elsewhere:
        for number in range(5):
            elsewhere.submit(step, other, optimizer_of_other).result() if number else None
            in_thread(lambda: step(model)) if number > 1 else step(model)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "train",
    [
        train_in_turns,
        train_elsewhere_after_a_bare_step,
        train_here_and_then_elsewhere,
        train_here_and_then_in_turns,
    ],
)
def test_losses_are_found_in_whatever_thread_they_are_computed(train: Any, watch: Watch) -> None:
    """Each step with a loss has one, and only its own."""
    model = make_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    watch.end()
    (run,) = Path("runs").iterdir()
    assert (run / "metrics.jsonl").read_text().count("train/loss") == 5
    counters = json.loads((run / "run.json").read_text())["counters"]
    assert (counters["batches"], counters["skipped_steps"]) == (5 + (counters["step"] == 6), 0)


def test_a_backward_pass_in_which_the_run_begins_ends_once(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of an optimizer which steps inside of it."""
    ended: list[Any] = []
    end = Watched.backward_ends
    monkeypatch.setattr(Watched, "backward_ends", lambda attached: (ended.append(attached), end(attached)))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    for _ in range(3):
        step(model)
    assert len(ended) == 3


@pytest.mark.usefixtures("either_way")
def test_a_failing_forward_hook_does_not_reach_the_script(watch: Watch, capsys: pytest.CaptureFixture[str]) -> None:
    """The record ends there, which one line says."""

    class Fails(hookline.ForwardHook):
        modules = "0"
        on_error = "raise"

        def on_forward(self) -> None:
            raise ValueError("on purpose")

    watch.options = Options(output=watch.options.output)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    watch.attached.run.hooks.register(Fails())
    watch.attached._is_always_due = True
    for _ in range(3):
        step(model, optimizer)
    assert capsys.readouterr().err == "hookline: the record ends here: on purpose\n"
    assert watch.attached is None and not torch_modules._global_forward_hooks


def test_hooks_leave_no_trace_on_modules(former: Any) -> None:
    """A model is pickled, copied, scripted and traced in a run as before it; a hook is called while it is due."""
    model = make_model()
    watch = Watch(Options(output=str(Path("runs").absolute())), prints=False, owns_process=False)
    watch._former.update(former)
    watch.start()
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(1, 13):
            step(model, optimizer)
            assert bool(torch_modules._global_forward_hooks) == (number in (1, 2, 9, 10))
            assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
            torch.jit.script(model)
            traced = torch.jit.trace(model, torch.ones(1, 4), check_trace=False)
            assert torch.equal(traced(torch.ones(1, 4)), model(torch.ones(1, 4)))
    finally:
        watch.end()
        watch.stop()
    (run,) = Path("runs").iterdir()
    rows = map(json.loads, (run / "layers.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if "step" in row] == [2, 2, 10, 10]
    assert not torch_modules._has_any_global_hook()


class Events:
    """The events of an IPython shell."""

    def __init__(self) -> None:
        self.callbacks: list[Any] = []

    def register(self, event: str, callback: Any) -> None:
        assert event == "post_run_cell"
        self.callbacks.append(callback)

    def unregister(self, event: str, callback: Any) -> None:
        self.callbacks.remove(callback)


def test_the_cell_after_a_failed_record_is_a_run(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the record of the cell ends."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    monkeypatch.setattr(watch.attached.run, "after_step", lambda _: 1 / 0)
    step(model, optimizer)
    step(model, optimizer)
    watch.end_cell(None)
    step(model, optimizer)
    watch.end_cell(None)
    outcomes = [json.loads((run / "run.json").read_text())["outcome"] for run in sorted(Path("runs").iterdir())]
    assert outcomes == ["failed", "completed"]


def test_each_cell_of_a_notebook_that_trains_is_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Its report's path is printed; a cell that fails is a failed run, and after unloading nothing is watched."""
    shell = SimpleNamespace(events=Events())
    hookline.load_ipython_extension(shell)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for error in (None, ValueError("cell"), None):
        step(model, optimizer)
        step(model, optimizer)
        for callback in shell.events.callbacks:
            callback(SimpleNamespace(error_before_exec=None, error_in_exec=error))
    hookline.unload_ipython_extension(shell)
    step(model, optimizer)
    outcomes = [json.loads((run / "run.json").read_text())["outcome"] for run in sorted(Path("runs").iterdir())]
    assert outcomes == ["completed", "failed", "completed"] and shell.events.callbacks == []
    assert capsys.readouterr().out.count("report.html") == 3

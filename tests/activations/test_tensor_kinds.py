"""Every kind of tensor that torch has is captured and measured, or passed over with one word that names it."""

import json
import subprocess
import sys
from typing import Any

import pytest
import safetensors.torch
import tensor_kinds
import torch
from builders import make_trainer
from tensor_kinds import KINDS, RISKY, Returns, observed, secret
from torch import nn
from watched_models import watch

from hookline import ForwardHook, GradientMonitor, HookManager, read_layers
from hookline.activations.capture import Capture
from hookline.activations.monitor import Monitor
from hookline.gradients.gradient_flow import GradientFlowHook, gradient_flow

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.mark.parametrize("name", [name for name in KINDS if name not in RISKY])
def test_a_kind_is_captured_and_measured_or_named(name: str) -> None:
    """By captures, monitors and debug hooks; no kind switches a hook off."""
    tensor_kinds.check(name)


@pytest.mark.parametrize("name", RISKY)
def test_a_kind_whose_copy_could_end_the_process(name: str) -> None:
    """The same in a process of its own."""
    done = subprocess.run([sys.executable, tensor_kinds.__file__, name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


TRANSFORMS: dict[str, Any] = {
    "vmap": torch.func.vmap,
    "grad": lambda model: torch.func.grad(lambda batch: model(batch).sum()),
    "jvp": lambda model: lambda batch: torch.func.jvp(model, (batch,), (batch,)),
    "vmap of grad": lambda model: torch.func.vmap(torch.func.grad(lambda batch: model(batch).sum())),
    "functionalize": torch.func.functionalize,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_tensors_of_torch_func_are_captured_and_measured(transform: str) -> None:
    """As the whole batch; a monitor reads them when the transform is done, and in-place modules do not spoil that."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Tanh()), torch.randn(3, 2)
    expected = model(batch)
    manager = watch(model)
    manager.register_capture_hook("*", "states", capture_input=False)
    manager.register_monitoring_hook("*", "numbers", metrics=["mean", "count"])
    manager.register_debug_hook("*", "debug", inspect=True)
    for _ in range(4):
        TRANSFORMS[transform](model)(batch)
    last = manager.get_captured_states("states")[-1]
    torch.testing.assert_close(last.outputs, expected.detach())
    assert manager.entry("numbers").hook.latest()["2"]["mean"] == pytest.approx(expected.mean().item())
    assert all(entry.enabled and entry.failures.total == 0 for entry in manager.entries())


def test_debug_checks_activations_inside_a_gradient() -> None:
    """On the CPU the statistics of a tensor that `torch.func.grad` tracks can be read at once."""
    model, manager = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), HookManager()
    manager.watch(model)
    hook = manager.register_debug_hook("1", "it", conditions="absmax >= 0")
    torch.func.grad(lambda batch: model(batch).sum())(torch.ones(1, 2))
    found = manager.entry("it").hook.findings
    assert hook and [finding.statistics["absmax"] for finding in found] == [model(torch.ones(1, 2)).max().item()]


def test_debug_names_what_it_cannot_read_inside_a_gradient(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device, kernels cannot read the memory of a tensor that `torch.func.grad` tracks."""

    def refuse(tensors: Any) -> torch.Tensor:
        raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")

    monkeypatch.setattr("hookline.activations.debug.LocalTensors.summarize", refuse)
    model, manager = nn.Sequential(nn.Linear(2, 2)), HookManager()
    manager.watch(model)
    manager.register_debug_hook("*", "it")
    for _ in range(2):
        torch.func.grad(lambda batch: model(batch).sum())(torch.ones(1, 2))
    assert [record.getMessage() for record in caplog.records] == [
        "hook 'it', on_forward, step 0: skips functional tensors of '0'"
    ]


class Seen(ForwardHook):
    """Keeps every output."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_forward(self, output: Any) -> None:
        """Keep one."""
        self.outputs.append(output)


def test_a_users_hook_gets_none_for_a_tensor_that_cannot_be_copied(caplog: pytest.LogCaptureFixture) -> None:
    """The model runs on; the rest of the structure arrives."""
    model, manager, hook = nn.ModuleDict({"odd": Returns((secret(), torch.ones(2)))}), HookManager(), Seen()
    manager.watch(model)
    manager.register(hook, "it", on_error="raise")
    for _ in range(2):
        model["odd"]()
    assert [(secret, ones.tolist()) for secret, ones in hook.outputs] == [(None, [1.0, 1.0])] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "hook 'it', on_forward, step 0: skips Secret tensors of 'odd'"
    ]


@pytest.mark.parametrize("name", ["sparse_csr", "nested", "mkldnn"])
def test_a_tensor_that_cannot_be_converted_is_passed_over(name: str) -> None:
    """A reduction that torch has not for its kind costs this module's states, and no other's."""
    manager, reports = observed(KINDS[name].make(), "register_capture_hook", reduce=lambda tensor: tensor.cumsum(0))
    assert [state.outputs is None for state in manager.get_captured_states("it")] == [True, False] * 4
    assert reports == [f"hook 'it', on_forward, step 0: skips {KINDS[name].word} tensors of 'odd'"]


def test_a_mean_over_the_batch_keeps_imaginary_parts() -> None:
    """As of real numbers, in single precision."""
    for dtype in (torch.complex32, torch.complex64, torch.complex128):
        value = torch.tensor([[1 + 2j], [3 - 6j]], dtype=dtype)
        manager, _ = observed(value, "register_capture_hook", reduce="batch_mean")
        found = manager.get_captured_states("it")[0].outputs
        assert found.dtype is torch.complex64 and found.item() == 2 - 2j


def test_a_dtype_that_has_no_mean_is_passed_over() -> None:
    """Of float4, torch converts nothing."""
    manager, reports = observed(KINDS["float4"].make(), "register_capture_hook", reduce="batch_mean")
    assert manager.get_captured_states("it")[0].outputs is None
    assert reports == ["hook 'it', on_forward, step 0: skips float4_e2m1fn_x2 tensors of 'odd'"]


def test_a_structure_is_measured_by_its_first_measurable_tensor() -> None:
    """A sparse tensor before it does not matter."""
    manager, reports = observed((KINDS["sparse_coo"].make(), torch.full((2,), 3.0)), "register_monitoring_hook")
    assert manager.entry("it").hook.latest()["odd"]["mean"] == 3.0 and reports == []


class Sparse(nn.Module):
    """A linear layer between two others whose output is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.odd, self.last = nn.Linear(2, 2), ToSparse(), nn.Linear(2, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.odd(self.first(batch)).to_dense())


class ToSparse(nn.Module):
    """Makes its input sparse."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.to_sparse()


def test_a_run_measures_the_other_modules_and_names_the_one_it_passes_over() -> None:
    """One event of the record names hook, module and kind; the series has the other modules in every step."""
    data = [(torch.ones(2, 2), torch.ones(2, 1))] * 6
    trainer = make_trainer(Monitor(gradients=True), model=Sparse(), data=data, record=True)
    trainer.train()
    assert trainer.hooks.entry("monitor").failures.total == 0
    events = [json.loads(line) for line in (trainer.run_dir / "events.jsonl").read_text().splitlines()]
    assert [(event["hook"], event["message"]) for event in events if event["kind"] == "hook_passed_over"] == [
        ("monitor", "skips sparse_coo tensors of 'odd'")
    ]
    series = read_layers(trainer.run_dir)["activations"]
    assert series.names == ("first", "last") and series.steps == tuple(range(1, 7))
    assert not series.values.isnan().any()


def test_what_a_file_cannot_hold_is_left_out_of_it(caplog: pytest.LogCaptureFixture) -> None:
    """The states of the other modules are saved when the run ends."""
    data = [(torch.ones(2, 2), torch.ones(2, 1))]
    trainer = make_trainer(Capture(save=True), model=Sparse(), data=data, record=True)
    trainer.train()
    saved = safetensors.torch.load_file(trainer.run_dir / "captures" / "capture.safetensors")
    assert set(saved) == {"first/1/outputs/0", "last/1/outputs/0"}
    assert "cannot save sparse_coo tensors of 'odd'" in caplog.text


class Complex(nn.Module):
    """An embedding with a sparse gradient, and a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 2, sparse=True)
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.words(batch) * self.phase).abs().sum()


def norm_of(gradient: torch.Tensor | None) -> float:
    """Compute a norm as for a dense gradient."""
    assert gradient is not None
    return gradient.to_dense().abs().square().sum().sqrt().item()


def test_gradients_of_every_kind_have_norms() -> None:
    """Sparse, compressed sparse and complex gradients are measured with what they leave out, as dense ones are."""
    model = Complex()
    model.table = nn.Parameter(torch.eye(2).to_sparse_csr())
    model(torch.tensor([1, 1, 3])).backward()
    model.table.grad = (2 * torch.eye(2)).to_sparse_csr()
    assert model.words.weight.grad is not None and model.words.weight.grad.layout is torch.sparse_coo
    expected = {name: norm_of(param.grad) for name, param in model.named_parameters()}
    assert {row.name: row.norm for row in gradient_flow(model).rows} == pytest.approx(expected)


def test_a_run_with_sparse_and_complex_gradients_keeps_every_hook_on() -> None:
    """The gradient hooks measure them, and clipping is that of torch."""
    torch.manual_seed(0)
    model, data = Complex(), [torch.tensor([1, 1, 3])] * 3
    monitor = GradientMonitor(log_frequency=1, log_histogram=True, percentiles=[50])
    flow = GradientFlowHook()
    trainer = make_trainer(monitor, flow, model=model, data=data, loss_fn=None, max_grad_norm=0.5)
    trainer.train()
    assert all(entry.enabled and entry.failures.total == 0 for entry in trainer.hooks.entries())
    assert monitor.latest is not None and flow.latest is not None
    assert (
        [row.name for row in monitor.latest.rows] == [row.name for row in flow.latest.rows] == ["phase", "words.weight"]
    )

"""Captured states: what they return, the limits of their store, and their files."""

import gc
import logging
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_trainer
from safetensors import safe_open
from tensor_kinds import Returns
from torch import Tensor, nn

from hookline import HooklineError, HookManager, Trainer

BATCH = torch.arange(2 * 64 * 8.0).reshape(2, 64, 8)
BATCHES = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(5)]


def make_model() -> nn.Sequential:
    """Two modules, the second without parameters."""
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def captured_by(manager: HookManager, hook: str) -> list[int]:
    """The numbers of the calls of which a hook has states."""
    return [state.call for state in manager.get_captured_states(hook)]


def test_a_state_knows_where_it_comes_from() -> None:
    """Hook, module, layer index, call, step, phase and thread."""
    module, manager = nn.Identity(), HookManager()
    manager.register_capture_hook(module, "a", layer_idx=3)
    manager.dispatcher.run.step = 7
    module(torch.ones(2))
    (made,) = manager.get_captured_states("a")
    assert (made.hook, made.name, made.layer_idx, made.call, made.step) == ("a", "a", 3, 1, 7)
    assert made.phase == "inference" and made.thread == threading.current_thread().name
    assert repr(made) == "<CapturedState of 'a' by 'a': call 1, step 7, inference>"


def test_two_states_that_share_a_tensor_do_not_share_writes() -> None:
    """A reader gets views, the same ones each time; a write into them does not reach the other state."""
    module, manager, shared = nn.Identity(), HookManager(), torch.zeros(3)
    manager.register_capture_hook(module, "outputs", capture_input=False)
    manager.register_capture_hook(module, "inputs", capture_output=False)
    module(shared)
    (first,), (second,) = (manager.get_captured_states(name) for name in ("outputs", "inputs"))
    first.outputs.add_(1)
    assert first.outputs.sum() == 3 and second.inputs[0].sum() == 0 and shared.sum() == 0
    assert first.outputs is first.outputs
    assert first.main is first.outputs and second.main is second.inputs


@pytest.mark.req("003-35")
@pytest.mark.parametrize("limit", [1, None])
def test_bytes_are_counted_by_unique_storage_and_stay_exact(limit: int | None) -> None:
    """Views and shared tensors count once, a reader's write changes nothing, and clearing releases all."""
    big, other = torch.zeros(100), torch.zeros(50)
    module, manager = Returns(big), HookManager(memory_limit_mb=limit)
    manager.register_capture_hook(module, "a")
    manager.register_capture_hook(module, "b", capture_input=False)
    module(big[:10], other)
    assert manager.captures.bytes == 600
    manager.get_captured_states("a")[0].outputs.add_(1)
    manager.clear_captured_states("a")
    assert manager.captures.bytes == 400 and len(manager.captures) == 1
    manager.clear_captured_states()
    assert manager.captures.bytes == 0 and len(manager.captures) == 0


@pytest.mark.req("003-30", "003-32")
def test_the_oldest_go_first() -> None:
    """Per hook by number, over all hooks by bytes; a state that exceeds the limit is not kept."""
    manager = HookManager(max_captured_states=2, memory_limit_mb=1000 / 2**20)
    modules = {name: nn.Identity() for name in "abc"}
    for name, module in modules.items():
        manager.register_capture_hook(module, name, capture_input=False)
    kept = [modules["a"](torch.zeros(50)) for _ in range(3)]
    assert captured_by(manager, "a") == [2, 3] and manager.captures.dropped == 1
    kept.append(modules["b"](torch.zeros(200)))
    assert captured_by(manager, "a") == [3] and captured_by(manager, "b") == [1]
    kept.append(modules["c"](torch.zeros(1000)))
    assert len(manager.captures) == 0 and manager.captures.bytes == 0 and manager.captures.dropped == 5


def test_a_limit_of_no_states_keeps_none() -> None:
    """And counts no bytes."""
    module, manager = nn.Identity(), HookManager(max_captured_states=0, memory_limit_mb=1)
    manager.register_capture_hook(module, "a")
    module(torch.zeros(10))
    assert len(manager.captures) == 0 and manager.captures.bytes == 0


@pytest.mark.req("003-06")
def test_states_of_deleted_modules_are_dropped() -> None:
    """When a module has been called often enough; those of other modules stay."""
    manager = HookManager(cleanup_interval=2)
    for name in ("gone", "there"):
        module = nn.Identity()
        manager.register_capture_hook(module, name, capture_input=False)
        module(torch.ones(1))
    assert captured_by(manager, "gone") == [] and captured_by(manager, "there") == [1]
    assert manager.captures.dropped == 1


def test_a_slice_counts_only_its_own_bytes() -> None:
    """Fifty last tokens fit where fifty whole outputs would not: the rest of each output is released."""
    model, size = make_model(), 2 * 8 * 4
    manager = HookManager(memory_limit_mb=50 * size / 2**20)
    manager.register_capture_hook(model[1], "last", capture_input=False, reduce="last_token")
    outputs = [model(BATCH + number) for number in range(50)]
    states = manager.get_captured_states("last")
    assert len(states) == 50 and manager.captures.bytes == 50 * size
    assert all(torch.equal(state.outputs, output[:, -1]) for state, output in zip(states, outputs, strict=True))


@pytest.mark.parametrize(
    "reduce", ["first", "last_token", lambda tensor: tensor[..., :2]], ids=["first", "last token", "function"]
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("more", [{}, {"clone": True}, {"device": "cpu"}, {"dtype": "float32"}], ids=str)
def test_a_slice_is_copied(
    reduce: str | Callable[[Tensor], Tensor], mode: Callable[[], Any], more: dict[str, Any]
) -> None:
    """In every grad mode and with every other option."""
    model, manager = make_model(), HookManager()
    manager.register_capture_hook(model[0], "part", reduce=reduce, **more)
    with mode():
        model(BATCH)
    (state,) = manager.get_captured_states("part")
    for tensor in state.tensors():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes > 0


def test_reading_waits_for_copies_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not capturing; also for a module without parameters, whose device only its tensors tell."""
    waits: list[Tensor] = []

    class PendingCopy:
        def __init__(self, tensor: Tensor) -> None:
            self.host = tensor.clone()

        def wait(self) -> Tensor:
            waits.append(self.host)
            return self.host

    monkeypatch.setattr("hookline.activations.capture.HostCopy", PendingCopy)
    module, manager = nn.ReLU(), HookManager()
    manager.register_capture_hook(module, "relu", device="cpu")
    module(BATCH)
    (state,) = manager.get_captured_states("relu")
    assert waits == []
    assert torch.equal(state.outputs, BATCH.relu()) and len(waits) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_capture_is_correct_while_the_device_is_busy() -> None:
    """Reading it waits for the copy."""
    module, manager = nn.ReLU(), HookManager()
    manager.register_capture_hook(module, "relu", device="cpu", capture_input=False)
    batch = torch.ones(1000, 1000, device="cuda")
    torch.cuda._sleep(100_000_000)
    module(batch)
    (state,) = manager.get_captured_states("relu")
    assert state.outputs.eq(1).all()


def test_a_cache_keeps_no_model() -> None:
    """It can be read after its model is deleted, but not run."""
    model, manager = make_model(), HookManager()
    with manager.capturing(model, "*") as cache:
        expected = model(BATCH)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert torch.equal(cache["1"], expected)
    with pytest.raises(HooklineError, match="no longer exists"):
        cache.run(BATCH)


def test_a_state_that_exceeds_the_limit_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """An empty list would look like a hook that never fired."""
    model, manager = make_model(), HookManager(memory_limit_mb=2**-9)
    manager.register_capture_hook(model[1], "all")
    with caplog.at_level(logging.WARNING, "hookline"):
        model(BATCH)
        model(BATCH)
    assert manager.get_captured_states("all") == [] and manager.captures.dropped == 2
    (record,) = caplog.records
    assert "'all' keeps no captures of 'all'" in record.message and "memory_limit_mb is 0.00195" in record.message


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("max_captured_states", -1),
        ("max_captured_states", 2.5),
        ("memory_limit_mb", -0.5),
        ("memory_limit_mb", "512"),
        ("max_age_seconds", -1),
    ],
)
def test_invalid_limits_are_rejected(option: str, given: Any) -> None:
    """When the manager is made."""
    with pytest.raises(HooklineError, match=f"{option}: expected .* at least 0, got {given!r}"):
        HookManager(**{option: given})


@pytest.mark.parametrize("given", [None, 0, -1, 1.5, True, "4"])
def test_invalid_cleanup_intervals_are_rejected(given: Any) -> None:
    """None is not valid here."""
    with pytest.raises(HooklineError, match=f"cleanup_interval: expected an integer of at least 1, got {given!r}"):
        HookManager(cleanup_interval=given)


def test_options_of_a_capture_are_checked_when_it_is_registered() -> None:
    """Not at the first forward pass."""
    model, manager = make_model(), HookManager()
    with pytest.raises(HooklineError, match="max_captured_states: expected an integer of at least 0, got -1"):
        manager.register_capture_hook(model, "a", max_captured_states=-1)
    with pytest.raises(HooklineError, match="device: unknown device 'cudda'"):
        manager.register_capture_hook(model, "a", device="cudda")


@pytest.mark.parametrize("make", [Tensor.to_sparse, lambda tensor: tensor.to(torch.complex128)])
def test_a_tensor_that_cannot_be_saved_is_named(make: Callable[[Tensor], Tensor], tmp_path: Any) -> None:
    """With its module, its call and the remedy."""

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return make(x)

    model = nn.Sequential(Odd())
    with HookManager().capturing(model, "0") as cache:
        model(BATCH)
    with pytest.raises(HooklineError, match=r"cannot hold 0/1/outputs/0 .*reduce="):
        cache.save(tmp_path / "odd.safetensors")


def trained(hooks: dict[str, Any], **options: Any) -> Trainer:
    """One epoch."""
    trainer = make_trainer(
        model=nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), data=BATCHES, hooks=hooks, **{"record": True, **options}
    )
    trainer.train()
    return trainer


def keys_of(path: Path) -> tuple[list[str], dict[str, str]]:
    """The keys and the metadata of a file."""
    with safe_open(path, "pt") as file:
        return sorted(file.keys()), file.metadata()


def test_save_writes_the_kept_states_at_the_end() -> None:
    """The newest states, with module, call and step; other captures write nothing."""
    entry = {"name": "capture", "modules": "1", "max_captured_states": 2, "dtype": "bfloat16"}
    trainer = trained({"forward": [{**entry, "save": True}, {**entry, "as": "other"}]})
    assert [path.name for path in (trainer.run_dir / "captures").iterdir()] == ["capture.safetensors"]
    keys, about = keys_of(trainer.run_dir / "captures" / "capture.safetensors")
    assert keys == ["1/4/outputs/0", "1/5/outputs/0"]
    assert about["1/5/outputs/0"].startswith("step=5 phase=train")


def test_a_hook_name_cannot_leave_the_directory() -> None:
    """Other characters become underscores."""
    trainer = trained({"forward": [{"name": "capture", "as": "../../away", "modules": "0", "save": True}]})
    assert [path.name for path in (trainer.run_dir / "captures").iterdir()] == ["_away.safetensors"]


def test_a_run_that_fails_saves_too() -> None:
    """The file has what was captured until the failure."""
    hooks = {"forward": [{"name": "capture", "save": True}]}
    model = nn.Sequential(nn.Linear(3, 4))
    trainer = make_trainer(model=model, data=BATCHES, hooks=hooks, loss_fn=lambda output, target: 1 / 0, record=True)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert keys_of(trainer.run_dir / "captures" / "capture.safetensors")[0] == ["0/1/outputs/0"]


def test_without_a_directory_save_warns(caplog: pytest.LogCaptureFixture) -> None:
    """There is no file to write."""
    trained({"forward": [{"name": "capture", "save": True}]}, record=False)
    assert "cannot save its captures" in caplog.text


@pytest.mark.parametrize("metrics", ["mean", [], ()])
def test_metrics_are_a_list(metrics: Any) -> None:
    """A string would be read letter by letter, and an empty list requests nothing."""
    with pytest.raises(HooklineError, match="metrics: expected a list with some of"):
        HookManager().register_monitoring_hook(nn.Linear(1, 1), "m", metrics=metrics)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One clear error; the old file is unchanged and no temporary file is left."""
    model = nn.Sequential(nn.Linear(3, 4))
    manager = HookManager()
    with manager.capturing(model) as cache:
        model(torch.randn(2, 3))
    path = cache.save(tmp_path / "captures.safetensors")
    before = path.read_bytes()
    monkeypatch.setattr(Path, "replace", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(HooklineError, match=r"cannot write .*captures.safetensors: No space left on device; free"):
        cache.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]

"""Attention maps: recorded without changing what the model computes, and nothing is left on it."""

import contextlib
import logging
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

import pytest
import torch
from builders import make_trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookline import HooklineError, HookManager, TrainingHook
from hookline.activations.attention import AttentionCost
from hookline.demo.char_gpt import CharGPT


class ByHand(nn.Module):
    """Attention as textbooks write it, with its parts in modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.softmax = nn.Linear(8, 24), nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        made: Tensor = self.softmax(query @ key.mT / 2) @ value
        return made.transpose(1, 2).flatten(2)


def tokens() -> Tensor:
    """A batch of three texts of eight characters."""
    return torch.randint(0, 20, (3, 8), generator=torch.Generator().manual_seed(1))


def make_gpt(dropout: float = 0.0) -> CharGPT:
    """Two layers of two heads."""
    torch.manual_seed(0)
    return CharGPT(20, context=8, width=8, layers=2, heads=2, dropout=dropout)


def hooks_on(model: nn.Module) -> int:
    """How many torch hooks a model carries."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def gradients(model: nn.Module) -> list[Tensor]:
    """Every parameter's gradient."""
    return [param.grad for param in model.parameters() if param.grad is not None]


@pytest.mark.req("003-01", "000-13")
def test_training_inside_the_block_is_bit_for_bit_the_same() -> None:
    """Loss, gradients and random streams with dropout on; the maps are there for every layer."""
    ways: list[Any] = []
    for watched in (False, True):
        model = make_gpt(dropout=0.3)
        torch.manual_seed(5)
        if watched:
            with HookManager().attention_maps(model) as maps:
                loss = model(tokens(), tokens())["loss"]
                loss.backward()
        else:
            loss = model(tokens(), tokens())["loss"]
            loss.backward()
        ways.append((loss.item(), gradients(model), torch.get_rng_state()))
    (loss, plain, state), (seen_loss, seen, seen_state) = ways
    assert loss == seen_loss and all(map(torch.equal, plain, seen)) and torch.equal(state, seen_state)
    assert sorted(maps["*"]) == ["blocks.0.attention", "blocks.1.attention"]
    assert maps["blocks.1.attention"].shape == (3, 2, 8, 8)


def test_maps_are_what_the_model_attends_with() -> None:
    """Rows are causal and sum to one, and applied to the values they give the attention's output."""
    model = make_gpt()
    manager = HookManager()
    inner, outer = manager.capturing(model, "*.qkv"), manager.capturing(model, "*.project", what="input")
    with manager.attention_maps(model) as maps, inner as projected, outer as mixed:
        model(tokens())
    weights = maps["blocks.0.attention"]
    value = projected["blocks.0.attention.qkv"].unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)[2]
    torch.testing.assert_close((weights @ value).transpose(1, 2).flatten(2), mixed["blocks.0.attention.project"][0])
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 2, 8))
    assert (weights.triu(1) == 0).all() and not weights.requires_grad


def encoder_layer() -> nn.Module:
    """torch's own layer, which requests no attention weights and has a fused path in eval mode."""
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [encoder_layer, ByHand], ids=["MultiheadAttention", "softmax"])
def test_multihead_attention_and_a_softmax_are_recorded(make: Callable[[], nn.Module], training: bool) -> None:
    """`nn.MultiheadAttention` and attention by hand: same bits, the map under the module that attended."""
    model, x = make().train(training), torch.randn(2, 5, 8)
    torch.manual_seed(3)
    plain = model(x)
    torch.manual_seed(3)
    with HookManager().attention_maps(model) as maps:
        seen = model(x)
    assert torch.equal(plain, seen)
    (name,) = maps["*"]
    assert name == ("self_attn" if make is encoder_layer else "softmax")
    assert maps[name].shape == (2, 2, 5, 5)


def test_torchs_fused_encoder_path_is_off_inside_the_block() -> None:
    """In eval mode without grad torch's encoder skips its modules; inside the block it calls them."""
    model = nn.TransformerEncoder(encoder_layer(), 2).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        plain = model(x)
        with HookManager().attention_maps(model) as maps:
            torch.testing.assert_close(model(x), plain)
        assert sorted(maps["*"]) == ["layers.0.self_attn", "layers.1.self_attn"]
        assert torch.equal(model(x), plain)


def test_a_model_that_is_an_attention_is_named_by_its_class() -> None:
    """The root of a model has no name."""
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 3, 8)
    plain, averaged = attention(x, x, x)
    with HookManager().attention_maps(attention) as maps:
        seen, weights = attention(x, x, x)
    assert torch.equal(plain, seen) and torch.equal(averaged, weights)
    assert torch.equal(maps["MultiheadAttention"].mean(1), averaged)


def test_hooks_and_modes_are_removed_after_an_error() -> None:
    """No torch hook and no mode is left, and nothing more is recorded."""

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError("broken")

    model = make_gpt()
    model.norm = Broken()
    manager = HookManager()
    with pytest.raises(ArithmeticError), manager.attention_maps(model) as maps:
        model(tokens())
    assert len(maps) == 2 and hooks_on(model) == 0 and len(manager) == 0
    assert torch._C._len_torch_function_stack() == 0
    seen = len(maps)
    with pytest.raises(ArithmeticError):
        model(tokens())
    assert len(maps) == seen


def test_an_early_stop_does_not_shift_names() -> None:
    """Modules that a stopped pass left open are forgotten."""
    model, manager = make_gpt(), HookManager()
    with manager.attention_maps(model) as maps:
        with manager.capturing(model, "blocks.0.mlp.widen", early_stop=True) as cache:
            cache.run(tokens())
        model(tokens())
    assert [state.name for state in maps.states][-2:] == ["blocks.0.attention", "blocks.1.attention"]


class Stop(BaseException):
    """Not an exception after which torch calls a module's last hook."""


class Stops(nn.Module):
    """Attends, then raises."""

    def forward(self, x: Tensor) -> Tensor:
        x.softmax(-1)
        raise Stop


class Catches(nn.Module):
    """Continues without the module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Stops())

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(Stop):
            self.inner(x)
        return x


class Attends(nn.Module):
    """Runs a module, then attends itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).softmax(-1)


def test_a_base_exception_in_nested_modules_does_not_shift_names() -> None:
    """The module around the one that catches it is named, now and in the next pass."""
    model = nn.Sequential(Attends(Catches()))
    with HookManager().attention_maps(model) as maps:
        for _ in range(2):
            model(torch.ones(1, 1, 2, 2))
    assert [state.name for state in maps.states] == ["0.inner.inner.0", "0"] * 2


def test_modules_are_selected_by_pattern_or_class() -> None:
    """A pattern that matches nothing is an error with the nearest name."""
    model, manager = make_gpt(), HookManager()
    with manager.attention_maps(model, "blocks.1.*") as maps:
        model(tokens())
    assert sorted(maps["*"]) == ["blocks.1.attention"]
    with manager.attention_maps(model, type(model.blocks[0].attention)) as maps:
        model(tokens())
    assert len(maps) == 2
    with pytest.raises(HooklineError, match=r"did you mean 'blocks.1.attention'"):
        manager.attention_maps(model, "blocks.1.atention").__enter__()
    with (
        manager.attention_maps(model, "blocks.1") as maps,
        pytest.raises(HooklineError, match=r"unknown attention point"),
    ):
        maps.points["blocks.0"]
    assert hooks_on(model) == 0


def test_options_of_capture_apply_to_maps() -> None:
    """Reduce, convert and bound them; write them to a file."""
    model = make_gpt()
    entropy: Callable[[Tensor], Tensor] = lambda weights: torch.special.entr(weights).sum(-1)  # noqa: E731
    options: dict[str, Any] = {"reduce": entropy, "dtype": "float16", "max_captured_states": 3}
    with HookManager().attention_maps(model, **options) as maps:
        for _ in range(2):
            model(tokens())
    assert [state.name for state in maps.states] == ["blocks.1.attention", "blocks.0.attention", "blocks.1.attention"]
    assert maps["blocks.0.attention"].shape == (3, 2, 8) and maps["blocks.0.attention"].dtype is torch.float16
    assert (maps["blocks.0.attention"][..., 0] == 0).all()  # the first character sees only itself
    assert maps.save("maps.safetensors").stat().st_size > 0


@pytest.mark.req("003-02")
def test_any_forward_hook_can_watch_attention() -> None:
    """The weights pass through modules that hooks select by pattern or directly."""
    model, manager = make_gpt(), HookManager()
    with manager.attention_maps(model) as maps:
        manager.watch(maps.points)
        manager.register_monitoring_hook("blocks.*.attention", "watch", metrics=["max", "min"])
        manager.register_debug_hook(
            maps.points["blocks.1.attention"], "stare", {"max": ">= 1"}, break_at_terminal=False
        )
        with manager.capturing(maps.points, "blocks.0.*") as cache:
            model(tokens())
    assert torch.equal(cache["blocks.0.attention"], maps["blocks.0.attention"])
    assert manager.get("watch").latest()["blocks.1.attention"] == {"max": 1.0, "min": 0.0}
    assert [finding.module for finding in manager.get("stare").findings] == ["blocks.1.attention"]


def test_the_cost_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Maps, bytes and seconds, on the object and in one log line."""
    model, began = make_gpt(), perf_counter()
    with caplog.at_level(logging.INFO, "hookline"), HookManager().attention_maps(model) as maps:
        model(tokens())
    assert (maps.cost.maps, maps.cost.bytes) == (2, 2 * 3 * 2 * 8 * 8 * 4)
    assert 0 < maps.cost.seconds < perf_counter() - began
    assert caplog.messages == [f"attention maps of CharGPT: {maps.cost}"]
    assert str(maps.cost) == f"2 maps, 3,072 bytes, {maps.cost.seconds:.3f} s"


def test_a_model_without_attention_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Only if it ran."""
    with HookManager().attention_maps(make_gpt(), "blocks.*.mlp"):
        pass
    assert caplog.messages == []
    with HookManager().attention_maps(nn.Linear(2, 2)) as maps:
        maps.run(torch.ones(1, 2))
    assert len(maps) == 0
    (message,) = caplog.messages
    assert message.startswith("Linear computed no attention in the selected modules; Hookline supports scaled_dot")


def test_failing_weights_do_not_fail_the_model(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning per module, and an unchanged output."""

    def fails(*_: Any) -> None:
        raise MemoryError("too large")

    monkeypatch.setattr(torch, "matmul", fails)  # the model does not call it
    model = make_gpt()
    plain = model(tokens())["logits"]
    with HookManager().attention_maps(model, "blocks.1.*") as maps:
        for _ in range(2):
            assert torch.equal(model(tokens())["logits"], plain)
    assert caplog.messages[0] == "no attention map of 'blocks.1.attention': MemoryError: too large"
    assert caplog.messages[1].startswith("CharGPT computed no attention") and len(caplog.messages) == 2
    assert (maps.cost.maps, maps.cost.bytes) == (0, 0)


def test_recomputed_passes_are_recorded_once() -> None:
    """Activation checkpointing runs a block again inside backward."""
    model = make_gpt()
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    with HookManager().attention_maps(model) as maps:
        model(tokens(), tokens())["loss"].backward()
    assert maps.cost.maps == len(maps) == 2 and len(gradients(model)) > 0


def test_other_threads_are_not_recorded() -> None:
    """A block records only its own thread, with the right names while another thread runs the same model."""
    model, stop = make_gpt(), threading.Event()

    def keep_running() -> None:
        while not stop.is_set():
            model(tokens())

    other = threading.Thread(target=keep_running)
    other.start()
    try:
        with HookManager().attention_maps(model) as maps:
            for _ in range(20):
                model(tokens())
    finally:
        stop.set()
        other.join()
    assert [state.name for state in maps.states] == ["blocks.0.attention", "blocks.1.attention"] * 20


def test_compiled_code_runs_eagerly_inside_the_block() -> None:
    """No compiled graph runs inside the block; after it the same graphs run again."""
    model, made, ran = make_gpt(), [], []

    def backend(graph: Any, _: Any) -> Any:
        made.append(graph)

        def run(*inputs: Any) -> Any:
            ran.append(graph)
            return graph.forward(*inputs)

        return run

    compiled = torch.compile(model, backend=backend)
    plain = compiled(tokens())["logits"]
    graphs_made = len(made)
    for given in (compiled, model):
        graphs = len(ran)
        with HookManager().attention_maps(given) as maps:
            torch.testing.assert_close(compiled(tokens())["logits"], plain)
        assert len(maps) == 2 and len(ran) == graphs
        compiled(tokens())
        assert len(ran) > graphs
    assert len(made) == graphs_made


@pytest.mark.req("004-28")
def test_maps_from_validation() -> None:
    """A hook records attention when a validation ends, without disturbing the run."""

    class Look(TrainingHook):
        def on_validation_end(self, trainer: Any) -> None:
            with trainer.inference() as model, trainer.hooks.attention_maps(model, "blocks.0.*") as maps:
                model(tokens())
            self.maps = maps["blocks.0.attention"]

    losses = []
    for hook in (None, Look()):
        model = make_gpt(dropout=0.2)
        batches = [{"input_ids": tokens(), "labels": tokens()}] * 4
        hooks = [hook] if hook else []
        trainer = make_trainer(
            *hooks, model=model, data=batches, loss_fn=None, validate_every=2, val_dataloader=batches[:1]
        )
        torch.manual_seed(2)
        losses.append(trainer.train()["latest_loss"])
    assert losses[0] == losses[1] and isinstance(hook, Look) and hook.maps.shape == (3, 2, 8, 8)


def test_cost_on_an_accelerator_is_timed_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair of events is read once, and only when the seconds are read."""
    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("wait")

        def elapsed_time(self, last: "Event") -> float:
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    cost = AttentionCost()
    with cost.timing(torch.device("cuda")):
        calls.append("work")
    assert calls == ["record", "work", "record"]
    assert cost.seconds == cost.seconds == 0.25
    assert calls == ["record", "work", "record", "wait"]

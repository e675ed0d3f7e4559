"""Test chains in real runs: the optimizer's steps, every kind of gradient, and resuming from a checkpoint."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_batches, make_model, make_trainer
from torch import nn

from hookline import (
    ForwardHook,
    HooklineError,
    Trainer,
    TrainingHook,
    UpdateHook,
    register_hook,
)
from hookline.cli import main
from hookline.core import plugins
from hookline.errors import GradientError

Grads = Mapping[str, torch.Tensor]


def trained(*entries: Any, optimizer: str = "SGD", data: Any = None, **options: Any) -> Trainer:
    """Train a small model with these hooks for one epoch of six steps, unless data is given."""
    model, hooks = make_model(), {"update": list(entries)} if entries else None
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    trainer = make_trainer(model=model, optimizer=made, data=data or make_batches(6), hooks=hooks, **options)
    trainer.train()
    return trainer


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [param.detach().clone() for param in trainer.model.parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.req("000-21", "000-39")
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_identity_changes_no_bit_of_a_run(optimizer: str) -> None:
    """The run equals the one without hooks, also beside a disabled hook."""
    bare = trained(optimizer=optimizer)
    assert same(weights(bare), weights(trained("identity", optimizer=optimizer)))
    disabled = {"name": "scale", "factor": 9.0, "enabled": False}
    assert same(weights(bare), weights(trained("identity", disabled, optimizer=optimizer)))


@pytest.mark.req("000-23", "000-24", "000-25")
def test_doubling_doubles_the_step_of_sgd() -> None:
    """From zero weights, one step with factor two goes twice as far, bit for bit."""
    ends = []
    for entries in ([], [{"name": "scale", "factor": 2.0}]):
        model = nn.Linear(3, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        make_trainer(model=model, data=make_batches(1), hooks={"update": entries}).train()
        ends.append([param.detach() for param in model.parameters()])
    assert all(single.any() and torch.equal(double, 2 * single) for single, double in zip(*ends, strict=True))


@pytest.mark.req("000-25")
def test_a_hook_that_zeroes_moves_nothing_under_sgd() -> None:
    """After six steps the weights are the initial ones, bit for bit."""
    assert same(weights(trained({"name": "mask", "params": "*"})), list(make_model().parameters()))


@pytest.mark.req("000-27")
def test_equal_micro_batches_are_one_big_batch() -> None:
    """The chain runs once per window, on the window's mean."""
    big = make_batches(3, size=12)
    small = [(x[i : i + 4], y[i : i + 4]) for x, y in big for i in (0, 4, 8)]
    entries = ["centralize", {"name": "clip_norm", "max_norm": 0.5}]
    whole, many = trained(*entries, data=big), trained(*entries, data=small, accumulate=3)
    assert whole.step == many.step == 3
    for a, b in zip(weights(whole), weights(many), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_clipping_may_be_anywhere_and_max_grad_norm_is_last() -> None:
    """Clipping before and after a factor differ; max_grad_norm clips at the end."""
    clip, scale = {"name": "clip_norm", "max_norm": 0.1}, {"name": "scale", "factor": 3.0}
    first, last = weights(trained(clip, scale)), weights(trained(scale, clip))
    assert not same(first, last)
    assert same(last, weights(trained(scale, max_grad_norm=0.1)))


def test_the_chain_of_the_documentation() -> None:
    """A chain from a config writes its measurements to the record under their names."""
    entries = [
        {"name": "centralize"},
        {"name": "scale", "params": "0.*", "factor": 0.1},
        {"name": "measure", "as": "before_clip"},
        {"name": "clip_norm", "max_norm": 0.05},
        {"name": "measure", "as": "after_clip", "metrics": ["norm", "absmax"]},
        {"name": "link_norms", "every": 2},
    ]
    trainer = trained(*entries)
    rows = [row for row in trainer.record.metrics if "gradients/after_clip/norm" in row]
    assert [row["step"] for row in rows] == list(range(1, 7))
    for row in rows:
        assert row["gradients/before_clip/norm"] == pytest.approx(row["train/grad_norm"], rel=1e-6)
        assert row["gradients/after_clip/norm"] == pytest.approx(min(0.05, row["train/grad_norm"]), rel=1e-4)
        assert row["gradients/after_clip/absmax"] <= row["gradients/after_clip/norm"]
    reporting = [row["step"] for row in rows if "update/clip_norm/norm_after" in row]
    assert reporting == [2, 4, 6]


# ---- functions -------------------------------------------------------------------------------------------------------


def test_a_function_is_an_update_hook() -> None:
    """It may be registered with `on` and with `register`, and gets the arguments it names."""
    seen: list[tuple[int, str]] = []
    trainer = make_trainer(data=make_batches(2))

    @trainer.on("update", every=2)
    def nothing_moves(grads: Grads, step: int, model: nn.Module) -> dict[str, torch.Tensor]:
        seen.append((step, type(model).__name__))
        return {name: torch.zeros_like(grad) for name, grad in grads.items()}

    trainer.hooks.register(lambda grads: {name: grad * 1 for name, grad in grads.items()}, "same", event="on_update")
    trainer.train()
    assert seen == [(2, "Sequential")]
    assert {trainer.hooks.entry(name).kinds[0] for name in ("nothing_moves", "same")} == {"update"}


@pytest.fixture
def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink gradients; a registered function with a parameter."""
    monkeypatch.setattr(plugins.HOOKS, "_added", dict(plugins.HOOKS._added))

    @register_hook("shrink")
    def shrink(grads: Grads, step: int, factor: float = 0.5) -> dict[str, torch.Tensor]:
        return {name: grad * factor for name, grad in grads.items()}


@pytest.mark.usefixtures("shrink")
def test_a_config_may_name_a_function_and_give_its_parameters() -> None:
    """Arguments that the event does not have are parameters: the function's defaults or the config's values."""
    assert same(weights(trained("shrink")), weights(trained({"name": "scale", "factor": 0.5})))
    twice = [{"name": "shrink", "factor": 0.25}, {"name": "shrink", "as": "again", "factor": 2.0}]
    assert same(weights(trained(*twice)), weights(trained({"name": "scale", "factor": 0.5})))


@pytest.mark.usefixtures("shrink")
@pytest.mark.parametrize(
    ("given", "incidents"),
    [
        ({"facter": 0.25}, r"shrink has no parameter 'facter'; did you mean 'factor'\?"),
        ({"factor": "half"}, r"shrink.factor: expected float, got 'half' \(str\)"),
        ({"step": 3}, "shrink has no parameter 'step'"),
    ],
)
def test_an_invalid_parameter_of_a_function_raises(given: dict[str, Any], incidents: str) -> None:
    """The error is that of a class; the event's arguments are not parameters."""
    with pytest.raises(HooklineError, match=incidents):
        trained({"name": "shrink", **given})


# ---- kinds of gradients ----------------------------------------------------------------------------------------------

EVERY_HOOK: list[dict[str, Any]] = [
    {"name": "clip_norm", "max_norm": 0.5},
    {"name": "clip_value", "max_value": 0.01},
    {"name": "clip_adaptive"},
    {"name": "scale", "factor": 0.5},
    {"name": "mask", "params": "*"},
    {"name": "noise", "eta": 0.01},
    {"name": "centralize"},
    {"name": "normalize"},
    {"name": "normalize", "by": "parameter"},
    {"name": "sign"},
    {"name": "grokfast"},
    {"name": "skip_nonfinite"},
    {"name": "spike_guard", "warmup": 2},
    {"name": "spike_guard", "warmup": 2, "action": "clip"},
    {"name": "measure", "metrics": ["norm", "absmax"]},
]
BY_NAME = {"ids": [f"{hook['name']}{hook.get('by', '')}{hook.get('action', '')}" for hook in EVERY_HOOK]}
NOT_SPARSE = {"clip_adaptive", "noise", "centralize", "grokfast"}


@pytest.mark.parametrize("hook", EVERY_HOOK, **BY_NAME)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_hook_under_autocast_and_scaling(hook: dict[str, Any], precision: str) -> None:
    """With the GradScaler, too, hooks see unscaled gradients; overflowed steps are skipped without calling them."""
    trainer = trained({"name": "measure", "as": "first"}, hook, precision=precision, data=make_batches(3))
    assert all(param.isfinite().all() for param in trainer.model.parameters())
    logged = [row["gradients/first/norm"] for row in trainer.record.metrics if "gradients/first/norm" in row]
    finite = [norm for norm in logged if math.isfinite(norm)]
    assert logged == finite and len(logged) + trainer.skipped_steps == 3 and logged
    assert max(finite) < 50  # scaled by 65536 they would be thousands


def test_a_bf16_model_is_clipped_as_torch_clips_it() -> None:
    """The parameters of every step equal those of a loop with clip_grad_norm_, bit for bit."""
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 1).bfloat16(), nn.Linear(3, 1).bfloat16()
    twin.load_state_dict(model.state_dict())
    data = [(x.bfloat16(), y.bfloat16()) for x, y in make_batches(6)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    make_trainer(model=model, data=data, optimizer=optimizer, max_grad_norm=0.3).train()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01)
    for x, y in data:
        nn.functional.mse_loss(twin(x), y).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.weight, twin.weight) and torch.equal(model.bias, twin.bias)


class Words(nn.Module):
    """An embedding whose gradient is sparse, and a dense head."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 3, sparse=sparse)
        self.head = nn.Linear(3, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(tokens).mean(1))


def trained_on_words(hook: Any, sparse: bool) -> Trainer:
    torch.manual_seed(0)
    data = [(torch.tensor([[1, 1, 4], [2, 1, 0]]), torch.ones(2, 1))] * 4
    trainer = make_trainer(model=Words(sparse), data=data, hooks={"update": [hook]})
    trainer.train()
    return trainer


@pytest.mark.parametrize("hook", EVERY_HOOK, **BY_NAME)
def test_sparse_gradients_are_handled_or_raise(hook: dict[str, Any]) -> None:
    """Hooks that keep zeros give the dense run; the others name the parameter and say that it can be left out."""
    if hook["name"] in NOT_SPARSE:
        message = f"{hook['name']}: the gradient of 'words.weight' is sparse_coo; leave it out"
        with pytest.raises(GradientError, match=message):
            trained_on_words(hook, sparse=True)
        trained_on_words({**hook, "params": "head.*"}, sparse=True)
        return
    sparse, dense = trained_on_words(hook, sparse=True), trained_on_words(hook, sparse=False)
    for a, b in zip(weights(sparse), weights(dense), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


NOT_COMPLEX = {"clip_adaptive", "noise", "centralize", "grokfast"}


@pytest.mark.parametrize("hook", EVERY_HOOK, **BY_NAME)
def test_complex_gradients_are_handled_or_raise(rig: Any, hook: dict[str, Any]) -> None:
    """Complex gradients are handled as pairs of real numbers; hooks that need rows raise."""

    def ends(as_pairs: bool) -> torch.Tensor:
        weight = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
        param = nn.Parameter(weight if as_pairs else torch.view_as_complex(weight))
        chain = rig({"wave": param}, hook)
        for seed in range(4):
            pairs = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(seed))
            after = chain.step({"wave": pairs if as_pairs else torch.view_as_complex(pairs)})["wave"]
        return after if as_pairs else torch.view_as_real(after)

    if hook["name"] in NOT_COMPLEX:
        with pytest.raises(GradientError, match=f"{hook['name']}: the gradient of 'wave' is complex64; leave it out"):
            ends(as_pairs=False)
        return
    torch.testing.assert_close(ends(as_pairs=False), ends(as_pairs=True))


def test_measuring_a_sparse_gradient_changes_no_bit() -> None:
    """Measuring does not even coalesce it."""
    looked = trained_on_words({"name": "measure", "metrics": ["norm", "zeros"]}, sparse=True)
    assert same(weights(looked), weights(trained_on_words("identity", sparse=True)))


def test_a_tied_weight_is_transformed_once() -> None:
    """A factor on a shared weight is applied once, under its first name."""
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    model(torch.ones(1, 3)).sum().backward()
    wanted = first.weight.detach() - 0.1 * first.weight.grad * 0.5
    first.weight.grad = None
    hooks = {"update": [{"name": "scale", "factor": 0.5, "params": "class:Linear"}]}
    data, loss_fn = [(torch.ones(1, 3), 0)], lambda out, _: out.sum()
    make_trainer(model=model, data=data, loss_fn=loss_fn, hooks=hooks).train()
    assert torch.equal(first.weight, wanted)


def test_several_groups_and_optimizers_are_one_chain() -> None:
    """Clipping spans the parameters of all optimizers, as one call of clip_grad_norm_ would."""
    model, twin = make_model(3, 8, 1, between=None), make_model(3, 8, 1, between=None)

    def optimizers(of: nn.Sequential) -> list[torch.optim.Optimizer]:
        groups = [{"params": [of[0].weight], "lr": 0.1}, {"params": [of[0].bias], "lr": 0.2}]
        return [torch.optim.SGD(groups), torch.optim.AdamW(of[1].parameters(), lr=0.01)]

    hooks = {"update": [{"name": "clip_norm", "max_norm": 0.2}]}
    make_trainer(model=model, optimizer=optimizers(model), hooks=hooks).train()
    theirs = optimizers(twin)
    for x, y in make_batches():
        nn.functional.mse_loss(twin(x), y).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.2)
        for optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
    assert same(list(model.parameters()), list(twin.parameters()))


def test_a_compiled_model_has_its_own_names() -> None:
    """Patterns select from a compiled model as from the original."""
    model = torch.compile(make_model(3, 8, 1, between=None), backend="eager")
    hooks = {"update": [{"name": "freeze", "params": "0.*"}, {"name": "clip_norm", "max_norm": 0.1}]}
    before = [param.detach().clone() for param in model.parameters()]
    make_trainer(model=model, hooks=hooks).train()
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [False, False, True, True]


# ---- guards ----------------------------------------------------------------------------------------------------------


def test_a_guard_saves_adamw_from_a_bad_batch() -> None:
    """The step with a NaN is skipped: except for the number of steps, the run is the one without that batch."""
    good, bad = make_batches(3), (torch.full((4, 3), float("nan")), torch.zeros(4, 1))
    guarded = trained("skip_nonfinite", optimizer="AdamW", data=[good[0], bad, good[1], good[2]])
    assert guarded.skipped_steps == 1 and guarded.step == 4
    assert same(weights(guarded), weights(trained(optimizer="AdamW", data=good)))


def test_a_guard_and_the_scaler_agree() -> None:
    """The guard neither sees nor counts what the scaler skips; the run equals the one without the guard."""
    bad = (torch.full((4, 3), 1e30), torch.zeros(4, 1))
    data = [bad, *make_batches(3), bad, *make_batches(3)]
    guarded = trained({"name": "skip_nonfinite", "give_up_after": 1}, precision="fp16", data=data)
    alone = trained(precision="fp16", data=data)
    assert guarded.chain.states["skip_nonfinite"] == {"in_a_row": 0, "total": 0}
    assert guarded.skipped_steps == alone.skipped_steps >= 2 and same(weights(guarded), weights(alone))


@pytest.mark.hooks_fail(raises=ValueError)
def test_half_written_gradients_skip_their_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The three steps in which a hook fails while writing are skipped and recorded; then it is disabled."""
    caplog.set_level(logging.CRITICAL, "hookline")
    monkeypatch.setattr(plugins.HOOKS, "_added", dict(plugins.HOOKS._added))

    @register_hook("scribbles")
    def scribbles(grads: Grads) -> None:
        for grad in list(grads.values())[:2]:
            grad.zero_()
        raise ValueError("half-way")

    failing = trained({"name": "scribbles", "on_error": "warn"}, optimizer="AdamW")
    assert failing.skipped_steps == 3 and not failing.hooks.is_enabled("scribbles")
    reasons = {event["reason"] for event in failing.record.events if event["kind"] == "step_skipped"}
    assert reasons == {"scribbles left half-written gradients"}
    assert same(weights(failing), weights(trained(optimizer="AdamW", data=make_batches(6)[3:])))


@pytest.mark.parametrize(
    "clip",
    [
        {"name": "clip_norm", "max_norm": 0.01},
        {"name": "clip_norm", "max_norm": 0.01, "params": "*"},
        {"name": "clip_norm", "max_norm": 0.01, "norm_type": 1.0},
        {"name": "clip_value", "max_value": 0.001, "params": "0.*"},
        {"name": "spike_guard", "factor": 1.01, "warmup": 1, "action": "clip"},
    ],
    ids=["global", "of all by a pattern", "of another type", "value", "spike"],
)
def test_the_norm_of_a_step_is_global_and_before_clipping(clip: dict[str, Any]) -> None:
    """Whatever clips, on_step_end and the record get the norm that the backward pass left."""
    seen: list[float] = []
    true: list[float] = []

    class Norms(TrainingHook):
        def on_gradients_ready(self, grads: Grads) -> None:
            true.append(torch.cat([grad.flatten() for grad in grads.values()]).norm().item())

        def on_step_end(self, ctx: Any) -> None:
            seen.append(ctx.grad_norm)

    trainer = make_trainer(Norms(), hooks={"update": [clip]})
    trainer.train()
    assert seen == pytest.approx(true, rel=1e-5)
    recorded = [row["train/grad_norm"] for row in trainer.record.metrics if "train/grad_norm" in row]
    assert recorded == pytest.approx(true, rel=1e-5)


# ---- going on --------------------------------------------------------------------------------------------------------


class Momentum(UpdateHook):
    """A user's hook with a state of new tensors."""

    name = "momentum"

    def init(self, params: Mapping[str, torch.nn.Parameter]) -> dict[str, Any]:
        return {name: torch.zeros_like(param) for name, param in params.items()}

    def on_update(self, grads: Grads, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, grad in grads.items():
            state[name] = 0.9 * state[name] + grad
        return {name: state[name].clone() for name in grads}


STATEFUL: list[dict[str, Any]] = [
    {"name": "noise", "eta": 0.1},
    {"name": "grokfast", "alpha": 0.8, "params": "*.weight"},
    {"name": "spike_guard", "factor": 1.2, "warmup": 3, "window": 5},
    {"name": "skip_nonfinite"},
]


@pytest.mark.parametrize("hook", [*STATEFUL, None], ids=["noise", "grokfast", "spike_guard", "skip_nonfinite", "user"])
def test_a_resumed_run_equals_the_uninterrupted_one(hook: Any) -> None:
    """Weights, optimizer and the hook's state are equal bit for bit, under the name that the config gave the hook."""

    def make() -> Trainer:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        hooks: Any = [Momentum()] if hook is None else {"update": [{**hook, "as": "mine"}]}
        return make_trainer(model=model, data=make_batches(10), optimizer=optimizer, hooks=hooks, seed=5, record=True)

    whole = make()
    whole.fit(max_steps=10)
    first = make()
    first.fit(max_steps=6)
    first.save_checkpoint()
    second = make()
    second.fit(max_steps=10, resume=first.run_dir)
    assert second.step == whole.step == 10 and second.skipped_steps == whole.skipped_steps
    assert same(weights(second), weights(whole))
    name = "momentum" if hook is None else "mine"
    assert_same_tree(second.chain.states[name], whole.chain.states[name])


def assert_same_tree(first: Any, second: Any) -> None:
    """Check that nested values are equal; a NaN equals a NaN."""
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_same_tree(first[key], second[key])
    elif isinstance(first, torch.Tensor):
        assert torch.equal(first.nan_to_num(-1.0) if first.is_floating_point() else first,
                           second.nan_to_num(-1.0) if second.is_floating_point() else second)  # fmt: skip
    else:
        assert first == second


@pytest.mark.parametrize(("hook", "named"), [("drops", "in on_update, step 1"), ("cannot_begin", "in init")])
def test_the_command_line_names_a_hook_that_fails(
    hook: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line with the error also names the hook."""
    monkeypatch.setattr(plugins.HOOKS, "_added", dict(plugins.HOOKS._added))

    @register_hook("drops")
    def drops(grads: Grads) -> Grads:
        return dict(list(grads.items())[1:])

    @register_hook("cannot_begin")
    class CannotBegin(UpdateHook):
        def init(self, params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
            raise ValueError("no room")

        def on_update(self, grads: Grads) -> Grads:
            return grads

    config = tmp_path / "run.yaml"
    config.write_text(f"""
model: {{name: char_gpt, context: 4, width: 4, heads: 1, layers: 1}}
data: {{name: stdlib_text, context: 4, batch_size: 1, max_bytes: 60000}}
optimizer: {{name: sgd, lr: 0.01}}
trainer: {{max_steps: 1, validate_every: null, output_dir: {tmp_path}}}
hooks: {{update: [{{name: {hook}, on_error: raise}}]}}
""")
    assert main(["train", str(config)]) != 0
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("hookline: error: "))
    assert f"raised by hook {hook!r} {named}" in line


class FailsInStep(UpdateHook):
    """A user's hook that fails in a step."""

    def __init__(self, at: int = 3) -> None:
        self.at = at

    def on_update(self, grads: Any, step: int) -> Any:
        if step == self.at:
            raise ValueError("no gradients today")
        return {name: grad * 2 for name, grad in grads.items()}


@pytest.mark.hooks_fail(raises=ValueError)
def test_a_failing_update_hook_ends_the_run_by_default() -> None:
    """Without it the run would be another one than was asked for; `on_error` and `intervenes = False` say otherwise."""
    trainer = make_trainer(FailsInStep())
    with pytest.raises(ValueError, match="no gradients today"):
        trainer.train()
    assert trainer.progress.steps_done == 2

    class Watches(FailsInStep):
        intervenes = False

    class Warns(FailsInStep):
        on_error = "warn"

    for hook in (Watches(), Warns()):
        trainer = make_trainer(hook)
        trainer.train()
        assert trainer.progress.steps_done == 4


@pytest.mark.hooks_fail(raises=ValueError)
def test_a_failing_intervention_ends_the_run_by_default() -> None:
    """The activations would be others than were asked for; a forward hook that only looks does not end it."""

    class Scales(ForwardHook):
        modules = "0"

        def on_forward(self, output: Any) -> Any:
            raise ValueError("no activations today")

    class Intervenes(Scales):
        intervene = True

    make_trainer(Scales()).train()
    trainer = make_trainer(Intervenes(), enable_intervention=True)
    with pytest.raises(ValueError, match="no activations today"):
        trainer.train()

"""Real models: a Hugging Face GPT-2 and a BERT, `nn.Transformer`, an LSTM and a CNN, under all kinds of hooks."""

import copy
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookline import ForwardHook, HookManager, Trainer, TrainingHook, get_trainer
from hookline._tensors import iter_tensors
from hookline.activations.interventions import Ablate, Patch, Scale
from hookline.gradients.gradient_flow import gradient_flow

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def gpt2() -> nn.Module:
    """GPT-2 with two layers of two heads; it gets keywords and gives a ModelOutput, its blocks give tuples."""
    config = transformers.GPT2Config(n_positions=16, n_embd=16, n_layer=2, n_head=2, loss_type="ForCausalLM", **SIZES)
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    """BERT, as small."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(max_position_embeddings=16, **sizes, **SIZES)
    return transformers.BertForMaskedLM(config)


def transformer() -> nn.Module:
    """torch's own encoder and decoder."""
    return nn.Transformer(16, 2, 2, 1, 32, batch_first=True)


def lstm() -> nn.Module:
    """Two layers with dropout between; it gives a tuple with a tuple in it."""
    return nn.LSTM(8, 16, num_layers=2, dropout=0.2, batch_first=True)


def cnn() -> nn.Module:
    """Convolutions with an activation that works in place, so that captures must not follow it."""
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(6, 3))
    return nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 3), head)


def text(_: int) -> dict[str, Tensor]:
    """Tokens, what to predict, and a mask with padding."""
    tokens = torch.randint(1, 32, (3, 8))
    mask = torch.ones_like(tokens)
    mask[0, 6:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


@dataclass(frozen=True)
class Case:
    """A model, what goes in, and a module of it to look at closely."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    inner: str
    """In the middle of the model; what comes after it depends on it."""
    early: str
    """A module that runs before `inner`."""

    def model(self) -> nn.Module:
        """The same weights every time."""
        torch.manual_seed(11)
        return self.make()

    def batches(self, count: int) -> list[Any]:
        """The same batches every time."""
        torch.manual_seed(12)
        return [self.batch(index) for index in range(count)]


CASES = {
    "gpt2": Case(gpt2, text, "transformer.h.1", "transformer.h.0.attn"),
    "bert": Case(bert, text, "bert.encoder.layer.1", "bert.encoder.layer.0.attention"),
    "transformer": Case(
        transformer, lambda _: (torch.randn(3, 6, 16), torch.randn(3, 5, 16)), "encoder.layers.1", "encoder.layers.0"
    ),
    "lstm": Case(lstm, lambda _: torch.randn(3, 5, 8), "", ""),
    "cnn": Case(cnn, lambda _: torch.randn(3, 2, 8, 8), "3", "1"),
}
ALL = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
PARTED = {name: case for name, case in CASES.items() if case.inner}  # an LSTM is one module
WITH_PARTS = pytest.mark.parametrize("case", PARTED.values(), ids=list(PARTED))


def run(model: Any, batch: Any) -> Any:
    """The model's output for a batch, which is a dict, a tuple or a tensor."""
    return model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, tuple) else model(batch)


def loss_of(model: Any, batch: Any) -> Tensor:
    """The model's own loss, or something to train on."""
    output = run(model, batch)
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    found = first_floating(output)
    return found.pow(2).mean()


def everything(name: str, module: nn.Module) -> bool:
    """Selects the root too, which has no name that a pattern could match."""
    return True


def same(first: Any, second: Any) -> bool:
    """Whether two nested values have the same classes, and tensors of the same bits."""
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (tuple, list)):
        return len(first) == len(second) and all(map(same, first, second))
    return same(list(iter_tensors(first)), list(iter_tensors(second)))


def first_floating(value: Any) -> torch.Tensor | None:
    """The first floating-point tensor of a nested value."""
    return next((tensor for tensor in iter_tensors(value) if tensor.is_floating_point()), None)


def cloned(value: Any) -> Any:
    """A nested value of plain containers, ModelOutputs and caches with its own tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return type(value)(**{key: cloned(item) for key, item in value.items()})
    if type(value).__module__ == "transformers.cache_utils":
        made = copy.copy(value)
        vars(made).update({name: cloned(item) for name, item in vars(value).items()})
        return made
    return type(value)(map(cloned, value)) if isinstance(value, (tuple, list)) else value


# ---- looking -------------------------------------------------------------------------------------------------------


@ALL
@pytest.mark.req("003-01", "003-02", "003-21", "000-13")
def test_captures_keep_structure_and_bits(case: Case) -> None:
    """What torch's own hooks see is captured: arguments, keywords, outputs, ModelOutputs and tuples as they were."""
    model, (batch,) = case.model().eval(), case.batches(1)
    plain = run(model, batch)
    seen: list[tuple[Any, Any, Any]] = []
    for module in model.modules():
        module.register_forward_hook(
            lambda _, args, kwargs, output: seen.append((cloned(args), cloned(kwargs), cloned(output))),
            with_kwargs=True,
        )
    with HookManager().capturing(model, everything, what="both") as cache:
        watched = run(model, batch)
    assert same(plain, watched)
    assert len(cache) == len(seen) > 0
    for state, (args, kwargs, output) in zip(cache.states, seen, strict=True):
        assert same(state.inputs, args), state.name
        assert same(dict(state.kwargs), kwargs), state.name
        assert same(state.outputs, output), state.name


@ALL
@pytest.mark.req("003-24", "003-25", "003-26")
def test_monitoring_measures_what_was_captured(case: Case) -> None:
    """Mean, std and absmax of every module's output as float64 has them, and the time it took."""
    model, (batch,), manager = case.model().eval(), case.batches(1), HookManager()
    manager.watch(model)
    manager.register_monitoring_hook(everything, "watch", metrics=["mean", "std", "absmax", "nans", "time", "memory"])
    run(model, batch)
    manager.get("watch").latest()  # by which it learns what the model overwrites: that is read at once from now on
    with manager.capturing(model, everything) as cache:
        run(model, batch)
    latest = manager.get("watch").latest()
    assert latest.keys() == {state.name for state in cache.states}
    for state in cache.states:
        tensor = first_floating(state.outputs)
        assert tensor is not None
        wide, found = tensor.double(), latest[state.name]
        assert found["mean"] == pytest.approx(wide.mean().item(), rel=1e-4, abs=1e-6)
        if tensor.numel() > 1:
            assert found["std"] == pytest.approx(wide.std().item(), rel=1e-3)
        assert found["absmax"] == tensor.abs().max().item() and found["nans"] == 0
        assert found["time"] > 0 and found["memory"] > 0


@ALL
@pytest.mark.req("003-27", "003-28")
def test_debugging_finds_where_trouble_begins(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    """One weight that is not a number: the first finding is the module that holds it, with what went in."""
    model, (batch,), manager = case.model().eval(), case.batches(1), HookManager()
    manager.watch(model)
    manager.register_debug_hook(everything, "guard", break_at_terminal=False, inspect=True)
    run(model, batch)
    assert manager.get("guard").findings == [] and len(manager.get("guard").inspected) > 0
    owner = model.get_submodule(case.inner)
    *_, (holder, last) = ((name, one) for name, one in owner.named_modules() if list(one.parameters(recurse=False)))
    next(last.parameters()).data.view(-1)[0] = torch.nan
    with caplog.at_level(logging.CRITICAL, "hookline"):
        run(model, batch)
    first = manager.get("guard").findings[0]
    assert first.module == ".".join(filter(None, (case.inner, holder))) and first.condition == "nan > 0"
    assert first.inputs and first.outputs and any("test_real_models.py" in frame for frame in first.stack)


@ALL
@pytest.mark.req("003-29")
def test_gradient_flow_gives_a_verdict(case: Case) -> None:
    """Healthy as the model comes; cut off, it names the parameters that no gradient reaches."""
    model, (batch,) = case.model().eval(), case.batches(1)
    loss_of(model, batch).backward()
    flow = gradient_flow(model)
    assert not flow.of("never arrived") and not flow.of("non-finite")
    model.zero_grad()
    if not case.inner:
        return
    inner = model.get_submodule(case.inner)
    handle = inner.register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:]))
    loss_of(model, batch).backward()
    handle.remove()
    early = {f"{case.early}.{name}" for name, _ in model.get_submodule(case.early).named_parameters()}
    assert early and early <= {row.name for row in gradient_flow(model).of("never arrived")}


@WITH_PARTS
@pytest.mark.req("003-22")
def test_an_early_stop_leaves_the_model_after_the_last_wanted_layer(case: Case) -> None:
    """The same activations as in a whole pass; nothing behind them ran."""
    model, (batch,), manager = case.model().eval(), case.batches(1), HookManager()
    ran: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    with manager.capturing(model, [case.early, case.inner]) as whole:
        run(model, batch)
    all_of_it = list(ran)
    ran.clear()
    with manager.capturing(model, [case.early, case.inner], early_stop=True) as cache:
        assert (cache.run(**batch) if isinstance(batch, dict) else cache.run(*_as_tuple(batch))) is None
    assert same(cache[case.early], whole[case.early]) and same(cache[case.inner], whole[case.inner])
    assert ran[-1] == case.inner and len(ran) < len(all_of_it)
    assert not any(len(module._forward_hooks) > 1 for module in model.modules())


def _as_tuple(batch: Any) -> tuple[Any, ...]:
    return batch if isinstance(batch, tuple) else (batch,)


# ---- changing ------------------------------------------------------------------------------------------------------


def gradients_of(model: nn.Module, batch: Any) -> list[Tensor]:
    """Every parameter's gradient after one pass."""
    model.zero_grad()
    loss_of(model, batch).backward()
    return [torch.zeros(()) if param.grad is None else param.grad.clone() for param in model.parameters()]


@WITH_PARTS
@pytest.mark.req("003-33")
def test_interventions_let_gradients_through(case: Case) -> None:
    """Scaling in the middle gives the gradients that the same change by torch's own hook gives; ablating cuts them."""
    model, (batch,) = case.model().eval(), case.batches(1)
    manager = HookManager(enable_intervention=True)
    manager.watch(model)
    untouched = gradients_of(model, batch)

    def halve(module: nn.Module, args: Any, output: Any) -> Any:
        return (output[0] * 0.5, *output[1:]) if isinstance(output, tuple) else output * 0.5

    with model.get_submodule(case.inner).register_forward_hook(halve):
        expected = gradients_of(model, batch)
    with manager.register(Scale(case.inner, 0.5)):
        assert same(gradients_of(model, batch), expected)
    assert not same(expected, untouched)
    with manager.register(Ablate(case.inner)):
        ablated = dict(zip((name for name, _ in model.named_parameters()), gradients_of(model, batch), strict=True))
    inner = [grad for name, grad in ablated.items() if name.startswith(f"{case.inner}.")]
    assert inner and not any(grad.any() for grad in inner) and any(grad.any() for grad in ablated.values())
    assert same(gradients_of(model, batch), untouched)


@WITH_PARTS
def test_patching_from_another_pass_gives_its_result(case: Case) -> None:
    """The middle of one batch put into another: for a model without side roads, the other batch's output."""
    model, (first, second) = case.model().eval(), case.batches(2)
    manager = HookManager(enable_intervention=True)
    manager.watch(model)
    with manager.capturing(model, case.inner) as cache:
        theirs = first_floating(run(model, first))
    ours = first_floating(run(model, second))
    with manager.register(Patch(case.inner, cache)):
        patched = first_floating(run(model, second))
    assert patched is not None and theirs is not None and ours is not None
    if case is CASES["cnn"]:
        assert torch.equal(patched, theirs)
    assert not torch.equal(patched, ours)


# ---- training ------------------------------------------------------------------------------------------------------


class Reader(ForwardHook):
    """Names everything a forward hook can name, and computes with it."""

    modules = staticmethod(everything)

    def on_forward(self, name: str, module: Any, inputs: Any, kwargs: Any, output: Any, step: int, phase: str) -> None:
        self.total = sum(float(tensor.double().sum()) for tensor in iter_tensors((inputs, kwargs, output)))


def observers(trainer: Trainer) -> None:
    """Everything that looks."""
    trainer.hooks.register_capture_hook(everything, "capture", max_captured_states=20)
    trainer.hooks.register_monitoring_hook(everything, "monitor", metrics=["mean", "std", "time", "memory"])
    trainer.hooks.register_debug_hook(everything, "debug", break_at_terminal=False, inspect=True)
    trainer.add_hook("activation_stats", modules=everything)
    trainer.add_hook("gradient_flow", every=1)
    trainer.add_hook(Reader())


class Writes(ForwardHook):
    """Writes into whatever it can reach."""

    modules = staticmethod(everything)

    def on_forward(self, inputs: Any, kwargs: Any, output: Any) -> None:
        for tensor in iter_tensors((inputs, kwargs, output)):
            tensor.fill_(3)


class Returns(ForwardHook):
    """Returns something else."""

    modules = staticmethod(everything)

    def on_forward(self, output: Any) -> Any:
        return torch.zeros(1)


class Raises(ForwardHook):
    """Is broken."""

    modules = staticmethod(everything)

    def on_forward(self, output: Any) -> None:
        raise ValueError("broken")


class Gradients(TrainingHook):
    """Keeps every step's gradients."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def on_gradients_ready(self, grads: Any) -> None:
        self.kept += [grad.clone() for grad in grads.values()]


@dataclass
class Trained:
    """What training came to, and the trainer that did it."""

    trainer: Trainer
    losses: list[float]
    tensors: list[Tensor]
    streams: tuple[Any, ...]

    def differs_from(self, other: "Trained") -> list[str]:
        """What is not bit for bit the same."""
        checks = {
            "losses": self.losses == other.losses,
            "gradients and parameters": same(self.tensors, other.tensors),
            "torch's stream": torch.equal(self.streams[0], other.streams[0]),
            "other streams": repr(self.streams[1:]) == repr(other.streams[1:]),
        }
        return [name for name, fine in checks.items() if not fine]


def train(case: Case, precision: str, dress: Callable[[Trainer], Any] | None = None) -> Trained:
    """Four steps through the trainer, dropout on, dressed with hooks."""
    model, batches, losses, gradients = case.model(), case.batches(4), [], Gradients()

    def step(model: Any, batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        losses.append(loss.item())
        return loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options: dict[str, Any] = {"step_fn": step, "precision": precision, "record": False, "console": False}
    trainer = get_trainer("simple", model, batches, optimizer, "cpu", **options)
    trainer.add_hook(gradients)
    if dress is not None:
        dress(trainer)
    torch.manual_seed(13), random.seed(14), np.random.seed(15)
    trainer.train()
    streams = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    kept = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
    return Trained(trainer, losses, [*gradients.kept, *kept], streams)


Bare = Callable[[Case, str], Trained]


@pytest.fixture(scope="module")
def bare() -> Bare:
    """Training without hooks, done once for each model and precision."""
    known: dict[tuple[str, str], Trained] = {}

    def trained(case: Case, precision: str) -> Trained:
        key = (case.make.__name__, precision)
        if key not in known:
            known[key] = train(case, precision)
        return known[key]

    return trained


@ALL
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.req("000-09", "000-16", "000-40")
def test_observers_leave_training_alone(case: Case, precision: str, bare: Bare) -> None:
    """Bit for bit the same losses, gradients, parameters, buffers and random streams with everything looking."""
    assert train(case, precision, observers).differs_from(bare(case, precision)) == []


@ALL
@pytest.mark.parametrize(
    ("hook", "kind"),
    [(Writes, "overruled"), (Returns, "overruled"), (Raises, "failed")],
    ids=["writes", "returns", "raises"],
)
@pytest.mark.req("003-38", "000-13")
@pytest.mark.hooks_fail(raises=ValueError)
def test_a_hook_that_misbehaves_is_named_and_changes_nothing(
    case: Case,
    hook: type[ForwardHook],
    kind: str,
    bare: Bare,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In-place writes, other outputs and exceptions are reported; training is bit for bit the same."""
    incidents: list[tuple[str, str]] = []

    def dress(trainer: Trainer) -> None:
        trainer.hooks.failures.subscribe(lambda incident: incidents.append((incident.kind, incident.hook)))
        trainer.add_hook(hook(), "culprit")

    with caplog.at_level(logging.CRITICAL, "hookline"):
        result = train(case, "fp32", dress)
    assert result.differs_from(bare(case, "fp32")) == []
    assert (kind, "culprit") in incidents


def test_the_comparison_can_fail(bare: Bare) -> None:
    """A control: an intervention is seen in all of it but the streams, and another precision too."""
    case = CASES["cnn"]

    def dress(trainer: Trainer) -> None:
        trainer.hooks.enable_intervention = True
        trainer.add_hook(Scale(case.inner, 0.5))

    changed = ["losses", "gradients and parameters"]
    assert train(case, "fp32", dress).differs_from(bare(case, "fp32")) == changed
    assert bare(case, "bf16").differs_from(bare(case, "fp32")) == changed

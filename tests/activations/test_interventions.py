"""Interventions: what they change, what they leave alone, and that gradients flow through."""

import collections
import contextlib
import dataclasses
import logging
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn
from watched_models import watch

from hookline import HooklineError, HookManager
from hookline.activations.interventions import Ablate, Add, Intervention, Patch, Replace, Scale, Steer

INPUT = torch.arange(12.0).reshape(2, 2, 3) / 10
VECTOR = torch.tensor([1.0, -1.0, 2.0, 0.0])


def make_model() -> nn.Sequential:
    """Linear, ReLU in place, Linear with fixed weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


def hidden() -> torch.Tensor:
    """The first layer's output without an intervention."""
    first = make_model()[0](INPUT)
    assert isinstance(first, torch.Tensor)
    return first


def rest(changed: torch.Tensor) -> torch.Tensor:
    """Run the other layers on a first layer's output."""
    output = make_model()[1:](changed.clone())
    assert isinstance(output, torch.Tensor)
    return output


managers: WeakKeyDictionary[nn.Module, HookManager] = WeakKeyDictionary()


def changing(model: nn.Module, *hooks: Intervention) -> HookManager:
    """A manager that watches a model and lets these hooks intervene, as long as the model lives."""
    managers[model] = watch(model, *hooks, enable_intervention=True)
    return managers[model]


MEAN = torch.tensor([5.0, 6.0, 7.0, 8.0])
CASES: list[tuple[Intervention, Callable[[torch.Tensor], torch.Tensor]]] = [
    (Replace("0", torch.full((2, 2, 4), 3.0)), lambda own: torch.full_like(own, 3.0)),
    (Replace("0", VECTOR), lambda own: VECTOR.expand_as(own)),
    (Replace("0", 2.5), lambda own: torch.full_like(own, 2.5)),
    (Replace("0", lambda own: own.tanh()), lambda own: own.tanh()),
    (Scale("0", 0.5), lambda own: own * 0.5),
    (Scale("0", [1, 0, 1, 0]), lambda own: own * torch.tensor([1.0, 0.0, 1.0, 0.0])),
    (Add("0", 1), lambda own: own + 1),
    (Add("0", VECTOR.double()), lambda own: own + VECTOR),
    (Ablate("0"), lambda own: own * 0),
    (Ablate("0", units=[1, -1]), lambda own: own * torch.tensor([1.0, 0.0, 1.0, 0.0])),
    (Ablate("0", "mean"), lambda own: own.mean(0).expand_as(own)),
    (Ablate("0", MEAN, units=slice(0, 2)), lambda own: torch.cat([MEAN[:2].expand(2, 2, 2), own[..., 2:]], dim=-1)),
    (Patch("0", torch.ones(2, 2, 4)), lambda own: torch.ones_like(own)),
    (Patch("0", {"0": torch.ones(2, 2, 4)}, positions=1), lambda own: torch.stack([own[:, 0], torch.ones(2, 4)], 1)),
    (Patch("0", torch.ones(2, 2, 4), positions=[0], dim=0), lambda own: torch.stack([torch.ones(2, 4), own[1]])),
    (Steer("0", VECTOR, strength=2.0), lambda own: own + 2 * VECTOR),
    (Steer("0", VECTOR.tolist(), positions=[-1]), lambda own: torch.stack([own[:, 0], own[:, 1] + VECTOR], 1)),
]


@pytest.mark.req("003-33")
@pytest.mark.parametrize(("hook", "expected"), CASES, ids=lambda one: getattr(one, "name", ""))
def test_the_rest_of_the_model_uses_the_changed_output(
    hook: Intervention, expected: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Also where the next module writes in place."""
    model = make_model()
    changing(model, hook)
    torch.testing.assert_close(model(INPUT), rest(expected(hidden())))


@pytest.mark.req("003-33")
@pytest.mark.parametrize("hook", [hook for hook, _ in CASES], ids=lambda hook: hook.name)
def test_without_enable_intervention_nothing_changes(hook: Intervention) -> None:
    """Interventions are off by default: the output is bit for bit that of a model without hooks."""
    manager, model = HookManager(), make_model()
    manager.watch(model)
    with contextlib.suppress(HooklineError):  # it may be rejected
        manager.register(hook)
    assert torch.equal(model(INPUT), make_model()(INPUT))


@pytest.mark.req("003-33")
def test_switched_off_later_it_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its shapes are not checked; the warning names the hook and the remedy."""
    caplog.set_level(logging.WARNING, "hookline")
    model = make_model()
    manager = changing(model, Replace("0", torch.ones(99)))
    manager.enable_intervention = False
    for _ in range(2):
        assert torch.equal(model(INPUT), make_model()(INPUT))
    assert [record.getMessage() for record in caplog.records] == [
        "hook 'replace_activation' changes nothing, because interventions are disabled; "
        "create the manager with HookManager(enable_intervention=True)"
    ]
    assert not manager.entry("replace_activation").overruled


def test_interventions_are_listed_as_interventions() -> None:
    """The list of hooks marks each of them; default names differ from those of gradient transforms."""
    manager = HookManager(enable_intervention=True)
    for kind in (Replace, Scale, Add, Steer):
        manager.register(kind("0", [1.0]))
    manager.register(Ablate("0"))
    manager.register(Patch("0", {}))
    listed = manager.list_hooks()
    assert [record.name for record in listed] == [
        "replace_activation",
        "scale_activation",
        "add_activation",
        "steer",
        "ablate",
        "patch",
    ]
    assert all(record.intervenes and "intervenes" in str(record) for record in listed)


@pytest.mark.parametrize(("hook", "expected"), CASES, ids=lambda one: getattr(one, "name", ""))
def test_gradients_are_those_of_the_changed_computation(
    hook: Intervention, expected: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """They equal those of the same computation written out."""
    model, bare = make_model(), make_model()
    changing(model, hook)
    model(INPUT).pow(2).sum().backward()
    bare[1:](expected(bare[0](INPUT)).clone()).pow(2).sum().backward()
    for changed, plain in zip(model.parameters(), bare.parameters(), strict=True):
        wanted = torch.zeros_like(plain) if plain.grad is None else plain.grad
        torch.testing.assert_close(torch.zeros_like(changed) if changed.grad is None else changed.grad, wanted)


def test_gradients_reach_a_trainable_value() -> None:
    """A steering vector or a replacement that requires grad can be trained."""
    vector, value = nn.Parameter(VECTOR.clone()), nn.Parameter(torch.ones(2))
    model = make_model()
    changing(model, Steer("0", vector), Add("2", value))
    model(INPUT).sum().backward()
    assert vector.grad is not None and vector.grad.abs().sum() > 0
    assert value.grad is not None and torch.equal(value.grad, torch.full((2,), 4.0))


def test_given_tensors_are_never_written_to() -> None:
    """The model's in-place ReLU does not reach the user's tensors, nor a captured state."""
    negative = torch.full((2, 2, 4), -1.0)
    for hook in (Replace("0", negative), Patch("0", {"0": negative}), Ablate("0", negative)):
        model = make_model()
        changing(model, hook)
        model(INPUT)
        assert (negative == -1).all()


def test_half_precision_keeps_its_dtype() -> None:
    """Tensors are converted to the output's dtype; a plain number keeps all its digits."""
    model = nn.Sequential(nn.Identity())
    changing(model, Scale("0", 0.3), Add("0", torch.tensor(1.0)))
    given = torch.tensor([3.0, 5.0], dtype=torch.bfloat16)
    assert torch.equal(model(given), given * 0.3 + 1) and model(given).dtype is torch.bfloat16


@pytest.mark.req("003-33")
def test_patching_from_another_runs_capture() -> None:
    """A captured state, a mapping of states, or a cache of another input replaces the layer's output."""
    other, model = INPUT.flip(0), make_model()
    expected = make_model()(other)
    manager = HookManager()
    with manager.capturing(model, "0") as cache:
        cache.run(other)
    for source in (cache.states[-1], cache, {"0": cache.states[-1]}, {"0": cache["0"]}):
        model = make_model()
        changing(model, Patch("0", source))
        torch.testing.assert_close(model(INPUT), expected)


@pytest.mark.req("003-33")
def test_an_lstm_keeps_its_tuple() -> None:
    """The sequence output is changed; hidden and cell state are the same, in their places."""
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4)
    output, (state, cell) = lstm(INPUT)
    changing(lstm, Scale("", 2.0))
    changed = lstm(INPUT)
    assert type(changed) is tuple and type(changed[1]) is tuple
    assert (
        torch.equal(changed[0], output * 2) and torch.equal(changed[1][0], state) and torch.equal(changed[1][1], cell)
    )


def test_a_packed_sequence_goes_through_an_lstm() -> None:
    """A named tuple with indices beside the data stays one."""
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4)
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 3), torch.ones(1, 3)])
    plain = lstm(packed)[0]
    changing(lstm, Add("", 1.0))
    changed = lstm(packed)[0]
    assert type(changed) is type(plain) and torch.equal(changed.data, plain.data + 1)
    assert torch.equal(changed.batch_sizes, plain.batch_sizes)


def test_a_transformer_layer_and_its_attention() -> None:
    """Zero ablation of attention leaves what the layer computes from its residual alone."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(d_model=4, nhead=2, dim_feedforward=8, dropout=0.0, batch_first=True)
    given = torch.randn(2, 3, 4)
    once = layer.norm1(given)
    expected = layer.norm2(once + layer.linear2(layer.linear1(once).relu()))
    changing(layer, Ablate("self_attn"))
    torch.testing.assert_close(layer(given), expected)


def test_channels_of_a_cnn() -> None:
    """A mask over channels scales them; the mean over the batch makes the images alike."""
    conv, images = nn.Conv2d(1, 3, 3), torch.randn(2, 1, 5, 5)
    plain = conv(images)
    changing(conv, Scale("", torch.tensor([1.0, 0.0, 1.0]).reshape(3, 1, 1)))
    changed = conv(images)
    assert torch.equal(changed[:, [0, 2]], plain[:, [0, 2]]) and (changed[:, 1] == 0).all()
    changing(conv, Ablate("", "mean"))
    assert torch.equal(conv(images)[0], conv(images)[1])
    torch.testing.assert_close(conv(images)[0, 0], plain[:, 0].mean(0))


class Pair(NamedTuple):
    """A named tuple that begins with integers."""

    ids: torch.Tensor
    value: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Output:
    """A frozen dataclass that its constructor cannot make again."""

    value: torch.Tensor
    size: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.value.numel())


class ModelOutput(collections.OrderedDict[str, Any]):
    """A model output as libraries have it: a dict whose items are attributes too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def defaults(tensor: torch.Tensor) -> Any:
    """A defaultdict, which its own constructor does not make from a dict."""
    return collections.defaultdict(list, {"value": tensor})


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda tensor: Pair(torch.arange(2), tensor), lambda made: made.value),
        (lambda tensor: [None, tensor, "text"], lambda made: made[1]),
        (lambda tensor: {"ids": torch.arange(2), "deep": [(tensor,)]}, lambda made: made["deep"][0][0]),
        (lambda tensor: Output(tensor), lambda made: made.value),
        (lambda tensor: ModelOutput(loss=None, value=tensor), lambda made: made.value),
        (lambda tensor: ModelOutput(value=tensor), lambda made: made["value"]),
        (defaults, lambda made: made["value"]),
        (lambda tensor: types.MappingProxyType({"value": tensor}), lambda made: made["value"]),
        (lambda tensor: torch.return_types.max((tensor, torch.arange(2))), lambda made: made.values),
    ],
    ids=["named tuple", "list", "nested", "dataclass", "model output with None", "model output", "defaultdict",
         "mapping proxy", "return type"],
)  # fmt: skip
def test_structures_keep_their_type(make: Callable[[torch.Tensor], Any], read: Callable[[Any], torch.Tensor]) -> None:
    """The first floating-point tensor is replaced in a structure of the same type; the original is not changed."""

    class Structured(nn.Module):
        def forward(self, tensor: torch.Tensor) -> Any:
            self.made = make(tensor)
            return self.made

    module = Structured()
    manager = HookManager(enable_intervention=True)
    manager.register(Add(module, 1.0))
    given = torch.tensor([1.0, 2.0])
    changed = module(given)
    assert type(changed) is type(module.made) and changed is not module.made
    assert torch.equal(read(changed), given + 1) and read(module.made) is given


def test_a_tensor_that_occurs_twice_is_replaced_twice() -> None:
    """The last hidden state of a model is often in its list of hidden states, too."""

    class Twice(nn.Module):
        def forward(self, tensor: torch.Tensor) -> Any:
            return {"last": tensor, "all": (tensor + 1, tensor)}

    module = Twice()
    manager = HookManager(enable_intervention=True)
    manager.register(Scale(module, 3.0))
    made = module(torch.ones(1))
    assert made["last"].item() == made["all"][1].item() == 3 and made["all"][0].item() == 2


def test_an_output_without_floats_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """One warning per module."""
    caplog.set_level(logging.WARNING, "hookline")
    model = nn.Sequential(nn.Identity())
    changing(model, Scale("0", 2.0))
    for _ in range(2):
        assert torch.equal(model(torch.arange(3)), torch.arange(3))
    assert [record.getMessage() for record in caplog.records] == [
        "the output of '0' has no floating-point tensor; it is not changed"
    ]


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (
            Replace("0", torch.ones(3)),
            r"replace_activation: value has shape \(3,\), but the output of '0' has shape \(2, 2, 4\)",
        ),
        (Replace("0", lambda own: own.sum()), r"the function returned a tensor of shape \(\) for '0'; return a tensor"),
        (Replace("0", lambda own: None), r"the function returned NoneType for '0'"),
        (Scale("0", torch.ones(2, 4, 4)), r"scale_activation: factor has shape \(2, 4, 4\)"),
        (Add("0", torch.ones(5)), r"add_activation: value has shape \(5,\)"),
        (Ablate("0", units=[4]), r"ablate: units \[4\] exceed the size 4 of dimension -1 in the output of '0'"),
        (Ablate("0", torch.ones(3)), r"ablate: the mean has shape \(3,\)"),
        (Patch("0", torch.ones(7, 2, 4)), r"patch: the source has shape \(7, 2, 4\)"),
        (Patch("0", {"1": VECTOR}), r"patch: the source has no entry '0'; valid: 1"),
        (Patch("0", {"0": torch.arange(4)}), r"patch: the source has no floating-point output of '0'; capture outputs"),
        (Patch("0", VECTOR, positions=[0, 2]), r"patch: positions \[0, 2\] exceed the size 2 of dimension -2"),
        (Steer("0", [1.0, 2.0]), r"steer: vector has 2 elements, but the output of '0' has shape \(2, 2, 4\)"),
        (Steer("0", VECTOR, positions=0, dim=3), r"steer: positions: the output of '0' .* and no dimension 3"),
    ],
)
def test_a_value_that_does_not_fit_ends_the_run(hook: Intervention, message: str) -> None:
    """A run without its intervention would be a different run, so the error is raised."""
    model = make_model()
    changing(model, hook)
    with pytest.raises(HooklineError, match=message):
        model(INPUT)


def test_invalid_parameters_are_rejected_at_construction() -> None:
    """A misspelt target, a list of states, a matrix as a vector."""
    with pytest.raises(HooklineError, match="ablate: to='zeros' is unknown; did you mean 'zero'"):
        Ablate("0", "zeros")
    with pytest.raises(HooklineError, match="patch: cannot take activations from a list; pass one captured state"):
        Patch("0", [])
    with pytest.raises(HooklineError, match=r"steer: vector has shape \(2, 2\)"):
        Steer("0", torch.ones(2, 2))


def test_a_custom_intervention() -> None:
    """A subclass defines only `change`; without it, the error says so."""

    class Clip(Intervention):
        name = "clip"

        def change(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clamp(max=0.1)

    model = make_model()
    changing(model, Clip("0"))
    torch.testing.assert_close(model(INPUT), rest(hidden().clamp(max=0.1)))
    with pytest.raises(NotImplementedError, match="must define change"):
        Intervention("0").change("0", INPUT)


# ---- in a config -----------------------------------------------------------------------------------------------------

LISTED: list[tuple[dict[str, Any], Callable[[Any], Any]]] = [
    ({"name": "ablate"}, torch.zeros_like),
    ({"name": "ablate", "to": "mean", "units": [1]}, lambda x: torch.stack([x[:, 0], x[:, 1].mean().expand(3)], 1)),
    ({"name": "add_activation", "value": 2}, lambda x: x + 2),
    ({"name": "add_activation", "value": [1, 2.5]}, lambda x: x + torch.tensor([1, 2.5])),
    ({"name": "replace_activation", "value": 0.5}, lambda x: torch.full_like(x, 0.5)),
    ({"name": "scale_activation", "factor": 3.0}, lambda x: x * 3),
    ({"name": "steer", "vector": [1.0, 0.0], "strength": 4, "positions": 0}, lambda x: x + torch.eye(3)[:, :1] * 4 * X),
]
X = torch.tensor([[1.0, 0.0]])


@pytest.mark.parametrize(("entry", "expected"), LISTED, ids=[str(entry) for entry, _ in LISTED])
def test_a_config_names_them(entry: dict[str, Any], expected: Callable[[Any], Any]) -> None:
    """Lists and numbers are their parameters, and the config's name is the instance's."""
    model, given = nn.Sequential(nn.Identity()), torch.arange(6.0).reshape(3, 2)
    manager = HookManager({"forward": [{**entry, "modules": "0"}]}, enable_intervention=True)
    manager.watch(model)
    assert torch.equal(model(given), expected(given))
    (hook,) = manager.list_hooks()[:1]
    assert hook.name == entry["name"] and hook.intervenes


def test_a_config_needs_the_switch_too() -> None:
    """The message says where the switch is."""
    with pytest.raises(HooklineError, match=r"hooks\.forward\.0: 'ablate' intervenes, .* under `trainer:`"):
        HookManager({"forward": [{"name": "ablate", "modules": "*"}]})


def test_no_name_of_an_intervention_is_one_of_a_gradient_transform() -> None:
    """A name means one thing, among classes as in configs; the first name of one class stays importable."""
    import hookline.activations.interventions as ours
    import hookline.gradients.transforms as others
    from hookline.core.plugins import HOOKS

    classes = [one for one in vars(ours).values() if isinstance(one, type) and issubclass(one, Intervention)]
    assert not {one.__name__ for one in classes} & {name for name in dir(others) if not name.startswith("_")}
    assert {one.name for one in classes if one is not Intervention} <= set(HOOKS.built_in)
    assert Scale is ours.ScaleActivation


def test_a_patch_reads_what_a_capture_wrote(tmp_path: Path) -> None:
    """Of each module the last call, and the first floating-point tensor of its output."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with HookManager().capturing(model, "*", what="both") as cache:
        model(torch.zeros(3, 2))
        model(torch.ones(3, 2))
    path = cache.save(tmp_path / "states.safetensors")
    config = {"forward": [{"name": "patch", "modules": "0", "source": str(path)}]}
    manager = HookManager(config, enable_intervention=True)
    manager.watch(model)
    assert torch.equal(model(torch.full((3, 2), 7.0)), cache["1"])


def test_a_file_without_outputs_is_refused(tmp_path: Path) -> None:
    """One that does not exist, is something else, or has only inputs."""
    from safetensors.torch import save_file

    save_file({"0/1/inputs/0": torch.ones(2), "other": torch.ones(2)}, tmp_path / "inputs")
    (tmp_path / "text").write_text("no tensors")
    problems = {"missing": "cannot read", "text": "cannot read", "inputs": "has no captured outputs"}
    for name, problem in problems.items():
        with pytest.raises(HooklineError, match=problem):
            Patch("0", str(tmp_path / name))

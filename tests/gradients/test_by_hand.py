"""Update hooks without a trainer: gradients are passed to a registry or a runner, which returns the new ones."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hookline import HooklineError, HookManager, HookRegistry, HookRunner, UpdateHook
from hookline.errors import GradientError, MissingArgument
from hookline.gradients.chain import UpdateChain
from hookline.hooks import BUILT_IN
from hookline.testing import small_trainer

Grads = dict[str, torch.Tensor]


class Double(UpdateHook):
    """Return twice the gradients, with a default for an argument that a loop may pass."""

    def on_update(self, grads: Any, step: int, model: Any = "none") -> Any:
        self.step, self.model = step, model
        return {name: 2 * gradient for name, gradient in grads.items()}


class Momentum(UpdateHook):
    """An update hook with state."""

    def init(self, params: Any) -> dict[str, Any]:
        return {name: torch.zeros_like(param) for name, param in params.items()}

    def on_update(self, grads: Any, state: Any) -> Any:
        for name, gradient in grads.items():
            state[name] = state[name] + gradient
        return {name: state[name] for name in grads}


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    model(torch.randn(2, 3)).square().sum().backward()
    return model


def gradients(model: torch.nn.Module) -> Grads:
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.req("000-44")
@pytest.mark.parametrize("kind", [HookRegistry, HookRunner, HookManager])
def test_the_transformed_gradients_are_returned(kind: type[HookRegistry]) -> None:
    """In order, hook after hook; without update hooks they come back as they were."""
    registry, grads = kind(), {"a": torch.ones(2), "b": torch.full((3,), 2.0)}
    assert registry.on_update(grads) is grads
    registry.register(Double())
    registry.register("clip_value", max_value=3.0)
    made = registry.on_update(grads, step=4)
    assert {name: grad.tolist() for name, grad in made.items()} == {"a": [2.0] * 2, "b": [3.0] * 3}
    assert registry.get("double").step == 4 and grads["b"].tolist() == [2.0] * 3
    assert registry.get("double").model == "none"
    registry.on_step_end()
    registry.on_update(grads=grads)
    assert registry.get("double").step == 5


PARAMETERS: dict[str, dict[str, Any]] = {
    "clip_norm": {"max_norm": 0.5},
    "clip_value": {"max_value": 0.1},
    "freeze": {"params": "*.bias"},
    "mask": {"params": "0.*"},
    "scale": {"factor": 0.5},
}
TRANSFORMS = sorted(name for name, place in BUILT_IN.items() if ".transforms:" in place)


@pytest.mark.req("000-44")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_built_in_transform_gives_what_a_trainer_gives(name: str) -> None:
    """Bit for bit the gradients of a trainer's chain, for several steps, so that states count, too."""
    runner, model = HookRunner(), make_model()
    runner.register(name, **PARAMETERS.get(name, {}))
    registry, reference = HookRegistry(), make_model()
    UpdateChain(registry, dict(reference.named_parameters()), reference)
    registry.register(name, **PARAMETERS.get(name, {}))
    for step in range(1, 4):
        torch.manual_seed(step)
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            param.grad = torch.randn_like(param)
            other.grad = param.grad.clone()
        torch.manual_seed(step)
        made = runner.on_update({key: param.grad for key, param in model.named_parameters()}, model=model, step=step)
        torch.manual_seed(step)
        registry.on_update(step=step, trainer=SimpleNamespace(log=lambda name, value, **_: None))
        for key, param in reference.named_parameters():
            assert (made[key] is None and param.grad is None) or torch.equal(made[key], param.grad), key


def test_states_last_and_new_names_join() -> None:
    """A hook's memory is kept between calls; a gradient that is missing once is not forgotten."""
    runner = HookRunner([Momentum()])
    assert runner.on_update({"a": torch.ones(1)})["a"].item() == 1
    assert runner.on_update({"b": torch.ones(2), "a": None}).keys() == {"a", "b"}
    made = runner.on_update({"a": torch.ones(1), "b": torch.ones(2)})
    assert made["a"].tolist() == [2.0] and made["b"].tolist() == [2.0, 2.0]


def test_with_a_model_its_parameters_get_the_gradients() -> None:
    """Hooks may then select by modules and read weights; without one they are refused with the remedy."""
    model, runner = make_model(), HookRunner()
    runner.register("scale", factor=0.0, params="class:LayerNorm")
    runner.register("clip_adaptive")
    grads = gradients(model)
    with pytest.raises(HooklineError, match="pass model=…"):
        runner.on_update(grads)
    made = runner.on_update(grads, model=model)
    assert not made["1.weight"].any() and made["0.weight"].any()
    assert all(param.grad is made[name] for name, param in model.named_parameters())
    runner.remove("scale")
    with pytest.raises(MissingArgument, match=r"'clip_adaptive' reads weights.*pass model=…"):
        runner.on_update(grads)
    with pytest.raises(GradientError, match=r"'0\.wight' is not a parameter here; did you mean '0\.weight'"):
        runner.on_update({"0.wight": torch.ones(4, 3)}, model=model)


@pytest.mark.parametrize("plain", [True, False])
def test_a_wrapped_model_has_plain_names(plain: bool) -> None:
    """Gradients may be passed under either name and are returned under the same; patterns use the plain one."""
    model, runner = make_model(), HookRunner()
    runner.register("scale", factor=0.0, params="1.*")
    wrapped = torch.compile(model, backend="eager")
    named = {(name if plain else f"_orig_mod.{name}"): grad for name, grad in gradients(model).items()}
    made = runner.on_update(named, model=wrapped)
    assert list(made) == list(named)
    for name, gradient in made.items():
        assert gradient.any() != name.removeprefix("_orig_mod.").startswith("1."), name
    assert all(param.grad is made[name if plain else f"_orig_mod.{name}"] for name, param in model.named_parameters())
    with pytest.raises(GradientError, match=r"'0\.wight' is not a parameter here; did you mean '0\.weight'"):
        runner.on_update({"_orig_mod.0.wight": torch.ones(4, 3)}, model=wrapped)


def test_a_module_may_have_the_name_of_a_wrappers_attribute() -> None:
    """A name that the model has is not shortened."""
    model, runner = torch.nn.Sequential(), HookRunner([Double()])
    model.add_module("_orig_mod", torch.nn.Linear(1, 1, bias=False))
    grads = {"_orig_mod.weight": torch.ones(1, 1)}
    assert runner.on_update(grads, model=torch.compile(model, backend="eager"))["_orig_mod.weight"].item() == 2


def test_clipping_is_announced_by_hand_too() -> None:
    """on_gradient_clip follows with the norm before clipping, and with defaults for what the loop does not pass."""
    norms: list[float] = []
    runner = HookRunner()
    runner.register("clip_norm", max_norm=1.0)
    runner.on("gradient_clip")(lambda grad_norm, trainer=None, batch=0, loss=0: norms.append(grad_norm + batch + loss))
    runner.on_update({"a": torch.tensor([3.0, 4.0])})
    assert norms == [5.0]
    runner.on("gradient_clip", name="insists")(lambda batch: None)
    with pytest.raises(MissingArgument, match="on_gradient_clip: 'insists' names 'batch'"):
        runner.on_update({"a": torch.tensor([3.0, 4.0])})


def test_a_skipped_step_returns_no_gradients() -> None:
    """No optimizer moves a parameter without one, also of a model that was passed; a trainer of the user's is asked."""
    runner, model, bad = HookRunner(), torch.nn.Linear(1, 1, bias=False), torch.tensor([[float("nan")]])
    runner.register("skip_nonfinite")
    assert runner.on_update({"weight": torch.ones(1, 1)}, model=model)["weight"].item() == 1.0
    assert runner.on_update({"weight": bad}, model=model) == {"weight": None} and model.weight.grad is None
    assert runner.run.skipped_steps == 1
    assert runner.on_update({"weight": torch.ones(1, 1)}, model=model)["weight"].item() == 1.0
    reasons: list[str] = []
    assert runner.on_update({"weight": bad}, trainer=SimpleNamespace(skip_step=reasons.append))["weight"] is bad
    assert reasons == ["non-finite gradients"]


def test_a_step_is_skipped_by_hand_in_on_update_only() -> None:
    """No other event returns anything by which the loop could learn of it."""
    runner = HookRunner()
    runner.on("gradients_ready", name="guard", on_error="raise")(lambda trainer: trainer.skip_step("a bad batch"))
    with pytest.raises(MissingArgument, match=r"guard asks to skip the step \(a bad batch\).* only in on_update"):
        runner.on_gradients_ready(step=1)


def test_a_trainers_registry_uses_the_trainers_parameters() -> None:
    """The chain is the trainer's, so that patterns and states are those of the run."""
    trainer = small_trainer()
    trainer.add_hook("scale", factor=0.5)
    name, param = next(iter(trainer.model.named_parameters()))
    made = trainer.hooks.on_update({name: torch.ones_like(param)})
    assert list(made) == [name] and made[name] is param.grad and made[name].unique().tolist() == [0.5]


@pytest.mark.parametrize("grads", [[torch.ones(1)], {"a": 1.0}, torch.ones(2)])
def test_what_is_no_mapping_of_tensors_is_refused(grads: Any) -> None:
    """One clear error; a call without gradients is the caller's error as well."""
    runner = HookRunner([Double()])
    with pytest.raises(GradientError, match="a mapping of parameter name to tensor"):
        runner.on_update(grads)
    with pytest.raises(MissingArgument, match="pass the gradients by parameter name"):
        runner.on_update()


def test_the_gradients_are_not_kept_alive() -> None:
    """After the call nothing of the runner holds them."""
    runner = HookRunner()
    runner.register("scale", factor=2.0)  # in place, so that the gradient itself is returned
    gradient = torch.ones(3)
    reference = weakref.ref(gradient)
    assert runner.on_update({"a": gradient})["a"] is gradient
    del gradient
    assert reference() is None

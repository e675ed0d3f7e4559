"""Parts that a config names."""

from typing import Any

import pytest
import torch

from hookline import jobs
from hookline.config.references import Resolved
from hookline.errors import ConfigError, HooklineError
from hookline.jobs.components import Component, check_name, find_factory
from hookline.registry.loading import Gate
from hookline.registry.names import MODELS, load_reference


def thing(first: Any, width: int, depth: int = 1, vocab_size: int = 0) -> tuple[Any, ...]:
    """A factory with one of everything."""
    if depth < 0:
        raise HooklineError("depth is negative")
    return first, width + 0, depth, vocab_size


def make(parameters: dict[str, Any], **offered: Any) -> Any:
    """What the component makes of these parameters."""
    return Component("model", "thing", thing, parameters).make("f", **offered)


@pytest.mark.parametrize("table", [jobs.MODELS, jobs.DATA, jobs.OPTIMIZERS, jobs.SCHEDULERS, jobs.LOSSES])
def test_every_row_leads_to_a_factory(table: dict[str, str]) -> None:
    """Each built-in name can be imported and called."""
    assert table
    assert all(callable(load_reference(reference)) for reference in table.values())


def test_offers_fill_what_is_left_out() -> None:
    """What the factory has and the config left out is offered; what the config says wins; the rest is dropped."""
    assert make({"width": 3}, vocab_size=9, unknown=1) == ("f", 3, 1, 9)
    assert make({"width": 3, "vocab_size": 4}, vocab_size=9) == ("f", 3, 1, 4)


@pytest.mark.parametrize(
    ("parameters", "path", "words"),
    [
        ({"width": 1, "dpeth": 2}, "model.dpeth", "did you mean 'depth'"),
        ({}, "model.width", "missing"),
        ({"width": "x"}, "model", "thing cannot be made with width='x': "),
        ({"width": 1, "depth": -1}, "model", "depth is negative"),
        ({"width": 1, "first": 2}, "model.first", "no such parameter"),
    ],
)
def test_wrong_parameters(parameters: dict[str, Any], path: str, words: str) -> None:
    """A parameter that is unknown, missing or refused is named with its path."""
    with pytest.raises(ConfigError) as caught:
        make(parameters)
    assert caught.value.path == path
    assert words in caught.value.problem


def test_torch_s_complaint_is_told_without_secrets() -> None:
    """What torch raises comes with the parameters, of which a resolved reference is shown as the reference."""

    def fail(**given: Any) -> Any:
        raise RuntimeError("negative dimension")

    with pytest.raises(ConfigError, match=r"model: m cannot be made with a=-1, b='\$\{env:B\}': negative dimension"):
        Component("model", "m", fail, {"a": -1, "b": Resolved("hunter2", "${env:B}")}).make()
    with pytest.raises(ConfigError, match="model: m cannot be made with its defaults: negative"):
        Component("model", "m", fail, {}).make()


def test_a_factory_that_takes_anything() -> None:
    """`**kwargs` accepts every parameter."""
    assert Component("data", "dict", lambda **given: given, {"a": 1}).make() == {"a": 1}


def test_dotted_paths_are_for_code() -> None:
    """A dotted path is fine in code, and in a file only under an allowed prefix; a miss names the nearest."""
    check_name("torch.nn.Linear", MODELS, Gate((), False), "model.name")
    check_name("torch.nn.Linear", MODELS, Gate(("torch.nn",), True), "model.name")
    assert find_factory("torch.nn.Linear", MODELS, "model") is torch.nn.Linear
    with pytest.raises(ConfigError, match="not allowed"):
        check_name("torch.nn.Linear", MODELS, Gate(("tor",), True), "model.name")
    with pytest.raises(ConfigError, match=r"did you mean 'char_gpt'.*--import MODULE"):
        check_name("chr_gpt", MODELS, Gate((), True), "model.name")
    with pytest.raises(ConfigError, match=r"model.name: .*no 'Linea'"):
        find_factory("torch.nn.Linea", MODELS, "model")

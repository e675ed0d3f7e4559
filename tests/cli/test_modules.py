"""`hookline modules`: names, classes, parameters and shapes of a config's model, and what a pattern selects."""

import json
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Captured, error_of, json_of
from torch import nn

from hookline import register_model
from hookline.cli import main

SMALL = """
model: {name: char_gpt, context: 16, width: 8, heads: 2, layers: 2}
data: {name: stdlib_text, context: 16, batch_size: 2, max_bytes: 60000}
optimizer: {name: sgd, lr: 1e-2}
trainer: {max_steps: 2, compile: true}
hooks:
  forward: [{name: activation_stats, modules: "no.such.module"}]
"""


@pytest.fixture(autouse=True)
def small_config() -> None:
    """Write a config whose hooks have wrong patterns."""
    Path("small.yaml").write_text(SMALL, encoding="utf-8")


def printed(capsys: Captured, *words: str) -> list[str]:
    """Run the command, which must succeed, and return the lines it prints."""
    assert main(["modules", *words]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    lines: list[str] = out.splitlines()
    assert max(map(len, lines)) <= 80 and not [line for line in lines if line != line.rstrip()]
    return lines


@pytest.mark.req("003-02")
def test_every_module_with_class_parameters_and_shape(capsys: Captured) -> None:
    """Every module has a line, in the model's order; wrong patterns of the config's hooks do not matter here."""
    lines = printed(capsys, "small.yaml")
    assert lines[0].startswith("CharGPT  ") and lines[0].endswith(" parameters")
    assert lines[2].split() == ["module", "class", "parameters", "output"]
    assert lines[3].split()[:3] == ["(the", "model)", "CharGPT"] and "logits [2, 16, " in lines[3]
    (widen,) = [line for line in lines if line.startswith("blocks.1.mlp.widen ")]
    assert widen.split(maxsplit=3)[1:] == ["Linear", "288", "[2, 16, 32]"]
    (blocks,) = [line for line in lines if line.startswith("blocks ")]
    assert blocks.split()[-1] == "-" and lines[-1].startswith("'-': not called in this forward pass")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("pattern", "selected"),
    [
        ("blocks.*.mlp", ["blocks.0.mlp", "blocks.1.mlp"]),
        ("head", ["head"]),
        (r"re:blocks\.\d\.\w+_norm", [f"blocks.{i}.{kind}_norm" for i in (0, 1) for kind in ("attention", "mlp")]),
    ],
)
def test_a_pattern_selects_what_a_hook_would(capsys: Captured, pattern: str, selected: list[str]) -> None:
    """Exact names, globs and regular expressions select modules; the count of selected modules is printed."""
    lines = printed(capsys, "small.yaml", pattern)
    assert lines[1] == f"'{pattern}': {len(selected)} of 24 modules"
    assert [line.split()[0] for line in lines[4:]] == selected


def test_several_patterns_and_overrides(capsys: Captured) -> None:
    """Several patterns select what any of them matches; overrides change the model that is printed."""
    lines = printed(capsys, "head", "small.yaml", "model.width=16", "embed")
    assert [line.split()[0] for line in lines[4:]] == ["embed", "head"]
    assert lines[4].endswith("[2, 16, 16]")
    assert [line.split()[0] for line in printed(capsys, "small.yaml", "re:embed|x=")[4:]] == ["embed"]


def test_a_pattern_that_matches_nothing_names_the_nearest(capsys: Captured) -> None:
    """A pattern without a match, or a missing config, is one line on stderr and status 2."""
    error = error_of(capsys, ["modules", "small.yaml", "blocks.0.mpl"])
    assert error.startswith(
        "hookline: error: module pattern 'blocks.0.mpl' matches nothing; did you mean 'blocks.0.mlp' or "
    )
    assert "none.yaml: cannot be read" in error_of(capsys, ["modules", "none.yaml"])


def test_a_pattern_alone_uses_the_default_job(capsys: Captured) -> None:
    """Without a config file, patterns select modules of the default job's model."""
    lines = printed(capsys, "blocks.1", "data.max_bytes=60000")
    assert lines[4].split() == ["blocks.1", "Block", "198,272", "[16,", "64,", "128]"]


def test_json_has_the_same_content(capsys: Captured) -> None:
    """`--json` prints the same with dtypes; the root module has an empty name."""
    read = json_of(capsys, "modules", "small.yaml")
    assert (read["model"], read["not_run_because"], read["frozen"]) == ("CharGPT", None, 0)
    by_name = {module["name"]: module for module in read["modules"]}
    assert by_name[""]["output"]["loss"] == {"shape": [], "dtype": "float32"}
    assert by_name["blocks"] == {
        "name": "blocks", "class": "ModuleList", "parameters": 1744, "calls": 0, "output": None,
    }  # fmt: skip
    assert by_name[""]["parameters"] == read["parameters"]


def test_a_model_that_cannot_be_run_says_why(capsys: Captured) -> None:
    """Modules that ran before the failure have shapes; the others are listed without."""
    lines = printed(capsys, "small.yaml", "data.context=32")
    assert lines[1] == "Some shapes are unknown: the model could not be run on a batch of the data."
    assert lines[2] == "HooklineError: CharGPT: got 32 characters, but its limit is context=16"
    assert len(lines) == 5 + 24
    assert [line.split()[0] for line in lines[5:] if not line.endswith("-")] == ["embed"]


def test_modules_that_run_twice_and_frozen_parameters(capsys: Captured) -> None:
    """Calls are counted, a shared parameter counts once, and the model is left in train mode without hooks."""
    made: list[nn.Module] = []

    @register_model("twice")
    class Twice(nn.Module):
        def __init__(self, vocab_size: int) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocab_size, 4)
            self.turn, self.head = nn.Linear(4, 4), nn.Linear(4, vocab_size, bias=False)
            self.head.weight = self.embed.weight
            self.turn.bias.requires_grad_(False)
            made.append(self)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            assert not torch.is_grad_enabled() and not self.training
            logits = self.head(self.turn(self.turn(self.embed(input_ids))))
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    lines = printed(capsys, "small.yaml", "model={name: twice}")
    vocab = made[0].embed.num_embeddings
    assert lines[0] == f"Twice  {vocab * 4 + 20:,} parameters, 4 of them frozen"
    assert next(line for line in lines if line.startswith("turn ")).endswith("20  [2, 16, 4] (2 calls)")
    assert made[0].training and not any(module._forward_hooks for module in made[0].modules())


@dataclass
class Both:
    """An output that is a dataclass."""

    first: Any
    second: Any


Pair = namedtuple("Pair", "a b")


class BertSdpaSelfAttention(nn.Module):
    """A module with a long name and a given output."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self) -> Any:
        return self.output


class Shapes(nn.Module):
    """A model whose modules return these outputs."""

    def __init__(self, outputs: dict[str, Any]) -> None:
        super().__init__()
        self.leaves = [BertSdpaSelfAttention(output) for output in outputs.values()]
        for name, leaf in zip(outputs, self.leaves, strict=True):
            *above, last = name.split(".")
            place: nn.Module = self
            for part in above:
                if part not in place._modules:
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            place.add_module(last, leaf)
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for leaf in self.leaves:
            leaf()
        return {"loss": self.weight}


def test_outputs_are_formatted(capsys: Captured) -> None:
    """Tuples, named tuples, dicts, dataclasses and values without tensors are formatted."""
    tensor = torch.zeros(2, 3)
    outputs = {
        "nested": ((tensor, (tensor, tensor)), "([2, 3], ([2, 3], [2, 3]))"),
        "named": (Pair(tensor, None), "([2, 3], None)"),
        "dict": ({"x": tensor, "cache": object()}, "x [2, 3], cache object"),
        "both": (Both(tensor.bool(), 3), "first [2, 3], second int"),
    }
    register_model("shapes")(lambda vocab_size: Shapes({name: given for name, (given, _) in outputs.items()}))
    lines = printed(capsys, "small.yaml", "model={name: shapes}")
    for name, (_, expected) in outputs.items():
        (line,) = [line for line in lines if line.startswith(f"{name} ")]
        assert line.endswith(f"  0  {expected}")
    assert main(["modules", "--json", "small.yaml", "model={name: shapes}", "both"]) == 0
    (both,) = json.loads(capsys.readouterr().out)["modules"]
    assert both["output"] == {"first": {"shape": [2, 3], "dtype": "bool"}, "second": "int"}


def test_long_names_and_outputs_wrap_in_their_columns(capsys: Captured) -> None:
    """Nothing is cut off, and no line is wider than the terminal."""
    name = "bert.encoder.layer.0.attention.output.LayerNorm"
    shapes = ", ".join(f"state_{index} [16, 64]" for index in range(4))
    states = {f"state_{index}": torch.zeros(16, 64) for index in range(4)}
    register_model("long")(lambda vocab_size: Shapes({name: torch.zeros(16, 64, 768), "head": states}))
    lines = printed(capsys, "small.yaml", "model={name: long}", name, "head")[3:]
    first, second = lines[0].index("class"), lines[0].index("output")
    assert "".join(line[:first].rstrip() for line in lines[1:]) == f"{name}head"
    assert lines[1][first:].split() == ["BertSdpaSelfAttention", "0", "[16,", "64,", "768]"]
    assert " ".join(line[second:].strip() for line in lines[1:] if line[second:]).endswith(shapes)

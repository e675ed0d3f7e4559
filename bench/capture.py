"""Measure what capturing the outputs of all 64 modules of a tiny model costs, against its plain forward pass.

nnsight and TransformerLens are measured, too, where they are installed. TransformerLens has its own model, so it is
compared with that model's plain forward pass.
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from bench.interleave import Contender, Direct, close_all, interleave, on_one_core, standard_error_of_median
from bench.table import Table
from bench.turns import wanted
from hookline import HookManager
from hookline.activations.capture import Capture

TITLE = "Capturing all 64 modules of a tiny model"
COLUMNS = ("forward pass", "µs", "ratio to plain", "± s.e.", "µs more per module", "goal")
NOTES = [
    "Tiny: 16 x (LayerNorm, Linear 128-512, GELU, Linear 512-128), 32 rows.",
    "Small: the same, 64 wide, 8 rows; there, nnsight costs the same as when the goals were set, 2.1 to 2.3 x.",
    "Smallest: 32 x (Linear 16-16, ReLU), 8 rows.",
    "Ratio: median over the rounds of (time / plain time) in the same round. Gradients are recorded.",
    "Attach and remove: a `with manager.capturing(model)` around each forward pass.",
    "Even a torch hook that does nothing makes torch take the slower path when it calls a module.",
    "Compiler imported: torch._dynamo is loaded, which optimizers import, but has compiled nothing. Compiler used: it "
    "has compiled something, no matter what.",
    "TransformerLens: its own four-layer model, 64 wide, against the same model without a cache;"
    " version 3, because version 4 only creates models from weights that it downloads.",
    "nnsight keeps references, so later in-place writes by the model change what it holds. Hookline keeps "
    "copy-on-write views.",
]
MODULES = 64
Forward = Callable[[], object]


def blocks(width: int, rows: int) -> tuple[nn.Sequential, Tensor]:
    """Make sixteen times the second half of a transformer block."""
    torch.manual_seed(0)
    wide = 4 * width
    groups = [(nn.LayerNorm(width), nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width)) for _ in range(16)]
    return nn.Sequential(*(module for group in groups for module in group)), torch.randn(rows, width)


def smallest() -> tuple[nn.Sequential, Tensor]:
    """Make modules so small that they are hardly more than their own calls."""
    torch.manual_seed(0)
    return nn.Sequential(*(module for _ in range(32) for module in (nn.Linear(16, 16), nn.ReLU()))), torch.randn(8, 16)


def plain(model: nn.Module, batch: Tensor) -> Forward:
    """Run the model as it is; a manager that watches it without forward hooks puts nothing on it."""
    HookManager().watch(model)
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        raise AssertionError("a model without forward hooks carries a torch hook")
    return lambda: model(batch)


def torch_hook(model: nn.Module, batch: Tensor) -> Forward:
    """Put a torch hook that does nothing on every module."""
    for module in model.children():
        module.register_forward_hook(lambda module, inputs, output: None)
    return lambda: model(batch)


def attached(model: nn.Module, batch: Tensor, what: str = "output", enabled: bool = True) -> Forward:
    """Register a capture hook that stays."""
    manager = HookManager(max_captured_states=MODULES)
    manager.watch(model)
    manager.register(Capture("?*", what=what), enabled=enabled)
    return lambda: model(batch)


def both(model: nn.Module, batch: Tensor) -> Forward:
    """Capture inputs and outputs."""
    return attached(model, batch, "both")


def off(model: nn.Module, batch: Tensor) -> Forward:
    """Register a capture hook that is disabled."""
    return attached(model, batch, enabled=False)


def attach_and_remove(model: nn.Module, batch: Tensor) -> Forward:
    """Capture in a block around every forward pass."""
    manager = HookManager()

    def forward() -> None:
        with manager.capturing(model, "?*"):
            model(batch)

    return forward


def nnsight(model: nn.Module, batch: Tensor) -> Forward:
    """Do the same with nnsight."""
    from nnsight import NNsight

    traced = NNsight(model)

    def forward() -> None:
        with traced.trace(batch):
            kept = []
            for index in range(MODULES):
                kept.append(traced[index].output.save())

    return forward


def lens(cached: bool) -> Forward:
    """Run TransformerLens' own model, with or without its cache."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    torch.manual_seed(0)
    sizes = {"n_layers": 4, "d_model": 64, "n_ctx": 32, "d_head": 16, "n_heads": 4, "d_vocab": 64, "d_mlp": 256}
    model: Any = HookedTransformer(HookedTransformerConfig(**sizes, act_fn="gelu", device="cpu"))
    tokens = torch.randint(0, 64, (4, 32))
    return (lambda: model.run_with_cache(tokens)) if cached else (lambda: model(tokens))


ROWS: dict[str, Callable[[nn.Module, Tensor], Forward]] = {
    "plain": plain,
    "empty torch hooks": torch_hook,
    "registered and off": off,
    "outputs, attached": attached,
    "inputs and outputs, attached": both,
    "outputs, attach and remove": attach_and_remove,
    "outputs, nnsight": nnsight,
}
IMPORTED, USED = "small, compiler imported", "small, compiler used"
WITH_COMPILER = ["plain", "outputs, attached", "outputs, attach and remove"]
GOALS = {
    "small: plain": "no torch hook",
    "small: registered and off": "≤ 1.5 µs",
    "small: outputs, attached": "≤ 1.6 x, and ≤ 1.3 x empty torch hooks",
    "small: outputs, attach and remove": "≤ 3 x",
}
SIZES: dict[str, Callable[[], tuple[nn.Sequential, Tensor]]] = {
    "tiny": lambda: blocks(128, 32),
    "small": lambda: blocks(64, 8),
    "smallest": smallest,
}
Makers = dict[str, Callable[[], Forward]]


def our_makers(size: str, group: str, rows: Iterable[str]) -> Makers:
    """Return what builds the rows of one model."""
    model, batch = SIZES[size]()
    return {f"{group}: {name}": lambda name=name: ROWS[name](deepcopy(model), batch) for name in rows}  # type: ignore[misc]


def without_compiler() -> Makers:
    """Return our rows and nnsight's, for a process that has not imported a compiler."""
    makers: Makers = {}
    for size in SIZES:
        makers |= our_makers(size, size, ROWS)
    return makers


def with_compiler() -> Makers:
    """Return TransformerLens, which imports it, and ours again."""
    import torch._dynamo  # noqa: F401

    lenses = {"TransformerLens: plain": lambda: lens(cached=False), "TransformerLens: with cache": lambda: lens(True)}
    return our_makers("small", IMPORTED, WITH_COMPILER) | lenses


def with_compiled_code() -> Makers:
    """Return ours once more, after a compilation."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    return our_makers("small", USED, WITH_COMPILER)


def build(makers: Makers) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the contenders that could be built, and for the others why not."""
    contenders: dict[str, Contender] = {}
    missing: dict[str, str] = {}
    for key, maker in makers.items():
        try:
            forward = maker()
            forward()
            contenders[key] = Direct(forward)
        except ModuleNotFoundError:
            missing[key] = "not installed"
        except Exception as failure:  # one contender that fails must not cost the others their row
            missing[key] = f"failed: {failure}"
    return contenders, missing


def cells(key: str, seconds: dict[str, list[float]]) -> tuple[str, ...]:
    """Return one line of the table."""
    group, name = key.split(": ", 1)
    own, base = seconds[key], seconds[f"{group}: plain"]
    goal = GOALS.get(key, "")
    if own is base:
        return key, f"{median(own) * 1e6:.0f}", "1", "", "", goal
    ratios = [one / other for one, other in zip(own, base, strict=True)]
    more = median(one - other for one, other in zip(own, base, strict=True)) / MODULES * 1e6
    per_module = f"{more:.2f}" if name in ROWS else ""
    error = standard_error_of_median(ratios)
    return key, f"{median(own) * 1e6:.0f}", f"{median(ratios):.2f}", f"{error:.3f}", per_module, goal


def measure(rounds: int, only: list[str]) -> Table:
    """Run every contender side by side and tabulate them; those with a compiler after the others.

    `only` keeps the rows whose name contains one of its words, and the plain forward passes they are compared with.
    """
    torch.set_num_threads(1)
    rounds, lines, missing = max(rounds // 4, 50), [], {}
    for makers in (without_compiler, with_compiler, with_compiled_code):
        selected = {key: one for key, one in makers().items() if key.endswith(": plain") or wanted(key, only)}
        contenders, absent = build(selected)
        try:
            with on_one_core():
                seconds = interleave(contenders, rounds)
        finally:
            close_all(contenders)
        lines += [cells(key, seconds) for key in contenders]
        missing |= absent
    notes = [
        f"{rounds} rounds, one timed forward pass each.",
        *NOTES,
        *(f"{key}: {why}" for key, why in missing.items()),
    ]
    return Table(TITLE, COLUMNS, lines, notes)

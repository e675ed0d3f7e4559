"""What watching costs: statistics of every leaf module's output and of every gradient, at every step.

With a CUDA device the step of a GPT is timed with nobody watching, and with each way of watching in turn. Without one,
single tensors are timed against one read of them, and many small parameters against a loop over them.
"""

import gc
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.interleave import standard_error_of_median
from bench.table import Table
from hookline.activations.manager import HookManager
from hookline.activations.monitor import Monitor
from hookline.record.run_record import Record, RunRecord
from hookline.stats.collector import Collector
from hookline.stats.flush import Flush
from hookline.stats.histograms import histograms, percentiles
from hookline.stats.statistics import summarize

TITLE = "Statistics of activations and gradients"
COLUMNS = ("what is watched, and how", "time", "above or ratio", "± s.e.", "goal", "peak memory", "in no_grad")
GPU_NOTES = [
    "Six statistics: mean, std, absmax, zeros, NaNs, infinities; ours are ten. Every leaf module, every step.",
    "Pure bf16, batch 8 x 1024, fused AdamW. A turn is some steps between two synchronisations.",
    "Above: median over the rounds of (step / plain step - 1) in the same round.",
    "Ours ends with the copy to the host and with picking up what has arrived. With the record: the monitoring hook, "
    "whose rows end in layers.jsonl, written once every ten steps as the loop does.",
    "Peak memory: of a training step, and of an evaluation without gradients, above the plain one's.",
]
FLUSH_STEPS = 10
VOCABULARY = 50304  # GPT-2's 50257, rounded up as people do: matrix products are a third faster for it
MODELS = (("GPT-2 small", 768, 12, "≤ +5 %", 10), ("width 2048", 2048, 16, "≤ +3 %", 4))
CPU_NOTES = [
    "One torch thread. A read is tensor.sum(). The naive way is six torch operations, each brought over with item().",
    "Ratio: median over the rounds of (time / its baseline's time) in the same round.",
]


class Block(nn.Module):
    """One layer of a GPT: six leaf modules."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the two linear layers, each added to what came in."""
        batch, length, width = x.shape
        mixed = self.attend(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = mixed
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        widened = functional.gelu(self.widen(self.norm_2(x)), approximate="tanh")
        out: Tensor = x + self.narrow(widened)
        return out


class GPT(nn.Module):
    """GPT-2 without dropout: with twelve layers 75 leaf modules, whose outputs are 2.5 GB for a batch of 8 x 1024."""

    def __init__(
        self, width: int, heads: int, layers: int = 12, vocabulary: int = VOCABULARY, length: int = 1024
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


Hook = Callable[[nn.Module, Any, Tensor], None]


class Plain:
    """Nobody watches; the others are variations of this."""

    goal = ""

    def hook(self, name: str) -> Hook | None:
        """The forward hook of one leaf module, if this one looks at outputs."""
        return None

    def after_forward(self, step: int) -> None:
        """Hear that the forward pass is over."""

    def after_backward(self, step: int, gradients: list[Tensor]) -> None:
        """Get the gradients."""

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Keep the hooks on the leaf modules for a while."""
        leaves = [(name, module) for name, module in model.named_modules() if is_leaf(name, module)]
        hooks = [(module, hook) for name, module in leaves if (hook := self.hook(name))]
        handles = [module.register_forward_hook(hook) for module, hook in hooks]
        yield
        for handle in handles:
            handle.remove()


class NaiveOutputs(Plain):
    """Each statistic of each output brought over at once."""

    def hook(self, name: str) -> Hook:
        """Six operations, six waits."""
        return lambda module, inputs, output: void(naive(output.detach()))


class DeferredOutputs(Plain):
    """Torch operations while the model runs; one copy at the end."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.flush = Flush()

    def hook(self, name: str) -> Hook:
        """Six results that stay on the device."""
        return lambda module, inputs, output: self.seen.append(deferred(output.detach()))

    def after_forward(self, step: int) -> None:
        """Bring them over together."""
        self.flush.send(step, (), torch.stack(self.seen))
        self.seen.clear()
        void(list(self.flush.ready()))


class OurOutputs(Plain):
    """References gathered while the model runs, read in few launches."""

    def __init__(self, goal: str = "", **options: Any) -> None:
        self.goal = goal
        self.collector, self.flush = Collector(**options), Flush()

    def hook(self, name: str) -> Hook:
        """A note of the output."""
        add = self.collector.add
        return lambda module, inputs, output: add(name, output)

    def after_forward(self, step: int) -> None:
        """Read what waits, start the copy, pick up what has come."""
        self.flush.send(step, *self.collector.finish())
        void(list(self.flush.ready()))


class Recorder:
    """Stands for the trainer: a model, and a record to write to."""

    def __init__(self, model: nn.Module, record: Record) -> None:
        self.model, self.record = model, record
        self.params = dict(model.named_parameters())

    def log(self, name: str, value: float, step: int) -> None:
        """A number of the run."""
        self.record.log(step, 0, name, value)

    def log_layers(self, series: str, names: Sequence[str], columns: Sequence[str], values: Tensor, step: int) -> None:
        """Numbers of every layer."""
        self.record.layers(series, step, names, columns, values)


class OurMonitor(Plain):
    """The monitoring hook, told of a step's events as the loop tells it, with all that it writes."""

    def __init__(self, recorder: Recorder, goal: str) -> None:
        self.recorder, self.goal = recorder, goal
        self.monitor, self.manager = Monitor(is_leaf), HookManager()
        self.manager.tap.run.step = 1

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Keep the hook on the leaf modules for a while."""
        self.manager.watch(model)
        handle = self.manager.register(self.monitor, "monitor")
        self.monitor.on_train_batch_start()
        yield
        handle.remove()

    def after_forward(self, step: int) -> None:
        """The backward pass comes next, or nothing."""
        self.monitor.on_before_backward(self.recorder)

    def after_backward(self, step: int, gradients: list[Tensor]) -> None:
        """The step is as good as over; the next one begins."""
        self.monitor.on_step_end(self.recorder, step)
        if step % FLUSH_STEPS == 0:
            self.recorder.record.flush()
        self.manager.tap.run.step = step + 1
        self.monitor.on_train_batch_start()


class OurGradients(Plain):
    """Every gradient's statistics in one launch."""

    goal = "≤ +1.5 %"

    def __init__(self) -> None:
        self.flush = Flush()

    def after_backward(self, step: int, gradients: list[Tensor]) -> None:
        """Read, start the copy, pick up what has come."""
        self.flush.send(step, (), summarize(gradients))
        void(list(self.flush.ready()))


class OurHistograms(OurGradients):
    """Every gradient's statistics, histogram and percentiles."""

    goal = "≤ +4 %"

    def after_backward(self, step: int, gradients: list[Tensor]) -> None:
        """The same with the percentiles beside the statistics."""
        rows = summarize(gradients)
        points = percentiles(histograms(gradients, rows), [10, 50, 90])
        self.flush.send(step, (), torch.cat([rows, points], dim=1))
        void(list(self.flush.ready()))


class NaiveGradients(Plain):
    """Each statistic of each gradient brought over at once."""

    def after_backward(self, step: int, gradients: list[Tensor]) -> None:
        """Six operations and six waits per parameter."""
        for gradient in gradients:
            naive(gradient)


def is_leaf(name: str, module: nn.Module) -> bool:
    """Whether there is no module inside."""
    return not list(module.children())


def void(value: object) -> None:
    """Drop a value: what a forward hook returns would replace the module's output."""


def naive(tensor: Tensor) -> tuple[float, ...]:
    """The six statistics as one writes them without thinking of the cost."""
    wide = tensor.float()
    return (
        wide.mean().item(),
        wide.std().item(),
        wide.abs().max().item(),
        (wide == 0).sum().item(),
        wide.isnan().sum().item(),
        wide.isinf().sum().item(),
    )


def deferred(tensor: Tensor) -> Tensor:
    """The six statistics without waiting for any."""
    wide = tensor.float()
    std, mean = torch.std_mean(wide)
    return torch.stack([mean, std, wide.abs().amax(), (wide == 0).sum(), wide.isnan().sum(), wide.isinf().sum()])


def gpu_watchers(goal: str, recorder: Recorder) -> dict[str, Plain]:
    """Everybody who is timed on a GPU; the plain step first."""
    return {
        "plain step": Plain(),
        "outputs, naive with item()": NaiveOutputs(),
        "outputs, deferred torch operations": DeferredOutputs(),
        "outputs, Hookline": OurOutputs(goal),
        "outputs with the record, Hookline": OurMonitor(recorder, goal),
        "outputs, Hookline without a limit": OurOutputs(limit_bytes=1 << 62),
        "gradients, naive with item()": NaiveGradients(),
        "gradients, Hookline": OurGradients(),
        "gradients with percentiles, Hookline": OurHistograms(),
    }


class Training:
    """A model in training on the GPU, one step at a call."""

    def __init__(self, width: int, heads: int, batch: int = 8, length: int = 1024) -> None:
        torch.manual_seed(0)
        self.model = GPT(width, heads, length=length).to("cuda", torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(VOCABULARY, (batch, length + 1), device="cuda")
        self.steps_made = 0

    def step(self, watcher: Plain) -> None:
        """Forward, loss, backward, optimizer."""
        self.steps_made += 1
        logits = self.model(self.tokens[:, :-1])
        watcher.after_forward(self.steps_made)
        loss = functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        watcher.after_backward(self.steps_made, gradients)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self, watcher: Plain) -> None:
        """A forward pass without gradients."""
        with torch.no_grad():
            self.model(self.tokens[:, :-1])
            watcher.after_forward(0)

    def seconds(self, watcher: Plain, steps: int) -> float:
        """Seconds per step, over some steps between two synchronisations, after two that are not timed."""
        with watcher.watching(self.model):
            for _ in range(2):
                self.step(watcher)
            torch.cuda.synchronize()
            began = perf_counter()
            for _ in range(steps):
                self.step(watcher)
            torch.cuda.synchronize()
            return (perf_counter() - began) / steps

    def peak(self, watcher: Plain, run: Callable[[Plain], None]) -> int:
        """The most bytes allocated at once."""
        with watcher.watching(self.model):
            run(watcher)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            run(watcher)
            torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


def on_gpu(rounds: int, only: list[str]) -> Iterator[tuple[str, ...]]:
    """The rows of both models."""
    for title, width, heads, goal, steps in MODELS:
        with TemporaryDirectory() as root:
            yield from rows_of_model(title, Training(width, heads), goal, steps, root, rounds, only)
        torch.cuda.empty_cache()


def rows_of_model(
    title: str, training: Training, goal: str, steps: int, root: str, rounds: int, only: list[str]
) -> Iterator[tuple[str, ...]]:
    """One row per watcher, timed in turn."""
    record = RunRecord.create(root, config={}, seed=None)
    everybody = gpu_watchers(goal, Recorder(training.model, record))
    watchers = {name: who for name, who in everybody.items() if wanted(name, only) or name == "plain step"}
    runs = {name: partial(training.seconds, who, steps) for name, who in watchers.items()}
    seconds = in_turn(runs, max(rounds // 100, 3))
    train = {name: training.peak(who, training.step) for name, who in watchers.items()}
    evaluate = {name: training.peak(who, training.evaluate) for name, who in watchers.items()}
    record.close("completed", None, [], [], {})
    for name, who in watchers.items():
        timing = above(seconds[name], seconds["plain step"])
        memory = [f"{peaks[name] / peaks['plain step'] - 1:+.1%}" for peaks in (train, evaluate)]
        yield f"{title}: {name}", f"{median(seconds[name]) * 1e3:.2f} ms", *timing, who.goal, *memory


def wanted(name: str, only: list[str]) -> bool:
    """Whether a row was asked for."""
    return not only or any(word.lower() in name.lower() for word in only)


def above(values: list[float], baseline: list[float]) -> tuple[str, str]:
    """The median of the paired ratios less one, and its standard error."""
    ratios = [value / base - 1 for value, base in zip(values, baseline, strict=True)]
    return f"{median(ratios):+.1%}", f"{standard_error_of_median(ratios):.1%}"


def in_turn(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, in a new order every round."""
    order, shuffle = list(runs), random.Random(0).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in order}
    for name in order:
        runs[name]()
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            seconds[name].append(runs[name]())
    gc.enable()
    return seconds


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = perf_counter()
    call()
    return perf_counter() - began


def on_cpu(rounds: int, only: list[str]) -> Iterator[tuple[str, ...]]:
    """Single tensors against one read, small parameters against a loop over them."""
    torch.set_num_threads(1)
    for dtype, megabytes in ((torch.float32, 4), (torch.float32, 64), (torch.bfloat16, 4), (torch.bfloat16, 64)):
        name = f"{megabytes} MB of {str(dtype).removeprefix('torch.')}"
        if wanted(name, only):
            yield from large_tensor(name, torch.randn(megabytes * 2**20 // dtype.itemsize).to(dtype), rounds)
    for size in (64, 1024, 4096):
        if wanted("parameters", only):
            yield from many_parameters(f"500 parameters of {size}", [torch.randn(size) for _ in range(500)], rounds)


def large_tensor(name: str, tensor: Tensor, rounds: int) -> Iterator[tuple[str, ...]]:
    """One read, the naive way and ours."""
    calls: Mapping[str, Callable[[], object]] = {
        "one read": tensor.sum,
        "naive": partial(naive, tensor),
        "Hookline": partial(summarize, [tensor]),
    }
    yield from ratios(name, calls, rounds, "≤ 6 x")


def many_parameters(name: str, parameters: list[Tensor], rounds: int) -> Iterator[tuple[str, ...]]:
    """A loop over them, and ours."""
    calls: dict[str, Callable[[], object]] = {
        "naive": lambda: [naive(parameter) for parameter in parameters],
        "Hookline": lambda: summarize(parameters),
    }
    yield from ratios(name, calls, rounds, "≤ 0.125 x")


def ratios(name: str, calls: Mapping[str, Callable[[], object]], rounds: int, goal: str) -> Iterator[tuple[str, ...]]:
    """One row per call, as multiples of the first."""
    seconds = in_turn({key: partial(seconds_of, call) for key, call in calls.items()}, max(rounds // 50, 5))
    first = next(iter(seconds.values()))
    for key, values in seconds.items():
        paired = [value / base for value, base in zip(values, first, strict=True)]
        timing = f"{median(values) * 1e3:.2f} ms", f"{median(paired):.2f} x", f"{standard_error_of_median(paired):.2f}"
        yield f"{name}: {key}", *timing, goal if key == "Hookline" else "", "", ""


def measure(rounds: int, only: list[str]) -> Table:
    """The table for the device at hand; `only` keeps the rows whose name contains one of its words."""
    if torch.cuda.is_available():
        return Table(f"{TITLE}, {torch.cuda.get_device_name()}", COLUMNS, list(on_gpu(rounds, only)), GPU_NOTES)
    return Table(f"{TITLE}, CPU", COLUMNS, list(on_cpu(rounds, only)), CPU_NOTES)

"""Ways of watching a model's outputs and gradients: the obvious one, the best with torch alone, and ours."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bench.watched import FLUSH_STEPS, Hook, Plain, Recorder, is_leaf
from hookline import HookManager
from hookline.activations.monitor import Monitor
from hookline.stats.collector import HostQueue, StepCollector
from hookline.stats.histograms import histograms, percentiles
from hookline.stats.rows import summarize


def naive(tensor: Tensor) -> tuple[float, ...]:
    """Return the six statistics as one writes them without thinking of the cost."""
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
    """Return the six statistics without waiting for any."""
    wide = tensor.float()
    std, mean = torch.std_mean(wide)
    return torch.stack([mean, std, wide.abs().amax(), (wide == 0).sum(), wide.isnan().sum(), wide.isinf().sum()])


class NaiveOutputs(Plain):
    """Copies each statistic of each output to the host at once."""

    def hook(self, name: str) -> Hook:
        """Return a hook of six operations and six waits."""
        return lambda module, inputs, output: void(naive(output.detach()))


class DeferredOutputs(Plain):
    """Runs torch operations with the model, and one copy at the end."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.flush = HostQueue()

    def hook(self, name: str) -> Hook:
        """Return a hook whose six results stay on the device."""
        return lambda module, inputs, output: self.seen.append(deferred(output.detach()))

    def after_forward(self, step: int) -> None:
        """Copy them to the host together."""
        self.flush.send(step, (), torch.stack(self.seen))
        self.seen.clear()
        void(list(self.flush.ready()))


class OurOutputs(Plain):
    """Collects references while the model runs, and reads them in few launches."""

    def __init__(self, goal: str = "", limit_bytes: int = StepCollector.limit_bytes) -> None:
        self.goal, self.step = goal, 1
        self.collector = StepCollector()
        self.collector.limit_bytes = limit_bytes

    def hook(self, name: str) -> Hook:
        """Return a hook that collects the output."""
        add = self.collector.add
        return lambda module, inputs, output: add(name, output, self.step)

    def after_forward(self, step: int) -> None:
        """Read what was collected, start the copy, and take what has arrived."""
        self.collector.end_step(self.step)
        self.step += 1
        void(list(self.collector.ready()))


class OurMonitor(Plain):
    """The monitoring hook, called at the events of a step as the loop does, with all that it writes."""

    def __init__(self, recorder: Recorder, goal: str) -> None:
        self.recorder, self.goal = recorder, goal
        self.monitor, self.manager = Monitor(is_leaf), HookManager()
        self.manager.dispatcher.run.step = 1

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Keep the hook on the leaf modules inside the block."""
        self.manager.watch(model)
        handle = self.manager.register(self.monitor, "monitor")
        self.monitor.on_train_batch_start()
        yield
        handle.remove()

    def after_forward(self, step: int) -> None:
        """Call the hook before the backward pass."""
        self.monitor.on_before_backward()

    def after_backward(self, step: int, gradients: list[Tensor]) -> None:
        """End the step, and begin the next one."""
        self.monitor.on_step_end(step, self.recorder)
        if step % FLUSH_STEPS == 0:
            self.recorder.record.flush()
        self.manager.dispatcher.run.step = step + 1
        self.monitor.on_train_batch_start()


class OurGradients(Plain):
    """Computes the statistics of all gradients in one launch."""

    goal = "≤ +1.5 %"

    def __init__(self) -> None:
        self.flush = HostQueue()

    def after_backward(self, step: int, gradients: list[Tensor]) -> None:
        """Read, start the copy, and take what has arrived."""
        self.flush.send(step, (), summarize(gradients))
        void(list(self.flush.ready()))


class OurHistograms(OurGradients):
    """Computes statistics, histograms and percentiles of all gradients."""

    goal = "≤ +4 %"

    def after_backward(self, step: int, gradients: list[Tensor]) -> None:
        """Do the same with the percentiles next to the statistics."""
        rows = summarize(gradients)
        points = percentiles(histograms(gradients, rows), [10, 50, 90])
        self.flush.send(step, (), torch.cat([rows, points], dim=1))
        void(list(self.flush.ready()))


class NaiveGradients(Plain):
    """Copies each statistic of each gradient to the host at once."""

    def after_backward(self, step: int, gradients: list[Tensor]) -> None:
        """Run six operations and six waits per parameter."""
        for gradient in gradients:
            naive(gradient)


def void(value: object) -> None:
    """Drop a value: what a forward hook returns would replace the module's output."""

"""The direct way through a module whose only torch hook is ours.

A module with any torch hook takes a longer way through `nn.Module.__call__`, which alone costs as much as a capture.
Before that, it looks whether it has a compiled call, which ``module.compile()`` would have given it. Until something is
compiled, our own stands there: it does what torch would do, and leaves the call to torch whenever a module has another
hook as well. The torch hook itself is on the module all the time, for torch and for everybody who looks.

Torch leaves a compiled call out when it copies or pickles a module, and ours leaves itself out where others copy, as
our torch hook does: nobody watches a copy.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _current_graph_task_id, _set_grad_enabled
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.compiler import is_dynamo_compiling
from torch.jit import _trace as tracing
from torch.nn.modules import module as torch_module

from hookline.activations.captured import CallNumbers, Origin, Record, this_thread
from hookline.activations.compiled import never_a_frame_of_its_own
from hookline.activations.first_compile import before_the_first, has_begun
from hookline.events.dispatch import Fired

if TYPE_CHECKING:  # a site has a direct way, which a tap opens
    from hookline.activations.site import Site
    from hookline.activations.tap import Tap

PLACE = "_compiled_call_impl"
NOT_IN_BACKWARD = -1
PACE = 16  # calls of a module that are counted together towards the next clean-up
TORCHS_WAY = torch.nn.Module._call_impl
TORCHS_COPY = torch.nn.Module.__getstate__

_behind_all, _before_all = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
_backward_all, _before_backward_all = torch_module._global_backward_hooks, torch_module._global_backward_pre_hooks


# ---- who hears a module ----------------------------------------------------------------------------------------------

Keep = Callable[[Any, Any, Any], None]
"""Keeps what a call of a module got and gave: inputs, keyword inputs, output."""


class Recorder(partial[None]):
    """Keeps outputs of one module as records. Called, it does so for any output; a direct call does it by itself."""

    origin: Origin
    numbers: CallNumbers
    put: Callable[[Record], None]

    @classmethod
    def of(cls, keep: Keep, origin: Origin, numbers: CallNumbers, put: Callable[[Record], None]) -> Recorder:
        """One that is called as `keep`."""
        made = cls(keep)
        made.origin, made.numbers, made.put = origin, numbers, put
        return made


class Told(Protocol):
    """Who hears a module."""

    keep: Keep
    functions: Sequence[Any]  # what `keep` consists of

    def failed(
        self, error: Exception, site: Site, module: torch.nn.Module, inputs: Any, kwargs: Any, output: Any
    ) -> None:
        """What is called when `keep` raises."""


# ---- when ------------------------------------------------------------------------------------------------------------


def is_open() -> bool:
    """Whether modules may be called directly now.

    Not once something has been compiled. And not where `DataParallel` may be at work, which copies modules in a way of
    its own: it needs several GPUs in one process.
    """
    return not has_begun() and (torch.cuda.device_count() < 2 or _is_one_of_many())


def _is_one_of_many() -> bool:
    """Whether this process works on one of the GPUs, as others do on the rest."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def can_take(module: torch.nn.Module) -> bool:
    """Whether a module is called and copied as torch does it."""
    kind = type(module)
    return (
        kind._call_impl is TORCHS_WAY
        and kind.__getstate__ is TORCHS_COPY
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and not hasattr(kind, "__copy__")
        and not hasattr(kind, "__deepcopy__")
        and not isinstance(module, torch.jit.ScriptModule)
    )


# ---- the call --------------------------------------------------------------------------------------------------------


class DirectCall(partial[Any]):
    """A call that no copy takes along: it would run the original there. (Costs less than a class with `__call__`.)"""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy is called by torch; so is one from a pickle."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def direct_calls(told: Mapping[Site, Told], told_by: Fired, tap: Tap) -> dict[Site, DirectCall]:
    """Call modules directly whose hooks have a shorter way, as long as `told_by` is the callable of `on_forward`."""
    if not is_open():
        return {}
    functions = [_function_of(keep) for one in told.values() for keep in one.functions]
    for function in {id(function.__code__): function for function in functions}.values():
        never_a_frame_of_its_own(function)  # a module may run compiled below; who hears it may not
    calls = {site: direct_call(site, hook, told_by, tap) for site, hook in told.items()}
    for site, call in calls.items():
        site.be_called(call)
    return calls


def _function_of(keep: Any) -> Any:
    return keep.func if isinstance(keep, partial) else keep


def direct_call(site: Site, told: Told, told_by: Fired, tap: Tap) -> DirectCall:
    """What stands in the place of a compiled call.

    It runs between the operations of the model, when nothing of it is in the processor's caches: each bytecode costs
    several times the usual, and each C function more. So it is one function, and records are made in it.
    """
    module_ref, key, hear, fire = site.module_ref, site.key, site.hear, tap.registry.fire
    keep, failed, pace = told.keep, told.failed, max(1, min(PACE, tap.cleanup_interval))
    origin: Any = None
    numbers: Any = None
    put: Any = None
    if isinstance(told.keep, Recorder):
        keep, origin, numbers, put = told.keep.func, told.keep.origin, told.keep.numbers, told.keep.put

    def hookline_call(*inputs: Any, **kwargs: Any) -> Any:
        module: Any = module_ref()
        behind = module._forward_hooks
        if (
            is_dynamo_compiling() or len(behind) != 1 or key not in behind or module._forward_pre_hooks
            or module._backward_hooks or module._backward_pre_hooks
            or _behind_all or _before_all or _backward_all or _before_backward_all
            or tracing._trace_module_map is not None
        ):  # fmt: skip
            return module._call_impl(*inputs, **kwargs)
        output = module.forward(*inputs, **kwargs) if kwargs else module.forward(*inputs)
        heard = fire.on_forward
        if heard is None:  # nobody is due
            site.calls += 1
            return output
        if heard is not told_by or tap.asides or _current_graph_task_id() != NOT_IN_BACKWARD:
            site.change_over(heard)
            changed = hear(module, inputs, kwargs, output)
            return output if changed is None else changed
        if put is not None and type(output) is Tensor:
            try:
                thread = this_thread.name
                grad = is_grad_enabled()
                if grad:
                    _set_grad_enabled(False)
                try:
                    kept = output._lazy_clone()
                finally:
                    if grad:
                        _set_grad_enabled(True)
                run = tap.run
                numbers.given = call = numbers.given + 1
                put((origin, call, run.step, run.phase, thread, kept))
            except Exception:
                pass  # the thread has kept nothing yet, or this must be kept in another way: `keep` knows
            else:
                if not call % pace:
                    tap.ran(pace)
                return output
        site.calls = call = site.calls + 1
        if not call % pace:
            tap.ran(pace)
        try:
            keep(inputs, kwargs, output)
        except Exception as error:
            failed(error, site, module, inputs, kwargs, output)
        return output

    return DirectCall(hookline_call)


(CODE,) = (code for code in direct_call.__code__.co_consts if isinstance(code, CodeType))

# Dynamo need not compile it, but may compile what it calls.
set_code_exec_strategy(CODE, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


# ---- its place -------------------------------------------------------------------------------------------------------


def leave_at(module: torch.nn.Module, call: DirectCall, instead_of: DirectCall | None = None) -> bool:
    """Have a module called by this, unless somebody has given it a call of its own; whether it is."""
    own = module.__dict__
    if own.get(PLACE) is not instead_of or "_call_impl" in own:
        return False
    own[PLACE] = call
    return True


def take_from(module: torch.nn.Module, call: DirectCall | None) -> None:
    """Have a module called by torch again."""
    own = module.__dict__
    if call is not None and own.get(PLACE) is call:
        del own[PLACE]


def _take_from_all() -> None:
    """Have every module called by torch again: what is traced from now on shall not depend on our calls.

    No list of them is kept, which would cost every block that captures. This happens once, before a compilation.
    """
    for found in gc.get_objects():
        if issubclass(type(found), torch.nn.Module) and isinstance(found.__dict__.get(PLACE), DirectCall):
            found.__dict__.pop(PLACE, None)


before_the_first(_take_from_all)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module has a compiled call that is not ours."""
    call = getattr(module, PLACE, None)
    return call is not None and not isinstance(call, DirectCall)

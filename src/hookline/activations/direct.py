"""The direct way through a module whose only torch hook is ours.

A module with any torch hook takes a longer way through `nn.Module.__call__`, which alone costs as much as a capture.
Before that, it looks whether it has a compiled call, which ``module.compile()`` would have given it. While no compiler
is in use, our own stands there: it does what torch would do, and leaves the call to torch whenever a module has another
hook as well. The torch hook itself is on the module all the time, for torch and for everybody who looks.

Torch leaves a compiled call out when it copies or pickles a module, and ours leaves itself out where others copy, so a
copy has the torch hook alone.
"""

from __future__ import annotations

from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _current_graph_task_id, _get_tracing_state
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.compiler import is_dynamo_compiling
from torch.nn.modules import module as torch_module

from hookline.activations.compiled import is_used
from hookline.events.dispatch import Fire

if TYPE_CHECKING:  # a site has a direct way
    from hookline.activations.site import Site

PLACE = "_compiled_call_impl"
NOT_IN_BACKWARD = -1
TORCHS_WAY = torch.nn.Module._call_impl
TORCHS_COPY = torch.nn.Module.__getstate__

_behind_all, _before_all = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
_backward_all, _before_backward_all = torch_module._global_backward_hooks, torch_module._global_backward_pre_hooks

Told = tuple[Any, Any, Any, Any]
"""The one hook that hears a module, as it is called on the direct way: the callable of `on_forward` for which it holds,
what is called with the live inputs, keyword inputs and output, what is told when that raises, and the tap."""

NOT_TOLD: Told = (object(), None, None, None)


def is_open() -> bool:
    """Whether modules may be called directly now.

    Not where models may run compiled. And not where `DataParallel` may be at work, which copies modules in a way of its
    own: it needs several GPUs in one process.
    """
    return not is_used() and (torch.cuda.device_count() < 2 or _is_one_of_many())


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


class DirectCall(partial[Any]):
    """A call that no copy takes along: it would run the original there. (Costs less than a class with `__call__`.)"""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy is called by torch; so is one from a pickle."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def direct_call(site: Site, fire: Fire) -> DirectCall:
    """What stands in the place of a compiled call."""
    module_ref, key, hear = site.module_ref, site.key, site.hear

    def hookline_call(*inputs: Any, **kwargs: Any) -> Any:
        module: Any = module_ref()
        behind = module._forward_hooks
        if (
            is_dynamo_compiling() or len(behind) != 1 or key not in behind or module._forward_pre_hooks
            or module._backward_hooks or module._backward_pre_hooks
            or _behind_all or _before_all or _backward_all or _before_backward_all or _get_tracing_state()
        ):  # fmt: skip
            return module._call_impl(*inputs, **kwargs)
        output = module.forward(*inputs, **kwargs)
        told_by, keep, failed, tap = site.told
        if told_by is not fire.on_forward or tap.asides or _current_graph_task_id() != NOT_IN_BACKWARD:
            changed = hear(module, inputs, kwargs, output)
            return output if changed is None else changed
        site.calls += 1
        tap.until_clean_up = left = tap.until_clean_up - 1
        if left <= 0:
            tap.sweep()
        try:
            keep(inputs, kwargs, output)
        except Exception as error:
            failed(error, site, module, inputs, kwargs, output)
        return output

    return DirectCall(hookline_call)


(CODE,) = (code for code in direct_call.__code__.co_consts if isinstance(code, CodeType))

# Dynamo need not compile it, but may compile what it calls.
set_code_exec_strategy(CODE, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


def leave_at(module: torch.nn.Module, call: DirectCall) -> None:
    """Have a module called by this, unless somebody has given it a call of its own."""
    own = module.__dict__
    if own.get(PLACE) is None and "_call_impl" not in own:
        own[PLACE] = call


def take_from(module: torch.nn.Module, call: DirectCall | None) -> None:
    """Have a module called by torch again."""
    own = module.__dict__
    if own.get(PLACE, NOT_TOLD) is call:
        del own[PLACE]


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module has a compiled call that is not ours."""
    call = getattr(module, PLACE, None)
    return call is not None and not isinstance(call, DirectCall)

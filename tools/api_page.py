"""Generate the reference of the public names in docs/reference/api.md from signatures and docstrings.

Run it after a change of a public name, its signature or its docstring: `make docs`.
"""

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

from pages import table, visible, without_bounds, write_part

import hookline
from hookline import testing
from hookline.activations import interventions
from hookline.gradients import transforms


def _is_intervention(value: Any) -> bool:
    return (
        inspect.isclass(value)
        and issubclass(value, interventions.Intervention)
        and value.__module__ == (interventions.__name__)
    )


LONGEST = 110  # characters of a signature on one line
GROUPS = {  # title -> the folders whose public names it lists
    "Training": ("build", "trainer", "run.control", "hosts"),
    "Writing and registering hooks": ("core", "run.manager"),
    "Built-in hooks": ("hooks", "gradients", "activations"),
    "Configs": ("config",),
    "Reading a record": ("record", "runs"),
    "Errors": ("errors",),
}
MODULES = {  # title -> a module whose names are not in `hookline`, the names, and what to read about them
    "Transforms": (transforms, transforms.__all__, "[change gradients](../how-to/change-gradients.md)"),
    "Interventions": (
        interventions,
        sorted({value.__name__ for value in vars(interventions).values() if _is_intervention(value)}),
        "[change activations](../how-to/change-activations.md)",
    ),
    "Testing hooks": (testing, testing.__all__, "[test hooks](../how-to/testing-hooks.md)"),
}
# Called by loops, or by built-in hooks that work beside them.
INTERNAL = {
    "add_registration_check", "begin_batch", "calling_hook", "check_needs", "compute_again", "counts_batch",
    "data_ranks", "decide_due_hooks", "hook_in", "inner_seconds", "listeners", "loss_share", "other_batches",
    "pending_save", "remedy", "replan", "request_boundary", "rerunning", "reset_costs", "set_ranks", "share",
    "stepping_optimizers", "title", "unsaved_parameters", "watch_for_trainer",
}  # fmt: skip
SECTIONS = ("Args", "Returns", "Raises", "Yields")


def api_reference() -> str:
    """Return a table of all public names, and a section for each of them, by group."""
    docs = {name: inspect.getdoc(getattr(hookline, name)) or "" for name in hookline.__all__}
    overview = [(f"`{name}`", visible(_first_sentence(text))) for name, text in docs.items()]
    groups: dict[str, list[str]] = {title: [] for title in GROUPS}
    for name in hookline.__all__:
        groups[_group(hookline._MODULES[name])].append(name)
    lines = [*table(("name", "what it is"), overview), ""]
    for title, names in groups.items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += [*_entry(name, getattr(hookline, name)), ""]
    lines += ["The other errors are in `hookline.errors`: [errors](errors.md) lists them.", ""]
    for title, (module, names, page) in MODULES.items():
        lines += [f"## {title}", "", f"Imported from `{module.__name__}`; {page} has examples.", ""]
        for name in names:
            if name not in hookline.__all__:
                lines += [*_entry(name, getattr(module, name)), ""]
    return "\n".join(lines).rstrip()


def _group(module: str) -> str:
    """Return the group of a module: the one that names the longest prefix of it."""
    prefixes = {prefix: title for title, folders in GROUPS.items() for prefix in folders}
    return prefixes[max((prefix for prefix in prefixes if f"{module}.".startswith(f"{prefix}.")), key=len)]


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    if inspect.isclass(value) and value.__name__ != name and value.__name__ in hookline.__all__:
        yield f"Another name of [{value.__name__}](#{value.__name__.lower()})."
        return
    yield from ["```py", signature(name, value), "```", ""]
    yield from docstring(inspect.getdoc(value) or "")
    if inspect.isclass(value):
        bases = [base.__name__ for base in value.__mro__[1:] if base.__name__ in hookline.__all__]
        if bases:
            yield from ["", f"Has the members of {', '.join(f'[{base}](#{base.lower()})' for base in bases)}, too."]
        members = [(f"`{text}`", visible(about)) for text, about in _members(value)]
        yield from ["", *table(("member", "what it is or does"), members)] if members else []


def signature(name: str, value: Any) -> str:
    """Return the signature of a class or function, on several lines if it is long."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    if isinstance(value, type) and issubclass(value, BaseException):
        return f"{name}(message)"
    if getattr(value, "_is_protocol", False):
        return f"class {name}(Protocol)"
    has_type = not inspect.isclass(value) and found.return_annotation is not found.empty
    returns = f" -> {_type(found.return_annotation)}" if has_type else ""
    parameters = [*_parameters(found.parameters.values())]
    short = f"{name}({', '.join(parameters)}){returns}"
    if len(short) <= LONGEST:
        return short
    inner = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"{name}(\n{inner}){returns}"


def _parameters(parameters: Iterable[inspect.Parameter]) -> Iterator[str]:
    star = False
    for one in parameters:
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and not star:
            yield "*"
        star = star or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        prefix = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        annotation = "" if one.annotation is one.empty else f": {_type(one.annotation)}"
        default = "" if one.default is one.empty else (" = " if annotation else "=") + _default(one.default)
        yield f"{prefix}{one.name}{annotation}{default}"


def _type(annotation: Any) -> str:
    text = without_bounds(annotation) if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:typing|collections\.abc|hookline(?:\.\w+)+)\.(?=\w)", "", text)


def _default(value: Any) -> str:
    """Write a default; objects without a repr of their own are named, because an address differs between runs."""
    if callable(value):
        return getattr(value, "__name__", "...")
    text = repr(value)
    return "..." if " object at 0x" in text or text.startswith("<") else text


def docstring(text: str) -> Iterator[str]:
    """Yield a docstring as Markdown: sections of arguments become lists, examples become blocks of code."""
    lines, in_code, in_section = text.splitlines(), False, False
    for line in lines:
        is_code = line.lstrip().startswith((">>>", "...")) or (in_code and bool(line.strip()))
        if is_code != in_code:
            yield "```py" if is_code else "```"
            in_code = is_code
        if is_code:
            yield line.removesuffix("  # doctest: +SKIP")
        elif line.rstrip(":") in SECTIONS and line.endswith(":"):
            in_section = True
            yield f"{line.rstrip(':')}:"
            yield ""
        elif in_section and (found := re.match(r"    (\*{0,2}\w+): (.*)", line)):
            yield f"- `{found[1]}`: {visible(found[2])}"
        elif in_section and line.startswith(" "):
            yield f"  {visible(line.strip())}"
        else:
            in_section = in_section and not line.strip()
            yield visible(line)
    if in_code:
        yield "```"


def _members(cls: type) -> Iterator[tuple[str, str]]:
    """Yield signature and first sentence of a class's methods and properties, without events and public bases."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        is_public_base = base is not cls and base.__name__ in hookline.__all__
        if base.__module__.startswith("hookline") and base.__name__ != "Events" and not is_public_base:
            found.update({name: value for name, value in vars(base).items() if not name.startswith(("_", "on_"))})
    for name, value in found.items():
        if name in INTERNAL:
            continue
        value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        about = _first_sentence(inspect.getdoc(value) or "")
        if isinstance(value, property):
            yield name, about
        elif inspect.isfunction(value):
            # What catches unknown arguments, to refuse them, is not an argument.
            left_out = ("self", "cls", "unknown")
            names = [parameter for parameter in inspect.signature(value).parameters if parameter not in left_out]
            yield f"{name}({', '.join(names)})", about


def _first_sentence(text: str) -> str:
    joined = " ".join(text.split())
    found = re.match(r".*?[.!?](?=\s|$)", joined)
    return found[0] if found else joined


if __name__ == "__main__":
    write_part("reference/api.md", "public names", api_reference())

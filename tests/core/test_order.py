"""The order of hooks: tiers, registration, before/after; and `explain`, which says why."""

from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline import HookRegistry, TrainingHook
from hookline.core.order import in_order
from hookline.errors import RegistrationError


@dataclass
class Hook:
    """What ordering knows of a hook."""

    name: str
    number: int
    built_in: bool = False
    last: bool = False
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    origin: str = "code"
    kinds: tuple[str, ...] = ("lifecycle", "update")


NAMES = "abcdef"


@st.composite
def hooks(draw: st.DrawFn, asking: int = 6) -> list[Hook]:
    """Up to six hooks; some built in, some last, some asking to be before or after others (also absent ones)."""
    count = draw(st.integers(1, 6))
    made = [Hook(NAMES[i], i + 1, draw(st.booleans()), draw(st.integers(0, 9)) == 0) for i in range(count)]
    for hook in draw(st.permutations(made))[:asking]:
        others = st.lists(st.sampled_from([name for name in NAMES + "z" if name != hook.name]), max_size=2, unique=True)
        hook.before, hook.after = tuple(draw(others)), tuple(draw(others))
    return draw(st.permutations(made))


def names(places: list[Hook], tiers: bool = True, strict: bool = False) -> list[str]:
    """The resolved order by name."""
    return [place.name for place in in_order(places, "lifecycle" if tiers else "update", strict)]


def base(made: list[Hook], tiers: bool) -> list[str]:
    """The order without any before and after."""
    users = sorted((h for h in made if not (tiers and h.built_in)), key=lambda h: h.number)
    built_ins = sorted((h for h in made if tiers and h.built_in), key=lambda h: h.number)
    both = users + built_ins
    return [h.name for h in both if not h.last] + [h.name for h in both if h.last]


def edges(made: list[Hook]) -> set[tuple[str, str]]:
    """All pairs (earlier, later) that hooks asked for."""
    there = {hook.name for hook in made}
    asked = {(hook.name, target) for hook in made for target in hook.before}
    asked |= {(target, hook.name) for hook in made for target in hook.after}
    return {(first, second) for first, second in asked if {first, second} <= there}


def circular(made: list[Hook]) -> bool:
    """Whether the constraints contradict each other."""
    later: dict[str, set[str]] = {}
    for first, second in edges(made):
        later.setdefault(second, set()).add(first)
    try:
        TopologicalSorter(later).prepare()
    except CycleError:
        return True
    return False


@settings(deadline=None)
@given(hooks(asking=0), st.booleans())
def test_without_constraints_tiers_and_registration_decide(made: list[Hook], tiers: bool) -> None:
    """Users first, built-ins last, those kept at the end behind all; inside each in order of registration."""
    assert names(made, tiers) == base(made, tiers)


@settings(max_examples=300, deadline=None)
@given(hooks(), st.booleans())
def test_what_is_accepted_is_satisfied_and_circles_are_rejected(made: list[Hook], tiers: bool) -> None:
    """A strict order meets every constraint; a circle is always rejected, and only contradictions are."""
    if circular(made):
        with pytest.raises(RegistrationError, match="cycle"):
            names(made, tiers)
        return
    try:
        order = names(made, tiers, strict=True)
    except RegistrationError as error:
        assert "asks to run" in str(error)
        assert any(len(hook.before) + len(hook.after) > 1 for hook in made), "one constraint alone can always be met"
        return
    assert sorted(order) == sorted(hook.name for hook in made)
    for first, second in edges(made):
        assert order.index(first) < order.index(second)


def test_a_hook_moves_no_further_than_to_where_its_target_ends_up() -> None:
    """'a' asks to run after 'b', which itself moves to the front: both are placed once, and 'a' stays before 'c'."""
    made = [Hook("a", 1, after=("b",)), Hook("b", 2, before=("c",), built_in=True), Hook("c", 3), Hook("d", 4)]
    assert names(made) == ["b", "a", "c", "d"]


@settings(max_examples=200, deadline=None)
@given(hooks(), st.booleans())
def test_hooks_that_did_not_ask_keep_their_order(made: list[Hook], tiers: bool) -> None:
    """Only the hook that asked moves."""
    if circular(made):
        return
    there = {hook.name for hook in made}
    quiet = {hook.name for hook in made if not there & {*hook.before, *hook.after}}
    assert [name for name in names(made, tiers) if name in quiet] == [n for n in base(made, tiers) if n in quiet]


@settings(max_examples=200, deadline=None)
@given(hooks(asking=1), st.booleans())
def test_one_asking_hook_moves_to_the_nearest_legal_place(made: list[Hook], tiers: bool) -> None:
    """Of all places that meet its constraints it takes the one nearest to where it was."""
    try:
        order = names(made, tiers, strict=True)
    except RegistrationError:
        return
    was = base(made, tiers)
    for mover in (hook.name for hook in made if hook.before or hook.after):
        rest = [name for name in was if name != mover]
        legal = [
            spot for spot in range(len(was))
            if all(([*rest[:spot], mover, *rest[spot:]]).index(a) < ([*rest[:spot], mover, *rest[spot:]]).index(b)
                   for a, b in edges(made))
        ]  # fmt: skip
        assert abs(order.index(mover) - was.index(mover)) == min(abs(spot - was.index(mover)) for spot in legal)


@pytest.mark.req("000-08")
@given(hooks(), st.booleans(), st.randoms())
@settings(max_examples=100, deadline=None)
def test_the_order_does_not_depend_on_how_hooks_are_handed_over(made: list[Hook], tiers: bool, random: object) -> None:
    """The same hooks give the same order, whatever collection they came from."""
    if not circular(made):
        assert names(made, tiers) == names(sorted(made, key=lambda hook: hook.name), tiers) == names(made[::-1], tiers)


def test_hooks_may_refer_to_each_other_and_others_to_them() -> None:
    """a before b and b after a say the same thing twice; a third that follows b is placed behind it."""
    made = [Hook("x", 1, after=("y",)), Hook("y", 2, after=("z",)), Hook("z", 3, before=("y",))]
    assert names(made, strict=True) == ["z", "y", "x"]


def test_a_circle_is_rejected_naming_its_members() -> None:
    """The message shows the ring and what to do."""
    with pytest.raises(RegistrationError, match=r"cycle: .*'a'.*'b'.*remove one"):
        names([Hook("a", 1, before=("b",)), Hook("b", 2, before=("a",))])
    with pytest.raises(RegistrationError, match="cycle"):
        names([Hook("a", 1, after=("a",))])


def test_contradicting_constraints_of_one_hook_are_rejected_when_strict() -> None:
    """After the second and before the first of two hooks cannot be had, because those do not move."""
    made = [Hook("a", 1), Hook("b", 2), Hook("c", 3, before=("a",), after=("b",))]
    with pytest.raises(RegistrationError, match="'c' asks to run before 'a' and after 'b'"):
        names(made, strict=True)
    assert names(made) == ["a", "b", "c"]


def test_reasons_are_reported() -> None:
    """explain shows for each place why it is so."""
    made = [Hook("mine", 1, after=("theirs",)), Hook("theirs", 2, built_in=True), Hook("end", 3, last=True)]
    assert [place.why for place in in_order(made, "lifecycle")] == [
        "built-in (after your hooks), registered 2nd",
        "user hook, registered 1st; moved because it asks to run after 'theirs'",
        "user hook, registered 3rd, always last",
    ]


def test_a_target_that_is_not_registered_is_named_in_the_reason() -> None:
    """A misspelt name is seen where the order is explained; the constraint that can be granted is."""
    made = [Hook("a", 1), Hook("b", 2, before=("a", "aa"), after=("zz",))]
    places = in_order(made, "update")
    assert [place.name for place in places] == ["b", "a"]
    assert "; ignores 'aa' and 'zz', which are not registered; moved because it asks to run before 'a'" in places[0].why
    assert "ignores" not in places[1].why


def test_explain_says_which_hook_was_added_by_default() -> None:
    """A trainer adds `identity`; it stays where another update hook is registered later."""
    registry = HookRegistry({})
    registry.register("clip_norm", max_norm=1.0)
    first, second = registry.explain("on_update").splitlines()[1:]
    assert first == "  1. identity: built-in, added by default, registered 1st; arguments: grads"
    assert "added by default" not in second


def test_explain_shows_the_order_and_the_reasons(registry: HookRegistry) -> None:
    """What will happen at an event can be read."""
    registry.register(lambda loss: None, "a", event="batch_end", every=10)
    registry.register(lambda step: None, "b", event="batch_end", enabled=False)
    shown = registry.explain("batch_end")
    assert "1. a (every 10 steps): user hook, registered 1st; arguments: loss" in shown
    assert "2. b [disabled]" in shown
    assert "no listeners" in registry.explain("on_exception")


class Asks(TrainingHook):
    """Asks, from some calls below, who it is."""

    def __init__(self, registry: HookRegistry) -> None:
        self.registry = registry
        self.answer: Any = None

    def on_step_end(self) -> None:
        self.answer = (lambda: self.registry.calling_hook())()


def test_a_caller_is_known(registry: HookRegistry) -> None:
    """A method's hook and a function's are named; None if no hook is being called."""
    answers: list[Any] = []
    hook = Asks(registry)
    registry.register(hook, "object")
    registry.on("step_end", name="function")(lambda: answers.append(registry.calling_hook()))
    assert registry.calling_hook() is None
    registry.on_step_end()
    assert (hook.answer, answers) == ("object", ["function"])

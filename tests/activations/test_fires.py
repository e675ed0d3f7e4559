"""How often hooks fired at one module."""

from hookline.activations.captured import CallNumbers
from hookline.activations.fires import Fires


def test_calls_are_added_up_by_hook() -> None:
    """A hook that never fired has none."""
    fires = Fires()
    fires.add("a")
    fires.add("a")
    assert (fires.of("a"), fires.of("b")) == (2, 0)


def test_numbers_are_followed_from_where_they_stand() -> None:
    """What a hook has numbered before does not count, and what it numbers is not counted a second time."""
    fires, numbers = Fires(), CallNumbers()
    numbers.given = 5
    fires.follow("a", numbers)
    fires.follow("a", numbers)
    numbers.next()
    fires.add("a")
    assert fires.of("a") == 1


def test_another_hook_of_the_same_name_goes_on_counting() -> None:
    """The module was called that often under this name."""
    fires, first, second = Fires(), CallNumbers(), CallNumbers()
    fires.follow("a", first)
    first.next()
    second.next()
    fires.follow("a", second)
    second.next()
    first.next()  # a call that was in flight
    assert fires.of("a") == 2


def test_a_hook_that_does_not_number_its_calls_is_counted_under_a_name_that_did() -> None:
    """The numbers of the one that is gone are followed no more."""
    fires, numbers = Fires(), CallNumbers()
    fires.follow("a", numbers)
    numbers.next()
    fires.unfollow("a")
    fires.unfollow("b")
    numbers.next()
    fires.add("a")
    assert (fires.of("a"), fires.of("b")) == (2, 0)


def test_calls_on_the_direct_way_are_known_by_their_numbers() -> None:
    """Those through the torch hook are counted elsewhere; what a hook that is gone has heard stays counted."""
    fires, first, second = Fires(), CallNumbers(), CallNumbers()
    first.given = 3
    fires.follow("a", first)
    fires.follow("b", second)
    first.given += 2
    second.next()
    second.given += 1
    assert fires.direct == 3
    fires.unfollow("a")
    first.given += 1
    assert (fires.direct, fires.of("a"), fires.of("b")) == (3, 2, 2)

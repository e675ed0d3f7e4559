"""How often hooks fired at one module."""

from __future__ import annotations

from hookline.activations.captured import CallNumbers

_nobody = CallNumbers()


class Fires(dict[str, int]):
    """By hook: how often it was called and came back without an error.

    A hook that numbers its calls anyway is not counted a second time: its numbers are followed.
    """

    def __init__(self) -> None:
        self._followed: dict[str, tuple[CallNumbers, int, int]] = {}  # with how many it had given before, and directly
        self._direct = 0  # of hooks that are gone

    @property
    def direct(self) -> int:
        """Calls of the module that hooks have heard on the direct way, where nobody else counts them."""
        return self._direct + sum(numbers.direct - before for numbers, _, before in list(self._followed.values()))

    def follow(self, hook: str, numbers: CallNumbers) -> None:
        """From now on a hook's own numbers tell how often it fired."""
        if self._followed.get(hook, (None,))[0] is not numbers:
            self.unfollow(hook)
            self._followed[hook] = numbers, numbers.given, numbers.direct

    def unfollow(self, hook: str) -> None:
        """The hook is gone; another of its name may have to be counted."""
        if hook in self._followed:
            self[hook] = self.of(hook)
            numbers, _, before = self._followed.pop(hook)
            self._direct += numbers.direct - before

    def add(self, hook: str) -> None:
        """A hook was called and came back."""
        if hook not in self._followed:
            self[hook] = self.get(hook, 0) + 1

    def of(self, hook: str) -> int:
        """How often a hook fired."""
        numbers, before, _ = self._followed.get(hook, (_nobody, 0, 0))
        return self.get(hook, 0) + numbers.given - before

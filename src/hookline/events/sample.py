"""A share of the batches, chosen at random without touching anybody's random stream."""

from __future__ import annotations

from hashlib import blake2b

from hookline.errors import ConfigError

_LARGEST = 2**64


class Sample:
    """Takes a share of all numbers (steps, batches), at random and yet the same ones in every run.

    Whether a number is taken follows from the number and the seed alone: no stream is drawn from, ours or training's,
    a resumed run goes on with the same choice, and all ranks agree. Other seeds choose independently.

    >>> tenth = Sample(0.1, seed="my_hook")
    >>> sum(tenth.takes(step) for step in range(10_000))
    992
    """

    def __init__(self, rate: float, seed: int | str = 0) -> None:
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate <= 1:
            raise ConfigError("rate", f"expected a share between 0 and 1, got {rate!r}")
        self.rate, self.seed = rate, seed
        self._key = blake2b(repr(seed).encode(), digest_size=16).digest()
        self._below = int(rate * _LARGEST)

    def takes(self, number: int) -> bool:
        """Whether this number is in the sample; costs one or two microseconds."""
        drawn = blake2b(number.to_bytes(8, "big", signed=True), key=self._key, digest_size=8).digest()
        return int.from_bytes(drawn, "big") < self._below

    def __repr__(self) -> str:
        return f"Sample({self.rate}, seed={self.seed!r})"

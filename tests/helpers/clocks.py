"""Clocks and schedules for the tests of when hooks are due."""

from hypothesis import strategies as st

from hookline import Schedule
from hookline.core.schedule import Quantity, Reading

UNITS = ("steps", "batches", "epochs", "tokens", "seconds")

quantities = st.builds(Quantity, st.integers(1, 14).map(float), st.sampled_from(UNITS))
schedules = st.builds(
    Schedule,
    every=st.none() | quantities,
    at=st.lists(quantities, max_size=3).map(tuple),
    start=st.none() | quantities,
    stop=st.none() | quantities,
)


def micro_batches(accumulate: int, epochs: list[int], tokens: int) -> list[Reading]:
    """Return the clock at every micro-batch of a run whose windows never cross an epoch."""
    run: list[Reading] = []
    step = 0
    for epoch, length in enumerate(epochs, 1):
        for index in range(length):
            step += index % accumulate == 0
            number = len(run) + 1
            run.append(Reading(step, number, epoch, number * tokens, number * 0.7))
    return run

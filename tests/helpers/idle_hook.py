"""A hook for tests in which nothing depends on what a hook does."""

from hookline import TrainingHook


class Idle(TrainingHook):
    """A hook that does nothing when it is called."""

    def on_train_end(self) -> None: ...

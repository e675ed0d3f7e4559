"""A launch goes through Triton once, and afterwards to what that compiled."""

from typing import Any

from hookline.stats.launching import Launch


class Kernel:
    """Stands for a Triton function; what it compiles notes its calls, as the interpreter does not."""

    def __init__(self, compiles: bool = True) -> None:
        self.compiles = compiles
        self.calls: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def first(*arguments: Any, **options: Any) -> Any:
            self.calls.append(("first", grid, arguments, options))
            return Compiled(self.calls) if self.compiles else None

        return first


class Compiled:
    """What a first call gives."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, stream: self.calls.append(("again", grid, arguments, stream))


def test_later_calls_go_to_what_was_compiled() -> None:
    """With everything in the kernel's order: what is fixed, what comes with the call, the constants."""
    kernel = Kernel()
    launch = Launch(kernel, 5, "table", 7, num_warps=8, TILE=64, ALIGNED=True)
    for step in (1, 2, 3):
        launch(99, f"tensor {step}")
    assert kernel.calls == [
        ("first", (5,), ("table", 7, "tensor 1"), {"TILE": 64, "ALIGNED": True, "num_warps": 8}),
        ("again", (5, 1, 1), ("table", 7, "tensor 2", 64, True), 99),
        ("again", (5, 1, 1), ("table", 7, "tensor 3", 64, True), 99),
    ]


def test_where_nothing_is_compiled_every_call_is_a_first_one() -> None:
    """As in Triton's interpreter."""
    kernel = Kernel(compiles=False)
    launch = Launch(kernel, 1)
    launch(0, "a")
    launch(0, "b")
    assert [(kind, arguments) for kind, _, arguments, _ in kernel.calls] == [("first", ("a",)), ("first", ("b",))]

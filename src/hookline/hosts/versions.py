"""`check_version`: refuse a host that is not installed, or older than what was tested."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from hookline.errors import HooklineError


def check_version(package: str, minimum: tuple[int, int]) -> None:
    """Refuse a host that is not installed, or older than what was tested.

    Raises:
        HooklineError: The message names the required version.
    """
    words = ".".join(map(str, minimum))
    remedy = f"pip install '{package}>={words}'"
    try:
        installed = version(package)
    except PackageNotFoundError:
        raise HooklineError(f"the package {package} is not installed: {remedy}") from None
    if tuple(int(part) for part in installed.split(".")[:2] if part.isdigit()) < minimum:
        raise HooklineError(f"hooks need {package} {words} or newer, and {installed} is installed: {remedy}")

"""Drive headless Chromium through its DevTools protocol over a pipe, with the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
# Chromium reads commands from descriptor 3 and answers on 4; `subprocess` cannot place descriptors.
_PLACE = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_SECONDS = 300


class Browser:
    """A headless browser with one page."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="hookline-chromium-", ignore_cleanup_errors=True)
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        assert CHROMIUM is not None
        start = [sys.executable, "-I", "-S", "-c", _PLACE, str(commands), str(answers), CHROMIUM, *_FLAGS]
        self._process = subprocess.Popen(
            [*start, f"--user-data-dir={self._profile.name}", "about:blank"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._buffer, self._count, self._session = b"", 0, None
        self.messages: list[dict[str, Any]] = []  # what the page reported: errors, console, policy violations
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its answer."""
        self._count += 1
        number = self._count
        command = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            command["sessionId"] = self._session
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while (answer := self._read()).get("id") != number:
            self.messages.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._answers], [], [], _SECONDS)[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._answers, 1 << 20)
            if not part:
                raise RuntimeError("the browser ended")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False, script: str = "") -> None:
        """Open a file and wait until its plots on the screen are drawn; `script` runs before any of the page's own."""
        self.messages.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.dark(dark)
        if script:
            self.call("Page.addScriptToEvaluateOnNewDocument", source=script)
        self.call("Page.navigate", url=path.absolute().as_uri())
        self.wait("document.documentElement?.dataset.drawn")

    def dark(self, on: bool) -> None:
        """Make the system prefer a dark theme, or a light one."""
        theme = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])

    def run(self, expression: str) -> Any:
        """Evaluate an expression in the page, wait if it is a promise, and return its value."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + _SECONDS
        while not (value := self.run(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"still false: {expression}; {self.problems()}")
            time.sleep(0.02)
        return value

    def frames(self) -> None:
        """Wait until what was changed is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))")

    def key(self, key: str, modifiers: int = 0) -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, modifiers=modifiers, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, modifiers=modifiers)
        self.frames()

    def mouse(self, kind: str, x: float, y: float, button: str = "none") -> None:
        """Move the mouse, press it or release it."""
        buttons = 1 if button == "left" and kind != "mouseReleased" else 0
        clicks = 0 if kind == "mouseMoved" else 1
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=buttons, clickCount=clicks)

    def screenshot(self, path: Path, full: bool = False) -> None:
        """Write what is on the screen, or the whole page, to a PNG file."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(data["data"]))

    def print(self, path: Path) -> None:
        """Print the page to a PDF file."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"]))

    def problems(self) -> list[str]:
        """Return what went wrong in the page: exceptions, violations of its policy, errors and requests."""
        problems = []
        for message in self.messages:
            method, what = message.get("method"), message.get("params", {})
            if method == "Runtime.exceptionThrown":
                details = what["exceptionDetails"]
                problems.append(details.get("exception", {}).get("description") or details["text"])
            elif method == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
                problems.append(what["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"):
                problems.append(str(what["args"]))
            elif method == "Network.requestWillBeSent" and not what["request"]["url"].startswith(("file:", "data:")):
                problems.append(f"request to {what['request']['url']}")
        return problems

"""Chromium without a screen, driven over a pipe with its own protocol (DevTools), so that no driver is needed.

The browser is told to reach no network; what a page asks for is recorded all the same.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chromium-headless-shell")

DEADLINE_S = 120.0
"""For each answer; machines are shared."""


def find_chromium() -> str:
    """The browser's path: $CHROMIUM, or the first known name that is installed. The tests fail without one."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    assert found is not None, "no Chromium found; `make chromium` installs it, or set CHROMIUM to the path of one"
    return found


@dataclass
class Page:
    """One open page, and what it complained about."""

    pipe: Pipe
    session: str
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol; notes the events that arrive meanwhile."""
        return self.pipe.call(method, parameters, self)

    def see(self, event: dict[str, Any]) -> None:
        """Notes errors and warnings of the console, exceptions and requests."""
        method, parameters = event["method"], event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"])[:2000])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(parameters["args"])[:2000])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(json.dumps(parameters["entry"])[:2000])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Waits until an expression holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"{expression} did not come true; {self.complaints}"
            time.sleep(0.05)

    def look(self, width: int, scheme: str, height: int = 900) -> None:
        """As on a screen of this width, with a light or dark scheme."""
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, path: Path) -> None:
        """Loads a local file and waits until its figures are drawn."""
        self.complaints.clear()
        self.requests.clear()
        answer = self.call("Page.navigate", url=path.resolve().as_uri())
        assert "errorText" not in answer, f"{path}: {answer['errorText']}"
        self.wait_for("document.readyState === 'complete' && document.documentElement.dataset.drawn === 'yes'")

    def move(self, x: float, y: float) -> None:
        """Moves the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Presses the left button at one place and lets go at another."""
        button = {"button": "left", "clickCount": 1}
        self.move(*start)
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=start[0], y=start[1], **button)
        middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        for x, y in (middle, end):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, button="left", buttons=1)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=end[0], y=end[1], **button)

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))


class Pipe:
    """Messages to and from the browser: JSON that ends with a zero byte."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._count = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(from_browser, selectors.EVENT_READ)

    def call(self, method: str, parameters: dict[str, Any], page: Page | None = None) -> dict[str, Any]:
        """Sends one command and waits for its answer."""
        self._count += 1
        command: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if page is not None:
            command["sessionId"] = page.session
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            message = self._read(method)
            if "id" not in message:
                if page is not None and message.get("sessionId") == page.session:
                    page.see(message)
            elif message["id"] == command["id"]:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result

    def _read(self, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert self._selector.select(DEADLINE_S), f"the browser did not answer {waiting_for} in {DEADLINE_S:.0f} s"
            data = os.read(self._from, 1 << 20)
            assert data, f"the browser ended before it answered {waiting_for}"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


def _high(descriptor: int) -> int:
    """The descriptor under a number above those that the browser expects."""
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return copy


@contextmanager
def chromium_page(folder: Path) -> Iterator[Page]:
    """An empty page of a fresh browser whose profile lives in `folder`."""
    command = [
        find_chromium(), "--headless", "--remote-debugging-pipe", f"--user-data-dir={folder}", "--no-first-run",
        "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-extensions",
        "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND", "about:blank",
    ]  # fmt: skip
    if os.geteuid() == 0:
        command.insert(1, "--no-sandbox")  # Chromium refuses to run as root otherwise; it opens our own file only
    (their_in, our_out), (our_in, their_out) = (tuple(map(_high, os.pipe())) for _ in range(2))

    def as_three_and_four() -> None:
        os.dup2(their_in, 3)
        os.dup2(their_out, 4)

    with (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            command, preexec_fn=as_three_and_four, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=errors
        )
    os.close(their_in)
    os.close(their_out)
    try:
        pipe = Pipe(our_out, our_in)
        target = pipe.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = pipe.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(pipe, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        yield page
    except AssertionError as error:
        error.add_note((folder / "stderr").read_text(errors="replace")[-2000:])
        raise
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(our_out)
        os.close(our_in)

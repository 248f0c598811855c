"""Headless Chromium, steered through a pipe by its own protocol: no package is needed for it."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
_START = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
_START += "os.execv(sys.argv[3], sys.argv[3:])"
_SECONDS = 20.0


class Browser:
    """One page of a browser."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, os.fdopen(from_browser, "rb", buffering=0)
        self._number, self._rest, self._session = 0, b"", ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.events: list[dict[str, Any]] = []
        """What the page has logged, and its errors."""
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def open(self, url: str, *, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Opens a page anew, and waits until it says that it is ready."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.wait_for("document.documentElement?.dataset.ready")

    def value(self, expression: str) -> Any:  # noqa: ANN401  any JSON
        """The value of an expression of JavaScript."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + _SECONDS
        while not self.value(expression):
            assert time.monotonic() < end, f"{expression}\n{self.value('document.body.innerText')}"
            time.sleep(0.02)

    def errors(self) -> list[str]:
        """What went wrong in the page: exceptions, and what its policy has blocked."""
        found = []
        for event in self.events:
            if event["method"] == "Runtime.exceptionThrown":
                details = event["params"]["exceptionDetails"]
                found.append(details.get("exception", {}).get("description", details["text"]))
            entry = event["params"].get("entry", {})
            if event["method"] == "Log.entryAdded" and entry["level"] == "error":
                found.append(entry["text"])
        return found

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Writes a picture of the page."""
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Asks the browser for something, and waits for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._to, content) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])
            if "method" in answer and self._session:
                self.events.append(answer)

    def _next(self) -> Mapping[str, Any]:
        while b"\0" not in self._rest:
            part = self._from.read(2**20)
            assert part, "the browser has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))

    def close(self) -> None:
        os.close(self._to)
        self._from.close()


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Starts Chromium with a new profile, and ends it."""
    assert CHROMIUM is not None
    (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
    # The browser reads from 3 and writes to 4, whatever these numbers are in this process.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_read, from_write)]
    command = [sys.executable, "-c", _START, *map(str, high), CHROMIUM, *_FLAGS]
    process = subprocess.Popen(
        [*command, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=high, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for fd in (to_read, from_write, *high):
        os.close(fd)
    page = Browser(to_write, from_read)
    try:
        yield page
    finally:
        page.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

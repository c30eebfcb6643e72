"""A headless Chromium driven over a pipe by the DevTools protocol, without a driver or a library:
for looking at pages."""
from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome",
         "chrome-headless-shell")
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--disable-extensions", "--disable-dev-shm-usage", "--hide-scrollbars")

# The browser reads commands from its descriptor 3 and answers on 4.
_START = ("import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
          "os.execv(sys.argv[3], sys.argv[3:])")

_PATIENCE = 60  # seconds without a word


def find() -> str | None:
    """The path of a browser of the Chromium family, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A context manager with one tab. ``events`` holds what it told, in order: {method, params}."""

    def __init__(self, binary: str):
        self._folder = tempfile.TemporaryDirectory(prefix="browser", ignore_cleanup_errors=True)
        command = [binary, *QUIET, f"--user-data-dir={self._folder.name}",
                   "--remote-debugging-pipe", "about:blank"]
        theirs, self._out = os.pipe()
        self._in, ours = os.pipe()
        given = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs, ours)]  # clear of 3 and 4
        self._process = subprocess.Popen([sys.executable, "-c", _START, *map(str, given), *command],
                                         pass_fds=given, stdout=subprocess.DEVNULL,
                                         stderr=subprocess.DEVNULL)
        for end in (theirs, ours, *given):
            os.close(end)
        self._last, self._buffer, self._session = 0, b"", None
        self.events: list[dict] = []

    def __enter__(self) -> Browser:
        try:
            target = next(t for t in self.call("Target.getTargets")["targetInfos"]
                          if t["type"] == "page")
        except RuntimeError:
            self.close()
            raise
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"],
                                  flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def call(self, method: str, **params: object) -> dict:
        """One command's result. Raises RuntimeError where the browser refuses it or is gone."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        try:
            os.write(self._out, json.dumps(message).encode() + b"\0")
        except BrokenPipeError:
            raise RuntimeError(f"{method}: the browser is gone, with exit code "
                               f"{self._process.wait(_PATIENCE)}") from None
        while True:
            found = self._read()
            if found.get("id") == self._last:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']['message']}")
                return found["result"]
            self.events.append(found)

    def _read(self) -> dict:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], _PATIENCE)
            more = os.read(self._in, 1 << 20) if ready else b""
            if not more:
                raise RuntimeError(
                    f"the browser says nothing any more; its exit code is {self._process.poll()}")
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def show(self, page: Path, width: int, dark: bool = False, height: int = 900) -> None:
        """Load a file in a window of ``width`` CSS pixels, in the light or the dark theme."""
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def value(self, expression: str) -> object:
        """What a JavaScript expression gives, as JSON."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["text"])
        return found["result"].get("value")

    def picture(self, top: float = 0.0, height: float | None = None, scale: float = 1.0) -> bytes:
        """A PNG of the page from ``top`` on; without ``height`` to its end."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = dict(x=0, y=top, width=size["width"], height=height or size["height"] - top,
                    scale=scale)
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True,
                          clip=clip)
        return base64.b64decode(found["data"])

"""A headless browser for tests, driven over the DevTools protocol by two pipes: no package and no network is needed.

`Browser.open(path)` loads a file; `run` evaluates JavaScript; `click` presses the mouse where an element is, as a user does;
`errors` holds what the page threw or logged as an error.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

PROGRAM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
    "--no-first-run",
)
SECONDS = 60


class Browser:
    """One page. Use as a context."""

    def __init__(self) -> None:
        assert PROGRAM is not None
        self.profile = tempfile.TemporaryDirectory(prefix="wholestep-browser-", ignore_cleanup_errors=True)
        theirs, self.to = os.pipe()
        self.back, written = os.pipe()
        command = f'exec "$0" "$@" 3<&{theirs} 4>&{written}'
        self.process = subprocess.Popen(
            ["bash", "-c", command, PROGRAM, *FLAGS, f"--user-data-dir={self.profile.name}", "about:blank"],
            pass_fds=(theirs, written), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        os.close(written)
        self.errors: list[str] = []
        self.fetched: list[str] = []
        self.seen: list[str] = []
        self.waiting = b""
        self.number = 0
        self.session: str | None = None

    def __enter__(self) -> Browser:
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(SECONDS)
        pages = self._call("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self.session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, *_: Any) -> None:
        signal.alarm(0)
        self.process.kill()
        self.process.wait()
        os.close(self.to)
        os.close(self.back)
        self.profile.cleanup()

    def open(self, path: Path, *, width: int = 1200, dark: bool = False) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=features)
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.seen.clear()
        self._call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self.seen:
            self._take(self._message())

    def run(self, script: str) -> Any:
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        found = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{found}.scrollIntoView({{block: 'center'}})")
        box = self.run(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({found}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        request: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session is not None and not method.startswith("Target."):
            request["sessionId"] = self.session
        os.write(self.to, json.dumps(request).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]
            self._take(message)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self.waiting:
            part = os.read(self.back, 1 << 16)
            assert part, "the browser ended"
            self.waiting += part
        text, _, self.waiting = self.waiting.partition(b"\0")
        return json.loads(text)

    def _take(self, message: dict[str, Any]) -> None:
        method, params = message.get("method", ""), message.get("params", {})
        self.seen.append(method)
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str(params["args"]))
        elif method == "Network.requestWillBeSent":
            self.fetched.append(params["request"]["url"])


def _too_long(*_: Any) -> None:
    raise TimeoutError("the browser did not answer")

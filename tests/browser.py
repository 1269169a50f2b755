"""A headless Chromium that tells what a page did: its log, its requests, what a script finds.

Over the DevTools protocol, with the websocket client that Jupyter brings along.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
_LOAD_S = 30.0


class Tab:
    """``messages``: errors and warnings of the console; ``requests``: addresses asked for."""

    def __init__(self, address: str):
        self._socket = websocket.create_connection(address, timeout=_LOAD_S, suppress_origin=True)
        self._sent = 0
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: object) -> dict:
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": params}))
        while (answer := self._read()).get("id") != self._sent:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict:
        got = json.loads(self._socket.recv())
        params = got.get("params", {})
        match got.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.messages.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.messages.append(json.dumps(params["entry"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.messages.append(json.dumps(params["args"]))
            case "Page.loadEventFired":
                self._loaded = True
        return got

    def open(self, page: Path | str, width: int) -> None:
        """A file, or an address."""
        address = page if isinstance(page, str) else page.resolve().as_uri()
        self.messages, self.requests, self._loaded = [], [], False
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900,
                 deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        self.ask("Page.navigate", url=address)
        while not self._loaded:
            self._read()

    def find(self, script: str) -> Any:
        """What a JavaScript expression gives, as JSON."""
        got = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def wait_for(self, script: str, wanted: Callable[[Any], bool], limit_s: float = _LOAD_S) -> Any:
        """What the script gives once it is what is wanted: figures are drawn after the load."""
        deadline = time.monotonic() + limit_s
        while not wanted(found := self.find(script)):
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        return found

    def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code)


@contextmanager
def open_browser():
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                 "--disable-background-networking", "--remote-debugging-port=0",
                 f"--user-data-dir={home}", "about:blank"]  # fmt: skip
        child = subprocess.Popen([CHROMIUM, *flags], stdout=-3, stderr=-3)
        try:
            told = Path(home) / "DevToolsActivePort"
            deadline = time.monotonic() + _LOAD_S
            while not (told.exists() and told.read_text().count("\n")):
                assert time.monotonic() < deadline and child.poll() is None, (
                    "Chromium did not start"
                )
                time.sleep(0.1)
            port = told.read_text().split("\n")[0]
            with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=_LOAD_S) as answer:
                tabs = json.load(answer)
            yield Tab(next(t["webSocketDebuggerUrl"] for t in tabs if t["type"] == "page"))
        finally:
            child.terminate()
            child.wait(timeout=_LOAD_S)

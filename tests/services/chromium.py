"""Debian's Chromium without a window, driven by the DevTools protocol over one websocket."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

PROGRAM = Path("/usr/bin/chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-port=0"),
)
START_S = 60.0
ANSWER_S = 60.0


def program() -> str | None:
    """Where it is; None where it is not."""
    return str(PROGRAM) if PROGRAM.exists() else shutil.which("chromium")


class PageError(Exception):
    """What the page's script threw, or the browser refused."""


class Browser:
    """The connection to one browser; answers go to whoever asked, events to the page of their session."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._listeners: dict[str, Callable[[str, Any], None]] = {}
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for text in self._socket:
            message = json.loads(text)
            if "id" in message:
                future = self._answers.pop(message["id"])
                if not future.done():
                    future.set_result(message)
            else:
                listener = self._listeners.get(message.get("sessionId", ""))
                if listener is not None:
                    listener(message["method"], message["params"])

    async def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        target = {} if session is None else {"sessionId": session}
        await self._socket.send(json.dumps({"id": number, "method": method, "params": params, **target}))
        answer = await asyncio.wait_for(self._answers[number], ANSWER_S)
        if "error" in answer:
            raise PageError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    async def new_page(self, *, width: int = 1440, height: int = 900, dark: bool = False) -> "Page":
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = Page(self, session)
        self._listeners[session] = page.hear
        for domain in ("Page", "Runtime", "Network", "Log"):
            await page.call(f"{domain}.enable")
        await page.resize(width, height)
        await page.prefer("dark" if dark else "light")
        return page

    def close(self) -> None:
        self._reading.cancel()


class Page:
    """One tab. `errors` are what its console said in anger, `requests` every URL that it asked for."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.errors: list[str] = []
        self.requests: list[str] = []

    def hear(self, method: str, params: Any) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(" ".join(str(each.get("value")) for each in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    async def call(self, method: str, **params: Any) -> Any:
        return await self._browser.call(method, self._session, **params)

    async def resize(self, width: int, height: int, *, scale: float = 1.0) -> None:
        is_phone = width < 600
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=is_phone
        )

    async def prefer(self, scheme: str, *, reduced_motion: bool = False) -> None:
        """Colours and motion as the system would ask for them."""
        motion = "reduce" if reduced_motion else "no-preference"
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def before_all(self, script: str) -> None:
        """Run a script in every document before its own."""
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """The value of an expression, awaited when it is a promise. Raises PageError with what it threw."""
        result = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description") or details["text"])
        return result["result"].get("value")

    async def until(self, condition: str, timeout_s: float = 30.0) -> None:
        """Wait until an expression is true; TimeoutError names it."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.run(f"Boolean({condition})"):  # noqa: ASYNC110 (the question is to a browser)
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.run("document.body.innerText.slice(0, 600)")
            raise TimeoutError(f"never came true: {condition}; errors {self.errors}; page: {text}") from None

    async def press(self, key: str, *, text: str | None = None, shift: bool = False) -> None:
        """One key, down and up. `text` is what it types."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowUp": 38, "ArrowDown": 40}.get(key)
        about: dict[str, Any] = {"key": key, "modifiers": 8 if shift else 0}
        if code is not None:
            about |= {"code": key, "windowsVirtualKeyCode": code}
        if key == "Enter":
            text = "\r"
        typed = {} if text is None else {"text": text}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **about, **typed)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def picture(self, path: Path, *, full: bool = False) -> None:
        """A PNG of what is in sight, or of the whole page."""
        shot = await self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=full, optimizeForSpeed=False
        )
        await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))


@asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    """A browser with a new, empty profile; nothing of it is left at the end."""
    folder = tempfile.mkdtemp(prefix="lf-chromium-")
    process = await asyncio.create_subprocess_exec(
        program() or "chromium",
        *FLAGS,
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        url = await asyncio.wait_for(_address(process), START_S)
        async with connect(url, max_size=None) as socket:
            browser = Browser(socket)
            yield browser
            browser.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        shutil.rmtree(folder, ignore_errors=True)


async def _address(process: asyncio.subprocess.Process) -> str:
    """Where the browser listens, from what it prints."""
    assert process.stderr is not None
    said = ""
    async for line in process.stderr:
        said += line.decode(errors="replace")
        found = re.search(r"DevTools listening on (ws://\S+)", said)
        if found:
            return found[1]
    raise AssertionError(f"chromium ended: {said[-2000:]}")

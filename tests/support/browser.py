"""A real Chromium, driven over the DevTools protocol through a pipe.

async with open_page() as page:
    await page.goto(url)
    await page.until("document.querySelectorAll('.tank').length === 2")
"""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.waiting import eventually

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
MESSAGE_BYTES_MAX = 64 * 2**20
DEADLINE_S = 60.0
# A keyboard sends these: key, code, Windows' number, text.
KEYS = {
    "Tab": ("Tab", "Tab", 9, ""),
    "Enter": ("Enter", "Enter", 13, "\r"),
    "Space": (" ", "Space", 32, " "),
}


class PageError(AssertionError):
    """The page or the browser failed a command."""


@dataclass
class Page:
    """A tab, with the requests it made and its console messages."""

    _writer: asyncio.StreamWriter
    session: str = ""
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    _answers: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    _numbers: Any = field(default_factory=itertools.count)

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol. Raises PageError."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        answer = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._writer.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(DEADLINE_S):
            body = await answer
        if "error" in body:
            raise PageError(f"{method}: {body['error']['message']}")
        result: dict[str, Any] = body["result"]
        return result

    async def goto(self, url: str) -> None:
        """Open an address; returns at once."""
        await self.send("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = await self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise PageError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is true; returns its value."""
        try:
            # DOM nodes cannot be serialised: return whether there is a node.
            guarded = f"((value) => value instanceof Node || value)({expression})"
            return await eventually(lambda: self._tried(guarded), deadline_s=DEADLINE_S)
        except AssertionError as error:
            text = await self._tried("document.body.innerText")
            raise PageError(f"{expression}: {error}\n{self.complaints}\n{text}") from None

    async def text(self, selector: str) -> str:
        """The rendered text of the first element that matches a selector."""
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def press(self, key: str) -> None:
        """Press and release a key of `KEYS`."""
        name, code, number, text = KEYS[key]
        fields = {"key": name, "code": code, "windowsVirtualKeyCode": number}
        down = {"text": text} if text else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **fields, **down)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **fields)

    async def type(self, text: str) -> None:
        """Insert text into the focused element."""
        await self.send("Input.insertText", text=text)

    async def screenshot(self, whole: bool = True) -> bytes:
        """A PNG of the page."""
        answer = await self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    async def set_view(self, width: int, height: int, **features: str) -> None:
        """Set the window's size and media features (named as in media queries, with _ for -)."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        named = [
            {"name": name.replace("_", "-"), "value": value} for name, value in features.items()
        ]
        await self.send("Emulation.setEmulatedMedia", features=named)

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Read the browser's messages until it exits."""
        with_end = b"\0"
        while True:
            try:
                message = json.loads((await reader.readuntil(with_end))[:-1])
            except asyncio.IncompleteReadError:
                return
            if "id" in message:
                answer = self._answers.pop(message["id"])
                if not answer.done():
                    answer.set_result(message)
            else:
                self._note(message["method"], message["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.complaints.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                entry = params["entry"]
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")

    async def _tried(self, expression: str) -> Any:
        """As `evaluate`, but None during navigation."""
        try:
            return await self.evaluate(expression)
        except PageError:
            return None


@asynccontextmanager
async def open_page(width: int = 1280, height: int = 900, **features: str) -> AsyncIterator[Page]:
    """A tab of a new browser with a temporary profile; closed on exit."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(
        prefix="tideserve-browser-", ignore_cleanup_errors=True
    ) as home:
        to_browser, from_browser = os.pipe(), os.pipe()

        # The browser reads commands from descriptor 3 and writes replies to 4.
        inner, outer = to_browser[0], from_browser[1]
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", f'exec "$@" 3<&{inner} 4>&{outer}', "bash", CHROMIUM, *FLAGS),
            *(f"--user-data-dir={home}", f"--window-size={width},{height}"),
            pass_fds=(inner, outer),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": home, "XDG_CONFIG_HOME": home, "XDG_CACHE_HOME": home},
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=MESSAGE_BYTES_MAX)
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_browser[0], "rb")
        )
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(to_browser[1], "wb")
        )
        page = Page(asyncio.StreamWriter(transport, protocol, None, loop))
        reading = asyncio.create_task(page.read(reader))
        try:
            target = await page.send("Target.createTarget", url="about:blank")
            attached = await page.send(
                "Target.attachToTarget", targetId=target["targetId"], flatten=True
            )
            page.session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                await page.send(f"{domain}.enable")
            await page.set_view(width, height, **features)
            yield page
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            transport.close()
            reading.cancel()
            await asyncio.wait([reading])

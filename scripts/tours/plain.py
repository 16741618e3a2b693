"""Plain HTTP by the standard library: what every client's greedy text is compared with."""

import json
import re
import time
import urllib.request
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from tours.task import MESSAGES, PROMPT, TOKENS

TIMEOUT_S = 120.0
QUIET_TIMEOUT_S = 90.0
POLL_S = 0.1
INFLIGHT = "tideserve_gateway_requests_inflight"
OUTPUT_TOKENS = "tideserve_gateway_output_tokens_total"


class Plain:
    """The server at `url` without any client's help."""

    def __init__(self, url: str, api_key: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {api_key}",
        }

    @cached_property
    def model(self) -> str:
        """The first model that is served."""
        return str(self._ask("/v1/models")["data"][0]["id"])

    @cached_property
    def chat_text(self) -> str:
        """The greedy answer to tours.task.MESSAGES."""
        return self.chat(MESSAGES)

    @cached_property
    def completion_text(self) -> str:
        """The greedy continuation of tours.task.PROMPT."""
        return self.complete(PROMPT)

    def chat(self, messages: list[dict[str, Any]], max_tokens: int = TOKENS, **more: Any) -> str:
        """The greedy answer to the messages."""
        body = {"messages": messages, "max_tokens": max_tokens, **self._greedy, **more}
        answer = self._ask("/v1/chat/completions", body)
        return str(answer["choices"][0]["message"]["content"])

    def complete(self, prompt: str, max_tokens: int = TOKENS, **more: Any) -> str:
        """The greedy continuation of the prompt."""
        body = {"prompt": prompt, "max_tokens": max_tokens, **self._greedy, **more}
        return str(self._ask("/v1/completions", body)["choices"][0]["text"])

    def output_tokens(self) -> int:
        """Tokens that the gateway has passed on so far."""
        return int(self._metric(OUTPUT_TOKENS))

    def wait_until_quiet(self) -> None:
        """Return once no request is in the gateway. Raises TimeoutError if that takes too long."""
        self._wait(lambda: self._metric(INFLIGHT) <= 0, "requests still run after")

    def wait_for_output(self, tokens: int) -> None:
        """Return once more than `tokens` have been passed on. Raises TimeoutError."""
        self._wait(lambda: self.output_tokens() > tokens, "no token within")

    def _wait(self, ready: Callable[[], bool], problem: str) -> None:
        deadline_s = time.monotonic() + QUIET_TIMEOUT_S
        while not ready():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{problem} {QUIET_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)

    @property
    def _greedy(self) -> dict[str, Any]:
        return {"model": self.model, "temperature": 0}

    def _metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = self._read("/metrics").decode()
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, values))

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return json.loads(self._read(path, body))

    def _read(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return bytes(answer.read())

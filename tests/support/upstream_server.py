"""A server with vLLM's wire API: token ids, metrics, disconnects, refusals.

The next token is a function of the sequence, so a resumed request gets the tokens of an undisturbed
one.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

from tests.support.ports import free_port
from tests.support.waiting import eventually

MODEL = "up/stream"
VOCAB = 90
"""Tokens are 3 to 92, none of which is a special token of a tiny model."""
BLOCK_SIZE = 16
BLOCKS = 64


def next_token(sequence: list[int]) -> int:
    """The token that the server's model outputs after `sequence`."""
    return 3 + (sum(sequence[-8:]) * 31 + 7 * len(sequence)) % VOCAB


def expected(prompt: list[int], count: int) -> list[int]:
    """The `count` tokens of output for a prompt."""
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


@dataclass
class UpstreamServer:
    """A server whose port survives `kill` and `start`.

    Streams pause after `held_after` tokens while `gate` is not set, see `hold`. `refusals`:
    statuses of the next requests. `bodies`: of all completions; `hung_up`: prompts of streams that
    a client closed. With a `tokenizer`, it returns text only, and with `text_prompts` it takes only
    text; it refuses all completions unless it `completes`. While `polled` is not set,
    /metrics does not answer. `ends_early`: streams end without a finish reason. `metrics_status` is
    the status of /metrics, `failed_polls` counts those that are not 200; `probe_status` is the
    status of completions that are not streamed, `failed_probes` counts those that are not 200.
    `content_type` is that of streams, `filler` is sent again and again while a stream pauses,
    `owned_by` is the kind of server. `breaks`: connections of streams close after the headers.
    `cached_tokens`: what the usage says of the prompt.
    `tokens_more`: tokens that it sends beyond `max_tokens`, one in some milliseconds.
    """

    port: int = field(default_factory=free_port)
    model: str = MODEL
    max_model_len: int = 512
    tokenizer: Tokenizer | None = None
    text_prompts: bool = False
    completes: bool = True
    has_metrics: bool = True
    key: str | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    held_after: int = 0
    refusals: list[int] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    hung_up: list[list[int]] = field(default_factory=list)
    running: int = 0
    polled: asyncio.Event = field(default_factory=asyncio.Event)
    ends_early: bool = False
    metrics_status: int = 200
    failed_polls: int = 0
    probe_status: int = 200
    failed_probes: int = 0
    content_type: str = "text/event-stream"
    filler: str = ""
    owned_by: str = "vllm"
    breaks: bool = False
    cached_tokens: Any = 0
    tokens_more: int = 0
    _server: uvicorn.Server | None = None
    _serving: "asyncio.Task[None] | None" = None

    def __post_init__(self) -> None:
        self.polled.set()
        self.release()

    def hold(self, after: int = 0) -> None:
        """Pause each stream after that many tokens, until `release`."""
        self.gate.clear()
        self.held_after = after

    def release(self) -> None:
        """Resume all streams."""
        self.gate.set()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def start(self) -> None:
        """Listen, and wait until connections succeed."""
        routes = [
            Route("/v1/models", self._models),
            Route("/version", self._version),
            Route("/metrics", self._metrics),
            Route("/v1/completions", self._completions, methods=["POST"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), port=self.port, log_level="critical", lifespan="off"
        )
        self._server = server = uvicorn.Server(config)
        self._serving = asyncio.create_task(server._serve())
        await eventually(lambda: server.started)

    async def kill(self) -> None:
        """Stop at once, which breaks connections in the middle of responses."""
        server, serving = self._server, self._serving
        if server is None or serving is None:
            return
        self._server = self._serving = None
        for listener in server.servers:
            listener.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        server.force_exit = server.should_exit = True
        await serving
        self.running = 0

    async def _models(self, request: Request) -> Response:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "no such key"}}, 401)
        model = {"id": self.model, "owned_by": self.owned_by, "max_model_len": self.max_model_len}
        return JSONResponse({"object": "list", "data": [model | {"root": self.model}]})

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": "0.99"})

    async def _metrics(self, _: Request) -> Response:
        if not self.has_metrics:
            return Response(status_code=404)
        await self.polled.wait()
        if self.metrics_status != 200:
            self.failed_polls += 1
            return Response(status_code=self.metrics_status)
        return PlainTextResponse(
            "# TYPE vllm:num_requests_running gauge\n"
            f'vllm:num_requests_running{{engine="0"}} {self.running}\n'
            'vllm:num_requests_waiting{engine="0"} 0.0\n'
            'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
            "vllm:cache_config_info"
            f'{{block_size="{BLOCK_SIZE}",num_gpu_blocks="{BLOCKS + 1}"}} 1.0\n'
        )

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        prompt = self._prompt(body["prompt"])
        if prompt is None:
            return JSONResponse({"error": {"message": "the prompt must be text"}}, 400)
        if body.get("stream"):
            self.bodies.append(body)
            if self.refusals:
                status = self.refusals.pop(0)
                error = {"error": {"message": "as the test wants", "code": status}}
                return JSONResponse(error, status, {"Retry-After": "0.02"})
            events = self._stream(body, prompt)
            return StreamingResponse(events, media_type=self.content_type)
        if self.probe_status != 200:
            self.failed_probes += 1
            return JSONResponse({"error": {"message": "full"}}, self.probe_status)
        tokens = expected(prompt, body["max_tokens"])
        choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": "length"}
        if self.tokenizer is None:
            choice["token_ids"] = tokens
        if body.get("prompt_logprobs") is not None:
            rows = [{str(t): {"logprob": -1.0, "rank": 1}} for t in body["prompt"][1:]]
            choice["prompt_logprobs"] = [None, *rows]
        return JSONResponse({"choices": [choice]})

    def _prompt(self, given: list[int] | str) -> list[int] | None:
        """The token ids of a prompt; None if it has the wrong form."""
        if isinstance(given, str) != self.text_prompts or not self.completes:
            return None
        if isinstance(given, list):
            return given
        assert self.tokenizer is not None
        return list(self.tokenizer.encode(given, add_special_tokens=False).ids)

    async def _stream(self, body: dict[str, Any], prompt: list[int]) -> AsyncIterator[str]:
        stops = body.get("stop_token_ids") or []
        self.running += 1
        finished = False
        try:
            if self.breaks:
                raise ConnectionAbortedError
            tokens = expected(prompt, body["max_tokens"] + self.tokens_more)
            for count, token in enumerate(tokens, start=1):
                if count > self.held_after:
                    while self.filler and not self.gate.is_set():
                        yield self.filler
                        await asyncio.sleep(0.01)
                    await self.gate.wait()
                reason = "length" if count == len(tokens) else None
                if count > body["max_tokens"]:
                    await asyncio.sleep(0.005)
                if token in stops:
                    reason = "stop"
                if self.ends_early and count == 2:
                    return
                yield self._event(token, reason, "logprobs" in body)
                if reason is not None:
                    break
            yield self._usage(body, prompt)
            finished = True
            yield "data: [DONE]\n\n"
        finally:
            self.running = max(0, self.running - 1)
            if not finished:
                self.hung_up.append(prompt)

    def _usage(self, body: dict[str, Any], prompt: list[int]) -> str:
        """The event with the usage, empty if the client did not ask for it."""
        if not (body.get("stream_options") or {}).get("include_usage"):
            return ""
        details = {"cached_tokens": self.cached_tokens}
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": details}
        return f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"

    def _event(self, token: int, reason: str | None, logprobs: bool) -> str:
        if self.tokenizer is not None:
            text = self.tokenizer.decode([token])
            return _line({"index": 0, "text": text, "finish_reason": reason})
        return _line(_choice(token, reason, logprobs))


def _line(choice: dict[str, Any]) -> str:
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def _choice(token: int, reason: str | None, logprobs: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "text": f"{token} ",
        "token_ids": [token],
        "finish_reason": reason,
        "stop_reason": token if reason == "stop" else None,
        "logprobs": None,
    }
    if logprobs:
        other = {f"token_id:{token}": -0.5, "token_id:1": -1.5}
        choice["logprobs"] = {
            "tokens": [f"token_id:{token}"],
            "token_logprobs": [-0.5],
            "top_logprobs": [other],
        }
    return choice

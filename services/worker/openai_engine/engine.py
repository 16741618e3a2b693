"""Runs requests on an upstream server, through losses of the server.

`UpstreamEngine.generate` has the interface of vLLM's `AsyncLLM`, so `VllmAdapter` serves both. When
a server is lost under a request, the request waits for it and then continues after its last token:
its output so far becomes part of its prompt.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from services.common.clock import monotonic_s
from services.common.timeouts import timeout
from services.core.request import SERVER_LOSSES_MAX
from services.worker.openai_engine.client import TokenDeadline, UpstreamClient
from services.worker.openai_engine.completions import UpstreamDialect, priority_fields, prompt_rows
from services.worker.openai_engine.errors import (
    UpstreamBusy,
    UpstreamFailed,
    UpstreamLost,
    UpstreamRefused,
)
from services.worker.openai_engine.link import UpstreamLink
from services.worker.openai_engine.model_limits import ModelLimits
from services.worker.openai_engine.output import (
    LogprobMap,
    OutputAssembler,
    StreamedCompletion,
    StreamedMoments,
    StreamReader,
    read_event,
)
from services.worker.openai_engine.probe import UpstreamFacts
from services.worker.vllm_engine.outputs import VllmOutput
from services.worker.vllm_engine.server_losses import LossCount

USAGE_WAIT_S = 0.5
"""Longest wait for the usage after the last token."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Longest waits of a request, in seconds: for the first token of a stream, for each later
    token, and for a server without room."""

    first_s: float
    event_s: float
    busy_s: float


class UpstreamEngine:
    """An upstream server with `facts` that serves `model`, as an `AsyncEngine`."""

    def __init__(
        self,
        client: UpstreamClient,
        dialect: UpstreamDialect,
        link: UpstreamLink,
        facts: UpstreamFacts,
        model: ModelLimits,
        limits: StreamLimits,
    ) -> None:
        self._client = client
        self._dialect = dialect
        self._link = link
        self._facts = facts
        self._model = model
        self._limits = limits

    async def is_paused(self) -> bool:
        """False: the link watches the server."""
        return False

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, priority: int
    ) -> AsyncGenerator[VllmOutput, None]:
        """Yield the output of a request; closing the generator aborts it at the server.

        Losses of the server are added to `prompt["server_losses"]`.

        Raises:
            UpstreamRefused: if the server refuses the request.
            UpstreamFailed: if the request failed or cannot continue, or the server was gone for
                too long or lost too often.
        """
        arguments = dict(sampling_params)
        prompt_top, rows = arguments.pop("prompt_logprobs", None), None
        output = self._assembler(prompt, arguments)
        began_s = monotonic_s()
        moments = StreamedMoments(queued_ts=began_s, scheduled_ts=began_s)
        losses: LossCount = prompt["server_losses"]
        busy_until_s = began_s + self._limits.busy_s
        while True:
            await self._link.wait_ready()
            body = self._body(prompt, continued(arguments, len(output.token_ids)), output, priority)
            try:
                if prompt_top is not None:
                    rows, prompt_top = await self._prompt_rows(prompt, prompt_top), None
                async with aclosing(self._completions(body, output)) as completions:
                    async for completion in completions:
                        moments.note_tokens(monotonic_s())
                        yield output.streamed(completion, rows, moments)
                        rows, busy_until_s = None, monotonic_s() + self._limits.busy_s
                if output.finished:
                    return
                raise UpstreamLost("the upstream server ended a stream without a finish reason")
            except UpstreamBusy as error:
                if monotonic_s() + error.retry_after_s > busy_until_s:
                    raise UpstreamFailed(str(error)) from error
                async with self._link.refused():
                    await asyncio.sleep(error.retry_after_s)
            except UpstreamLost as error:
                self._note_loss(error, losses, output)

    def _note_loss(self, error: UpstreamLost, losses: LossCount, output: OutputAssembler) -> None:
        """Count a loss; raises UpstreamFailed if the request cannot continue."""
        losses.note(len(output.token_ids))
        self._link.note_loss(error)
        if output.token_ids and not self._facts.resumes:
            raise UpstreamFailed(
                "the upstream server was lost, and cannot continue the output because it returns"
                " text only"
            ) from error
        if losses.count >= SERVER_LOSSES_MAX:
            raise UpstreamFailed(
                f"upstream servers were lost {losses.count} times under this request, which may be"
                f" the cause; the last time: {error}"
            ) from error

    async def _completions(
        self, body: Mapping[str, Any], output: OutputAssembler
    ) -> AsyncGenerator[StreamedCompletion, None]:
        """The completions of a stream, until the request or the stream ends."""
        deadline = TokenDeadline(self._limits.first_s, self._limits.event_s)
        stream = self._client.events(self._dialect.path, body, deadline)
        output.begin()
        read = self._dialect.reader()
        async with aclosing(stream) as events:
            async for event in events:
                piece = read_event(read, event, self._model.vocab_size)
                if piece.token_ids:
                    deadline.note_token()
                    self._link.note_token()
                output.note_cached(piece)
                completion = output.push(piece)
                if output.finished and self._dialect.ends_with_usage:
                    await self._read_usage(events, read, output)
                if completion is not None:
                    yield completion
                if output.finished:
                    return

    async def _read_usage(
        self, events: AsyncIterator[dict[str, Any]], read: StreamReader, output: OutputAssembler
    ) -> None:
        """Read the rest of a stream whose output is whole, if it has no further tokens."""
        with suppress(TimeoutError, UpstreamLost, UpstreamRefused, UpstreamFailed):
            async with timeout(USAGE_WAIT_S):
                async for event in events:
                    piece = read_event(read, event, self._model.vocab_size)
                    output.note_cached(piece)
                    if piece.token_ids:
                        return

    def _assembler(self, prompt: Any, arguments: Mapping[str, Any]) -> OutputAssembler:
        return OutputAssembler(
            arguments["max_tokens"],
            frozenset(arguments["stop_token_ids"]),
            self._model.eos_ids,
            len(prompt["prompt_token_ids"]),
        )

    def _body(
        self, prompt: Any, arguments: Mapping[str, Any], output: OutputAssembler, priority: int
    ) -> dict[str, Any]:
        token_ids = [*prompt["prompt_token_ids"], *output.token_ids]
        body = self._dialect.body(token_ids, arguments, prompt.get("cache_salt", ""))
        return body | priority_fields(self._facts.class_fields, priority)

    async def _prompt_rows(self, prompt: Any, top: int) -> Sequence[LogprobMap | None]:
        """The prompt's log probabilities, from a request of their own: streams do not have them."""
        body = self._dialect.body(
            prompt["prompt_token_ids"],
            {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top},
            prompt.get("cache_salt", ""),
        )
        answer = await self._client.answer(
            self._dialect.path, body | {"stream": False}, self._limits.first_s
        )
        return prompt_rows(answer)


def continued(arguments: Mapping[str, Any], emitted: int) -> dict[str, Any]:
    """The arguments of a request that continues after `emitted` tokens.

    Raises:
        UpstreamFailed: if it has a grammar, because its output is partly matched.
    """
    if not emitted:
        return dict(arguments)
    if "structured_outputs" in arguments:
        raise UpstreamFailed(
            "the upstream server was lost in the middle of a grammar, which it cannot continue"
        )
    return {
        **arguments,
        "max_tokens": arguments["max_tokens"] - emitted,
        "min_tokens": max(0, arguments.get("min_tokens", 0) - emitted),
    }

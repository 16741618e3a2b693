"""Sequential requests, each of which may depend on the previous answer."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.common.clock import monotonic_s
from services.common.timeouts import timeout
from tideserve.cli.errors import SystemUnavailable
from tideserve.load.event_stream import OpenAIServer, StreamedAnswer, StreamFailed
from tideserve.load.workload import PlannedRequest

ANSWER_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """An answer; `cached_tokens` of its prompt were prefix-cache hits."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    output_ids: tuple[int, ...]


class OneByOne:
    """`with OneByOne(url, model) as client:`; a blocking client."""

    def __init__(self, url: str, model: str) -> None:
        self._model = model
        self._server = OpenAIServer(url, None)
        self._runner = asyncio.Runner()

    def __enter__(self) -> "OneByOne":
        self._runner.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._runner.run(self._server.close())
        self._runner.__exit__(*error)

    def ask(self, prompt_ids: Sequence[int], output_tokens: int, salt: str = "bench") -> TurnAnswer:
        """The answer to a prompt. Raises SystemUnavailable if the request fails."""
        return self._runner.run(self._ask(tuple(prompt_ids), output_tokens, salt))

    async def _ask(self, prompt_ids: tuple[int, ...], output_tokens: int, salt: str) -> TurnAnswer:
        answer, sent_s = StreamedAnswer(), 0.0
        request = PlannedRequest(0.0, prompt_ids, output_tokens, 0, cache_salt=salt)

        def note_sent() -> None:
            nonlocal sent_s
            sent_s = monotonic_s()

        try:
            async with timeout(ANSWER_TIMEOUT_S):
                await self._server.complete(self._model, request, answer, note_sent)
        except (TimeoutError, StreamFailed, OSError) as failure:
            raise SystemUnavailable(f"a request failed: {failure or 'no answer'}") from failure
        if answer.status != 200 or answer.error or len(answer.output_ids) != output_tokens:
            reason = answer.error or answer.body or f"{len(answer.output_ids)} tokens received"
            raise SystemUnavailable(f"a request failed with {answer.status}: {reason}")
        return TurnAnswer(
            len(prompt_ids),
            answer.cached_tokens,
            answer.token_times_s[0] - sent_s,
            tuple(answer.output_ids),
        )

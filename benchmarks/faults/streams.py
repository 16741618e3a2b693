"""Streams that run at once, all or so many at a time, with every token and its time kept."""

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from benchmarks.undisturbed import Undisturbed
from services.common.clock import monotonic_s
from tideserve.cli.errors import SystemUnavailable
from tideserve.load.event_stream import OpenAIServer, StreamedAnswer, StreamFailed
from tideserve.load.workload import DEFAULT_CLASS, TOKEN_ID_MAX, TOKEN_ID_MIN, PlannedRequest

STALL_S = 90.0
"""A stream without a token for so long is stuck; the longest fault lasts 70 s."""
TEMPERATURE = 0.8
PROMPT_TOKENS = (24, 64)
OUTPUT_TOKENS = (280, 360)
POLL_S = 0.5
BATCH = "batch"


def stream_requests(
    count: int,
    seed: int,
    output_tokens: tuple[int, int] = OUTPUT_TOKENS,
    batch: int = 0,
    prompt_tokens: tuple[int, int] = PROMPT_TOKENS,
) -> list[PlannedRequest]:
    """Sampled requests of different lengths; the same for the same seed. The first are `batch`."""
    requests = []
    for number in range(count):
        rng = Random(f"{seed}/{number}")
        prompt = tuple(
            rng.randint(TOKEN_ID_MIN, TOKEN_ID_MAX - 1) for _ in range(rng.randint(*prompt_tokens))
        )
        requests.append(
            PlannedRequest(
                0.0,
                prompt,
                rng.randint(*output_tokens),
                number,
                BATCH if number < batch else DEFAULT_CLASS,
                temperature=TEMPERATURE,
            )
        )
    return requests


@dataclass(frozen=True, slots=True)
class StreamOutcome:
    """How a stream went. `failure`: what its client heard or saw instead of the end, "" if none.

    `times_s` are those of its tokens on the monotonic clock, on which it was sent at `sent_s` and
    ended at `ended_s`. `told_tokens`, `prompt_tokens`: what its usage says. `stuck`: it was given
    up, since nothing came for `STALL_S`.
    """

    token_ids: tuple[int, ...]
    times_s: tuple[float, ...]
    ended_s: float
    finished: bool
    told_tokens: int
    failure: str = ""
    stuck: bool = False
    sent_s: float = 0.0
    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0

    def runs(self, at_s: float) -> bool:
        """Whether it was sent by that time, and had neither ended nor its last token."""
        last_s = self.times_s[-1] if self.finished and self.times_s else self.ended_s
        return self.sent_s <= at_s < last_s

    def has_tokens_left(self, at_s: float) -> bool:
        """Whether it had a token at that time, and not the last one."""
        return bool(self.times_s) and self.times_s[0] <= at_s and self.runs(at_s)

    def silence_s(self, since_s: float) -> float:
        """The longest time from a token to the next one, or to the end, that is after `since_s`.

        The wait for the first token counts from when it was sent, or from `since_s` if that is
        later.
        """
        first_s = self.times_s[0] if self.times_s else self.ended_s
        waited_s = max(0.0, first_s - max(self.sent_s, since_s))
        pairs = itertools.pairwise((*self.times_s, self.ended_s) if self.times_s else ())
        gaps_s = (later - earlier for earlier, later in pairs if later > since_s)
        return max(waited_s, max(gaps_s, default=0.0))


class Streams:
    """Sends all requests at once, or `at_once` at a time, from a thread of this process.

    If there is batch work, the others are sent once all of it has a token.
    """

    def __init__(
        self,
        url: str,
        model: str,
        requests: Sequence[PlannedRequest],
        salt: str,
        stall_s: float,
        at_once: int | None = None,
    ) -> None:
        """With a `salt` of their own they find no prefixes that other streams have left."""
        self._url = url
        self._model = model
        self._stall_s = stall_s
        self._at_once = at_once or len(requests)
        self._requests = [replace(one, cache_salt=salt) for one in requests]
        self._answers = [StreamedAnswer() for _ in requests]
        self._failures = [""] * len(requests)
        self._stuck = [False] * len(requests)
        self._sent_s = [0.0] * len(requests)
        self._ended_s = [0.0] * len(requests)
        self._batch_begun = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"streams {salt}", daemon=True)

    def start(self) -> None:
        """Send them."""
        self._thread.start()

    @property
    def begun(self) -> int:
        """How many have a token."""
        return sum(bool(answer.token_times_s) for answer in self._answers)

    @property
    def ended(self) -> int:
        """How many have ended, however each did."""
        return sum(bool(ended_s) for ended_s in self._ended_s)

    @property
    def running(self) -> bool:
        """Whether some have not ended."""
        return self._thread.is_alive()

    def wait(self) -> list[StreamOutcome]:
        """Wait for the end of all of them, however each ends."""
        self._thread.join()
        return [
            StreamOutcome(
                tuple(answer.output_ids),
                tuple(answer.token_times_s),
                self._ended_s[number],
                answer.finished,
                answer.output_tokens,
                self._failures[number] or _failure_in(answer),
                self._stuck[number],
                self._sent_s[number],
                answer.text,
                answer.finish_reason,
                answer.prompt_tokens,
            )
            for number, answer in enumerate(self._answers)
        ]

    def _run(self) -> None:
        asyncio.run(self._send_all())

    async def _send_all(self) -> None:
        server, numbers = OpenAIServer(self._url, None), iter(range(len(self._requests)))
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._at_once):
                    tasks.create_task(self._send_in_turn(server, numbers))
        finally:
            await server.close()

    async def _send_in_turn(self, server: OpenAIServer, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._send(server, number)

    def _note_batch(self) -> None:
        """Let the others begin once all batch work has a token, or has ended without one."""
        every = zip(self._requests, self._answers, self._ended_s, strict=True)
        if all(a.token_times_s or ended_s for r, a, ended_s in every if r.slo_class == BATCH):
            self._batch_begun.set()

    async def _send(self, server: OpenAIServer, number: int) -> None:
        self._note_batch()
        if self._requests[number].slo_class != BATCH:
            await self._batch_begun.wait()
        answer = self._answers[number]
        self._sent_s[number] = monotonic_s()
        sending = asyncio.create_task(
            server.complete(self._model, self._requests[number], answer, lambda: None)
        )
        seen, waited_s = 0, 0.0
        while not sending.done() and waited_s < self._stall_s:
            await asyncio.wait((sending,), timeout=POLL_S)
            waited_s = waited_s + POLL_S if len(answer.token_times_s) == seen else 0.0
            seen = len(answer.token_times_s)
            self._note_batch()
        if not sending.done():
            self._stuck[number] = True
            sending.cancel()
        try:
            await sending
        except (StreamFailed, OSError) as error:
            self._failures[number] = str(error) or type(error).__name__
        except asyncio.CancelledError:
            self._failures[number] = f"nothing came for {self._stall_s:.0f} s"
        self._ended_s[number] = monotonic_s()
        self._note_batch()


def sent(
    url: str,
    model: str,
    requests: Sequence[PlannedRequest],
    salt: str,
    at_once: int | None = None,
) -> list[StreamOutcome]:
    """How requests end that are sent at once, or `at_once` at a time."""
    streams = Streams(url, model, requests, salt, STALL_S, at_once)
    streams.start()
    return streams.wait()


def undisturbed_answers(
    url: str, model: str, requests: Sequence[PlannedRequest], at_once: int | None = None
) -> list[Undisturbed]:
    """The answers of a run without a fault. Raises SystemUnavailable if a request fails."""
    outcomes = sent(url, model, requests, "undisturbed", at_once)
    for number, (outcome, request) in enumerate(zip(outcomes, requests, strict=True)):
        if outcome.failure or len(outcome.token_ids) != request.output_tokens:
            raise SystemUnavailable(
                f"request {number} failed without a fault after {len(outcome.token_ids)} tokens:"
                f" {outcome.failure or 'it ended too early'}"
            )
    return [
        Undisturbed(one.token_ids, one.text, one.finish_reason, one.prompt_tokens)
        for one in outcomes
    ]


def _failure_in(answer: StreamedAnswer) -> str:
    if answer.status != 200:
        return f"HTTP {answer.status}: {answer.body[:300]}"
    return answer.error

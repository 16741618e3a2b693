"""Loads sent from a thread of this process: streams with all tokens recorded, and endless loads."""

import asyncio
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from benchmarks.faults.outcomes import REFUSALS, StreamOutcome, Tally, Undisturbed
from services.common.clock import monotonic_s
from tideserve.cli.errors import SystemUnavailable
from tideserve.load.event_stream import OpenAIServer, StreamedAnswer, StreamFailed
from tideserve.load.workload import (
    BATCH_CLASS,
    DEFAULT_CLASS,
    TOKEN_ID_MAX,
    TOKEN_ID_MIN,
    PlannedRequest,
)

STALL_S = 90.0
"""A stream without a token for this long is stuck; the longest fault of a cell lasts 70 s."""
STEADY_STALL_S = 60.0
TEMPERATURE = 0.8
PROMPT_TOKENS, OUTPUT_TOKENS = (24, 64), (280, 360)
POLL_S = 0.5
HANG_UP_EVERY, HANG_UP_WITHIN_S = 10, 1.0
"""In an endless load, every tenth client disconnects early."""
REFUSAL_PAUSE_S = 0.2


def stream_requests(
    count: int,
    seed: int,
    output_tokens: tuple[int, int] = OUTPUT_TOKENS,
    batch: int = 0,
    prompt_tokens: tuple[int, int] = PROMPT_TOKENS,
) -> list[PlannedRequest]:
    """Random requests of different lengths, fixed by `seed`. The first `batch` are batch work."""
    token_ids = (TOKEN_ID_MIN, TOKEN_ID_MAX - 1)
    shape = Shape(0, prompt_tokens, output_tokens, token_ids, seed, TEMPERATURE)
    return [
        replace(shape.request(number), slo_class=BATCH_CLASS if number < batch else DEFAULT_CLASS)
        for number in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Shape:
    """Ranges (inclusive) of lengths and token ids from which requests are drawn.

    `distinct` limits the number of different requests, which then repeat.
    """

    concurrency: int = 8
    prompt_tokens: tuple[int, int] = (16, 96)
    output_tokens: tuple[int, int] = (16, 96)
    token_ids: tuple[int, int] = (300, 2000)
    seed: int = 0
    temperature: float = 0.0
    distinct: int = 0

    def request(self, number: int) -> PlannedRequest:
        """Request `number`; deterministic."""
        number = number % self.distinct if self.distinct else number
        rng = Random(f"{self.seed}/{number}")
        length = rng.randint(*self.prompt_tokens)
        prompt = tuple(rng.randint(*self.token_ids) for _ in range(length))
        output = rng.randint(*self.output_tokens)
        # Answers to requests with a salt include token ids.
        salt = "distinct" if self.distinct else None
        heat = self.temperature
        return PlannedRequest(0.0, prompt, output, number, cache_salt=salt, temperature=heat)


class Load(ABC):
    """Sends requests in order, `at_once` concurrently, from a thread of this process."""

    stall_s = STALL_S

    def __init__(
        self, url: str, model: str, requests: Iterable[PlannedRequest], at_once: int
    ) -> None:
        self._url = url
        self._model = model
        self._requests = enumerate(requests)
        self._at_once = at_once
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def start(self) -> None:
        """Start sending."""
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether requests are still being sent or answered."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait until all requests have ended, in whichever way."""
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._load())

    async def _load(self) -> None:
        server = OpenAIServer(self._url, None)
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._at_once):
                    tasks.create_task(self._send_in_turn(server))
        finally:
            await server.close()

    async def _send_in_turn(self, server: OpenAIServer) -> None:
        for number, request in self._requests:
            await self._send(server, number, request)

    @abstractmethod
    async def _send(self, server: OpenAIServer, number: int, request: PlannedRequest) -> None: ...

    async def _outcome(
        self,
        server: OpenAIServer,
        request: PlannedRequest,
        answer: StreamedAnswer,
        patience_s: float | None = None,
    ) -> StreamOutcome:
        """Send a request; disconnect after `patience_s`, or after `stall_s` without a token.

        Raises errors that no stream may cause.
        """
        sent_s = monotonic_s()
        sending = asyncio.create_task(server.complete(self._model, request, answer, lambda: None))
        if patience_s is None:
            await self._while_it_advances(sending, answer)
        else:
            await asyncio.wait((sending,), timeout=patience_s)
        # A no-op if the request has ended; otherwise the client disconnects.
        sending.cancel()
        failure = answer.error if answer.status == 200 else ""
        try:
            await sending
        except (StreamFailed, OSError) as error:
            failure = str(error) or type(error).__name__
        except asyncio.CancelledError:
            failure = f"no token for {self.stall_s:.0f} s"
        else:
            if answer.status != 200:
                failure = f"HTTP {answer.status}: {answer.body[:300]}"
        return StreamOutcome(
            tuple(answer.output_ids),
            tuple(answer.token_times_s),
            monotonic_s(),
            answer.finished,
            answer.output_tokens,
            failure,
            sending.cancelled() and patience_s is None,
            sent_s,
            answer.text,
            answer.finish_reason,
            answer.prompt_tokens,
            answer.status,
            sending.cancelled() and patience_s is not None,
            answer.request_id,
        )

    async def _while_it_advances(
        self, sending: "asyncio.Task[None]", answer: StreamedAnswer
    ) -> None:
        """Wait for the end, or until there was no token for `stall_s`."""
        seen, waited_s = 0, 0.0
        while not sending.done() and waited_s < self.stall_s:
            await asyncio.wait((sending,), timeout=POLL_S)
            waited_s = waited_s + POLL_S if len(answer.token_times_s) == seen else 0.0
            seen = len(answer.token_times_s)


class Streams(Load):
    """Sends all requests together, or `at_once` concurrently, and records their outcomes.

    Online requests are sent once every batch request has a token.
    """

    def __init__(
        self,
        url: str,
        model: str,
        requests: Sequence[PlannedRequest],
        salt: str,
        at_once: int | None = None,
    ) -> None:
        salted = [replace(request, cache_salt=salt) for request in requests]
        super().__init__(url, model, salted, at_once or len(salted))
        self._answers = [StreamedAnswer() for _ in salted]
        self._outcomes: dict[int, StreamOutcome] = {}
        self._batch = [n for n, request in enumerate(salted) if request.slo_class == BATCH_CLASS]

    @property
    def begun(self) -> int:
        """Number of streams with a token."""
        return sum(bool(answer.token_times_s) for answer in self._answers)

    @property
    def ended(self) -> int:
        """Number of ended streams, in whichever way."""
        return len(self._outcomes)

    def wait(self) -> list[StreamOutcome]:
        """Wait for all streams; returns their outcomes in request order."""
        self.join()
        return [outcome for _, outcome in sorted(self._outcomes.items())]

    async def _send(self, server: OpenAIServer, number: int, request: PlannedRequest) -> None:
        # Poll: an answer sets no event when a token arrives.
        while request.slo_class != BATCH_CLASS and not self._batch_has_begun():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        self._outcomes[number] = await self._outcome(server, request, self._answers[number])

    def _batch_has_begun(self) -> bool:
        return all(self._answers[n].token_times_s or n in self._outcomes for n in self._batch)


class SteadyLoad(Load):
    """`with SteadyLoad(url, model, shape) as load:`; exit waits until all requests have ended.

    Counts endings and measures no times.
    """

    stall_s = STEADY_STALL_S

    def __init__(
        self, url: str, model: str, shape: Shape, wanted: Sequence[Undisturbed] = ()
    ) -> None:
        """`wanted`: the undisturbed answer to each of the `distinct` requests."""
        self.tally = Tally()
        self._wanted = wanted
        self._stop = threading.Event()
        requests = map(shape.request, itertools.takewhile(self._goes_on, itertools.count()))
        super().__init__(url, model, requests, shape.concurrency)

    def __enter__(self) -> "SteadyLoad":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.join()

    def _goes_on(self, _number: int) -> bool:
        return not self._stop.is_set()

    async def _send(self, server: OpenAIServer, number: int, request: PlannedRequest) -> None:
        self.tally.sent += 1
        impatient = number % HANG_UP_EVERY == HANG_UP_EVERY - 1
        patience_s = Random(number).uniform(0, HANG_UP_WITHIN_S) if impatient else None
        outcome = await self._outcome(server, request, StreamedAnswer(), patience_s)
        wanted = self._wanted[number % len(self._wanted)] if self._wanted else None
        self.tally.note(number, outcome, request.output_tokens, wanted)
        if outcome.status in REFUSALS:
            await asyncio.sleep(REFUSAL_PAUSE_S)


def undisturbed_answers(
    url: str, model: str, requests: Sequence[PlannedRequest], at_once: int | None = None
) -> list[Undisturbed]:
    """Answers of a run without a fault. Raises SystemUnavailable if a request fails."""
    streams = Streams(url, model, requests, "undisturbed", at_once)
    streams.start()
    outcomes = streams.wait()
    for number, (outcome, request) in enumerate(zip(outcomes, requests, strict=True)):
        if outcome.failure or len(outcome.token_ids) != request.output_tokens:
            raise SystemUnavailable(
                f"request {number} failed without a fault after {len(outcome.token_ids)} tokens:"
                f" {outcome.failure or 'it ended too early'}"
            )
    return [
        Undisturbed(
            *(outcome.token_ids, outcome.text, outcome.finish_reason, outcome.prompt_tokens),
            times_s=outcome.times_s,
        )
        for outcome in outcomes
    ]

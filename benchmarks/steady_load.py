"""A load of constant concurrency that lasts until it is stopped, from a thread of this process.

It counts how requests end and measures no times. Every tenth client hangs up early.
"""

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from random import Random

from benchmarks.undisturbed import Undisturbed
from tideserve.load.event_stream import OpenAIServer, StreamedAnswer, StreamFailed
from tideserve.load.workload import PlannedRequest

STALL_S = 60.0
"""A request without a token for so long is stuck."""
HANG_UP_EVERY = 10
HANG_UP_WITHIN_S = 1.0
ERRORS_MAX = 10
REFUSAL_PAUSE_S = 0.2
REFUSALS = (429, 503)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the requests are like: ranges of lengths and token ids, ends included.

    With `distinct`, there are only so many different ones, which come again and again.
    """

    concurrency: int = 8
    prompt_tokens: tuple[int, int] = (16, 96)
    output_tokens: tuple[int, int] = (16, 96)
    token_ids: tuple[int, int] = (300, 2000)
    seed: int = 0
    temperature: float = 0.0
    distinct: int = 0

    def request(self, number: int) -> PlannedRequest:
        """The request of that number, always the same."""
        number = number % self.distinct if self.distinct else number
        rng = Random(f"{self.seed}/{number}")
        prompt = tuple(
            rng.randint(*self.token_ids) for _ in range(rng.randint(*self.prompt_tokens))
        )
        output = rng.randint(*self.output_tokens)
        # With a salt, the ids of the tokens are told.
        salt = "distinct" if self.distinct else None
        heat = self.temperature
        return PlannedRequest(0.0, prompt, output, number, cache_salt=salt, temperature=heat)


@dataclass(slots=True)
class Tally:
    """How requests have ended; `errors` are the first of those that were lost or stuck.

    Lost: the stream failed, or ended with fewer tokens than it should. Duplicated: with more.
    Different: with another answer than an undisturbed run's, where that is known.
    """

    sent: int = 0
    completed: int = 0
    hung_up: int = 0
    refused: int = 0
    lost: int = 0
    duplicated: int = 0
    stuck: int = 0
    different: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def ended(self) -> int:
        """All requests that have ended, in whichever way."""
        good = self.completed + self.hung_up + self.refused
        return good + self.lost + self.duplicated + self.stuck + self.different

    def problems(self, refusals: bool = False) -> list[str]:
        """A sentence for each kind of bad end; with `refusals`, these are bad, too."""
        names = ("lost", "duplicated", "stuck", "different", *(("refused",) if refusals else ()))
        counted = {name: getattr(self, name) for name in names}
        problems = [f"{count} requests were {name}" for name, count in counted.items() if count]
        if self.ended != self.sent:
            problems.append(f"{self.sent} requests were sent, and {self.ended} ended")
        if not self.completed:
            problems.append("no request was completed")
        return problems + self.errors

    def counts(self) -> dict[str, int]:
        """The figures, for a file."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "errors"}

    def add(self, other: "Tally") -> None:
        """Count what another load has counted, too."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def note_error(self, text: str) -> None:
        """Keep it, unless there are many."""
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(text)


class SteadyLoad:
    """`with SteadyLoad(url, model, shape) as load:`; leaving waits until all requests are over."""

    def __init__(
        self,
        url: str,
        model: str,
        shape: Shape,
        wanted: Sequence[Undisturbed] = (),
    ) -> None:
        """`wanted`: the answer to each of the `distinct` requests, undisturbed."""
        self.tally = Tally()
        self._wanted = wanted
        self._url = url
        self._model = model
        self._shape = shape
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="steady load", daemon=True)

    def __enter__(self) -> "SteadyLoad":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def running(self) -> bool:
        """Whether it still sends, or waits for answers."""
        return self._thread.is_alive()

    def _run(self) -> None:
        asyncio.run(self._load())

    async def _load(self) -> None:
        server = OpenAIServer(self._url, None)
        numbers = itertools.count()
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._shape.concurrency):
                    tasks.create_task(self._one_by_one(server, numbers))
        finally:
            await server.close()

    async def _one_by_one(self, server: OpenAIServer, numbers: Iterator[int]) -> None:
        while not self._stop.is_set():
            await self._send(server, next(numbers))

    async def _send(self, server: OpenAIServer, number: int) -> None:
        tally, answer = self.tally, StreamedAnswer()
        request = self._shape.request(number)
        impatient = number % HANG_UP_EVERY == HANG_UP_EVERY - 1
        tally.sent += 1
        sending = asyncio.create_task(server.complete(self._model, request, answer, lambda: None))
        try:
            if impatient:
                await asyncio.wait((sending,), timeout=Random(number).uniform(0, HANG_UP_WITHIN_S))
            else:
                await _while_it_advances(sending, answer)
        finally:
            sending.cancel()
            await asyncio.wait((sending,))
        if not sending.cancelled():
            failure = sending.exception()
            await self._judge(number, request.output_tokens, answer, failure)
        elif impatient:
            tally.hung_up += 1
        else:
            tally.stuck += 1
            got = len(answer.token_times_s)
            tally.note_error(
                f"request {number} ({answer.request_id}) got {got} tokens, then none for"
                f" {STALL_S:.0f} s"
            )

    async def _judge(
        self, number: int, wanted: int, answer: StreamedAnswer, failure: BaseException | None
    ) -> None:
        """Count a request that has ended. Raises errors that a stream must not give."""
        tally, got = self.tally, answer.output_tokens
        if failure is not None and not isinstance(failure, StreamFailed | OSError):
            raise failure
        if answer.status in REFUSALS:
            tally.refused += 1
            await asyncio.sleep(REFUSAL_PAUSE_S)
            return
        if self._wanted:
            got = min(got, len(answer.output_ids))  # what has come, not what is said to have come
        tally.tokens += got
        error = answer.error if failure is None else str(failure) or type(failure).__name__
        differs = self._difference(number, answer)
        if answer.finished and not error and got == wanted and not differs:
            tally.completed += 1
            return
        if answer.finished and got > wanted:
            tally.duplicated += 1
        elif differs:
            tally.different += 1
            error = f"beside an undisturbed run, {differs}{f'; {error}' if error else ''}"
        else:
            tally.lost += 1
        cause = error or (answer.body if answer.status != 200 else f"{got} of {wanted} tokens came")
        tally.note_error(f"request {number} ({answer.request_id}): {cause}")

    def _difference(self, number: int, answer: StreamedAnswer) -> str:
        """What it has otherwise than an undisturbed run; "" if nothing, or it has not come."""
        if not self._wanted:
            return ""
        wanted = self._wanted[number % len(self._wanted)]
        found = wanted.contradiction(answer.output_ids, answer.text)
        if found or not answer.finished or len(answer.output_ids) != len(wanted.token_ids):
            return found
        ended = (answer.finish_reason, answer.prompt_tokens, answer.output_tokens)
        return wanted.wrong_end(answer.text, *ended)


async def _while_it_advances(sending: "asyncio.Task[None]", answer: StreamedAnswer) -> None:
    """Wait for the end, or until nothing has come for a while."""
    seen = -1
    while not sending.done() and len(answer.token_times_s) > seen:
        seen = len(answer.token_times_s)
        await asyncio.wait((sending,), timeout=STALL_S)

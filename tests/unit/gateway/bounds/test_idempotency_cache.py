"""Responses that are produced once and read several times, and their bounds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.bounds.client import ClientGone
from services.gateway.bounds.idempotency_cache import ENTRY_BYTES, IdempotencyCache
from services.gateway.bounds.shared_response import ResponseReader, SharedResponse
from services.gateway.vocabulary.errors import GatewayError, IdempotencyKeyReused, QueueFull
from tests.support.clock import Clock
from tests.support.waiting import settle

LONG_S = 3600.0


def kept(
    answers_max: int = 10,
    bytes_max: int = 2**20,
    grace_s: float = LONG_S,
    clock: Clock | None = None,
) -> IdempotencyCache[int]:
    return IdempotencyCache(60.0, grace_s, answers_max, bytes_max, clock or Clock())


def new(answers: IdempotencyCache[int], name: str) -> SharedResponse[int]:
    answer, is_new = answers.claim(name, b"d", f"cmpl-{name}")
    assert is_new
    return answer


async def served(answers: IdempotencyCache[int], name: str, *sizes: int) -> None:
    """A response of messages with these sizes, which are also their values."""
    answer = new(answers, name)
    for size in sizes:
        await answer.put(size, size)
    answer.end(whole=True)


async def remaining(reader: ResponseReader[int]) -> list[int]:
    messages = []
    while (message := await reader.next()) is not None:
        messages.append(message)
    return messages


@asynccontextmanager
async def reading(answer: SharedResponse[int]) -> AsyncIterator["asyncio.Task[list[int]]"]:
    """A reader that takes messages in its own task."""
    with answer.reading() as reader:
        yield asyncio.create_task(remaining(reader))


async def test_readers_get_the_whole_response_during_and_after_it() -> None:
    answers = kept()
    answer = new(answers, "a")
    async with reading(answer) as first:
        await answer.put(1, 8)
        await settle()
        joined, is_new = answers.claim("a", b"d", "cmpl-b")
        assert joined is answer and not is_new and joined.response_id == "cmpl-a"
        async with reading(joined) as second:
            await answer.put(2, 8)
            answer.end(whole=True)
            assert await first == await second == [1, 2]
    later, is_new = answers.claim("a", b"d", "cmpl-c")
    assert not is_new
    with later.reading() as reader:
        assert await remaining(reader) == [1, 2]


async def test_a_key_belongs_to_a_single_request() -> None:
    answers = kept()
    new(answers, "a")
    with pytest.raises(IdempotencyKeyReused):
        answers.claim("a", b"other", "cmpl-b")
    assert "a" in answers and "b" not in answers


async def test_a_response_expires_after_its_end() -> None:
    clock = Clock()
    answers = kept(clock=clock)
    answer = new(answers, "a")
    clock.now_s += 1000
    assert "a" in answers, "it runs"
    await answer.put(1, 100)
    answer.end(whole=True)
    clock.now_s += 59
    assert "a" in answers and answers.bytes_held == ENTRY_BYTES + 100
    clock.now_s += 1
    assert "a" not in answers and answers.bytes_held == 0


async def test_the_earliest_ended_response_is_evicted_first() -> None:
    answers = kept(answers_max=3)
    runs = new(answers, "runs")
    await served(answers, "b", 1)
    await served(answers, "a", 1)
    new(answers, "c")
    assert [name in answers for name in ("runs", "b", "a", "c")] == [True, False, True, True]
    new(answers, "d")
    extra = new(answers, "e")
    assert len(answers) == 3 and "runs" in answers and "e" not in answers, "nothing has ended"
    # It is not kept, and served all the same.
    async with reading(extra) as taken:
        await extra.put(1, 1)
        extra.end(whole=True)
        assert await taken == [1]
    runs.end(whole=True)
    assert "runs" in answers


async def test_a_response_without_room_waits_for_its_slowest_reader() -> None:
    answers = kept(bytes_max=ENTRY_BYTES + 100)
    answer = new(answers, "a")
    with answer.reading() as slow:
        await answer.put(60, 60)
        async with reading(answer) as quick:
            late = asyncio.create_task(answer.put(41, 41))
            await settle()
            assert not late.done() and "a" not in answers
            assert answers.bytes_held == 101, "the slow one has taken nothing"
            assert [await slow.next(), await slow.next()] == [60, 41]
            await settle()
            assert not late.done(), "it is about to take the last one"
            after = asyncio.create_task(slow.next())
            await late
            assert answers.bytes_held == 0
            answer.end(whole=True)
            assert await after is None and await quick == [60, 41]
    assert answers.bytes_held == 0


async def test_readers_end_after_the_last_message() -> None:
    answers = kept(grace_s=0)
    answer = new(answers, "a")
    desertion = asyncio.create_task(answer.abandoned())
    async with reading(answer) as taken:
        await answer.put(1, 1, last=True)
        assert await taken == [1], "its maker has yet to end it"
    await asyncio.sleep(0.05)
    assert not desertion.done()
    answer.end(whole=True)
    assert "a" in answers
    desertion.cancel()


async def test_a_reader_that_leaves_does_not_block_the_response() -> None:
    answers = kept(bytes_max=ENTRY_BYTES)
    answer = new(answers, "a")
    async with reading(answer) as quick:
        with answer.reading():
            late = asyncio.create_task(answer.put(9, 9))
            await settle()
            assert not late.done()
        await late
        answer.end(whole=True)
        assert await quick == [9]


async def test_ended_responses_are_evicted_for_room() -> None:
    answers = kept(bytes_max=2 * ENTRY_BYTES + 100)
    await served(answers, "old", 60)
    with answers.claim("old", b"d", "x")[0].reading() as reader:
        answer = new(answers, "new")
        await answer.put(41, 41)
        assert "old" not in answers and "new" in answers
        assert await remaining(reader) == [60], "who reads it gets the rest"
    assert answers.bytes_held == ENTRY_BYTES + 41


async def test_a_response_without_readers_ends_after_the_grace_period() -> None:
    answers = kept(grace_s=0.05)
    answer = new(answers, "a")
    desertion = asyncio.create_task(answer.abandoned())
    with answer.reading():
        await answer.put(1, 1)
    # The next one comes in time: before any timer can run.
    with answers.claim("a", b"d", "x")[0].reading():
        await asyncio.sleep(0.2)
        assert not desertion.done() and "a" in answers
    with pytest.raises(ClientGone):
        async with asyncio.timeout(60):
            await desertion
    assert "a" not in answers, "a retry runs again"
    answer.end(whole=False)
    assert answers.bytes_held == 0


async def test_an_uncached_response_ends_with_its_only_reader() -> None:
    answers = kept(bytes_max=0)
    answer = new(answers, "a")
    with answer.reading():
        desertion = asyncio.create_task(answer.abandoned())
        await settle()
        assert not desertion.done()
    await asyncio.wait({desertion}, timeout=60)
    assert isinstance(desertion.exception(), ClientGone)


@pytest.mark.parametrize("error", [QueueFull("full"), None])
async def test_a_failed_response_is_raised_to_readers_and_not_cached(
    error: GatewayError | None,
) -> None:
    answers = kept()
    answer = new(answers, "a")
    async with reading(answer) as taken:
        await answer.put(1, 1)
        answer.end(whole=False, error=error)
        assert "a" not in answers
        assert await taken == [1] and answer.error is error
    assert answers.bytes_held == 0


OPS = st.lists(
    st.tuples(
        st.sampled_from(["claim", "put", "end", "fail", "join", "leave", "take", "wait"]),
        st.integers(0, 3),
        st.integers(1, 90),
    ),
    max_size=60,
)


@given(OPS)
def test_stored_bytes_are_bounded_and_released(ops: list[tuple[str, int, int]]) -> None:
    asyncio.run(random_walk(ops))


async def random_walk(ops: list[tuple[str, int, int]]) -> None:
    """Random events of four requests: the bytes are bounded, and nothing leaks."""
    clock = Clock()
    answers = kept(answers_max=3, bytes_max=3 * ENTRY_BYTES + 100, clock=clock)
    walks = [Walk(answers, str(number)) for number in range(4)]
    for op, which, size in ops:
        if op == "wait":
            clock.now_s += size
        else:
            getattr(walks[which], op)(size)
        await settle()
        # Beside what is kept, each of the four may hold one message more, and what it had before.
        assert answers.bytes_held <= 3 * ENTRY_BYTES + 100 + 4 * 90
        assert len(answers) <= 3
    for random_walk in walks:
        random_walk.stop()
    await settle()
    clock.now_s += 1000
    assert "0" not in answers
    assert answers.bytes_held == 0 and len(answers) == 0


class Walk:
    """A key: the response in progress, and its readers."""

    def __init__(self, answers: IdempotencyCache[int], name: str) -> None:
        self.answers = answers
        self.name = name
        self.making: SharedResponse[int] | None = None
        self.putting: asyncio.Task[None] | None = None
        self.readers: list[asyncio.Task[None]] = []
        self.may_take = asyncio.Event()

    def claim(self, _: int) -> None:
        if self.making is None:
            answer, is_new = self.answers.claim(self.name, b"d", self.name)
            self.making = answer if is_new else None
            self._read(answer)

    def join(self, _: int) -> None:
        if self.name in self.answers:
            self._read(self.answers.claim(self.name, b"d", self.name)[0])

    def _read(self, answer: SharedResponse[int]) -> None:
        async def read(reader: ResponseReader[int]) -> None:
            while await reader.next() is not None:
                await self.may_take.wait()

        async def hold() -> None:
            with answer.reading() as reader:
                await read(reader)

        self.readers.append(asyncio.create_task(hold()))

    def put(self, size: int) -> None:
        if self.making is not None and (self.putting is None or self.putting.done()):
            self.putting = asyncio.create_task(self.making.put(size, size))

    def take(self, _: int) -> None:
        self.may_take.set()
        self.may_take.clear()

    def leave(self, _: int) -> None:
        if self.readers:
            self.readers.pop().cancel()

    def end(self, _: int, whole: bool = True) -> None:
        if self.making is not None:
            if self.putting is not None:
                whole = whole and self.putting.done()
                self.putting.cancel()
            self.making.end(whole)
            self.making = self.putting = None

    def fail(self, _: int) -> None:
        self.end(0, whole=False)

    def stop(self) -> None:
        self.fail(0)
        while self.readers:
            self.leave(0)

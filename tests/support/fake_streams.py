"""The two streams of a GPU over the memory of a `FakeCudaDriver`, with a log of their work.

Work runs at once. A copy runs as late as its events allow, or earlier at random. The memory that a
copy reads or overwrites must then be mapped and unchanged since the copy was started. A thread must
not wait for the device while it holds a watched lock.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import torch

from tests.support.fake_cuda_driver import FakeCudaDriver


@dataclass
class _Copy:
    """A started copy: the device memory that it reads or writes, and its content at the start."""

    run: Callable[[], object]
    places: list[tuple[int, int]]  # address, size in bytes
    contents: Callable[[], torch.Tensor]
    handles: list[int]
    before: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.before = self.contents()


class FakeEvent:
    """An event in a stream; `number`: copies or work items before it."""

    def __init__(self, streams: "FakeStreams", stream: str, number: int) -> None:
        self._streams = streams
        self._stream = stream
        self._number = number

    @property
    def passed(self) -> bool:
        return self._stream == "work" or self._streams.ran >= self._number

    def query(self) -> bool:
        self._streams.run_some()
        self._streams.note("query", self._stream, self._number)
        return self.passed

    def synchronize(self) -> None:
        streams = self._streams
        held = [lock for lock in streams.locks if lock.locked()]
        assert not held, f"a thread waits for the {self._stream} stream with a lock held"
        streams.note("synchronize", self._stream, self._number)
        if self._stream == "copies":
            streams.run_until(self._number)


class FakeStreams:
    """As `CudaStreams`. `locks` must not be held while a thread waits for the device."""

    def __init__(self, driver: FakeCudaDriver, seed: int = 0) -> None:
        self.locks: list[Lock] = []
        self.log: list[tuple[str, str, int]] = []
        self.ran = 0  # copies
        self.bound = 0
        self._started = 0
        self._works = 0
        self._driver = driver
        self._rng = random.Random(seed)
        self._pending: deque[_Copy] = deque()
        driver.check_unused = self._check_unused
        driver.end_copies = self._pending.clear

    def bind(self) -> None:
        self.bound += 1

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def record_work(self) -> FakeEvent:
        self._works += 1
        self.note("record", "work", self._works)
        return FakeEvent(self, "work", self._works)

    def record_copies(self) -> FakeEvent:
        self.note("record", "copies", self._started)
        return FakeEvent(self, "copies", self._started)

    def work_waits(self, event: FakeEvent) -> None:
        self.note("wait", "work", event._number)
        self.run_until(event._number)

    def copies_wait(self, event: FakeEvent) -> None:
        assert event._stream == "work"
        self.note("wait", "copies", event._number)

    def gather(self, rows: torch.Tensor, index: torch.Tensor, target: torch.Tensor) -> None:
        index, values = index.clone(), target.view(rows.dtype).view(len(index), -1)

        def run() -> None:
            torch.index_select(rows, 0, index, out=values)

        self._start("gather", run, rows, index)

    def scatter(self, rows: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> None:
        index, values = index.clone(), source.view(rows.dtype).view(len(index), -1)

        def run() -> None:
            rows[index] = values

        self._start("scatter", run, rows, index)

    def read(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._start("read", lambda: target.copy_(source), source[None], torch.zeros(1).long())

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._start("write", lambda: target.copy_(source), target[None], torch.zeros(1).long())

    def note(self, event: str, stream: str, number: int) -> None:
        self.log.append((event, stream, number))

    def run_some(self) -> None:
        """Run a random number of the started copies."""
        self.run_until(self.ran + self._rng.randint(0, len(self._pending)))

    def run_until(self, number: int) -> None:
        """Run the copies up to number `number`."""
        while self.ran < number:
            copy = self._pending.popleft()
            assert self._handles(copy.places) == copy.handles, "a copy runs over other chunks"
            assert torch.equal(copy.contents(), copy.before), "a copy runs over other contents"
            copy.run()
            self.ran += 1
            self.note("ran", "copies", self.ran)

    def _start(
        self, name: str, run: Callable[[], object], rows: torch.Tensor, index: torch.Tensor
    ) -> None:
        self._started += 1
        self.note(name, "copies", self._started)
        size = rows[:1].numel() * rows.element_size()
        places = [(rows.data_ptr() + row * size, size) for row in index.tolist()]
        # Earlier copies of the same rows must run first.
        self.run_overlapping(places)
        handles = self._handles(places)
        self._pending.append(_Copy(run, places, partial(rows.__getitem__, index), handles))

    def run_overlapping(self, places: list[tuple[int, int]]) -> None:
        """Run the copies up to the last that shares memory with `places`."""
        last = 0
        for number, copy in enumerate(self._pending, self.ran + 1):
            if any(
                first < other + other_size and other < first + size
                for first, size in places
                for other, other_size in copy.places
            ):
                last = number
        self.run_until(last)

    def _handles(self, places: list[tuple[int, int]]) -> list[int]:
        """The handles of the chunks at `places`; fails where nothing is mapped."""
        size = self._driver.granularity_bytes
        chunks = sorted(
            {
                chunk
                for first, length in places
                for chunk in range(first - first % size, first + length, size)
            }
        )
        return [self._driver.mapped[chunk] for chunk in chunks]

    def _check_unused(self, address: int, size_bytes: int) -> None:
        for copy in self._pending:
            for first, size in copy.places:
                outside = first + size <= address or address + size_bytes <= first
                assert outside, "memory is unmapped that a copy uses"

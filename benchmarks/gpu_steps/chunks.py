"""Chunks of GPU memory that another process maps: costs, aliases, and the death of their owner.

The owner, a child of this process, creates chunks with both flags for export, maps each twice (a
view as the KV cache has it, and a flat alias), and sends file descriptors over a Unix socket
(SCM_RIGHTS). This process imports and maps them, writes through them, and kills the owner.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from benchmarks.gpu_steps.chunk_memory import ChunkMemory, CudaChunks, FileChunks
from benchmarks.gpu_steps.figures import Figures, step_parser

CHUNKS, CHUNK_BYTES = 512, 32 << 20
DRY_CHUNKS, DRY_CHUNK_BYTES = 16, 1 << 16
PLAIN = 64
"""Chunks without the flags, for comparison."""
AT_ONCE = 64
"""Descriptors in a message; the kernel accepts 253."""
TIMEOUT_S = 40.0
COPY_CHUNKS, COPY_REPEATS = 32, 5
FREED_WITHIN_S, DRY_FREED_WITHIN_S = 1.5, 0.1
GIB = float(1 << 30)


def main() -> None:
    """Measure and write the file."""
    parser = step_parser(__doc__)
    parser.add_argument("--owner", type=int, help="internal: socket of the owner")
    chosen = parser.parse_args()
    count = DRY_CHUNKS if chosen.dry else CHUNKS
    size = DRY_CHUNK_BYTES if chosen.dry else CHUNK_BYTES
    memory: ChunkMemory = FileChunks(size) if chosen.dry else CudaChunks(size)
    if chosen.owner is not None:
        own(memory, count, socket.socket(fileno=chosen.owner))
        return
    figures = Figures(chosen.file)
    figures.add("chunks", {"count": count, "bytes": size})
    command = [sys.executable, "-m", __spec__.name, str(chosen.file)]
    with owner_of([*command, *(["--dry"] if chosen.dry else [])]) as (owner, link):
        within_s = DRY_FREED_WITHIN_S if chosen.dry else FREED_WITHIN_S
        trial = ImportTrial(memory, count, owner, link, within_s)
        for name, part in trial.parts.items():
            figures.measure(name, part)
            if figures.failed:
                break
    figures.end()


@contextmanager
def owner_of(command: Sequence[str]) -> Iterator[tuple["subprocess.Popen[bytes]", socket.socket]]:
    """The owner's process and our end of its socket; the process is killed at the end."""
    ours, theirs = socket.socketpair()
    ours.settimeout(TIMEOUT_S)
    owner = subprocess.Popen(
        [*command, "--owner", str(theirs.fileno())], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    try:
        yield owner, ours
    finally:
        owner.kill()
        owner.wait(TIMEOUT_S)
        ours.close()


def own(memory: ChunkMemory, count: int, link: socket.socket) -> None:
    """The owner: create, map twice, export, then execute the requests of the importer."""
    link.settimeout(TIMEOUT_S)
    free_bytes = memory.free_bytes()
    plain, plain_us = timed_each(lambda _: memory.create(exportable=False), range(PLAIN))
    for handle in plain:
        memory.release(handle)
    handles, create_us = timed_each(lambda _: memory.create(exportable=True), range(count))
    view, alias = Mapping(memory, handles), Mapping(memory, handles)
    costs = {
        "free_bytes_before": free_bytes,
        "create_plain_us": median(plain_us),
        "create_us": median(create_us),
        "create_s": sum(create_us) / 1e6,
        "view": view.costs,
        "alias": alias.costs,
    }
    export_us: list[float] = []
    for first in range(0, count, AT_ONCE):
        part = handles[first : first + AT_ONCE]
        descriptors, times_us = timed_each(memory.export, part)
        export_us += times_us
        socket.send_fds(link, [b"fds"], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        receive(link)  # the importer has taken them: neither end exceeds its limit of descriptors
    costs["export_us"] = median(export_us)
    send(link, costs)
    while True:
        request = receive(link)
        send(link, owner_answer(memory, view, alias, handles, request))


def owner_answer(
    memory: ChunkMemory,
    view: "Mapping",
    alias: "Mapping",
    handles: Sequence[Any],
    request: dict[str, Any],
) -> dict[str, Any]:
    """Write, read or remap at the importer's request."""
    place, size = request["chunk"], memory.chunk_bytes
    target = view.tensor[place * size : (place + 1) * size]
    if request["do"] == "write":
        target.fill_(request["value"])
        memory.wait()
    if request["do"] == "remap":
        # Move the chunk within the view; the alias, and so the import, keep it where it was.
        memory.wait()
        memory.unmap(view.address + place * size, 1)
        memory.map(view.address + place * size, handles[request["other"]])
        memory.allow(view.address + place * size, 1)
    flat = alias.tensor[place * size : (place + 1) * size]
    return {"view": values_of(target), "alias": values_of(flat)}


class Mapping:
    """All chunks at consecutive addresses, with the costs in µs."""

    def __init__(self, memory: ChunkMemory, handles: Sequence[Any]) -> None:
        began_s = time.perf_counter()
        self.address = memory.reserve(len(handles))
        reserved_s = time.perf_counter()
        places = [self.address + place * memory.chunk_bytes for place in range(len(handles))]
        pairs = list(zip(places, handles, strict=True))
        _, map_us = timed_each(lambda pair: memory.map(*pair), pairs)
        mapped_s = time.perf_counter()
        memory.allow(self.address, len(handles))
        self.tensor = memory.tensor(self.address, len(handles))
        self.costs = {
            "reserve_us": 1e6 * (reserved_s - began_s),
            "map_us": median(map_us),
            "allow_us_per_chunk": 1e6 * (time.perf_counter() - mapped_s) / len(handles),
        }


class ImportTrial:
    """The importer's parts, in order."""

    def __init__(
        self,
        memory: ChunkMemory,
        count: int,
        owner: "subprocess.Popen[bytes]",
        link: socket.socket,
        freed_within_s: float,
    ) -> None:
        self._freed_within_s = freed_within_s
        self._memory, self._count, self._owner, self._link = memory, count, owner, link
        self._handles: list[Any] = []
        self._mapping: Mapping | None = None
        self.parts: dict[str, Callable[[], Any]] = {
            "imported": self._import,
            "owner": lambda: receive(self._link),
            "mapped": self._map,
            "written": self._write,
            "remapped": self._remap,
            "copies": self._copies,
            "owner_killed": self._kill,
        }

    def _import(self) -> dict[str, float]:
        import_us: list[float] = []
        while len(self._handles) < self._count:
            _, descriptors, _, _ = socket.recv_fds(self._link, 16, AT_ONCE)
            handles, times_us = timed_each(self._memory.take, descriptors)
            self._handles += handles
            import_us += times_us
            send(self._link, {})
        return {"import_us": median(import_us), "import_s": sum(import_us) / 1e6}

    def _map(self) -> dict[str, float]:
        self._mapping = Mapping(self._memory, self._handles)
        return self._mapping.costs

    def _write(self) -> dict[str, Any]:
        """Write on one side, read on the other, in the first and the last chunk."""
        seen: dict[str, Any] = {}
        for place in (0, self._count - 1):
            part = self._chunk(place)
            part.fill_(7)
            self._memory.wait()
            owner = self._ask("read", place)
            require(owner == {"view": [7, 7], "alias": [7, 7]}, f"the owner reads {owner}")
            self._ask("write", place, value=9)
            require(values_of(part) == [9, 9], f"the importer reads {values_of(part)}")
            seen[str(place)] = "both sides read what the other wrote"
        return seen

    def _remap(self) -> dict[str, Any]:
        """The owner maps another chunk in its view; the import must keep the first."""
        part = self._chunk(1)
        part.fill_(11)
        self._chunk(2).fill_(22)
        self._memory.wait()
        owner = self._ask("remap", 1, other=2)
        require(owner == {"view": [22, 22], "alias": [11, 11]}, f"the owner reads {owner}")
        require(values_of(part) == [11, 11], f"the importer reads {values_of(part)}")
        return owner

    def _copies(self) -> dict[str, float]:
        """Rates of copies from imported chunks to own memory and back, counted once."""
        count = min(COPY_CHUNKS, self._count)
        assert self._mapping is not None
        imported = self._mapping.tensor[: count * self._memory.chunk_bytes]
        own_memory = imported.clone()
        rates = {}
        for name, target, source in (
            ("read", own_memory, imported),
            ("write", imported, own_memory),
            ("own", own_memory, own_memory.clone()),
        ):
            times_s = []
            for _ in range(COPY_REPEATS):
                self._memory.wait()
                began_s = time.perf_counter()
                target.copy_(source)
                self._memory.wait()
                times_s.append(time.perf_counter() - began_s)
            rates[f"{name}_gib_per_s"] = len(imported) / GIB / median(times_s)
        return rates

    def _kill(self) -> dict[str, Any]:
        """The owner dies: the import stays readable, and its memory is freed by the importer."""
        memory, mapping = self._memory, self._mapping
        assert mapping is not None
        self._chunk(3).fill_(33)
        memory.wait()
        before = memory.free_bytes()
        os.kill(self._owner.pid, signal.SIGKILL)
        self._owner.wait(TIMEOUT_S)
        time.sleep(self._freed_within_s)
        after = memory.free_bytes()
        require(values_of(self._chunk(3)) == [33, 33], "the import has lost its contents")
        memory.wait()
        began_s = time.perf_counter()
        memory.unmap(mapping.address, self._count)
        for handle in self._handles:
            memory.release(handle)
        released_s = time.perf_counter() - began_s
        time.sleep(self._freed_within_s)
        return {
            "chunk_bytes_in_all": self._count * memory.chunk_bytes,
            "freed_by_the_death": after - before,
            "freed_by_the_release": memory.free_bytes() - after,
            "release_s": released_s,
        }

    def _chunk(self, place: int) -> Any:
        assert self._mapping is not None
        size = self._memory.chunk_bytes
        return self._mapping.tensor[place * size : (place + 1) * size]

    def _ask(self, action: str, chunk: int, **more: int) -> dict[str, Any]:
        send(self._link, {"do": action, "chunk": chunk, **more})
        return receive(self._link)


def timed_each(act: Callable[[Any], Any], values: Any) -> tuple[list[Any], list[float]]:
    """The results of `act` for each value, and the µs of each call."""
    results, times_us = [], []
    for value in values:
        began_s = time.perf_counter()
        results.append(act(value))
        times_us.append(1e6 * (time.perf_counter() - began_s))
    return results, times_us


def values_of(part: Any) -> list[int]:
    """The first and the last byte."""
    return [int(part[0]), int(part[-1])]


def require(holds: bool, problem: str) -> None:
    """Raise RuntimeError unless it holds."""
    if not holds:
        raise RuntimeError(problem)


def send(link: socket.socket, message: dict[str, Any]) -> None:
    """Send a line of JSON."""
    link.sendall(json.dumps(message).encode() + b"\n")


def receive(link: socket.socket) -> dict[str, Any]:
    """Receive a line of JSON. Raises EOFError if the peer is gone."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = link.recv(1)
        if not byte:
            raise EOFError("the other process has ended; see the log")
        line += byte
    message: dict[str, Any] = json.loads(line)
    return message


if __name__ == "__main__":
    main()

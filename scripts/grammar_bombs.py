"""How long a grammar bomb takes to be refused, and what bombs do to others.

`python scripts/grammar_bombs.py` starts a cluster of one worker with the default model and keys of
five owners. First each bomb is sent alone, COUNT times, while one stream runs. Then EIGHT at once
come from one owner, and from two, while another owner sends requests with a small schema and
without any, and somebody asks whether the gateway lives. Last, four owners send two bombs at a time
and hang up. Each bomb and each schema is a new one, since answers are remembered. Prints what each
of them took, with and without bombs in the house. Ends with 1 if a bomb was taken, if one that was
sent alone was refused later than in 0.5 s, or if another request failed.
"""

import argparse
import asyncio
import contextlib
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from client_tours import cluster

from services.core.quota.limits import QuotaLimits
from tideserve.cli.keys import add_key

COUNT = 5
ROUNDS = 6
EIGHT = 8
LATEST_S = 0.5
PAUSE_S = 1.0
"""Between bombs, so that half of the stream's tokens come while there is none."""
PROBE_PAUSE_S = 0.05
QUIET_S = 6.0
PATIENCE_S = 0.05
"""After this time an owner hangs up."""
HANG_UPS = 40
STREAM_TOKENS = 1900
TIMEOUT_S = 300.0
GOOD, OWNERS = "alice", ("mallory", "trudy", "eve", "oscar")
SCHEMA, PLAIN, LIVE = "request with a small schema", "request without any", "GET /live"
Span = tuple[float, float]
numbers = itertools.count()


def bombs(number: int) -> dict[str, dict[str, Any]]:
    """Schemas that cost more than any answer is worth, by name; other ones for other numbers."""
    factors = (9973, 9967, 9949, 9941)
    either = [
        {"anyOf": [{"properties": {f"{group}{one}": {"maxLength": 9}}} for one in range(9)]}
        for group in "abcdefgh"
    ]
    multiples = {"allOf": [{"type": "integer", "multipleOf": one} for one in factors]}
    words = "|".join(f"{'ab' * (key % 7)}{key}.{{1,90}}" for key in range(400))
    return {
        "allOf of multipleOf": multiples | {"title": str(number)},
        "the same in a property": {"properties": {f"p{number}": multiples}},
        "allOf of anyOf": {"title": str(number), "allOf": either},
        "complement of a long pattern": {
            "title": str(number),
            "type": "string",
            "allOf": [{"pattern": f"^({words}){{1,99}}$"}, {"pattern": f"({words})x.{{99}}y"}],
        },
    }


@dataclass(frozen=True)
class Client:
    """One owner's way to the gateway."""

    http: httpx.AsyncClient
    model: str
    key: str

    async def chat(self, schema: Any = None, timeout_s: float = TIMEOUT_S) -> int:
        """The status of a chat of one token, whose form `schema` prescribes."""
        asked = [{"role": "user", "content": "Tick."}]
        body: dict[str, Any] = {"model": self.model, "messages": asked, "max_tokens": 1}
        if schema is not None:
            form = {"name": "form", "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        request: Any = {"json": body, "headers": self.headers, "timeout": timeout_s}
        answer = await self.http.post("/v1/chat/completions", **request)
        return answer.status_code

    @property
    def headers(self) -> Mapping[str, str]:
        """The header with the client's key."""
        return {"authorization": f"Bearer {self.key}"}


@dataclass
class Seen:
    """What took how long, by name, and what went wrong."""

    bombs: dict[str, list[Span]] = field(default_factory=dict)
    tokens: list[float] = field(default_factory=list)
    probes: dict[str, list[Span]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def apart(self, spans: Sequence[Span]) -> tuple[list[float], list[float]]:
        """How long the spans took, in seconds: those without a bomb, and those beside one."""
        house = [span for each in self.bombs.values() for span in each]
        quiet: list[float] = []
        beside: list[float] = []
        for begun, ended in spans:
            hit = any(first < ended and begun < last for first, last in house)
            (beside if hit else quiet).append(ended - begun)
        return quiet, beside


async def _bomb(client: Client, seen: Seen, name: str, schema: Any) -> None:
    begun = time.monotonic()
    status = await client.chat(schema)
    seen.bombs.setdefault(name, []).append((begun, time.monotonic()))
    if status != 400:
        seen.problems.append(f"not refused: {name}: {status}")


async def _read(client: Client, seen: Seen, streaming: asyncio.Event) -> None:
    body = {
        "model": client.model,
        "prompt": "Once upon a time",
        "max_tokens": STREAM_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    request: Any = {"json": body, "headers": client.headers}
    async with client.http.stream("POST", "/v1/completions", **request) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                seen.tokens.append(time.monotonic())
                streaming.set()


async def alone(good: Client, bomber: Client) -> Seen:
    """Each bomb by itself, beside a stream."""
    seen, streaming = Seen(), asyncio.Event()
    reading = asyncio.create_task(_read(good, seen, streaming))
    await asyncio.wait_for(streaming.wait(), TIMEOUT_S)
    for _ in range(COUNT):
        for name, schema in bombs(next(numbers)).items():
            await _bomb(bomber, seen, name, schema)
            await asyncio.sleep(PAUSE_S)
    reading.cancel()
    await asyncio.wait([reading])
    if not reading.cancelled():
        raise SystemExit("the stream was over before the last bomb; run it on a slower machine")
    return seen


async def _probe(client: Client, seen: Seen, name: str) -> None:
    """Ask again and again."""
    while True:
        begun = time.monotonic()
        if name == LIVE:
            status = (await client.http.get("/live")).status_code
        elif name == PLAIN:
            status = await client.chat()
        else:
            number = {"type": "integer", "maximum": 99}
            status = await client.chat({"properties": {f"n{next(numbers)}": number}})
        seen.probes.setdefault(name, []).append((begun, time.monotonic()))
        if status != 200:
            seen.problems.append(f"{name}: {status}")
        await asyncio.sleep(PROBE_PAUSE_S)


async def _probed(good: Client, seen: Seen, attack: Callable[[], Awaitable[object]]) -> Seen:
    """What others saw before and while `attack` ran."""
    probing = [asyncio.create_task(_probe(good, seen, name)) for name in (SCHEMA, PLAIN, LIVE)]
    await asyncio.sleep(QUIET_S)
    await attack()
    for task in probing:
        task.cancel()
    for error in await asyncio.gather(*probing, return_exceptions=True):
        if isinstance(error, Exception):
            raise error
    return seen


async def at_once(good: Client, bombers: Sequence[Client]) -> Seen:
    """Eight bombs at the same time, dealt to the bombers, beside what others ask."""
    seen = Seen()

    async def attack() -> None:
        for _ in range(ROUNDS):
            made = [one for _ in range(EIGHT) for one in bombs(next(numbers)).items()][:EIGHT]
            dealt = zip(made, itertools.cycle(bombers), strict=False)
            await asyncio.gather(*(_bomb(who, seen, name, one) for (name, one), who in dealt))
            await asyncio.sleep(PAUSE_S)

    return await _probed(good, seen, attack)


async def hanging_up(good: Client, bombers: Sequence[Client]) -> Seen:
    """Two bombs at a time of each bomber, which does not wait for the answer."""
    seen = Seen()

    async def attack(bomber: Client) -> None:
        for _ in range(HANG_UPS):
            name, schema = next(iter(bombs(next(numbers)).items()))
            begun = time.monotonic()
            with contextlib.suppress(httpx.TimeoutException):
                await bomber.chat(schema, PATIENCE_S)
            seen.bombs.setdefault(name, []).append((begun, time.monotonic()))

    async def together() -> None:
        await asyncio.gather(*map(attack, [*bombers, *bombers]))

    return await _probed(good, seen, together)


async def measure(url: str, keys: Mapping[str, str]) -> dict[str, Seen]:
    """What was seen at the gateway at `url`, by how the bombs came."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        good = Client(http, "", keys[GOOD])
        listed = await http.get("/v1/models", headers=good.headers)
        model = listed.json()["data"][0]["id"]
        good, *bombers = (Client(http, model, key) for key in keys.values())
        return {
            "alone": await alone(good, bombers[0]),
            f"{EIGHT} at once, one owner": await at_once(good, bombers[:1]),
            f"{EIGHT} at once, two owners": await at_once(good, bombers[:2]),
            f"{len(bombers)} owners that hang up": await hanging_up(good, bombers),
        }


def _told(name: str, seconds: Sequence[float]) -> str:
    if not seconds:
        return f"  {name:40} none"
    times = sorted(seconds)
    last = times[min(len(times) - 1, int(len(times) * 0.99))]
    return (
        f"  {name:40} {len(times):5} median {statistics.median(times) * 1000:6.0f} ms, "
        f"p99 {last * 1000:6.0f} ms, worst {times[-1] * 1000:6.0f} ms"
    )


def _tell(stage: str, seen: Seen) -> None:
    print(f"{stage}:")
    for name, spans in seen.bombs.items():
        print(_told(name, [ended - begun for begun, ended in spans]))
    gaps = list(itertools.pairwise(seen.tokens))
    beside_them = {"inter-token time": gaps, **seen.probes} if gaps else seen.probes
    for name, spans in beside_them.items():
        quiet, beside = seen.apart(spans)
        print(_told(f"{name}, no bomb", quiet))
        print(_told(f"{name}, beside bombs", beside))


def main() -> int:
    """0 if every bomb was refused in time and nothing else was, else 1."""
    argparse.ArgumentParser(description="Time the refusal of grammar bombs.").parse_args()
    with tempfile.TemporaryDirectory(prefix="tideserve-bombs-") as folder:
        file = Path(folder) / "keys.jsonl"
        owners = (GOOD, *OWNERS)
        keys = {
            who: add_key(file, who, False, None, QuotaLimits(None, None, None)) for who in owners
        }
        with cluster({"api_keys": str(file)}) as server:
            found = asyncio.run(measure(server.url, keys))
    for stage, seen in found.items():
        _tell(stage, seen)
    problems = [problem for seen in found.values() for problem in seen.problems]
    spans = [span for each in found["alone"].bombs.values() for span in each]
    if (latest := max(ended - begun for begun, ended in spans)) > LATEST_S:
        problems.append(f"a bomb alone was refused in {latest:.3f} s only, not {LATEST_S} s")
    print(*problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""How long a grammar bomb takes to be refused, and what that does to a stream beside it.

`python scripts/grammar_bombs.py` starts a cluster of one worker with the default model, or takes
the one at --url. While one stream runs, each bomb is sent COUNT times, a new one each time, since
answers are remembered. Prints a table of refusals, and the stream's inter-token times with and
without a bomb in the house. Ends with 1 if a bomb was taken, or refused later than in 0.5 s.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from client_tours import cluster

COUNT = 5
LATEST_S = 0.5
PAUSE_S = 1.0
"""Between bombs, so that half of the stream's tokens come while there is none."""
STREAM_TOKENS = 1900
TIMEOUT_S = 300.0


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


@dataclass
class Seen:
    """When the stream's tokens came, and when a bomb was in the house, in seconds."""

    tokens: list[float] = field(default_factory=list)
    bombs: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    streaming: asyncio.Event = field(default_factory=asyncio.Event)

    def gaps(self) -> tuple[list[float], list[float]]:
        """Inter-token times without and with a bomb at any moment of the gap, in seconds."""
        spans = [span for each in self.bombs.values() for span in each]
        quiet: list[float] = []
        beside: list[float] = []
        for before, after in zip(self.tokens, self.tokens[1:], strict=False):
            hit = any(begun < after and before < ended for begun, ended in spans)
            (beside if hit else quiet).append(after - before)
        return quiet, beside


async def _read(http: httpx.AsyncClient, model: str, seen: Seen) -> None:
    body = {
        "model": model,
        "prompt": "Once upon a time",
        "max_tokens": STREAM_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                seen.tokens.append(time.monotonic())
                seen.streaming.set()


async def _send(http: httpx.AsyncClient, model: str, seen: Seen, name: str, schema: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "bomb", "schema": schema}}
    asked = [{"role": "user", "content": "Tick."}]
    body = {"model": model, "messages": asked, "max_tokens": 1, "response_format": form}
    begun = time.monotonic()
    answer = await http.post("/v1/chat/completions", json=body)
    seen.bombs.setdefault(name, []).append((begun, time.monotonic()))
    if answer.status_code != 400:
        seen.taken.append(f"{name}: {answer.status_code}")


async def measure(url: str) -> Seen:
    """What was seen at the gateway at `url`."""
    seen = Seen()
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        reading = asyncio.create_task(_read(http, model, seen))
        await asyncio.wait_for(seen.streaming.wait(), TIMEOUT_S)
        for number in range(COUNT):
            for name, schema in bombs(number).items():
                await _send(http, model, seen, name, schema)
                await asyncio.sleep(PAUSE_S)
        reading.cancel()
        await asyncio.wait([reading])
        if not reading.cancelled():
            raise SystemExit("the stream was over before the last bomb; run it on a slower machine")
    return seen


def _told(name: str, seconds: Sequence[float]) -> str:
    if not seconds:
        return f"{name:34} none"
    times = sorted(seconds)
    last = times[min(len(times) - 1, int(len(times) * 0.99))]
    return (
        f"{name:34} {len(times):5} median {statistics.median(times) * 1000:6.0f} ms, "
        f"p99 {last * 1000:6.0f} ms, worst {times[-1] * 1000:6.0f} ms"
    )


def main() -> int:
    """0 if every bomb was refused in time, else 1."""
    parser = argparse.ArgumentParser(description="Time the refusal of grammar bombs.")
    parser.add_argument("--url", help="a running gateway without keys")
    url = parser.parse_args().url
    if url:
        seen = asyncio.run(measure(url))
    else:
        with cluster() as server:
            seen = asyncio.run(measure(server.url))
    for name, spans in seen.bombs.items():
        print(_told(name, [ended - begun for begun, ended in spans]))
    quiet, beside = seen.gaps()
    print(_told("inter-token time without a bomb", quiet))
    print(_told("inter-token time beside a bomb", beside))
    latest = max(ended - begun for spans in seen.bombs.values() for begun, ended in spans)
    for each in seen.taken:
        print(f"not refused: {each}")
    return 1 if seen.taken or latest > LATEST_S else 0


if __name__ == "__main__":
    sys.exit(main())

"""Hit shares of a prefix cache with a second level in host memory, by replay of traces.

    python -m benchmarks.host_replay --trace FILE --json FILE

replays the requests of a Mooncake trace, and of generated chats and agents, through an independent
two-level LRU cache (`benchmarks/prefix_count.py`). Requests are replayed one after another in the
order of their arrival, and copies cost nothing: the shares are upper bounds for an LRU.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from benchmarks.prefix_count import TwoLevelLru
from tideserve.load.traces import load_trace
from tideserve.load.workload import LengthScale, arrivals_of
from tideserve.sim.workload import AGENTS, CHATS, PREFIX_BLOCK_TOKENS, Arrival

DEVICE_TOKENS = (500_000, 1_000_000, 2_000_000, 4_000_000)
"""KV capacities on devices, of all workers together."""
HOST_RATIOS = (0, 1, 4, 16)
"""Host capacities, as multiples of the device capacity."""
GENERATED_S, GENERATED_PER_S = 3_600.0, 1.0
"""Duration of the generated loads, and their new conversations per second."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Prompt tokens of a trace, and those with cached KV by host capacity."""

    trace: str
    requests: int
    prompt_tokens: int
    device_tokens: int
    hit_tokens: dict[int, int]  # by the host's multiple of the device capacity

    def share(self, ratio: int) -> float:
        """Hits as a share of the prompt tokens, with this multiple in host memory."""
        return self.hit_tokens[ratio] / max(1, self.prompt_tokens)


def count_hits(arrivals: Iterable[Arrival], device_tokens: int, host_tokens: int) -> int:
    """Prompt tokens of the requests with cached KV, in blocks of `PREFIX_BLOCK_TOKENS`."""
    levels = TwoLevelLru(device_tokens // PREFIX_BLOCK_TOKENS, host_tokens // PREFIX_BLOCK_TOKENS)
    # Blocks that only one prompt has take room, too: they get numbers below 0.
    own, hits = -1, 0
    for arrival in arrivals:
        full = arrival.prompt_tokens // PREFIX_BLOCK_TOKENS
        shared = arrival.prefix_ids[:full]
        # The last prompt token always runs.
        hits += levels.hits(shared[: (arrival.prompt_tokens - 1) // PREFIX_BLOCK_TOKENS])
        answer = (arrival.prompt_tokens + arrival.output_tokens) // PREFIX_BLOCK_TOKENS
        rest = range(own, own - (answer - len(shared)), -1)
        own -= len(rest)
        levels.use((*shared, *rest))
    return hits * PREFIX_BLOCK_TOKENS


def replay(
    trace: str, arrivals: Sequence[Arrival], device_tokens: Iterable[int] = DEVICE_TOKENS
) -> list[Replay]:
    """Replay a trace with every capacity."""
    prompt_tokens = sum(arrival.prompt_tokens for arrival in arrivals)
    return [
        Replay(
            *(trace, len(arrivals), prompt_tokens, device),
            {ratio: count_hits(arrivals, device, ratio * device) for ratio in HOST_RATIOS},
        )
        for device in device_tokens
    ]


def generated(seed: int) -> Mapping[str, list[Arrival]]:
    """The chats and agents of `bench prefix`, for an hour."""
    return {
        name: list(kind.arrivals(GENERATED_PER_S, GENERATED_S, Random(f"{name} {seed}")))
        for name, kind in (("chats", CHATS), ("agents", AGENTS))
    }


def table(replays: Iterable[Replay]) -> str:
    """The hit shares as a Markdown table."""
    titles = ["trace", "requests", "device tokens", *(f"host {ratio} ×" for ratio in HOST_RATIOS)]
    rows = [
        [
            *(each.trace, f"{each.requests:,}", f"{each.device_tokens:,}"),
            *(f"{each.share(ratio):.1%}" for ratio in HOST_RATIOS),
        ]
        for each in replays
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows))


def main() -> None:
    """Replay the given traces and the generated loads, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", action="append", default=[], type=Path, help="Mooncake JSONL")
    parser.add_argument("--seed", type=int, default=0, help="seed of the generated loads")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    loads = {path.name: arrivals_of(load_trace(path), LengthScale()) for path in options.trace}
    replays = [
        each
        for name, arrivals in {**loads, **generated(options.seed)}.items()
        for each in replay(name, arrivals)
    ]
    print(table(replays))
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in replays], indent=1) + "\n")


if __name__ == "__main__":
    main()

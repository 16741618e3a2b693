"""The requests of a load: arrival, prompt, number of output tokens. They are made from a seed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from random import Random

from tideserve.load.traces import Trace, TraceRow
from tideserve.sim.workload import PREFIX_BLOCK_TOKENS, Arrival

# Ordinary pieces of text in every vocabulary, that of the tiny model too: above the special tokens
# and bytes.
TOKEN_ID_MIN = 300
TOKEN_ID_MAX = 2_000
DEFAULT_CLASS = "standard"
BATCH_CLASS = "batch"


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request; generation is forced to `output_tokens`. `arrival_s` counts from the start.

    With a `cache_salt` it shares cached prefixes with those of the same salt, and asks for the
    tokens of the answer. `ttft_s` and `tpot_s` are the targets that it tells the server.
    """

    arrival_s: float
    prompt_ids: tuple[int, ...]
    output_tokens: int
    seed: int
    slo_class: str = DEFAULT_CLASS
    cache_salt: str | None = None
    temperature: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Backlog:
    """Batch requests without end, from `clients` clients with one at a time each.

    No prompt begins as another one of any `seed`. Lengths are uniform, from the first number to the
    second one: of two equal ones all requests have that length. `in_batches`: all clients send
    their next request when the last of them has ended, not each when its own has.
    """

    clients: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    seed: int
    in_batches: bool = False

    def request(self, number: int) -> PlannedRequest:
        """The request of that number, always the same."""
        rng = Random(f"backlog lengths {self.seed} {number}")
        ids = prompt_ids(rng.randint(*self.prompt_tokens), f"backlog {self.seed} {number}")
        output_tokens = rng.randint(*self.output_tokens)
        return PlannedRequest(0.0, ids, output_tokens, number, slo_class=BATCH_CLASS)

    def __str__(self) -> str:
        return (
            f"{self.clients} clients with batch requests of {_span(self.prompt_tokens)} prompt and"
            f" {_span(self.output_tokens)} output tokens, without end"
            + (", the next ones when all have ended" if self.in_batches else "")
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, and how they were made, for people.

    The first `lead_in` of them set a closed loop in motion and are not measured.
    """

    requests: tuple[PlannedRequest, ...]
    statement: str
    lead_in: int = 0


@dataclass(frozen=True, slots=True)
class LengthScale:
    """Scale of a trace's lengths: a factor, then a range of tokens to which they are clipped."""

    prompt: float = 1.0
    output: float = 1.0
    prompt_range: tuple[int, int] = (1, 1 << 20)
    output_range: tuple[int, int] = (1, 1 << 20)

    def prompt_tokens(self, row: TraceRow) -> int:
        """Length of the prompt that stands for `row`'s."""
        return _clipped(row.prompt_tokens * self.prompt, self.prompt_range)

    def output_tokens(self, row: TraceRow) -> int:
        """Length of the output that stands for `row`'s."""
        return _clipped(row.output_tokens * self.output, self.output_range)

    def __str__(self) -> str:
        (low, high), (out_low, out_high) = self.prompt_range, self.output_range
        return (
            f"prompts × {self.prompt:g} within {low}-{high} tokens,"
            f" outputs × {self.output:g} within {out_low}-{out_high} tokens"
        )


def from_trace(trace: Trace, scale: LengthScale, seed: int, how: str) -> Workload:
    """The trace's requests with scaled lengths; `how` says what was done to the arrivals."""
    requests = []
    for index, row in enumerate(trace.rows):
        request_seed = _seed(seed, index)
        prompt = _prompt_ids(row, scale, request_seed, f"{seed}")
        requests.append(
            PlannedRequest(row.arrival_s, prompt, scale.output_tokens(row), request_seed)
        )
    return Workload(tuple(requests), f"{trace.name}: {how}; {scale}")


def arrivals_of(trace: Trace, scale: LengthScale) -> list[Arrival]:
    """The trace's requests with scaled lengths, for a simulation; they share prefixes as there."""
    places: dict[int, int] = {}  # ids of blocks become small numbers
    return [
        Arrival(
            row.arrival_s,
            scale.prompt_tokens(row),
            scale.output_tokens(row),
            tuple(places.setdefault(one, len(places)) for one in _scaled_ids(row, scale)),
        )
        for row in trace.rows
    ]


def fixed(
    count: int, prompt_tokens: int, output_tokens: int, seed: int, load: str = ""
) -> Workload:
    """`count` requests of the same lengths that may all be sent at once.

    No prompt begins as one of another `load`, or a system with a prefix cache would skip that part.
    """
    requests = tuple(
        PlannedRequest(
            0.0, prompt_ids(prompt_tokens, f"{load} {_seed(seed, index)}"), output_tokens, index
        )
        for index in range(count)
    )
    return Workload(
        requests, f"{count} requests of {prompt_tokens} prompt and {output_tokens} output tokens"
    )


def with_lead_in(workload: Workload, concurrency: int) -> Workload:
    """Before all others goes one request per client: the first is the shortest, the last has full
    length.

    Requests of equal length that begin at once end at once, and so do all that follow: waves of
    prompts, whose first tokens tell how long a wave takes. With a lead-in, one ends after another.
    Tokens of the lead-in do not count, even while others are measured: throughput is a little below
    that of an endless loop, for every system alike.
    """
    model = workload.requests[:concurrency]
    lead_in = tuple(
        replace(
            one,
            prompt_ids=prompt_ids(len(one.prompt_ids), f"lead-in {one.prompt_ids}"),
            output_tokens=max(1, one.output_tokens * (client + 1) // concurrency),
        )
        for client, one in enumerate(model)
    )
    return Workload(
        (*lead_in, *workload.requests),
        f"{workload.statement}, after a lead-in of {len(lead_in)}",
        len(lead_in),
    )


def _span(bounds: tuple[int, int]) -> str:
    low, high = bounds
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def prompt_ids(length: int, seed: int | str) -> tuple[int, ...]:
    """`length` token ids that no other seed begins with."""
    return tuple(_tokens(length, f"request {seed}"))


def _prompt_ids(row: TraceRow, scale: LengthScale, seed: int, trace_seed: str) -> tuple[int, ...]:
    """The scaled prompt of `row`; rows with the same leading `prefix_ids` share that prefix.

    A block is scaled as prompts are. The last one is only part of a prompt and is not shared.
    """
    length = scale.prompt_tokens(row)
    block_tokens = max(1, round(PREFIX_BLOCK_TOKENS * scale.prompt))
    shared = min(row.prompt_tokens // PREFIX_BLOCK_TOKENS, length // block_tokens)
    ids: list[int] = []
    for block in row.prefix_ids[:shared]:
        ids += _tokens(block_tokens, f"{trace_seed} block {block}")
    return (*ids, *prompt_ids(length - len(ids), seed))


def _scaled_ids(row: TraceRow, scale: LengthScale) -> Iterator[int]:
    """The ids of a scaled prompt's blocks; each stands for all that is before it, too."""
    whole = row.prefix_ids[: row.prompt_tokens // PREFIX_BLOCK_TOKENS]
    for place in range(scale.prompt_tokens(row) // PREFIX_BLOCK_TOKENS):
        origin = ceil((place + 1) / scale.prompt) - 1
        if origin >= len(whole):
            return
        yield whole[origin]


def _tokens(count: int, seed: str) -> list[int]:
    rng = Random(seed)
    return [rng.randint(TOKEN_ID_MIN, TOKEN_ID_MAX) for _ in range(count)]


def _seed(seed: int, index: int) -> int:
    return seed * 1_000_003 + index


def _clipped(tokens: float, bounds: tuple[int, int]) -> int:
    return max(bounds[0], min(bounds[1], round(tokens)))

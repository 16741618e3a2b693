"""Workloads of the load generator: arrivals, prompts and output lengths, generated from a seed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from random import Random

from tideserve.load.traces import Trace, TraceRow
from tideserve.sim.workload import PREFIX_BLOCK_TOKENS, Arrival

# Ids of ordinary text in every vocabulary, also the tiny model's: above special and byte tokens.
TOKEN_ID_MIN = 300
TOKEN_ID_MAX = 2_000
DEFAULT_CLASS = "standard"
BATCH_CLASS = "batch"


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request with exactly `output_tokens`; `arrival_s` counts from the start of the load.

    With a `cache_salt`, the request shares cached prefixes with requests of the same salt, and asks
    for the token ids of the answer. `ttft_s` and `tpot_s` are the targets in the request.
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
    """An endless backlog of batch requests, from `clients` clients with a request each at a time.

    Prompts share no prefixes, also across seeds. Lengths are uniform between the two bounds.
    `in_batches`: all clients send their next requests when the requests of all have ended, instead
    of each client when its own has. `lines`: instead of by clients, the requests are sent as files
    of that many lines to /v1/batches, the next file when the batch of the last has ended.
    """

    clients: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    seed: int
    in_batches: bool = False
    lines: int = 0

    @property
    def first(self) -> int:
        """The number of requests that are sent at once at the start."""
        return self.lines or self.clients

    def request(self, number: int) -> PlannedRequest:
        """Return request `number`, which depends only on the seed."""
        rng = Random(f"backlog lengths {self.seed} {number}")
        ids = prompt_ids(rng.randint(*self.prompt_tokens), f"backlog {self.seed} {number}")
        output_tokens = rng.randint(*self.output_tokens)
        return PlannedRequest(0.0, ids, output_tokens, number, slo_class=BATCH_CLASS)

    def __str__(self) -> str:
        senders = f"files of {self.lines}" if self.lines else f"{self.clients} clients with"
        return (
            f"{senders} batch requests of {_span(self.prompt_tokens)} prompt and"
            f" {_span(self.output_tokens)} output tokens, without end"
            + (", the next ones when all have ended" if self.in_batches else "")
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, and a description of them for reports.

    The first `lead_in` requests bring a closed loop to its steady state and are not measured.
    """

    requests: tuple[PlannedRequest, ...]
    statement: str
    lead_in: int = 0


@dataclass(frozen=True, slots=True)
class LengthScale:
    """Scaling of a trace's lengths: a factor, then clipping to a range of tokens."""

    prompt: float = 1.0
    output: float = 1.0
    prompt_range: tuple[int, int] = (1, 1 << 20)
    output_range: tuple[int, int] = (1, 1 << 20)

    def prompt_tokens(self, row: TraceRow) -> int:
        """Return the scaled length of the row's prompt."""
        return _clipped(row.prompt_tokens * self.prompt, self.prompt_range)

    def output_tokens(self, row: TraceRow) -> int:
        """Return the scaled length of the row's output."""
        return _clipped(row.output_tokens * self.output, self.output_range)

    def __str__(self) -> str:
        (low, high), (out_low, out_high) = self.prompt_range, self.output_range
        return (
            f"prompts × {self.prompt:g} within {low}-{high} tokens,"
            f" outputs × {self.output:g} within {out_low}-{out_high} tokens"
        )


def from_trace(trace: Trace, scale: LengthScale, seed: int, how: str) -> Workload:
    """Make requests from a trace with scaled lengths; `how` describes changes to the arrivals."""
    requests = []
    for index, row in enumerate(trace.rows):
        request_seed = _seed(seed, index)
        prompt = _prompt_ids(row, scale, request_seed, f"{seed}")
        requests.append(
            PlannedRequest(row.arrival_s, prompt, scale.output_tokens(row), request_seed)
        )
    return Workload(tuple(requests), f"{trace.name}: {how}; {scale}")


def arrivals_of(trace: Trace, scale: LengthScale) -> list[Arrival]:
    """Make a simulation's requests from a trace with scaled lengths and its shared prefixes."""
    numbers: dict[int, int] = {}  # small numbers for the trace's block ids
    return [
        Arrival(
            row.arrival_s,
            scale.prompt_tokens(row),
            scale.output_tokens(row),
            tuple(numbers.setdefault(block, len(numbers)) for block in _scaled_ids(row, scale)),
        )
        for row in trace.rows
    ]


def fixed(
    count: int, prompt_tokens: int, output_tokens: int, seed: int, load: str = ""
) -> Workload:
    """Make `count` requests of the same lengths, all with arrival time 0."""
    # Prompts of different `load` share no prefixes: a prefix cache would skip them.
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
    """Prepend a request per client, with output lengths that rise to the full length.

    Without a lead-in, requests of equal length that begin together also end together: prompts come
    in waves, and TTFT measures the length of a wave. With a lead-in, the ends are spread evenly.
    Tokens of the lead-in are not counted, even while other requests are measured: throughput is
    slightly below that of an endless loop, for all systems alike.
    """
    models = workload.requests[:concurrency]
    lead_in = tuple(
        replace(
            model,
            prompt_ids=prompt_ids(len(model.prompt_ids), f"lead-in {model.prompt_ids}"),
            output_tokens=max(1, model.output_tokens * (client + 1) // concurrency),
        )
        for client, model in enumerate(models)
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
    """Return `length` token ids that share no prefix with those of other seeds."""
    return tuple(_tokens(length, f"request {seed}"))


def _prompt_ids(row: TraceRow, scale: LengthScale, seed: int, trace_seed: str) -> tuple[int, ...]:
    """Return the scaled prompt of `row`; rows with equal leading `prefix_ids` share the prefix."""
    length = scale.prompt_tokens(row)
    # Blocks are scaled like prompts. An incomplete last block is not shared.
    block_tokens = max(1, round(PREFIX_BLOCK_TOKENS * scale.prompt))
    shared = min(row.prompt_tokens // PREFIX_BLOCK_TOKENS, length // block_tokens)
    ids: list[int] = []
    for block in row.prefix_ids[:shared]:
        ids += _tokens(block_tokens, f"{trace_seed} block {block}")
    return (*ids, *prompt_ids(length - len(ids), seed))


def _scaled_ids(row: TraceRow, scale: LengthScale) -> Iterator[int]:
    """Yield the block ids of a scaled prompt; a block id stands for the whole prefix up to it."""
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

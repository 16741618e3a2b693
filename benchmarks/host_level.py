"""Measures KV in host memory as a second level of the prefix cache, and the same device without it.

Conversations take turns at random; their prompts are four times what the device holds, and host
memory holds four times as much as the device. An independent two-level LRU (`prefix_count.py`)
counts the hits of the same requests.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from random import Random
from statistics import median
from typing import Any

from benchmarks.one_by_one import OneByOne, TurnAnswer
from benchmarks.prefix_count import CountedCache
from benchmarks.systems.system import Deployment, Say
from benchmarks.systems.tideserve import BLOCK_TOKENS, Tideserve
from tideserve.cli.errors import SystemUnavailable
from tideserve.load.workload import prompt_ids

WITH, WITHOUT = "tideserve-host", "tideserve"
WORKING_SETS, HOST_RATIO = 4, 4
"""Tokens of all conversations, and host capacity, as multiples of the device's capacity."""
DEVICE_TOKENS = 4096
"""KV capacity of the device, unless the model leaves less."""
OPENING, QUESTION, ANSWER_TOKENS = (256, 640), (16, 64), 8
CONVERSATION_TOKENS = 512
"""Approximate mean length of a conversation, which restarts at twice this length."""
VISITS, QUICK_VISITS = 4, 2
"""Measured requests per conversation, on average."""
FRESH, QUICK_FRESH, FRESH_TOKENS = 40, 24, 256
"""Prompts without any reuse, and their length."""
SHARE_MIN, SHARE_MAX = 0.85, 1.02
"""Bounds of the hits, as a share of the independent count."""
GAIN_MIN, GAIN_FROM = 1.3, 1.5
"""Minimum hits, as a multiple of those without the tier, where the count shows at least 1.5."""
TTFT_RATIO_MAX = 1.05
"""Maximum P50 TTFT of prompts without reuse, as a multiple of that without the tier."""


@dataclass(slots=True)
class HostLevelRecord:
    """Measurements; figures of both systems are by their names."""

    capacity_tokens: int = 0
    host_tokens: int = 0
    queries: int = 0
    hits: dict[str, int] = field(default_factory=lambda: {WITH: 0, WITHOUT: 0})
    counted: dict[str, int] = field(default_factory=lambda: {WITH: 0, WITHOUT: 0})
    ttfts_s: dict[str, list[float]] = field(default_factory=lambda: {WITH: [], WITHOUT: []})
    fresh_ttfts_s: dict[str, list[float]] = field(default_factory=lambda: {WITH: [], WITHOUT: []})


@dataclass(slots=True)
class Conversation:
    """Conversations with a system; `counts` count the same requests."""

    client: OneByOne
    seed: int
    counts: Mapping[str, CountedCache] = field(default_factory=dict)
    _histories: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def turn(self, number: int, visit: int) -> TurnAnswer:
        """Take a turn of conversation `number`; `visit` numbers all turns."""
        rng = Random(f"turn {self.seed} {visit}")
        history = self._histories.get(number, ())
        if not history or len(history) > 2 * CONVERSATION_TOKENS:
            history = prompt_ids(rng.randint(*OPENING), f"opening {self.seed} {number} {visit}")
        prompt = (*history, *prompt_ids(rng.randint(*QUESTION), f"question {self.seed} {visit}"))
        answer = self.client.ask(prompt, ANSWER_TOKENS)
        for count in self.counts.values():
            count.request(prompt, answer.output_ids)
        self._histories[number] = (*prompt, *answer.output_ids)
        return answer


def measure_host_level(
    deployment: Deployment, quick: bool, seed: int, say: Say, progress: Say
) -> HostLevelRecord:
    """Start both systems and measure. Raises SystemUnavailable."""
    record = HostLevelRecord()
    with ExitStack() as stack:
        clients = {}
        for name in (WITHOUT, WITH):
            system = _started(name, deployment, record, stack, say)
            clients[name] = stack.enter_context(OneByOne(system.urls[0], system.model))
            if name == WITHOUT:
                _read_sizes(system, record)
        blocks, host_blocks = (
            tokens // BLOCK_TOKENS for tokens in (record.capacity_tokens, record.host_tokens)
        )
        counts = {
            WITHOUT: CountedCache(blocks, BLOCK_TOKENS),
            WITH: CountedCache(blocks, BLOCK_TOKENS, host_blocks),
        }
        talk_all(record, clients, counts, quick, seed, progress)
        ask_fresh(record, clients, QUICK_FRESH if quick else FRESH, seed, progress)
    return record


def talk_all(
    record: HostLevelRecord,
    clients: Mapping[str, OneByOne],
    counts: Mapping[str, CountedCache],
    quick: bool,
    seed: int,
    progress: Say,
) -> None:
    """Begin all conversations, which fills the caches, and measure further turns at random."""
    number = max(2, WORKING_SETS * record.capacity_tokens // CONVERSATION_TOKENS)
    order = list(range(number))
    order += Random(f"visits {seed}").choices(order, k=number * (QUICK_VISITS if quick else VISITS))
    talks = {
        name: Conversation(client, seed, counts if name == WITH else {})
        for name, client in clients.items()
    }
    for visit, conversation in enumerate(order):
        progress(f"host memory: request {visit + 1} of {len(order)}")
        measured = visit >= number
        if visit == number:
            for count in counts.values():
                count.hits = 0
        # The systems share the processors, so send to only one at a time.
        for name in sorted(talks, reverse=bool(visit % 2)):
            answer = talks[name].turn(conversation, visit)
            if measured:
                record.hits[name] += answer.cached_tokens
                record.ttfts_s[name].append(answer.ttft_s)
                record.queries += answer.prompt_tokens if name == WITH else 0
    record.counted = {name: count.hits for name, count in counts.items()}


def ask_fresh(
    record: HostLevelRecord, clients: Mapping[str, OneByOne], count: int, seed: int, progress: Say
) -> None:
    """Measure prompts that share nothing with others."""
    for number in range(-1, count):  # number -1 warms up
        progress(f"prompts without reuse: {number + 1} of {count}")
        prompt = prompt_ids(FRESH_TOKENS, f"fresh {seed} {number}")
        for name in sorted(clients, reverse=bool(number % 2)):
            ttft_s = clients[name].ask(prompt, 1, name).ttft_s
            if number >= 0:
                record.fresh_ttfts_s[name].append(ttft_s)


def _started(
    name: str, deployment: Deployment, record: HostLevelRecord, stack: ExitStack, say: Say
) -> Tideserve:
    """Start a system; the sizes of the one without host memory determine those of the other."""
    kv_bytes = deployment.kv_bytes_per_token
    options: dict[str, Any] = {
        **deployment.options,
        "worker": {"profile_when_idle": False},
        "threads": 1,
    }
    if record.capacity_tokens:
        options["host_memory"] = record.host_tokens * kv_bytes
    system = Tideserve(name, (), replace(deployment, workers=1, options=options))
    stack.callback(system.stop)
    system.start(say)
    return system


def _read_sizes(system: Tideserve, record: HostLevelRecord) -> None:
    tokens = system.counters().capacity_tokens
    if tokens is None:
        raise SystemUnavailable("the worker does not report its number of KV blocks")
    record.capacity_tokens = tokens
    record.host_tokens = HOST_RATIO * tokens


def smaller(deployment: Deployment, capacity_tokens: int) -> Deployment:
    """The deployment with about `DEVICE_TOKENS` of KV, if it has `capacity_tokens` now."""
    excess = max(0, capacity_tokens - DEVICE_TOKENS) * deployment.kv_bytes_per_token
    return replace(deployment, memory_bytes=deployment.memory_bytes - excess)


def problems_of(record: HostLevelRecord) -> list[str]:
    """A sentence per missed bar."""
    hits, counted = record.hits, record.counted
    share, gain = _ratio(hits[WITH], counted[WITH]), _ratio(hits[WITH], hits[WITHOUT])
    ttft = fresh_ratio(record)
    problems = {
        f"with host memory {hits[WITH]:,} tokens were hits, {share:.2f} of the independent count"
        f" of {counted[WITH]:,}, not {SHARE_MIN:g} to {SHARE_MAX:g}": not SHARE_MIN
        <= share
        <= SHARE_MAX,
        f"host memory multiplies the hits by {gain:.2f}, less than {GAIN_MIN:g}": gain < GAIN_MIN
        and _ratio(counted[WITH], counted[WITHOUT]) >= GAIN_FROM,
        f"with host memory, the median TTFT of prompts without reuse is {ttft:.2f} of that without,"
        f" more than {TTFT_RATIO_MAX:g}": ttft > TTFT_RATIO_MAX,
    }
    return [sentence for sentence, applies in problems.items() if applies]


def figures_of(record: HostLevelRecord) -> dict[str, Any]:
    """The figures for JSON."""
    return {
        "hit_tokens": record.hits[WITH],
        "independent_hit_tokens": record.counted[WITH],
        "hit_tokens_without": record.hits[WITHOUT],
        "independent_hit_tokens_without": record.counted[WITHOUT],
        "query_tokens": record.queries,
        "capacity_tokens": record.capacity_tokens,
        "host_tokens": record.host_tokens,
        "ttft_s_p50": {name: median(ttfts_s) for name, ttfts_s in record.ttfts_s.items()},
        "ttft_s_without_reuse": record.fresh_ttfts_s,
        "ttft_ratio_without_reuse": fresh_ratio(record),
    }


def rows_of(record: HostLevelRecord) -> list[tuple[str, str]]:
    """Rows of the report."""
    ttfts = {name: 1e3 * median(ttfts_s) for name, ttfts_s in record.ttfts_s.items()}
    return [
        (
            f"hits with / without host memory, {record.capacity_tokens:,} tokens on the device",
            f"{record.hits[WITH]:,} / {record.hits[WITHOUT]:,} of {record.queries:,} prompt tokens;"
            f" counted {record.counted[WITH]:,} / {record.counted[WITHOUT]:,}",
        ),
        (
            "median first token of these, with / without",
            f"{ttfts[WITH]:.0f} / {ttfts[WITHOUT]:.0f} ms; without reuse"
            f" {fresh_ratio(record):.2f} ×",
        ),
    ]


def fresh_ratio(record: HostLevelRecord) -> float:
    """Median TTFT of prompts without reuse, as a multiple of that without host memory."""
    fresh = record.fresh_ttfts_s
    return median(fresh[WITH]) / median(fresh[WITHOUT])


def _ratio(count: int, other: int) -> float:
    return count / other if other else float(bool(count)) * 1e9

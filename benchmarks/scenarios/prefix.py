"""`prefix`: savings of a prefix cache, correctness of its hits, and hit rates of the dispatch
policies.

Two single-worker clusters, with and without the cache, answer the same chats in turn: each turn
adds 256 tokens to the conversation and receives 64. Then interleaved chats overflow the cache, and
an independent implementation counts the hits. A prompt with another salt must have no hits. Two
clusters with less device memory, one of them with host memory for KV, answer conversations that
exceed it (`host_level.py`). Finally, eight workers are simulated, since the test machine is too
small for them.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.host_level import (
    HostLevelRecord,
    figures_of,
    measure_host_level,
    problems_of,
    rows_of,
    smaller,
)
from benchmarks.one_by_one import OneByOne, TurnAnswer
from benchmarks.prefix_count import CountedCache
from benchmarks.scenarios.scenario import FASTEST, LoadChoice, Scenario, TrialVerdict
from benchmarks.systems.system import Deployment, Say
from benchmarks.systems.tideserve import BLOCK_TOKENS, Tideserve
from services.common.device_profile import load_profile
from services.core.planner.config import IterationConfig
from services.core.scheduler.dispatch import PREFIX
from services.core.scheduler.state_config import StateConfig
from tideserve.cli.errors import SystemUnavailable
from tideserve.load.traces import load_trace
from tideserve.load.workload import LengthScale, arrivals_of, prompt_ids
from tideserve.sim.cluster import Cluster, ClusterSpec
from tideserve.sim.report import Outcome, percentile
from tideserve.sim.time_model import CostTimeModel
from tideserve.sim.workload import AGENTS, CHATS, Arrival, OpenLoop

TURNS, QUESTION_TOKENS, ANSWER_TOKENS = 5, 256, 64
CHAT_COUNT, QUICK_CHAT_COUNT = 8, 3
TTFT_SHARE_MAX = 0.35
"""Maximum TTFT of the last turn, as a share of that without a cache."""
COUNT_ERROR_MAX = 0.05
GAIN_MIN = 2.0
"""Minimum hits of dispatch `prefix`, as a multiple of those of `least_loaded`."""
COUNTED_CHATS = 12
COUNTED_REQUESTS, QUICK_COUNTED_REQUESTS = 120, 48
COUNTED_QUESTION, COUNTED_ANSWER = (40, 400), 8
ON, OFF = "on", "off"

SIMULATED_S, QUICK_SIMULATED_S = 600.0, 200.0
WORKERS = 8
CAPACITIES = (500_000, 1_000_000)
"""KV tokens of each simulated worker."""
LEAST_LOADED = "least_loaded"
DEVICE = "A100-14B"
CHATS_PER_S, AGENTS_PER_S = 1.0, 0.8
"""Rate of new conversations over all workers."""


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """A simulated load under a dispatch policy; times in seconds of the simulation."""

    load: str
    dispatch: str
    capacity_tokens: int
    hit_share: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    unfinished: int


@dataclass(slots=True)
class PrefixRecord:
    """All measurements of the scenario."""

    ttfts_s: dict[str, list[list[float]]] = field(default_factory=lambda: {ON: [], OFF: []})
    capacity_blocks: int = 0
    queries: int = 0
    hits: int = 0
    counted_hits: int = 0
    foreign_hits: int = 0
    served: list[SimulatedLoad] = field(default_factory=list)
    host: HostLevelRecord = field(default_factory=HostLevelRecord)


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Start both clusters, measure chats, count hits, and simulate."""
    record = PrefixRecord()
    with ExitStack() as stack:
        clients = {}
        for name in (ON, OFF):
            # The two clusters share the processors, so send to only one at a time.
            worker = {"profile_when_idle": False, "prefix_caching": name == ON}
            options = {**deployment.options, "worker": worker, "threads": 1}
            system = Tideserve("tideserve", (), replace(deployment, workers=1, options=options))
            stack.callback(system.stop)
            system.start(say)
            clients[name] = stack.enter_context(OneByOne(system.urls[0], system.model))
            if name == ON:
                kv_tokens = system.counters().capacity_tokens
                if kv_tokens is None:
                    raise SystemUnavailable("the worker does not report its number of KV blocks")
                record.capacity_blocks = kv_tokens // BLOCK_TOKENS
        chats = QUICK_CHAT_COUNT if choice.quick else CHAT_COUNT
        for number in range(-1, chats):  # chat -1 warms up
            progress(f"chat {number + 1} of {chats}")
            for name in sorted(clients, reverse=bool(number % 2)):
                answers = chat(clients[name], f"{choice.seed} {number}")
                if number >= 0:
                    record.ttfts_s[name].append([answer.ttft_s for answer in answers])
        requests = QUICK_COUNTED_REQUESTS if choice.quick else COUNTED_REQUESTS
        count_hits(clients[ON], record, requests, choice.seed, progress)
        record.foreign_hits = foreign_hits(clients[ON], choice.seed)
    scarce = smaller(deployment, record.capacity_blocks * BLOCK_TOKENS)
    record.host = measure_host_level(scarce, choice.quick, choice.seed, say, progress)
    simulate(record, choice, progress)
    return judge(record)


def chat(client: OneByOne, seed: str) -> list[TurnAnswer]:
    """Run all turns of a chat."""
    history: tuple[int, ...] = ()
    answers = []
    for turn in range(TURNS):
        history += prompt_ids(QUESTION_TOKENS, f"chat {seed} {turn}")
        answers.append(client.ask(history, ANSWER_TOKENS))
        history += answers[-1].output_ids
    return answers


def count_hits(
    client: OneByOne, record: PrefixRecord, requests: int, seed: int, progress: Say
) -> None:
    """Interleave turns of several chats that overflow the cache, and count hits in both caches.

    The first requests only fill both caches, which evicts earlier content.
    """
    rng = Random(f"counted {seed}")
    counted = CountedCache(record.capacity_blocks, BLOCK_TOKENS)
    histories: dict[int, tuple[int, ...]] = {}
    filler = record.capacity_blocks * BLOCK_TOKENS
    place = 0
    # Fill both caches with unrelated prompts, so that they start in the same state.
    while filler > 0:
        prompt = prompt_ids(min(filler, 1500), f"filler {seed} {place}")
        counted.request(prompt, client.ask(prompt, 1).output_ids)
        filler, place = filler - len(prompt), place + 1
    counted.queries = counted.hits = 0
    for number in range(requests):
        progress(f"counted request {number + 1} of {requests}")
        chat = rng.randrange(COUNTED_CHATS)
        question = prompt_ids(rng.randint(*COUNTED_QUESTION), f"counted {seed} {number}")
        prompt = (*histories.get(chat, ()), *question)
        # Restart a chat before it dominates the cache.
        if len(prompt) > record.capacity_blocks * BLOCK_TOKENS // 3:
            prompt = question
        answer = client.ask(prompt, COUNTED_ANSWER)
        counted.request(prompt, answer.output_ids)
        histories[chat] = (*prompt, *answer.output_ids)
        record.queries += answer.prompt_tokens
        record.hits += answer.cached_tokens
    record.counted_hits = counted.hits


def foreign_hits(client: OneByOne, seed: int) -> int:
    """Cached tokens of a prompt sent just before with another salt; more than 0 is a defect.

    Raises SystemUnavailable if the same salt has no hits either, which makes the test void.
    """
    prompt = prompt_ids(QUESTION_TOKENS, f"salted {seed}")
    client.ask(prompt, 1, "one")
    foreign = client.ask(prompt, 1, "other").cached_tokens
    if not client.ask(prompt, 1, "one").cached_tokens:
        raise SystemUnavailable("a repeated prompt has no hits in the prefix cache")
    return foreign


def simulate(record: PrefixRecord, choice: LoadChoice, progress: Say) -> None:
    """Simulate both dispatches on generated conversations or the given trace. Raises TraceError."""
    duration_s = QUICK_SIMULATED_S if choice.quick else SIMULATED_S
    if choice.trace is not None:
        trace = load_trace(Path(choice.trace))
        loads: dict[str, Sequence[Arrival]] = {trace.name: arrivals_of(trace, LengthScale())}
    else:
        loads = {
            name: kind.arrivals(rate_per_s, duration_s, Random(f"{name} {choice.seed}"))
            for name, kind, rate_per_s in (
                ("chats", CHATS, CHATS_PER_S),
                ("agents", AGENTS, AGENTS_PER_S),
            )
        }
    for load, arrivals in loads.items():
        for capacity in CAPACITIES[-1:] if choice.quick else CAPACITIES:
            for dispatch in (LEAST_LOADED, PREFIX):
                progress(f"simulating {len(arrivals):,} requests of {load}, dispatch {dispatch}")
                record.served.append(serve(load, arrivals, dispatch, capacity))


def serve(
    load: str, arrivals: Sequence[Arrival], dispatch: str, capacity_tokens: int
) -> SimulatedLoad:
    """Simulate a dispatch with core planners and prefix caches on an estimated device."""
    model = load_profile(DEVICE).model
    spec = ClusterSpec(
        instances=WORKERS,
        iteration=IterationConfig(
            BLOCK_TOKENS,
            capacity_tokens // BLOCK_TOKENS,
            max_batch_tokens=2048,
            max_running=256,
            max_waiting=10_000,
            prefix_caching=True,
        ),
        max_model_len=capacity_tokens,
        # The queue is practically unlimited, so that no request is refused.
        scheduler=StateConfig(
            *(1_000_000, 1e6, dispatch), ttft=model if dispatch == PREFIX else None, lateness=0.0
        ),
    )
    outcomes = Cluster(spec, CostTimeModel(model), OpenLoop(arrivals)).run()
    ttfts_s = [
        request.ttft_s for request in outcomes.records if request.outcome is Outcome.COMPLETED
    ]
    return SimulatedLoad(
        load,
        dispatch,
        capacity_tokens,
        outcomes.prefix_hits / max(1, outcomes.prefix_queries),
        percentile(ttfts_s, 0.5),
        percentile(ttfts_s, 0.99),
        len(outcomes.records) - len(ttfts_s),
    )


def judge(record: PrefixRecord) -> TrialVerdict:
    """Figures, and a problem per missed bar."""
    last = {
        name: median(ttfts_s[-1] for ttfts_s in chats) for name, chats in record.ttfts_s.items()
    }
    share = last[ON] / last[OFF]
    error = record.hits / record.counted_hits - 1 if record.counted_hits else 1.0
    gains = _gains(record.served)
    problems = {
        f"TTFT of turn {TURNS} is {share:.2f} of that without a cache, more than"
        f" {TTFT_SHARE_MAX:g}": share > TTFT_SHARE_MAX,
        f"{record.hits:,} tokens were hits, {error:+.1%} relative to the reference count of"
        f" {record.counted_hits:,}": abs(error) > COUNT_ERROR_MAX,
        f"{record.foreign_hits} tokens with another salt were hits": record.foreign_hits > 0,
        **{
            f"dispatch {PREFIX} has {gain:.2f} times the hits of {LEAST_LOADED} on {name}, less"
            f" than {GAIN_MIN:g}": gain < GAIN_MIN
            for name, gain in gains.items()
        },
    }
    missed = [sentence for sentence, applies in problems.items() if applies]
    missed += problems_of(record.host)
    figures = {
        "chat": f"{TURNS} turns of {QUESTION_TOKENS} in and {ANSWER_TOKENS} out",
        "ttft_s_by_chat_and_turn": record.ttfts_s,
        "ttft_s_last_turn": last,
        "ttft_share": share,
        "capacity_tokens": record.capacity_blocks * BLOCK_TOKENS,
        "query_tokens": record.queries,
        "hit_tokens": record.hits,
        "counted_hit_tokens": record.counted_hits,
        "hit_error": error,
        "foreign_hit_tokens": record.foreign_hits,
        "host": figures_of(record.host),
        "simulated": [asdict(served) for served in record.served],
        "simulated_gains": gains,
        "problems": missed,
    }
    return TrialVerdict(figures, _rows(record, last, share, error), missed)


def _gains(served: Sequence[SimulatedLoad]) -> dict[str, float]:
    """Hits of `prefix` as a multiple of those of `least_loaded`, by load and capacity."""
    shares: dict[str, dict[str, float]] = {}
    for load in served:
        name = f"{load.load}, {load.capacity_tokens:,} tokens"
        shares.setdefault(name, {})[load.dispatch] = load.hit_share
    return {
        name: by[PREFIX] / by[LEAST_LOADED] if by[LEAST_LOADED] else 0.0
        for name, by in shares.items()
    }


def _rows(
    record: PrefixRecord, last: Mapping[str, float], share: float, error: float
) -> list[tuple[str, str]]:
    return [
        (
            f"first token of turn {TURNS}, cache on / off",
            f"{1e3 * last[ON]:.0f} / {1e3 * last[OFF]:.0f} ms: {share:.2f}",
        ),
        (
            "hits at a full cache",
            f"{record.hits:,} of {record.queries:,} prompt tokens; counted {record.counted_hits:,}"
            f" ({error:+.1%})",
        ),
        ("hits of another salt", str(record.foreign_hits)),
        *rows_of(record.host),
        *(
            (
                f"simulated, {WORKERS} workers of {load.capacity_tokens:,} tokens, {load.load}",
                f"{load.dispatch}: {load.hit_share:.1%} hits, first token"
                f" P50 {load.ttft_p50_s or 0:.2f} s, P99 {load.ttft_p99_s or 0:.2f} s",
            )
            for load in record.served
        ),
    ]


SCENARIO = Scenario(
    name="prefix", memory="640MiB", run=run, options=frozenset({"trace"}), dtype=FASTEST
)

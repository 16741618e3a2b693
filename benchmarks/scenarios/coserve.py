"""`coserve`: online requests with a backlog of batch requests that never runs empty.

Online requests have 642 prompt and 64 output tokens and arrive at random; batch requests have 1,800
and 128 (ConServe's lengths, unscaled). Prompts share no prefixes, and KV is ample. The targets of
online requests are the P99 of `online-only`, as in ConServe §6; the target of a gap is the budget
of an iteration. In the middle of a round, online requests are 45 % of the tokens that `eager`
processes.

`--systems slo,slo-api` compares a backlog of clients with the same backlog as files of /v1/batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random

from benchmarks.co_serving.bars import COSERVE
from benchmarks.co_serving.online_load import OnlineLoad, OnlineTargets
from benchmarks.scenarios.scenario import PHASES, Case, CoServing, LoadChoice, Scenario
from tideserve.load.workload import Backlog, PlannedRequest, Workload, prompt_ids

ONLINE_PROMPT, ONLINE_OUTPUT = 642, 64
BATCH_PROMPT, BATCH_OUTPUT = 1800, 128
MAX_BATCH_TOKENS = 512
"""Token limit of an iteration, except for `eager` and systems with a number in their name."""
CLIENTS_PER_WORKER = 160
"""More than a worker runs concurrently, so some are always waiting."""
FULL_FACTOR = 2
"""Window of a full run, as a multiple of that of a quick run."""

# For two workers. By the cost model of the profile, `eager` processes 12,800 tokens per second on
# two A100 with a 14B model; measured at A100-14B:4, four times 3,270. 45 % of these are 8.3 online
# requests per second, and the edges of a window cut off a little. An iteration of 512 tokens takes
# 92 ms there.
PACED = OnlineLoad(8.4, OnlineTargets(ttft_s=0.45, tpot_s=0.096), window_s=13.0, drain_s=8.0)
# An estimate for two cores that multiply bfloat16; other machines need their own --rate.
UNPACED = OnlineLoad(1.4, OnlineTargets(ttft_s=1.4, tpot_s=0.35), window_s=75.0, drain_s=40.0)

Draw = Callable[[Random], int]


def load_for(choice: LoadChoice) -> OnlineLoad:
    """The load for the device of a run."""
    load = PACED.slowed(choice.slowdown) if choice.paced else UNPACED
    if not choice.quick:
        load = replace(load, window_s=FULL_FACTOR * load.window_s)
    return replace(load, rate_per_s=choice.rate_per_s or load.rate_per_s * choice.workers / 2)


def cases(choice: LoadChoice) -> Sequence[Case]:
    """An open loop with a concurrent backlog."""
    load = load_for(choice)
    what = (
        f"{load.rate_per_s:.3g} online requests per second of {ONLINE_PROMPT} prompt and"
        f" {ONLINE_OUTPUT} output tokens,"
    )
    lengths = (lambda rng: ONLINE_PROMPT), (lambda rng: ONLINE_OUTPUT)
    online = partial(online_requests, f"coserve {choice.seed}", load, *lengths)
    return (co_served("coserve", what, load, online, backlog_for(choice)),)


def backlog_for(choice: LoadChoice) -> Callable[[int], Backlog]:
    """The backlog of a round."""
    return partial(_backlog, CLIENTS_PER_WORKER * choice.workers, choice.seed)


def _backlog(clients: int, seed: int, turn: int) -> Backlog:
    return Backlog(clients, (BATCH_PROMPT,) * 2, (BATCH_OUTPUT,) * 2, seed * 1000 + turn)


def co_served(
    name: str,
    what: str,
    load: OnlineLoad,
    online: Callable[[int], Sequence[PlannedRequest]],
    backlog: Callable[[int], Backlog] | None,
) -> Case:
    """An open loop of the requests from `online` per round, with an optional concurrent backlog."""

    def workload(turn: int) -> Workload:
        beside = "" if backlog is None else f"; with a backlog of {backlog(turn)}"
        return Workload(tuple(online(turn)), f"{what} {load}{beside}")

    expected_s = load.last_s + load.drain_s / 2
    return Case(name, workload, None, expected_s, load.limit_s, backlog=backlog)


def online_requests(
    seed: str, load: OnlineLoad, prompt: Draw, output: Draw, turn: int
) -> list[PlannedRequest]:
    """Requests of round `turn` with the arrivals of `load` and independently drawn lengths."""
    name = f"{seed} {turn}"
    rng = Random(name)
    return requests_at(load.times_s(rng), name, load, prompt, output, rng)


def requests_at(
    times_s: Sequence[float],
    name: str,
    load: OnlineLoad,
    prompt: Draw,
    output: Draw,
    rng: Random,
) -> list[PlannedRequest]:
    """Requests of the round `name` at `times_s`, with the targets of `load`."""
    return [
        PlannedRequest(
            time_s,
            # A seed per request, so that prompts share no prefixes.
            prompt_ids(prompt(rng), f"{name} {number}"),
            output(rng),
            number,
            slo_class="interactive",
            ttft_s=load.targets.ttft_s,
            tpot_s=load.targets.tpot_s,
        )
        for number, time_s in enumerate(times_s)
    ]


SYSTEMS = ("online-only", "eager", "priority", "slo", "slo-full")
SCENARIO = Scenario(
    name="coserve",
    systems=SYSTEMS,
    memory="3GiB",
    paced_systems=SYSTEMS,
    paced_memory="256MiB",
    cases=cases,
    rounds=(3, 5),
    # Disable merges, whatever the demand.
    up_options={"max_batch_tokens": MAX_BATCH_TOKENS, "overload_policy": "recompute"},
    options=frozenset({"rate", PHASES}),
    co_serving=CoServing(load_for, COSERVE),
)

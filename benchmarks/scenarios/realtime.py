"""`realtime`: real-time requests beside 128 concurrent best-effort requests per worker (BROS §7.2).

Real-time requests are online requests with targets of 0.4 s TTFT and 0.2 s per token, times the
slowdown of the device. They arrive by a Poisson process, with the lengths of ShareGPT in BROS
Table 2: log-normal with these means and deviations, cut at 1,024 prompt and 1,000 output tokens,
which fit the tiny model's context. Best-effort requests have the class batch and uniform lengths of
512 to 1,024 prompt and 32 to 128 output tokens. Lengths are not scaled; times are.

The next 128 best-effort requests are sent when the last 128 have ended, as in BROS. In a closed
loop of single requests, 70 would always wait for KV, and `fcfs` would miss every TTFT target at any
rate. Some figures therefore depend on how many batches end in a window: with four seeds, `fcfs`
attains 6 to 8 %.

KV is scarce: 47,100 tokens per worker, as with a 7B model on an A100 of 40 GB. With the suffix
`-ample` a system has five times the memory, all of it KV. The memory is sized for iterations of up
to 512 tokens: the activations of larger iterations would leave no KV.

A quick run uses the rate at which `fcfs` attains 5 to 8 % of the TTFT targets, determined in the
simulator with the same load. A full run adds a lower and a higher rate, and the middle rate without
best-effort requests (BROS §7.3).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from benchmarks.co_serving.bars import REALTIME
from benchmarks.co_serving.online_load import OnlineLoad, OnlineTargets
from benchmarks.scenarios.coserve import co_served, online_requests
from benchmarks.scenarios.scenario import Case, CoServing, LoadChoice, Scenario
from tideserve.load.workload import Backlog
from tideserve.sim.workload import Length

NAME = "realtime"
PROMPT = Length(222.76, 256.36 / 222.76, least=4, most=1024)
OUTPUT = Length(234.51, 268.50 / 234.51, least=4, most=1000)
BATCH_PROMPT, BATCH_OUTPUT = (512, 1024), (32, 128)
CLIENTS_PER_WORKER = 128
MAX_BATCH_TOKENS = 512
MAX_RUNNING = 256
"""Concurrency of a worker, twice the initial number of slots in BROS."""
TOKEN_GROUP = 4
"""Tokens over which the TPOT target is averaged; 1 with the suffix `-groups`."""
OTHER_RATES = {"lower": 0.5, "higher": 1.5}
"""Loads of a full run: multiples of the rate of a quick run."""

TARGETS = OnlineTargets(ttft_s=0.4, tpot_s=0.2, token_group=TOKEN_GROUP)
# For a worker with the times and the KV of A100-40G-7B. Simulated with seeds 0 to 3, `fcfs` attains
# 6 to 8 % at 5.8 requests per second, 4 to 10 % at 5.7 and 3 to 7 % at 6.
PACED = OnlineLoad(5.8, TARGETS, window_s=60.0, drain_s=30.0, window_from_s=35.0)
# An estimate for a worker on a core that multiplies bfloat16; other machines need their own --rate.
UNPACED = OnlineLoad(
    0.25, OnlineTargets(1.4, 0.35, TOKEN_GROUP), window_s=240.0, drain_s=60.0, window_from_s=60.0
)


def load_for(choice: LoadChoice) -> OnlineLoad:
    """The load at the rate of a quick run, for the device and workers of this run."""
    load = UNPACED
    if choice.paced:
        slowed = PACED.slowed(choice.slowdown)
        load = replace(slowed, window_from_s=PACED.window_from_s * choice.slowdown)
    return replace(load, rate_per_s=choice.rate_per_s or load.rate_per_s * choice.workers)


def cases(choice: LoadChoice) -> Sequence[Case]:
    """The load of a quick run; a full run without a given rate adds others."""
    load, seed = load_for(choice), choice.seed
    backlog = partial(_backlog, CLIENTS_PER_WORKER * choice.workers, seed)
    chosen = [_case(NAME, load, seed, backlog)]
    if not choice.quick:
        for name, factor in OTHER_RATES.items() if choice.rate_per_s is None else ():
            other = replace(load, rate_per_s=load.rate_per_s * factor)
            chosen.append(_case(f"{NAME}-{name}", other, seed, backlog))
        chosen.append(_case(f"{NAME}-alone", load, seed, None))
    return chosen


def _case(name: str, load: OnlineLoad, seed: int, backlog: partial[Backlog] | None) -> Case:
    what = f"{load.rate_per_s:.3g} real-time requests per second with the lengths of ShareGPT,"
    online = partial(online_requests, f"{name} {seed}", load, PROMPT.draw, OUTPUT.draw)
    return co_served(name, what, load, online, backlog)


def _backlog(clients: int, seed: int, turn: int) -> Backlog:
    return Backlog(clients, BATCH_PROMPT, BATCH_OUTPUT, seed * 1000 + turn, in_batches=True)


SCENARIO = Scenario(
    name=NAME,
    systems=("fcfs", "priority", "round-robin", "slo", "vllm-priority"),
    memory="1GiB",
    paced_systems=("fcfs", "priority", "round-robin", "bros", "waiting-time", "slo"),
    paced_memory="42MiB",
    cases=cases,
    # Long enough to keep the load constant over the whole window.
    rounds=(1, 1),
    # Disable merges, whatever the demand. Requests override the targets of their class; the token
    # group of the TPOT target is an operator's setting.
    up_options={
        "max_batch_tokens": MAX_BATCH_TOKENS,
        "max_running": MAX_RUNNING,
        "overload_policy": "recompute",
        "gateway": {"classes": {"interactive": {"token_group": TOKEN_GROUP}}},
    },
    options=frozenset({"rate"}),
    co_serving=CoServing(load_for, REALTIME),
)

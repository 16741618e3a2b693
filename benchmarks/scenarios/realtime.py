"""`realtime`: real-time requests beside 128 best-effort ones at a time and worker (BROS §7.2).

Real-time requests are online ones with targets, 0.4 s to the first token and 0.2 s a token, times
the slowdown of the device. They arrive by a Poisson process, with the lengths of ShareGPT in BROS
Table 2: log-normal with these means and deviations, cut at 1,024 prompt and 1,000 output tokens,
which is what the tiny model's context takes. Best-effort requests are those of the class batch,
512 to 1,024 prompt and 32 to 128 output tokens, uniform. Lengths are not scaled; times are.

The next 128 are sent when the last 128 have ended, as in BROS. Were each sent when another one
ends, 70 would always wait for KV, and `fcfs` would serve no first token in time at any rate. So
some figures depend on how many batches end in a window: of four seeds, `fcfs` attains 6 to 8 %.

KV is scarce: 47,100 tokens for each worker, what a 7B model leaves of an A100 of 40 GB. With the
suffix `-ample` a system has five times the memory, all of it KV. The memory is for iterations of up
to 512 tokens: larger ones need so much for their activations that no KV would be left.

A quick run has the rate at which `fcfs` attains 5 to 8 % of the targets of first tokens, found in
the simulator with the same load. A full one has a lower and a higher one, too, and the middle one
without best-effort requests (BROS §7.3).
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
"""Places of a worker, twice the slots with which BROS begins."""
TOKEN_GROUP = 4
"""Tokens over which the target between tokens holds on average; 1 with the suffix `-groups`."""
OTHER_RATES = {"lower": 0.5, "higher": 1.5}
"""Loads of a full run: multiples of the rate of a quick one."""

TARGETS = OnlineTargets(ttft_s=0.4, tpot_s=0.2, token_group=TOKEN_GROUP)
# For one worker with the time and the KV of A100-40G-7B. Simulated with seeds 0 to 3, `fcfs`
# attains 6 to 8 % at 5.8 requests a second, 4 to 10 % at 5.7 and 3 to 7 % at 6.
PACED = OnlineLoad(5.8, TARGETS, window_s=60.0, drain_s=30.0, window_from_s=35.0)
# An estimate for a worker on one core that multiplies bfloat16; others need a --rate of their own.
UNPACED = OnlineLoad(
    0.25, OnlineTargets(1.4, 0.35, TOKEN_GROUP), window_s=240.0, drain_s=60.0, window_from_s=60.0
)


def load_for(choice: LoadChoice) -> OnlineLoad:
    """The load at the rate of a quick run, for the device and the workers of this one."""
    load = UNPACED
    if choice.paced:
        slowed = PACED.slowed(choice.slowdown)
        load = replace(slowed, window_from_s=PACED.window_from_s * choice.slowdown)
    return replace(load, rate_per_s=choice.rate_per_s or load.rate_per_s * choice.workers)


def cases(choice: LoadChoice) -> Sequence[Case]:
    """The load of a quick run; in a full one others after it, unless a rate is chosen."""
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
    what = f"{load.rate_per_s:.3g} real-time requests a second with the lengths of ShareGPT,"
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
    # One that is long enough for the load to be the same from its window's begin to its end.
    rounds=(1, 1),
    # Nothing merges, whatever demand a system sees. Requests override the targets of their class,
    # and the tokens over which they hold are the operator's.
    up_options={
        "max_batch_tokens": MAX_BATCH_TOKENS,
        "max_running": MAX_RUNNING,
        "overload_policy": "recompute",
        "gateway": {"classes": {"interactive": {"token_group": TOKEN_GROUP}}},
    },
    options=frozenset({"rate"}),
    co_serving=CoServing(load_for, REALTIME),
)

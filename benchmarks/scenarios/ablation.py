"""`ablation`: what each mechanism adds, one after the other on the same flood (KunServe §5.3).

As in KunServe, the prompts are long and of many lengths, so that microbatches formed by token count
differ in time. After the flood has been answered, a trickle shows what restoring is good for. The
servers start anew for each round, since what has merged without `restore` would stay so.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from benchmarks.scenarios import burst
from benchmarks.scenarios.scenario import Case, LoadChoice, Scenario
from tideserve.load.workload import LengthScale, Workload

STEPS = {
    "drop only": "drop-exchange-lookahead-restore",
    "+ coordinated exchange": "drop-lookahead-restore",
    "+ lookahead": "drop-restore",
    "+ restore": "drop",
}
UNPACED = replace(
    burst.UNPACED,
    scale=LengthScale(prompt=0.15, output=0.3, prompt_range=(16, 384), output_range=(40, 80)),
    rate_per_s=4.0,
    drain_s=20.0,
)
# On a modelled A100, lookahead leaves 0.26 of the bubbles here while requests arrive, or 0.37 and
# 0.46 if a message between stages takes 1 or 2 ms.
PACED = replace(
    burst.PACED,
    scale=LengthScale(prompt=0.8, output=0.4, prompt_range=(64, 1800), output_range=(40, 160)),
    duration_s=18.0,
    rate_per_s=8.0,
    drain_s=10.0,
)
# Layers so small that two processors compute 2,000 tokens of a prompt in the time of the device.
MODEL = {"num_hidden_layers": 4, "intermediate_size": 256}
TRICKLE_REQUESTS, TRICKLE_RATE_PER_S = 12, 1.0
TRICKLE_SHARE = 0.3
"""Share of the time limit."""
MAX_BATCH_TOKENS = 2048


def cases(choice: LoadChoice) -> Sequence[Case]:
    """The flood of `burst` with other lengths, then the trickle."""
    load = burst.load_for(choice, PACED, UNPACED)
    flood = burst.flood_case(choice, "ablation/flood", load, 1 - TRICKLE_SHARE)
    trickle = Case(
        name="ablation/trickle",
        workload=partial(_trickle, choice, load=load),
        concurrency=None,
        expected_s=TRICKLE_REQUESTS / TRICKLE_RATE_PER_S + 3 * choice.slowdown,
        limit_s=flood.limit_s * TRICKLE_SHARE / (1 - TRICKLE_SHARE),
    )
    return (flood, trickle)


def _trickle(choice: LoadChoice, turn: int, load: burst.TraceSlice) -> Workload:
    """The flood's first requests once more, evenly."""
    flood = burst.flood(choice, turn, load)
    requests = tuple(
        replace(request, arrival_s=number / TRICKLE_RATE_PER_S)
        for number, request in enumerate(flood.requests[:TRICKLE_REQUESTS])
    )
    return Workload(
        requests,
        f"when the flood is answered, its first {len(requests)} requests again,"
        f" {TRICKLE_RATE_PER_S:g} a second",
    )


SCENARIO = Scenario(
    name="ablation",
    summary="drop, exchange, lookahead and restore one after the other, each with its effect",
    systems=tuple(STEPS.values()),
    memory="400MiB",
    paced_systems=tuple(STEPS.values()),
    paced_memory="26MiB",
    paced_model=MODEL,
    cases=cases,
    rounds=burst.SCENARIO.rounds,
    steps=STEPS,
    options={"max_batch_tokens": MAX_BATCH_TOKENS},
    traced=True,
)

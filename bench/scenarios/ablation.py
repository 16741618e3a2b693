"""`ablation`: what each mechanism adds, one after the other on the same flood (KunServe §5.3).

As in the paper the prompts are long and of many lengths, so that microbatches formed by token count
differ in time. After the flood a trickle goes on for a while: restoring shows there. The servers
start anew for each round, since what has merged without `restore` would stay so.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from bench.scenarios import burst
from bench.scenarios.scenario import Case, Choice, Scenario
from bench.workload import LengthScale, PlannedRequest, Workload

STEPS = {
    "drop only": "drop-exchange-lookahead-restore",
    "+ coordinated exchange": "drop-lookahead-restore",
    "+ lookahead": "drop-restore",
    "+ restore": "drop",
}
UNPACED = replace(
    burst.UNPACED,
    scale=LengthScale(prompt=0.15, output=0.3, prompt_range=(16, 384), output_range=(40, 80)),
)
PACED = replace(
    burst.PACED,
    scale=LengthScale(prompt=0.4, output=1.0, prompt_range=(32, 1024), output_range=(96, 320)),
    rate_per_s=4.0,
)
TRICKLE_REQUESTS, TRICKLE_RATE_PER_S = 12, 1.0
PAUSE_S = 8.0
"""Between flood and trickle: in it most of what has flooded is answered."""
MAX_BATCH_TOKENS = 1024


def cases(choice: Choice) -> Sequence[Case]:
    """The flood of `burst` with other lengths, and the trickle after it."""
    (case,) = burst.cases(choice)
    load = PACED if choice.paced else UNPACED
    last_s = _workload(choice, 0, load).requests[-1].arrival_s
    return (
        replace(
            case,
            name="ablation",
            workload=partial(_workload, choice, load=load),
            expected_s=last_s + load.drain_s / 2,
        ),
    )


def _workload(choice: Choice, turn: int, load: burst.Load) -> Workload:
    flood = burst.flood(choice, turn, load)
    statement = (
        f"{flood.statement}; {PAUSE_S:g} s later {TRICKLE_REQUESTS} of them again,"
        f" {TRICKLE_RATE_PER_S:g} a second"
    )
    return Workload((*flood.requests, *_trickle(flood.requests)), statement)


def _trickle(flood: Sequence[PlannedRequest]) -> list[PlannedRequest]:
    """The first requests once more, evenly after the flood."""
    begin_s = flood[-1].arrival_s + PAUSE_S
    return [
        replace(request, arrival_s=begin_s + number / TRICKLE_RATE_PER_S)
        for number, request in enumerate(flood[:TRICKLE_REQUESTS])
    ]


SCENARIO = Scenario(
    name="ablation",
    summary="drop, exchange, lookahead and restore one after the other, each with its effect",
    systems=tuple(STEPS.values()),
    memory="400MiB",
    paced_systems=tuple(STEPS.values()),
    paced_memory="40MiB",
    cases=cases,
    rounds=burst.SCENARIO.rounds,
    steps=STEPS,
    options={"max_batch_tokens": MAX_BATCH_TOKENS},
)

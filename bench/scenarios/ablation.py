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
SCALE = LengthScale(prompt=0.3, output=0.15, prompt_range=(16, 900), output_range=(12, 48))
TRICKLE_REQUESTS, TRICKLE_RATE_PER_S = 12, 0.6
MAX_BATCH_TOKENS = 1024


def cases(choice: Choice) -> Sequence[Case]:
    """The flood of `burst` with other lengths, and the trickle after it."""
    (case,) = burst.cases(choice)
    trickle_s = TRICKLE_REQUESTS / TRICKLE_RATE_PER_S
    return (
        replace(
            case,
            name="ablation",
            workload=partial(_workload, choice),
            expected_s=case.expected_s + trickle_s,
        ),
    )


def _workload(choice: Choice, turn: int) -> Workload:
    flood = burst.flood(choice, turn, SCALE)
    statement = (
        f"{flood.statement}; then {TRICKLE_REQUESTS} of them again, {TRICKLE_RATE_PER_S:g} a second"
    )
    return Workload((*flood.requests, *_trickle(flood.requests)), statement)


def _trickle(flood: Sequence[PlannedRequest]) -> list[PlannedRequest]:
    """The first requests once more, evenly after the flood."""
    end_s = flood[-1].arrival_s
    return [
        replace(request, arrival_s=end_s + number / TRICKLE_RATE_PER_S)
        for number, request in enumerate(flood[:TRICKLE_REQUESTS], start=1)
    ]


SCENARIO = Scenario(
    name="ablation",
    summary="drop, exchange, lookahead and restore one after the other, each with its effect",
    systems=tuple(STEPS.values()),
    memory=burst.SCENARIO.memory,
    cases=cases,
    rounds=burst.SCENARIO.rounds,
    steps=STEPS,
    fresh=True,
    options={"max_batch_tokens": MAX_BATCH_TOKENS},
)

"""`steady`: a closed loop of fixed concurrency and lengths, in three mixes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from tideserve.bench.scenarios.scenario import QUICK_LIMIT_S, Case, LoadChoice, Scenario
from tideserve.bench.workload import Workload, fixed, with_lead_in

# So many rounds, because the speed of a shared machine varies from minute to minute.
QUICK_ROUNDS, FULL_ROUNDS = 8, 5


@dataclass(frozen=True, slots=True)
class Mix:
    """Lengths in tokens of a full run; `quick_s` is what a quick round takes on two cores."""

    name: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    quick_s: float


# With more prompts at once, it is chance whether first tokens wait for prompts or the next ones do.
MIXES = (
    Mix("prefill", 1024, 64, 2, 11),
    Mix("decode", 128, 256, 8, 9.5),
    Mix("mixed", 512, 128, 8, 7),
)
# Measured requests of a round: with some 250 a mix, a P99 is not the victim of a single stall.
QUICK_REQUESTS, FULL_REQUESTS = 32, 64
# So that all of them fit into the four minutes.
QUICK_DIVISOR = 16
FULL_FACTOR = QUICK_DIVISOR * FULL_REQUESTS / QUICK_REQUESTS
# A full run takes long; its limit is for a system that hangs.
FULL_SLACK = 10


def _workload(mix: Mix, choice: LoadChoice, turn: int) -> Workload:
    count = QUICK_REQUESTS if choice.quick else FULL_REQUESTS
    divisor = QUICK_DIVISOR if choice.quick else 1
    made = fixed(
        count,
        mix.prompt_tokens // divisor,
        mix.output_tokens // divisor,
        choice.seed * 1000 + turn,
        mix.name,
    )
    scaled = f" (lengths of a full run ÷ {divisor})" if choice.quick else ""
    statement = f"{made.statement} in a closed loop of {mix.concurrency}{scaled}"
    return with_lead_in(replace(made, statement=statement), mix.concurrency)


def cases(choice: LoadChoice) -> Sequence[Case]:
    """The three mixes."""
    return [
        Case(
            name=f"steady/{mix.name}",
            workload=partial(_workload, mix, choice),
            concurrency=mix.concurrency,
            expected_s=mix.quick_s if choice.quick else mix.quick_s * FULL_FACTOR,
            limit_s=(
                QUICK_LIMIT_S / QUICK_ROUNDS * mix.quick_s / sum(one.quick_s for one in MIXES)
                if choice.quick
                else FULL_SLACK * FULL_FACTOR * mix.quick_s
            ),
        )
        for mix in MIXES
    ]


SCENARIO = Scenario(
    name="steady",
    summary="closed loop, fixed concurrency and lengths: prefill-heavy, decode-heavy, mixed",
    systems=("tideserve", "vllm"),
    memory="1GiB",
    # Many processors have no product of bfloat16, and substitutes of systems cannot be compared.
    dtype="float32",
    cases=cases,
    rounds=lambda quick: QUICK_ROUNDS if quick else FULL_ROUNDS,
)

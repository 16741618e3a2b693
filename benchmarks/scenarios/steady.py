"""`steady`: closed loops of fixed concurrency and lengths, from one short prompt to many long ones.

Every system runs in the fastest dtype of the processor, and then in float32. Prompts of a run share
no prefixes, so a prefix cache has no effect.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.scenarios.scenario import FASTEST, GPU, Case, LoadChoice, Scenario
from tideserve.load.workload import Workload, fixed, with_lead_in

FULL_FACTOR = 4
"""Requests of a full round, as a multiple of a quick round; outputs are twice as long."""
QUICK_SLACK, FULL_SLACK = 2.3, 10.0
"""Time limits as multiples of the expected time; a full round reaches it only if a system hangs."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Lengths in tokens; `outputs` and `requests` apply to a quick round.

    `quick_s` is the duration of a quick round with an engine on each of two cores. With `again`,
    the mix is also measured in the second dtype. `reads_weights`: see `Case`.
    """

    name: str
    prompt: int
    outputs: int
    concurrency: int
    requests: int
    quick_s: float
    again: bool = True
    reads_weights: bool = False

    def workload(self, choice: LoadChoice, turn: int) -> Workload:
        """The requests of round `turn`, after a lead-in unless all are sent at once."""
        count = self.requests * (1 if choice.quick else FULL_FACTOR)
        outputs = self.outputs * (1 if choice.quick else 2)
        made = fixed(count, self.prompt, outputs, choice.seed * 1000 + turn, self.name)
        if count <= self.concurrency:
            return replace(made, statement=f"{made.statement}, all at once")
        statement = f"{made.statement} in a closed loop of {self.concurrency}"
        return with_lead_in(replace(made, statement=statement), self.concurrency)


MIXES = (
    Mix("alone", 64, 32, 1, 4, 4.5, again=False, reads_weights=True),
    Mix("decode", 64, 64, 16, 24, 8, reads_weights=True),
    Mix("wide", 64, 32, 64, 64, 8, again=False),
    Mix("mixed", 256, 32, 8, 12, 6),
    Mix("prefill", 1024, 16, 4, 6, 8),
)


def cases(choice: LoadChoice) -> Sequence[Case]:
    """A case per mix."""
    factor = 1 if choice.quick else 2 * FULL_FACTOR
    slack = QUICK_SLACK if choice.quick else FULL_SLACK
    return [
        Case(
            name=f"steady/{mix.name}",
            workload=partial(mix.workload, choice),
            concurrency=mix.concurrency,
            expected_s=mix.quick_s * factor,
            limit_s=mix.quick_s * factor * slack,
            own_dtype_only=choice.quick and not mix.again,
            reads_weights=mix.reads_weights,
        )
        for mix in MIXES
    ]


SCENARIO = Scenario(
    name="steady",
    systems=("tideserve", "vllm"),
    memory="1GiB",
    dtype=FASTEST,
    second_dtype="float32",
    cases=cases,
    paired=True,
    options=GPU,
)

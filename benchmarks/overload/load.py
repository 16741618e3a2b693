"""Requests and targets of `overload`. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Any

from benchmarks.co_serving.online_load import OnlineTargets
from tideserve.load.workload import BATCH_CLASS, DEFAULT_CLASS, PlannedRequest, prompt_ids
from tideserve.sim.workload import Length

INTERACTIVE = "interactive"
PROMPT = Length(256, 1.0, least=16, most=1024)
OUTPUT = Length(32, 1.0, least=4, most=128)
INTERACTIVE_SHARE = 0.5
"""Interactive tokens, as a share of the capacity at every load: they alone always fit."""
FACTORS = (1, 2, 5, 10)
MIXED_FACTOR = 10
MIXED_BATCH_SHARE = 0.5
"""Batch tokens, as a share of the mixed load."""
STANDARD_WAIT_S = 10.0
"""In the mixed load, standard requests state no target; they must start within the default limit
of their wait."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets by class; a class without an entry has none.

    `stated`: classes whose requests carry their targets. `mixed`: of the mixed load.
    """

    of_class: Mapping[str, OnlineTargets]
    stated: frozenset[str]
    mixed: bool

    def figures(self) -> dict[str, Any]:
        """The targets as JSON."""
        return {
            name: {
                "ttft_s": target.ttft_s,
                "tpot_s": None if target.tpot_s == inf else target.tpot_s,
                "stated": name in self.stated,
            }
            for name, target in self.of_class.items()
        }


def targets_for(slowdown: float, mixed: bool) -> Targets:
    """The targets on a device that is `slowdown` times slower.

    Interactive requests have the default targets of their class. Standard requests have one
    second, in the mixed load `STANDARD_WAIT_S` regardless of the device.
    """
    standard_s = STANDARD_WAIT_S if mixed else slowdown
    return Targets(
        {
            INTERACTIVE: OnlineTargets(0.5 * slowdown, 0.1 * slowdown),
            DEFAULT_CLASS: OnlineTargets(standard_s, inf),
        },
        frozenset({INTERACTIVE} if mixed else {INTERACTIVE, DEFAULT_CLASS}),
        mixed,
    )


def request(number: int, seed: str, slo_class: str, targets: Targets) -> PlannedRequest:
    """Request `number` of a load; it depends on `seed` alone. Prompts share no prefixes."""
    rng = Random(f"overload {seed} {number}")
    stated = targets.of_class[slo_class] if slo_class in targets.stated else None
    tpot_s = None if stated is None or stated.tpot_s == inf else stated.tpot_s
    return PlannedRequest(
        0.0,
        prompt_ids(PROMPT.draw(rng), f"overload {seed} {number}"),
        OUTPUT.draw(rng),
        number,
        slo_class=slo_class,
        ttft_s=None if stated is None else stated.ttft_s,
        tpot_s=tpot_s,
    )


def mean_tokens(requests: Sequence[PlannedRequest]) -> float:
    """Mean prompt and output tokens of a request."""
    tokens = sum(len(request.prompt_ids) + request.output_tokens for request in requests)
    return tokens / len(requests)


def class_shares(factor: float, mixed: bool) -> Mapping[str, float]:
    """Shares of the classes in the arrivals at `factor` × the capacity."""
    interactive = INTERACTIVE_SHARE / factor
    batch = MIXED_BATCH_SHARE if mixed else 0.0
    return {INTERACTIVE: interactive, DEFAULT_CLASS: 1 - interactive - batch, BATCH_CLASS: batch}

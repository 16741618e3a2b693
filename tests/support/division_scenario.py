"""Four real engines that merge, split into smaller groups and merge again; a worker may die."""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

from services.core.changeover.state import MemberPhase
from services.core.groups.layer_map import Stage
from services.core.request import Request
from services.worker.engine.compute.runner_config import RunnerConfig
from tests.support.engine_group import ATTEMPT_TURNS
from tests.support.engine_networks import QueueNetwork
from tests.support.group_scenario import Scenario
from tests.support.interleaved import interleaved

LAYERS = 4
MOMENTS = ("", "prepared", "committed", *(phase.value for phase in MemberPhase))
"""When a worker dies: never, during a preparation, at a commit, or in a phase of the change."""
ROUTES: tuple[tuple[str, ...], ...] = (
    ("merge all", "halve", "split"),
    ("merge pairs", "merge all", "halve", "merge all"),
    ("merge three", "halve", "merge all", "halve"),
    ("merge all", "halve", "merge all", "split"),
)
"""Layouts in order: 4 → 2+2 → 1, 2+2 → 4 → 2+2 → 4, 3 → 2+1, and back."""


class DivisionScenario(Scenario):
    """Requests that lose their worker are resumed after their last token.

    `seen` counts groups that were "divided" into smaller ones, and workers by the moment in which
    they died.
    """

    WORKERS = (4,)
    NUM_LAYERS = LAYERS

    def __init__(
        self, config: RunnerConfig, requests: list[Request], seed: int, **options: Any
    ) -> None:
        """`options` are those of the `GROUP`."""
        super().__init__(config, requests, seed, QueueNetwork(), **options)
        self.group.gateway.asks_again = self.group.gateway.resumes = True
        self._chances = random.Random(f"divisions {seed}")
        self._moment = MOMENTS[seed % len(MOMENTS)]
        self._route = ROUTES[(seed + seed // len(MOMENTS)) % len(ROUTES)]
        # Whether the worker dies in a change that divides a group, or in any other change.
        self._fatal = self._chances.randrange(1, len(self._route))
        self.seen: Counter[str] = Counter()

    def run(self, events: int = 0) -> None:
        """Run all changes, each after `events` arrivals, then let all requests end."""
        for number, step in enumerate(self._route):
            for _ in range(events):
                self.arrive()
            self._work()
            moment = self._moment if number == self._fatal else ""
            self._change(step, moment)
            self.group.check_tables()
        self.group.finish()
        self.group.check_at_rest()

    def _work(self) -> None:
        for _ in range(self._chances.randint(0, 120)):
            self.group.turn()

    def _targets(self, step: str) -> list[Sequence[Stage]]:
        """The new groups; empty if the step needs a worker that has died."""
        groups = sorted(self.group.groups, key=lambda stages: (len(stages), stages[0].worker_id))
        names = [stage.worker_id for stage in chain(*groups)]
        match step:
            case "merge all":
                stages = sorted(
                    chain(*groups), key=lambda stage: stage.first_layer + stage.end_layer
                )
                return [cut([stage.worker_id for stage in stages])] if len(groups) > 1 else []
            case "merge pairs":
                return [cut(names[:2]), cut(names[2:])] if len(names) == 4 else []
            case "merge three":
                return [cut(names[:3])]
            case "halve":
                return [*interleaved(groups[-1], 2, LAYERS)] if len(groups[-1]) > 2 else []
        merged = [stage for stages in groups if len(stages) > 1 for stage in stages]
        return [[Stage(stage.worker_id, 0, LAYERS)] for stage in merged]

    def _change(self, step: str, moment: str) -> None:
        group, targets = self.group, self._targets(step)
        if not targets:
            return
        if self._chances.random() < 0.5:
            group.settle()
        attempt = group.prepare(targets)
        if moment == "prepared":
            for _ in range(self._chances.randint(1, 60)):
                group.turn()
            group.abort_attempt(attempt, targets)
            self._die(moment, targets)
            return
        if not group.await_answers(attempt, targets):
            group.abort_attempt(attempt, targets)
            return
        group.commit(targets)
        self.seen["divided"] += step == "halve"
        if moment:
            self._die(moment, targets)

    def _die(self, moment: str, targets: list[Sequence[Stage]]) -> None:
        """Kill a member of the change once any member reaches the phase `moment`, if it does."""
        group = self.group
        names = [stage.worker_id for target in targets for stage in target]
        if moment in list(MemberPhase):
            for _ in range(ATTEMPT_TURNS):
                phases = {name: group.engines[name].member.changeover.phase for name in names}
                if moment in phases.values():
                    break
                group.turn()
            else:
                return
        group.lose(self._chances.choice(names))
        self.seen[moment] += 1
        group.restore()


def cut(names: Sequence[str]) -> list[Stage]:
    """A group of these workers, with nearly equal numbers of layers."""
    ends = [LAYERS * number // len(names) for number in range(len(names) + 1)]
    return [Stage(name, ends[i], ends[i + 1]) for i, name in enumerate(names)]

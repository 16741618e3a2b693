"""Random events on a small cluster of real engines: requests, merges, splits, preparations."""

import random
from dataclasses import replace
from typing import Any

from services.core.groups.layer_map import Stage
from services.core.request import Request
from services.worker.engine.compute.runner_config import RunnerConfig
from tests.support.engine_group import EngineGroup
from tests.support.engine_networks import EngineNetwork
from tests.support.undisturbed import CHUNK_BYTES

LAYERS = 3
CHANGES_MIN, CHANGE_TRIES = 2, 30


def split_in(names: list[str], cuts: list[int]) -> list[Stage]:
    """Stages of `names` over all layers, cut at `cuts`."""
    bounds = [0, *cuts, LAYERS]
    return [Stage(name, bounds[i], bounds[i + 1]) for i, name in enumerate(names)]


class Scenario:
    """Random events on a small cluster; every choice comes from the seed."""

    WORKERS = (2, 2, 3)
    NUM_LAYERS = LAYERS
    GROUP = EngineGroup

    def __init__(
        self,
        config: RunnerConfig,
        requests: list[Request],
        seed: int,
        network: EngineNetwork,
        **options: Any,
    ) -> None:
        self.rng = random.Random(seed)
        self.requests = requests
        # From room for a request and a half to room for seven.
        kv_bytes = self.rng.choice([4, 4, 5, 8, 16]) * self.NUM_LAYERS * CHUNK_BYTES
        self.group = self.GROUP(
            replace(config, budget_bytes=config.budget_bytes + kv_bytes),
            self.rng.choice(self.WORKERS),
            seed,
            max_batch_tokens=self.rng.choice([16, 64]),
            max_running=self.rng.choice([4, 16]),
            **({} if "prefix_caching" in options else {"prefix_caching": seed % 2 == 1}),
            network=network,
            **options,
        )
        self.number = 0
        self.changes = 0

    def run(self, events: int) -> None:
        """Run random events, then let all requests end."""
        group = self.group
        for _ in range(events):
            event = self.rng.choices(
                [self.arrive, self.abort, self.change, self.wait], [5, 1, 2, 4]
            )[0]
            event()
            group.check_invariants()
        # Two further changes, so that every run forms a group and changes it.
        for _ in range(CHANGE_TRIES):
            if self.changes >= CHANGES_MIN:
                break
            self.arrive()
            self.change()
            group.check_invariants()
        assert self.changes >= CHANGES_MIN, "the members refuse what they could do"
        group.end()

    def arrive(self) -> None:
        request = self.rng.choice(self.requests)
        number = request.request_id.split("-")[1]
        self.group.start(replace(request, request_id=f"{self.number}-{number}"))
        self.number += 1

    def abort(self) -> None:
        open_ones = [name for name, stream in self.group.streams.items() if not stream.over]
        if open_ones:
            self.group.abort(self.rng.choice(open_ones))

    def stop(self) -> None:
        """Place a stop string at or near the current end of a request's output."""
        open_ones = [name for name, stream in self.group.streams.items() if not stream.over]
        if open_ones:
            name = self.rng.choice(open_ones)
            self.group.stop(name, len(self.group.streams[name].tokens) + self.rng.randint(0, 6))

    def wait(self) -> None:
        for _ in range(self.rng.randint(1, 80)):
            self.group.turn()

    def change(self) -> None:
        """Merge two groups, split or reorder a group; the attempt may be aborted."""
        group, rng = self.group, self.rng
        if rng.random() < 0.5:
            group.settle()  # otherwise members prepare after the last change
        pipelines = [stages for stages in group.groups if len(stages) > 1]
        if pipelines and (len(group.groups) == 1 or rng.random() < 0.5):
            names = [stage.worker_id for stage in rng.choice(pipelines)]
            if rng.random() < 0.3:
                rng.shuffle(names)
                targets = [split_in(names, self.cuts(len(names)))]
            else:
                targets = [[Stage(name, 0, LAYERS)] for name in names]
            group.draining = set(rng.sample(names, 1)) if rng.random() < 0.3 else set()
        else:
            left, right = rng.sample(group.groups, 2)
            names = [stage.worker_id for stage in (*left, *right)]
            targets = [split_in(names, self.cuts(len(names)))]
        attempt = group.prepare(targets)
        if rng.random() < 0.2:
            self.wait()
            group.abort_attempt(attempt, targets)
            return
        if rng.random() < 0.5:
            self.stop()
        if group.await_answers(attempt, targets):
            group.commit(targets)
            self.changes += 1
        else:
            group.abort_attempt(attempt, targets)

    def cuts(self, stages: int) -> list[int]:
        """Random layer boundaries of `stages` stages."""
        return sorted(self.rng.sample(range(1, LAYERS), stages - 1))

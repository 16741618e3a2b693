"""Random events on real engines that hand over requests after their prompt, move and merge."""

import random
from dataclasses import replace
from itertools import combinations

from services.core.destination import Destination
from services.core.groups.layer_map import Stage
from services.core.request import Request
from services.worker.engine.compute.runner_config import RunnerConfig
from tests.support.engine_networks import QueueNetwork
from tests.support.group_scenario import LAYERS, split_in
from tests.support.shipping_group import ShippingGroup
from tests.support.undisturbed import CHUNK_BYTES

CHUNKS = (6, 12, 64)
"""KV memory in chunks of a layer: from room for two requests to plenty."""


class HandOverScenario:
    """All choices come from the seed. Some seeds lose a worker. Counts `merges` and `splits`."""

    def __init__(self, config: RunnerConfig, requests: list[Request], seed: int) -> None:
        self.rng = random.Random(f"hand-overs {seed}")
        self.requests = requests
        kv_bytes = CHUNKS[seed % len(CHUNKS)] * LAYERS * CHUNK_BYTES
        self.network = QueueNetwork()
        self.group = ShippingGroup(
            replace(config, budget_bytes=config.budget_bytes + kv_bytes),
            *(3, seed),
            max_batch_tokens=self.rng.choice((8, 24, 64)),
            max_running=self.rng.choice((4, 8)),
            network=self.network,
        )
        self.number = self.merges = self.splits = self.moves = 0
        self.may_die = seed % 2 == 0
        self.handed = self.kept = 0
        """Includes workers that have died."""

    def run(self, events: int) -> None:
        """Run random events, then let all requests end."""
        self._introduce()
        for _ in range(events):
            actions = (self.arrive, self.wait, self.move, self.change, self.cut, self.abort)
            self.rng.choices([*actions, self.die], [8, 4, 2, 1, 0.5, 0.5, 0.5])[0]()
            self.group.check_tables()
        self.group.end()
        for name in self.group.engines:
            self._count(name)

    def close(self) -> None:
        self.group.close()

    def arrive(self) -> None:
        """Submit a request, mostly with a worker to hand it over to."""
        group, rng = self.group, self.rng
        request = rng.choice(self.requests)
        name = f"{self.number}-{request.request_id.split('-')[1]}"
        self.number += 1
        leader = rng.choice(group.groups)[0].worker_id
        others = [stages[0].worker_id for stages in group.groups if stages[0].worker_id != leader]
        place = None
        if others and rng.random() < 0.8:
            target = rng.choice(others)
            place = Destination(target, f"address of {target}", f"group-{target}", group.epoch)
        group.start(replace(request, request_id=name, hand_to=place), leader)

    def wait(self) -> None:
        for _ in range(self.rng.randint(1, 80)):
            self.group.turn()

    def abort(self) -> None:
        group = self.group
        if left := [name for name, stream in group.streams.items() if not stream.over]:
            group.abort(self.rng.choice(left))

    def move(self) -> None:
        """Move requests, which may be moving already."""
        if len(self.group.engines) > 1:
            source, target = self.rng.sample(sorted(self.group.engines), 2)
            self.group.ship(source, target, self.rng.randrange(3))
            self.moves += 1

    def change(self) -> None:
        """Merge two groups, or split one."""
        group, rng = self.group, self.rng
        pipelines = [stages for stages in group.groups if len(stages) > 1]
        if pipelines:
            names = [stage.worker_id for stage in rng.choice(pipelines)]
            targets = [[Stage(name, 0, LAYERS)] for name in names]
        elif len(group.groups) > 1:
            left, right = rng.sample(group.groups, 2)
            names = [stage.worker_id for stage in (*left, *right)]
            targets = [split_in(names, [rng.randrange(1, LAYERS)])]
        else:
            return
        attempt = group.prepare(targets)
        if not group.await_answers(attempt, targets):
            group.abort_attempt(attempt, targets)
            return
        group.commit(targets)
        self.splits += bool(pipelines)
        self.merges += not pipelines
        if rng.random() < 0.5:
            group.settle()
        self._introduce()

    def cut(self) -> None:
        """Break the connection of two single-worker groups."""
        single = sorted(stages[0].worker_id for stages in self.group.groups if len(stages) == 1)
        if len(single) > 1 and all(e.member.settled for e in self.group.engines.values()):
            self.network.part(*self.rng.sample(single, 2), ())
            for pair in combinations(single, 2):
                self.network.notify_break(*pair)

    def die(self) -> None:
        """Kill a worker, at most once per scenario."""
        if self.may_die and len(self.group.engines) > 2:
            self.may_die = False
            name = self.rng.choice(sorted(self.group.engines))
            self._count(name)
            self.group.lose(name)
            self.group.restore()
            self._introduce()

    def _introduce(self) -> None:
        for pair in combinations(sorted(self.group.engines), 2):
            self.group.introduce(*pair)
        self.wait()

    def _count(self, name: str) -> None:
        counts = self.group.counts(name)
        self.handed += counts.handed_over_total
        self.kept += counts.hand_overs_kept_total

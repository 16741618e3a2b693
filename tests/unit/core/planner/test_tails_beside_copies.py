"""Shared tails with host copies and shipments: every token reads the KV of its own prefix."""

import os
from itertools import product
from typing import Any

import pytest

from services.core.destination import Destination
from services.core.planner.events import RefuseRequest
from services.core.planner.pin_events import (
    BlocksAllocated,
    BlocksFilled,
    BlocksShared,
    PinReleased,
    SequenceShipped,
)
from services.core.planner.sequence import Phase
from services.core.prefix.block_hash import block_hashes, prompt_root
from services.core.queue_order import Scheduling
from tests.support.host_world import BLOCK_SIZE, LAYERS, HostWorld, RandomWorld

STEPS = 150
SEEDS = int(os.environ.get("TIDESERVE_TAIL_SEEDS", "40"))
TARGET = Destination("w2", "w2:1", "g", 1)
SCHEDULINGS = [Scheduling.SLO, Scheduling.CONSERVE, Scheduling.BROS]


class SharingWorld(RandomWorld):
    """A random world that shares tails, and pins blocks as shipments do."""

    def __init__(self, seed: int, **changes: Any) -> None:
        options = {
            "block_sharing": True,
            "scheduling": SCHEDULINGS[seed % len(SCHEDULINGS)],
            "num_blocks": 16 + seed % 2 * 8,
        }
        super().__init__(seed, **{**options, **changes})
        self.pins: list[str] = []
        self.pins_so_far = 0
        for _ in range(8):  # they fill the memory, and decode when others arrive
            self._ask_batch()

    def _ask_batch(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.roots)[: rng.randint(4, 20)]
        self.ask(prompt, rng.randint(15, 40), rng.choice(["", "other"]), online=False)

    @property
    def tails(self) -> Any:
        return self.state.sequence_table.tails

    def step(self) -> None:
        choice = self.rng.random()
        if choice < 0.6:
            self.iterate_in_parallel()
        elif choice < 0.65:
            self._ask_batch()
        elif choice < 0.95:
            super().step()
        else:
            self._ship_any()

    def _ship_any(self) -> None:
        self.rng.choice([self.pin_running, self.ship, self.receive, self.release])()

    def _carry_out(self, command: Any) -> None:
        if not isinstance(command, RefuseRequest):  # it goes on at another worker
            super()._carry_out(command)

    def _new_pin(self) -> str:
        self.pins_so_far += 1
        return f"@ship.{self.pins_so_far}"

    def pin_running(self) -> None:
        running = [seq for seq in self.state.running if seq.registered]
        if running:
            self.pins.append(name := self._new_pin())
            self.handle(BlocksShared(name, self.rng.choice(running).seq_id))

    def ship(self) -> None:
        """A running request continues at another worker."""
        running = [seq for seq in self.state.running if seq.phase is Phase.RUNNING]
        if running:
            self.pins.append(name := self._new_pin())
            seq_id = self.rng.choice(running).seq_id
            self.over.add(seq_id)
            self.handle(SequenceShipped(name, seq_id, TARGET))

    def receive(self) -> None:
        """The KV of a prefix arrives from another worker."""
        root, salt = self.rng.choice(self.roots), self.rng.choice(["", "other"])
        blocks = self.rng.randint(1, len(root) // BLOCK_SIZE)
        hashes = tuple(block_hashes(prompt_root(salt), root[: blocks * BLOCK_SIZE], BLOCK_SIZE))
        table, online = self.state.sequence_table, self.rng.random() < 0.5
        if (table.blocks_for_online if online else table.ledger.free) < blocks:
            return
        self.pins.append(name := self._new_pin())
        self.handle(BlocksAllocated(name, "", online, hashes, blocks))
        for place, block in enumerate(self.state.table.block_ids(name)):
            for slot, layer in product(range(BLOCK_SIZE), range(LAYERS)):
                self.kv[block, layer, slot] = salt, root[: place * BLOCK_SIZE + slot + 1]
        self.handle(BlocksFilled(name, hashes))

    def release(self) -> None:
        if self.pins:
            self.handle(PinReleased(self.pins.pop(self.rng.randrange(len(self.pins)))))

    def end(self) -> None:
        while self.pins:
            self.release()
        super().end()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_token_reads_the_kv_of_its_own_prefix(seed: int) -> None:
    world = SharingWorld(seed)
    for _ in range(STEPS):
        world.step()
    world.end()


def test_the_worlds_share_and_lose_tails() -> None:
    worlds = [SharingWorld(seed) for seed in range(20)]
    for world in worlds:
        for _ in range(STEPS):
            world.step()
    assert sum(world.tails.shared_total for world in worlds) > 5
    assert sum(world.tails.lost_tokens_total for world in worlds) > 5


def test_online_kv_leaves_the_blocks_of_batch_pins() -> None:
    """The target of a move offers only blocks that it can free, and refuses more."""
    world = HostWorld(num_blocks=16)
    world.handle(BlocksAllocated("@ship.1", "", False, (), 10))
    table = world.state.sequence_table
    assert table.blocks_for_online == 6
    world.handle(BlocksAllocated("@ship.2", "", True, (), 6))
    assert table.pins.get("@ship.1") is not None and table.ledger.free == 0

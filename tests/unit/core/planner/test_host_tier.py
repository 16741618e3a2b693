"""Host copies of KV: no sequence reads wrong KV, even if a copy is damaged or lost."""

import os
import random
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from services.core.cost.model import CostModel
from services.core.host.vocabulary import (
    BlocksRecalled,
    CancelHostJob,
    HostGrown,
    RecallBlocks,
    SaveBlocks,
)
from services.core.planner.configuration_events import (
    BlocksRelocated,
    ConfigurationEnded,
    PoolGrown,
    PoolLimited,
    StagesConfigured,
)
from services.core.planner.events import IterationFinished
from services.core.planner.host_tier import RECALL_S
from services.core.prefix.block_hash import block_hashes, prompt_root, thin_hash
from services.core.queue_order import Scheduling
from tests.support.host_world import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    LAYERS,
    LINK,
    SLOW,
    TURN_S,
    HostWorld,
    RandomWorld,
    host_settings,
)

SEEDS = int(os.environ.get("TIDESERVE_HOST_SEEDS", "60"))
STEPS = 150


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_token_reads_the_kv_of_its_own_prefix(seed: int) -> None:
    world = RandomWorld(seed)
    for _ in range(STEPS):
        world.step()
    world.end()


PROMPT = tuple(range(1, 34))  # eight full blocks, and a token


def fillers(world: HostWorld, count: int = 3) -> None:
    """Other prompts, which overwrite all that the device has cached."""
    for number in range(count):
        world.ask(tuple((7 * number + place) % 50 for place in range(40)), output=4)


def test_a_prefix_that_the_device_has_lost_is_recalled() -> None:
    world = HostWorld(num_blocks=24)
    world.ask(PROMPT)
    settle(world)
    fillers(world, 8)
    settle(world)
    assert not list(world.state.pool.cache.find(hashes_of(world, PROMPT)[:1]))
    ran = world.ran
    again = world.ask(PROMPT)
    settle(world)
    assert world.cached[again] == 32 and world.ran - ran == 1
    assert world.host.counts.hit_tokens_total == world.host.counts.recalled_tokens_total == 32
    world.end()


def test_another_owner_has_no_hits() -> None:
    world = recallable()
    other = world.ask(PROMPT, salt="other")
    settle(world)
    assert world.cached[other] == 0 and world.host.counts.recalls_total == 0
    world.end()


def test_no_block_is_recalled_if_computing_is_faster() -> None:
    fast = CostModel(alpha=0.0, beta=1e-6, gamma=0.0, lam=0.0)
    world = recallable(cost_model=fast)
    world.ask(PROMPT)
    settle(world)
    assert world.host.counts.recalls_total == 0 and world.host.counts.saved_blocks_total
    world.end()


def test_other_work_runs_during_a_recall() -> None:
    world = recallable()
    waiting = world.ask(PROMPT, output=2)
    other = world.ask((40, 41, 42), output=4)
    for _ in range(4):
        assert world.iterate()
    assert len(world.tokens[other]) == 4 and not world.tokens[waiting]
    world.end()


def test_batch_work_runs_beside_online_work_during_a_recall() -> None:
    """A request that waits for its KV lacks no blocks. Else recalls would starve batch work."""
    world = recallable()
    batch = world.ask((30, 31, 32), output=30, online=False)
    world.iterate()
    online = world.ask((40, 41, 42), output=30)
    for _ in range(3):
        world.iterate()
    waiting = world.ask(PROMPT, output=2)
    before = len(world.tokens[batch]), len(world.tokens[online])
    for _ in range(6):
        assert world.iterate()
    assert world.state.sequences[waiting].awaits_kv
    assert len(world.tokens[online]) == before[1] + 6 and len(world.tokens[batch]) > before[0]
    world.end()


@pytest.mark.parametrize("output", range(2, 8))
def test_a_request_is_recalled_once_another_has_freed_blocks(output: int) -> None:
    """Not started without its recall, however long ago the last look was."""
    world = recallable(num_blocks=12)
    other = world.ask(tuple(range(60, 80)), output=output)
    world.iterate()
    waiting = world.ask(PROMPT)
    while other not in world.over:
        assert not world.state.sequences[waiting].blocks
        world.iterate()
        world.copy_all()
    settle(world)
    assert world.cached[waiting] == 32
    world.end()


def test_a_hanging_recall_times_out() -> None:
    world = recallable()
    name = world.ask(PROMPT)
    assert not world.iterate() and world.jobs
    world.now_s += RECALL_S
    assert world.iterate(), "the request waits for a copier that hangs"
    settle(world, copies=False)
    assert world.tokens[name] and world.host.counts.recalls_total == 1
    world.end()


def test_a_slow_recall_within_its_link_time_completes() -> None:
    world = recallable(cost_model=replace(SLOW, beta=0.1))
    world.host.settings = host_settings(link_bytes_per_s=BLOCK_BYTES / 0.3)
    name = world.ask(PROMPT)
    world.iterate()
    world.now_s += 8 * 0.3  # longer than RECALL_S
    world.look()
    settle(world)
    assert world.cached[name] == 32
    world.end()


def test_a_damaged_copy_is_recomputed_and_forgotten() -> None:
    world = recallable()
    slots = list(world.host.cache.find(hashes_of(world, PROMPT)))
    world.damage(slots[3])
    name = world.ask(PROMPT)
    settle(world)
    assert world.cached[name] == 3 * BLOCK_SIZE and world.host.counts.failures_total == 1
    world.end()


@pytest.mark.parametrize("copied", [0, 3])
def test_a_refused_recall_keeps_the_copies_and_is_not_tried_again(copied: int) -> None:
    """Nothing is known of the blocks that were not copied."""
    world = recallable()
    held = world.host.cache.held
    name = world.ask(PROMPT)
    world.look()
    command = recall_of(world)
    world.copy(LAYERS * copied)
    world.jobs.clear()
    world.handle(BlocksRecalled(world.now_s, command.job, (True,) * copied))
    counts = world.host.counts
    assert (counts.failures_total, counts.recalls_total) == (0, 1)
    assert world.host.cache.held == held
    world.now_s += 1.0
    world.look()
    assert not world.jobs, "it is tried again, maybe for ever"
    settle(world)
    assert world.cached[name] == copied * BLOCK_SIZE and counts.recalls_total == 1
    world.end()


def test_a_lost_store_delays_no_request() -> None:
    world = recallable()
    world.ask(PROMPT)
    assert not world.iterate() and world.jobs
    world.kill_copier()
    assert world.host.due_s == inf and world.iterate()
    world.end()
    assert world.host.cache.slots == 0


def test_no_recall_begins_while_an_iteration_writes() -> None:
    """Its blocks may have been freed since it was planned."""
    world = recallable()
    long = world.ask((40, 41, 42), output=9)
    world.iterate()
    microbatch = world.plan()
    assert microbatch is not None
    sampled = world.run(microbatch)
    world.ask(PROMPT)
    world.look()
    assert not world.jobs
    world.handle(IterationFinished(world.now_s, sampled, microbatch.number))
    world.look()
    assert recall_of(world) and long in world.open
    world.end()


def test_blocks_that_are_being_recalled_are_not_wanted_twice() -> None:
    """They are in use already; the memory manager would take them for a shortage."""
    world = recallable()
    waiting = world.state.sequences[world.ask(PROMPT)]
    needed = waiting.blocks_to_admit(BLOCK_SIZE)
    free = world.state.load().kv_blocks_free
    assert world.state.load().kv_blocks_wanted == needed
    world.look()
    load = world.state.load()
    pinned = len(recall_of(world).blocks)
    assert (load.kv_blocks_free, load.kv_blocks_wanted) == (free - pinned, needed - pinned)
    world.end()


def test_an_aborted_request_frees_its_recalled_blocks() -> None:
    world = recallable()
    name = world.ask(PROMPT)
    world.iterate()
    job = world.jobs[0].command.job
    assert world.host.block_of(job, 0) is not None
    world.abort(name)
    assert world.host.block_of(job, 0) is None and world.state.pool.taken_count == 0
    world.end()


def test_jobs_end_with_the_configuration() -> None:
    """Later blocks under the same hash may have some of the layers only."""
    world = HostWorld(num_blocks=24, host=host_settings(save_from=0.0, lane_share=1.0))
    world.ask(PROMPT, output=30, online=False)
    for _ in range(40):
        world.iterate()
    save = next(job.command for job in world.jobs if isinstance(job.command, SaveBlocks))
    assert world.host.block_of(save.job, 0) is not None
    commands = world.state.handle(ConfigurationEnded())
    assert CancelHostJob(save.job) in commands
    world.handle(StagesConfigured())
    world.iterate()
    assert world.host.block_of(save.job, 0) is None
    world.end()


def test_preempted_batch_work_comes_back_from_the_host() -> None:
    world = HostWorld(num_blocks=20, host=host_settings(save_from=0.0, lane_share=1.0))
    batch = world.ask(PROMPT, output=24, online=False)
    for _ in range(12):
        world.iterate()
        world.copy_all()
    fillers(world, 3)
    settle(world)
    assert world.state.preemptions_total >= 1 and len(world.tokens[batch]) == 24
    assert world.host.counts.recalled_tokens_total >= 32
    assert world.host.counts.hit_tokens_total == 0, "its prompt had run here before"
    world.end()


def test_a_request_whose_recall_timed_out_is_recalled_after_its_next_preemption() -> None:
    """It is preempted before others, since it has copies."""
    world = HostWorld(num_blocks=20, host=host_settings(save_from=0.0, lane_share=1.0))
    batch = world.ask(PROMPT, output=40, online=False)
    sequence = world.state.sequences[batch]
    for preemptions in (1, 2):
        for _ in range(40):
            if not sequence.is_saved:
                world.iterate()
                world.copy_all()
        fillers(world, 8)
        for _ in range(100):
            if not sequence.pin:
                world.iterate()
            if not sequence.pin:
                world.copy_all()
        assert world.state.preemptions_total == preemptions
        assert sequence.pin, "it is not recalled"
        world.now_s += 2 * RECALL_S  # the copier hangs
        world.look()
        assert not sequence.pin, "its recall is tried again at once"
        world.copy_all()
    world.end()


def test_copies_of_preempted_work_stay_while_others_are_evicted() -> None:
    world = HostWorld(slots=12, num_blocks=20, host=host_settings(save_from=0.0, lane_share=1.0))
    world.ask(PROMPT, output=24, online=False)
    for _ in range(12):
        world.iterate()
        world.copy_all()
    for number in range(6):
        world.ask(tuple((11 * number + place) % 50 for place in range(40)), output=8)
    for _ in range(30):
        world.iterate()
        world.copy_all()
        if world.state.waiting and not world.state.waiting[-1].online:
            owed = hashes_of(world, PROMPT)
            assert len(list(world.host.cache.find(owed))) == len(owed)
    world.end()


def test_evicted_copies_count_no_more_when_a_victim_is_chosen() -> None:
    """Saves of a sequence evict the copies of others that run, if the store is too small."""
    settings = host_settings(save_from=0.0, lane_share=1.0)
    world = HostWorld(slots=8, num_blocks=40, host=settings)
    prompts = [tuple(range(first, first + 33)) for first in (1, 51, 101)]
    names = [world.ask(prompt, output=30, online=False) for prompt in prompts]
    batch = [world.state.sequences[name] for name in names]
    use = world.state.sequence_table.host_use
    assert use is not None
    while not (batch[1].is_saved and not use.has_copies(batch[1]) and not batch[2].is_saved):
        assert world.iterate(), "the copies of the second sequence stay"
        world.copy_all()
    free = world.state.pool.free_count
    world.ask(tuple(range(200, 201 + BLOCK_SIZE * free)), output=2)
    preempted = world.state.preemptions_total
    while world.state.preemptions_total == preempted:
        world.iterate()
    assert batch[1].blocks and not batch[2].blocks, "not the newest was preempted"
    assert not batch[1].is_saved
    world.copy_all()
    world.end()


@pytest.mark.parametrize("scheduling", [Scheduling.SLO, Scheduling.CONSERVE, Scheduling.BROS])
@pytest.mark.parametrize("online", [False, True])
def test_a_recall_of_batch_work_leaves_the_blocks_that_its_admission_leaves(
    online: bool, scheduling: Scheduling
) -> None:
    """With a larger reserve the sequence would start without its copies."""
    world = recallable(num_blocks=60, slots=200, scheduling=scheduling)
    running = world.ask(tuple(place % 49 for place in range(199)), output=8, online=online)
    while not world.tokens[running]:
        world.iterate()
        world.copy_all()
    waiting = world.ask(PROMPT, online=False)
    free = world.state.pool.free_count
    assert 0 <= free - world.state.sequences[waiting].blocks_to_admit(BLOCK_SIZE) < 2
    world.look()
    recalled = any(isinstance(job.command, RecallBlocks) for job in world.jobs)
    assert recalled is not (online and scheduling is not Scheduling.BROS)
    world.end()


def test_a_look_begins_all_saves_that_are_due() -> None:
    """Iterations may be long; a save has at most 32 blocks."""
    host = host_settings(save_from=0.0, lane_share=1.0)
    world = HostWorld(slots=64, num_blocks=64, max_batch_tokens=256, host=host)
    world.ask(tuple(place % 50 for place in range(240)), output=8, online=False)
    world.iterate()
    assert not world.jobs
    world.now_s += 0.1
    world.look()
    saves = [len(job.command.blocks) for job in world.jobs]
    assert len(saves) > 1 and sum(saves) > 32
    world.copy_all()
    world.end()


def test_a_recall_for_batch_work_yields_to_online_requests() -> None:
    world = recallable(num_blocks=12, scheduling=Scheduling.PRIORITY)
    world.ask(PROMPT, online=False)
    world.iterate()
    assert world.state.pool.taken_count == 8
    online = world.ask(tuple(range(50, 10, -1)), output=2)
    assert world.iterate(), "an online request waits for a recall of batch work"
    assert world.state.sequences[online].blocks
    world.end()


def test_an_online_recall_takes_the_blocks_of_batch_work() -> None:
    world = recallable(num_blocks=14, scheduling=Scheduling.PRIORITY)
    world.ask((45, 46), output=40, online=False)
    while world.state.pool.free_count > 6:
        world.iterate()
    world.ask(PROMPT)
    world.look()
    assert world.state.preemptions_total == 1 and recall_of(world)
    world.end()


@pytest.mark.parametrize("bound", [False, True])
def test_a_recall_takes_no_blocks_from_a_sequence_that_must_not_be_overtaken(bound: bool) -> None:
    world = recallable(num_blocks=12)
    world.ask((45, 46, 47), output=30)
    while world.state.pool.taken_count < 4:
        world.iterate()
        world.copy_all()
    world.ask(tuple(range(49, 11, -1)), output=2)
    if bound:
        world.state.sequence_table.waiting[0].overtaken = world.state.config.overtaken_max
    world.ask(PROMPT[:17])
    world.look()
    assert any(isinstance(job.command, RecallBlocks) for job in world.jobs) is not bound
    world.end()


def test_evictions_are_reported_once_neither_level_has_the_block() -> None:
    world = recallable()
    evictions = world.state.pool.cache.evictions
    reported = thin_hash(hashes_of(world, PROMPT)[7])
    assert reported not in evictions.since(0)
    world.kill_copier()
    assert reported in evictions.since(0)


def test_blocks_that_are_being_recalled_move_with_their_kv() -> None:
    world = recallable(num_blocks=12)
    world.ask((45, 46, 47), output=30)
    while world.state.pool.taken_count < 3:
        world.iterate()
        world.copy_all()
    name = world.ask(PROMPT)
    world.look()
    world.copy(7)
    pin = recall_of(world).pin
    table = world.state.table.tables[pin]
    world.abort("r3")
    world.handle(PoolLimited(9))
    world.handle(BlocksRelocated(9))
    assert max(table) >= 9 > max(world.state.table.tables[pin])
    world.copy_all()
    world.handle(PoolGrown(12))
    settle(world)
    assert world.cached[name] == 32
    world.end()


@pytest.mark.parametrize("lane_share", [0.01, 0.1, 1.0])
def test_polls_of_an_idle_worker_are_bounded_by_its_saves(lane_share: float) -> None:
    world = HostWorld(num_blocks=60, host=host_settings(lane_share=lane_share))
    for number in range(5):
        world.ask(tuple((13 * number + place) % 50 for place in range(40)))
    while world.open:
        world.iterate()
    unsaved, began_s, looks = len(world.state.pool.cache.unsaved), world.now_s, 0
    assert unsaved > 20
    while world.host.due_s < inf:
        world.now_s = max(world.now_s, world.host.due_s)
        world.look()
        world.copy_all()
        looks += 1
    bytes_per_s = 0.1 * lane_share * LINK
    assert world.now_s - began_s < 1.6 * unsaved * BLOCK_BYTES / bytes_per_s
    assert looks <= 2.2 * unsaved and not world.state.pool.cache.unsaved
    world.end()


def test_without_prefetch_nothing_runs_during_a_recall() -> None:
    world = recallable(host=host_settings(prefetch=False))
    world.ask((40, 41, 42), output=4)
    assert world.iterate()
    name = world.ask(PROMPT)
    assert not world.iterate(), "another request runs during a recall"
    world.copy_all()
    assert world.iterate() and world.tokens[name]
    world.end()


def test_a_hanging_recall_stalls_other_work_for_a_limited_time() -> None:
    world = recallable(host=host_settings(prefetch=False))
    world.ask((40, 41, 42), output=4)
    world.iterate()
    world.ask(PROMPT)
    assert not world.iterate()
    world.now_s += RECALL_S
    assert world.iterate()
    world.end()


@pytest.mark.parametrize("seed", range(20))
def test_host_memory_without_slots_changes_no_decision(seed: int) -> None:
    """And without the setting there is no tier at all."""
    worlds = [RandomWorld(seed), RandomWorld(seed, host=None)]
    worlds[0].handle(HostGrown(0.0, 0))
    rows = []
    for world in worlds:
        rng = random.Random(seed)
        row = list[Any]()
        for _ in range(80):
            if rng.random() < 0.3:
                world.arrive()
            world.now_s += TURN_S
            microbatch = world.plan()
            if microbatch is not None:
                sampled = world.run(microbatch)
                world.handle(IterationFinished(world.now_s, sampled, microbatch.number))
            row.append((microbatch, dict(world.state.table.tables), world.state.load()))
        rows.append(row)
    assert rows[0] == rows[1]
    assert worlds[1].host is None


def recallable(num_blocks: int = 24, slots: int = 64, **changes: Any) -> HostWorld:
    """A world whose host has the blocks of `PROMPT`, which the device has lost."""
    world = HostWorld(num_blocks=num_blocks, slots=slots, **changes)
    world.ask(PROMPT)
    settle(world)
    for number in range(2):
        world.ask(tuple((13 * number + place) % 50 for place in range(4 * num_blocks - 8)))
        settle(world)
    assert len(list(world.host.cache.find(hashes_of(world, PROMPT)))) == 8
    assert not list(world.state.pool.cache.find(hashes_of(world, PROMPT)))
    return world


def settle(world: HostWorld, copies: bool = True) -> None:
    """Run until everything has ended, and all cached blocks are saved."""
    for _ in range(400):
        ran = world.iterate()
        if copies:
            world.copy_all()
        saved = not copies or not world.state.pool.cache.unsaved
        if not ran and not world.open and saved:
            return
    raise AssertionError("requests or saves do not end")


def recall_of(world: HostWorld) -> RecallBlocks:
    (command,) = (job.command for job in world.jobs if isinstance(job.command, RecallBlocks))
    return command


def hashes_of(world: HostWorld, prompt: tuple[int, ...], salt: str = "") -> list[bytes]:
    return list(block_hashes(prompt_root(salt), prompt, world.state.config.block_size))

"""Requests with adapters run only at groups that take their adapter, and block no others."""

import os
from random import Random
from typing import Any

import pytest

from services.core.adapter import Adapter, AdapterUse, LoadedAdapter
from services.core.ask import RefusalReason
from services.core.cost.model import TOKEN_COSTS
from services.core.scheduler.admission import AWAY_RETRY_S
from services.core.scheduler.group_load import RESERVATION_S
from services.core.scheduler.vocabulary import (
    Command,
    GroupJoined,
    LoadReported,
    SendRefusal,
    Ticked,
)
from tests.unit.core.scheduler.test_state import Scheduler, assigned, group, load, placed

SEEDS = int(os.environ.get("TIDESERVE_ADAPTER_SEEDS", "12"))


def adapter(name: str, rank: int = 8) -> Adapter:
    return Adapter(name, name.encode().hex().ljust(64, "0"), f"/adapters/{name}", rank)


A, B, C = adapter("a"), adapter("b"), adapter("c")


def use(*loaded: LoadedAdapter, free: int = 0) -> AdapterUse:
    return AdapterUse(loaded, free)


def ready(of: Adapter, running: int = 0, load_s: float = 2.0) -> LoadedAdapter:
    return LoadedAdapter(of.key, False, running, load_s)


def serving(*uses: AdapterUse, rank_max: int = 16, **settings: Any) -> Scheduler:
    """A group for each of `uses`: w0, w1, …"""
    scheduler = Scheduler(**settings)
    for number, use in enumerate(uses):
        scheduler.join(f"w{number}", adapter_rank_max=rank_max)
        scheduler.report(f"w{number}", adapter_use=use)
    return scheduler


def refusal(commands: list[Command]) -> SendRefusal:
    (command,) = [command for command in commands if isinstance(command, SendRefusal)]
    return command


def test_a_worker_of_the_version_before_gets_no_adapter() -> None:
    scheduler = Scheduler()
    # It is idle; the other has the adapter, but hardly room.
    scheduler.serve("old")
    scheduler.join("new", adapter_rank_max=16)
    scheduler.report("new", adapter_use=use(free=1), free=9, running=4)
    assert placed(scheduler.ask("base")).worker_id == "old"
    assert placed(scheduler.ask("r0", adapter=A)).worker_id == "new"


def test_an_adapter_that_no_worker_can_load_is_refused_with_a_remedy() -> None:
    scheduler = Scheduler()
    scheduler.serve("old")
    refused = refusal(scheduler.ask("r0", adapter=A))
    assert refused.reason is RefusalReason.UNKNOWN_MODEL
    assert refused.retry_after_s == AWAY_RETRY_S
    assert "no worker of m loads adapters, as 'a' needs" in refused.message
    assert "'adapter_slots'" in refused.message

    scheduler.join("new", adapter_rank_max=16)
    scheduler.report("new", adapter_use=use(free=1))
    refused = refusal(scheduler.ask("r1", adapter=adapter("wide", rank=32)))
    assert "of rank 32, only up to 16" in refused.message
    assert "'adapter_rank_max' to 32 or more" in refused.message


def test_an_invalid_adapter_is_refused() -> None:
    scheduler = serving(use(free=1))
    refused = refusal(scheduler.ask("r0", adapter=Adapter("a", "x", "/a", 8)))
    assert refused.reason is RefusalReason.INVALID and "64 hexadecimal" in refused.message


def test_a_resumed_request_waits_for_a_worker_but_not_forever() -> None:
    scheduler = Scheduler(queue_deadline_s=30.0)
    scheduler.serve("old")
    assert not assigned(scheduler.ask("r0", adapter=A, resumed=True))
    assert not [c for c in scheduler(Ticked(29.0)) if isinstance(c, SendRefusal)]
    assert "no worker of m loads adapters" in refusal(scheduler(Ticked(30.0))).message


def test_the_worker_with_the_adapter_runs_it() -> None:
    scheduler = serving(use(free=2), use(ready(A, running=1), free=1), use(ready(B), free=1))
    assert placed(scheduler.ask("r0", adapter=A)).worker_id == "w1"
    assert placed(scheduler.ask("r1", adapter=B)).worker_id == "w2"
    # A reservation counts as well: the second waits for no other load.
    first = placed(scheduler.ask("r2", adapter=C)).worker_id
    assert placed(scheduler.ask("r3", adapter=C)).worker_id == first


def test_a_request_waits_for_a_load_time_before_a_second_load() -> None:
    scheduler = serving(use(ready(A, running=1, load_s=2.0)), use(free=1))
    scheduler.report("w0", free=1, adapter_use=use(ready(A, running=1)))
    assert not assigned(scheduler.ask("r0", adapter=A))
    assert not assigned(scheduler.report("w1", now_s=1.9, adapter_use=use(free=1)))
    commands = scheduler.report("w1", now_s=2.0, adapter_use=use(free=1))
    assert placed(commands).worker_id == "w1"


@pytest.mark.parametrize(("load_s", "worker"), [(0.001, "w1"), (1e6, "w0")])
def test_a_busy_worker_with_the_adapter_competes_with_an_idle_worker(
    load_s: float, worker: str
) -> None:
    scheduler = serving(use(), use(), ttft=TOKEN_COSTS)
    busy = use(ready(A, running=1, load_s=load_s))
    scheduler.report("w0", running=8, prefill=2048, free=80, adapter_use=busy)
    scheduler.report("w1", adapter_use=use(free=1))
    assert placed(scheduler.ask("r0", adapter=A)).worker_id == worker


def test_only_an_idle_adapter_is_evicted() -> None:
    scheduler = serving(use(ready(A, running=1), ready(B)))
    assert placed(scheduler.ask("r0", adapter=C)).worker_id == "w0"
    # The slot of B is reserved, and A is in use.
    assert not assigned(scheduler.ask("r1", adapter=B))
    # A slot whose adapter is being loaded is not idle.
    loading = use(ready(A, running=1), LoadedAdapter(C.key, loading=True))
    assert not assigned(scheduler.report(now_s=1.0, received=("r0",), adapter_use=loading))
    idle = use(ready(A), ready(C, running=1))
    assert assigned(scheduler.report(now_s=2.0, adapter_use=idle)) == ["r1"]


def test_a_reservation_that_expires_frees_the_slot() -> None:
    scheduler = serving(use(free=1))
    assert assigned(scheduler.ask("r0", adapter=A))
    assert not assigned(scheduler.ask("r1", adapter=B))
    later = RESERVATION_S + 0.1
    assert assigned(scheduler.report(now_s=later, adapter_use=use(free=1))) == ["r1"]


def test_unplaceable_adapters_block_no_other_request() -> None:
    scheduler = serving(use(ready(A, running=1)), overtaken_max=0, queue_limit=100)
    # More than the choice of the next request examines.
    for number in range(40):
        assert not assigned(scheduler.ask(f"b{number}", adapter=B))
    assert assigned(scheduler.ask("base")) == ["base"]
    # Requests of the adapter in the slot must let them pass now, or they would never start.
    assert not assigned(scheduler.ask("a", adapter=A))
    commands = scheduler.report(now_s=1.0, received=("base",), adapter_use=use(ready(A)))
    assert assigned(commands)[0] == "b0"


def test_an_overtaken_adapter_holds_only_groups_that_take_it() -> None:
    scheduler = Scheduler(overtaken_max=1)
    scheduler.join("full", adapter_rank_max=16)
    scheduler.report("full", free=9, adapter_use=use(free=1))
    assert not assigned(scheduler.ask("large", adapter=A, prompt_tokens=600))
    assert assigned(scheduler.ask("small")) == ["small"]
    assert not assigned(scheduler.ask("held")), "the large one was overtaken once"
    # A group that could not run the large one takes what it can.
    assert assigned(scheduler.serve("plain")) == ["held"]
    for number in range(20):
        assert placed(scheduler.ask(f"s{number}")).worker_id == "plain"
        scheduler.report("plain", received=("held", f"s{number}"))
    assert assigned(scheduler.report("full", adapter_use=use(free=1))) == ["large"]


def test_an_isolated_request_needs_its_adapter() -> None:
    scheduler = Scheduler()
    scheduler.serve("old")
    scheduler.join("new", adapter_rank_max=16)
    scheduler.report("new", running=1, adapter_use=use(free=1))
    assert not assigned(scheduler.ask("r0", adapter=A, alone=True))
    assert placed(scheduler.report("new", adapter_use=use(free=1))).worker_id == "new"


class Workers:
    """Workers with slots that run their requests for a random time."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now_s = 0.0
        self.slots = {"w0": 2, "w1": 1, "old": 0}
        self.scheduler = Scheduler(
            queue_limit=1000,
            queue_deadline_s=1e6,
            overtaken_max=self.rng.choice([0, 3]),
            ttft=self.rng.choice([None, TOKEN_COSTS]),
        )
        self.loaded: dict[str, dict[str, Adapter]] = {name: {} for name in self.slots}
        self.running: dict[str, dict[str, Adapter | None]] = {name: {} for name in self.slots}
        self.asked: dict[str, Adapter | None] = {}
        self.started: set[str] = set()
        for name, slots in self.slots.items():
            self.scheduler(GroupJoined(0.0, group(name, adapter_rank_max=16 if slots else 0)))

    def take(self, commands: list[Command]) -> None:
        for request_id in assigned(commands):
            (command,) = [c for c in commands if getattr(c, "request_id", "") == request_id][-1:]
            worker, of = command.worker_id, self.asked[request_id]  # type: ignore[union-attr]
            assert request_id not in self.started
            self.started.add(request_id)
            if of is not None:
                assert self.slots[worker], "it would be ignored"
                self.claim(worker, of)
            self.running[worker][request_id] = of

    def claim(self, worker: str, of: Adapter) -> None:
        loaded = self.loaded[worker]
        if of.digest not in loaded and len(loaded) == self.slots[worker]:
            busy = {a.digest for a in self.running[worker].values() if a is not None}
            idle = [digest for digest in loaded if digest not in busy]
            assert idle, "the scheduler reassigned a slot in use"
            del loaded[idle[0]]
        loaded[of.digest] = of

    def report(self, worker: str) -> None:
        running = list(self.running[worker].values())
        of = self.loaded[worker].values()
        loaded = tuple(ready(a, running.count(a), load_s=0.5) for a in of)
        use = AdapterUse(loaded, self.slots[worker] - len(loaded))
        free, received = 100 - 8 * len(running), tuple(self.running[worker])
        count = len(running)
        event: LoadReported = load(
            worker,
            now_s=self.now_s,
            adapter_use=use,
            free=free,
            received=received,
            running=count,
        )
        self.take(self.scheduler(event))

    def step(self, asks: bool) -> None:
        self.now_s += 0.2
        if asks and self.rng.random() < 0.7:
            name = f"r{len(self.asked)}"
            self.asked[name] = self.rng.choice([None, None, A, A, A, B, C])
            self.take(self.scheduler.ask(name, now_s=self.now_s, adapter=self.asked[name]))
        for worker, running in self.running.items():
            for request_id in [r for r in running if self.rng.random() < 0.15]:
                del running[request_id]
            self.report(worker)
        self.take(self.scheduler(Ticked(self.now_s)))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_request_starts_where_its_adapter_has_a_slot(seed: int) -> None:
    workers = Workers(seed)
    for _ in range(100):
        workers.step(asks=True)
    for _ in range(200):
        workers.step(asks=False)
    assert workers.started == workers.asked.keys()


def test_a_rare_adapter_is_not_starved_by_a_busy_adapter() -> None:
    workers = Workers(1)
    workers.slots["w1"] = 0
    workers.slots["w0"] = 1
    workers.report("w0")
    workers.asked["rare"] = B
    for step in range(300):
        if step == 5:
            workers.take(workers.scheduler.ask("rare", now_s=workers.now_s, adapter=B))
        # There are always requests of A, and each step ends only some of them.
        name = f"s{step}"
        workers.asked[name] = A
        workers.take(workers.scheduler.ask(name, now_s=workers.now_s, adapter=A))
        workers.step(asks=False)
        if "rare" in workers.started:
            return
    pytest.fail("the rare adapter never started")

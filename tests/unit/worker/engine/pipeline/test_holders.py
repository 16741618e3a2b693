"""Workers of other groups send slabs to a survivor, while they serve."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec
import pytest
import torch

from services.core.groups.layer_map import Stage
from services.worker.engine.memory.layer_slab import LayerSlab, SlabState
from services.worker.engine.memory.stage_memory import StageMemory
from services.worker.engine.pipeline import links
from services.worker.engine.pipeline.connections import ANSWER_SHARE, Connections
from services.worker.engine.pipeline.restoring import Restoring, _SlabFetch
from services.worker.errors import SlabCorrupted
from services.worker.ipc import Lane, MemberPlan, Prepare
from tests.support.engine_group import EngineGroup
from tests.support.engines import Engine
from tests.support.fake_model import LAYERS
from tests.support.integer_group import check_tokens, member, memory, request
from tests.unit.worker.engine.pipeline.conftest import MakeGroup

PAIRS = [
    [Stage("w0", 0, 1), Stage("w1", 1, LAYERS)],
    [Stage("w2", 0, 1), Stage("w3", 1, LAYERS)],
]
SURVIVOR = [[Stage("w0", 0, LAYERS)]]
OTHER_SURVIVOR = [[Stage("w3", 0, LAYERS)]]
LIMIT_S = 60.0  # of a change


@pytest.fixture
def pairs(make_group: MakeGroup) -> EngineGroup:
    """Two groups of two; the second one serves requests, and the first one has lost `w1`."""
    group, _ = lose_of_pairs(make_group(workers=4))
    return group


def lose_of_pairs(group: EngineGroup) -> tuple[EngineGroup, MemberPlan]:
    """Form two groups of two, of which the first one loses `w1`; returns its plan as well."""
    for pair in PAIRS:
        group.change([pair])
    for number in range(4):
        group.start(request(number, output=30), "w2")
    group.run_until(lambda: all(len(stream.tokens) > 1 for stream in group.streams.values()))
    dead = group._plan_of(PAIRS[0][1])
    group.lose("w1")
    group.run_until(lambda: member(group, "w0").links.epoch == group.epoch)
    return group, dead


def prepare(
    group: EngineGroup,
    target: Sequence[Sequence[Stage]],
    holders: Sequence[Stage | MemberPlan],
    introduced: bool = True,
    limit_s: float = LIMIT_S,
) -> str:
    """Ask a survivor to prepare, and introduce it to the living holders."""
    group._attempts += 1
    attempt = f"attempt-{group._attempts}"
    plans = group._plans(target, group.epoch + 1)
    asked = [
        holder if isinstance(holder, MemberPlan) else group._plan_of(holder) for holder in holders
    ]
    (survivor,) = plans[0].members
    for holder in asked if introduced else ():
        if holder.worker_id in group.engines:
            group.engines[holder.worker_id].member.introduce([survivor, holder], limit_s)
    member(group, survivor.worker_id).prepare(Prepare(attempt, plans, asked, limit_s))
    return attempt


def restored(group: EngineGroup, name: str) -> dict[str, int]:
    return member(group, name).restored_slabs


def check_restored(
    group: EngineGroup, attempt: str, target: Sequence[Sequence[Stage]] = SURVIVOR
) -> None:
    """The survivor serves alone with the right tokens, and so does the other group."""
    assert group.await_answers(attempt, target)
    group.commit(target)
    group.settle()
    group.restore()  # what is left of the other group, if it has lost a worker
    for number in range(10, 14):
        group.start(request(number), target[0][0].worker_id)
    check_tokens(group)
    assert memory(group, target[0][0].worker_id).layers == range(LAYERS)


def test_a_survivor_reads_nothing_from_disk(pairs: EngineGroup) -> None:
    check_restored(pairs, prepare(pairs, SURVIVOR, [PAIRS[1][1]]))
    assert restored(pairs, "w0") == {"peer": 3}


def test_an_engine_waits_while_a_holder_sends(pairs: EngineGroup) -> None:
    """Turns without frames would only delay the thread that stores the pieces."""
    attempt = prepare(pairs, SURVIVOR, [PAIRS[1][1]])
    survivor = member(pairs, "w0")
    assert not survivor.awaits_transfers, "it connects"
    pairs.run_until(lambda: survivor.links.lane.has("w3"))
    with long_iteration(pairs, "w3"):
        pairs.run_until(lambda: survivor.awaits_transfers)
        assert survivor.busy_changing and survivor._restoring._fetches
    pairs.run_until(lambda: pairs.answers(attempt))
    assert not survivor.awaits_transfers
    check_restored(pairs, attempt)


def test_a_survivor_whose_holder_is_not_introduced_reads_from_disk(
    pairs: EngineGroup, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = prepare(pairs, SURVIVOR, [PAIRS[1][1]], introduced=False)
    for _ in range(200):
        pairs.turn()
    assert not pairs.answers(attempt)
    pairs.network.skip(ANSWER_SHARE * LIMIT_S + 0.1)  # type: ignore[attr-defined]
    check_restored(pairs, attempt)
    assert restored(pairs, "w0") == {"disk": 3}
    assert caplog.text.count("was not restored from w3: the worker is not connected") == 3


@pytest.mark.parametrize("moment", ["introduced", "asked", "sending"])
def test_a_holder_that_dies_is_followed_by_another_source(pairs: EngineGroup, moment: str) -> None:
    attempt = prepare(pairs, SURVIVOR, [PAIRS[1][1]])
    restoring = member(pairs, "w0")._restoring
    reached: dict[str, Callable[[], object]] = {
        "introduced": lambda: True,
        "asked": lambda: restoring._fetches,
        "sending": lambda: restoring.restored,
    }
    pairs.run_until(reached[moment])
    before = dict(restored(pairs, "w0"))
    pairs.lose("w3")
    pairs.run_until(lambda: member(pairs, "w2").links.epoch == pairs.epoch)
    if moment == "introduced":
        pairs.network.skip(ANSWER_SHARE * LIMIT_S + 0.1)  # type: ignore[attr-defined]
    check_restored(pairs, attempt)
    sources = restored(pairs, "w0")
    assert sources["disk"] + before.get("peer", 0) <= 3 <= sum(sources.values())
    assert sources["disk"] > 0


@contextmanager
def long_iteration(group: EngineGroup, name: str) -> Iterator[None]:
    """An engine in an iteration: its mover works, but the engine handles nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "_step", partial(_step_unless, group, name))
        yield


def _step_unless(group: EngineGroup, name: str, engine: Engine) -> bool:
    return engine.identity.worker_id != name and EngineGroup._step(group, engine)


def test_a_survivor_waits_for_holders_in_long_iterations(pairs: EngineGroup) -> None:
    """The restore takes longer than any fixed limit, but not longer than the change may."""
    limit_s = 1200.0
    iteration_s = ANSWER_SHARE * limit_s / 2
    with long_iteration(pairs, "w3"):
        attempt = prepare(pairs, SURVIVOR, [PAIRS[1][1]], limit_s=limit_s)
        pairs.network.skip(iteration_s)  # type: ignore[attr-defined]
        for _ in range(200):
            pairs.turn()
    lane = member(pairs, "w0").links.lane
    pairs.run_until(lambda: lane.has("w3") or pairs.answers(attempt))
    assert lane.has("w3")
    restoring = member(pairs, "w0")._restoring
    for number in range(3):
        pairs.run_until(lambda number=number: restoring.restored["peer"] == number)
        with long_iteration(pairs, "w3"):
            pairs.run_until(lambda: restoring._fetches)
            pairs.network.skip(iteration_s)  # type: ignore[attr-defined]
            for _ in range(200):
                pairs.turn()
        assert restoring.restored["peer"] == number
    check_restored(pairs, attempt)
    assert restored(pairs, "w0") == {"peer": 3}


def test_a_survivor_waits_once_for_a_holder_that_hangs(pairs: EngineGroup) -> None:
    attempt = prepare(pairs, SURVIVOR, [PAIRS[1][1]])
    restoring = member(pairs, "w0")._restoring
    pairs.run_until(lambda: member(pairs, "w0").links.lane.has("w3"))
    start_s = pairs.now_s
    with long_iteration(pairs, "w3"):
        pairs.run_until(lambda: restoring._fetches)
        pairs.run_until(lambda: pairs.answers(attempt))
    assert pairs.now_s - start_s < 2 * ANSWER_SHARE * LIMIT_S
    check_restored(pairs, attempt)
    assert restored(pairs, "w0") == {"disk": 3}


def test_a_holder_that_drops_its_layers_meanwhile_refuses(pairs: EngineGroup) -> None:
    """Its group changes at the same time: missing slabs come from disk."""
    turned = [[Stage("w3", 0, 1), Stage("w2", 1, LAYERS)]]
    attempt = prepare(pairs, SURVIVOR, [PAIRS[1][1]])
    pairs.change(turned)
    check_restored(pairs, attempt)
    assert sum(restored(pairs, "w0").values()) == 3


def test_a_holder_with_other_weights_refuses(
    pairs: EngineGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slabs = memory(pairs, "w3").slabs
    for slab in slabs.values():
        monkeypatch.setattr(slab, "_digest", b"of other parameters")
    caplog.set_level(logging.INFO)
    check_restored(pairs, prepare(pairs, SURVIVOR, [PAIRS[1][1]]))
    assert restored(pairs, "w0") == {"disk": 3}
    assert caplog.text.count("was not restored from w3: it did not arrive") == 3


def test_two_workers_send_each_other_slabs(pairs: EngineGroup) -> None:
    """Each is a member of one attempt and a holder of the other, over the same connection."""
    pairs.lose("w2")
    pairs.run_until(lambda: member(pairs, "w3").links.epoch == pairs.epoch)
    first = prepare(pairs, SURVIVOR, [Stage("w3", 1, LAYERS)])
    plans = pairs._plans(OTHER_SURVIVOR, pairs.epoch + 2)
    holder = pairs._plan_of(Stage("w0", 0, 1))
    member(pairs, "w0").introduce([plans[0].members[0], holder], LIMIT_S)
    member(pairs, "w3").prepare(Prepare("second", plans, [holder], LIMIT_S))
    assert pairs.await_answers(first, SURVIVOR)
    assert pairs.await_answers("second", OTHER_SURVIVOR)
    assert restored(pairs, "w0") == {"peer": 3}
    assert restored(pairs, "w3") == {"peer": 2}


def without_nonces(plan: MemberPlan) -> MemberPlan:
    """The plan of another survivor."""
    activations, bulk = Lane(plan.activations.address, ""), Lane(plan.bulk.address, "")
    return msgspec.structs.replace(plan, activations=activations, bulk=bulk)


@pytest.mark.parametrize("seed", range(5))
def test_survivors_of_one_group_send_each_other_slabs(make_group: MakeGroup, seed: int) -> None:
    """A dead worker whose lease has not ended is named as well, and delays nothing."""
    group = make_group(workers=3, seed=seed)
    stages = [Stage(f"w{layer}", layer, layer + 1) for layer in range(LAYERS)]
    group.change([stages])
    plans = {stage.worker_id: without_nonces(group._plan_of(stage)) for stage in stages}
    group.lose("w1")
    asked = {}
    for number, name in enumerate(("w0", "w2")):
        group.run_until(lambda name=name: member(group, name).links.epoch == group.epoch)
        target = [[Stage(name, 0, LAYERS)]]
        others = [plan for other, plan in plans.items() if other != name]
        asked[name] = f"restore-{number}", target
        prepared = Prepare(asked[name][0], group._plans(target, group.epoch + 1 + number), others)
        member(group, name).prepare(prepared)
    for attempt, target in asked.values():
        assert group.await_answers(attempt, target)
        group.commit(target)
    group.settle()
    for name in asked:
        assert restored(group, name) == {"peer": 2, "disk": 1}
        group.start(request(len(group.streams)), name)
    check_tokens(group)


def test_a_holder_may_become_a_member_of_the_same_group(pairs: EngineGroup) -> None:
    """The connection of the introduction is used, and is not ended with it."""
    check_restored(pairs, prepare(pairs, SURVIVOR, [PAIRS[1][1]]))
    both = [[Stage("w0", 0, 1), Stage("w2", 1, 2), Stage("w3", 2, LAYERS)]]
    pairs.change(both)
    pairs.network.skip(LIMIT_S + 1.0)  # type: ignore[attr-defined]
    pairs.start(request(20), "w0")
    check_tokens(pairs)


def test_an_introduction_expires(pairs: EngineGroup) -> None:
    check_restored(pairs, prepare(pairs, SURVIVOR, [PAIRS[1][1]]))
    lane = member(pairs, "w0").links.lane
    assert lane.has("w3")
    pairs.network.skip(LIMIT_S + 1.0)  # type: ignore[attr-defined]
    pairs.run_until(lambda: not lane.has("w3"))
    for name in ("w0", "w3"):
        assert not member(pairs, name).busy_changing
    pairs.start(request(20), "w0")
    check_tokens(pairs)


def test_a_damaged_slab_of_a_holder_is_read_from_disk(
    pairs: EngineGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack = StageMemory.unpack_slab

    def damage(self: StageMemory, name: str, offset: int, payload: torch.Tensor) -> None:
        unpack(self, name, offset, payload ^ 1)

    monkeypatch.setattr(StageMemory, "unpack_slab", damage)
    check_restored(pairs, prepare(pairs, SURVIVOR, [PAIRS[1][1]]))
    for name, slab in memory(pairs, "w3").slabs.items():
        if slab.resident:
            restored_bytes = memory(pairs, "w0").slabs[name].bytes_to_read()
            assert torch.equal(restored_bytes, slab.bytes_to_read())
    assert restored(pairs, "w0") == {"disk": 3}


def _digest_is_not_verified(patch: pytest.MonkeyPatch) -> None:
    finish = LayerSlab.finish

    def accept(self: LayerSlab, max_bytes: int | None = None) -> bool:
        try:
            return finish(self, max_bytes)
        except SlabCorrupted:
            self._state = SlabState.RESIDENT
            return True

    patch.setattr(LayerSlab, "finish", accept)


def _introductions_never_become_connections_of_members(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Connections, "end_introductions", lambda *_: None)


def _introductions_have_a_limit_of_their_own(patch: pytest.MonkeyPatch) -> None:
    introduce = Connections.introduce
    patch.setattr(
        Connections,
        "introduce",
        lambda self, own, peers, _timeout_s: introduce(self, own, peers, LIMIT_S),
    )


def _silent_workers_are_asked_again(patch: pytest.MonkeyPatch) -> None:
    is_silent = Restoring._is_silent

    def forget(self: Restoring, fetching: _SlabFetch) -> bool:
        silent = is_silent(self, fetching)
        self._silent.clear()
        return silent

    patch.setattr(Restoring, "_is_silent", forget)


def _slab_requests_have_an_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(links, "_UNFENCED", ())


def test_the_digest_check_of_a_slab_is_needed(
    pairs: EngineGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    _digest_is_not_verified(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_damaged_slab_of_a_holder_is_read_from_disk(pairs, monkeypatch)


@pytest.mark.parametrize(
    ("remove", "witness"),
    [
        (
            _introductions_never_become_connections_of_members,
            test_a_holder_may_become_a_member_of_the_same_group,
        ),
        (_slab_requests_have_an_epoch, test_a_survivor_reads_nothing_from_disk),
        (
            _introductions_have_a_limit_of_their_own,
            test_a_survivor_waits_for_holders_in_long_iterations,
        ),
        (_silent_workers_are_asked_again, test_a_survivor_waits_once_for_a_holder_that_hangs),
    ],
)
def test_each_rule_is_needed(
    pairs: EngineGroup,
    remove: Callable[[pytest.MonkeyPatch], None],
    witness: Callable[[EngineGroup], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remove(monkeypatch)
    with pytest.raises(AssertionError):
        witness(pairs)

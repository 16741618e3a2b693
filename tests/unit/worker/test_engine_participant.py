"""Calls of the engine when groups are prepared, committed and aborted."""

from dataclasses import dataclass, field, replace

import pytest

from services.common.errors import ConfigError
from services.core.groups.layer_map import ModelShape
from services.core.groups.vocabulary import Group, GroupPhase, Member
from services.worker.engine_participant import ENGINE_SILENT_S, EngineParticipant, can_drop
from services.worker.group_view import Place
from services.worker.ipc import (
    ApplyConfiguration,
    EngineReady,
    GroupPlan,
    Introduce,
    Lane,
    MemberPlan,
    Prepare,
    Prepared,
)
from services.worker.member.participant import PrepareRefused, ProposedChange, SourceMember

SHAPE = ModelShape(4, 100, 10, 10, True, 2)
FACTS = EngineReady(1024, 99, 16, 100, 64, 1000, 500, 10, 900, SHAPE, "w0:1", "w0:2")
NO_LANES = EngineReady(1024, 99, 16, 100, 64, 1000, 500, 10, 900, SHAPE)
ALONE = Group("group-w0", 1, GroupPhase.STABLE, (Member("w0", "a", 0, 4),), "m")
OTHER = Group("group-w1", 3, GroupPhase.STABLE, (Member("w1", "b", 0, 4),), "m")
MERGED = Group(
    "group-w1",
    2,
    GroupPhase.STABLE,
    (Member("w1", "b", 0, 2), Member("w0", "a", 2, 4)),
    "m",
)
PEERS = (
    SourceMember("w0", "a", "w0:0", "w0:1", "w0:2", b"\x00" * 16, b"\x01" * 16),
    SourceMember("w1", "b", "w1:0", "w1:1", "w1:2", b"\x02" * 16, b"\x03" * 16),
)
MERGE = ProposedChange("7-1", "group-w0", 1, MERGED, PEERS)


@dataclass
class RecordingEngine:
    received: list[object] = field(default_factory=list)
    error: str = ""
    heartbeat_age_s: float = 0.0

    async def apply(self, configuration: ApplyConfiguration) -> None:
        self.received.append(configuration)

    async def prepare(self, preparation: Prepare, timeout_s: float) -> Prepared:
        self.received.append(preparation)
        return Prepared(preparation.attempt, self.error)

    async def abort_preparation(self, attempt: str) -> None:
        self.received.append(attempt)

    async def introduce(self, introduction: Introduce) -> None:
        self.received.append(introduction)


class Bench:
    def __init__(self, facts: EngineReady = FACTS) -> None:
        self.engine = RecordingEngine()
        self.changes: list[Place] = []
        self.given_up: list[str] = []
        self.names: dict[str, str] = {}
        self.participant = EngineParticipant(
            "w0",
            self.engine,
            facts,
            address="w0:0",
            changed=lambda: self.changes.append(self.participant.place),
            end_requests=self.given_up.append,
            resolve=self.resolve,
        )

    async def resolve(self, address: str) -> str:
        if address == "nowhere:1":
            raise ConfigError("the name 'nowhere' cannot be resolved here; set 'advertise'")
        return self.names.get(address, address)


def plan(name: str, incarnation: str, first: int, end: int, nonces: tuple[str, str]) -> MemberPlan:
    lanes = Lane(f"{name}:1", nonces[0]), Lane(f"{name}:2", nonces[1])
    return MemberPlan(name, incarnation, first, end, *lanes, f"{name}:0")


W0_NONCES, W1_NONCES = ("00" * 16, "01" * 16), ("02" * 16, "03" * 16)
MERGED_PLAN = GroupPlan(
    "group-w1", 2, [plan("w1", "b", 0, 2, W1_NONCES), plan("w0", "a", 2, 4, W0_NONCES)]
)


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_a_single_worker_group_is_applied_before_it_serves(bench: Bench) -> None:
    assert bench.participant.place is None
    await bench.participant.commit(ALONE, "", "")
    alone = GroupPlan("group-w0", 1, [plan("w0", "a", 0, 4, ("", ""))])
    assert bench.engine.received == [ApplyConfiguration([alone])]
    assert bench.changes == [Place("group-w0", 1, leads=True)]


async def test_a_prepared_plan_is_applied_with_its_peers(bench: Bench) -> None:
    await bench.participant.commit(ALONE, "", "")
    await bench.participant.prepare(MERGE)
    assert bench.engine.received[1:] == [Prepare("7-1", [MERGED_PLAN])]
    assert bench.participant.place.epoch == 1
    await bench.participant.commit(MERGED, "7-1", "")
    assert bench.engine.received[2:] == [ApplyConfiguration([MERGED_PLAN])]
    assert bench.participant.place == Place("group-w1", 2, leads=False, shared=True)


HOLDER = SourceMember(
    *("w2", "c", "w2:0", "w2:1", "w2:2", b"\x04" * 16, b"\x05" * 16), first_layer=2, end_layer=4
)
HOLDER_PLAN = plan("w2", "c", 2, 4, ("04" * 16, "05" * 16))


async def test_the_engine_gets_reachable_holders(bench: Bench) -> None:
    """A change needs none of them, so the others are left out."""
    holders = (
        replace(HOLDER, worker_id="w3", bulk_address="nowhere:1"),
        replace(HOLDER, worker_id="w4", activation_address=""),
        HOLDER,
    )
    await bench.participant.prepare(replace(MERGE, holders=holders, timeout_s=60.0))
    assert bench.engine.received == [Prepare("7-1", [MERGED_PLAN], [HOLDER_PLAN], 60.0)]


async def test_the_engine_is_introduced_to_members_of_other_groups(bench: Bench) -> None:
    own = replace(PEERS[0], first_layer=0, end_layer=4)
    await bench.participant.introduce((own, HOLDER), 60.0)
    assert bench.engine.received == [
        Introduce([plan("w0", "a", 0, 4, W0_NONCES), HOLDER_PLAN], 60.0)
    ]


async def test_the_engine_gets_resolved_lane_addresses(bench: Bench) -> None:
    bench.names = {"w1:1": "10.0.0.2:1", "w1:2": "[fd00::2]:2"}
    await bench.participant.prepare(MERGE)
    (prepared,) = bench.engine.received
    assert isinstance(prepared, Prepare)
    (peer, _) = prepared.groups[0].members
    assert (peer.activations.address, peer.bulk.address) == ("10.0.0.2:1", "[fd00::2]:2")


async def test_an_unresolvable_peer_is_refused_with_a_reason(bench: Bench) -> None:
    lost = replace(PEERS[1], activation_address="nowhere:1")
    with pytest.raises(PrepareRefused, match="'nowhere' cannot be resolved"):
        await bench.participant.prepare(replace(MERGE, peers=(PEERS[0], lost)))
    assert not bench.engine.received


async def test_a_split_passes_all_new_groups_to_the_engine(bench: Bench) -> None:
    target = replace(ALONE, epoch=3)
    split = ProposedChange("7-2", "group-w1", 2, target, PEERS, (OTHER,))
    await bench.participant.prepare(split)
    await bench.participant.commit(target, "7-2", "")
    (_, applied) = bench.engine.received
    assert isinstance(applied, ApplyConfiguration)
    assert [(group.group_id, group.epoch) for group in applied.groups] == [
        ("group-w0", 3),
        ("group-w1", 3),
    ]
    assert applied.groups[1].members == [plan("w1", "b", 0, 4, W1_NONCES)]


async def test_a_configuration_that_was_not_prepared_is_applied(bench: Bench) -> None:
    """Members keep their last known addresses."""
    await bench.participant.prepare(MERGE)
    await bench.participant.commit(MERGED, "7-1", "")
    await bench.participant.prepare(replace(MERGE, attempt="7-2"))
    bench.engine.received.clear()
    await bench.participant.commit(replace(MERGED, epoch=9), "", "7-2")
    lanes = replace_own_nonces(MERGED_PLAN.members)
    # The engine keeps prepared layers if they match, so no other call follows.
    assert bench.engine.received == [ApplyConfiguration([GroupPlan("group-w1", 9, lanes)])]


def replace_own_nonces(members: list[MemberPlan]) -> list[MemberPlan]:
    return [members[0], plan("w0", "a", 2, 4, ("", ""))]


async def test_a_refusal_of_the_engine_is_reported(bench: Bench) -> None:
    bench.engine.error = "no room"
    with pytest.raises(PrepareRefused, match="no room"):
        await bench.participant.prepare(MERGE)
    await bench.participant.abort("7-1")
    assert bench.engine.received[-1] == "7-1"


async def test_without_lanes_only_all_layers_can_be_served() -> None:
    bench = Bench(NO_LANES)
    assert (can_drop(FACTS), can_drop(NO_LANES)) == (True, False)
    with pytest.raises(PrepareRefused, match="w0 cannot drop layers"):
        await bench.participant.prepare(MERGE)
    assert bench.engine.received == []
    await bench.participant.prepare(replace(MERGE, target=replace(ALONE, epoch=2)))
    assert len(bench.engine.received) == 1


async def test_an_unknown_member_is_refused(bench: Bench) -> None:
    with pytest.raises(PrepareRefused, match="lacks the address of w1"):
        await bench.participant.prepare(replace(MERGE, peers=PEERS[:1]))


async def test_a_degraded_group_serves_nothing(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.participant.commit(ALONE, "", "")
    degraded = replace(ALONE, epoch=4, phase=GroupPhase.DEGRADED)
    await bench.participant.commit(degraded, "", "")
    assert bench.participant.place is None
    applied = bench.engine.received[-1]
    assert isinstance(applied, ApplyConfiguration), "the engine runs what it holds"
    assert [group.epoch for group in applied.groups] == [4]
    assert not bench.given_up, "its requests wait for the layers"
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"{ALONE.group_id} at epoch 4 has lost the members")


async def test_requests_of_a_frozen_engine_end_when_its_group_continues(bench: Bench) -> None:
    await bench.participant.commit(ALONE, "", "")
    bench.engine.heartbeat_age_s = ENGINE_SILENT_S + 1
    await bench.participant.commit(replace(ALONE, epoch=4, phase=GroupPhase.DEGRADED), "", "")
    assert bench.given_up == ["the engine of the worker does not respond; retry"]

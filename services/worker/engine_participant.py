"""Takes part in group changes for a worker: turns prepare and commit into engine commands.

A change creates groups (of workers that each run part of the layers) at a new epoch. Its members
prepare it, then it is committed in etcd. A lane is a transfer address of an engine: one for
activations, one for bulk transfers of KV and parameters.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Protocol

from services.common.address import resolved
from services.common.errors import ConfigError
from services.core.groups.vocabulary import Group, GroupPhase, Member
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
    Shipped,
    ShipRequests,
)
from services.worker.member.participant import PrepareRefused, ProposedChange, SourceMember

# Longer than the deadline of every caller, which then aborts the attempt.
ANSWER_TIMEOUT_S = 3600.0
SHIP_TIMEOUT_S = 300.0
"""Time limit of an order to move requests; those that still move then go on moving."""
ENGINE_SILENT_S = 3.0
"""If a group loses members while this worker's engine is silent for this long, the engine has
failed.

If the engine is just computing, little is lost: its requests must be recomputed anyway.
"""

log = logging.getLogger(__name__)


class Engine(Protocol):
    """The group commands of `EngineClient`."""

    @property
    def heartbeat_age_s(self) -> float: ...

    async def apply(self, configuration: ApplyConfiguration) -> None: ...

    async def prepare(self, preparation: Prepare, timeout_s: float) -> Prepared: ...

    async def abort_preparation(self, attempt: str) -> None: ...

    async def introduce(self, introduction: Introduce) -> None: ...

    async def ship(self, command: ShipRequests, timeout_s: float) -> Shipped: ...


class EngineParticipant:
    """Participant of the group protocol that commands the engine.

    `place` is the newest configuration sent to the engine, which accepts its requests from then on.
    """

    def __init__(
        self,
        worker_id: str,
        engine: Engine,
        facts: EngineReady,
        address: str,
        changed: Callable[[], None],
        end_requests: Callable[[str], None],
        resolve: Callable[[str], Awaitable[str]] = resolved,
    ) -> None:
        """`address` is host:port of this worker's gRPC server.

        `changed` is called when `place` has changed. `end_requests` ends all requests with a
        message. `resolve` resolves the host in a peer's address.
        """
        self._worker_id = worker_id
        self._engine = engine
        self._facts = facts
        self._address = address
        self._changed = changed
        self._end_requests = end_requests
        self._resolve = resolve
        self._prepared: Prepare | None = None
        # Members of the current configuration by worker id and incarnation.
        self._known_members: dict[tuple[str, str], MemberPlan] = {}
        self.place: Place | None = None

    async def prepare(self, preparation: ProposedChange) -> None:
        self._check_layers(preparation.target)
        # Resolve host names here, so that the engine does not block on DNS.
        peers = await self._resolved(preparation.peers)
        groups = plans_of(replace(preparation, peers=peers))
        holders = await self._reachable(preparation.holders)
        command = Prepare(preparation.attempt, groups, holders, preparation.timeout_s)
        answer = await self._engine.prepare(command, ANSWER_TIMEOUT_S)
        if answer.error:
            raise PrepareRefused(answer.error)
        self._prepared = command

    async def introduce(self, peers: tuple[SourceMember, ...], timeout_s: float) -> None:
        await self._engine.introduce(Introduce(await self._reachable(peers), timeout_s))

    async def ship(self, command: ShipRequests) -> Shipped:
        if not can_drop(self._facts):
            raise PrepareRefused(f"{self._worker_id} cannot send KV to other workers")
        try:
            return await self._engine.ship(command, SHIP_TIMEOUT_S)
        except TimeoutError as error:
            raise PrepareRefused(
                f"the engine has not ended the move within {SHIP_TIMEOUT_S:.0f} s"
            ) from error

    async def abort(self, attempt: str) -> None:
        self._prepared = None
        await self._engine.abort_preparation(attempt)

    async def commit(self, group: Group, attempt: str | None, superseded: str | None) -> None:
        """Apply a committed group; see Participant."""
        prepared, self._prepared = self._prepared, None
        if group.phase is GroupPhase.DEGRADED:
            log.warning(
                "%s at epoch %d has lost the members with its other layers: its requests wait until"
                " this worker has restored all layers, or are returned and resume elsewhere",
                group.group_id,
                group.epoch,
            )
            self._move_to(None)
            # If the engine has failed as well, end its requests, so that they resume elsewhere.
            if self._engine.heartbeat_age_s > ENGINE_SILENT_S:
                self._end_requests("the engine of the worker does not respond; retry")
            await self._engine.apply(ApplyConfiguration([self._plan(group)]))
            return
        if prepared is not None and prepared.attempt == attempt:
            groups = prepared.groups
        else:
            groups = [self._plan(group)]
        self._known_members = {
            (member.worker_id, member.incarnation): member
            for plan in groups
            for member in plan.members
        }
        await self._engine.apply(ApplyConfiguration(groups))
        leads = group.members[0].worker_id == self._worker_id
        self._move_to(Place(group.group_id, group.epoch, leads, shared=len(group.members) > 1))

    async def _resolved(self, peers: Iterable[SourceMember]) -> tuple[SourceMember, ...]:
        """Resolve the transfer addresses of the peers that have any."""
        try:
            return tuple(
                [
                    replace(
                        peer,
                        activation_address=await self._resolve(peer.activation_address),
                        bulk_address=await self._resolve(peer.bulk_address),
                    )
                    if peer.activation_address and peer.bulk_address
                    else peer
                    for peer in peers
                ]
            )
        except ConfigError as error:
            raise PrepareRefused(f"a peer's transfer address is unreachable: {error}") from error

    async def _reachable(self, peers: Iterable[SourceMember]) -> list[MemberPlan]:
        """The plans of workers of other groups; leaves out those without a valid address."""
        plans = []
        for peer in peers:
            try:
                plans += [_plan_of_peer(known) for known in await self._resolved([peer])]
            except PrepareRefused as error:
                log.warning("%s sends no layers: %s", peer.worker_id, error)
        return [plan for plan in plans if plan.activations.address and plan.bulk.address]

    def _move_to(self, place: Place | None) -> None:
        self.place = place
        self._changed()

    def _check_layers(self, target: Group) -> None:
        shape = self._facts.shape
        whole = (0, shape.num_layers if shape is not None else 0)
        for member in target.members:
            if member.worker_id != self._worker_id or can_drop(self._facts):
                continue
            if (member.first_layer, member.end_layer) != whole:
                raise PrepareRefused(f"{self._worker_id} cannot drop layers; leave it out")

    def _plan(self, group: Group) -> GroupPlan:
        """The plan of a group that this worker did not prepare, with the addresses last known."""
        members = [self._member_plan(member) for member in group.members]
        return GroupPlan(group.group_id, group.epoch, members)

    def _member_plan(self, member: Member) -> MemberPlan:
        known = self._known_members.get((member.worker_id, member.incarnation))
        activations = known.activations if known is not None else Lane("", "")
        bulk = known.bulk if known is not None else Lane("", "")
        address = known.grpc_address if known is not None else ""
        if member.worker_id == self._worker_id:
            activations = Lane(self._facts.activation_address, "")
            bulk, address = Lane(self._facts.bulk_address, ""), self._address
        return MemberPlan(
            member.worker_id,
            member.incarnation,
            member.first_layer,
            member.end_layer,
            activations,
            bulk,
            address,
        )


def can_drop(facts: EngineReady) -> bool:
    """Whether the engine can run a subset of the layers, which requires transfers to peers."""
    return bool(facts.activation_address and facts.bulk_address)


def plans_of(preparation: ProposedChange) -> list[GroupPlan]:
    """The plans of all target groups of the change.

    Raises:
        PrepareRefused: if the address of a member is missing.
    """
    peers = {(peer.worker_id, peer.incarnation): peer for peer in preparation.peers}
    return [_plan_of(group, peers) for group in (preparation.target, *preparation.others)]


def _plan_of(group: Group, peers: dict[tuple[str, str], SourceMember]) -> GroupPlan:
    return GroupPlan(group.group_id, group.epoch, list(_members(group.members, peers)))


def _members(
    members: Iterable[Member], peers: dict[tuple[str, str], SourceMember]
) -> Iterable[MemberPlan]:
    for member in members:
        peer = peers.get((member.worker_id, member.incarnation))
        if peer is None:
            raise PrepareRefused(f"the preparation lacks the address of {member.worker_id}")
        first, end = member.first_layer, member.end_layer
        yield _plan_of_peer(replace(peer, first_layer=first, end_layer=end))


def _plan_of_peer(peer: SourceMember) -> MemberPlan:
    """The plan of a worker with the layers that `peer` names."""
    return MemberPlan(
        peer.worker_id,
        peer.incarnation,
        peer.first_layer,
        peer.end_layer,
        Lane(peer.activation_address, peer.activation_nonce.hex()),
        Lane(peer.bulk_address, peer.bulk_nonce.hex()),
        peer.address,
        peer.draining,
    )

"""Interface between `MemberServicer` and the engine side of a change of groups (change-over)."""

from dataclasses import dataclass
from typing import Protocol

from services.core.groups.vocabulary import Group
from services.worker.ipc import PREPARE_TIMEOUT_S, Shipped, ShipRequests


class PrepareRefused(Exception):
    """This worker cannot prepare for the target group; the message is a sentence."""


@dataclass(frozen=True, slots=True)
class SourceMember:
    """A member of the source groups of a change-over, or a holder of layers in another group.

    It runs layers `first_layer` to `end_layer` (exclusive) before the change-over.

    A lane is a connection between members. The nonces are secrets of the attempt: a peer that
    connects to a lane must prove that it knows the lane's nonce.
    """

    worker_id: str
    incarnation: str
    address: str  # gRPC
    activation_address: str  # lane for activations
    bulk_address: str  # lane for parameters and KV
    activation_nonce: bytes
    bulk_nonce: bytes
    draining: bool = False  # the worker is shutting down
    first_layer: int = 0
    end_layer: int = 0


@dataclass(frozen=True, slots=True)
class ProposedChange:
    """A proposed change-over of this worker, which may be committed later."""

    attempt: str
    group_id: str  # source group
    epoch: int  # of the source group
    target: Group  # group and epoch after the commit
    peers: tuple[SourceMember, ...]  # members of all source groups
    others: tuple[Group, ...] = ()  # other target groups of the change-over
    # Workers of other groups to fetch layers from; the change-over works without any of them.
    holders: tuple[SourceMember, ...] = ()
    timeout_s: float = PREPARE_TIMEOUT_S  # then the preparation is aborted


class Participant(Protocol):
    """Prepares and applies change-overs on the engine side.

    Calls never overlap, except of `introduce` and `ship`. A running `prepare` may be cancelled.
    After a cancelled or refused `prepare`, `abort` or `commit` is called.
    """

    async def prepare(self, preparation: ProposedChange) -> None:
        """Reserve memory, and fetch and verify parameters for the target; serving continues.

        Every step is reversible. On return, this worker can serve the target as soon as it is
        committed. Raises PrepareRefused.
        """

    async def introduce(self, peers: tuple[SourceMember, ...], timeout_s: float) -> None:
        """Let workers of other groups connect, to fetch layers; `peers` includes this worker.

        `timeout_s` is the time limit of their change, with which the connections end.
        """

    async def ship(self, command: ShipRequests) -> Shipped:
        """Move running requests to an introduced worker; returns when no further one moves.

        Raises PrepareRefused if the engine does not answer in time.
        """

    async def abort(self, attempt: str) -> None:
        """Undo the preparation for the attempt, which will never be committed."""

    async def commit(self, group: Group, attempt: str | None, superseded: str | None) -> None:
        """Switch to the committed configuration `group`, of which this worker is a member.

        `attempt` is the attempt that prepared it; None if none did, as for a singleton group.
        `superseded` is an attempt that prepared another configuration: keep the layers that it
        fetched and `group` needs, and free the others. In a DEGRADED group, the worker serves
        nothing and keeps its layers.
        """

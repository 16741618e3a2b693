"""Interface between the member's servicer and the engine side of a change-over."""

from dataclasses import dataclass
from typing import Protocol

from services.core.groups.vocabulary import Group


class PrepareRefused(Exception):
    """This worker cannot serve the target; the message is a sentence with the reason."""


@dataclass(frozen=True, slots=True)
class SourceMember:
    """A member of the source groups of a change-over, this worker included.

    The nonces are secrets of the attempt: a peer that connects to a lane must prove that it holds
    the lane's nonce.
    """

    worker_id: str
    incarnation: str
    address: str  # gRPC
    activation_address: str  # lane for activations
    bulk_address: str  # lane for parameters and KV
    activation_nonce: bytes
    bulk_nonce: bytes
    draining: bool = False  # the worker is leaving


@dataclass(frozen=True, slots=True)
class ProposedChange:
    """A proposed change-over of this worker, which may be committed later."""

    attempt: str
    group_id: str  # source group
    epoch: int  # of the source group
    target: Group  # group and epoch after the commit
    peers: tuple[SourceMember, ...]  # members of all source groups
    others: tuple[Group, ...] = ()  # other target groups of the change-over


class Participant(Protocol):
    """Prepares and applies change-overs on the engine side.

    Calls never overlap, but a running `prepare` may be cancelled; `abort` or `commit` follows a
    cancelled or refused `prepare`.
    """

    async def prepare(self, preparation: ProposedChange) -> None:
        """Reserve memory, and fetch and verify parameters for the target; serving continues.

        Every step is reversible. On return, this worker can serve the target as soon as it is
        committed. Raises PrepareRefused.
        """

    async def abort(self, attempt: str) -> None:
        """Undo the preparation for the attempt, which will never be committed."""

    async def commit(self, group: Group, attempt: str | None, superseded: str | None) -> None:
        """Switch to the committed configuration `group`, of which this worker is a member.

        `attempt` prepared it; None without a preparation, as for a singleton group. `superseded`
        prepared another configuration: keep those of its fetched layers that `group` needs, and
        free the others. A DEGRADED group serves nothing, and the worker keeps its layers.
        """

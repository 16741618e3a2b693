"""Facts: entries that services write into their event logs only for audits.

Event logs also contain the events and commands of state machines. `now_s` is the host's monotonic
clock in seconds. `epoch` is the number of a configuration of a group, which every change increases.
"""

from dataclasses import dataclass

from services.core.groups.layer_map import Stage
from services.core.groups.vocabulary import Targets
from services.core.overload.events import Decision


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """An engine has loaded a model; `model_digest` covers all parameters.

    `exact`: a token depends only on the tokens before it, not on how their KV was computed.
    `budget_bytes`: limit of the memory for parameters, KV and staging.
    """

    now_s: float
    worker_id: str
    incarnation: str
    model_digest: str
    num_layers: int
    budget_bytes: int
    exact: bool = False


@dataclass(frozen=True, slots=True)
class EngineSwitched:
    """An engine switched to its stage of this configuration; the first stage leads."""

    now_s: float
    group_id: str
    epoch: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class MemoryHeld:
    """The usage of an engine's memory, logged after each change of this usage."""

    now_s: float
    epoch: int
    first_layer: int  # of the stage
    end_layer: int  # exclusive
    resident: tuple[int, ...]  # layers with all parameters in memory
    parameter_bytes: int
    kv_bytes: int  # mapped
    staging_bytes: int  # buffers for transfers
    blocks: int  # KV blocks in total
    blocks_taken: int  # in use
    owners: int  # sequences with blocks
    sequences: int  # that the engine leads
    settled: bool  # the last change of groups has settled on this engine


@dataclass(frozen=True, slots=True)
class HostHeld:
    """The host copies of an engine's KV, by `HostCache`; `sequences` are those that it leads."""

    now_s: float
    slots: int
    held: int
    filling: int
    empty: int
    owed: int
    sequences: int


@dataclass(frozen=True, slots=True)
class HostCopied:
    """The checksum of each block of a job of host copies: when it was saved, or as recalled."""

    now_s: float
    job: int
    sums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemoryDecided:
    """A decision of the overload monitor, with its reason."""

    now_s: float
    decision: Decision


@dataclass(frozen=True, slots=True)
class ChangePlanned:
    """A planned change of groups that executes a decision: `group_ids` become `targets`."""

    now_s: float
    group_ids: tuple[str, ...]
    targets: Targets
    text: str


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """A gateway admitted a request with at most `tokens_max` output tokens.

    `earlier`: those of an earlier run of the request, after which it begins.
    """

    now_s: float
    request_id: str
    tokens_max: int
    earlier: int = 0


@dataclass(frozen=True, slots=True)
class TokensForwarded:
    """A gateway sent tokens to the client; `first_index` is the output index of the first token."""

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SegmentRead:
    """A gateway read a request's tokens from `first_index` on from this worker, perhaps none.

    `moved`: the previous worker handed the sequence over, including its tokens. `returned`: this
    worker returned the request, which was then restarted.
    """

    request_id: str
    first_index: int
    worker_id: str
    moved: bool
    returned: bool = False


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A stream ended: "stop", "length", the name of an error, or "abandoned" (by its client)."""

    now_s: float
    request_id: str
    outcome: str


@dataclass(frozen=True, slots=True)
class LinesClaimed:
    """A gateway that leads the batches with `token` claimed lines of a batch."""

    token: int
    batch_id: str
    lines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LineEnded:
    """The store accepted a result of a line from the leader with `token`."""

    token: int
    batch_id: str
    line: int
    status: int


FACTS: tuple[type, ...] = (
    *(EngineStarted, EngineSwitched, MemoryHeld, HostHeld, HostCopied),
    *(MemoryDecided, ChangePlanned),
    *(StreamOpened, TokensForwarded, SegmentRead, StreamEnded),
    *(LinesClaimed, LineEnded),
)

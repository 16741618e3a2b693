"""Facts: entries of event logs for the audit, beside the events and commands of the state machines.

`now_s` is the machine's monotonic clock in seconds.
"""

from dataclasses import dataclass

from services.core.groups.layer_map import Stage
from services.core.groups.vocabulary import Targets
from services.core.overload.events import Decision


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """An engine has loaded a model; `model_digest` covers all parameters.

    `exact`: a token depends only on the tokens before it, however those were computed.
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
    """The usage of an engine's memory, logged after each change."""

    now_s: float
    epoch: int
    first_layer: int  # of the stage
    end_layer: int  # exclusive
    resident: tuple[int, ...]  # layers with all parameters in memory
    parameter_bytes: int
    kv_bytes: int  # mapped
    staging_bytes: int
    blocks: int  # KV blocks in total
    blocks_taken: int  # in use
    owners: int  # requests that own them
    sequences: int  # that the engine leads
    settled: bool  # the last change of groups has settled on this engine


@dataclass(frozen=True, slots=True)
class MemoryDecided:
    """A decision of the monitor, with its reason."""

    now_s: float
    decision: Decision


@dataclass(frozen=True, slots=True)
class ChangePlanned:
    """A planned change that carries out a decision: `group_ids` become `targets`."""

    now_s: float
    group_ids: tuple[str, ...]
    targets: Targets
    text: str


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """A gateway admitted a request with at most `tokens_max` output tokens."""

    now_s: float
    request_id: str
    tokens_max: int


@dataclass(frozen=True, slots=True)
class TokensForwarded:
    """A gateway forwarded tokens to the client; `first_index` is the first output index."""

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SegmentRead:
    """A gateway read a request's tokens from `first_index` on, if any, from this worker.

    `moved`: the previous worker handed the request over, including its tokens.
    """

    request_id: str
    first_index: int
    worker_id: str
    moved: bool


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A stream ended: "stop", "length", the name of an error, or "abandoned" (by its client)."""

    now_s: float
    request_id: str
    outcome: str


FACTS: tuple[type, ...] = (
    *(EngineStarted, EngineSwitched, MemoryHeld),
    *(MemoryDecided, ChangePlanned),
    *(StreamOpened, TokensForwarded, SegmentRead, StreamEnded),
)

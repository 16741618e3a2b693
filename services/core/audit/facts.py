"""Facts that processes note in their event logs beside decisions, for checks of invariants.

`now_s` is the machine's monotonic clock, in seconds.
"""

from dataclasses import dataclass

from services.core.groups.layer_map import Stage
from services.core.groups.vocabulary import Targets
from services.core.overload.events import Decision


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """An engine has loaded a model; `model_digest` covers all its parameters.

    `exact`: it computes so that a token depends on what was before it alone, however that came.
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
    """An engine runs its stage of this configuration from now on; the first stage leads."""

    now_s: float
    group_id: str
    epoch: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class MemoryHeld:
    """What an engine's memory is used for, noted when that has changed.

    The stage is `first_layer` to `end_layer` (exclusive); `resident` are all layers whose
    parameters could run. `kv_bytes` is mapped, `blocks_taken` of `blocks` belong to `owners`
    requests. `sequences` are those that the engine leads. `settled`: the last change of groups is
    wholly over here.
    """

    now_s: float
    epoch: int
    first_layer: int
    end_layer: int
    resident: tuple[int, ...]
    parameter_bytes: int
    kv_bytes: int
    staging_bytes: int
    blocks: int
    blocks_taken: int
    owners: int
    sequences: int
    settled: bool


@dataclass(frozen=True, slots=True)
class MemoryDecided:
    """The monitor's verdict, with its numbers."""

    now_s: float
    decision: Decision


@dataclass(frozen=True, slots=True)
class ChangePlanned:
    """How a verdict is carried out: these groups change to `targets`."""

    now_s: float
    group_ids: tuple[str, ...]
    targets: Targets
    text: str


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """A gateway begins to serve a request of at most `tokens_max` output tokens."""

    now_s: float
    request_id: str
    tokens_max: int


@dataclass(frozen=True, slots=True)
class TokensForwarded:
    """Tokens go to a request's client; `first_index` is the output index of the first."""

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SegmentRead:
    """A gateway had a request's tokens from `first_index` on, if any came, from this worker.

    `moved`: the worker before it had handed the request over, with its tokens.
    """

    request_id: str
    first_index: int
    worker_id: str
    moved: bool


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A request is over for its client: "stop", "length", the name of an error, or "abandoned"."""

    now_s: float
    request_id: str
    outcome: str


FACTS: tuple[type, ...] = (
    *(EngineStarted, EngineSwitched, MemoryHeld),
    *(MemoryDecided, ChangePlanned),
    *(StreamOpened, TokensForwarded, SegmentRead, StreamEnded),
)

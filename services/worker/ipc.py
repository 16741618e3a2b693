"""Frames between a worker's servicer process and its engine process: msgpack over ZeroMQ.

The processes are separate so that RPC work never holds the engine's GIL. `request_id` is the id
under which the gateway started the request; the engine's sequence ids never appear here. Groups are
workers that serve a model together, each with a part of the layers; an epoch numbers their
configurations, and an attempt is the id of a prepared change.
"""

import msgspec

from services.core.cost.model import CostModel
from services.core.destination import Destination
from services.core.groups.layer_map import ModelShape
from services.core.logprobs import LogprobRows
from services.core.planner.events import EmitToken, RefuseRequest
from services.core.report import EngineReport, OtherRoom
from services.core.request import Request

FRAMES_MAX = 100_000  # frames buffered in a socket before the sender blocks
PREPARE_TIMEOUT_S = 600.0  # maximum time limit of a preparation


class StartRequest(msgspec.Struct, tag=True, frozen=True):
    """To the engine: run a request."""

    request: Request


class AbortRequest(msgspec.Struct, tag=True, frozen=True):
    """To the engine: abort a request."""

    request_id: str


class ReturnRequests(msgspec.Struct, tag=True, frozen=True):
    """To the engine: the worker shuts down; return requests for which other groups have room."""

    room: OtherRoom


class EngineReady(msgspec.Struct, tag=True, frozen=True):
    """From the engine, once after its start: the loaded model and its memory.

    `max_model_len` is the longest sequence that its KV cache holds, `context_tokens` the longest
    that the model supports. The addresses are for transfers between engines; empty if the engine
    does not support them. Only engines with the same `model_digest` compute the same tokens.
    `no_drops`: why an engine that could merge has no addresses. `cost_model` predicts the duration
    of its iterations, if it has one. Parameters and the KV of a
    layer each occupy whole chunks of `chunk_bytes` of the arena. It holds up to `adapter_slots`
    adapters, whose rank is at most `adapter_rank_max`.
    """

    max_model_len: int
    vocab_size: int
    block_size: int
    kv_blocks_total: int
    kv_block_bytes: int
    budget_bytes: int
    parameter_bytes: int
    staging_bytes: int
    arena_bytes: int = 0
    shape: ModelShape | None = None
    activation_address: str = ""
    bulk_address: str = ""
    model_digest: str = ""
    context_tokens: int = 0
    cost_model: CostModel | None = None
    chunk_bytes: int = 0
    no_drops: str = ""
    adapter_slots: int = 0
    adapter_rank_max: int = 0


class EngineUnusable(msgspec.Struct, tag=True, frozen=True):
    """From the engine, as its only frame: it cannot start; `message` has cause and remedy."""

    message: str


class RequestTimes(msgspec.Struct, frozen=True):
    """Durations of a request at an engine: wait, prefill, decode, and each preemption.

    In seconds; see worker.proto.
    """

    wait_s: float
    prefill_s: float
    decode_s: float
    preempted_s: list[float] = []


class MovedRequest(msgspec.Struct, frozen=True):
    """A request that has moved away: the worker at `address` (host:port) has adopted it.

    This engine has sent all tokens before output index `next_index`.
    """

    request_id: str
    worker_id: str
    address: str
    group_id: str
    epoch: int
    next_index: int


class AdoptedRequest(msgspec.Struct, frozen=True):
    """A request that this engine has adopted from another engine.

    `emitted_ids` are all its output tokens so far, so that a gateway may resume from any index;
    the next `EmitToken` has index `len(emitted_ids)`. `logprobs` are the rows of the last output
    tokens, `prompt_logprobs` those of the prompt, if requested and if there is output.
    `cached_tokens` prompt tokens were in the prefix cache of the engine where the request started.
    """

    request_id: str
    group_id: str
    epoch: int
    emitted_ids: list[int]
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    cached_tokens: int = 0


class Progress(msgspec.Struct, tag=True, frozen=True):
    """From the engine, after each iteration and periodically: events of requests, and its report.

    `received` are the requests that arrived since the last frame; `report` includes them. Process
    `adopted`, `tokens`, `refusals` and `moved` in this order. If events of a request need another
    order, such as when it moves away and returns, the engine sends the later ones in the next
    frame. `times` has the requests that end or move away, `dropped_prefixes` the hashes of prefix
    blocks that the engine has evicted (see load reports).
    """

    received: list[str]
    tokens: list[EmitToken]
    refusals: list[RefuseRequest]
    report: EngineReport
    adopted: list[AdoptedRequest] = []
    moved: list[MovedRequest] = []
    times: dict[str, RequestTimes] = {}
    dropped_prefixes: tuple[int, ...] = ()


class CostsLearned(msgspec.Struct, tag=True, frozen=True):
    """From the engine: it plans with another cost model, which dispatch should predict with."""

    cost_model: CostModel


class Lane(msgspec.Struct, frozen=True):
    """A member's listening address for a kind of traffic between engines.

    The address has the format of the transport, host:port for UCX. A peer that connects must
    present `nonce`.
    """

    address: str
    nonce: str


class MemberPlan(msgspec.Struct, frozen=True):
    """A member's part in a configuration: layers `first_layer` to `end_layer` (exclusive).

    `activations` and `bulk` are its transfer addresses; gateways connect to `grpc_address`
    (host:port). `draining`: the member is shutting down.
    """

    worker_id: str
    incarnation: str
    first_layer: int
    end_layer: int
    activations: Lane
    bulk: Lane
    grpc_address: str
    draining: bool = False


class GroupPlan(msgspec.Struct, frozen=True):
    """A group that a change creates; `members` are in order of their layers, the first leads."""

    group_id: str
    epoch: int
    members: list[MemberPlan]


class ApplyConfiguration(msgspec.Struct, tag=True, frozen=True):
    """To the engine: these groups are committed; switch to the group with this engine.

    `groups` are all groups of a change, at the same epoch; a split creates several. No effect if
    the epoch is not newer. There is no answer, because a commit is final. A group whose members do
    not hold all layers cannot run requests.
    """

    groups: list[GroupPlan]


class Prepare(msgspec.Struct, tag=True, frozen=True):
    """To the engine: prepare for groups that may be committed, without affecting serving.

    The engine answers with a `Prepared` of the same `attempt`. `holders` are workers of other
    groups to fetch layers from, with the layers that each runs now. After `timeout_s` the
    preparation is aborted.
    """

    attempt: str
    groups: list[GroupPlan]
    holders: list[MemberPlan] = []
    timeout_s: float = PREPARE_TIMEOUT_S


class Introduce(msgspec.Struct, tag=True, frozen=True):
    """To the engine: let workers of other groups connect, which want to fetch layers from it.

    `peers` includes this worker. No effect on its own group. The connections end after `timeout_s`.
    """

    peers: list[MemberPlan]
    timeout_s: float = PREPARE_TIMEOUT_S


class AbortAttempt(msgspec.Struct, tag=True, frozen=True):
    """To the engine: abort the preparation for `attempt`; ignored if unknown."""

    attempt: str


class Prepared(msgspec.Struct, tag=True, frozen=True):
    """From the engine: ready for `attempt`, or not, with the cause in `error`."""

    attempt: str
    error: str = ""


class ShipRequests(msgspec.Struct, tag=True, frozen=True):
    """To the engine: move running requests to an introduced worker; answered by `Shipped`.

    At most `requests_max` requests, 0: all. `if_cheaper`: only those whose KV is sent in less time
    than it is computed. `blocks_max`: their KV blocks in total, 0: no limit.
    """

    order: str
    target: Destination
    requests_max: int = 0
    if_cheaper: bool = False
    blocks_max: int = 0


class Shipped(msgspec.Struct, tag=True, frozen=True):
    """From the engine: the end of `order`. `moved` requests were returned to go on elsewhere.

    `kept` ones were to move and stay; `reason`: why no further one moves.
    """

    order: str
    moved: int
    kept: int
    reason: str


GroupCommand = ApplyConfiguration | Prepare | AbortAttempt | Introduce | ShipRequests
ToEngine = StartRequest | AbortRequest | ReturnRequests | GroupCommand
FromEngine = EngineReady | EngineUnusable | Progress | Prepared | Shipped | CostsLearned

_encoder = msgspec.msgpack.Encoder()
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


HEARTBEAT_INTERVAL_S = 0.5
"""Interval of the heartbeats of tideserve's engine, which continue during an iteration."""


def heartbeat_address(address: str) -> str:
    """The address of an engine's heartbeat socket, derived from that of its main socket."""
    return f"{address}.pulse"


def encode(frame: ToEngine | FromEngine) -> bytes:
    """Serialize a frame."""
    return _encoder.encode(frame)

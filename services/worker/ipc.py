"""Frames between a worker's servicer process and its engine process: msgpack over ZeroMQ.

The two are separate processes so that RPC work never holds the interpreter lock of the engine.
"""

import msgspec

from services.core.groups.layer_map import ModelShape
from services.core.logprobs import LogprobRows
from services.core.planner.events import EmitToken, RefuseRequest
from services.core.report import EngineReport
from services.core.request import Request

FRAMES_MAX = 100_000  # frames that may wait in a socket before the sender is held up


class StartRequest(msgspec.Struct, tag=True, frozen=True):
    """To the engine: run a request."""

    request: Request


class AbortRequest(msgspec.Struct, tag=True, frozen=True):
    """To the engine: abort a request."""

    request_id: str


class EngineReady(msgspec.Struct, tag=True, frozen=True):
    """From the engine, once: what it has loaded. Sizes in bytes.

    The addresses are those of its lanes; empty when it cannot transfer to other workers.
    `max_model_len` is the longest sequence that its KV holds, `context_tokens` the longest that it
    computes with. `model_digest`: only engines with the same one compute the same.
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


class EngineUnusable(msgspec.Struct, tag=True, frozen=True):
    """From the engine, as its last frame: it cannot start; one sentence of cause and remedy."""

    message: str


class RequestTimes(msgspec.Struct, frozen=True):
    """Where a request's time went at one engine, in seconds; see worker.proto."""

    wait_s: float
    prefill_s: float
    decode_s: float
    preempted_s: list[float] = []


class MovedRequest(msgspec.Struct, frozen=True):
    """A request that the worker at `address` (host:port) has adopted and acknowledged.

    `next_index` is the next output index; this engine has sent all tokens before it.
    """

    request_id: str
    worker_id: str
    address: str
    group_id: str
    epoch: int
    next_index: int


class AdoptedRequest(msgspec.Struct, frozen=True):
    """A request that this engine has taken over from another one.

    `emitted_ids` are all its output tokens so far, so that a gateway may go on from any of them;
    the next `EmitToken` has the index `len(emitted_ids)`. `logprobs` are the rows of the last of
    these, `prompt_logprobs` those of the prompt once there is any output, if they were asked for.
    `cached_tokens` of its prompt were in the cache where it started.
    """

    request_id: str
    group_id: str
    epoch: int
    emitted_ids: list[int]
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    cached_tokens: int = 0


class Progress(msgspec.Struct, tag=True, frozen=True):
    """From the engine: tokens and events of requests, and its report; also as a heartbeat.

    `received` are the requests that arrived since the last frame: `report` counts them. Read in the
    order `adopted`, `tokens`, `refusals`, `moved`; what does not fit this order goes into the next
    frame (a request that moved away and comes back, for example). `times` are those of the
    requests that end or move away in it. `dropped_prefixes` as in a load report.
    """

    received: list[str]
    tokens: list[EmitToken]
    refusals: list[RefuseRequest]
    report: EngineReport
    adopted: list[AdoptedRequest] = []
    moved: list[MovedRequest] = []
    times: dict[str, RequestTimes] = {}
    dropped_prefixes: tuple[int, ...] = ()


class Lane(msgspec.Struct, frozen=True):
    """Where a member listens for one kind of traffic; a peer that connects presents `nonce`.

    `address` is what the transport takes: host:port for UCX.
    """

    address: str
    nonce: str


class MemberPlan(msgspec.Struct, frozen=True):
    """A member's part in a configuration: layers `first_layer` to `end_layer` (exclusive).

    `activations` and `bulk` are its lanes; `grpc_address` (host:port) is where gateways find it.
    `draining`: it is leaving.
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
    """A group that a change makes; `members` are in stage order, the first leads."""

    group_id: str
    epoch: int
    members: list[MemberPlan]


class ApplyConfiguration(msgspec.Struct, tag=True, frozen=True):
    """To the engine: these groups are committed; switch to the one that has it as a member.

    `groups` are all that one change made, of one epoch: a split makes several. Without effect if
    the epoch is not newer. There is no answer: a commit is final. A group whose members do not
    hold all layers serves nothing; its requests are over.
    """

    groups: list[GroupPlan]


class Prepare(msgspec.Struct, tag=True, frozen=True):
    """To the engine: get ready for groups that may be committed, while serving.

    Answered by one `Prepared` with the same `attempt`. Nothing that is served changes.
    """

    attempt: str
    groups: list[GroupPlan]


class AbortAttempt(msgspec.Struct, tag=True, frozen=True):
    """To the engine: abort the preparation for `attempt`; unknown ones are ignored."""

    attempt: str


class Prepared(msgspec.Struct, tag=True, frozen=True):
    """From the engine: ready for `attempt`, or not, with one sentence of cause in `error`."""

    attempt: str
    error: str = ""


GroupCommand = ApplyConfiguration | Prepare | AbortAttempt
ToEngine = StartRequest | AbortRequest | GroupCommand
FromEngine = EngineReady | EngineUnusable | Progress | Prepared

_encoder = msgspec.msgpack.Encoder()
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


PULSE_S = 0.5
"""An engine gives a sign of life so often."""


def pulse_address(address: str) -> str:
    """Where an engine's signs of life go, for the address of its socket."""
    return f"{address}.pulse"


def encode(frame: ToEngine | FromEngine) -> bytes:
    """The frame as bytes."""
    return _encoder.encode(frame)

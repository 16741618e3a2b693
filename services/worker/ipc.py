"""Frames between a worker's servicer process and its engine process: msgpack over ZeroMQ.

The two are separate processes so that RPC work never holds the interpreter lock of the engine.
"""

import msgspec

from services.core.iteration.events import EmitToken, Load, RefuseRequest
from services.core.request import Request

FRAMES_MAX = 100_000  # frames that may wait in a socket before the sender is held up


class StartRequest(msgspec.Struct, tag=True, frozen=True):
    """To the engine: run a request."""

    request: Request


class AbortRequest(msgspec.Struct, tag=True, frozen=True):
    """To the engine: give a request up."""

    request_id: str


class EngineReady(msgspec.Struct, tag=True, frozen=True):
    """From the engine, once: what it has loaded. Sizes in bytes."""

    max_model_len: int
    vocab_size: int
    block_size: int
    kv_blocks_total: int
    kv_block_bytes: int
    budget_bytes: int
    parameter_bytes: int
    staging_bytes: int
    num_layers: int = 0


class EngineUnusable(msgspec.Struct, tag=True, frozen=True):
    """From the engine, at last: it cannot start; one sentence of cause and remedy."""

    message: str


class Progress(msgspec.Struct, tag=True, frozen=True):
    """From the engine: news of requests and its load, after each step and as a heartbeat.

    `received` are the requests that arrived since the last one: `load` counts them.
    """

    received: list[str]
    tokens: list[EmitToken]
    refusals: list[RefuseRequest]
    load: Load


ToEngine = StartRequest | AbortRequest
FromEngine = EngineReady | EngineUnusable | Progress

_encoder = msgspec.msgpack.Encoder()
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(frame: ToEngine | FromEngine) -> bytes:
    """The frame as bytes."""
    return _encoder.encode(frame)

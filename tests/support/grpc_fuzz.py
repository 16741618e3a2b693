"""Sends random messages over gRPC, and judges what comes back."""

import asyncio
import random
from collections import Counter
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from services.gateway.bounds.body_budget import BODY_BYTES_MAX
from services.gateway.grpc.call import SMALL_BYTES_MAX
from tests.support.message_fuzz import GATEWAY, KSERVE, Messages
from tideserve.gateway.v1 import gateway_pb2 as pb
from tideserve.kserve.v2 import inference_pb2 as kserve

TIMEOUT_S = 300.0
# A body larger than all bodies may be together is refused for want of room.
LARGE_BYTES = 2**19
Code = grpc.StatusCode
ANSWERS = {Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.ALREADY_EXISTS}
# Often those that do the most.
WEIGHTS = {
    **{f"{GATEWAY}{name}": 6 for name in ("Chat", "Complete", "StreamChat", "StreamComplete")},
    **{f"{KSERVE}{name}": 6 for name in ("ModelInfer", "ModelStreamInfer")},
    **{f"{GATEWAY}{name}": 2 for name in ("Tokenize", "Detokenize")},
}
UNKNOWN = (f"{GATEWAY}Embed", f"{KSERVE}RepositoryIndex", "/x/y")
# The client's own library says this of a call that has ended before all was sent.
UNSENT = "Internal error from Core"


class GrpcFuzz:
    """Sends messages that seeds draw to a gateway that serves `model`; keeps what came of them."""

    def __init__(self, channel: grpc.aio.Channel, key: str, model: str, at_once: int) -> None:
        self._channel = channel
        self._key = key
        self._model = model
        self._at_once = at_once
        self.codes: Counter[str] = Counter()
        self.failures: list[str] = []

    async def run(self, seeds: range) -> None:
        """One call for each seed, many at once."""
        waiting = iter(seeds)

        async def sender() -> None:
            for seed in waiting:
                await self._one(seed)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._at_once):
                tasks.create_task(sender())

    async def _one(self, seed: int) -> None:
        rng = random.Random(seed)
        drawn = Messages(rng, self._model)
        weights = [WEIGHTS.get(name, 1) for name in drawn.methods]
        (method,) = rng.choices(drawn.methods, weights)
        data = [drawn.draw(method) for _ in range(_count(rng, method))]
        if rng.random() < 0.005:
            data[:1] = [b"\x0a" + b"x" * rng.choice([LARGE_BYTES, BODY_BYTES_MAX + 1])]
        if rng.random() < 0.01:
            method = rng.choice(UNKNOWN)
        cut, hurry = rng.random() < 0.08, rng.random() < 0.02
        sent: dict[str, Any] = {
            "timeout": rng.uniform(0, 0.02) if hurry else TIMEOUT_S,
            "metadata": (("authorization", f"Bearer {self._key}"), *_metadata(rng)),
        }
        # A message alone is sent in one piece, as stubs of unary calls do.
        call = (
            self._channel.unary_stream(method)(data[0], **sent)
            if len(data) == 1
            else self._channel.stream_stream(method)(iter(data), **sent)
        )
        try:
            await self._finish(method, call, data, cut, hurry)
        except AssertionError as error:
            # All are told at the end.
            told = [one[:200] for one in data]
            self.failures.append(f"seed {seed}: {method} with {told}: {error}")

    async def _finish(
        self, method: str, call: Any, data: list[bytes], cut: bool, hurry: bool
    ) -> None:
        answers = []
        try:
            async for answer in call:
                answers.append(answer)
                if cut:
                    call.cancel()
        except grpc.aio.AioRpcError:
            pass
        except asyncio.CancelledError:
            # Only this call is, and not the task that waits for it.
            if not cut:
                raise
        code = await call.code()
        if len(data) > 1 and await call.details() == UNSENT:
            self.codes["unsent"] += 1
            return
        self.codes["cut" if cut and code is Code.CANCELLED else code.name] += 1
        allowed = allowed_codes(method, data, cut, hurry)
        assert code in allowed, (code, await call.details())
        if code is Code.OK:
            check_answers(method, answers, data)
        elif code in ANSWERS:
            await check_error(call)


def allowed_codes(method: str, data: list[bytes], cut: bool, hurry: bool) -> set[grpc.StatusCode]:
    """What the call may end with."""
    allowed = set(ANSWERS)
    allowed |= {Code.CANCELLED} if cut else set()
    allowed |= {Code.DEADLINE_EXCEEDED, Code.CANCELLED} if hurry else set()
    allowed |= {Code.UNIMPLEMENTED} if method in UNKNOWN else set()
    if max(map(len, data), default=0) > SMALL_BYTES_MAX:
        allowed |= {Code.RESOURCE_EXHAUSTED}
    if sum(map(len, data)) >= LARGE_BYTES:
        allowed |= {Code.UNAVAILABLE}
    return allowed


def _count(rng: random.Random, method: str) -> int:
    """How many messages the call has."""
    if method.endswith(("ModelStreamInfer", "ServerReflectionInfo")):
        return rng.randint(1, 5)
    return 1 if rng.random() < 0.97 else rng.choice((0, 2, 3))


def _metadata(rng: random.Random) -> list[tuple[str, str | bytes]]:
    """Sometimes what clients send along, rarely right."""
    if rng.random() > 0.1:
        return []
    name = rng.choice(
        ("x-request-id", "traceparent", "x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-bin")
    )
    if name.endswith("-bin"):
        return [(name, rng.randbytes(20))]
    return [(name, rng.choice(("100", "batch", "-1", "nan", "", "x" * 99, "a b;c%\\", "00-0-0-0")))]


async def check_error(call: Any) -> None:
    """It says why, for people and for machines."""
    status = rpc_status.from_call(
        _Ended(await call.code(), await call.details(), await call.trailing_metadata())
    )
    info = error_details_pb2.ErrorInfo()
    assert status is not None and status.details[0].Unpack(info)
    assert info.domain == "tideserve" and info.reason and status.message
    assert 400 <= int(info.metadata["http_status"]) < 500


class _Ended:
    """A call as the library of statuses reads it."""

    def __init__(self, code: grpc.StatusCode, details: str, trailer: Any) -> None:
        self.code = lambda: code
        self.details = lambda: details
        self.trailing_metadata = lambda: tuple(trailer)


def check_answers(method: str, answers: list[bytes], data: list[bytes]) -> None:
    """An answer is whole."""
    if method == f"{KSERVE}ModelStreamInfer":
        told = [kserve.ModelStreamInferResponse.FromString(one) for one in answers]
        finals = [one.infer_response.parameters["triton_final_response"].bool_param for one in told]
        assert sum(finals) == len(data)
        assert all(one.error_message != "internal error of the gateway; retry" for one in told)
    elif method in (f"{GATEWAY}StreamChat", f"{GATEWAY}StreamComplete"):
        kind: Any = pb.StreamChatResponse if "Chat" in method else pb.StreamCompleteResponse
        pieces = [kind.FromString(one) for one in answers]
        ended = Counter(piece.index for piece in pieces if piece.finish_reason)
        assert ended == Counter({piece.index: 1 for piece in pieces})
        check_usage(pieces[-1].usage)
    elif method in (f"{GATEWAY}Chat", f"{GATEWAY}Complete"):
        kind = pb.ChatResponse if "Chat" in method else pb.CompleteResponse
        (whole,) = map(kind.FromString, answers)
        assert [choice.index for choice in whole.choices] == list(range(len(whole.choices)))
        assert all(choice.finish_reason for choice in whole.choices)
        check_usage(whole.usage)
    elif not method.startswith("/grpc.reflection."):
        assert len(answers) == 1


def check_usage(usage: pb.Usage) -> None:
    """Counts fit together."""
    assert usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

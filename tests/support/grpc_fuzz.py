"""Sends random messages over gRPC and checks the responses."""

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
# A message beyond the limit of all messages together is refused for lack of memory.
LARGE_BYTES = 2**19
Code = grpc.StatusCode
ANSWERS = {Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.ALREADY_EXISTS}
# More often the methods that do the most.
WEIGHTS = {
    **{f"{GATEWAY}{name}": 6 for name in ("Chat", "Complete", "StreamChat", "StreamComplete")},
    **{f"{KSERVE}{name}": 6 for name in ("ModelInfer", "ModelStreamInfer")},
    **{f"{GATEWAY}{name}": 2 for name in ("Tokenize", "Detokenize")},
}
UNKNOWN = (f"{GATEWAY}Embed", f"{KSERVE}RepositoryIndex", "/x/y")
# grpc's error for a call that ended before all messages were sent.
UNSENT = "Internal error from Core"


class GrpcFuzz:
    """Sends random messages to a gateway that serves `model`, and records the outcomes."""

    def __init__(self, channel: grpc.aio.Channel, key: str, model: str, at_once: int) -> None:
        self._channel = channel
        self._key = key
        self._model = model
        self._at_once = at_once
        self.codes: Counter[str] = Counter()
        self.failures: list[str] = []

    async def run(self, seeds: range) -> None:
        """Run a call per seed, `at_once` concurrently."""
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
        # A single message is sent as a unary request.
        call = (
            self._channel.unary_stream(method)(data[0], **sent)
            if len(data) == 1
            else self._channel.stream_stream(method)(iter(data), **sent)
        )
        try:
            await self._finish(method, call, data, cut, hurry)
        except AssertionError as error:
            # Failures are reported together at the end.
            excerpts = [message[:200] for message in data]
            self.failures.append(f"seed {seed}: {method} with {excerpts}: {error}")

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
            # The call was cancelled, not the task that awaits it.
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
    """Status codes that the call may end with."""
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
    """Number of messages of the call."""
    if method.endswith(("ModelStreamInfer", "ServerReflectionInfo")):
        return rng.randint(1, 5)
    return 1 if rng.random() < 0.97 else rng.choice((0, 2, 3))


def _metadata(rng: random.Random) -> list[tuple[str, str | bytes]]:
    """Random metadata, rarely valid."""
    if rng.random() > 0.1:
        return []
    name = rng.choice(
        ("x-request-id", "traceparent", "x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-bin")
    )
    if name.endswith("-bin"):
        return [(name, rng.randbytes(20))]
    return [(name, rng.choice(("100", "batch", "-1", "nan", "", "x" * 99, "a b;c%\\", "00-0-0-0")))]


async def check_error(call: Any) -> None:
    """Check that an error has a message and machine-readable details."""
    status = rpc_status.from_call(
        _Ended(await call.code(), await call.details(), await call.trailing_metadata())
    )
    info = error_details_pb2.ErrorInfo()
    assert status is not None and status.details[0].Unpack(info)
    assert info.domain == "tideserve" and info.reason and status.message
    assert 400 <= int(info.metadata["http_status"]) < 500


class _Ended:
    """A call in the form that grpc_status reads."""

    def __init__(self, code: grpc.StatusCode, details: str, trailer: Any) -> None:
        self.code = lambda: code
        self.details = lambda: details
        self.trailing_metadata = lambda: tuple(trailer)


def check_answers(method: str, answers: list[bytes], data: list[bytes]) -> None:
    """Check that a response is complete."""
    if method == f"{KSERVE}ModelStreamInfer":
        responses = [kserve.ModelStreamInferResponse.FromString(answer) for answer in answers]
        finals = [
            response.infer_response.parameters["triton_final_response"].bool_param
            for response in responses
        ]
        assert sum(finals) == len(data)
        assert all(
            response.error_message != "internal error of the gateway; retry"
            for response in responses
        )
    elif method in (f"{GATEWAY}StreamChat", f"{GATEWAY}StreamComplete"):
        kind: Any = pb.StreamChatResponse if "Chat" in method else pb.StreamCompleteResponse
        pieces = [kind.FromString(answer) for answer in answers]
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
    """Check that token counts are consistent."""
    assert usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

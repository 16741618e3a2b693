"""One streamed completion through our gRPC door, the counterpart of `event_stream`.

Calls use the stubs directly, so that this side does not hold up what is measured at the other.
"""

from collections.abc import Callable
from urllib.parse import urlsplit

import grpc
import grpc.aio

from services.common.clock import monotonic_s
from tideserve.common.v1 import service_pb2
from tideserve.gateway.v1 import gateway_pb2 as pb
from tideserve.gateway.v1 import gateway_pb2_grpc
from tideserve.load.event_stream import StreamedAnswer, StreamFailed
from tideserve.load.workload import DEFAULT_CLASS, PlannedRequest

SCHEME = "grpc"
STATUS = {grpc.StatusCode.RESOURCE_EXHAUSTED: 429, grpc.StatusCode.UNAVAILABLE: 503}
"""Refusals, in the words of HTTP."""
DETAILS = "grpc-status-details-bin"
"""Only a gateway sends them; a server that does not answer at all is UNAVAILABLE, too."""


class GrpcDoor:
    """One gateway and the connection to it. Counterpart of `event_stream.OpenAIServer`."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """`url`: grpc://host:port."""
        self._target = urlsplit(url).netloc
        self._channel: grpc.aio.Channel | None = None
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else None

    async def complete(
        self,
        model: str,
        request: PlannedRequest,
        answer: StreamedAnswer,
        on_sent: Callable[[], None],
    ) -> None:
        """Send one request and fill `answer` as the response arrives.

        Raises:
            StreamFailed: if there is no whole response.
        """
        message = completion_request(model, request)
        on_sent()
        call = self._stub().StreamComplete(message, metadata=self._metadata)
        try:
            async for piece in call:
                _take(piece, answer)
        except grpc.aio.AioRpcError as error:
            told = DETAILS in dict(error.trailing_metadata())
            if not told or (status := STATUS.get(error.code())) is None:
                raise StreamFailed(f"{error.code().name}: {error.details()}") from error
            answer.status = status
            answer.feed((error.details() or "").encode(), monotonic_s())
        else:
            answer.finished = True
        finally:
            call.cancel()

    async def close(self) -> None:
        """Hang up."""
        if self._channel is not None:
            await self._channel.close()

    def _stub(self) -> "gateway_pb2_grpc.GatewayServiceAsyncStub":
        # A channel belongs to the loop that runs when it is made.
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._target)
        stub: gateway_pb2_grpc.GatewayServiceAsyncStub
        stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)
        return stub


def completion_request(model: str, request: PlannedRequest) -> pb.StreamCompleteRequest:
    """The message of a request; `event_stream.completion_body` asks the same over HTTP."""
    completion = pb.CompleteRequest(
        model=model,
        prompts=[pb.Prompt(token_ids=pb.TokenIds(ids=request.prompt_ids))],
        sampling=pb.Sampling(
            max_tokens=request.output_tokens,
            min_tokens=request.output_tokens,
            ignore_eos=True,
            temperature=0,
            seed=request.seed % 2**31,
        ),
    )
    if request.slo_class != DEFAULT_CLASS:
        name = f"SERVICE_CLASS_{request.slo_class.upper()}"
        completion.options.service_class = service_pb2.ServiceClass.Value(name)
    if request.ttft_s is not None:
        completion.options.service_level.ttft_ms = request.ttft_s * 1e3
    if request.tpot_s is not None:
        completion.options.service_level.tpot_ms = request.tpot_s * 1e3
    return pb.StreamCompleteRequest(completion=completion)


def _take(piece: pb.StreamCompleteResponse, answer: StreamedAnswer) -> None:
    now_s = monotonic_s()
    answer.status = 200
    answer.request_id = answer.request_id or piece.id
    answer.token_times_s += [now_s] * len(piece.token_ids)
    if piece.HasField("usage"):
        answer.output_tokens = piece.usage.completion_tokens

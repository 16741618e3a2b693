"""Implements methods of KServe's inference.GRPCInferenceService.

The interceptor refuses the other methods of the protocol as unknown.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection

import grpc

from services.common.logging import request_ids
from services.common.version import installed_version
from services.gateway.api.completion import completion_of
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.parameters import UnknownFields
from services.gateway.bounds.body_budget import TakenOnce
from services.gateway.bounds.cancel_scope import CancelScope
from services.gateway.cluster.readiness import GatewayReadiness
from services.gateway.grpc import kserve_translate as translate
from services.gateway.grpc.call import STREAM_IDLE_S, Call, decoded, parsed
from services.gateway.grpc.errors import status_of
from services.gateway.grpc.interceptors import Method
from services.gateway.grpc.kserve_translate import Inference
from services.gateway.grpc.unknown_fields import decoded_known
from services.gateway.keys.principal import Principal
from services.gateway.records.request_record import RequestRecord, fingerprint_of
from services.gateway.records.request_recorder import RequestRecorder
from services.gateway.serving.model_registry import ModelEntry
from services.gateway.serving.output import OutputPiece, Outputs, Usage
from services.gateway.serving.prepared import PreparedRequest
from services.gateway.serving.serving import RequestServing
from services.gateway.text.tokenizer import TextPool
from services.gateway.vocabulary.errors import (
    BadRequest,
    BodyTimeout,
    GatewayError,
    Unauthorized,
    first_gateway_error,
    no_such_model,
)
from tideserve.kserve.v2 import inference_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
NAME = PLATFORM = "tideserve"
STREAM_REQUESTS_MAX = 64
"""Maximum concurrent requests of a stream; further messages are read once a request completes."""
_TYPES = {"BYTES": pb.TYPE_STRING, "BOOL": pb.TYPE_BOOL}


class KserveService:
    """The methods have the names and messages of the service definition."""

    def __init__(
        self,
        serving: RequestServing,
        pool: TextPool,
        probe: GatewayReadiness,
        recorder: RequestRecorder,
    ) -> None:
        self._serving = serving
        self._pool = pool
        self._probe = probe
        self._recorder = recorder

    def methods(self) -> dict[str, Method]:
        """All methods of the service definition, by full name."""
        return {
            f"/{SERVICE.full_name}/{method.name}": Method(
                getattr(self, method.name),
                single=method.name != "ModelStreamInfer",
                names=translate.NAMES,
            )
            for method in SERVICE.methods
        }

    async def ServerLive(self, call: Call) -> None:
        await call.read_small(pb.ServerLiveRequest)
        await call.client.send(pb.ServerLiveResponse(live=True))

    async def ServerReady(self, call: Call) -> None:
        await call.read_small(pb.ServerReadyRequest)
        await call.client.send(pb.ServerReadyResponse(ready=self._probe.ready()))

    async def ModelReady(self, call: Call) -> None:
        request = await call.read_small(pb.ModelReadyRequest)
        entry = self._allowed_entry(request.name, call)
        ready = entry is not None and self._probe.model_ready(entry.name)
        known = request.version in ("", translate.VERSION)
        await call.client.send(pb.ModelReadyResponse(ready=known and ready))

    async def ServerMetadata(self, call: Call) -> None:
        await call.read_small(pb.ServerMetadataRequest)
        response = pb.ServerMetadataResponse(
            name=NAME, version=installed_version(), extensions=["model_configuration"]
        )
        await call.client.send(response)

    async def ModelMetadata(self, call: Call) -> None:
        request = await call.read_small(pb.ModelMetadataRequest)
        self._check(request.name, request.version, call)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        response = pb.ModelMetadataResponse(
            name=request.name,
            versions=[translate.VERSION],
            platform=PLATFORM,
            inputs=[
                tensor(name=name, datatype=kind, shape=[1])
                for name, kind in translate.INPUTS.items()
            ],
            outputs=[tensor(name=name, datatype="BYTES", shape=[-1]) for name in translate.OUTPUTS],
        )
        await call.client.send(response)

    async def ModelConfig(self, call: Call) -> None:
        request = await call.read_small(pb.ModelConfigRequest)
        self._check(request.name, request.version, call)
        config = pb.ModelConfig(
            name=request.name,
            platform=PLATFORM,
            backend=PLATFORM,
            max_batch_size=0,
            input=[
                pb.ModelInput(
                    name=name, data_type=_TYPES[kind], dims=[1], optional=name != "text_input"
                )
                for name, kind in translate.INPUTS.items()
            ],
            output=[
                pb.ModelOutput(name=name, data_type=pb.TYPE_STRING, dims=[-1])
                for name in translate.OUTPUTS
            ],
            model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
        )
        await call.client.send(pb.ModelConfigResponse(config=config))

    async def ModelInfer(self, call: Call) -> None:
        serving = self._serving
        data = await call.message()
        with serving.entered(call.record) as lease:
            inference, body = await parsed(data, self._parse, lease, self._pool)
            call.record.fingerprint = fingerprint_of(data)
            del data
            if inference.stream:
                raise BadRequest(
                    "ModelInfer does not stream; call ModelStreamInfer, or set 'stream' to false",
                    param="stream",
                )
            writer = _InferenceWriter(inference, call.client.send)
            await serving.respond(
                body,
                call.record,
                lease,
                writer,
                call.client,
                timeout_s=call.remaining_s,
            )

    async def ModelStreamInfer(self, call: Call) -> None:
        try:
            with (
                call.limits.stream(call.limit_key),
                CancelScope() as cancel_scope,
                call.client.watched(cancel_scope),
            ):
                async with asyncio.TaskGroup() as tasks:
                    await self._serve_stream(call, tasks)
        except BaseExceptionGroup as group:
            if (error := first_gateway_error(group)) is not None:
                raise error from None
            raise

    async def _serve_stream(self, call: Call, tasks: asyncio.TaskGroup) -> None:
        """Serve requests until the client ends its stream or the gateway drains.

        Raises:
            BodyTimeout: if the stream is idle for too long.
            Unauthorized: if the client's key was revoked, after the running requests.
        """
        slots = asyncio.Semaphore(STREAM_REQUESTS_MAX)
        running: set[asyncio.Task[None]] = set()
        drained = tasks.create_task(self._drained())
        refusal: Unauthorized | None = None
        while True:
            # Back-pressure: read no message without a free slot.
            await slots.acquire()
            reading = tasks.create_task(call.read())
            data = await _next_message(reading, drained, running)
            if data is None:
                break
            # Authenticate each message: the key may be revoked while the stream is open.
            try:
                principal = call.identify()
            except Unauthorized as error:
                refusal = error
                break
            task = tasks.create_task(self._serve_request(call, principal, _StreamedMessage(data)))
            # Delete the references, so that the request's task can free the message.
            del data, reading
            running.add(task)
            task.add_done_callback(running.discard)
            task.add_done_callback(lambda _: slots.release())
        # Stop reading, but complete the requests that are running.
        for waiting in (reading, drained):
            waiting.cancel()
        if running:
            await asyncio.wait(running)
        if refusal is not None:
            raise refusal

    async def _drained(self) -> None:
        await self._serving.drain.draining_started.wait()

    async def _serve_request(
        self, call: Call, principal: Principal, message: "_StreamedMessage"
    ) -> None:
        """Serve a request of a stream, with a record of its own."""
        record = self._recorder.open(call.record.path, call.record.given_id)
        record.principal, record.slo_headers = principal, call.record.slo_headers
        record.address = call.record.address
        self._recorder.trace(record, None, admitted=True)
        with request_ids(record.client_request_id, record.trace_id):
            try:
                await self._infer(call, record, message)
                record.status, record.grpc_code = 200, grpc.StatusCode.OK.name
            except GatewayError as error:
                await self._refuse(call, record, message.request_id, error)
            except asyncio.CancelledError:
                record.note_disconnect()
                raise
            finally:
                self._recorder.close(record, record.path)

    async def _infer(self, call: Call, record: RequestRecord, message: "_StreamedMessage") -> None:
        serving = self._serving
        with serving.entered(record) as lease:
            inference, body = await parsed(message.data, self._parse, lease, self._pool)
            record.fingerprint = fingerprint_of(message.data)
            message.parsed(inference)
            make = _StreamWriter if inference.stream else _InferenceWriter

            async def send(response: pb.ModelInferResponse) -> None:
                await call.client.send(pb.ModelStreamInferResponse(infer_response=response))

            writer = make(inference, send, final=True)
            await serving.respond(body, record, lease, writer, timeout_s=call.remaining_s)

    async def _refuse(
        self, call: Call, record: RequestRecord, request_id: str, error: GatewayError
    ) -> None:
        record.fail(error)
        status = status_of(error, record.client_request_id, names=translate.NAMES)
        record.grpc_code = next(c.name for c in grpc.StatusCode if c.value[0] == status.code)
        metrics = self._serving.metrics
        if record.first_token_s is None:
            metrics.count_refusal(error, record.service_class, record.model)
        else:
            metrics.count_failed_stream(error.code or "error")
        await call.client.send(translate.error_response(status.message, request_id))

    def _parse(self, data: bytes) -> tuple[Inference, TakenOnce[GenerationRequest]]:
        unknown = UnknownFields(self._serving.refuse_unknown)
        request = decoded_known(pb.ModelInferRequest, data, unknown)
        inference, fields = translate.inference_of(request)
        return inference, TakenOnce(completion_of(fields, unknown))

    def _check(self, name: str, version: str, call: Call) -> None:
        """Raise GatewayError unless the model exists and the caller may use it."""
        if self._allowed_entry(name, call) is None:
            raise no_such_model(name, *self._serving.models.listed(call.record.principal))
        translate.check_version(version)

    def _allowed_entry(self, name: str, call: Call) -> ModelEntry | None:
        return self._serving.models.allowed_entry(name, call.record.principal)


class _StreamedMessage:
    """A message of a stream; releases its bytes once it is parsed."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._id: str | None = None

    def parsed(self, inference: Inference) -> None:
        """Release the bytes."""
        self.data, self._id = b"", inference.request_id

    @property
    def request_id(self) -> str:
        """The client's id of the request, also if the message is otherwise invalid."""
        if self._id is None:
            try:
                self._id = decoded(pb.ModelInferRequest, self.data).id[: translate.ID_CHARS_MAX]
            except BadRequest:
                self._id = ""
        return self._id


async def _next_message(
    reading: "asyncio.Task[bytes | None]",
    drained: "asyncio.Task[None]",
    running: Collection["asyncio.Task[None]"],
) -> bytes | None:
    """The next message; None if the client ends its stream or the gateway drains.

    Raises:
        BodyTimeout: if no message arrives for `STREAM_IDLE_S` while no request runs.
    """
    while True:
        waited = {reading, drained}
        done, _ = await asyncio.wait(
            waited, timeout=STREAM_IDLE_S, return_when=asyncio.FIRST_COMPLETED
        )
        if done:
            return reading.result() if reading in done else None
        if not running:
            raise BodyTimeout(
                f"no request arrived on this stream for {STREAM_IDLE_S:g} s; open a new stream"
            )


Send = Callable[[pb.ModelInferResponse], Awaitable[None]]


class _InferenceWriter:
    """A Writer that sends the response once all choices are complete."""

    def __init__(self, inference: Inference, send: Send, final: bool | None = None) -> None:
        """`final`: the response's final flag in a stream; None outside a stream."""
        self._inference = inference
        self._send = send
        self._final = final

    def begin(self, prepared: PreparedRequest) -> None:
        self._outputs = Outputs(len(prepared.choices))

    async def piece(self, index: int, piece: OutputPiece) -> None:
        self._outputs.add(index, piece)

    async def finish(self, usage: Usage) -> None:
        texts = [self._inference.prefix + output.text for output in self._outputs.all]
        reasons = [str(output.finish_reason) for output in self._outputs.all]
        await self._send(translate.response_of(self._inference, texts, reasons, self._final))


class _StreamWriter:
    """A Writer that sends a response for each piece; the finish reason marks the last."""

    def __init__(self, inference: Inference, send: Send, final: bool | None = None) -> None:
        self._inference = inference
        self._send = send

    def begin(self, prepared: PreparedRequest) -> None:
        """See Writer."""

    async def piece(self, index: int, piece: OutputPiece) -> None:
        reason = piece.finish_reason
        # Skip tokens of incomplete text: the response has no token ids.
        if piece.text or reason is not None:
            final = reason is not None
            response = translate.response_of(
                self._inference, [piece.text], [str(reason) if final else ""], final
            )
            await self._send(response)

    async def finish(self, usage: Usage) -> None:
        """Do nothing: the response of the last piece has the final flag."""

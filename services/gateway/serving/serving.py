"""Serves a request for every API: read, prepare, generate, write.

Theory of operation. An API server (HTTP, gRPC) parses a request into a body of
`services.gateway.api` and passes a `Writer` for its response format. `RequestServing.entered`
counts the request from before its body is read. `RequestServing.respond` prepares the request,
generates on the cluster, and passes each piece of output to the writer. A request ends early when
its client disconnects, stalls or cancels, when it times out, or when the gateway shuts down; it is
then withdrawn from the scheduler's queue or aborted at its worker.
"""

import asyncio
import contextlib
import math
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from services.common.clock import monotonic_s
from services.core.service import ServiceClass
from services.gateway.api.generation import GenerationRequest
from services.gateway.bounds.body_budget import BodyBudget, BodyLease, TakenOnce
from services.gateway.bounds.cancel_scope import CancelScope
from services.gateway.bounds.client import ClientGone, WatchedClient
from services.gateway.bounds.drain import Drain
from services.gateway.bounds.idempotency_cache import IdempotencyCache
from services.gateway.records.metrics import Metrics
from services.gateway.records.request_record import RequestRecord
from services.gateway.serving.choice_runner import ChoiceRunner
from services.gateway.serving.model_registry import ModelRegistry
from services.gateway.serving.output import OutputPiece, Usage
from services.gateway.serving.prepared import PreparedChoice, PreparedRequest
from services.gateway.serving.running import RunningRequests
from services.gateway.serving.service_policy import ServicePolicy
from services.gateway.vocabulary.errors import (
    ClientDeadline,
    Expired,
    GatewayError,
    first_gateway_error,
)


class Writer(Protocol):
    """Writes a response in the format of its API."""

    def begin(self, prepared: PreparedRequest) -> None:
        """Store the request; sends nothing yet."""

    async def piece(self, index: int, piece: OutputPiece) -> None:
        """Write new output of choice `index`; pieces of several choices may interleave."""

    async def finish(self, usage: Usage) -> None:
        """End the response after all choices have ended."""


@dataclass(frozen=True, slots=True)
class RequestServing:
    """Serves requests of all APIs for the gateway's `models`.

    `policy` maps requests to service classes.
    `idempotency_cache`: cached responses to requests with an Idempotency-Key. `refuse_unknown`:
    reject bodies with unknown fields. `request_timeout_s` limits queueing plus running in seconds;
    for class `batch` the limit is `batch_timeout_s`. A client that reads nothing for
    `client_stall_s` is disconnected.
    """

    models: ModelRegistry
    policy: ServicePolicy
    drain: Drain
    bodies: BodyBudget
    running: RunningRequests
    idempotency_cache: IdempotencyCache[Any]
    metrics: Metrics
    request_timeout_s: float
    batch_timeout_s: float
    client_stall_s: float
    refuse_unknown: bool = False

    @property
    def longest_s(self) -> float:
        """The longest time limit of any class, in seconds."""
        return max(self.request_timeout_s, self.batch_timeout_s)

    @contextlib.contextmanager
    def entered(self, record: RequestRecord, cached: bool = False) -> Iterator[BodyLease]:
        """Count a request inside the `with` block; enter it before the body is read.

        Yields a lease on the memory for bodies. `cached`: the idempotency cache probably has the
        response, so the quota of the owner (the tenant of the API key) is not charged yet.

        Raises:
            GatewayError: if the gateway is full, or the owner's quota is used up.
        """
        quota = contextlib.nullcontext() if cached else self.charged(record)
        with quota, self.drain.enter() as record.slot, self.bodies.lease() as lease:
            yield lease

    def classify(self, body: GenerationRequest, record: RequestRecord) -> ServiceClass:
        """Determine the class of a request whose body has been read, and count it for the class.

        Notes the model in `record`, unless it is unknown.

        Raises:
            GatewayError: if the class is invalid, or the gateway is full for it.
        """
        if (entry := self.models.find(body.model)) is not None:
            record.model = entry.name
        service = self.policy.service_of(body, record.slo_headers, record.principal.owner)
        record.service_class = service.service_class
        if record.slot is not None:
            record.slot.set_class(record.service_class)
        return record.service_class

    @contextlib.contextmanager
    def charged(self, record: RequestRecord) -> Iterator[None]:
        """Charge a request to its owner's quota, unless it is charged already.

        Raises:
            OverQuota: if the owner's quota is used up.
        """
        if record.quotas is None or record.quota is not None:
            yield
            return
        with record.quotas.entered(record.principal) as record.quota:
            yield

    async def respond(
        self,
        body: TakenOnce[GenerationRequest],
        record: RequestRecord,
        lease: BodyLease,
        writer: Writer,
        client: WatchedClient[Any] | None = None,
        *,
        disconnect: Coroutine[Any, Any, None] | None = None,
        timeout_s: float = math.inf,
        limit_s: float | None = None,
    ) -> None:
        """Serve a request.

        `client`: the client, if it must be disconnected when it stalls. `disconnect`: a coroutine
        that raises ClientGone when the client disconnects. `timeout_s`: the client's own deadline.
        `limit_s`: the request's time limit, if it is not that of its class.

        Raises:
            GatewayError: if the request failed.
            ClientGone: if the client disconnected or stalled.
        """
        chosen_id = body.value.request_id
        try:
            async with asyncio.TaskGroup() as tasks:
                # Start it first, so that the coroutine is awaited even if the request fails early.
                guard = None if disconnect is None else tasks.create_task(disconnect)
                with (
                    CancelScope() as cancel_scope,
                    self.running.entered(record, chosen_id, cancel_scope),
                    self.drain.cancel_on_drain_timeout(cancel_scope),
                    _watched(client, cancel_scope),
                ):
                    service_class = self.classify(body.value, record)
                    if limit_s is None:
                        limit_s = self._limit_s(service_class)
                    _limit(cancel_scope, limit_s, timeout_s)
                    await self._answer(body, record, lease, writer, cancel_scope)
                if guard is not None:
                    guard.cancel()
        except BaseExceptionGroup as group:
            # Report a disconnect even beside errors of the request, but never hide other errors.
            gone, others = group.split(ClientGone)
            if gone is not None and (others is None or first_gateway_error(others) is not None):
                raise ClientGone from None
            if (error := first_gateway_error(group)) is not None:
                raise error from None
            raise

    def _limit_s(self, service_class: ServiceClass) -> float:
        batch = service_class is ServiceClass.BATCH
        return self.batch_timeout_s if batch else self.request_timeout_s

    async def _answer(
        self,
        body: TakenOnce[GenerationRequest],
        record: RequestRecord,
        lease: BodyLease,
        writer: Writer,
        cancel_scope: CancelScope,
    ) -> None:
        entry = self.models.entry(body.value.model, record.principal)
        prepared = await entry.preparer.prepare(body.take(), record)
        # The body is no longer referenced; the token ids of a prompt that fits the context are
        # small compared to the largest body.
        lease.release()
        if record.quota is not None:
            outputs_max = [choice.request.limits.max_tokens for choice in prepared.choices]
            record.quota.reserve(
                prepared.prompt_tokens, outputs_max, cancel_scope.cancel, entry.quota_weight
            )
        self.metrics.count_prompt_tokens(entry.name, prepared.prompt_tokens)
        writer.begin(prepared)
        await self._generate(entry.choices, prepared, record, writer)
        await writer.finish(_usage(prepared, record))

    async def _generate(
        self,
        choices: ChoiceRunner,
        prepared: PreparedRequest,
        record: RequestRecord,
        writer: Writer,
    ) -> None:
        arrived_s = record.parsed_s
        assert arrived_s is not None, "the body has been read"

        async def run(index: int, choice: PreparedChoice) -> None:
            pieces = choices.run(choice, record.add_choice(), arrived_s)
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    _record_piece(record, piece)
                    await writer.piece(index, piece)

        # Use a task even for a single choice: a token then wakes fewer nested coroutines.
        async with asyncio.TaskGroup() as tasks:
            for index, choice in enumerate(prepared.choices):
                tasks.create_task(run(index, choice))


def _limit(cancel_scope: CancelScope, limit_s: float, timeout_s: float) -> None:
    """Cancel the request at its time limit or at its client's deadline, whichever is first."""
    message = "the request timed out; request fewer tokens"
    late: GatewayError = Expired(message)
    if timeout_s < limit_s:
        late = ClientDeadline(message)
    cancel_scope.cancel_after(min(limit_s, timeout_s), late)


def _watched(
    client: WatchedClient[Any] | None, cancel_scope: CancelScope
) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if client is None else client.watched(cancel_scope)


def _usage(prepared: PreparedRequest, record: RequestRecord) -> Usage:
    firsts = record.choices[:: prepared.choices[0].n]
    cached_tokens = sum(choice.cached_tokens for choice in firsts)
    # Never report more cached tokens than prompt tokens, whatever a worker claims.
    return Usage(
        prepared.prompt_tokens, record.output_tokens, min(cached_tokens, prepared.prompt_tokens)
    )


def _record_piece(record: RequestRecord, piece: OutputPiece) -> None:
    record.output_tokens += len(piece.token_ids)
    if piece.token_ids and record.first_token_s is None:
        record.first_token_s = monotonic_s()
    if (reason := piece.parsed.finish_reason if piece.finish_reason else None) is not None:
        record.finish_reasons.append(reason)

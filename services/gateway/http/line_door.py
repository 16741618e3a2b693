"""Runs lines of batches as requests of class `batch`, without an HTTP request."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Message

from services.common.clock import monotonic_s
from services.core.service import ServiceClass
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.json_object import parse_object
from services.gateway.batches.rows import BatchRow, ClaimedLine, LineResult
from services.gateway.bounds.body_budget import BODY_BYTES_PER_ITEM, TakenOnce
from services.gateway.bounds.client import WatchedClient
from services.gateway.http.dialect import Dialect
from services.gateway.http.errors import error_body
from services.gateway.keys.key_ring import KeyRing
from services.gateway.keys.quotas import Quotas
from services.gateway.records.request_record import new_record
from services.gateway.serving.serving import RequestServing
from services.gateway.text.tokenizer import TextPool
from services.gateway.vocabulary.errors import GatewayError, Unauthorized

# Fields that a line may have but that do not apply to it: lines are of class `batch`, are not
# streamed, and may run several times under different request ids.
NOT_APPLIED = frozenset(
    {"priority", "request_id", "service_tier", "slo", "slo_class", "stream", "stream_options"}
)
SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class LineDoor:
    """Starts lines. `dialects`: by endpoint; `incarnation`: of this gateway."""

    serving: RequestServing
    pool: TextPool
    keys: KeyRing
    quotas: Quotas
    dialects: Mapping[str, Callable[[], Dialect]]
    incarnation: str

    def check_model(self, batch: BatchRow, model: str) -> None:
        """Raise GatewayError unless the key of `batch` may use the model."""
        principal = self.keys.principal_of(batch.owner, batch.key_id)
        self.serving.models.entry(model, principal)

    def tokens_max(self, batch: BatchRow) -> int | None:
        """The limit of the owner's queued tokens, None: unlimited."""
        try:
            principal = self.keys.principal_of(batch.owner, batch.key_id)
        except Unauthorized:
            # `check_model` refuses each line.
            return None
        return principal.limits.batch_tokens_queued

    def open(self, batch: BatchRow, line: ClaimedLine) -> "LineCall":
        """A call that runs `line` of `batch`."""
        return LineCall(self, batch, line)


class LineCall:
    """A run of a line; each has a request id of its own. Cancel the task of `run` to interrupt it.

    A line without a seed gets the same seed in each run, so a repetition has the same output.
    """

    def __init__(self, door: LineDoor, batch: BatchRow, line: ClaimedLine) -> None:
        self._door = door
        self._batch = batch
        self._line = line
        self._resumable = False
        self._choices_per_prompt = 1
        self._record = new_record(batch.endpoint, None, monotonic_s(), door.incarnation)

    @property
    def placed(self) -> bool:
        """Whether a worker has been assigned."""
        return any(choice.segments for choice in self._record.choices)

    @property
    def output_ids(self) -> tuple[int, ...] | None:
        """All output tokens so far; None if another run could not continue after them."""
        choices = self._record.choices
        return tuple(choices[0].output_ids) if self._resumable and choices else None

    async def run(self, text: bytes, limit_s: float) -> LineResult:
        """Run the line `text` for at most `limit_s`.

        Raises:
            GatewayError: if the request failed.
        """
        door, record = self._door, self._record
        record.principal = door.keys.principal_of(self._batch.owner, self._batch.key_id)
        if record.principal.limits.batch_counts:
            record.quotas = door.quotas
        dialect = door.dialects[self._batch.endpoint]()
        body = await door.pool.run(
            lambda: TakenOnce(dialect.parse(self._fields(text))), len(text) // BODY_BYTES_PER_ITEM
        )
        self._prepare(body.value)
        answer = bytearray()

        async def put(message: Message) -> None:
            answer.extend(message.get("body", b""))

        # A sink cannot stall, so nothing watches it.
        sink: WatchedClient[Message] = WatchedClient(put, 0)
        writer = dialect.whole(sink, body.value)
        with door.serving.charged(record), door.serving.bodies.lease() as lease:
            await door.serving.respond(body, record, lease, writer, limit_s=limit_s)
        return self._result(200, bytes(answer))

    def failed(self, error: GatewayError) -> LineResult:
        """The result of a line that fails with `error`."""
        body = error_body(error, self._batch.endpoint, self._record.response_id)
        return self._result(error.status, msgspec.json.encode(body), error=True)

    def _fields(self, text: bytes) -> dict[str, Any]:
        """The fields of the request."""
        body: dict[str, Any] = parse_object(text, "the line")["body"]
        fields = {name: value for name, value in body.items() if name not in NOT_APPLIED}
        if fields.get("seed") is None:
            fields["seed"] = seed_of(self._line)
        return fields | {"slo_class": ServiceClass.BATCH.value}

    def _prepare(self, body: GenerationRequest) -> None:
        # The store has the tokens of a single output, and no log probabilities.
        self._choices_per_prompt = body.choices
        single = body.all_choices == 1
        has_logprobs = body.output_logprobs is not None or body.prompt_logprobs is not None
        # An adapter may have other weights by then.
        entry = self._door.serving.models.find(body.model)
        has_adapter = entry is not None and entry.adapter is not None
        self._resumable = single and not has_logprobs and not has_adapter
        if self._resumable:
            self._record.earlier_ids = self._line.output_ids

    def _result(self, status: int, body: bytes, *, error: bool = False) -> LineResult:
        record, line = self._record, self._line
        cached = sum(choice.cached_tokens for choice in record.choices[:: self._choices_per_prompt])
        return LineResult(
            line.batch_id,
            line.line,
            status,
            record.response_id,
            body,
            error,
            prompt_tokens=record.prompt_tokens,
            output_tokens=record.output_tokens,
            cached_tokens=min(cached, record.prompt_tokens),
        )


def seed_of(line: ClaimedLine) -> int:
    """The seed of a line that has none."""
    digest = hashlib.sha256(f"{line.batch_id}/{line.line}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - SEED_BITS)

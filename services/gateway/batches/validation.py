"""Validates the input of a batch before any line runs, in one pass.

A batch with an invalid line fails as a whole: its owner learns of all mistakes (the first
`ERRORS_MAX`) within a minute, rather than of some after hours.
"""

import codecs
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from time import sleep
from typing import Any

import msgspec

from services.core.batches.order import LEVELS_BYTES, BatchOrder, sort_key
from services.gateway.api.json_object import parse_object
from services.gateway.batches.errors import BatchStoreDown, Fenced
from services.gateway.batches.line_reader import LINE_BYTES_MAX, RawLine, read_lines
from services.gateway.batches.object_files import ObjectFiles
from services.gateway.batches.object_store import ObjectSource
from services.gateway.batches.rows import BatchRow, LineError, NewLine
from services.gateway.batches.store import BatchStore
from services.gateway.vocabulary.errors import GatewayError, OverQuota

log = logging.getLogger(__name__)

ERRORS_MAX = 100
"""Errors that are reported; the file is not read further."""
CHUNK_LINES = 500
CHUNK_BYTES = 2 * 2**20
"""Lines and bytes that are validated, and stored, at a time."""
CUSTOM_ID_CHARS_MAX = 512
BYTES_PER_TOKEN = 4
"""Of the estimate of a prompt's tokens."""
OUTPUT_TOKENS = 512
"""Output tokens that a line without a limit is estimated to have."""
TOKENS_MAX = 2**31
"""Maximum estimate of a line, whatever limits it has."""
PROMPT_FIELDS = ("tools", "instructions", "prompt", "messages", "input")
"""Body fields of which the prompt is made, in its order."""
LIMIT_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


@dataclass(frozen=True, slots=True)
class BatchRules:
    """What the lines of a batch must meet.

    `check_model` raises GatewayError unless the owner of the batch may use the model. `tokens_max`:
    limit of the estimated tokens of the owner's open batches, or None.
    """

    endpoint: str
    lines_max: int
    check_model: Callable[[str], object]
    order: BatchOrder = BatchOrder.PREFIX
    tokens_max: int | None = None


@dataclass(slots=True)
class InputValidator:
    """Validates an input in chunks; used by one thread at a time.

    `errors` are those so far, `total` the lines and `tokens` the estimate of their tokens.
    """

    source: ObjectSource
    rules: BatchRules
    errors: list[LineError] = field(default_factory=list)
    total: int = 0
    tokens: int = 0
    ended: bool = False
    _lines: Iterator[RawLine] = field(init=False)
    # The line of each custom id, by digest: ids may be long.
    _seen: dict[bytes, int] = field(default_factory=dict)
    _allowed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._lines = read_lines(self.source)

    def next_chunk(self) -> list[NewLine]:
        """Validate the next lines; after the last, `ended` is True. Raises OSError."""
        chunk: list[NewLine] = []
        read_bytes = 0
        while len(chunk) < CHUNK_LINES and read_bytes < CHUNK_BYTES:
            raw = next(self._lines, None)
            if raw is None or len(self.errors) >= ERRORS_MAX:
                self._end()
                break
            self.total += 1
            read_bytes += len(raw.content or b"") or LINE_BYTES_MAX
            try:
                chunk.append(self._line(raw))
            except _Invalid as invalid:
                self._refuse(raw.number, invalid.code, str(invalid), invalid.param)
            # Let the event loop have the interpreter: it would wait for milliseconds otherwise.
            sleep(0)
        return chunk

    def _end(self) -> None:
        self.ended = True
        if not self.errors and not self.total:
            self._refuse(None, "empty_file", "the file has no lines; upload a file with requests")

    def _refuse(self, line: int | None, code: str, message: str, param: str | None = None) -> None:
        self.errors.append(LineError(code, message, line, param))

    def _line(self, raw: RawLine) -> NewLine:
        """The line, unless it is invalid. Raises _Invalid."""
        if raw.number > self.rules.lines_max:
            raise _Invalid(
                "too_many_lines",
                f"the file has more than {self.rules.lines_max} lines; split it",
            )
        data = _parsed(_checked(raw))
        custom_id = self._custom_id(data.get("custom_id"), raw.number)
        _check_request(data, self.rules.endpoint)
        body = data["body"]
        self._check_model(body)
        if body.get("stream"):
            raise _Invalid(
                "unsupported_value", "a line cannot be streamed; omit 'stream'", "body.stream"
            )
        prompt = _prompt(body)
        tokens = min(TOKENS_MAX, len(prompt) // BYTES_PER_TOKEN + _output_tokens(body))
        self.tokens += tokens
        key = sort_key(self.rules.order, prompt[: LEVELS_BYTES[-1]], tokens)
        assert raw.content is not None
        return NewLine(raw.number, custom_id, raw.offset, len(raw.content), key)

    def _custom_id(self, custom_id: object, number: int) -> str:
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= CUSTOM_ID_CHARS_MAX:
            raise _Invalid(
                "invalid_custom_id",
                f"'custom_id' must be a string of 1 to {CUSTOM_ID_CHARS_MAX} characters",
                "custom_id",
            )
        try:
            encoded = custom_id.encode()
        except UnicodeEncodeError:
            encoded = b"\0"
        if b"\0" in encoded:
            raise _Invalid(
                "invalid_custom_id",
                "'custom_id' has a NUL or a lone surrogate; remove it",
                "custom_id",
            )
        digest = blake2b(encoded, digest_size=16).digest()
        first = self._seen.setdefault(digest, number)
        if first != number:
            raise _Invalid(
                "duplicate_custom_id",
                f"line {first} has the same 'custom_id'; make them unique",
                "custom_id",
            )
        return custom_id

    def _check_model(self, body: Mapping[str, Any]) -> None:
        model = body.get("model")
        if not isinstance(model, str):
            raise _Invalid("missing_field", "'body' needs a 'model', a string", "body.model")
        if model in self._allowed:
            return
        try:
            self.rules.check_model(model)
        except GatewayError as error:
            raise _Invalid(error.code or "invalid_model", error.message, "body.model") from None
        self._allowed.add(model)


class _Invalid(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def _checked(raw: RawLine) -> bytes:
    """The bytes of a line in the right form."""
    content = raw.content
    if content is None:
        raise _Invalid(
            "line_too_long", f"the line has more than {LINE_BYTES_MAX} bytes; shorten it"
        )
    if raw.number == 1 and content.startswith(codecs.BOM_UTF8):
        raise _Invalid("byte_order_mark", "the file begins with a byte order mark; remove it")
    if content.endswith(b"\r"):
        raise _Invalid("crlf", "the line ends with CRLF; end lines with a newline alone")
    if not raw.ended:
        raise _Invalid(
            "no_final_newline",
            "the last line has no newline, so the file may be cut off; end it with a newline",
        )
    if not content.strip():
        raise _Invalid("empty_line", "the line is empty; remove it")
    return content


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        return parse_object(content, "the line")
    except GatewayError as error:
        utf8 = "UTF-8" in error.message
        raise _Invalid("invalid_utf8" if utf8 else "invalid_json", error.message) from None


def _check_request(data: Mapping[str, Any], endpoint: str) -> None:
    if data.get("method") != "POST":
        raise _Invalid("invalid_method", "'method' must be \"POST\"", "method")
    if data.get("url") != endpoint:
        raise _Invalid("invalid_url", f"'url' must be the batch's endpoint, {endpoint}", "url")
    if not isinstance(data.get("body"), dict):
        raise _Invalid("missing_field", "'body' must be an object: the request", "body")


def _prompt(body: Mapping[str, Any]) -> bytes:
    """The fields of the prompt, as JSON; those that are absent take no room. Raises _Invalid."""
    try:
        return b"".join(
            msgspec.json.encode(body[name]) for name in PROMPT_FIELDS if body.get(name) is not None
        )
    except UnicodeEncodeError:
        raise _Invalid("invalid_utf8", "'body' has a lone surrogate; remove it", "body") from None


def _output_tokens(body: Mapping[str, Any]) -> int:
    limits = [body[name] for name in LIMIT_FIELDS if type(body.get(name)) is int]
    count = body["n"] if type(body.get("n")) is int else 1
    return max(0, limits[0] if limits else OUTPUT_TOKENS) * max(0, count)


async def validate(
    store: BatchStore, files: ObjectFiles, token: int, batch: BatchRow, rules: BatchRules
) -> None:
    """Validate a batch in VALIDATING: store its lines and let them run, or fail it.

    No effect if the batch is in another state, or is cancelled meanwhile.

    Raises:
        BatchStoreDown: if the database or the storage fails; repeat it.
        Fenced: if another gateway leads.
    """
    validator: InputValidator | None = None
    try:
        input_file = await store.files.input_of(batch)
        if not await store.lines.clear(token, batch.batch_id):
            return
        source = await files.open(input_file.object_name)
        try:
            validator = InputValidator(source, rules)
            while not validator.ended:
                chunk = await files.run(validator.next_chunk)
                # After an error the lines serve no purpose.
                wanted = chunk and not validator.errors
                if wanted and not await store.lines.add(token, batch.batch_id, chunk):
                    return
        finally:
            await files.run(source.close)
        errors = validator.errors
        if not errors:
            counts = validator.total, validator.tokens
            await store.begin(token, batch.batch_id, *counts, rules.tokens_max)
            return
    except OverQuota as error:
        errors = [LineError("token_limit_exceeded", error.message)]
    except (BatchStoreDown, Fenced):
        raise
    except Exception:
        # A batch that is validated again and again would keep the others waiting.
        log.exception("batch %s cannot be validated", batch.batch_id)
        line = validator.total if validator is not None else None
        errors = [LineError("internal_error", "the gateway cannot read the input; report it", line)]
    await store.fail(token, batch.batch_id, errors)

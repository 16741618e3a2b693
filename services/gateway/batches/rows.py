"""Rows of the batch store, as its users see them.

Times are Unix seconds by the clock of the database, so gateways need not agree on the time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.core.batches.vocabulary import BatchState, LineState


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file whose object is written; `object_name` names the object in `ObjectFiles`.

    `keep_s`: time until it expires; None: it does not.
    """

    owner: str
    purpose: str
    name: str
    size_bytes: int
    sha256: str
    object_name: str
    keep_s: float | None = None


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file that exists."""

    file_id: str
    owner: str
    purpose: str
    name: str
    size_bytes: int
    sha256: str
    object_name: str
    created_s: float
    expires_s: float | None


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch to create. `tokens`: estimate of all its tokens, for the owner's limit.

    `output_keep_s`: time until its output and error files expire; None: the store's default.
    """

    owner: str
    key_id: str
    endpoint: str
    input_file: str
    window_s: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    idempotency_key: str | None = None
    tokens: int = 0
    output_keep_s: int | None = None


@dataclass(frozen=True, slots=True)
class LineError:
    """An error of validation; `line` from 1, None if it concerns the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A batch.

    `completed` lines have an answer, `failed` lines an error, `dropped` lines expired or were
    cancelled; the others are open. `entered_s`: when it entered each state. `tokens`: estimate of
    all its tokens; `prompt_tokens`, `output_tokens` and `cached_tokens`: those of its ended lines.
    """

    batch_id: str
    owner: str
    key_id: str
    endpoint: str
    input_file: str
    window_s: int
    state: BatchState
    created_s: float
    expires_s: float
    metadata: Mapping[str, str]
    errors: tuple[LineError, ...]
    total: int
    completed: int
    failed: int
    dropped: int
    tokens: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    entered_s: Mapping[BatchState, float]
    output_file: str | None
    error_file: str | None
    output_keep_s: int | None = None

    @property
    def open(self) -> int:
        """Lines that have not ended."""
        return self.total - self.completed - self.failed - self.dropped


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch that has not ended. `stopping`: its running lines are to be interrupted.

    `writable`: all its lines have ended, so that its files can be written.
    """

    batch: BatchRow
    stopping: bool
    writable: bool


@dataclass(frozen=True, slots=True)
class NewLine:
    """A validated line: `offset` and `length` of its JSON in the input, `line` from 1.

    Lines run in the order of `sort_key`, then of `line`.
    """

    line: int
    custom_id: str
    offset: int
    length: int
    sort_key: int = 0


@dataclass(frozen=True, slots=True)
class ClaimedLine:
    """A line to run. `attempts` counts earlier starts that were the line's own failures.

    `output_ids`: tokens of an earlier start, after which it continues.
    """

    batch_id: str
    line: int
    custom_id: str
    offset: int
    length: int
    attempts: int
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LineResult:
    """The end of a line: the response's status and JSON body; `error`: the status is an error."""

    batch_id: str
    line: int
    status: int
    request_id: str
    body: bytes
    error: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LineProgress:
    """All output tokens of a running line so far."""

    batch_id: str
    line: int
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReturnedLine:
    """A line that goes back to PENDING, and is not claimed for `delay_s`.

    `failure`: it counts as an attempt. `output_ids`: its tokens so far; None keeps those stored.
    """

    batch_id: str
    line: int
    delay_s: float = 0.0
    failure: bool = False
    output_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class OutputLine:
    """An ended line, for the output and error files; `body` is empty if it never ran."""

    line: int
    custom_id: str
    state: LineState
    status: int
    request_id: str
    body: bytes

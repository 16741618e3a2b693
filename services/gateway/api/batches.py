"""Bodies of OpenAI's Batch API."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from services.gateway.api.parameters import Policy, UnknownFields, known_fields
from services.gateway.api.validation import Strict, validated
from services.gateway.vocabulary.errors import BadRequest

METADATA_MAX = 16
HOUR_S, DAY_S = 3600, 86_400
WINDOW_MIN_S = HOUR_S
KEEP_MIN_S, KEEP_MAX_S = HOUR_S, 30 * DAY_S
"""Times until a file expires."""

_WINDOW = re.compile(r"([1-9][0-9]{0,3})(h|d)")

MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
FileId = Annotated[str, Field(min_length=1, max_length=64)]


class OutputExpiresAfter(Strict):
    """When the output and error files expire."""

    anchor: Literal["created_at"] = Field(description="The creation of the files.")
    seconds: Annotated[int, Field(ge=KEEP_MIN_S, le=KEEP_MAX_S)] = Field(
        description="Seconds after it: an hour to 30 days."
    )


class CreateBatchRequest(Strict):
    """Body of POST /v1/batches."""

    input_file_id: FileId = Field(description="An uploaded file of purpose batch.")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"] = Field(
        description="The endpoint of all lines."
    )
    completion_window: Annotated[str, Field(min_length=2, max_length=5)] = Field(
        description="Time after which lines that have not run expire: 1h to 7d."
    )
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=METADATA_MAX)] | None = (
        Field(None, description="Up to 16 pairs of strings.")
    )
    output_expires_after: OutputExpiresAfter | None = Field(
        None, description="When the output and error files expire; by default `batch_keep_s`."
    )


def parse_create(
    data: Mapping[str, Any], *, refuse_unknown: bool = False
) -> tuple[CreateBatchRequest, tuple[str, ...]]:
    """Parse a body of POST /v1/batches; returns also warnings. Raises BadRequest."""
    unknown = UnknownFields(refuse_unknown)
    fields = known_fields(data, CreateBatchRequest.model_fields, Policy(), unknown)
    return validated(CreateBatchRequest, fields), unknown.warnings


def window_s(text: str, max_s: float) -> int:
    """The seconds of a completion window such as 24h or 7d.

    Raises:
        BadRequest: if it is invalid, or not between an hour and `max_s`.
    """
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * (HOUR_S if match[2] == "h" else DAY_S) if match else 0
    if not WINDOW_MIN_S <= seconds <= max_s:
        raise BadRequest(
            f"'completion_window' must be hours or days, such as 24h, from 1h to"
            f" {int(max_s) // HOUR_S}h; correct it",
            param="completion_window",
        )
    return seconds

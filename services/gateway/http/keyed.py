"""Requests with an Idempotency-Key: draft-ietf-httpapi-idempotency-key-header, with 409 for 422.

The key is good for the bearers of keys of one owner with the same rights, on one route. So nobody
gets an answer that an own request would not have had, and keys of two owners never meet.
"""

import re
from collections.abc import Hashable

from starlette.types import Message, Scope

from services.gateway.bounds.answer import AnswerReader, SharedAnswer
from services.gateway.bounds.client import WatchedClient
from services.gateway.records.request_record import RequestRecord, record_of
from services.gateway.vocabulary.errors import BadRequest

HEADER = b"idempotency-key"
REPLAYED = (b"idempotent-replayed", b"true")
"""Stands in every answer that another request has, or had, too."""
KEY_LENGTH_MAX = 255
# A string of RFC 9651 or, as most clients send it, what stands in one.
_KEY = re.compile(rb'[!#-~]{1,%d}|"[ !#-~]{1,%d}"' % (KEY_LENGTH_MAX, KEY_LENGTH_MAX))
_MESSAGE_BYTES = 256
"""About what a message takes beside its body."""


def name_of(scope: Scope) -> Hashable | None:
    """What the request's answer is kept by; None for a request without a key.

    Raises:
        BadRequest: if the key is none.
    """
    keys = [value for name, value in scope["headers"] if name == HEADER]
    if not keys:
        return None
    if len(keys) > 1 or not _KEY.fullmatch(keys[0]):
        raise BadRequest(
            f"the header Idempotency-Key must be one key of 1 to {KEY_LENGTH_MAX} ASCII characters"
            " without blanks, with or without quotes around it; a UUID is good",
            code="invalid_idempotency_key",
        )
    principal = record_of(scope).principal
    return principal.owner, principal.models, scope["path"], keys[0].strip(b'"')


def sink_of(answer: SharedAnswer[Message], record: RequestRecord) -> WatchedClient[Message]:
    """Takes the answer for its readers. `record` is that of the request which is answered."""

    async def put(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.warnings = record.warnings
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        await answer.put(message, _MESSAGE_BYTES + len(message.get("body", b"")), last)

    # Each reader is watched for itself.
    return WatchedClient(put, 0)


async def send_answer(
    answer: SharedAnswer[Message],
    reader: AnswerReader[Message],
    record: RequestRecord,
    client: WatchedClient[Message],
) -> None:
    """Send all of an answer to a client whose `record` says whether another request has it, too.

    It returns at the last message at once: the server tells of a finished response that its client
    has gone.
    """
    while (message := await reader.next()) is not None:
        if message["type"] == "http.response.start":
            record.warnings = answer.warnings
            mark = (REPLAYED,) if record.replayed else ()
            # Other readers get this message, too, and doors add headers to it.
            message = {**message, "headers": [*message["headers"], *mark]}
        await client.send(message)

"""Messages with fields that this server's contract does not have: of newer clients, or mistakes."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from services.gateway.api.parameters import UnknownFields
from services.gateway.grpc.call import decoded

LOOKED_AT_MAX = 1000
"""Messages in a message that are looked at for names, and fields; a client may send a million."""

M = TypeVar("M", bound=Message)


def decoded_known(kind: type[M], data: bytes, unknown: UnknownFields) -> M:
    """The message in `data`, without fields that nobody knows; `unknown` learns their numbers.

    Raises:
        BadRequest: if it is no such message, or has such fields and they are refused.
    """
    message = decoded(kind, data)
    message.DiscardUnknownFields()
    size = message.ByteSize()
    if size == len(data):
        return message
    # Something is left out, or the client has its own way of writing.
    whole = decoded(kind, data)
    if whole.ByteSize() == size:
        return message
    names = list(islice(_unknown_in(whole), LOOKED_AT_MAX))
    for number, inside in names:
        unknown.meet(f"field-{number}", inside)
    if not names:
        unknown.meet("field-of-a-long-message")
    return message


def _unknown_in(message: Message) -> Iterator[tuple[int, str]]:
    """Number of each unknown field, and the path of the message that it is in."""
    waiting = deque([(message, "")])
    for _ in range(LOOKED_AT_MAX):
        if not waiting:
            return
        one, path = waiting.popleft()
        fields = UnknownFieldSet(one)
        yield from ((fields[index].field_number, path) for index in range(len(fields)))
        for field, value in one.ListFields():
            waiting += islice(_inner(field, value, f"{path}." if path else ""), LOOKED_AT_MAX)


def _inner(field: FieldDescriptor, value: Any, prefix: str) -> Iterable[tuple[Message, str]]:
    """The messages in a field, with their paths as errors name them."""
    kind = field.message_type
    if kind is None or kind.GetOptions().map_entry:
        return
    if isinstance(value, Message):
        yield value, prefix + field.name
        return
    for index, one in enumerate(value):
        yield one, f"{prefix}{field.name}.{index}"

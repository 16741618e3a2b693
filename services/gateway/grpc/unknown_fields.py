"""Finds unknown fields of protobuf messages, which newer clients and mistakes cause."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from services.gateway.api.parameters import UnknownFields
from services.gateway.grpc.call import decoded

SEARCHED_MAX = 1000
"""Maximum nested messages, and maximum fields, that are searched; clients may send millions."""

M = TypeVar("M", bound=Message)


def decoded_known(kind: type[M], data: bytes, unknown: UnknownFields) -> M:
    """Decode a message without its unknown fields; add their numbers to `unknown`.

    Raises:
        BadRequest: if the message is invalid, or has unknown fields and they are refused.
    """
    message = decoded(kind, data)
    message.DiscardUnknownFields()
    size = message.ByteSize()
    if size == len(data):
        return message
    # The sizes differ: there are unknown fields, or the client encodes known fields differently.
    whole = decoded(kind, data)
    if whole.ByteSize() == size:
        return message
    names = list(islice(_unknown_in(whole), SEARCHED_MAX))
    for number, inside in names:
        unknown.add(f"field-{number}", inside)
    if not names:
        unknown.add("field-of-a-long-message")
    return message


def _unknown_in(message: Message) -> Iterator[tuple[int, str]]:
    """The number of each unknown field and the path of its message, breadth first."""
    waiting = deque([(message, "")])
    for _ in range(SEARCHED_MAX):
        if not waiting:
            return
        nested, path = waiting.popleft()
        fields = UnknownFieldSet(nested)
        yield from ((fields[index].field_number, path) for index in range(len(fields)))
        for field, value in nested.ListFields():
            waiting += islice(_inner(field, value, f"{path}." if path else ""), SEARCHED_MAX)


def _inner(field: FieldDescriptor, value: Any, prefix: str) -> Iterable[tuple[Message, str]]:
    """The messages in a field, with their paths in the notation of errors."""
    kind = field.message_type
    if kind is None or kind.GetOptions().map_entry:
        return
    if isinstance(value, Message):
        yield value, prefix + field.name
        return
    for index, element in enumerate(value):
        yield element, f"{prefix}{field.name}.{index}"

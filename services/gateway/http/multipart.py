"""Reads uploads of files: forms of multipart/form-data (RFC 7578), streamed to a writer."""

from collections.abc import Awaitable, Callable
from typing import NoReturn

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from services.common.clock import monotonic_s
from services.common.timeouts import timeout
from services.gateway.vocabulary.errors import (
    BadRequest,
    BodyTimeout,
    BodyTooLarge,
    UnsupportedMediaType,
)

PIECE_BYTES = 2**20
"""Bytes of a file that are written together."""
RATE_WINDOW_S = 30.0
RATE_MIN = 64 * 2**10
"""Minimum bytes per second of an upload, over each `RATE_WINDOW_S` of waiting for the client."""
FIELD_BYTES_MAX = 2**10
HEADER_BYTES_MAX = 2**12
PARTS_MAX = 16
FORM_BYTES_MAX = 2**16
"""Bytes of a form besides its file."""
FILE = "file"

Write = Callable[[bytes], Awaitable[None]]


class UploadForm:
    """Parses a form with the part `file`; `taken` removes the file's bytes that have arrived."""

    def __init__(self, boundary: bytes, file_bytes_max: int) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.complete = False
        self._file_bytes_max = file_bytes_max
        self._bytes = self._file_bytes = self._parts = 0
        self._file = bytearray()
        self._name, self._value = bytearray(), bytearray()
        self._header, self._header_value = bytearray(), bytearray()
        self._in_file = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda data, start, end: self._add_header(
                    self._header, data[start:end]
                ),
                "on_header_value": lambda data, start, end: self._add_header(
                    self._header_value, data[start:end]
                ),
                "on_header_end": self._end_header,
                "on_part_data": lambda data, start, end: self._add(data[start:end]),
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """Parse further bytes of the body. Raises BadRequest, BodyTooLarge."""
        self._bytes += len(data)
        if self._bytes > self._file_bytes_max + FORM_BYTES_MAX:
            too_large(self._file_bytes_max)
        try:
            self._parser.write(data)
        except MultipartParseError:
            raise BadRequest("the body is not a valid form; send multipart/form-data") from None

    @property
    def held_bytes(self) -> int:
        """Bytes of the file that have not been taken."""
        return len(self._file)

    def taken(self) -> bytes:
        """Remove and return the bytes of the file that have arrived."""
        taken, self._file = bytes(self._file), bytearray()
        return taken

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise BadRequest(f"the form has more than {PARTS_MAX} parts; send fewer")
        self._name, self._value, self._in_file = bytearray(), bytearray(), False

    def _add_header(self, text: bytearray, data: bytes) -> None:
        text += data
        if len(text) > HEADER_BYTES_MAX:
            raise BadRequest(f"a header of a part exceeds {HEADER_BYTES_MAX} bytes; shorten it")

    def _end_header(self) -> None:
        name, value = bytes(self._header).lower(), bytes(self._header_value)
        self._header, self._header_value = bytearray(), bytearray()
        if name != b"content-disposition":
            return
        options = parse_options_header(value)[1]
        self._name = bytearray(options.get(b"name", b""))
        if self._name != FILE.encode():
            return
        if self.filename is not None:
            raise BadRequest("the form has several files; upload one per request", param=FILE)
        self._in_file = True
        self.filename = options.get(b"filename", b"").decode("utf-8", "replace")

    def _add(self, data: bytes) -> None:
        if self._in_file:
            self._file_bytes += len(data)
            if self._file_bytes > self._file_bytes_max:
                too_large(self._file_bytes_max)
            self._file += data
            return
        self._value += data
        if len(self._value) > FIELD_BYTES_MAX:
            raise BadRequest(
                f"a field of the form exceeds {FIELD_BYTES_MAX} bytes; shorten it",
                param=self._name.decode("utf-8", "replace"),
            )

    def _end_part(self) -> None:
        if not self._in_file:
            name = self._name.decode("utf-8", "replace")
            self.fields[name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self.complete = True


def too_large(bytes_max: int) -> NoReturn:
    """Raise BodyTooLarge for a file above `bytes_max`."""
    raise BodyTooLarge(f"the file exceeds the limit of {bytes_max} bytes; split it", param=FILE)


def form_of(request: Request, file_bytes_max: int) -> UploadForm:
    """The form of an upload. Raises GatewayError if the headers are invalid."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise UnsupportedMediaType(
            "an upload must be multipart/form-data with a boundary; send a form with 'file' and"
            " 'purpose'"
        )
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > file_bytes_max + FORM_BYTES_MAX:
        too_large(file_bytes_max)
    return UploadForm(boundary, file_bytes_max)


async def read_form(request: Request, form: UploadForm, write: Write) -> None:
    """Parse the body of `request` into `form`; its file goes to `write` in large pieces.

    Raises:
        GatewayError: if the form is invalid or too large, or arrives too slowly.
        ClientDisconnect: if the client disconnects before the end of the body.
    """
    rate = _RateFloor(request.receive)
    more = True
    while more:
        message = await rate.receive()
        form.feed(message.get("body", b""))
        more = message.get("more_body", False)
        # A message has only as many bytes as the socket had.
        if form.held_bytes >= PIECE_BYTES:
            await write(form.taken())
    if not form.complete:
        raise BadRequest("the form ends early; send its last boundary")
    if form.filename is None:
        raise BadRequest("the form has no part 'file'; add the file", param=FILE)
    await write(form.taken())


class _RateFloor:
    """Receives a body from a client that may not be too slow; time spent on writing is free."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._waited_s = 0.0
        self._bytes = 0

    async def receive(self) -> Message:
        """The next message. Raises BodyTimeout, ClientDisconnect."""
        while True:
            began_s = monotonic_s()
            try:
                async with timeout(RATE_WINDOW_S - self._waited_s):
                    message = await self._receive()
            except TimeoutError:
                self._end_window()
                continue
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self._bytes += len(message.get("body", b""))
            self._waited_s += monotonic_s() - began_s
            if self._waited_s >= RATE_WINDOW_S:
                self._end_window()
            return message

    def _end_window(self) -> None:
        if self._bytes < RATE_MIN * RATE_WINDOW_S:
            raise BodyTimeout(
                f"the file arrives at less than {RATE_MIN} bytes per second; use a faster"
                " connection, or split the file"
            )
        self._waited_s, self._bytes = 0.0, 0

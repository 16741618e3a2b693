"""The output items of a response: how they grow, and the events that tell it. Pure but for ids."""

import uuid
from abc import ABC, abstractmethod
from typing import Any

from services.gateway.http.logprobs import LogprobFormat
from services.gateway.serving.output import OutputPiece, ToldCount
from services.gateway.vocabulary.delta import ToolCallDelta

Event = dict[str, Any]
JsonObject = dict[str, Any]


class Items:
    """All items of a response, in the order of their beginning; one is open at a time."""

    def __init__(self, logprobs: LogprobFormat | None) -> None:
        """`logprobs`: how those of the text are written; None if they are not told."""
        self._logprobs = logprobs
        self._items: list[_Item] = []
        self._open: _Item | None = None
        # Notes of tokens whose text is still to come.
        self._notes: list[JsonObject] = []
        self._told = ToldCount("top_logprobs")

    def push(self, piece: OutputPiece) -> list[Event]:
        """The events of new output."""
        said, events = piece.said, list[Event]()
        if self._logprobs is not None:
            # The last event repeats all of them, in a stream, too.
            self._told.add(piece.logprobs)
            self._notes += self._logprobs.chat(piece.logprobs)["content"]
        if said.reasoning:
            events += self._grow(_Reasoning, said.reasoning)
            self._notes.clear()
        if said.content:
            events += self._grow(_Text, said.content)
        for call in said.tool_calls:
            events += self._call(call)
        return events

    def close(self, status: str) -> list[Event]:
        """The events that end what is open, for good."""
        if self._open is None:
            return []
        ended, self._open = self._open, None
        ended.status = status
        return ended.closing()

    def told(self, status: str) -> list[JsonObject]:
        """The items as they are; one that is open has that status."""
        if self._open is not None:
            self._open.status = status
        return [item.told() for item in self._items]

    def _grow(self, kind: "type[_Parted]", text: str) -> list[Event]:
        events = []
        if not isinstance(self._open, kind):
            events += self._start(kind(len(self._items)))
        assert isinstance(self._open, kind)
        notes, self._notes = self._notes, []
        return events + self._open.grow(text, notes)

    def _call(self, delta: ToolCallDelta) -> list[Event]:
        events = []
        if delta.id:
            events += self._start(_Call(len(self._items), delta.id, delta.name))
        assert isinstance(self._open, _Call), "a call goes on until it has ended"
        events += self._open.grow(delta.arguments)
        return events + (self.close("completed") if delta.ended else [])

    def _start(self, item: "_Item") -> list[Event]:
        events = self.close("completed")
        self._items.append(item)
        self._open = item
        return events + item.opening()


class _Item(ABC):
    """One item at a place in the output."""

    prefix: str

    def __init__(self, index: int) -> None:
        self._index = index
        self._texts: list[str] = []
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self.status = "in_progress"

    @property
    def text(self) -> str:
        """What it says so far."""
        return "".join(self._texts)

    @abstractmethod
    def told(self) -> JsonObject:
        """The item as it is."""

    @abstractmethod
    def opening(self) -> list[Event]:
        """The events of its beginning."""

    @abstractmethod
    def closing(self) -> list[Event]:
        """The events of its end."""

    def _item_event(self, kind: str) -> Event:
        return {
            "type": f"response.output_item.{kind}",
            "output_index": self._index,
            "item": self.told(),
        }

    def _event(self, kind: str, fields: JsonObject) -> Event:
        return {
            "type": f"response.{kind}",
            "item_id": self.id,
            "output_index": self._index,
            **fields,
        }


class _Parted(_Item):
    """An item with one part of text."""

    kind: str

    @abstractmethod
    def grow(self, text: str, notes: list[JsonObject]) -> list[Event]:
        """The event of new text, and of what is told of its tokens."""

    @abstractmethod
    def _part(self) -> JsonObject:
        """The part as it is."""

    def _fields(self) -> JsonObject:
        """What its events have beside the text."""
        return {"content_index": 0}

    def opening(self) -> list[Event]:
        part = {"content_index": 0, "part": self._part()}
        return [self._item_event("added"), self._event("content_part.added", part)]

    def closing(self) -> list[Event]:
        done = self._fields() | {"text": self.text}
        part = {"content_index": 0, "part": self._part()}
        return [
            self._event(f"{self.kind}.done", done),
            self._event("content_part.done", part),
            self._item_event("done"),
        ]

    def _content(self) -> list[JsonObject]:
        """Its parts; none before anything has been said."""
        return [self._part()] if self._texts else []


class _Text(_Parted):
    prefix, kind = "msg", "output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._notes: list[JsonObject] = []

    def grow(self, text: str, notes: list[JsonObject]) -> list[Event]:
        self._texts.append(text)
        self._notes += notes
        fields = {"content_index": 0, "delta": text, "logprobs": notes}
        return [self._event("output_text.delta", fields)]

    def told(self) -> JsonObject:
        fields = {"type": "message", "role": "assistant", "content": self._content()}
        return {"id": self.id, "status": self.status, **fields}

    def _part(self) -> JsonObject:
        fields = {"type": "output_text", "text": self.text, "annotations": []}
        return {**fields, "logprobs": list(self._notes)}

    def _fields(self) -> JsonObject:
        return super()._fields() | {"logprobs": list(self._notes)}


class _Reasoning(_Parted):
    prefix, kind = "rs", "reasoning_text"

    def grow(self, text: str, notes: list[JsonObject]) -> list[Event]:
        self._texts.append(text)
        return [self._event("reasoning_text.delta", {"content_index": 0, "delta": text})]

    def told(self) -> JsonObject:
        fields = {"type": "reasoning", "summary": [], "content": self._content()}
        return {"id": self.id, "status": self.status, **fields}

    def _part(self) -> JsonObject:
        return {"type": "reasoning_text", "text": self.text}


class _Call(_Item):
    prefix = "fc"

    def __init__(self, index: int, call_id: str, name: str) -> None:
        super().__init__(index)
        self._call_id = call_id
        self._name = name

    def grow(self, arguments: str) -> list[Event]:
        """The event of more arguments."""
        if not arguments:
            return []
        self._texts.append(arguments)
        return [self._event("function_call_arguments.delta", {"delta": arguments})]

    def told(self) -> JsonObject:
        fields = {"call_id": self._call_id, "name": self._name, "arguments": self.text}
        return {"type": "function_call", "id": self.id, "status": self.status, **fields}

    def opening(self) -> list[Event]:
        return [self._item_event("added")]

    def closing(self) -> list[Event]:
        done = {"name": self._name, "arguments": self.text}
        return [self._event("function_call_arguments.done", done), self._item_event("done")]

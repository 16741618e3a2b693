"""Builds the output items of OpenAI's Responses API, and their stream events.

Items are messages, reasoning and function calls. No I/O.
"""

import uuid
from abc import ABC, abstractmethod
from typing import Any

from services.gateway.http.logprobs import LogprobFormat
from services.gateway.serving.output import LogprobBudget, OutputPiece
from services.gateway.vocabulary.delta import ToolCallDelta

Event = dict[str, Any]
JsonObject = dict[str, Any]


class Items:
    """The output items of a response in order; only the last may be open."""

    def __init__(self, logprobs: LogprobFormat | None) -> None:
        """`logprobs`: format of the text's log probabilities; None: not requested."""
        self._logprobs = logprobs
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self.truncated = False  # whether a call is incomplete
        # Log probabilities of tokens whose text is still incomplete.
        self._pending_logprobs: list[JsonObject] = []
        self._budget = LogprobBudget("top_logprobs")

    def push(self, piece: OutputPiece) -> list[Event]:
        """Add output; return its events."""
        delta, events = piece.parsed, list[Event]()
        if self._logprobs is not None:
            # Count them for streams as well: the last event repeats all log probabilities.
            self._budget.add(piece.logprobs)
            self._pending_logprobs += self._logprobs.chat(piece.logprobs)["content"]
        if delta.reasoning:
            events += self._grow(_Reasoning, delta.reasoning)
            # Reasoning items have no log probabilities.
            self._pending_logprobs.clear()
        if delta.content:
            events += self._grow(_Text, delta.content)
        for call in delta.tool_calls:
            events += self._call(call)
        return events

    def close(self, status: str) -> list[Event]:
        """Close the open item; return its events."""
        if self._open is None:
            return []
        ended, self._open = self._open, None
        ended.status = status
        return ended.closing()

    def written(self, status: str) -> list[JsonObject]:
        """The items as JSON; `status`: of the open item."""
        if self._open is not None:
            self._open.status = status
        return [item.written() for item in self._items]

    def _grow(self, kind: "type[_TextItem]", text: str) -> list[Event]:
        events = []
        if not isinstance(self._open, kind):
            events += self._start(kind(len(self._items)))
        assert isinstance(self._open, kind)
        logprobs, self._pending_logprobs = self._pending_logprobs, []
        return events + self._open.grow(text, logprobs)

    def _call(self, delta: ToolCallDelta) -> list[Event]:
        events = []
        if delta.id:
            events += self._start(_Call(len(self._items), delta.id, delta.name))
        assert isinstance(self._open, _Call), "a call's item stays open until the call ends"
        events += self._open.grow(delta.arguments)
        if not delta.ended:
            return events
        self.truncated |= delta.truncated
        return events + self.close("incomplete" if delta.truncated else "completed")

    def _start(self, item: "_Item") -> list[Event]:
        events = self.close("completed")
        self._items.append(item)
        self._open = item
        return events + item.opening()


class _Item(ABC):
    """An output item."""

    prefix: str

    def __init__(self, index: int) -> None:
        self._index = index
        self._texts: list[str] = []
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self.status = "in_progress"

    @property
    def text(self) -> str:
        """The text so far, or the arguments of a call."""
        return "".join(self._texts)

    @abstractmethod
    def written(self) -> JsonObject:
        """The item as JSON, with its content so far."""

    @abstractmethod
    def opening(self) -> list[Event]:
        """The events that start the item."""

    @abstractmethod
    def closing(self) -> list[Event]:
        """The events that end the item."""

    def _item_event(self, kind: str) -> Event:
        return {
            "type": f"response.output_item.{kind}",
            "output_index": self._index,
            "item": self.written(),
        }

    def _event(self, kind: str, fields: JsonObject) -> Event:
        return {
            "type": f"response.{kind}",
            "item_id": self.id,
            "output_index": self._index,
            **fields,
        }


class _TextItem(_Item):
    """An item with a single text part."""

    kind: str

    @abstractmethod
    def grow(self, text: str, logprobs: list[JsonObject]) -> list[Event]:
        """Add text and its log probabilities; return their event."""

    @abstractmethod
    def _part(self) -> JsonObject:
        """The text part as JSON."""

    def _fields(self) -> JsonObject:
        """Fields of the closing event, without the text."""
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
        """The parts; empty before the first text."""
        return [self._part()] if self._texts else []


class _Text(_TextItem):
    prefix, kind = "msg", "output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._logprobs: list[JsonObject] = []

    def grow(self, text: str, logprobs: list[JsonObject]) -> list[Event]:
        self._texts.append(text)
        self._logprobs += logprobs
        fields = {"content_index": 0, "delta": text, "logprobs": logprobs}
        return [self._event("output_text.delta", fields)]

    def written(self) -> JsonObject:
        fields = {"type": "message", "role": "assistant", "content": self._content()}
        return {"id": self.id, "status": self.status, **fields}

    def _part(self) -> JsonObject:
        fields = {"type": "output_text", "text": self.text, "annotations": []}
        return {**fields, "logprobs": list(self._logprobs)}

    def _fields(self) -> JsonObject:
        return super()._fields() | {"logprobs": list(self._logprobs)}


class _Reasoning(_TextItem):
    prefix, kind = "rs", "reasoning_text"

    def grow(self, text: str, logprobs: list[JsonObject]) -> list[Event]:
        self._texts.append(text)
        return [self._event("reasoning_text.delta", {"content_index": 0, "delta": text})]

    def written(self) -> JsonObject:
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
        """Add arguments; return their event."""
        if not arguments:
            return []
        self._texts.append(arguments)
        return [self._event("function_call_arguments.delta", {"delta": arguments})]

    def written(self) -> JsonObject:
        fields = {"call_id": self._call_id, "name": self._name, "arguments": self.text}
        return {"type": "function_call", "id": self.id, "status": self.status, **fields}

    def opening(self) -> list[Event]:
        return [self._item_event("added")]

    def closing(self) -> list[Event]:
        done = {"name": self._name, "arguments": self.text}
        return [self._event("function_call_arguments.done", done), self._item_event("done")]

"""How the text of a chat's choice is read."""

from dataclasses import dataclass

from services.gateway.tools.format import Thinking, ToolFormat


@dataclass(frozen=True, slots=True)
class ChatForm:
    """How the text of a choice is read.

    `names` are the tools that may be called, none if nothing is looked for. `thinking` is where
    the text begins, None if reasoning is not parted. `marks` are special tokens that the text must
    show. Without `include_reasoning` the client does not get it.
    """

    tool_format: ToolFormat = ToolFormat.NONE
    names: frozenset[str] = frozenset()
    thinking: Thinking | None = None
    marks: frozenset[int] = frozenset()
    include_reasoning: bool = True

"""In which form a model writes tool calls and reasoning, found in its template and tokenizer."""

from collections.abc import Collection, Container
from dataclasses import dataclass
from enum import StrEnum

from services.gateway.tools import hermes, llama3_json, mistral, reasoning
from services.gateway.tools.event import Parser

AUTO = "auto"
"""Configured: look for it."""
# Found in templates whose calls are XML with one element for each argument.
_XML_ARGUMENTS = "<function="


class ToolFormat(StrEnum):
    """How tool calls are written."""

    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    NONE = "none"


class ReasoningFormat(StrEnum):
    """How reasoning is written: between the same marks, but with DEEPSEEK it is open from the
    beginning, unless the prompt has closed it."""

    DEEPSEEK = "deepseek"
    QWEN3 = "qwen3"
    NONE = "none"


def tool_format(
    configured: str, template: str, takes_tools: bool, tokens: Container[str]
) -> ToolFormat:
    """The configured format, or the model's.

    `template` is its source, `takes_tools` whether that looks at the request's tools; of one that
    does not, tools are told in the format of Hermes. `tokens`: those added to the vocabulary.
    """
    if configured != AUTO:
        return ToolFormat(configured)
    if mistral.OPEN in tokens or mistral.OPEN in template:
        return ToolFormat.MISTRAL
    if not takes_tools:
        return ToolFormat.HERMES
    if hermes.OPEN in template:
        return ToolFormat.NONE if _XML_ARGUMENTS in template else ToolFormat.HERMES
    if llama3_json.TAG in tokens and '"parameters"' in template:
        return ToolFormat.LLAMA3_JSON
    return ToolFormat.NONE


def reasoning_format(configured: str, template: str, tokens: Container[str]) -> ReasoningFormat:
    """The configured format, or the model's; see `tool_format`."""
    if configured != AUTO:
        return ReasoningFormat(configured)
    if reasoning.OPEN in tokens or reasoning.CLOSE in template:
        return ReasoningFormat.QWEN3
    return ReasoningFormat.NONE


def tool_parser(form: ToolFormat, names: Container[str]) -> Parser | None:
    """Finds calls of the tools `names`; None if the format has none."""
    match form:
        case ToolFormat.HERMES:
            return hermes.hermes_calls(names)
        case ToolFormat.LLAMA3_JSON:
            return llama3_json.Llama3JsonCalls(names)
        case ToolFormat.MISTRAL:
            return mistral.mistral_calls(names)
        case ToolFormat.NONE:
            return None


_TOOL_MARKS: dict[ToolFormat, tuple[str, ...]] = {
    ToolFormat.HERMES: (hermes.OPEN, hermes.CLOSE),
    ToolFormat.LLAMA3_JSON: (llama3_json.TAG,),
    ToolFormat.MISTRAL: (mistral.OPEN, mistral.ARGUMENTS, mistral.CALL_ID),
    ToolFormat.NONE: (),
}


def tool_marks(form: ToolFormat) -> Collection[str]:
    """What the parser must see, though it may be special tokens, which are not shown otherwise."""
    return _TOOL_MARKS[form]


def opening_mark(form: ToolFormat) -> str | None:
    """What every call begins with, None if there is no such mark."""
    match form:
        case ToolFormat.HERMES:
            return hermes.OPEN
        case ToolFormat.MISTRAL:
            return mistral.OPEN
        case _:
            return None


def reasoning_marks(form: ReasoningFormat) -> Collection[str]:
    """See `tool_marks`."""
    return () if form is ReasoningFormat.NONE else (reasoning.OPEN, reasoning.CLOSE)


class Thinking(StrEnum):
    """Where the output begins."""

    OPENED = "opened"
    """In the reasoning."""
    POSSIBLE = "possible"
    """Before it: the model may open it."""
    OVER = "over"
    """After it, or there is none."""


def thinking(form: ReasoningFormat, prompt: str) -> Thinking:
    """Where the output after the text `prompt` begins. Templates open and close reasoning, too."""
    if form is ReasoningFormat.NONE:
        return Thinking.OVER
    end = prompt.rstrip(" \t\r\n")
    if end.endswith(reasoning.OPEN):
        return Thinking.OPENED
    if end.endswith(reasoning.CLOSE):
        return Thinking.OVER
    return Thinking.OPENED if form is ReasoningFormat.DEEPSEEK else Thinking.POSSIBLE


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

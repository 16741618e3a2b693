"""Detects and selects the formats in which a model writes tool calls and reasoning."""

from collections.abc import Collection, Container
from dataclasses import dataclass
from enum import StrEnum

from services.gateway.tools import hermes, llama3_json, mistral, reasoning
from services.gateway.tools.event import Parser

AUTO = "auto"
"""Value of the options `tool_format` and `reasoning_format`: detect the format."""
# Part of templates whose calls are XML with an element for each argument.
_XML_ARGUMENTS = "<function="


class ToolFormat(StrEnum):
    """Format of tool calls."""

    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    NONE = "none"


class ReasoningFormat(StrEnum):
    """Format of reasoning. Both formats have the markers <think> and </think>.

    With DEEPSEEK, the output begins inside the reasoning unless the prompt has closed it.
    """

    DEEPSEEK = "deepseek"
    QWEN3 = "qwen3"
    NONE = "none"


def tool_format(
    configured: str, template: str, takes_tools: bool, tokens: Container[str]
) -> ToolFormat:
    """Return the configured format, or detect the model's.

    `template` is the template's source, and `takes_tools` whether it uses the request's tools. If
    not, the gateway describes the tools in the prompt, in the format of Hermes. `tokens`: tokens
    added to the vocabulary.
    """
    if configured != AUTO:
        return ToolFormat(configured)
    if mistral.OPEN in tokens or mistral.OPEN in template:
        return ToolFormat.MISTRAL
    if not takes_tools:
        return ToolFormat.HERMES
    if hermes.OPEN in template:
        # XML arguments between the markers of Hermes are an unsupported format.
        return ToolFormat.NONE if _XML_ARGUMENTS in template else ToolFormat.HERMES
    if llama3_json.TAG in tokens and '"parameters"' in template:
        return ToolFormat.LLAMA3_JSON
    return ToolFormat.NONE


def reasoning_format(configured: str, template: str, tokens: Container[str]) -> ReasoningFormat:
    """Return the configured format, or detect the model's; see `tool_format`."""
    if configured != AUTO:
        return ReasoningFormat(configured)
    if reasoning.OPEN in tokens or reasoning.CLOSE in template:
        return ReasoningFormat.QWEN3
    return ReasoningFormat.NONE


def tool_parser(form: ToolFormat, names: Container[str]) -> Parser | None:
    """Parser of calls of the tools `names`; None if the format has no calls."""
    match form:
        case ToolFormat.HERMES:
            return hermes.hermes_calls(names)
        case ToolFormat.LLAMA3_JSON:
            return llama3_json.Llama3JsonCalls(names)
        case ToolFormat.MISTRAL:
            return mistral.mistral_calls(names)
        case ToolFormat.NONE:
            return None


_TOOL_MARKERS: dict[ToolFormat, tuple[str, ...]] = {
    ToolFormat.HERMES: (hermes.OPEN, hermes.CLOSE),
    ToolFormat.LLAMA3_JSON: (llama3_json.TAG,),
    ToolFormat.MISTRAL: (mistral.OPEN, mistral.ARGUMENTS, mistral.CALL_ID),
    ToolFormat.NONE: (),
}


def tool_markers(form: ToolFormat) -> Collection[str]:
    """Markers that the detokenizer must not skip, even if they are special tokens."""
    return _TOOL_MARKERS[form]


def opening_marker(form: ToolFormat) -> str | None:
    """The marker that begins every call; None if the format has no such marker."""
    match form:
        case ToolFormat.HERMES:
            return hermes.OPEN
        case ToolFormat.MISTRAL:
            return mistral.OPEN
        case _:
            return None


def reasoning_markers(form: ReasoningFormat) -> Collection[str]:
    """Markers of reasoning that the detokenizer must not skip; see `tool_markers`."""
    return () if form is ReasoningFormat.NONE else (reasoning.OPEN, reasoning.CLOSE)


class Thinking(StrEnum):
    """Position of the beginning of the output relative to the reasoning."""

    OPENED = "opened"
    """Inside the reasoning: the prompt has opened it."""
    POSSIBLE = "possible"
    """Before the reasoning, which the model may open."""
    OVER = "over"
    """After the reasoning, or the model has none."""


def thinking(form: ReasoningFormat, prompt: str) -> Thinking:
    """Return where the output after `prompt` begins, since prompts may open or close reasoning."""
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
    """How the output of a choice is parsed.

    `names` are the tools that may be called; without names, calls are not parsed. `thinking` is
    where the output begins; None if reasoning is not separated. `markers` are ids of special tokens
    that the detokenizer must show to the parsers. Without `include_reasoning`, the client receives
    no reasoning.
    """

    tool_format: ToolFormat = ToolFormat.NONE
    names: frozenset[str] = frozenset()
    thinking: Thinking | None = None
    markers: frozenset[int] = frozenset()
    include_reasoning: bool = True

"""Detects and selects the formats in which a model writes tool calls and reasoning."""

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from services.gateway.tools import (
    deepseek,
    glm,
    harmony,
    hermes,
    kimi,
    llama3_json,
    mistral,
    qwen3_coder,
    reasoning,
)
from services.gateway.tools.element_calls import Types
from services.gateway.tools.event import Parser
from services.gateway.tools.reasoning import ReasoningMarks

AUTO = "auto"
"""Value of the options `tool_format` and `reasoning_format`: detect the format."""


class ToolFormat(StrEnum):
    """Format of tool calls, by the name that vLLM has for its parser."""

    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    DEEPSEEK_V32 = "deepseek_v32"
    DEEPSEEK_V4 = "deepseek_v4"
    GLM45 = "glm45"
    HARMONY = "harmony"
    HERMES = "hermes"
    KIMI_K2 = "kimi_k2"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    QWEN3_CODER = "qwen3_coder"
    NONE = "none"

    @classmethod
    def _missing_(cls, value: object) -> "ToolFormat | None":
        return TOOL_FORMAT_ALIASES.get(value) if isinstance(value, str) else None


TOOL_FORMAT_ALIASES = {
    "glm47": ToolFormat.GLM45,
    "openai": ToolFormat.HARMONY,
    "qwen3_xml": ToolFormat.QWEN3_CODER,
}
"""Further names of vLLM's parsers."""

ELEMENT_FORMATS = frozenset(
    {
        ToolFormat.DEEPSEEK_V32,
        ToolFormat.DEEPSEEK_V4,
        ToolFormat.GLM45,
        ToolFormat.QWEN3_CODER,
    }
)
"""Formats with an element for each argument, whose type is in the schema of the tool."""


class ReasoningFormat(StrEnum):
    """Format of reasoning. DEEPSEEK and QWEN3 have the markers <think> and </think>.

    With DEEPSEEK, the output begins inside the reasoning unless the prompt has closed it. HARMONY
    is the same format as that of tool calls.
    """

    DEEPSEEK = "deepseek"
    HARMONY = "harmony"
    MISTRAL = "mistral"
    QWEN3 = "qwen3"
    NONE = "none"

    @classmethod
    def _missing_(cls, value: object) -> "ReasoningFormat | None":
        return REASONING_FORMAT_ALIASES.get(value) if isinstance(value, str) else None

    @property
    def marks(self) -> ReasoningMarks:
        """The markers around the reasoning."""
        match self:
            case ReasoningFormat.HARMONY:
                return harmony.MARKS
            case ReasoningFormat.MISTRAL:
                return reasoning.MISTRAL_THINK
            case _:
                return reasoning.THINK


REASONING_FORMAT_ALIASES = {
    "deepseek_r1": ReasoningFormat.DEEPSEEK,
    "deepseek_v3": ReasoningFormat.QWEN3,
    "deepseek_v4": ReasoningFormat.QWEN3,
    "glm45": ReasoningFormat.QWEN3,
    "kimi_k2": ReasoningFormat.QWEN3,
    "openai_gptoss": ReasoningFormat.HARMONY,
}
"""Further names of vLLM's parsers."""


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
    for form, parts in _TEMPLATE_PARTS:
        if all(part in template for part in parts):
            return form
    if llama3_json.TAG in tokens and '"parameters"' in template:
        return ToolFormat.LLAMA3_JSON
    return ToolFormat.NONE


# Parts of the templates of each format, the most specific first.
_TEMPLATE_PARTS = (
    (ToolFormat.HARMONY, (harmony.CHANNEL, harmony.MESSAGE)),
    (ToolFormat.DEEPSEEK_V3, (deepseek.CALL, deepseek.JSON)),
    (ToolFormat.DEEPSEEK_V31, (deepseek.CALL,)),
    (ToolFormat.DEEPSEEK_V4, (deepseek.DSML, deepseek.V4_SECTION)),
    (ToolFormat.DEEPSEEK_V32, (deepseek.DSML, deepseek.V32_SECTION)),
    (ToolFormat.KIMI_K2, (kimi.CALL,)),
    (ToolFormat.GLM45, (glm.KEY,)),
    (ToolFormat.QWEN3_CODER, (hermes.OPEN, qwen3_coder.FUNCTION)),
    (ToolFormat.HERMES, (hermes.OPEN,)),
)


def reasoning_format(configured: str, template: str, tokens: Container[str]) -> ReasoningFormat:
    """Return the configured format, or detect the model's; see `tool_format`."""
    if configured != AUTO:
        return ReasoningFormat(configured)
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return ReasoningFormat.HARMONY
    if reasoning.MISTRAL_THINK.opening in tokens:
        return ReasoningFormat.MISTRAL
    if reasoning.OPEN in tokens or reasoning.CLOSE in template:
        return ReasoningFormat.QWEN3
    return ReasoningFormat.NONE


NO_TYPES: Types = {}


def tool_parser(form: ToolFormat, names: Container[str], types: Types = NO_TYPES) -> Parser | None:
    """Parser of calls of the tools `names`; None if the format has no calls.

    `types` of the arguments, for formats in `ELEMENT_FORMATS`; arguments without an entry may be of
    any type.
    """
    new_parser = _NEW_PARSERS.get(form)
    return None if new_parser is None else new_parser(names, types)


_NEW_PARSERS: Mapping[ToolFormat, Callable[[Container[str], Types], Parser]] = {
    ToolFormat.DEEPSEEK_V3: lambda names, _: deepseek.v3_calls(names),
    ToolFormat.DEEPSEEK_V31: lambda names, _: deepseek.v31_calls(names),
    ToolFormat.DEEPSEEK_V32: partial(deepseek.dsml_calls, deepseek.V32_SECTION),
    ToolFormat.DEEPSEEK_V4: partial(deepseek.dsml_calls, deepseek.V4_SECTION),
    ToolFormat.GLM45: glm.glm_calls,
    ToolFormat.HARMONY: lambda names, _: harmony.HarmonyParser(names),
    ToolFormat.HERMES: lambda names, _: hermes.hermes_calls(names),
    ToolFormat.KIMI_K2: lambda names, _: kimi.kimi_calls(names),
    ToolFormat.LLAMA3_JSON: lambda names, _: llama3_json.Llama3JsonCalls(names),
    ToolFormat.MISTRAL: lambda names, _: mistral.mistral_calls(names),
    ToolFormat.QWEN3_CODER: qwen3_coder.qwen3_coder_calls,
}
_DEEPSEEK_MARKERS = (
    *(deepseek.SECTION, deepseek.SECTION_END),
    *(deepseek.CALL, deepseek.SEPARATOR, deepseek.CALL_END),
)
# The first marker of a format begins its calls, except in formats of `_NO_OPENING`.
_TOOL_MARKERS: Mapping[ToolFormat, tuple[str, ...]] = {
    ToolFormat.DEEPSEEK_V3: _DEEPSEEK_MARKERS,
    ToolFormat.DEEPSEEK_V31: _DEEPSEEK_MARKERS,
    ToolFormat.DEEPSEEK_V32: (deepseek.opening(deepseek.V32_SECTION), deepseek.DSML),
    ToolFormat.DEEPSEEK_V4: (deepseek.opening(deepseek.V4_SECTION), deepseek.DSML),
    ToolFormat.GLM45: (
        *(hermes.OPEN, hermes.CLOSE),
        *(glm.KEY, glm.KEY_END, glm.VALUE, glm.VALUE_END),
    ),
    ToolFormat.HARMONY: harmony.MARKERS,
    ToolFormat.HERMES: (hermes.OPEN, hermes.CLOSE),
    ToolFormat.KIMI_K2: (
        *(kimi.SECTION, kimi.SECTION_END),
        *(kimi.CALL, kimi.ARGUMENTS, kimi.CALL_END),
    ),
    ToolFormat.LLAMA3_JSON: (llama3_json.TAG,),
    ToolFormat.MISTRAL: (mistral.OPEN, mistral.ARGUMENTS, mistral.CALL_ID),
    ToolFormat.QWEN3_CODER: (hermes.OPEN, hermes.CLOSE),
    ToolFormat.NONE: (),
}


def tool_markers(form: ToolFormat) -> Collection[str]:
    """Markers that the detokenizer must not skip, even if they are special tokens."""
    return _TOOL_MARKERS[form]


_NO_OPENING = frozenset({ToolFormat.HARMONY, ToolFormat.LLAMA3_JSON, ToolFormat.NONE})


def opening_marker(form: ToolFormat) -> str | None:
    """The marker that begins every call; None if the format has no such marker."""
    if form in _NO_OPENING:
        return None
    return _TOOL_MARKERS[form][0]


# Models of these formats may call tools within their reasoning, which the call then ends.
_ENDS_REASONING = frozenset(
    {
        *(ToolFormat.DEEPSEEK_V31, ToolFormat.DEEPSEEK_V32, ToolFormat.DEEPSEEK_V4),
        ToolFormat.KIMI_K2,
    }
)


def reasoning_ends(form: ToolFormat) -> Collection[str]:
    """Markers of calls that end the reasoning as its closing marker does."""
    marker = opening_marker(form)
    return () if marker is None or form not in _ENDS_REASONING else (marker,)


def reasoning_markers(form: ReasoningFormat) -> Collection[str]:
    """Markers of reasoning that the detokenizer must not skip; see `tool_markers`."""
    if form is ReasoningFormat.HARMONY:
        return harmony.MARKERS
    return () if form is ReasoningFormat.NONE else form.marks


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
    if end.endswith(form.marks.opening):
        return Thinking.OPENED
    if end.endswith(form.marks.closing):
        return Thinking.OVER
    return Thinking.OPENED if form is ReasoningFormat.DEEPSEEK else Thinking.POSSIBLE


@dataclass(frozen=True, slots=True)
class ChatForm:
    """How the output of a choice is parsed.

    `names` are the tools that may be called; without names, calls are not parsed. `types` are those
    of their arguments, for formats in `ELEMENT_FORMATS`. `thinking` is where the output begins;
    None if reasoning is not separated. Reasoning is between `marks`. `markers` are ids of special
    tokens that the detokenizer must show to the parsers. Without `include_reasoning`, the client
    receives no reasoning.
    """

    tool_format: ToolFormat = ToolFormat.NONE
    names: frozenset[str] = frozenset()
    thinking: Thinking | None = None
    markers: frozenset[int] = frozenset()
    include_reasoning: bool = True
    types: Types = field(default_factory=dict)
    marks: ReasoningMarks = reasoning.THINK

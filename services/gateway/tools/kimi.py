"""The format of Kimi K2: `functions.NAME:INDEX` and JSON between special tokens."""

from collections.abc import Container, Sequence

from services.gateway.tools.delimited_calls import DelimitedCalls
from services.gateway.tools.section_calls import SectionCalls, SectionTags

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
NAMESPACE = "functions."


def _call_of(header: Sequence[str]) -> tuple[str, str]:
    """Name and id; the chat template shows ids, and the model numbers them through the chat."""
    (call_id,) = header
    name, _, number = call_id.rpartition(":")
    return (name if number.isdecimal() else call_id).removeprefix(NAMESPACE), call_id


_TAGS = SectionTags(CALL, (ARGUMENTS,), _call_of, (CALL_END,), SECTION_END)


def kimi_calls(names: Container[str]) -> DelimitedCalls:
    """Parser of calls of the tools `names`."""
    return DelimitedCalls(SECTION, "", lambda index: SectionCalls(_TAGS, names, index))

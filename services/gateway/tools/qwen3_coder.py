"""The format of Qwen3-Coder and Qwen3.5: `<tool_call><function=NAME><parameter=KEY>…`."""

from collections.abc import Container

from services.gateway.tools.delimited_calls import DelimitedCalls
from services.gateway.tools.element_calls import ElementCalls, ElementTags, Types
from services.gateway.tools.hermes import CLOSE, OPEN

FUNCTION = "<function="
TAGS = ElementTags(
    call=FUNCTION,
    name_end=">",
    argument="<parameter=",
    key_ends={">": None},
    value="",
    value_end="</parameter>",
    call_end="</function>",
    section_end=CLOSE,
    padded=True,
)


def qwen3_coder_calls(names: Container[str], types: Types) -> DelimitedCalls:
    """Parser of calls of the tools `names`, whose arguments have the given types."""
    return DelimitedCalls(OPEN, "", lambda index: ElementCalls(TAGS, names, types, index))

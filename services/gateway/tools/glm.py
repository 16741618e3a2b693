"""The format of GLM 4.5 and later: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>…`."""

from collections.abc import Container

from services.gateway.tools.delimited_calls import DelimitedCalls
from services.gateway.tools.element_calls import ElementCalls, ElementTags, Types
from services.gateway.tools.hermes import CLOSE, OPEN

KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
TAGS = ElementTags(
    call="",
    name_end="",
    argument=KEY,
    key_ends={KEY_END: None},
    value=VALUE,
    value_end=VALUE_END,
    call_end=CLOSE,
    section_end=CLOSE,
)


def glm_calls(names: Container[str], types: Types) -> DelimitedCalls:
    """Parser of calls of the tools `names`, whose arguments have the given types."""
    return DelimitedCalls(OPEN, "", lambda index: ElementCalls(TAGS, names, types, index))

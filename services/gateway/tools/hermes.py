"""The format of Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from collections.abc import Container

from services.gateway.tools.call_list import CallList
from services.gateway.tools.delimited_calls import DelimitedCalls

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def hermes_calls(names: Container[str]) -> DelimitedCalls:
    """Parser of calls of the tools `names`: each pair of markers encloses a call or a list."""
    return DelimitedCalls(OPEN, CLOSE, lambda index: CallList(names, index))

"""The formats of DeepSeek: JSON between special tokens in V3 and V3.1, elements from V3.2 on."""

from collections.abc import Container, Sequence

from services.gateway.tools.argument_types import ONLY_STRING
from services.gateway.tools.delimited_calls import DelimitedCalls
from services.gateway.tools.element_calls import ElementCalls, ElementTags, Types
from services.gateway.tools.section_calls import SectionCalls, SectionTags

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
JSON, JSON_END = "```json", "```"
DSML = "｜DSML｜"
"""Token in all tags from V3.2 on."""
V32_SECTION, V4_SECTION = "function_calls", "tool_calls"


def _last_name(header: Sequence[str]) -> tuple[str, str]:
    return header[-1], ""


# In V3 the type of the call, "function", precedes the name.
_V3_TAGS = SectionTags(CALL, (SEPARATOR, JSON), _last_name, (JSON_END, CALL_END), SECTION_END)
_V31_TAGS = SectionTags(CALL, (SEPARATOR,), _last_name, (CALL_END,), SECTION_END)


def v3_calls(names: Container[str]) -> DelimitedCalls:
    """Parser of calls of the tools `names`: `function<｜tool▁sep｜>NAME`, and JSON in a fence."""
    return DelimitedCalls(SECTION, "", lambda index: SectionCalls(_V3_TAGS, names, index))


def v31_calls(names: Container[str]) -> DelimitedCalls:
    """Parser of calls of the tools `names`: `NAME<｜tool▁sep｜>{…}`."""
    return DelimitedCalls(SECTION, "", lambda index: SectionCalls(_V31_TAGS, names, index))


def opening(section: str) -> str:
    """The tag that begins the calls of V3.2 (`V32_SECTION`) or V4 (`V4_SECTION`)."""
    return f"<{DSML}{section}>"


def dsml_calls(section: str, names: Container[str], types: Types) -> DelimitedCalls:
    """Parser of calls of the tools `names`: `<｜DSML｜invoke name="NAME">…` in `section`."""
    tags = ElementTags(
        call=f'<{DSML}invoke name="',
        name_end='">',
        argument=f'<{DSML}parameter name="',
        key_ends={'" string="true">': ONLY_STRING, '" string="false">': None},
        value="",
        value_end=f"</{DSML}parameter>",
        call_end=f"</{DSML}invoke>",
        section_end=f"</{DSML}{section}>",
    )
    return DelimitedCalls(
        opening(section), "", lambda index: ElementCalls(tags, names, types, index)
    )

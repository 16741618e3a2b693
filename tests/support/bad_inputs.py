"""Inputs that every API refuses: the rows Prompt and Sampling of the table of bad inputs.

Values are fields of the HTTP API. An API that cannot express a value skips its row: a protobuf
number, for example, cannot be a string.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
# Names of the models of tests/support/byte_tokenizer.py behind tests/support/gateway.py.
VOCABULARY = 259
CONTEXT = 256


@dataclass(frozen=True, slots=True)
class BadInput:
    """Fields that override those of a valid body, and what the error mentions.

    `endpoint` is "chat" or "completion"; `absent` is a field to leave out. `needs_model`: detected
    only by a gateway that has loaded the model's folder.
    """

    endpoint: str
    fields: dict[str, Any]
    param: str | None
    status: int = 400
    absent: str | None = None
    needs_model: bool = False

    @property
    def body(self) -> dict[str, Any]:
        """The complete request body."""
        good = CHAT if self.endpoint == "chat" else COMPLETION
        return {name: value for name, value in good.items() if name != self.absent} | self.fields

    @property
    def name(self) -> str:
        """A short name for the test's id."""
        shown = ",".join(f"{name}={value!a:.24}" for name, value in self.fields.items())
        return f"{self.endpoint}:{shown or f'no {self.absent}'}"


# Fields common to all bodies. Below: values out of range for their field.
BOTH: dict[str, list[Any]] = {
    "model": [None, 1, "", "x" * 513],
    "max_tokens": [-1, 1.5, 1.0, "5", True, 2**31, 2**63, [], {}],
    "min_tokens": [-1, 1.5, "1", True],
    "n": [0, -1, 129, 1_000_000, 1.5, True, "1"],
    "best_of": [0, 2, -1, True, "1"],
    "temperature": [-0.1, 2.1, 1e308, "1", True, [1]],
    "top_p": [0, 0.0, 1.01, -1, "0.5", True],
    "top_k": [-2, 0.5, "1", True, 2**31],
    "min_p": [-1, -0.01, 1.01, "0.1", True],
    "presence_penalty": [2.01, -2.01, "0", True, 1e308],
    "frequency_penalty": [2.01, -2.01, "0", True],
    "repetition_penalty": [0, -1, 1e-45, 0.0099, 2.01, "1", True],
    "seed": [2**63, 2**64, -(2**63) - 1, 1.5, "1", True],
    "stop": [
        *(["a"] * 17, "", [""], ["a", ""], "x" * 257, "x" * 2**20),
        *(1, [1], {}, "\ud800", [["a"]]),
    ],
    "stop_token_ids": [[-1], [1.5], [True], ["1"], [2**31], list(range(257)), 5, "5"],
    "bad_words": ["", [""], [1], {}, ["x" * 257], ["a"] * 129, "\ud800"],
    "allowed_token_ids": [[], [-1], [1.5], [True], ["1"], [2**31], 5, "5"],
    "logit_bias": [
        *({"abc": 1}, {"-1": 1}, {"1.5": 1}, {"": 1}, {"\u0661": 1}, {"1": 1, "01": 1}),
        *({"5": 101}, {"5": -101}, {"5": "1"}, {"5": True}, {"5": None}, {"99999999999": 1}),
        *([], "x", {str(number): 1 for number in range(10_000)}),
    ],
    "ignore_eos": ["yes", 1, 0],
    "include_stop_str_in_output": ["yes", 1],
    "skip_special_tokens": ["no", 0],
    "add_special_tokens": ["no", 0],
    "truncate_prompt_tokens": [0, -2, 1.5, "5", True, 2**31],
    "truncation_side": ["middle", 1],
    "prompt_logprobs": [-1, 21, 1.5, True, "1"],
    "return_token_ids": ["yes", 1],
    "return_tokens_as_token_ids": ["yes", 1],
    "cache_salt": ["", "x" * 129, 1],
    "request_id": ["", "x" * 129, "a b", "a\r\nb", "\u00e9", 1],
    "service_tier": ["gold", 1],
    "priority": [1.5, "1", True, 2**31],
    "slo_class": ["gold", 1],
    "slo": [{"ttft_ms": 0}, {"tpot_ms": 3_600_001}, {"ttft_ms": "1"}, {"odd": 1}, 5],
    "stream": ["yes", 1, "true"],
    "stream_options": [{}, {"include_usage": True}, "usage", {"include_usage": "yes"}],
}
_DEEP: Any = {}
for _ in range(80):
    _DEEP = {"not": _DEEP}
SCHEMAS: list[Any] = [
    *({"$ref": "https://example.org/schema"}, {"enum": list(range(1001))}, _DEEP),
    *({"description": "x" * 2**16}, {"description": "\ud800"}, {"x-guidance": 1}, [], "{}"),
]
BOTH |= {
    "response_format": [
        *("json", 7, [], {}, {"type": "xml"}, {"type": 1}, {"type": "json_schema"}),
        {"type": "json_schema", "json_schema": {"name": 1, "schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": "yes"}},
        *({"type": "json_schema", "json_schema": {"name": "n", "schema": s}} for s in SCHEMAS),
    ],
    "structured_outputs": [
        *("a", {}, {"odd": 1}, {"regex": "a", "choice": ["a"]}, {"regex": ""}, {"regex": 1}),
        *({"json": "{"}, {"json": 1}, {"choice": []}, {"choice": ["a"] * 1001}),
        *({"choice": [""]}, {"grammar": "x" * (2**16 + 1)}, {"json_object": "yes"}),
    ],
    "guided_json": [1, "{", [], *SCHEMAS[:6]],
    "guided_regex": ["", 1, "x" * (2**16 + 1)],
    "guided_choice": [[], "a", [1], [""]],
    "guided_grammar": ["", 1],
}


def tool(name: Any = "f", **more: Any) -> dict[str, Any]:
    """A tool."""
    return {"type": "function", "function": {"name": name, **more}}


CHAT_ONLY: dict[str, list[Any]] = {
    "tools": [
        *("x", 5, [1], [{}], [{"type": "function"}], [{"type": "custom", "custom": {}}]),
        *([tool(1)], [tool("")], [tool("a b")], [tool("x" * 65)], [tool(), tool()]),
        *([tool(parameters=1)], [tool(description=1)], [tool(strict="yes")]),
        *([tool(f"f{number}") for number in range(1000)], [tool(parameters=_DEEP)]),
    ],
    "tool_choice": [
        *("required", "any", 5, {}, {"type": "function"}, {"type": "function", "function": {}}),
        *({"type": "function", "function": {"name": "absent"}}, {"type": "allowed_tools"}),
    ],
    "parallel_tool_calls": ["yes", 1],
    "reasoning_effort": ["extreme", 1],
    "enable_thinking": ["yes", 1],
    "include_reasoning": ["no", 0],
    "chat_template": ["{{ messages }}"],
    "chat_template_kwargs": [
        *("x", {"tokenize": True}, {"chat_template": "x"}, {"messages": []}, {"tools": []}),
        *({"enable_thinking": "no"}, {"date_string": "x" * 65}, {"thinking_budget": True}),
    ],
    "max_tokens": [0],
    "max_completion_tokens": [0, -1, 1.5, "5", True, 2**31],
    "logprobs": [-1, 21, 5, "yes"],
    "top_logprobs": [-1, 21, 5, 1.5, True],
    "add_generation_prompt": ["no", 0],
    "continue_final_message": [True, "yes"],
}
COMPLETION_ONLY: dict[str, list[Any]] = {
    "max_tokens": [0],
    "logprobs": [-1, 21, 1.5, True, "1"],
    "echo": ["yes", 1],
    "suffix": ["x"],
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES: list[Any] = [
    None,
    [],
    "hi",
    [1],
    [{}],
    [{"role": "user"}],
    [{"content": "x"}],
    [{"role": "wizard", "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": [{"type": "odd"}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "text", "text": 1}]}],
    [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}],
    [{"role": "user", "content": [5]}],
    [{"role": "user", "content": "lone \ud800"}],
    [{"role": "tool", "content": "x", "tool_call_id": "1"}],
    [{"role": "tool", "content": "x"}],
    [{"role": "user", "content": "x", "tool_call_id": "1"}],
    [{"role": "assistant", "content": None}],
    [{"role": "assistant", "content": None, "tool_calls": []}],
    [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
    [{"role": "assistant", "content": None, "tool_calls": [1]}],
    [{"role": "user", "content": "x", "tool_calls": [CALL]}],
    [{"role": "assistant", "content": None, "tool_calls": [CALL | {"id": ""}]}],
    [{"role": "assistant", "content": None, "tool_calls": [CALL | {"type": "odd"}]}],
    [{"role": "assistant", "content": None, "tool_calls": [CALL] * 129}],
    [{"role": "function", "name": "f", "content": "x"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}],
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
    [{"role": "user", "content": [{"type": "file", "file": {}}]}],
]
PROMPTS: list[Any] = [
    *(None, [], [[]], [1, "a"], [True], [1.5], [-1], [2**31], ["a", [1], 2]),
    *({"a": 1}, 5, ["a"] * 65, "lone \ud800", [[1], []], [None], [[[1]]]),
]
# Contradictory fields, and the field that the error names.
TOGETHER: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ("chat", {"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ("chat", {"max_completion_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ("chat", {"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
    ("chat", {"n": 2, "best_of": 1}, "best_of"),
    ("chat", {"n": 2, "best_of": 3}, "best_of"),
    ("chat", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ("chat", {"continue_final_message": True, "add_generation_prompt": True},
     "continue_final_message"),
    ("chat", {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ("chat", {"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ("chat", {"tools": [tool()], "tool_choice": {"type": "function",
     "function": {"name": "g"}}}, "tool_choice"),
    ("completion", {"prompt": ["a"] * 64, "n": 3}, "n"),
    ("completion", {"prompt": ["a"] * 2, "n": 65}, "n"),
    ("completion", {"max_tokens": 0, "echo": False}, "max_tokens"),
]  # fmt: skip
# Compiles forever with growing memory: whether time or memory runs out first depends on the
# machine.
BOMB = {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941)]}
# Exceeds the CPU time of a check several times, but not its memory.
SLOW = {"type": "object", "properties": {str(n): {} for n in range(4000)}}
# Errors that only a gateway with the model's folder detects.
MODEL: list[tuple[str, dict[str, Any], str, int]] = [
    ("chat", {"model": "other"}, "model", 404),
    ("chat", {"model": "../x"}, "model", 404),
    ("completion", {"prompt": ""}, "prompt", 400),
    ("completion", {"prompt": ["a", ""]}, "prompt", 400),
    ("completion", {"prompt": [VOCABULARY]}, "prompt", 400),
    ("completion", {"prompt": [2**31 - 1]}, "prompt", 400),
    ("chat", {"stop_token_ids": [VOCABULARY]}, "stop_token_ids", 400),
    ("chat", {"allowed_token_ids": [1, VOCABULARY]}, "allowed_token_ids", 400),
    ("chat", {"logit_bias": {str(VOCABULARY): 1}}, "logit_bias", 400),
    ("chat", {"top_k": VOCABULARY + 1}, "top_k", 400),
    ("completion", {"prompt": "x" * (CONTEXT + 1)}, "prompt", 400),
    ("completion", {"prompt": "x" * (CONTEXT - 2), "max_tokens": 3}, "prompt", 400),
    ("completion", {"prompt": "x" * 1_000_000}, "prompt", 400),
    ("completion", {"max_tokens": CONTEXT}, "prompt", 400),
    ("completion", {"max_tokens": 2**31 - 1}, "prompt", 400),
    ("completion", {"min_tokens": 17}, "min_tokens", 400),
    ("chat", {"messages": [{"role": "user", "content": "x" * 300}]}, "messages", 400),
    ("chat", {"messages": [{"role": "user", "content": "x" * 90_000}]}, "messages", 400),
    ("chat", {"bad_words": [f"{n}" + "xyz" * 80 for n in range(20)]}, "bad_words", 400),
    ("chat", {"service_tier": "flex", "priority": -1}, "service_tier", 400),
    ("chat", {"guided_regex": "(a"}, "guided_regex", 400),
    ("completion", {"guided_regex": "(" * 10_000}, "guided_regex", 400),
    ("chat", {"guided_json": {"type": "str"}}, "guided_json", 400),
    ("chat", {"guided_json": {"$ref": "#"}}, "guided_json", 400),
    ("completion", {"structured_outputs": {"grammar": "start: b"}}, "structured_outputs", 400),
    ("completion", {"guided_json": BOMB}, "guided_json", 400),
    ("chat", {"slo_class": "batch", "slo": {"ttft_ms": 5}}, "slo", 400),
]


def bad_inputs() -> Iterator[BadInput]:
    """All bad inputs."""
    for endpoint, more in (("chat", CHAT_ONLY), ("completion", COMPLETION_ONLY)):
        for fields in (BOTH, more):
            for name, values in fields.items():
                yield from (BadInput(endpoint, {name: value}, name) for value in values)
    yield from (BadInput("chat", {"messages": value}, "messages") for value in MESSAGES)
    yield from (BadInput("completion", {"prompt": value}, "prompt") for value in PROMPTS)
    yield BadInput("chat", {}, "messages", absent="messages")
    yield BadInput("completion", {}, "prompt", absent="prompt")
    yield BadInput("chat", {}, "model", absent="model")
    for endpoint, both, param in TOGETHER:
        yield BadInput(endpoint, both, param)
    for endpoint, both, param, status in MODEL:
        yield BadInput(endpoint, both, param, status, needs_model=True)

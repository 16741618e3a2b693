"""What the tours ask: short, so that a small model on a busy machine answers within seconds."""

from typing import Any

QUESTION = "What is the capital of France?"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
PROMPT = "The capital of France is"
TOKENS = 12

LONG_TOKENS = 2000
"""What a call that is to be cancelled asks for, with `ignore_eos`: half a minute and more."""

UNKNOWN_MODEL = "no-such-model"

CITIES = ["Paris", "London", "Rome"]
# Bounded, so that every answer ends by itself within ANSWER_TOKENS.
CITY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": CITIES},
        "millions": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "millions"],
    "additionalProperties": False,
}
CITY_FORM: Any = {
    "type": "json_schema",
    "json_schema": {"name": "city", "strict": True, "schema": CITY_SCHEMA},
}
CITY_QUESTION = "Name the capital of France and how many million people live there, as JSON."
CITY_MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": CITY_QUESTION}]
ANSWER_TOKENS = 64

TOOL_NAME = "get_weather"
TOOL_DESCRIPTION = "Tells the weather of a city."
TOOL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": CITIES},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": TOOL_DESCRIPTION,
        "parameters": TOOL_SCHEMA,
    },
}
TOOL_CHOICE: Any = {"type": "function", "function": {"name": TOOL_NAME}}
TOOL_MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL_RESULT = '{"sky": "clear", "degrees": 21}'

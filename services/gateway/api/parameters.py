"""OpenAI parameters that the request models do not have: harmless, not supported yet, unknown."""

from collections.abc import Iterable, Mapping
from typing import Any

from services.gateway.errors import InvalidRequest, Unsupported

# Fields that change nothing in the output here, whatever their value.
HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Fields that are known but not served yet, with the values (besides null) that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0, 0.0),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0, 0.0),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def known_fields(data: Mapping[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    """`data` without the fields that ask for nothing.

    Raises:
        Unsupported: if a field asks for something that is not served yet.
        InvalidRequest: if a field is unknown.
    """
    kept = {}
    names = frozenset(fields)
    for name, value in data.items():
        if name in names:
            kept[name] = value
        elif name in UNSUPPORTED:
            if value is not None and not any(_same(value, none) for none in UNSUPPORTED[name]):
                raise Unsupported(
                    f"'{name}' with this value is not supported yet; leave it out", param=name
                )
        elif name not in HARMLESS:
            shown = name[:64].encode("ascii", "backslashreplace").decode()
            raise InvalidRequest(
                f"unknown parameter '{shown}'; correct its name or leave it out",
                param=shown,
                code="unknown_parameter",
            )
    return kept


def _same(value: Any, other: Any) -> bool:
    """Equal and of one type: True is not 1."""
    return type(value) is type(other) and bool(value == other)

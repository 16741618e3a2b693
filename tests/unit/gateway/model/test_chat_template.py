"""Chat templates render in a sandbox."""

import json
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.gateway.model.template import ChatTemplate, load_template
from services.gateway.vocabulary.errors import BadRequest

MESSAGES = [{"role": "user", "content": "a <b> & 'c'"}]


def render(source: str, **tokens: str) -> str:
    """The text of `source` for MESSAGES."""
    return ChatTemplate(source, tokens).render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>a <b> & 'c'"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{{ messages[0]['content'] | tojson }}", "\"a <b> & 'c'\""),
        ('{{ {"a": 1} | tojson(indent=2) }}', '{\n  "a": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% if tools is none and documents is none %}none{% endif %}", "none"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_what_templates_use(source: str, text: str) -> None:
    assert render(source, bos_token="<s>") == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[5].content.x }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ undefined_thing() }}",
    ],
)
def test_what_a_template_refuses_is_the_clients_error(source: str) -> None:
    with pytest.raises(BadRequest, match="chat template refuses") as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        render("{% if %}")


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert load_template(tmp_path) is None
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "one", "eos_token": {"content": "</s>"}}))
    found = load_template(tmp_path)
    assert found is not None
    assert found.render([]) == "one"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "two"}]
    settings.write_text(json.dumps({"chat_template": named}))
    found = load_template(tmp_path)
    assert found is not None
    assert found.render([]) == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    found = load_template(tmp_path)
    assert found is not None
    assert found.render([]) == "three"


def test_settings_that_are_no_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer_config"):
        load_template(tmp_path)

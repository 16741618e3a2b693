"""Location of the chat template in a model folder."""

import json
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.gateway.model.template import load_template


def test_template_lookup_order(tmp_path: Path) -> None:
    assert load_template(tmp_path) is None
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "one", "eos_token": {"content": "</s>"}}))
    template = load_template(tmp_path)
    assert template is not None
    assert template.source == "one"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "two"}]
    settings.write_text(json.dumps({"chat_template": named}))
    template = load_template(tmp_path)
    assert template is not None
    assert template.source == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    template = load_template(tmp_path)
    assert template is not None
    assert template.source == "three"


def test_invalid_template_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer_config"):
        load_template(tmp_path)

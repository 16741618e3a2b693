"""The collector's configuration names only existing parts."""

import re
from pathlib import Path

import yaml

from services.common import genai

PATH = (
    Path(__file__).resolve().parents[3] / "deploy" / "observability" / "collector" / "config.yaml"
)


def test_every_part_of_the_pipeline_is_configured_and_used() -> None:
    config = yaml.safe_load(PATH.read_text())
    (pipeline,) = config["service"]["pipelines"].values()
    for kind in ("receivers", "processors", "exporters"):
        assert sorted(pipeline[kind]) == sorted(config[kind])
    assert sorted(config["service"]["extensions"]) == sorted(config["extensions"])
    # The processor that limits memory comes first, the one that makes batches last.
    assert (pipeline["processors"][0], pipeline["processors"][-1]) == ("memory_limiter", "batch")


def test_tail_sampling_rules_match_span_attributes() -> None:
    policies = yaml.safe_load(PATH.read_text())["processors"]["tail_sampling"]["policies"]
    by_type = {policy["type"]: policy for policy in policies}
    assert by_type["status_code"]["status_code"]["status_codes"] == ["ERROR"]
    rule = by_type["string_attribute"]["string_attribute"]
    assert rule["key"] == genai.CHANGE_CAUSE
    assert all(re.fullmatch(rule["values"][0], cause) for cause in ("overload", "member_lost"))

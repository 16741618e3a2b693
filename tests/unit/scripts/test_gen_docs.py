"""Pages generated from the code: complete and up to date."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gen_docs
import pytest
import vllm_flags
from fields_reference import ENDPOINTS, fields_of
from metrics_reference import Entry, gateway, reference
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from services.common.setting import settings_of
from services.gateway.api.parameters import NAMES_LISTED_MAX
from services.gateway.serving.output import LOGPROB_MIN
from services.gateway.serving.service_policy import SLO_HEADERS
from tideserve.cli.cluster_options import CONFIGS, SECTIONS, ClusterOptions

ROOT = Path(__file__).resolve().parents[3]


def test_committed_pages_match_the_generated_ones() -> None:
    assert gen_docs.outdated(ROOT) == []


def test_a_page_that_is_missing_or_edited_is_named(tmp_path: Path) -> None:
    assert gen_docs.outdated(tmp_path) == list(gen_docs.PAGES)
    gen_docs.write(tmp_path)
    assert gen_docs.outdated(tmp_path) == []
    page = tmp_path / "docs" / "configuration.md"
    page.write_text(page.read_text().replace("1024", "1025", 1))
    assert gen_docs.outdated(tmp_path) == ["docs/configuration.md"]


def test_a_generated_page_is_marked_in_its_first_line() -> None:
    pages = {name for name in gen_docs.PAGES if name.endswith(".md")} - {"docs/grpc.md"}
    first = {name: (ROOT / name).read_text().splitlines()[0] for name in pages}
    assert set(first.values()) == {gen_docs.GENERATED.strip()}, first


def test_each_vllm_flag_is_listed_once_with_an_existing_setting() -> None:
    flags = [flag for flag, _, _ in vllm_flags.rows()]
    assert len(flags) == len(set(flags)) >= 60
    for unknown in ("--no-such-flag", "worker: no_such_key", "services: queue_limit"):
        with pytest.raises(LookupError):
            vllm_flags.setting_text(unknown)
    with pytest.raises(LookupError):
        vllm_flags.checked_note("`--api-keys` is an option of `tideserve up` only")


def test_every_option_has_a_row_with_its_variable() -> None:
    text = gen_docs.configuration()
    for config in CONFIGS.values():
        for key, option in settings_of(config).items():
            row = f"| `{key}` | `TIDESERVE__{key.upper()}` | "
            assert (row in text) == ("expert" not in option.metadata), key
    for key, option in settings_of(ClusterOptions).items():
        flag = f"| `--{key.replace('_', '-')}` | `{key}` | "
        assert (flag in text) == (key not in SECTIONS and "expert" not in option.metadata)
    assert "| `queue_limit` | `TIDESERVE__QUEUE_LIMIT` | 1 to 1000000 | 1024 | " in text
    assert "| `queue_limit` (scheduler) |" in text
    assert "| `lease_ttl_s` (all) |" in text


def without_labels(entries: Iterable[Entry]) -> list[str]:
    """Gateway metrics whose declared labels differ from those of their entries, by name. An entry
    reads its labels from samples, so an unused metric lacks them.
    """
    labels = {entry.name: set(entry.labels) for entry in entries}
    missing = []
    for collector, names in gateway().registry._collector_to_names.items():
        declared = set(getattr(collector, "_labelnames", ()))
        missing += [name for name in names if name in labels and labels[name] != declared]
    return sorted(missing)


def test_every_metric_of_the_gateway_has_its_declared_labels() -> None:
    entries = reference()["gateway"]
    assert without_labels(entries) == []
    (limit,) = [entry for entry in entries if entry.name == "tideserve_gateway_quota_limit"]
    assert limit.labels == ("owner", "limit")
    bare = [dataclasses.replace(entry, labels=()) if entry is limit else entry for entry in entries]
    assert without_labels(bare) == [limit.name]


def test_handwritten_tables_match_the_code() -> None:
    text = gen_docs.fields()
    for fact in (f"up to {NAMES_LISTED_MAX} of", f"{LOGPROB_MIN:g} stands for", *SLO_HEADERS):
        assert fact in text, fact


def test_a_pipe_in_a_cell_is_escaped() -> None:
    text = gen_docs.table(("a", "b"), [("x|y", "z")])
    assert text == "| a | b |\n| --- | --- |\n| x\\|y | z |\n"


# Fields of vLLM's requests that OpenAI's lack; internals of its servers are left out.
OF_VLLM = """
    add_special_tokens allowed_token_ids bad_words cache_salt ignore_eos
    include_stop_str_in_output kv_transfer_params length_penalty logits_processors min_p min_tokens
    priority prompt_logprobs repetition_penalty request_id return_token_ids
    return_tokens_as_token_ids skip_special_tokens spaces_between_special_tokens stop_token_ids
    structured_outputs top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs
"""
OF_VLLM_CHATS = """
    add_generation_prompt chat_template chat_template_kwargs continue_final_message documents echo
    include_reasoning media_io_kwargs mm_processor_kwargs
"""


@pytest.mark.parametrize(
    ("endpoint", "of_openai", "of_vllm"),
    [
        ("/v1/chat/completions", chat_params.CompletionCreateParamsBase, OF_VLLM + OF_VLLM_CHATS),
        ("/v1/completions", completion_params.CompletionCreateParamsBase, OF_VLLM),
    ],
)
def test_every_client_field_has_a_row(endpoint: str, of_openai: Any, of_vllm: str) -> None:
    rows = {row.name: row for row in fields_of(endpoint)}
    known = {*of_openai.__annotations__, "stream", *of_vllm.split()}
    # Names of the standard library in the client's annotations are none.
    assert known <= rows.keys(), known - rows.keys()
    assert all(row.note and row.values for row in rows.values() if "messages" not in row.name)
    body, policy = ENDPOINTS[endpoint]
    assert not body.model_fields.keys() & (policy.ignored.keys() | policy.refused.keys())
    assert not policy.ignored.keys() & policy.refused.keys()


def test_values_are_rendered_as_text() -> None:
    rows = {row.name: row for row in fields_of("/v1/chat/completions")}
    assert rows["temperature"].values == "0 to 2"
    assert rows["top_p"].values == "above 0 to 1"
    assert rows["n"].values == "1 to 128, whole"
    assert rows["seed"].values == "-2^63 to 2^63 - 1, whole"
    assert rows["slo_class"].values == "interactive, standard, batch"
    assert rows["stop"].values == ("text, 1 to 256 characters, or list of texts, 0 to 16 of them")
    assert rows["logit_bias"].values == ("an object of up to 1024 token ids, each with -100 to 100")
    assert rows["use_beam_search"].values == "only `null` or `false`"
    assert rows["allowed_token_ids"].values == "list of token ids, at least 1"
    assert rows["stream_options.include_obfuscation"].effect == "ignored"
    assert (rows["slo.ttft_ms"].effect, rows["priority"].effect) == ("works", "works")

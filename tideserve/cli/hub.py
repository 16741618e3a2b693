"""Download a model from the Hugging Face hub, as data only."""

import re
from collections.abc import Callable
from pathlib import Path

from tideserve.cli.model_folder import DUMMY, ModelUnavailable

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TEXT_PATTERNS = ("*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt")
WEIGHT_PATTERNS = ("*.safetensors",)
# Subfolders hold other formats of the same weights; Mistral's consolidated file is a second copy.
IGNORED_PATTERNS = ("*/*", "consolidated*", "*.py", "*.bin")
ANSWER_TIMEOUT_S = 10.0


def download(
    hub_id: str,
    report: Callable[[str], None],
    load_format: str = "auto",
    folder: Path | None = None,
) -> Path:
    """The folder of `hub_id` in the hub's cache, or `folder`; downloaded if it is not there yet.

    Without a connection a complete earlier download is used. Raises `ModelUnavailable`.
    """
    # The hub's HTTP client, whose errors pass through it; a dependency of huggingface_hub.
    from httpx2 import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    report(f"Looking for {hub_id} on the model hub; a first download can take minutes.")
    patterns = TEXT_PATTERNS if load_format == DUMMY else TEXT_PATTERNS + WEIGHT_PATTERNS
    try:
        found = snapshot_download(
            hub_id,
            local_dir=folder,
            allow_patterns=list(patterns),
            ignore_patterns=list(IGNORED_PATTERNS),
            etag_timeout=ANSWER_TIMEOUT_S,
        )
    except GatedRepoError as error:
        raise ModelUnavailable(
            f"{hub_id} is only for accounts that have accepted its terms. Accept them on the"
            " model's page and set HF_TOKEN to your token."
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelUnavailable(
            f"The model hub has no model {hub_id} (or it is private), and there is no folder of"
            " that name here. Check the spelling, or set HF_TOKEN for a private model."
        ) from error
    except (LocalEntryNotFoundError, HTTPError, OSError) as error:
        raise ModelUnavailable(
            f"{hub_id} is not on this machine and the model hub cannot be reached"
            f" ({_first_line(error)}). Check the network, or pass a local folder as the model."
        ) from error
    return Path(found)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__

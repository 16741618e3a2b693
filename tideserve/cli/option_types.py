"""Types of options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from tideserve.cli.default import DEFAULT_URL

API_KEY_HELP = (
    "API key of the cluster, if required. Prefer the environment variable: other users can"
    " read command lines."
)
API_KEYS_HELP = "File of API keys with owners and limits; `tideserve key new` creates it."
CLUSTER_DIR_HELP = "Folder of logs and state."
CLUSTER_DIR_DEFAULT = "clusters/PORT in the tideserve cache"

Url = Annotated[
    str,
    typer.Option(
        envvar="TIDESERVE_URL",
        help="URL of the gateway; needed for another port or host.",
        # `make serve` prints the URL with /v1, which OpenAI clients need.
        callback=lambda url: url.rstrip("/").removesuffix("/v1"),
        show_default=DEFAULT_URL,
    ),
]
ApiKey = Annotated[str | None, typer.Option(envvar="TIDESERVE_API_KEY", help=API_KEY_HELP)]
ClusterDir = Annotated[
    Path | None, typer.Option(help=CLUSTER_DIR_HELP, show_default=CLUSTER_DIR_DEFAULT)
]
AdminUrl = Annotated[
    str | None,
    typer.Option(
        envvar="TIDESERVE_ADMIN_URL",
        help="URL of the gateway's admin port, such as http://127.0.0.1:8001.",
        show_default="from the folder of the local cluster at --url",
    ),
]
AdminKey = Annotated[
    str | None,
    typer.Option(
        envvar="TIDESERVE_ADMIN_KEY",
        help="Admin key of the cluster, if required. Prefer the environment variable: other users"
        " can read command lines.",
    ),
]

"""Options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

from tideserve.cli.default import DEFAULT_URL

API_KEY_HELP = (
    "API key of the cluster, if it has one. Prefer the environment variable: other users can"
    " read command lines."
)
API_KEYS_HELP = "File of keys with owners and limits; `tideserve key new` makes it."
CLUSTER_DIR_HELP = "Folder of logs and state."
CLUSTER_DIR_DEFAULT = "clusters/PORT in the tideserve cache"

Url = Annotated[
    str,
    typer.Option(
        envvar="TIDESERVE_URL",
        help="The gateway; needed when the cluster has another port or host.",
        # `make serve` prints the address with /v1, as OpenAI clients need.
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
        help="The gateway's admin port, such as http://127.0.0.1:8001.",
        show_default="from the folder of the local cluster at --url",
    ),
]
AdminKey = Annotated[
    str | None,
    typer.Option(
        envvar="TIDESERVE_ADMIN_KEY",
        help="Admin key of the cluster, if it has one; better in the environment, where other users"
        " do not see it.",
    ),
]

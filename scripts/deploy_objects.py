"""Kubernetes objects as `kustomize build` makes them, and the variants that the chart renders.

The tools come from this machine where it has them, else from the cache folder, where
`make check-deploy` puts them.
"""

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tideserve.cli.cache import cache_root

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
CPU_OVERLAY = DEPLOY / "overlays" / "cpu"
KUSTOMIZE_TIMEOUT_S = 60

Object = dict[str, Any]


class ToolMissing(Exception):
    """A tool is neither installed nor in the cache; the message is a sentence with the remedy."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A set of manifests: an overlay and components, or values of the chart."""

    device: str = "cpu"
    etcd: bool = True
    features: frozenset[str] = frozenset()

    def has(self, feature: str) -> bool:
        """Whether the component `feature` is in."""
        return self.etcd if feature == "etcd" else feature in self.features

    @property
    def name(self) -> str:
        """For people."""
        return "+".join([self.device, *(() if self.etcd else ("no-etcd",)), *sorted(self.features)])


CPU = Variant()
FEATURES = ("monitoring", "keda", "tls", "cert-manager", "etcd-credentials", "api-keys")
VARIANTS = (
    CPU,
    Variant(device="gpu"),
    Variant(etcd=False),
    *(Variant(features=frozenset({name})) for name in FEATURES),
    Variant(etcd=False, features=frozenset({"tls"})),
)
"""Those that one values file of the chart renders."""


def tools_folder() -> Path:
    """Where fetched tools are."""
    return cache_root() / "deploy-tools"


def kustomize_command() -> list[str]:
    """What builds a kustomization. Raises ToolMissing."""
    for tool in (
        shutil.which("kustomize"),
        tools_folder() / "debian" / "usr" / "bin" / "kustomize",
    ):
        if tool is not None and os.access(tool, os.X_OK):
            return [str(tool), "build"]
    if shutil.which("kubectl"):
        return ["kubectl", "kustomize"]
    raise ToolMissing(
        "kustomize is neither on PATH nor in the cache; `make check-deploy` fetches it where apt"
        " of Debian is"
    )


def build(folder: Path) -> list[Object]:
    """The objects of the kustomization in `folder`.

    Raises:
        ToolMissing: without kustomize.
        ValueError: with what kustomize says, if it refuses.
    """
    command = [*kustomize_command(), str(folder)]
    return parsed(run_tool(command, f"kustomize refuses {folder}", KUSTOMIZE_TIMEOUT_S))


def parsed(text: str) -> list[Object]:
    """The objects in the documents of a YAML text."""
    return [document for document in yaml.safe_load_all(text) if document is not None]


def run_tool(
    command: Sequence[str],
    refusal: str,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> str:
    """What a tool prints. Raises ValueError with `refusal` and what the tool says, if it fails."""
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    if done.returncode != 0:
        raise ValueError(f"{refusal}: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def build_variant(variant: Variant) -> list[Object]:
    """The objects of `variant`, built once and not to be changed. Raises as `build` does."""
    overlay = f"overlays/{variant.device}" if variant.etcd else "base"
    if not variant.etcd and variant.device != "cpu":
        raise ValueError(f"no kustomization is the variant {variant.name}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()

        def relative(path: str) -> str:
            return os.path.relpath(DEPLOY / path, folder)

        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [relative(overlay)],
            "components": [relative(f"components/{name}") for name in sorted(variant.features)],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return build(folder)


def identity(obj: Object) -> str:
    """Kind/name: two objects of a set never share it, since there is one namespace."""
    return f"{obj['kind']}/{obj['metadata']['name']}"

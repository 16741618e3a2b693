"""Engines other than our own: where they are installed, and installing them."""

from pathlib import Path

from services.core.engine_kind import EngineKind
from tideserve.cli.cache import cache_root, create_cache
from tideserve.cli.cluster_options import ClusterOptions
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError, SystemUnavailable, unusable
from tideserve.cli.vllm_install import ensure_vllm, installed_vllm


def install_vllm() -> Path:
    """Make the environment that has vLLM, unless it is there; returns its Python.

    Raises:
        CommandError: with the cause, such as a disk that is full.
    """
    root = cache_root()
    with unusable(OSError, SystemUnavailable):
        create_cache(root)
        return ensure_vllm(root, print)


def chosen_python(options: ClusterOptions) -> Path | None:
    """The Python of the workers' engine, an absolute path; None for our own engine.

    Raises:
        CommandError: if vLLM shall run the model and is not installed.
    """
    given = options.worker.get("engine_python", options.engine_python)
    if options.engine_kind != EngineKind.VLLM:
        if given is not None:
            raise CommandError("--engine-python is for vLLM; add --engine vllm", EXIT_UNUSABLE)
        return None
    if given is not None:
        # Not resolved: the link is how a Python knows its virtual environment.
        return Path(given).expanduser().absolute()
    if (found := installed_vllm(cache_root())) is None:
        raise CommandError("vLLM is not installed; run `tideserve engine install vllm` first")
    return found

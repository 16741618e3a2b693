"""Time iterations of a decoder of real size on this GPU; write a device profile and other facts.

    python scripts/gpu_profile.py FOLDER [--sizes 14B,7B] [--seconds 40]

Needs an NVIDIA GPU with room for the model, and Python with PyTorch for CUDA, Triton, cuda.bindings
and PyYAML, nothing else that tideserve needs. Weights are random: they do not influence the time.
FOLDER gets NAME.yaml for each size, which `--paced` and `tideserve simulate` take, NAME.json with
each measured batch, and facts.json: what the design of an engine depends on.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from gpu_decoder import BLOCK_TOKENS, SIZES, Decoder, Iteration
from gpu_facts import (
    attempt,
    attention_error,
    ceilings,
    checkpointing,
    decoder_error,
    remapping,
    safepoints,
    segments,
)
from gpu_timing import capture, device_state, seconds_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from services.common.device_profile import DeviceProfile, to_mapping  # noqa: E402
from services.core.cost.model import Chunks  # noqa: E402
from services.core.groups.layer_map import ModelShape  # noqa: E402
from services.worker.engine.profile.point import Effort, Room  # noqa: E402
from services.worker.engine.profile.session import ProfileOutcome, ProfileSession  # noqa: E402

GIB = 1 << 30
SPARE_BYTES = 14 * GIB
"""Memory of the GPU that stays free for activations, and for layers that are mapped twice."""
ERROR_MAX = 0.05
"""Relative; rounding to bfloat16 makes 0.003 in attention and 0.02 after two layers."""


def effort(seconds: float) -> Effort:
    """The batches to measure: those of a service on a GPU."""
    return Effort(
        prefixes=(0, 512, 2048, 8192),
        new_tokens=(16, 64, 128, 256, 512, 1024, 2048),
        decodes=(1, 4, 16, 64, 128, 256),
        contexts=(128, 512, 2048, 8192),
        held_out_each=8,
        target_s=seconds,
        decode_context_tokens=160_000,
    )


def main() -> None:
    """Measure, and write the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--sizes", default="14B,7B", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--seconds", type=float, default=40, help="for each size's batches")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "pytorch": torch.__version__,
        "ceilings": attempt(ceilings),
        "errors": {"attention": attention_error(), "decoder": decoder_error()},
        "idle": attempt(device_state),
    }
    if not max(facts["errors"].values()) < ERROR_MAX:
        sys.exit(f"this decoder computes something else here: {facts['errors']}")
    for index, name in enumerate(arguments.sizes.split(",")):
        facts |= measure_size(name, arguments.folder, arguments.seconds, facts, first=index == 0)
        (arguments.folder / "facts.json").write_text(json.dumps(facts, indent=1))
    print(json.dumps(facts, indent=1))


def measure_size(
    name: str, folder: Path, seconds: float, known: Mapping[str, Any], first: bool
) -> dict[str, Any]:
    """Write the profile of a model of that size; more facts, if it is the first."""
    decoder = Decoder(SIZES[name], kv_tokens(name))
    outcome, rows = measure(decoder, effort(seconds))
    profile = profile_of(name, known, outcome)
    stem = folder / profile.name
    stem.with_suffix(".yaml").write_text(yaml.safe_dump(to_mapping(profile), sort_keys=False))
    stem.with_suffix(".json").write_text(json.dumps(rows))
    verdict = "well enough" if outcome.passed else f"not within {outcome.error_max:.1%}"
    print(f"{profile.name}: {outcome.accuracy}; batches are predicted {verdict}", flush=True)
    facts = {f"after {name}": attempt(device_state)}
    torch.cuda.empty_cache()
    steps = (segments, safepoints, checkpointing, remapping) if first else ()
    return facts | {step.__name__: attempt(partial(step, decoder)) for step in steps}


def kv_tokens(name: str) -> int:
    """As many as fit beside the weights, but no more than the largest batch takes."""
    size = SIZES[name]
    free, _ = torch.cuda.mem_get_info()
    room = free - size.parameter_bytes - SPARE_BYTES
    return min(200_000, room // size.kv_bytes_per_token) // BLOCK_TOKENS * BLOCK_TOKENS


def measure(decoder: Decoder, wanted: Effort) -> tuple[ProfileOutcome, list[dict[str, Any]]]:
    """Each batch as a captured graph: what an engine that plans ahead would wait for."""
    room = Room(4096, 256, 16_384, decoder.num_blocks, BLOCK_TOKENS)
    session = ProfileSession(wanted, room)
    graphs: dict[Chunks, tuple[torch.cuda.CUDAGraph, Iteration]] = {}
    pool = torch.cuda.graph_pool_handle()
    said_s = time.monotonic()
    while not session.complete:
        chunks = session.next_batch()
        if chunks not in graphs:
            work = decoder.prepare(chunks)
            graph = capture(partial(decoder.run, work), pool)
            graphs[chunks] = (graph, work)
            graph.replay()
        session.record(seconds_of(graphs[chunks][0].replay))
        if time.monotonic() - said_s > 5:
            said_s = time.monotonic()
            print("measured {} of {}".format(*session.progress), flush=True)
    outcome = session.outcome()
    rows = [
        {"chunks": sample.chunks, "held_out": held, "measured_s": sample.measured_s}
        for held, samples in ((False, outcome.fitted), (True, outcome.held_out))
        for sample in samples
    ]
    return outcome, rows


def profile_of(name: str, facts: Mapping[str, Any], outcome: ProfileOutcome) -> DeviceProfile:
    """The device profile; links that one GPU alone does not show stay open."""
    size = SIZES[name]
    gpu = facts["device"].removeprefix("NVIDIA ").split()[0]
    layer = 2 * (size.layer_parameters + 2 * size.hidden)
    table = 2 * size.vocabulary * size.hidden
    return DeviceProfile(
        name=f"{gpu}-{name}",
        source=f"measured on {facts['device']}, {facts['date']}, {size.model} in bfloat16 with"
        f" random weights, by scripts/gpu_profile.py in {outcome.rounds} rounds",
        model=outcome.model,
        kv_bytes_per_token=size.kv_bytes_per_token,
        parameter_bytes=size.parameter_bytes,
        memory_bytes=torch.cuda.mem_get_info()[1],
        host_link_bytes_per_s=facts["ceilings"].get("to_device_bytes_per_s"),
        hidden_bytes=2 * size.hidden,
        shape=ModelShape(
            num_layers=size.layers,
            layer_bytes=layer,
            embedding_bytes=table,
            head_bytes=table,
            tied_embeddings=False,
            kv_bytes=size.kv_bytes_per_token // size.layers,
            layer_cost=layer,
            head_cost=table,
        ),
        accuracy=outcome.accuracy,
    )


if __name__ == "__main__":
    main()

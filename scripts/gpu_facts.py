"""Facts of a GPU that the design of an engine depends on, for `gpu_profile.py`."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from statistics import median
from typing import Any

import torch
from gpu_decoder import BLOCK_TOKENS, SIZES, Decoder, Iteration, Size
from gpu_timing import capture, least_s, seconds_of, typical_s
from torch.nn import functional

from services.core.request import blocks_for
from services.worker.engine.memory.cuda_driver import CudaDriver
from services.worker.errors import WorkerError

MIB, GIB = 1 << 20, 1 << 30
SEGMENT_LAYERS = (1, 2, 4, 8)
DELAYS = 40
REMAPPINGS = 4


def attempt(step: Callable[[], Any]) -> Any:
    """What a step finds; what speaks against it is a finding, too."""
    try:
        return step()
    except (RuntimeError, ValueError, ImportError, WorkerError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def ceilings() -> dict[str, float]:
    """Products, and copies on the device (bytes read and written), to it and from it."""
    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    ones = torch.ones(GIB, dtype=torch.uint8, device="cuda")
    twos, host = torch.empty_like(ones), torch.ones(GIB, dtype=torch.uint8, pin_memory=True)
    return {
        "product_flop_per_s": 2 * 8192**3 / least_s(partial(torch.matmul, left, left)),
        "copy_bytes_per_s": 2 * GIB / least_s(partial(twos.copy_, ones)),
        "to_device_bytes_per_s": GIB / least_s(partial(ones.copy_, host, non_blocking=True)),
        "to_host_bytes_per_s": GIB / least_s(partial(host.copy_, ones, non_blocking=True)),
    }


def attention_error() -> float:
    """The largest relative error of decodes and prefills, against float32 on gathered K and V.

    With the heads of the timed models, and with contexts that one program reads and that many do.
    """
    shapes = [(40, 8, 128), (32, 32, 128), (4, 2, 64)]
    batches = [
        [(0, 1), (17, 1), (700, 1), (3000, 1), (0, 40), (130, 70), (2000, 200)],
        [(3, 1), (60, 1), (0, 16), (0, 5), (50, 100)],
    ]
    errors = []
    for heads, kv_heads, head_dim in shapes:
        decoder = Decoder(Size("", 1, 256, heads, kv_heads, head_dim, 512, 1000), 16_384)
        errors += [_attention_error(decoder, chunks) for chunks in batches]
    return max(errors)


def _attention_error(decoder: Decoder, chunks: Sequence[tuple[int, int]]) -> float:
    size, cache, work = decoder.size, decoder.kv[0].values, decoder.prepare(chunks)
    count = len(work.tokens)
    query = torch.randn(
        count, size.heads, size.head_dim, device=decoder.device, dtype=torch.bfloat16
    )
    found = decoder.attention.attend(query, cache, work.work, None, size.head_dim**-0.5)
    errors, token, first = [], 0, 0
    for prefix, new in chunks:
        needed = blocks_for(prefix + new, BLOCK_TOKENS)
        table = work.work.tables[first : first + needed]
        parts = cache[table].transpose(0, 1).flatten(1, 2)[:, : prefix + new].float()
        wanted = attended(query[token : token + new].float(), *parts)
        errors.append(error_of(found[token : token + new], wanted))
        token, first = token + new, first + needed
    return max(errors)


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention in float32 of the last rows of a sequence: all [token, head, head_dim]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(repeats, 1) for one in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[2] ** -0.5
    seen = torch.ones(scores.shape[1:], device=query.device).tril(len(key) - len(query))
    shares = scores.masked_fill(seen == 0, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", shares, value)


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative."""
    return float((found.float() - wanted).norm() / wanted.norm())


def decoder_error() -> float:
    """The relative error of the layers' output for a prompt, against float32."""
    size = SIZES["tiny"]
    decoder = Decoder(size, 1024)
    work = decoder.prepare([(0, 70)])
    hidden = decoder.begin(work)
    state = hidden.float()
    found = decoder.run_layers(work, hidden, 0, size.layers)
    for one in decoder.weights:
        both = (_normed(state) @ one.qkv.float().T).unflatten(1, (-1, size.head_dim))
        query, key, value = both.split([size.heads, size.kv_heads, size.kv_heads], 1)
        query, key = (_turned(heads, *work.turn) for heads in (query, key))
        state = state + attended(query, key, value).flatten(1) @ one.output.float().T
        gate, up = (_normed(state) @ one.gate_up.float().T).chunk(2, 1)
        state = state + (functional.silu(gate) * up) @ one.down.float().T
    return error_of(found, state)


def _normed(state: torch.Tensor) -> torch.Tensor:
    return state * torch.rsqrt(state.square().mean(-1, keepdim=True) + 1e-6)


def _turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, 2)
    c, s = (one[:, None, : first.shape[2]].float() for one in (cos, sin))
    return torch.cat([first * c - second * s, second * c + first * s], 2)


def thousand_each(decoder: Decoder) -> Iteration:
    """64 decodes at about 1,000 tokens."""
    return decoder.prepare([(1000 + index, 1) for index in range(64)])


def segments(decoder: Decoder) -> dict[str, float]:
    """64 decodes: one graph, a graph for each few layers, no graph.

    `waited`: no more than one graph is launched ahead, so that the host can stop after it.
    """
    work = thousand_each(decoder)
    ways: dict[str, Callable[[], object]] = {
        "whole_s": capture(partial(decoder.run, work)).replay,
        "eager_s": partial(decoder.run, work),
    }
    for layers in SEGMENT_LAYERS:
        graphs = in_segments(decoder, work, layers)
        ways[f"by_{layers}_s"] = partial(launch, graphs, len(graphs), threading.Event())
        ways[f"by_{layers}_waited_s"] = partial(launch, graphs, 1, threading.Event())
    return {name: typical_s(way) for name, way in ways.items()}


def in_segments(decoder: Decoder, work: Iteration, layers: int) -> list[torch.cuda.CUDAGraph]:
    """An iteration as graphs of a few layers each, the head's at the end."""
    hidden = decoder.begin(work)
    pool = torch.cuda.graph_pool_handle()

    def some(first: int, end: int) -> None:
        hidden.copy_(decoder.run_layers(work, hidden, first, end))

    count = decoder.size.layers
    bounds = [(first, min(first + layers, count)) for first in range(0, count, layers)]
    graphs = [capture(partial(some, *bound), pool) for bound in bounds]
    return [*graphs, capture(partial(decoder.finish, work, hidden), pool)]


def safepoints(decoder: Decoder) -> list[dict[str, Any]]:
    """A prefill of 2,048 tokens that the host may stop between segments, by layers of a segment.

    The host launches a segment only if nobody asked it to stop, and when no more than `ahead` are
    unfinished. `stop_ms`: from the request, at a random time, until the device is idle.
    """
    work = decoder.prepare([(0, 2048)])
    whole_s = typical_s(capture(partial(decoder.run, work)).replay)
    found: list[dict[str, Any]] = [{"whole_s": whole_s}]
    for layers in SEGMENT_LAYERS:
        graphs = in_segments(decoder, work, layers)
        for ahead in (1, 2):
            stopped_s = sorted(stop_delay_s(graphs, ahead, whole_s) for _ in range(DELAYS))
            found.append(
                {
                    "layers": layers,
                    "ahead": ahead,
                    "run_s": typical_s(partial(launch, graphs, ahead, threading.Event())),
                    "stop_ms": {"median": 1e3 * median(stopped_s), "most": 1e3 * stopped_s[-1]},
                }
            )
    return [*found, {"whole_again_s": typical_s(capture(partial(decoder.run, work)).replay)}]


def launch(graphs: Sequence[torch.cuda.CUDAGraph], ahead: int, stop: threading.Event) -> None:
    """Launch in order, no more than `ahead` beyond the one that runs, until asked to stop."""
    events: list[torch.cuda.Event] = []
    for graph in graphs:
        if len(events) > ahead:
            events[-1 - ahead].synchronize()
        if stop.is_set():
            return
        graph.replay()
        events.append(torch.cuda.Event())
        events[-1].record()


def stop_delay_s(graphs: Sequence[torch.cuda.CUDAGraph], ahead: int, whole_s: float) -> float:
    """Seconds from a request at a random time until the device is idle."""
    stop, asked_s = threading.Event(), 0.0

    def ask() -> None:
        nonlocal asked_s
        time.sleep(Random().uniform(0.1, 0.8) * whole_s)
        asked_s = time.perf_counter()
        stop.set()

    torch.cuda.synchronize()
    asker = threading.Thread(target=ask)
    asker.start()
    launch(graphs, ahead, stop)
    torch.cuda.synchronize()
    idle_s = time.perf_counter()
    asker.join()
    return max(0.0, idle_s - asked_s)


def checkpointing(decoder: Decoder) -> dict[str, float]:
    """64 decodes, alone and while KV is copied to host memory at the link's speed."""
    graph = capture(partial(decoder.run, thousand_each(decoder)))
    alone_s = typical_s(graph.replay, DELAYS)
    kv = decoder.kv[0].values.flatten()
    host = torch.empty(kv.shape, dtype=kv.dtype, pin_memory=True)
    stream, copies, done = torch.cuda.Stream(), 0, threading.Event()
    began_s = time.perf_counter()

    def copy() -> None:
        nonlocal copies
        while not done.is_set():
            with torch.cuda.stream(stream):
                host.copy_(kv, non_blocking=True)
                stream.synchronize()
            copies += 1

    copier = threading.Thread(target=copy)
    copier.start()
    beside_s = typical_s(graph.replay, DELAYS)
    done.set()
    copier.join()
    copied = copies * kv.nbytes / (time.perf_counter() - began_s)
    return {"alone_s": alone_s, "beside_copies_s": beside_s, "copied_bytes_per_s": copied}


def remapping(decoder: Decoder) -> list[dict[str, Any]]:
    """Half of the layers' memory is mapped a second time while 64 decodes run, then unmapped.

    By size of a chunk: the calls' time, and the iterations' before and during them.
    """
    graph = capture(partial(decoder.run, thousand_each(decoder)))
    dropped = decoder.size.layers // 2 * 2 * decoder.size.layer_parameters
    return [_remap(graph, chunk * MIB, dropped // (chunk * MIB)) for chunk in (2, 8, 16, 32)]


def _remap(graph: torch.cuda.CUDAGraph, chunk: int, count: int) -> dict[str, Any]:
    memory = CudaDriver(torch.device("cuda"))
    handles = [memory.create(chunk) for _ in range(count)]
    places = [memory.reserve(chunk * count) for _ in range(2)]
    took: dict[str, list[float]] = {"map_ms": [], "access_ms": [], "unmap_ms": []}

    def timed(name: str, act: Callable[[], object]) -> None:
        began_s = time.perf_counter()
        act()
        took[name].append(1e3 * (time.perf_counter() - began_s))

    def map_all(place: int) -> None:
        for index, handle in enumerate(handles):
            memory.map(place + index * chunk, chunk, handle)

    def act() -> None:
        memory = CudaDriver(torch.device("cuda"))  # of this thread
        for _ in range(REMAPPINGS):
            old, new = places
            timed("map_ms", partial(map_all, new))
            timed("access_ms", partial(memory.allow, new, size))
            timed("unmap_ms", partial(memory.unmap, old, size))
            places.reverse()

    size = chunk * count
    map_all(places[0])
    memory.allow(places[0], size)
    before_s = [seconds_of(graph.replay) for _ in range(DELAYS)]
    during_s: list[float] = []
    mapper = threading.Thread(target=act)
    mapper.start()
    while mapper.is_alive():
        during_s.append(seconds_of(graph.replay))
    mapper.join()
    memory.tensor(places[0], size).fill_(7)
    memory.wait()
    memory.unmap(places[0], size)
    for place in places:
        memory.free(place, size)
    for handle in handles:
        memory.release(handle)
    return {
        "chunk_mib": chunk // MIB,
        "chunks": count,
        **{name: median(values) for name, values in took.items()},
        "iterations": len(during_s),
        "iteration_ms": {
            "before": 1e3 * median(before_s),
            "longest_before": 1e3 * max(before_s),
            "during": 1e3 * median(during_s),
            "longest": 1e3 * max(during_s),
        },
    }

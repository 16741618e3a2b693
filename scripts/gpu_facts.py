"""Facts of a GPU that the design of an engine depends on, for `gpu_profile.py`."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from statistics import median
from typing import Any

import torch
from cuda.bindings import driver
from gpu_decoder import SIZES, Decoder, Iteration
from gpu_timing import capture, least_s, replay_s, typical_s

MIB, GIB = 1 << 20, 1 << 30
SEGMENT_LAYERS = 4
DELAYS = 40


def attempt(step: Callable[[], Any]) -> Any:
    """What a step finds; what the driver or PyTorch says against it is a finding, too."""
    try:
        return step()
    except (RuntimeError, ValueError) as error:
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


def attention_error(device: str = "cuda") -> float:
    """The largest relative error of decodes and prefills, against float32 on gathered K and V."""
    decoder = Decoder(SIZES["tiny"], 16_384, device)
    size, cache = decoder.size, decoder.kv[0]
    chunks = [(0, 1), (17, 1), (700, 1), (3000, 1), (0, 40), (130, 70), (2000, 200)]
    work = decoder.prepare(chunks)
    count = len(work.tokens)
    query = torch.randn(count, size.heads, size.head_dim, device=device, dtype=torch.bfloat16)
    found, errors, token = decoder.attend(query, work, cache), [], 0
    for (prefix, new), table in zip(chunks, work.tables, strict=True):
        parts = cache[table.long()].transpose(0, 1).flatten(1, 2)[:, : prefix + new].float()
        key, value = parts.repeat_interleave(size.heads // size.kv_heads, 2)
        scores = torch.einsum("qhd,khd->hqk", query[token : token + new].float(), key)
        hidden = torch.ones(new, prefix + new, device=device).tril(prefix) == 0
        shares = (scores * size.head_dim**-0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        wanted = torch.einsum("hqk,khd->qhd", shares, value)
        errors.append(float((found[token : token + new] - wanted).norm() / wanted.norm()))
        token += new
    return max(errors)


def thousand_each(decoder: Decoder) -> Iteration:
    """64 decodes at about 1,000 tokens."""
    return decoder.prepare([(1000 + index, 1) for index in range(64)])


def segments(decoder: Decoder) -> dict[str, float]:
    """64 decodes: one graph, a graph for each few layers, no graph."""
    work = thousand_each(decoder)
    whole, parts = capture(partial(decoder.run, work)), in_segments(decoder, work, SEGMENT_LAYERS)
    ways: dict[str, Callable[[], object]] = {
        "whole_s": whole.replay,
        "segments_s": lambda: [one.replay() for one in parts],
        "eager_s": partial(decoder.run, work),
    }
    return {name: typical_s(way) for name, way in ways.items()} | {"segments": len(parts)}


def in_segments(decoder: Decoder, work: Iteration, layers: int) -> list[torch.cuda.CUDAGraph]:
    """An iteration as graphs of a few layers each, the head's at the end."""
    hidden, rest = decoder.begin(work)
    pool = torch.cuda.graph_pool_handle()

    def some(first: int, end: int) -> None:
        hidden.copy_(decoder.run_layers(work, hidden, rest, first, end))

    count = decoder.size.layers
    bounds = [(first, min(first + layers, count)) for first in range(0, count, layers)]
    graphs = [capture(partial(some, *bound), pool) for bound in bounds]
    return [*graphs, capture(partial(decoder.finish, work, hidden, rest), pool)]


def safepoints(decoder: Decoder) -> list[dict[str, Any]]:
    """A prefill of 2,048 tokens that the host may stop between segments, by layers of a segment.

    The host launches a segment only if nobody asked it to stop, and when no more than `ahead` are
    unfinished. `stop_ms`: from the request, at a random time, until the device is idle.
    """
    work = decoder.prepare([(0, 2048)])
    whole_s = typical_s(capture(partial(decoder.run, work)).replay)
    found: list[dict[str, Any]] = [{"whole_s": whole_s}]
    for layers in (1, 2, 4, 8):
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
    alone_s = typical_s(graph.replay)
    kv = decoder.kv[0].flatten()
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
    beside_s = median(replay_s(graph) for _ in range(DELAYS))
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
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access = driver.CUmemAccessDesc()
    access.location = properties.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    handles = [call(driver.cuMemCreate, chunk, properties, 0) for _ in range(count)]
    places = [call(driver.cuMemAddressReserve, chunk * count, 0, 0, 0) for _ in range(2)]
    took: dict[str, float] = {}

    def timed(name: str, act: Callable[[], object]) -> None:
        began_s = time.perf_counter()
        act()
        took[name] = 1e3 * (time.perf_counter() - began_s)

    def map_all(place: Any) -> None:
        for index, handle in enumerate(handles):
            call(driver.cuMemMap, int(place) + index * chunk, chunk, 0, handle, 0)

    def act() -> None:
        context = call(driver.cuDevicePrimaryCtxRetain, call(driver.cuDeviceGet, 0))
        call(driver.cuCtxSetCurrent, context)
        timed("map_ms", lambda: map_all(places[1]))
        timed("access_ms", lambda: call(driver.cuMemSetAccess, places[1], size, [access], 1))
        timed("unmap_ms", lambda: call(driver.cuMemUnmap, places[0], size))

    size = chunk * count
    map_all(places[0])
    call(driver.cuMemSetAccess, places[0], size, [access], 1)
    before_s = typical_s(graph.replay)
    during_s: list[float] = []
    mapper = threading.Thread(target=act)
    mapper.start()
    while mapper.is_alive():
        during_s.append(replay_s(graph))
    mapper.join()
    call(driver.cuMemsetD8, places[1], 7, size)
    torch.cuda.synchronize()
    call(driver.cuMemUnmap, places[1], size)
    for place in places:
        call(driver.cuMemAddressFree, place, size)
    for handle in handles:
        call(driver.cuMemRelease, handle)
    return took | {
        "chunk_mib": chunk // MIB,
        "chunks": count,
        "iteration_ms": {
            "before": 1e3 * before_s,
            "during": 1e3 * median(during_s),
            "longest": 1e3 * max(during_s),
        },
    }


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """A call of the driver. Raises RuntimeError."""
    code, *values = function(*arguments)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{function.__name__}: {code.name}")
    return values[0] if values else None

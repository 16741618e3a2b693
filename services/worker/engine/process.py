"""Assembles an engine process: model runner, planner, network lanes and main loop.

Terms: the servicer is the worker's gRPC process, which starts the engine. A lane carries frames
between engines. A pacer slows iterations down to the times of another device.
"""

import argparse
import logging
import os
import signal
import sys
from dataclasses import replace
from functools import partial

import torch

from services.common import config as config_module
from services.common import failpoint
from services.common.clock import monotonic_s
from services.common.device_profile import DeviceProfile, load_profile
from services.common.errors import ConfigError, ServiceError
from services.common.event_log import open_event_log
from services.common.lifecycle import EXIT_UNUSABLE, die_with_parent
from services.common.logging import set_up_logging
from services.core.changeover.state import Changeover, MemberConfig
from services.core.cost.model import CostModel
from services.core.cost.refinement import CostRefiner
from services.core.planner.config import BatchFormation, IterationConfig
from services.core.planner.preemption import Preempt, PreemptedWork
from services.worker.config import WorkerConfig
from services.worker.engine.compute.pacer import Pacer
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.grammar_check import GrammarCheck
from services.worker.engine.heartbeat import start_heartbeat
from services.worker.engine.host.opening import OpenedHost, open_host
from services.worker.engine.loop import EngineLoop, connect, send
from services.worker.engine.model.catalog import shape_of
from services.worker.engine.pipeline.fact_log import FactLog
from services.worker.engine.pipeline.frames import KINDS
from services.worker.engine.pipeline.links import Links
from services.worker.engine.pipeline.member import Member
from services.worker.engine.pipeline.piece_copies import PieceCopies
from services.worker.engine.pipeline.stage_runner import StageRunner
from services.worker.engine.profile.batches import IDLE
from services.worker.engine.profile.idle import IdleProfiler
from services.worker.engine.profile.measurer import Measurer, batch_limits_of, measure_rough_model
from services.worker.engine.profile.session import ProfileSession, profile_path
from services.worker.engine.transfer.gate import ActivationGate
from services.worker.engine.transfer.lane import Identity
from services.worker.engine.transfer.lanes import Lanes, LanesConfig, open_lanes
from services.worker.engine.transfer.link_pace import LinkPace
from services.worker.engine.transfer.mover import Mover, MoverConfig
from services.worker.engine.transfer.ucx_config import UcxConfig
from services.worker.errors import ModelError, WorkerError
from services.worker.ipc import EngineReady, EngineUnusable

log = logging.getLogger(__name__)


def build_engine() -> EngineLoop:
    """Load the model and report to the servicer; returns the main loop, or exits on failure."""
    parser = argparse.ArgumentParser(prog="tideserve-engine")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--incarnation", required=True)
    arguments = parser.parse_args()
    _bind_to_parent(arguments.parent)
    set_up_logging()  # with defaults, until the configuration is known
    data = config_module.parse_yaml(sys.stdin.read(), "the servicer's configuration")
    config = config_module.from_mapping(WorkerConfig, data, "the servicer's configuration")
    set_up_logging(config.log_level, config.log_format)
    identity = Identity(config.worker_id, arguments.incarnation)
    failpoint.arm(config.failpoints, config.failpoint_file, arguments.parent)
    socket = connect(arguments.socket)
    try:
        pacer = pacer_of(config)
        runner = ModelRunner.load(runner_config(config))
        cost_model, cost_origin = cost_model_of(runner, config, pacer)
        paced = None if config.paced is None else load_profile(config.paced)
        host = open_host(config, runner, paced, stored_profile(config))
        planner = planner_config(runner, config, cost_model, host)
        member_config = _member_config(config, runner, planner, identity.incarnation)
        event_log = open_event_log(config.event_log, config.worker_id, member_config)
        lanes = open_lanes(identity, lanes_config(config), KINDS)
    except (WorkerError, ServiceError) as error:
        send(socket, EngineUnusable(str(error)))
        socket.close()
        sys.exit(EXIT_UNUSABLE)
    changeover = Changeover.of(member_config)
    facts = FactLog(event_log, changeover.planner, runner.stage_memory, monotonic_s)
    facts.start(identity, config.memory_bytes, exact=is_batch_invariant(config))
    member = build_member(
        identity, lanes, runner, changeover, config, pacer, facts, cost_origin, host
    )
    send(socket, ready_frame(runner, config, lanes, cost_model))
    start_heartbeat(arguments.socket)
    member.start()
    return EngineLoop(
        member,
        socket,
        GrammarCheck(runner.grammars, monotonic_s),
        (lanes.activations.fileno(), *member.filenos()),
        idle_profiler(runner, member, config),
        overlaps=config.overlap and runner.device.type == "cuda",
    )


def _member_config(
    config: WorkerConfig, runner: ModelRunner, planner: IterationConfig, process: str
) -> MemberConfig:
    memory = runner.stage_memory
    return MemberConfig(
        config.worker_id,
        memory.num_layers,
        memory.tied_embeddings,
        planner,
        config.link_bytes_per_s / memory.kv_ranges[0].shape.size_bytes,
        config.slabs_at_once,
        process,
        kv_layout(runner),
    )


def kv_layout(runner: ModelRunner) -> str:
    """Identifies model and format of the KV; the memory manager compares the versions of code."""
    block_bytes = runner.stage_memory.kv_ranges[0].shape.size_bytes
    return f"{runner.model_digest}:{runner.block_size}:{block_bytes}"


def _bind_to_parent(parent: int) -> None:
    """Terminate together with the servicer, and ignore signals that would end the engine first."""
    die_with_parent()
    # The parent may have died before `die_with_parent` took effect.
    if os.getppid() != parent:
        sys.exit(EXIT_UNUSABLE)
    # A signal to the process group must not interrupt requests that the servicer still drains.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def is_batch_invariant(config: WorkerConfig) -> bool:
    """Whether a request's tokens are independent of the other requests in its batches."""
    # In float32 the kernels for few rows and for many sum in another order.
    return config.device == "cpu" and config.dtype == "float64"


def runner_config(config: WorkerConfig) -> RunnerConfig:
    """Return the model runner's part of the worker configuration."""
    planner = config.planner
    resumes = planner.preempted_work is PreemptedWork.RESUME
    return RunnerConfig(
        model_dir=config.model_dir,
        device=config.device,
        dtype=getattr(torch, config.dtype),
        budget_bytes=config.memory_bytes,
        block_size=planner.block_size,
        chunk_bytes=config.chunk_bytes,
        load_format=config.load_format,
        max_batch_tokens=planner.max_batch_tokens,
        max_running=planner.max_running,
        max_model_len=config.max_model_len,
        threads=config.threads,
        suspends=resumes and planner.preemption is not Preempt.OFF,
        host_weights_bytes=config.host_weights_bytes,
        device_sampling=config.device_sampling,
        overlap=config.overlap,
    )


def lanes_config(config: WorkerConfig) -> LanesConfig:
    """Return the network lanes' part of the configuration (`advertise` is resolved already)."""
    return LanesConfig(
        config.host,
        config.advertise,
        config.activation_port,
        config.bulk_port,
        UcxConfig(config.ucx_transports, config.ucx_devices, config.ucx_ports),
    )


def cost_model_of(
    runner: ModelRunner, config: WorkerConfig, pacer: Pacer | None
) -> tuple[CostModel | None, str]:
    """Return the cost model at the start and its origin, for operators.

    It is that of the simulated device, else of the stored profile, else a rough measurement.
    """
    if pacer is not None:
        return pacer.model, "paced"
    profile = stored_profile(config)
    if profile is not None:
        log.info("profile of this model and device: %s (%s)", profile.name, profile.source)
        return profile.model, "profile"
    planner = config.planner
    if config.learn_costs or planner.scheduling.deadlines_bound_iterations:
        log.info("no profile is stored: measuring a rough cost model")
        began_s = monotonic_s()
        model = measure_rough_model(runner, planner.max_batch_tokens, planner.max_running)
        log.info("measured a rough cost model in %.2f s", monotonic_s() - began_s)
        return model, "start"
    reason = "no profile is stored, and 'learn_costs' is off"
    if planner.batch_formation is BatchFormation.LOOKAHEAD:
        log.warning("lookahead counts tokens, for lack of a cost model: %s", reason)
    return None, f"none: {reason}"


def planner_config(
    runner: ModelRunner,
    config: WorkerConfig,
    cost_model: CostModel | None,
    host: OpenedHost | None = None,
) -> IterationConfig:
    """Return the planner's configuration with the runner's number of blocks and the cost model.

    Raises ModelError if the model does not allow `block_sharing`.
    """
    windows = runner.geometry.sliding_windows
    if config.planner.block_sharing and any(window is not None for window in windows):
        raise ModelError(
            "the model has sliding windows, for which the order of KV in a block matters: turn"
            " 'block_sharing' off"
        )
    return replace(
        config.planner,
        num_blocks=runner.num_blocks,
        cost_model=cost_model,
        host=None if host is None else host.settings,
    )


def pacer_of(config: WorkerConfig) -> Pacer | None:
    """Return the pacer if the configuration names a profile to pace to. Raises ConfigError."""
    if config.paced is None:
        return None
    profile = load_profile(config.paced)
    log.warning("PACED: every iteration is padded to the time of %s", profile.name)
    return Pacer(profile.model, execution=config.planner.execution)


def link_pace_of(config: WorkerConfig, runner: ModelRunner) -> LinkPace | None:
    """Return the pace of transfers with `pace_links`. Raises ConfigError."""
    if not config.pace_links or config.paced is None:
        return None
    profile = load_profile(config.paced)
    kv_bytes, parameter_bytes = profile.kv_bytes_per_token, profile.parameter_bytes
    if kv_bytes is None or parameter_bytes is None:
        raise ConfigError(
            f"'pace_links' needs the sizes of the model, which the profile {profile.name} lacks;"
            " use another profile, or remove 'pace_links'"
        )
    return LinkPace(
        config.pace_links * 1e9 / 8,
        kv_bytes / runner.kv_bytes_per_token,
        parameter_bytes / runner.parameter_bytes,
    )


def stored_profile(config: WorkerConfig) -> DeviceProfile | None:
    """Return the stored profile of this model on this device; None if there is no usable one."""
    if config.profile_dir is None:
        return None
    path = profile_path(config.profile_dir, runner_config(config), config.threads)
    if not path.is_file():
        return None
    try:
        return load_profile(path)
    except ConfigError as error:
        log.warning("the stored profile is not usable: %s", error)
        return None


def idle_profiler(runner: ModelRunner, member: Member, config: WorkerConfig) -> IdleProfiler | None:
    """Return the profiler for idle periods; None if it is disabled, impossible or not needed."""
    if config.profile_dir is None:
        return None
    # A paced engine uses the cost model of the device that it is paced to.
    if config.paced is not None or not config.profile_when_idle:
        return None
    if stored_profile(config) is not None:
        return None
    runner_settings = runner_config(config)
    path = profile_path(config.profile_dir, runner_settings, config.threads)
    limits = batch_limits_of(runner, config.planner.max_batch_tokens, config.planner.max_running)
    return IdleProfiler(
        ProfileSession(IDLE, limits),
        Measurer(runner, member.borrow_blocks),
        runner,
        runner_settings,
        config.threads,
        path,
        lambda model: member.learn(model, "idle") if config.learn_costs else None,
    )


def build_member(
    identity: Identity,
    lanes: Lanes,
    runner: ModelRunner,
    changeover: Changeover,
    config: WorkerConfig,
    pacer: Pacer | None,
    facts: FactLog,
    cost_origin: str,
    host: OpenedHost | None = None,
) -> Member:
    """Build the group member of this engine from its lanes, model runner and state machine."""
    gate = ActivationGate()
    settings = MoverConfig(
        link_bytes_per_s=config.link_bytes_per_s,
        coordinated=config.coordinated_exchange,
        pace=link_pace_of(config, runner),
    )
    model = changeover.planner.config.cost_model
    refines = config.learn_costs and pacer is None
    stage = StageRunner(runner, changeover.planner.table, pacer)
    driver = None
    if host is not None:
        driver = host.driver(changeover.planner, PieceCopies(stage), runner.stage_memory)
    member = Member(
        identity,
        changeover,
        stage,
        Links(lanes.activations, config.worker_id, gate),
        lanes.bulk,
        partial(Mover, lanes.bulk, gate, settings),
        monotonic_s,
        facts,
        CostRefiner(model) if refines and model is not None else None,
        cost_origin,
        driver,
    )
    failpoint.on_cut(member.cut_off)
    return member


def ready_frame(
    runner: ModelRunner, config: WorkerConfig, lanes: Lanes, cost_model: CostModel | None
) -> EngineReady:
    """Return the engine's sizes and addresses, for the worker's registration and reports."""
    return EngineReady(
        max_model_len=min(runner.geometry.max_model_len, runner.num_blocks * runner.block_size),
        context_tokens=runner.geometry.max_model_len,
        vocab_size=runner.geometry.vocab_size,
        block_size=runner.block_size,
        kv_blocks_total=runner.num_blocks,
        kv_block_bytes=runner.kv_bytes_per_token * runner.block_size,
        budget_bytes=config.memory_bytes,
        parameter_bytes=runner.parameter_bytes,
        staging_bytes=runner.staging_bytes,
        arena_bytes=runner.stage_memory.plan.arena_bytes,
        chunk_bytes=runner.stage_memory.plan.chunk_bytes,
        shape=shape_of(runner.geometry, runner.slab_bytes),
        activation_address="" if lanes.unavailable else lanes.activations.address,
        bulk_address="" if lanes.unavailable else lanes.bulk.address,
        no_drops=lanes.unavailable,
        model_digest=runner.model_digest,
        cost_model=cost_model,
    )

"""Worker processes of a `JoinedWorld`: start, registration, death, and other faults."""

from functools import partial
from typing import TYPE_CHECKING

from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.transfer.lane import Identity
from tests.support.engines import Engine, make_engine
from tests.support.joined_control import LEASE_S, REPORT_S
from tests.support.joined_lanes import LONG_S, SILENCE_S
from tests.support.joined_worker import WorkerProcess

if TYPE_CHECKING:
    from tests.support.joined_world import JoinedWorld, Rules

CRASHES_MAX = 2


class Lives:
    """All processes, including dead processes that peers take for alive, and their faults."""

    def __init__(
        self,
        world: "JoinedWorld",
        names: list[str],
        config: RunnerConfig,
        rules: "Rules",
    ) -> None:
        self.names = names
        self._world = world
        self._config = config
        self._rules = rules
        self._max_batch_tokens = world.rng.choice([16, 64])
        self._prefix_caching = world.rng.random() < 0.5
        self._ghosts: list[Engine] = []  # engines of dead processes whose peers do not know yet
        self._starts = 0
        self._crashes_left = CRASHES_MAX

    def close(self) -> None:
        """Release all memory."""
        for process in self._world.processes.values():
            process.end()
            process.engine.close()
        for engine in self._ghosts:
            engine.close()

    def crash(self) -> None:
        """Kill a process, or its engine, whose process then deregisters and exits."""
        world = self._world
        if not self._crashes_left or len(world.processes) < 2:
            return
        self._crashes_left -= 1
        process = world.processes[world.rng.choice(sorted(world.processes))]
        if world.rng.random() < 0.3:
            world.note(f"the engine of {process.name} dies")
            self._end(process, engine_died=True)
            return
        silent = world.rng.random() < 0.5
        world.note(f"{process.name} dies, {'silently' if silent else 'at once'}")
        del world.processes[process.name]
        process.end()
        world.later(LEASE_S, partial(self._expire, process))
        if silent:
            self._ghosts.append(process.engine)
            world.later(world.rng.uniform(1.0, SILENCE_S), partial(self._lay, process))
            world.later(world.rng.uniform(1.0, SILENCE_S), partial(world.gateway.lose, process))
        else:
            process.engine.close()
            world.gateway.lose(process)

    def _lay(self, process: WorkerProcess) -> None:
        """Let the peers of a dead process notice its death."""
        if process.engine in self._ghosts:
            self._ghosts.remove(process.engine)
            process.engine.close()

    def _end(self, process: WorkerProcess, engine_died: bool) -> None:
        """Exit a process in order; its successor starts soon."""
        world = self._world
        del world.processes[process.name]
        process.end()
        process.requests.fail_all("the engine of the worker stopped", engine_died)
        world.gateway.drain(process)
        world.gateway.lose(process)
        process.engine.close()
        self._expire(process)
        world.later(world.rng.uniform(0.5, 5.0), partial(self.start, process.name))

    def _expire(self, process: WorkerProcess) -> None:
        """Expire the lease of a process."""
        world = self._world
        registered = world.control.store.workers.get(process.name)
        if registered is not None and registered.incarnation == process.incarnation:
            world.note(f"the lease of {process.incarnation} ends")
            world.control.write(partial(world.control.store.expire, process.name))

    def start_again(self) -> None:
        """Restart a worker whose process has exited."""
        world = self._world
        gone = [name for name in self.names if name not in world.processes]
        if gone:
            self.start(world.rng.choice(gone))

    def start(self, name: str) -> None:
        """Start a process, which registers once the lease of its predecessor has expired."""
        world = self._world
        if name in world.processes:
            return
        for engine in [ghost for ghost in self._ghosts if ghost.identity.worker_id == name]:
            self._ghosts.remove(engine)
            engine.close()
        self._starts += 1
        engine = make_engine(
            Identity(name, f"{name}-{self._starts}"),
            ModelRunner.load(self._config),
            world.network,
            lambda: world.now_s,
            max_batch_tokens=self._max_batch_tokens,
            max_running=8,
            prefix_caching=self._prefix_caching,
            machine=self._rules.machine,
        )
        self._rules.take_out(engine)
        process = world.processes[name] = WorkerProcess(engine, lambda: world.now_s)
        world.note(f"{process.incarnation} starts")
        self._register(process)
        world.later(world.rng.uniform(0.0, REPORT_S), partial(world.report_often, process))

    def _register(self, process: WorkerProcess) -> None:
        """Register, now or later; a process whose group no longer exists is restarted."""
        world = self._world
        store, name = world.control.store, process.name
        if world.processes.get(name) is not process:
            return
        unseen_s = max(process.blind_until_s, process.stands_until_s, world.control.silent_until_s)
        registered = store.workers.get(name)
        if registered is not None and registered.incarnation == process.incarnation:
            return
        if registered is not None or world.now_s < unseen_s:
            world.later(max(0.5, unseen_s - world.now_s), partial(self._register, process))
            return
        if not store.may_register(process.fence):
            world.note(f"{process.incarnation} is forgotten")
            self._end(process, engine_died=False)
            return
        world.control.write(partial(store.register, name, process.incarnation))

    def stand_still(self) -> None:
        """Suspend a process for a while; others may consider it dead."""
        world = self._world
        awake = sorted(name for name, other in world.processes.items() if not other.stands)
        if not awake:
            return
        process = world.processes[world.rng.choice(awake)]
        lasts_s = world.rng.choice([0.5, 3.0, 7.0, 15.0])
        world.note(f"{process.name} stands still for {lasts_s} s")
        process.stands_until_s = world.now_s + lasts_s
        if lasts_s > SILENCE_S:
            world.later(SILENCE_S, partial(self._give_up, process))
        self._lease_ends(process, lasts_s)

    def _give_up(self, process: WorkerProcess) -> None:
        """Let peers and gateway time out on a process."""
        world = self._world
        if world.processes.get(process.name) is process and process.stands:
            world.network.cut(process.name)
            world.gateway.lose(process)

    def _lease_ends(self, process: WorkerProcess, lasts_s: float) -> None:
        """Expire the lease of a partitioned process, which registers again afterwards."""
        world = self._world
        if lasts_s > LEASE_S:
            world.later(LEASE_S, partial(self._expire_unless_awake, process))
            world.later(lasts_s + 0.1, partial(self._register, process))

    def _expire_unless_awake(self, process: WorkerProcess) -> None:
        if process.stands or self._world.now_s < process.blind_until_s:
            self._expire(process)
            self._register(process)

    def blind(self) -> None:
        """Partition a process from the store only.

        After a long partition no operator requests changes: a change with the process would make
        others wait for it, as they do for any live member.
        """
        world = self._world
        if not world.processes:
            return
        process = world.processes[world.rng.choice(sorted(world.processes))]
        lasts_s = world.rng.choice([2.0, 8.0, 30.0])
        if world.rng.random() < 0.3 and world.control.rests:
            lasts_s, world.changes = LONG_S, False
        self.cut_off(process, lasts_s)

    def cut_off(self, process: WorkerProcess, lasts_s: float) -> None:
        """Partition a process and the store."""
        world = self._world
        world.note(f"{process.name} is cut off from the store for {lasts_s} s")
        process.blind_until_s = world.now_s + lasts_s
        self._lease_ends(process, lasts_s)

    def silence_store(self) -> None:
        """Make the store unresponsive for a while."""
        world = self._world
        lasts_s = world.rng.uniform(0.5, 8.0)
        world.note(f"the store is silent for {lasts_s:.1f} s")
        world.control.silent_until_s = world.now_s + lasts_s

    def take_over(self) -> None:
        """Elect another coordinator; the former leader is dead, or does not know yet."""
        world = self._world
        zombie = world.rng.random() < 0.5
        world.note(f"another coordinator takes over, zombie: {zombie}")
        world.control.take_over(zombie)

"""Measures what a message between an agent and its observers costs, after PyTorch's RPC benchmark.

    python benchmarks/agent_observer.py                                      torch RPC, 8 observers, one batch for all
    python benchmarks/agent_observer.py --world-size 4,10,34 --transport torch_rpc,pipe,shm --repeats 3
    python benchmarks/agent_observer.py --batch True,False --transport shm --plot latency.png
    python benchmarks/agent_observer.py --batch-timeout 500                  acts after 500 µs for those that have asked
    python benchmarks/agent_observer.py --compat                             rounded, timed and computed as the original
    python benchmarks/agent_observer.py --from-file benchmark_report.json --plot latency.png

The original is benchmarks/distributed/rpc/rl of PyTorch. A world of N processes is a coordinator (this program), an
agent and N − 2 observers. In each step an observer sends a random state to the agent and waits for an action; the
policy is a stack of linear layers that learns nothing. With `--batch True` the agent acts for all observers at once,
else for one request at a time. One of the original's arguments may be a list with commas: the x axis. Transports:

    torch_rpc   torch.distributed.rpc: the agent acts in the threads that its calls arrive in
    pipe        multiprocessing.Pipe, a pair of sockets for each observer
    shm         states and actions in shared memory, and semaphores that wake: the lower bound of an observer's median
    ray         calls of a Ray actor, which acts in its event loop; the observers are actors, too (needs Ray)

Agent latency: from when the agent has the first request of a batch until all of its actions are selected. It includes
the wait for the other observers, which is the longer the sooner the agent has the first: the transport that wakes it
soonest need not have the lowest. Without a batch it is from when the agent has the request, which may then wait for its
turn behind others that have come with it. Agent throughput: requests of the batch / latency. Observer latency: from
asking to having the action; observer throughput: 1 / latency. Percentiles are over all steps of all episodes; with
`--repeats`, medians over the runs. The transports take turns. CPU seconds per request are those of all threads of the
agent, and of the observers; Ray's own processes are in neither.

The clock is monotonic, latencies are in seconds with microseconds, one episode of warm-up is not counted, and the
agent keeps no autograd graph. With `--compat` all this is as in the original: the clock is `time.time`, latencies have
milliseconds, throughputs are whole, nothing warms up, every graph is kept (with anomaly detection on), and the
softmax goes over the observers. Every process has one thread for torch's operations.

The result is a JSON file with the original's keys, written anew after each run. When a process dies, all are ended.
"""

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import mmap
import multiprocessing
import os
import select
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn

from ray_vector_env import describe, failure, running_ray
from speed import check_seconds, command_line, fail, new_result, now, scrub, terminate_like_interrupt
from tables import COLOURS, load

CONTEXT = multiprocessing.get_context("fork")  # shared memory and semaphores are inherited, so that none has a name
METRICS = ("agent latency (seconds)", "agent throughput", "observer latency (seconds)", "observer throughput")
CPU, BATCH_SIZE = "cpu seconds per request", "requests per batch"
OWN_KEYS = ("kind", "command", "started", "ended", "device", "hardware", "versions", "runs")  # of the result file


@dataclass
class Args:
    world_size: str = "10"
    """processes, from 3 to 34: the coordinator, the agent and the observers"""
    master_addr: str = "127.0.0.1"
    """address at which the processes of torch_rpc meet"""
    master_port: str = "29501"
    """port at which the processes of torch_rpc meet"""
    batch: str = "True"
    """whether the agent acts for all observers at once: True or False"""
    state_size: str = "10-20-10"
    """dimensions of a state"""
    nlayers: str = "5"
    """linear layers of the policy, after the first"""
    out_features: str = "10"
    """number of actions, and width of the layers"""
    output_file_path: str = "benchmark_report.json"
    """result file"""
    transport: str = "torch_rpc"
    """how requests and actions travel: torch_rpc, pipe, shm or ray, or several of them separated by commas"""
    batch_timeout: float | None = None
    """microseconds after the first request of a batch, at which the agent acts for those that have asked; without it
    the agent waits for all"""
    repeats: int = 1
    """runs of each transport at each point of the x axis"""
    episodes: int = 10
    """episodes that are measured in a run"""
    episode_steps: int = 100
    """requests of an observer in an episode"""
    compat: bool = False
    """round, time and compute as the original does"""
    timeout: float = 120.0
    """seconds after which the start of a run, or an episode, counts as hung"""
    plot: Path | None = None
    """PNG file for latency and throughput against the x axis; needs matplotlib"""
    from_file: Path | None = None
    """result file to print and to plot, instead of measuring"""


@dataclass(frozen=True)
class World:
    """What the processes of one run need to know."""

    transport: str
    observers: int
    batch: bool
    state_size: tuple[int, ...]
    nlayers: int
    out_features: int
    batch_timeout: float | None
    """seconds"""
    episodes: int
    episode_steps: int
    compat: bool
    master: str
    """ADDRESS:PORT"""

    @classmethod
    def of(cls, arguments: dict, args: Args, transport: str) -> "World":
        return cls(
            transport=transport,
            observers=arguments["world_size"] - 2,
            state_size=tuple(map(int, arguments["state_size"].split("-"))),
            batch_timeout=None if args.batch_timeout is None else args.batch_timeout / 1e6,
            master=f"{args.master_addr}:{args.master_port}",
            **{name: arguments[name] for name in ("batch", "nlayers", "out_features")},
            **{name: getattr(args, name) for name in ("episodes", "episode_steps", "compat")},
        )


# ---- The agent ----
class Agent:
    """Selects actions.

    A transport adds `receive(timeout=None)`, the rows of requests that have arrived (at least one, or none after
    `timeout` seconds), and `reply(rows, actions)`; or it replaces `serve`.
    """

    def __init__(self, world: World, states: Tensor):
        self.world, self.states = world, states  # [observers, *state_size]: a row for each observer's request
        self.clock = time.time if world.compat else time.perf_counter
        inputs, width = states[0].numel(), world.out_features
        hidden = [nn.Linear(width, width) for _ in range(world.nlayers)]
        self.policy = nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), *hidden)
        self.latencies: list[tuple[float, int]] = []  # seconds and requests of each batch
        self.log_probs: list[Tensor] = []
        torch.autograd.set_detect_anomaly(world.compat)

    def act(self, rows: Sequence[int], started: float) -> list[int]:
        """Selects an action for each of `rows`, in ascending order, whose first request was seen at `started`."""
        states = self.states if len(rows) == len(self.states) else self.states[rows]
        with torch.inference_mode(not self.world.compat):
            scores = self.policy(states)
            policy = torch.distributions.Categorical(scores.softmax(0 if self.world.compat else -1))
            actions = policy.sample()
            self.log_probs.append(policy.log_prob(actions))
        actions = actions.tolist()
        self.latencies.append((self.clock() - started, len(rows)))
        return actions

    def serve(self, requests: int) -> None:
        """Answers this many requests."""
        while requests > 0:
            rows, started = self.receive(), self.clock()
            if self.world.batch:
                rows = sorted(rows + self.rest_of_batch(len(self.states) - len(rows)))
            for batch in [rows] if self.world.batch else [[row] for row in rows]:
                self.reply(batch, self.act(batch, started))
            requests -= len(rows)

    def rest_of_batch(self, missing: int) -> list[int]:
        """The next `missing` requests, or those of them that arrive before the timeout."""
        rows, limit = [], self.world.batch_timeout
        end = None if limit is None else time.monotonic() + limit
        while len(rows) < missing:
            arrived = self.receive(None if end is None else max(0.0, end - time.monotonic()))
            if not arrived:
                break
            rows += arrived
        return rows

    def episode(self, steps: int) -> list[tuple[float, int]]:
        self.serve(self.world.observers * steps)
        latencies, self.latencies = self.latencies, []
        if not self.world.compat:
            self.log_probs.clear()
        return latencies


class Observer:
    """Asks for actions. A transport adds `ask(state)`, which returns the action for a state of [*state_size]."""

    def __init__(self, world: World, row: int):
        self.world, self.row = world, row
        self.clock = time.time if world.compat else time.perf_counter

    def episode(self, steps: int) -> list[float]:
        """Seconds from request to action, for each step."""
        latencies = []
        for _ in range(steps):
            state = torch.rand(self.world.state_size)
            started = self.clock()
            self.ask(state)
            latencies.append(self.clock() - started)
        return latencies


# ---- Torch RPC ----
def join_rpc(world: World, rank: int, name: str) -> None:
    """Returns when all have joined. The coordinator, which only waits during an episode, is no member.

    PyTorch asks for the host names of the addresses that it connects, and writes the own one so (::ffff:127.0.0.1)
    that a name server has to answer. Each packet that is lost would cost 5 s.
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://{world.master}")
    rpc.init_rpc(name, rank=rank, world_size=world.observers + 1, rpc_backend_options=options)


class RpcAgent(Agent):
    """Acts in the threads of its calls: of each call, or of the one that makes a batch complete."""

    current: "RpcAgent"

    def __init__(self, world: World, _: None):
        super().__init__(world, torch.zeros(world.observers, *world.state_size))
        RpcAgent.current = self
        self.lock = threading.Lock()
        self.opened_or_answered = threading.Condition(self.lock)  # a batch
        self.waiting: dict[int, torch.futures.Future] = {}
        self.started, self.served = 0.0, 0
        self.episode_served = threading.Semaphore(0)
        if world.batch_timeout is not None:
            threading.Thread(target=self.answer_late, daemon=True).start()
        join_rpc(world, 0, "agent")

    def serve(self, requests: int) -> None:
        self.episode_served.acquire()

    def count(self, requests: int) -> None:
        """Wakes `serve` after the last request of an episode; needs the lock."""
        self.served += requests
        if self.served % (self.world.observers * self.world.episode_steps) == 0:
            self.episode_served.release()

    def request(self, row: int, state: Tensor) -> int:
        started = self.clock()
        self.states[row] = state
        (action,) = self.act([row], started)
        with self.lock:
            self.count(1)
        return action

    def request_batch(self, row: int, state: Tensor) -> torch.futures.Future:
        future = torch.futures.Future()
        self.states[row] = state
        with self.lock:
            if not self.waiting:
                self.started = self.clock()
                self.opened_or_answered.notify()
            self.waiting[row] = future
            if len(self.waiting) == self.world.observers:
                self.answer()
        return future

    def answer(self) -> None:
        """Acts for those that wait; needs the lock."""
        waiting, self.waiting = self.waiting, {}
        self.opened_or_answered.notify()
        rows = sorted(waiting)
        for row, action in zip(rows, self.act(rows, self.started)):
            waiting[row].set_result(action)
        self.count(len(rows))

    def answer_late(self) -> None:
        """Answers each batch that is not complete in time."""
        with self.lock:
            while True:
                self.opened_or_answered.wait_for(lambda: self.waiting)
                batch = self.waiting
                self.opened_or_answered.wait_for(
                    lambda batch=batch: self.waiting is not batch, self.world.batch_timeout
                )
                if self.waiting is batch:
                    self.answer()


def request(row: int, state: Tensor) -> int:
    return RpcAgent.current.request(row, state)


if rpc.is_available():  # else there is no decorator

    @rpc.functions.async_execution
    def request_batch(row: int, state: Tensor) -> torch.futures.Future:
        return RpcAgent.current.request_batch(row, state)


class RpcObserver(Observer):
    def __init__(self, world: World, row: int, _: None):
        super().__init__(world, row)
        join_rpc(world, row + 1, f"observer{row + 1}")

    def ask(self, state: Tensor) -> int:
        return rpc.rpc_sync("agent", request_batch if self.world.batch else request, args=(self.row, state))


# ---- Pipes ----
def make_pipes(world: World) -> list[tuple[Connection, Connection]]:
    """For each observer the agent's end and its own; a state travels as its bytes, an action as eight."""
    return [CONTEXT.Pipe() for _ in range(world.observers)]


class PipeAgent(Agent):
    def __init__(self, world: World, pipes: Sequence[tuple[Connection, Connection]]):
        super().__init__(world, torch.zeros(world.observers, *world.state_size))
        self.pipes, self.buffers = [agent for agent, _ in pipes], self.states.flatten(1).numpy()
        self.rows = {pipe.fileno(): row for row, pipe in enumerate(self.pipes)}

    def receive(self, timeout: float | None = None) -> list[int]:
        # Not connection.wait, which builds a selector each time, nor epoll, which waits for whole milliseconds
        rows = [self.rows[number] for number in select.select(list(self.rows), [], [], timeout)[0]]
        for row in rows:
            self.pipes[row].recv_bytes_into(self.buffers[row])
        return rows

    def reply(self, rows: Sequence[int], actions: Sequence[int]) -> None:
        for row, action in zip(rows, actions):
            self.pipes[row].send_bytes(action.to_bytes(8))


class PipeObserver(Observer):
    def __init__(self, world: World, row: int, pipes: Sequence[tuple[Connection, Connection]]):
        super().__init__(world, row)
        self.pipe = pipes[row][1]

    def ask(self, state: Tensor) -> int:
        self.pipe.send_bytes(state.numpy())
        return int.from_bytes(self.pipe.recv_bytes())


# ---- Shared memory ----
class Shared:
    """A state, a flag and an action for each observer, in memory without a name; and the semaphores that wake."""

    def __init__(self, world: World):
        shape = (world.observers, *world.state_size)
        self.states = torch.frombuffer(mmap.mmap(-1, 4 * math.prod(shape)), dtype=torch.float32).view(shape)
        self.actions = memoryview(mmap.mmap(-1, 8 * world.observers)).cast("q")
        self.has_asked = memoryview(mmap.mmap(-1, world.observers))
        self.requests = CONTEXT.Semaphore(0)  # one for each flag that is set, a little later than the flag
        self.answers = [CONTEXT.Semaphore(0) for _ in range(world.observers)]


class SharedAgent(Agent):
    def __init__(self, world: World, shared: Shared):
        super().__init__(world, shared.states)
        self.shared = shared

    def receive(self, timeout: float | None = None) -> list[int]:
        shared = self.shared
        if not shared.requests.acquire(timeout=timeout):
            return []
        rows = [row for row, asks in enumerate(shared.has_asked) if asks]
        for row in rows:
            shared.has_asked[row] = 0
        for _ in rows[1:]:
            shared.requests.acquire()
        return rows

    def reply(self, rows: Sequence[int], actions: Sequence[int]) -> None:
        for row, action in zip(rows, actions):
            self.shared.actions[row] = action
            self.shared.answers[row].release()


class SharedObserver(Observer):
    def __init__(self, world: World, row: int, shared: Shared):
        super().__init__(world, row)
        self.shared = shared

    def ask(self, state: Tensor) -> int:
        shared, row = self.shared, self.row
        shared.states[row] = state
        shared.has_asked[row] = 1
        shared.requests.release()
        shared.answers[row].acquire()
        return shared.actions[row]


# ---- Ray ----
class RayAgent(Agent):
    """Acts in the event loop of its actor: for each call, or in the one that makes a batch complete."""

    def __init__(self, world: World):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        super().__init__(world, torch.zeros(world.observers, *world.state_size))
        self.buffer = self.states.numpy()  # what arrives is read-only, which PyTorch warns of
        self.waiting: dict[int, asyncio.Future] = {}
        self.started, self.timer, self.cpu = 0.0, None, time.process_time()

    async def request(self, row: int, state: np.ndarray) -> int:
        started = self.clock()
        self.buffer[row] = state
        (action,) = self.act([row], started)
        return action

    async def request_batch(self, row: int, state: np.ndarray) -> int:
        loop = asyncio.get_running_loop()
        self.buffer[row] = state
        if not self.waiting:
            self.started = self.clock()
            if self.world.batch_timeout is not None:
                self.timer = loop.call_later(self.world.batch_timeout, self.answer)
        future = self.waiting[row] = loop.create_future()
        if len(self.waiting) == self.world.observers:
            self.answer()
        return await future

    def answer(self) -> None:
        """Acts for those that wait."""
        if self.timer is not None:
            self.timer.cancel()
        waiting, self.waiting = self.waiting, {}
        rows = sorted(waiting)
        for row, action in zip(rows, self.act(rows, self.started)):
            waiting[row].set_result(action)

    async def measured(self) -> tuple[list[tuple[float, int]], float]:
        """Latencies, and seconds of CPU, since the last time."""
        before, self.cpu = self.cpu, time.process_time()
        return super().episode(0), self.cpu - before


class RayObserver(Observer):
    def __init__(self, world: World, row: int, agent: object):
        torch.set_num_threads(1)
        torch.manual_seed(row + 1)
        super().__init__(world, row)
        import ray

        self.request, self.get = agent.request_batch if world.batch else agent.request, ray.get

    def ask(self, state: Tensor) -> int:
        return self.get(self.request.remote(self.row, state.numpy()))

    def measure(self, steps: int) -> tuple[list[float], float]:
        """Latencies and seconds of CPU of an episode."""
        cpu = time.process_time()
        return self.episode(steps), time.process_time() - cpu


def play_in_ray(world: World, control: Connection) -> None:
    """Starts Ray, the agent and the observers; an episode for each number of steps that arrives."""
    with running_ray(world.observers + 1):  # none claims a core, but as many start at once
        import ray

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each actor would import tables.py and all
        agent = ray.remote(num_cpus=0)(RayAgent).remote(world)
        observers = [ray.remote(num_cpus=0)(RayObserver).remote(world, row, agent) for row in range(world.observers)]

        def get(calls: Sequence, names: Sequence[str]) -> list:
            try:
                return ray.get(calls)
            except ray.exceptions.RayError as error:
                number, cause, found = failure(calls, error)
                # That somebody has ended is raised in an observer's call only if it is the agent
                errors = ray.exceptions
                is_agent = isinstance(error, errors.RayTaskError) and isinstance(cause, errors.RayActorError)
                raise RunFailed(f"{'agent' if is_agent else names[number]}: {describe(cause)}") from found

        names = [f"observer {row + 1}" for row in range(world.observers)]
        get([actor.__ray_ready__.remote() for actor in (agent, *observers)], ["agent", *names])
        control.send(None)
        while True:
            steps = control.recv()
            measured = get([observer.measure.remote(steps) for observer in observers], names)
            control.send([*get([agent.measured.remote()], ["agent"]), *measured])


TRANSPORTS = {  # what is made before the processes start, and what they are
    "torch_rpc": (lambda world: None, RpcAgent, RpcObserver),
    "pipe": (make_pipes, PipeAgent, PipeObserver),
    "shm": (Shared, SharedAgent, SharedObserver),
}
CHOICES = (*TRANSPORTS, "ray")  # which starts its processes itself


def why_not(transport: str) -> str | None:
    """Why this machine can't run the transport, if so."""
    if transport == "torch_rpc" and not rpc.is_available():
        return "this build of PyTorch has no torch.distributed.rpc"
    if transport == "ray" and not importlib.util.find_spec("ray"):
        return "needs Ray (requirements/requirements-ray.txt)"
    return None


# ---- The processes of a run ----
PATIENCE = 60.0  # seconds in which Ray, which may be starting, has to end


class RunFailed(Exception):
    """A process died, reported an error, or did not answer."""


@dataclass
class Worker:
    name: str
    control: Connection
    process: multiprocessing.process.BaseProcess


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Holds back Ctrl-C and SIGTERM."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def exit_with_parent(patience: float) -> None:
    """Ends this process once the one that has started it is gone, however that came; `patience` s later if in order."""
    wait([multiprocessing.parent_process().sentinel])
    if patience:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(patience)
    os._exit(1)


def work(world: World, shared: object, rank: int, control: Connection) -> None:
    """The agent (rank 0) or an observer, or Ray with all of them: an episode for each number of steps that arrives."""
    is_ray = world.transport == "ray"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator ends its processes itself
    # Ray's process ends what it has started and removes its files
    signal.signal(signal.SIGTERM, (lambda *_: sys.exit()) if is_ray else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    for stream in (1, 2) if is_ray else (2,):  # no more than the coordinator's one line
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    threading.Thread(target=exit_with_parent, args=(PATIENCE if is_ray else 0,), daemon=True).start()
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    try:
        if is_ray:
            play_in_ray(world, control)
        _, agent, observer = TRANSPORTS[world.transport]
        worker = observer(world, rank - 1, shared) if rank else agent(world, shared)
        control.send(None)
        while True:
            steps, cpu = control.recv(), time.process_time()
            measured = worker.episode(steps)
            control.send((measured, time.process_time() - cpu))
    except RunFailed as error:
        control.send(error)
    except Exception as error:
        control.send(RunFailed(f"{type(error).__name__}: {error}".splitlines()[0]))


def reason(workers: Sequence[Worker], default: str) -> str:
    """Who was killed, or `default` if nobody was.

    Those that talked to a killed process report errors, perhaps before its end shows.
    """
    end = time.monotonic() + 1
    while time.monotonic() < end:
        codes = {worker.name: worker.process.exitcode for worker in workers}
        killed = {name: signal.Signals(-code).name for name, code in codes.items() if code and code < 0}
        if killed:
            return ", ".join(f"{name} was killed ({number})" for name, number in killed.items())
        time.sleep(0.02)
    return default


def gather(workers: Sequence[Worker], timeout: float) -> list:
    """One message of each worker; raises RunFailed if one has died or failed, or after `timeout` seconds."""
    messages, end = {}, time.monotonic() + timeout
    while len(messages) < len(workers):
        missing = [worker for worker in workers if worker.name not in messages]
        waitables = [worker.control for worker in missing] + [worker.process.sentinel for worker in workers]
        ready = wait(waitables, max(0.0, end - time.monotonic()))
        if not ready:
            names = ", ".join(worker.name for worker in missing)
            raise RunFailed(f"no answer from {names} in time (--timeout)")
        for worker in missing:
            if worker.control in ready:
                try:
                    messages[worker.name] = worker.control.recv()
                except (EOFError, ConnectionError):
                    messages[worker.name] = RunFailed("ended")
                if isinstance(messages[worker.name], RunFailed):
                    raise RunFailed(reason(workers, f"{worker.name}: {messages[worker.name]}"))
        for worker in workers:
            if worker.process.sentinel in ready:
                raise RunFailed(reason(workers, f"{worker.name} ended"))
    return [messages[worker.name] for worker in workers]


def run_world(world: World, timeout: float) -> dict:
    """Starts the processes, runs the episodes and returns the metrics; raises RunFailed.

    However it is left, no process of it is left over.
    """
    workers, measured, is_ray = [], [], world.transport == "ray"
    try:
        shared = None if is_ray else TRANSPORTS[world.transport][0](world)
    except (OSError, OverflowError, MemoryError, ValueError) as error:
        raise RunFailed(f"--transport {world.transport} can't be set up: {error}") from None
    names = ["Ray"] if is_ray else ["agent", *(f"observer {rank}" for rank in range(1, world.observers + 1))]
    sys.stdout.flush()  # else each process inherits what is in the buffer
    try:
        with blocked_signals():
            for rank, name in enumerate(names):
                ours, theirs = CONTEXT.Pipe()
                process = CONTEXT.Process(target=work, args=(world, shared, rank, theirs))
                process.start()
                workers.append(Worker(name, ours, process))
                theirs.close()  # so that the end of the process shows as the end of the pipe
        gather(workers, timeout)
        for _ in range(world.episodes + (not world.compat)):
            for worker in workers:
                worker.control.send(world.episode_steps)
            messages = gather(workers, timeout)
            measured.append(messages[0] if is_ray else messages)
    except BrokenPipeError:
        raise RunFailed(reason(workers, "a process ended")) from None
    finally:
        if is_ray:
            with blocked_signals():
                for worker in workers:
                    worker.process.terminate()
                    worker.process.join(PATIENCE)
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
    measured = measured[-world.episodes :]  # without the warm-up
    batches = [batch for (latencies, _), *_ in measured for batch in latencies]
    waits = [latency for _, *observers in measured for latencies, _ in observers for latency in latencies]
    cpu = {"agent": sum(agent[1] for agent, *_ in measured)}
    cpu["observer"] = sum(seconds for _, *observers in measured for _, seconds in observers)
    return metrics_of(batches, waits, cpu, world.compat)


# ---- Metrics ----
def rounded(metric: str, value: float, compat: bool) -> float:
    if metric.endswith("throughput"):
        return int(value) if compat else round(value, 1)
    return round(value, 3 if compat else 6)


def metrics_of(
    batches: Sequence[tuple[float, int]], waits: Sequence[float], cpu: dict[str, float], compat: bool = False
) -> dict:
    """The metrics of a run.

    batches: seconds and requests of each batch of the agent; waits: seconds of each request of an observer; cpu: CPU
    seconds of the agent, and of all observers.
    """
    latencies, sizes = np.array(batches).T
    waits = np.array(waits)
    samples = dict(zip(METRICS, (latencies, sizes / latencies, waits, 1 / waits)))
    percentiles = (50, 75, 90, 95) if compat else (50, 75, 90, 95, 99)
    result = {}
    for metric, values in samples.items():
        result[metric] = {f"p{p}": rounded(metric, float(np.percentile(values, p)), compat) for p in percentiles}
    if not compat:
        result[CPU] = {name: round(seconds / len(waits), 6) for name, seconds in cpu.items()}
        result[BATCH_SIZE] = round(float(sizes.mean()), 2)
    return result


def medians(runs: Sequence[dict], x_axis: str | None, compat: bool) -> list[dict]:
    """For each transport and point of the x axis, the medians of what its runs have measured."""
    groups = {}
    for run in runs:
        groups.setdefault((run["transport"], run[x_axis] if x_axis else None), []).append(run["metrics"])
    results = []
    for (transport, x), group in groups.items():
        line = {"transport": transport}
        for name, value in group[0].items():
            if isinstance(value, dict):
                both = {key: statistics.median(metrics[name][key] for metrics in group) for key in value}
                line[name] = {key: rounded(name, median, compat) for key, median in both.items()}
            else:
                line[name] = statistics.median(metrics[name] for metrics in group)
        results.append(line | ({x_axis: x} if x_axis else {}))
    return results


# ---- Table and picture ----
def print_report(report: dict) -> None:
    """The original's table, one for each transport; wider, with p99 and CPU seconds, unless `compat`."""
    title = "PyTorch distributed rpc benchmark reinforcement learning suite"
    print("-" * len(title), title, "-" * len(title), sep="\n")
    for key, value in report.items():
        if key not in (*OWN_KEYS, "benchmark_results"):
            print(f"{key} : {value}")
    x_axis, width = report.get("x_axis_name"), 7 if report["compat"] else 10
    first = max(width, len(f"{x_axis} | ")) if x_axis else 0

    def cell(value: object, width: int) -> str:
        text = np.format_float_positional(value, trim="0") if isinstance(value, float) else str(value)
        return text.ljust(width - 1) + " " if width else ""

    for transport in report["transport"].split(","):
        lines = [line for line in report["benchmark_results"] if line["transport"] == transport]
        if "," in report["transport"]:
            print(f"\n{transport}{'' if lines else ': n/a'}")
        for number, line in enumerate(lines):
            groups = {name: value for name, value in line.items() if isinstance(value, dict)}
            if number == 0:
                print(cell(f"{x_axis} |", first) + "".join(cell(name, width * len(groups[name])) for name in groups))
                print(cell("", first) + "".join(cell(key, width) for values in groups.values() for key in values))
            cells = [cell(value, width) for values in groups.values() for value in values.values()]
            print(cell(line.get(x_axis), first) + "".join(cells))


def plot(report: dict, output: Path) -> None:
    """Draws the four metrics against the x axis: a colour a transport, a line at p50, a band from there to p95.

    One panel below the other, in 12 points on 5.6 inches: legible on a phone.
    """
    from matplotlib import rc_context, ticker
    from matplotlib.figure import Figure

    x_axis, results = report.get("x_axis_name"), report["benchmark_results"]
    values = list(dict.fromkeys(line[x_axis] if x_axis else "" for line in results))
    is_to_scale = x_axis in ("world_size", "nlayers", "out_features")
    places = {value: value if is_to_scale else i for i, value in enumerate(values)}
    with rc_context({"font.size": 12, "axes.titlesize": 12}):
        figure = Figure(figsize=(5.6, 11.2), layout="constrained")
        for axes, metric in zip(figure.subplots(4), METRICS):
            scale = 1 if metric.endswith("throughput") else 1e6
            for transport, colour in zip(CHOICES, COLOURS):
                lines = [line for line in results if line["transport"] == transport]
                at = [places[line[x_axis] if x_axis else ""] for line in lines]
                p50, p95 = ([line[metric][key] * scale for line in lines] for key in ("p50", "p95"))
                if lines:
                    axes.plot(at, p50, marker="o", color=colour, label=transport)
                    axes.vlines(at, p50, p95, color=colour, linewidth=5, alpha=0.3)
                    axes.fill_between(at, p50, p95, color=colour, alpha=0.12, linewidth=0)
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.yaxis.set_minor_locator(ticker.NullLocator())
            axes.set_title(f"{metric.split()[0]}: {'latency, µs' if scale > 1 else 'requests per second'}", loc="left")
            axes.set_xticks(list(places.values()), [str(value) for value in places])
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_xlabel((x_axis or "").replace("_", " "))
        handles, labels = axes.get_legend_handles_labels()
        title = "line: median; band: from there to p95"
        figure.legend(handles, labels, title=title, loc="outside lower center", ncols=3, frameon=False)
        try:
            figure.savefig(output, dpi=150, metadata={"Software": None})
        except OSError as error:
            fail(f"--plot {output}: {error.strerror}")


# ---- Arguments ----
def whole(text: str, least: int = 1, most: float = math.inf) -> int:
    if not least <= int(text) <= most:
        raise ValueError
    return int(text)


def boolean(text: str) -> bool:
    if text.lower() not in ("true", "t", "yes", "y", "1", "false", "f", "no", "n", "0"):
        raise ValueError
    return text.lower() in ("true", "t", "yes", "y", "1")


X_AXES = {  # the arguments that may be lists: how a value is read, and what it must be
    "world_size": (lambda text: whole(text, 3, 34), "a whole number from 3 to 34 (coordinator, agent and observers)"),
    "batch": (boolean, "True or False"),
    "state_size": (lambda text: "-".join(str(whole(n)) for n in text.split("-")), "whole numbers, as in 10-20-10"),
    "nlayers": (whole, "a whole number above 0"),
    "out_features": (whole, "a whole number above 0"),
}


def read_arguments(args: Args) -> tuple[dict, str | None]:
    """The original's arguments with proper types, and the name of the one that is a list."""
    arguments = {name: getattr(args, name) for name in ("world_size", "master_addr", "master_port")}
    arguments |= {name: getattr(args, name) for name in X_AXES} | {"output_file_path": scrub(args.output_file_path)}
    lists = [name for name in X_AXES if "," in arguments[name]]
    if len(lists) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')} {arguments[name]}" for name in lists)
        fail(f"{flags}: only one argument may be a list with commas, the x axis")
    for name, (read, what) in X_AXES.items():
        values = []
        for text in arguments[name].split(","):
            try:
                values.append(read(text.strip()))
            except ValueError:
                fail(f"--{name.replace('_', '-')} {arguments[name]}: must be {what}")
        arguments[name] = values if name in lists else values[0]
    return arguments, lists[0] if lists else None


def check_args(args: Args, transports: Sequence[str], arguments: dict) -> None:
    for transport in transports:
        if transport not in CHOICES:
            fail(f"--transport {transport}: must be {', '.join(CHOICES)}, or several of them separated by commas")
    check_seconds(args, "timeout")
    for name in ("repeats", "episodes", "episode_steps"):
        if getattr(args, name) <= 0:
            fail(f"--{name.replace('_', '-')} {getattr(args, name)}: must be above 0")
    if not (args.master_port.isdigit() and 0 < int(args.master_port) < 65536):
        fail(f"--master-port {args.master_port}: must be a number from 1 to 65535")
    if args.batch_timeout is not None and not args.batch_timeout >= 0:
        fail(f"--batch-timeout {args.batch_timeout}: must be at least 0")
    if args.batch_timeout is not None and arguments["batch"] is not True:
        fail(f"--batch-timeout {args.batch_timeout}: needs --batch True")
    if all(why_not(transport) for transport in transports):
        fail(f"--transport {args.transport}: n/a, {why_not(transports[0])}")


def part_of(path: Path) -> Path:
    """What becomes the file once it is whole."""
    return path.with_name(path.name + ".part")


def check_files(args: Args) -> None:
    output = None if args.from_file else Path(args.output_file_path)
    for name, path in (("output-file-path", output), ("plot", args.plot)):
        try:
            if path is not None:
                part_of(path).touch()
                part_of(path).unlink()
        except (OSError, ValueError):  # a ValueError if the path has no name
            fail(f"--{name} {path}: must be a file in a folder that exists and can be written to")
        if path is not None and path.is_dir():
            fail(f"--{name} {path}: must be a file, not a folder")
    if args.plot and args.plot.suffix != ".png":
        fail(f"--plot {args.plot}: must be a PNG file")
    if args.plot:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            fail("--plot: needs matplotlib (pip install matplotlib)")


# ---- The benchmark ----
def write(report: dict, path: Path) -> None:
    """Writes the result with its medians; the file is at every moment a whole one."""
    report["benchmark_results"] = medians(report["runs"], report.get("x_axis_name"), report["compat"])
    try:
        part_of(path).write_text(json.dumps(report, indent=1) + "\n")
        part_of(path).replace(path)
    except OSError as error:
        fail(f"--output-file-path {path}: {error.strerror}")


def measure(args: Args, arguments: dict, x_axis: str | None, transports: Sequence[str]) -> dict:
    """All runs; what they have measured is in the file also when this is stopped."""
    own = {name: getattr(args, name) for name in ("batch_timeout", "repeats", "episodes", "episode_steps", "compat")}
    report = {name: value for name, value in arguments.items() if name != x_axis}
    report |= {"transport": ",".join(transports)} | own | ({"x_axis_name": x_axis} if x_axis else {})
    about = new_result("agent_observer", args, {"torch": torch.__version__, "threads": 1, "gpu": None}, "cpu")
    if "ray" in transports and not why_not("ray"):
        about["versions"]["ray"] = importlib.metadata.version("ray")
    report |= {"benchmark_results": []} | {key: about[key] for key in OWN_KEYS}
    points = [{x_axis: value} for value in arguments[x_axis]] if x_axis else [{}]
    for repeat, at, transport in itertools.product(range(1, args.repeats + 1), points, transports):
        where = ", ".join([transport, *(f"{name} {value}" for name, value in at.items()), f"run {repeat}"])
        if why := why_not(transport):
            print(f"{where}: n/a, {why}")
            continue
        run = {"transport": transport} | at | {"repeat": repeat, "load_before": round(os.getloadavg()[0], 2)}
        started = time.perf_counter()
        try:
            run["metrics"] = run_world(World.of(arguments | at, args, transport), args.timeout)
        except RunFailed as error:
            sys.exit(f"error: {where}: {error}")
        except KeyboardInterrupt:
            sys.exit(print(f"error: {where}: stopped by Ctrl-C", file=sys.stderr) or 128 + signal.SIGINT)
        run["process_seconds"] = round(time.perf_counter() - started, 2)
        report["runs"].append(run)
        write(report, Path(args.output_file_path))
        p50 = run["metrics"]["observer latency (seconds)"]["p50"]
        print(f"{where}: observer p50 {p50:f} s ({run['process_seconds']:.1f} s)", flush=True)
    report["ended"] = now()
    write(report, Path(args.output_file_path))
    return report


def read_report(path: Path) -> dict:
    what = "must be a result file of this program"
    try:
        report = load(path)
    except OSError as error:
        fail(f"--from-file {path}: {what} ({error.strerror})")
    if not (isinstance(report, dict) and report.get("kind") == "agent_observer"):
        fail(f"--from-file {path}: {what}")
    return report


def main(args: Args) -> None:
    terminate_like_interrupt()
    check_files(args)
    if args.from_file:
        report = read_report(args.from_file)
    else:
        arguments, x_axis = read_arguments(args)
        transports = list(dict.fromkeys(args.transport.split(",")))
        check_args(args, transports, arguments)
        report = measure(args, arguments, x_axis, transports)
    print_report(report)
    if args.plot:
        plot(report, args.plot)


if __name__ == "__main__":
    main(command_line(Args, __doc__))

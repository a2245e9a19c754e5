"""What scan.py measures: a linear recurrence, and cells with their projections, as loops, scans, native layers and JAX.

scan.py imports this only when it measures, for tables.py, which imports that, has no use for torch. The recurrence and
the cells are those of leanrl/ppo_memory.py and its compiled version, whose options for the compiler these are, too.
"""

import contextlib
import copy
import ctypes
import gc
import importlib
import itertools
import math
import os
import re
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad_and_value

from speed import SCRIPTS, scrub

sys.path.append(str(SCRIPTS))
memory = importlib.import_module("ppo_memory")

FORMS = {  # of `linear_recurrence`, in the place of what it chooses itself: rows of a chunk
    **{"loop": sys.maxsize, "chunks of 4": 4, "chunks of 8": 8, "chunks of 16": 16, "chunks of 32": 32},
    "doubling": None,
}
UNROLLED = {"recurrence": 64, "cell": 16}  # most steps of a loop that is compiled, which takes the longer the more
PILOT = 64  # steps of a loop from which the time of all its steps is estimated
COMPILED = ("compiled", "captured", "JAX")  # beginnings of the names of arms whose first call compiles
TOLERANCE = 1e-3  # of the largest element of what is compared; the errors themselves are recorded
LEAST_CALLS, MOST_CALLS = 3, 50  # of an arm that is timed
ONCE = 1.0  # seconds from which on the call of an arm that is compared is also its only one
TRUSTED = ("eager loop", "native between resets", "scan")  # which can do all that the others can
SNIPPET = {"members": 3, "batch": 4, "inputs": 32, "size": 200, "length": 10}  # of TorchRL's issue 2325

Given = Mapping[str, torch.Tensor]  # what is differentiated: a, b and h0; or x and a cell's parameters
Run = Callable[[Given, torch.Tensor], torch.Tensor]  # that and resets, [T, B] -> outputs, [T, B, D]


class CannotRun(Exception):
    """Says why an arm has no figure here."""


# ---- Loops and padding ----
def loop_recurrence(a: torch.Tensor, b: torch.Tensor, h: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """`linear_recurrence` step by step; the same arguments."""
    if parts == 2:  # complex numbers are fewer operations
        states = loop_recurrence(*(torch.complex(*number.chunk(2, -1)) for number in (a.expand_as(b), b, h)))
        return torch.cat([states.real, states.imag], -1)
    states = []
    for factor, added in zip(a.expand_as(b).unbind(0), b.unbind(0), strict=True):
        h = torch.addcmul(added, factor, h)
        states.append(h)
    return torch.stack(states)


def loop_steps(cell: nn.Module, x: torch.Tensor, state: torch.Tensor, reset: torch.Tensor):
    """A cell's `forward` by its `step`: all of it, projections included, step by step."""
    outputs = []
    for row, begins in zip(x.unbind(0), reset.unbind(0), strict=True):
        output, state = cell.step(row, state, begins)
        outputs.append(output)
    return torch.stack(outputs), state


def loop_cell(cell: nn.Module) -> nn.Module:
    """The cell, with the same parameters, whose `forward` is such a loop."""
    looped = copy.copy(cell)
    looped.forward = types.MethodType(loop_steps, looped)
    return looped


@contextlib.contextmanager
def looped_recurrence() -> Iterator[None]:
    """Has the linear cells, whose projections still take all steps at once, run their recurrence step by step."""
    scan, memory.linear_recurrence = memory.linear_recurrence, loop_recurrence
    try:
        yield
    finally:
        memory.linear_recurrence = scan


def double(a: list, b: list, h: list, length: None, reverse: bool) -> list[torch.Tensor]:
    """`scan` by doubling the reach of every row (Hillis and Steele 1986); the same arguments but `length`."""
    a, b = ([x.flip(0) if reverse else x for x in number] for number in (a, b))
    first = memory.advance([x[0] for x in a], [x[0] for x in b], h)
    b, reach = [torch.cat([row[None], x[1:]]) for row, x in zip(first, b, strict=True)], 1
    while reach < len(b[0]):
        factor = [x[reach:] for x in a]
        following = memory.advance(factor, [x[reach:] for x in b], [x[:-reach] for x in b])
        b = [torch.cat([x[:reach], y]) for x, y in zip(b, following, strict=True)]
        following = memory.times(factor, [x[:-reach] for x in a])
        a = [torch.cat([x[:reach], y]) for x, y in zip(a, following, strict=True)]
        reach *= 2
    return [x.flip(0) if reverse else x for x in b]


def formed(call: Callable[[], list], form: str) -> Callable[[], list]:
    """The call, in which `linear_recurrence` has one of FORMS; what is compiled has that of its first call."""

    def run() -> list:
        before = memory.chunk_length, memory.scan
        memory.chunk_length = lambda *_: FORMS[form]
        memory.scan = double if FORMS[form] is None else memory.scan
        try:
            return call()
        finally:
            memory.chunk_length, memory.scan = before

    return run


def native_layer(cell: nn.Module) -> nn.Module:
    """nn.GRU or nn.LSTM with a copy of the parameters of a cell's nn.GRUCell or nn.LSTMCell."""
    size = cell.cell.hidden_size
    layer = {nn.GRUCell: nn.GRU, nn.LSTMCell: nn.LSTM}[type(cell.cell)](size, size)
    with torch.no_grad():
        for name, parameter in cell.cell.named_parameters():
            getattr(layer, f"{name}_l0").copy_(parameter)
    return layer.to(cell.cell.weight_hh.device)


def run_padded(layer: nn.Module, x: torch.Tensor, reset: torch.Tensor) -> torch.Tensor:
    """Splits the rows at resets into episodes, pads these to the longest, runs them side by side, and joins them.

    [T, B, D], [T, B] -> [T, B, D]; all states begin with zero.
    """
    length, batch = reset.shape
    begins = reset.bool()
    begins[0] = True
    first = begins.T.flatten().nonzero().squeeze(1)  # of the rows of all sequences, one after the other
    lengths = torch.diff(first, append=first.new_tensor([length * batch]))
    steps = torch.arange(int(lengths.max()), device=x.device)[:, None]
    is_there = steps < lengths
    # pad_sequence takes as much memory to differentiate as there are episodes times all their steps
    rows = (first + steps) * is_there
    episodes = x.transpose(0, 1).flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, rows.shape)
    outputs = layer(episodes * is_there[..., None])[0]  # [longest, episodes, D]
    return outputs.transpose(0, 1)[is_there.T].view(batch, length, -1).transpose(0, 1)


# ---- Models ----
class Model:
    """A recurrence or a cell at one size, with all that its arms are given: tensors of fixed address."""

    def __init__(self, name: str, length: int, batch: int, size: int, device: str):
        torch.manual_seed(0)
        self.name, self.length, self.batch, self.device = name, length, batch, device
        shape = (length, batch, size)
        self.cell = None if name == "recurrence" else memory.CELLS[name](size).to(device)
        self.is_linear = self.cell is None or isinstance(self.cell, memory.LinearCell)
        if self.cell is None:
            given = {"a": 0.9 + 0.099 * torch.rand(shape), "b": torch.randn(shape), "h0": torch.randn(batch, size)}
        else:
            given = {"x": torch.randn(shape)}
            self.state = self.cell.initial_state(batch)
        self.given = {key: value.to(device).requires_grad_() for key, value in given.items()}
        if self.cell is not None:
            self.given |= dict(self.cell.named_parameters())
        self.weights = torch.randn(shape, device=device)  # of the outputs in the loss
        self.reset = torch.zeros(length, batch, device=device)

    def set_resets(self, share: float) -> None:
        """Draws resets for this share of all steps, in place."""
        generator = torch.Generator().manual_seed(1)
        self.reset.copy_(torch.rand(self.length, self.batch, generator=generator) < share)

    def scan(self, given: Given, reset: torch.Tensor) -> torch.Tensor:
        if self.cell is None:
            return memory.linear_recurrence(memory.after_reset(given["a"], reset), given["b"], given["h0"])
        return self.cell(given["x"], self.state, reset)[0]

    def between_resets(self, given: Given, reset: torch.Tensor) -> torch.Tensor:
        """PyTorch's own loops also where the script's are the faster ones."""
        before = memory.MIN_MEAN_LENGTH, memory.MIN_BATCH
        memory.MIN_MEAN_LENGTH = memory.MIN_BATCH = 0
        try:
            return self.scan(given, reset)
        finally:
            memory.MIN_MEAN_LENGTH, memory.MIN_BATCH = before

    def loop(self, given: Given, reset: torch.Tensor) -> torch.Tensor:
        if self.cell is None:
            return loop_recurrence(memory.after_reset(given["a"], reset), given["b"], given["h0"])
        return loop_cell(self.cell)(given["x"], self.state, reset)[0]

    def recurrence_loop(self, given: Given, reset: torch.Tensor) -> torch.Tensor:
        with looped_recurrence():
            return self.scan(given, reset)

    def functional(self, is_loop: bool) -> Run:
        """The scan or the loop as a function of the cell's parameters, too."""
        if self.cell is None:
            return self.loop if is_loop else self.scan
        cell = loop_cell(self.cell) if is_loop else copy.copy(self.cell)
        cell.is_looped = True  # of GRU and LSTM, as in the compiled scripts
        return lambda given, reset: functional_call(
            cell, {key: value for key, value in given.items() if key != "x"}, (given["x"], self.state, reset)
        )[0]

    def reference(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Outputs and gradients of a loop over time in float64, on the CPU."""
        twin = copy.copy(self)
        twin.cell = None if self.cell is None else copy.deepcopy(self.cell).cpu().double()
        given = {key: value.detach().cpu().double().requires_grad_() for key, value in self.given.items()}
        if twin.cell is not None:
            given |= dict(twin.cell.named_parameters())
            twin.state = twin.cell.initial_state(self.batch)
        run = twin.recurrence_loop if self.is_linear else twin.loop
        outputs = run(given, self.reset.cpu().double())
        return outputs.detach(), differentiate(outputs, given, self.weights.cpu().double())

    def pilot(self) -> "Model":
        """The same with fewer steps."""
        return Model(self.name, PILOT, self.batch, self.weights.shape[-1], self.device)


def differentiate(outputs: torch.Tensor, given: Given, weights: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad((outputs * weights).sum(), list(given.values())))


# ---- What is called ----
def eager_call(run: Run, model: Model, given: Given, trains: bool) -> Callable[[], list[torch.Tensor]]:
    """A function without arguments: outputs, or with `trains` all gradients."""

    def forward() -> list[torch.Tensor]:
        with torch.no_grad():
            return [run(given, model.reset)]

    def train() -> list[torch.Tensor]:
        return differentiate(run(given, model.reset), given, model.weights)

    return train if trains else forward


def compiled(function: Callable, device: str) -> Callable:
    """The function as one compiled graph, for the sizes of its first call alone."""
    # Dynamo finds what it has compiled by the code object, then by guards, of which the scripts leave out nearly all
    torch.compiler.allow_in_graph(memory.linear_recurrence)  # else Dynamo may drop its own backward, as in the scripts
    function = types.FunctionType(function.__code__.replace(), globals(), "step", None, function.__closure__)
    options = {"cpp_wrapper": device == "cpu", "cpp.vec_isa_ok": True, "cpp.use_decompose_tanh": True}
    options |= {"realize_reads_threshold": 2}  # else what a scan reads is computed anew, as the scripts say
    options |= {"size_asserts": False, "guard_filter_fn": lambda guards: [False] * len(guards)}
    # Of the second size that a process compiles, Dynamo would make the sizes variables of the graph
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def compiled_call(run: Run, model: Model, trains: bool) -> Callable[[], list[torch.Tensor]]:
    """The same, as one compiled graph."""
    given = {key: value.detach() for key, value in model.given.items()}

    def loss(given: Given, reset: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (run(given, reset) * weights).sum()

    def step(given: Given, reset: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        return list(grad_and_value(loss)(given, reset, weights)[0].values()) if trains else [run(given, reset)]

    step = compiled(step, model.device)

    def call() -> list[torch.Tensor]:
        with torch.no_grad():
            return step(given, model.reset, model.weights)

    return call


def block_call(model: Model, steps: int, trains: bool) -> Callable[[], list[torch.Tensor]]:
    """The loop as calls of a compiled function, which is the loop over so many steps; steps left over are eager."""
    cell = None if model.cell is None else loop_cell(model.cell)
    parameters = [] if cell is None else [name for name, _ in cell.named_parameters()]

    def block(given: Given, rows: tuple, state: torch.Tensor, reset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if cell is not None:
            return functional_call(cell, {name: given[name] for name in parameters}, (*rows, state, reset))
        states = loop_recurrence(memory.after_reset(rows[0], reset), rows[1], state)
        return states, states[-1]

    compiled_block = compiled(block, model.device)

    def run(given: Given, reset: torch.Tensor) -> torch.Tensor:
        state = given["h0"] if cell is None else model.state.detach().requires_grad_(trains)  # as the later ones do
        names, outputs = ("a", "b") if cell is None else ("x",), []
        for *rows, begins in zip(*(given[name].split(steps) for name in names), reset.split(steps), strict=True):
            output, state = (compiled_block if len(begins) == steps else block)(given, tuple(rows), state, begins)
            outputs.append(output)
        return torch.cat(outputs)

    return eager_call(run, model, model.given, trains)


def captured_call(call: Callable[[], list[torch.Tensor]]) -> Callable[[], list[torch.Tensor]]:
    """The same, captured in a CUDA graph and replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()

    def replay() -> list[torch.Tensor]:
        graph.replay()
        return outputs

    replay.peak_bytes = None
    return replay


def import_jax(device: str):
    """JAX on the device; its threads on a CPU are as many as this process may use cores."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "cuda": "cuda"}[device]
    try:
        import jax

        jax.devices()
    except ImportError:
        raise CannotRun("needs JAX (requirements/requirements-jax.txt)") from None
    except RuntimeError:
        raise CannotRun("JAX sees no GPU") from None
    jax.config.update("jax_default_matmul_precision", "highest")  # no TF32, as in torch
    return jax


def jax_call(model: Model, trains: bool) -> Callable[[], list]:
    """The same in JAX, compiled as one function, on copies of the tensors; its `peak_bytes` are the compiler's own."""
    if model.name not in ("recurrence", "mingru", "lru"):
        raise CannotRun("is written for the recurrence, LRU and minGRU alone")
    jax = import_jax(model.device)
    jnp = jax.numpy

    def recurrence(a, b, h0):
        def combine(left, right):
            return right[0] * left[0], right[0] * left[1] + right[1]

        return jax.lax.associative_scan(combine, (a, b.at[0].add(a[0] * h0)))[1]

    def linear(given, name, x):
        return x @ given[f"{name}.weight"].T + given.get(f"{name}.bias", 0)

    def outputs(given, reset):
        kept = (1 - reset)[..., None]
        if model.name == "recurrence":
            return recurrence(given["a"] * kept, given["b"], given["h0"])
        x, zeros = given["x"], jnp.zeros(())
        if model.name == "mingru":
            gate = jax.nn.sigmoid(linear(given, "gate", x))
            return recurrence((1 - gate) * kept, gate * linear(given, "candidate", x), zeros)
        modulus = jnp.exp(math.log(0.999) - jnp.exp(given["log_decay"]))
        real, imaginary = jnp.split(linear(given, "input", x), 2, -1)
        entering = jnp.sqrt(1 - modulus**2) * jax.lax.complex(real, imaginary)
        states = recurrence(modulus * jnp.exp(1j * given["phase"]) * kept, entering, zeros)
        y = linear(given, "output", jnp.concatenate([states.real, states.imag], -1)) + given["skip"] * x
        value, gate = jnp.split(linear(given, "glu", jax.nn.gelu(y, approximate=False)), 2, -1)
        return x + value * jax.nn.sigmoid(gate)

    def loss(given, reset, weights):
        return (outputs(given, reset) * weights).sum()

    step = jax.jit(jax.grad(loss) if trains else lambda given, reset, weights: outputs(given, reset))
    given = {key: jnp.asarray(value.detach().cpu().numpy()) for key, value in model.given.items()}
    weights = jnp.asarray(model.weights.cpu().numpy())
    resets = {}

    def copy_resets() -> None:
        if resets.get("version") != model.reset._version:  # before the arm is timed, which is after its first call
            resets.update(version=model.reset._version, array=jnp.asarray(model.reset.cpu().numpy()))

    copy_resets()
    compiled = step.lower(given, resets["array"], weights).compile()

    def call() -> list:
        copy_resets()
        done = jax.block_until_ready(compiled(given, resets["array"], weights))
        return [done[key] for key in given] if trains else [done]

    needs = compiled.memory_analysis()
    call.peak_bytes = needs.temp_size_in_bytes + needs.output_size_in_bytes
    return call


# ---- The snippet of TorchRL's issue ----
class Ensemble(Model):
    """GRU cells side by side under `vmap`, in a loop over time: of shared parameters, as in the issue, or stacked.

    A cell is written out, as TorchRL's is, since nn.GRUCell has no batching rule.
    """

    def __init__(self, device: str, is_stacked: bool):
        torch.manual_seed(0)
        members, self.batch, inputs, size, self.length = SNIPPET.values()
        self.name, self.device, self.is_stacked, self.is_linear = "ensemble", device, is_stacked, False
        cells = [nn.GRUCell(inputs, size) for _ in range(members)]
        given = {key: value for key, value in cells[0].named_parameters()}
        if is_stacked:
            given = {key: torch.stack([cell.state_dict()[key] for cell in cells]) for key in given}
        self.given = {key: value.detach().to(device).requires_grad_() for key, value in given.items()}
        self.x = torch.randn(members, self.batch, self.length, inputs, device=device)
        self.state = torch.zeros(members, self.batch, size, device=device)
        self.weights = torch.ones(self.length, members, self.batch, size, device=device)  # the loss is a sum
        self.reset = torch.zeros(self.length, self.batch, device=device)

    @staticmethod
    def step(given: Given, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """A step of a GRU cell; [B, inputs], [B, D] -> [B, D]."""
        from_x = F.linear(x, given["weight_ih"], given["bias_ih"]).chunk(3, -1)
        from_h = F.linear(h, given["weight_hh"], given["bias_hh"]).chunk(3, -1)
        reset, update = torch.sigmoid(from_x[0] + from_h[0]), torch.sigmoid(from_x[1] + from_h[1])
        candidate = torch.tanh(from_x[2] + reset * from_h[2])
        return candidate + update * (h - candidate)

    def loop(self, given: Given, reset: torch.Tensor) -> torch.Tensor:
        step = torch.vmap(self.step, in_dims=(0 if self.is_stacked else None, 0, 0))
        h, states = self.state, []
        for x in self.x.unbind(-2):
            h = step(given, x, h)
            states.append(h)
        return torch.stack(states)

    def functional(self, is_loop: bool) -> Run:
        return self.loop

    def reference(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """By nn.GRUCell, member by member, in float64."""
        given = {key: value.detach().cpu().double().requires_grad_() for key, value in self.given.items()}
        outputs = []
        for member, (x, h) in enumerate(zip(self.x.cpu().double(), self.state.cpu().double(), strict=True)):
            own = {key: value[member] if self.is_stacked else value for key, value in given.items()}
            cell, states = nn.GRUCell(x.shape[-1], h.shape[-1]).double(), []
            for row in x.unbind(-2):
                h = functional_call(cell, own, (row, h))
                states.append(h)
            outputs.append(torch.stack(states))
        outputs = torch.stack(outputs, 1)
        return outputs.detach(), differentiate(outputs, given, self.weights.cpu().double())


# ---- Arms ----
def arms_of(model: Model, limit: float) -> dict[str, Callable[[bool], Callable[[], list]]]:
    """For each arm a function that builds its call, with or without derivatives, or raises CannotRun."""
    on_gpu, is_snippet = model.device == "cuda", isinstance(model, Ensemble)
    longest = UNROLLED["recurrence" if model.name == "recurrence" else "cell"]

    def checked_loop(run: str, trains: bool) -> Callable[[], list]:
        if model.length > PILOT:
            pilot = model.pilot()
            call = eager_call(getattr(pilot, run), pilot, pilot.given, trains)
            call()
            seconds = min(seconds_of(call, model.device) for _ in range(2)) * model.length / PILOT
            if seconds > limit:
                raise CannotRun(f"a call would take about {seconds:.2g} s")
        return eager_call(getattr(model, run), model, model.given, trains)

    def compiled_loop(trains: bool) -> Callable[[], list]:
        if model.length > longest:  # all of it, unrolled, would take minutes to compile
            return block_call(model, longest, trains)
        return compiled_call(model.functional(is_loop=True), model, trains)

    def captured(build: Callable[[bool], Callable[[], list]], trains: bool) -> Callable[[], list]:
        if not on_gpu:
            raise CannotRun("needs CUDA")
        return captured_call(build(trains))

    def eager_loop(trains: bool) -> Callable[[], list]:
        return checked_loop("loop", trains)

    def compiled_scan(trains: bool) -> Callable[[], list]:
        return compiled_call(model.functional(is_loop=False), model, trains)

    def check_form() -> None:
        if on_gpu:
            raise CannotRun("on CUDA the scan is a Triton kernel")

    def scan_in(form: str, trains: bool) -> Callable[[], list]:
        check_form()
        return formed(arms["scan"](trains), form)

    def compiled_scan_in(form: str, trains: bool) -> Callable[[], list]:
        check_form()
        if form == "chunks of 32" or (form == "loop" and model.length > UNROLLED["recurrence"]):
            raise CannotRun("takes minutes to compile, unless it is the loop")
        return formed(compiled_scan(trains), form)

    arms = {
        "eager loop": eager_loop,
        "compiled loop": compiled_loop,
        "captured loop": lambda t: captured(eager_loop, t),
    }
    if is_snippet:
        return arms
    if model.is_linear:
        if model.cell is not None:
            arms["eager loop, recurrence only"] = lambda trains: checked_loop("recurrence_loop", trains)
        arms["scan"] = lambda trains: eager_call(model.scan, model, model.given, trains)
        arms |= {"compiled scan": compiled_scan, "captured scan": lambda trains: captured(compiled_scan, trains)}
        arms["JAX scan"] = lambda trains: jax_call(model, trains)
        arms |= {f"scan, {form}": partial(scan_in, form) for form in FORMS}
        return arms | {f"compiled scan, {form}": partial(compiled_scan_in, form) for form in FORMS}
    layer = native_layer(model.cell)
    given = {"x": model.given["x"], **{f"cell.{name}": p for name, p in layer.named_parameters()}}

    def native(trains: bool) -> Callable[[], list]:
        return eager_call(lambda given, reset: layer(given["x"])[0], model, given, trains)

    def padded(trains: bool) -> Callable[[], list]:
        return eager_call(lambda given, reset: run_padded(layer, given["x"], reset), model, given, trains)

    def stretches(trains: bool) -> Callable[[], list]:
        return eager_call(model.between_resets, model, model.given, trains)

    arms |= {"native": native, "native, padded": padded, "native between resets": stretches}
    return arms | {"compiled operator": compiled_scan}


def why_not(arm: str, share: float) -> str | None:
    """Why an arm is not measured with so many resets; None if it is."""
    if arm == "native" and share:
        return "knows no resets"
    return "the same as native: nothing to pad" if arm == "native, padded" and not share else None


# ---- Figures of a call ----
def seconds_of(call: Callable[[], object], device: str) -> float:
    """Until the device has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def memory_of_process(name: str) -> int:
    """VmRSS or VmHWM, in bytes."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def observe(call: Callable[[], list], device: str) -> tuple[list, float, int | None]:
    """What a call yields, its seconds, and the bytes that it takes at most above what was there before, if known.

    What a captured graph takes it has taken before: that is not known.
    """
    gc.collect()
    before, outputs = None, []
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        with contextlib.suppress(OSError, AttributeError):  # on Linux only
            ctypes.CDLL(None).malloc_trim(0)  # what other arms have freed
            Path("/proc/self/clear_refs").write_text("5")  # the peak falls to what is there now
            before = memory_of_process("VmRSS")
    seconds = seconds_of(lambda: outputs.extend(call()), device)
    if before is not None:
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else memory_of_process("VmHWM")
        before = max(peak - before, 0)
    return outputs, seconds, getattr(call, "peak_bytes", before)


def error_of(outputs: Sequence, reference: Sequence[torch.Tensor]) -> float:
    """The largest difference, as a share of the largest element of its tensor."""
    errors = []
    for ours, theirs in zip(outputs, reference, strict=True):
        theirs = theirs.detach().cpu()
        ours = ours.detach().cpu() if isinstance(ours, torch.Tensor) else torch.from_numpy(np.array(ours))
        errors.append(((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)).item())
    return float(np.max(errors))  # Python's max would pass over a NaN


def take_turns(calls: Mapping[str, Callable[[], object]], seconds: float, device: str) -> dict[str, list[float]]:
    """Seconds of the calls, one arm after the other, and in every second turn in reverse order.

    An arm is left out once it has had `seconds` and LEAST_CALLS, or MOST_CALLS.
    """
    taken = {arm: [] for arm in calls}
    for turn in itertools.count():
        left = [arm for arm, own in taken.items() if len(own) < MOST_CALLS]
        left = [arm for arm in left if sum(taken[arm]) < seconds or len(taken[arm]) < LEAST_CALLS]
        if not left:
            return taken
        for arm in left[:: -1 if turn % 2 else 1]:
            taken[arm].append(seconds_of(calls[arm], device))


def failure(error: Exception) -> dict:
    """What a line says of an arm that has raised an exception; a compiler's may be of any kind."""
    if isinstance(error, CannotRun):
        return {"status": "n/a", "reason": str(error)}
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return {"status": "failed", "reason": scrub(f"{type(error).__name__}: {text}")}


def start_compilers(chosen: Sequence[str], device: str) -> None:
    """Has the compilers of the chosen arms compile something small, so that no arm's seconds are those of starting one.

    JAX that is not there is none: its arm says so.
    """
    if any(arm.startswith(("compiled", "captured scan")) for arm in chosen):
        torch.compile(lambda x: x + 1)(torch.zeros(2, device=device))
    if "JAX scan" in chosen:
        with contextlib.suppress(CannotRun):
            import_jax(device).jit(lambda x: x + 1)(0.0).block_until_ready()


def measure(
    model: Model,
    shares: Sequence[float],
    passes: Sequence[str],
    chosen: Sequence[str],
    limit: float,
    seconds: float,
) -> list[dict]:
    """A line for each chosen arm, pass and share of resets: its median time and what else is known, or why it has none.

    What an arm yields is compared with a float64 loop at the first share, and at the others, whose loop would take as
    long, with the fastest other arm that has stood this comparison there, if two have.
    """
    lines = []
    start_compilers(chosen, model.device)
    model.set_resets(shares[0])
    outputs, gradients = model.reference()
    for name in passes:
        trains, calls, about = name != "forward", {}, {}
        expected, trusted = gradients if trains else [outputs], {}
        model.set_resets(shares[0])
        for arm, build in arms_of(model, limit).items():
            if arm not in chosen:
                continue
            about[arm], started = {"arm": arm, "pass": name}, time.perf_counter()
            try:
                calls[arm] = build(trains)
                if arm.startswith(COMPILED):
                    calls[arm]()
                    about[arm]["compile_seconds"] = round(time.perf_counter() - started, 3)
            except Exception as error:
                about[arm] |= failure(error)
        for share in shares:
            model.set_resets(share)
            able = [arm for arm in sorted(trusted, key=trusted.get) if "reason" not in about[arm]]
            known = {arm: calls[arm]() for arm in able[:2]}  # two, as no arm is its own reference
            if len(known) < 2 and share != shares[0]:
                expected = model.reference()[1] if trains else model.reference()[:1]
            results, timed = {}, {}
            for arm, own in about.items():
                results[arm] = line = {**own, "resets": share}
                if "reason" not in line and (reason := why_not(arm, share)):
                    line |= {"status": "n/a", "reason": reason}
                if "reason" in line:
                    continue
                try:
                    yielded, took, line["peak_bytes"] = observe(calls[arm], model.device)
                    if took > limit:
                        raise CannotRun(f"a call takes {took:.2g} s")
                    others = [found for other, found in known.items() if other != arm]
                    line["error"] = error_of(yielded, others[0] if len(known) == 2 else expected)
                    if not line["error"] < TOLERANCE:
                        raise ArithmeticError(f"differs from the reference by {line['error']:.1e}")
                except Exception as error:
                    about[arm] |= failure(error)
                    line |= failure(error)
                    continue
                if share == shares[0] and arm in TRUSTED:
                    trusted[arm] = took
                line |= {"status": "finished", "seconds": took, "calls": 1}
                if took < ONCE:
                    timed[arm] = calls[arm]
            for arm, own in take_turns(timed, seconds, model.device).items():
                results[arm] |= {"seconds": statistics.median(own), "calls": len(own)}
            lines += results.values()
    return lines

"""The linear recurrence's kernel: in Triton's interpreter, its operator with a stand-in on the CPU, and on a GPU."""

import importlib.util
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.func import grad_and_value, vmap

import ppo_memory
from ppo_memory import kernel_scan

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside test_the_interpreter")
ordinary = pytest.mark.skipif(INTERPRETED, reason="runs outside Triton's interpreter")
MANY = 65_536, 32_784  # steps and lanes of more numbers than 32 bits count
needs_gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = [(steps, lanes) for steps in (1, 2, 31, 64, 1000, 5000) for lanes in (1, 5, 64, 300)]
both_ways = pytest.mark.parametrize("reverse", [False, True])
both_numbers = pytest.mark.parametrize("parts", [1, 2], ids=["real", "complex"])


def whole(parts):
    """The numbers that their parts make, in double precision."""
    parts = [part.detach().double().cpu() for part in parts]
    return torch.complex(*parts) if len(parts) == 2 else parts[0]


def by_loop(a, b, h0, reverse=False):
    pairs, states = list(zip(a.unbind(0), b.unbind(0), strict=True)), []
    for x, y in pairs[::-1] if reverse else pairs:
        h0 = x * h0 + y
        states.append(h0)
    return torch.stack(states[::-1] if reverse else states)


def example(parts, steps, *lanes, device="cpu", dtype=torch.float32):
    """Factors of a modulus up to 1, some of them 0 as where an episode begins, inputs and first states, as parts."""
    generator = torch.Generator().manual_seed(steps)
    a, b = (torch.randn(parts, steps, *lanes, dtype=torch.float64, generator=generator) for _ in range(2))
    a = a / a.square().sum(0).sqrt() * torch.rand(steps, *lanes, dtype=torch.float64, generator=generator) ** 0.1
    a = a * (torch.rand(steps, *lanes, generator=generator) > 0.02)
    h0 = torch.randn(parts, *lanes, dtype=torch.float64, generator=generator)
    return [[*x.to(device, dtype).unbind(0)] for x in (a, b, h0)]


def assert_is_loop(a, b, h0, reverse, tolerance=2e-6):
    """To `tolerance` of the largest number."""
    states, expected = whole(kernel_scan(a, b, h0, reverse)), by_loop(*map(whole, (a, b, h0)), reverse)
    assert (states - expected).abs().max() <= tolerance * expected.abs().max()


def by_kernel(a, b, h0, parts, reverse):
    """`run_scan` by the kernel, on any device."""
    return torch.cat(kernel_scan(*([*x.chunk(parts, -1)] for x in (a, b, h0)), reverse), -1)


@pytest.fixture(autouse=True)
def kernel_everywhere(monkeypatch):
    monkeypatch.setattr(ppo_memory, "run_scan", by_kernel)


@torch.compiler.allow_in_graph
def recurrence(a, b, h0):
    return ppo_memory.linear_recurrence(a, b, h0)


def squares(function):
    def loss(a, b, h0):
        h = function(a, b, h0)
        return (torch.view_as_real(h) if h.is_complex() else h).square().sum()

    return loss


def mapped(function):
    return lambda *arguments: vmap(function, in_dims=(1, 1, 0), out_dims=1)(*arguments)


def derived(loss):
    return lambda *arguments: grad_and_value(loss, argnums=(0, 1, 2))(*arguments)


def derived_in_map(function):
    return lambda *arguments: vmap(derived(squares(function)), in_dims=(1, 1, 0))(*arguments)


def same_factors(function):
    """Factors that are the same for all that are mapped over."""
    return lambda a, b, h0: vmap(lambda y, h: function(a[:, 0], y, h), in_dims=(1, 0), out_dims=1)(b, h0)


TRANSFORMS = {
    "forward": lambda function: function,
    "grad": lambda function: derived(squares(function)),
    "vmap": mapped,
    "vmap, one not mapped": same_factors,
    "vmap of grad": derived_in_map,
    "grad of vmap": lambda function: derived(squares(mapped(function))),
}


# ---- Triton's interpreter ----
@ordinary
def test_the_interpreter():
    """Runs the tests below in a process of their own, as Triton is interpreted or not from its import on."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreted", __file__]
    result = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-5000:]


@pytest.fixture(autouse=INTERPRETED)
def counting_interpreter(monkeypatch):
    """Loops count as in Triton 3.7: the interpreter of 3.6 makes a number of an array, which NumPy 2.4 refuses."""
    from triton.runtime.interpreter import _LangPatchScope

    set_attr = _LangPatchScope.set_attr

    def mended(scope, owner, name, value):
        set_attr(scope, owner, name, (lambda x: int(x.handle.data.squeeze())) if name == "__index__" else value)

    monkeypatch.setattr(_LangPatchScope, "set_attr", mended)


@pytest.fixture
def fast_interpreter(monkeypatch):
    """Scans by doubling whole blocks; the interpreter's own way, number after number, takes minutes."""
    from triton.runtime.interpreter import ScanOps

    def scan(self, tensors):
        assert self.axis == 0 and not self.reverse
        shift = 1
        while shift < tensors[0].shape[0]:
            earlier = [self.to_tensor(np.roll(x.handle.data, shift, 0), x.dtype) for x in tensors]
            both = self.combine_fn.fn(*earlier, *tensors)
            for x, y in zip(both, tensors, strict=True):
                x.handle.data[:shift] = y.handle.data[:shift]
            tensors, shift = both, 2 * shift
        return tensors

    monkeypatch.setattr(ScanOps, "generic_scan", scan)


@interpreted
@both_numbers
@both_ways
@pytest.mark.parametrize("steps,lanes", [(1, 1), (5, 3), (31, 5), (64, 2)])
def test_interpreted_kernel_number_after_number(steps, lanes, reverse, parts):
    assert_is_loop(*example(parts, steps, lanes), reverse)


@interpreted
@both_numbers
@both_ways
@pytest.mark.parametrize("steps,lanes", SIZES)
def test_interpreted_kernel_is_the_loop(steps, lanes, reverse, parts, fast_interpreter):
    assert_is_loop(*example(parts, steps, lanes), reverse)


@interpreted
@both_numbers
@both_ways
def test_interpreted_kernel_takes_any_layout(reverse, parts, fast_interpreter):
    a, b, h0 = example(parts, 40, 3, 4)
    layouts = {
        "transposed": [[x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in y] for y in (a, b, h0)],
        "interleaved": [[*torch.stack(y, -1).unbind(-1)] for y in (a, b, h0)],
        "rows apart": [[x.repeat_interleave(2, 0)[::2] for x in y] for y in (a, b, h0)],
        "expanded over time": [[x[:1].expand_as(x) for x in a], b, h0],
        "expanded over both": [[x[0, 0].expand_as(x) for x in a], b, [x[:1].expand_as(x) for x in h0]],
    }
    for arguments in layouts.values():
        assert_is_loop(*arguments, reverse)


@interpreted
@both_numbers
@pytest.mark.parametrize("steps", [1, 2, 31, 2100])
def test_interpreted_gradients_are_the_loops(steps, parts, fast_interpreter):
    leaves = [whole(x).requires_grad_() for x in example(parts, steps, 3, 2)]
    cotangent = torch.randn_like(leaves[1])
    results = recurrence(*leaves), by_loop(*leaves)
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)
    gradients = zip(*(torch.autograd.grad(result, leaves, cotangent) for result in results), strict=True)
    for ours, known in gradients:
        torch.testing.assert_close(ours, known, rtol=0, atol=1e-11)


@interpreted
@both_numbers
def test_interpreted_gradcheck(parts, fast_interpreter):
    leaves = [whole(x).requires_grad_() for x in example(parts, 3, 2)]
    assert torch.autograd.gradcheck(recurrence, leaves)
    assert torch.autograd.gradgradcheck(recurrence, leaves)


@interpreted
@both_numbers
def test_interpreted_episodes_stay_apart(parts, fast_interpreter):
    """A reset within a tile and one at a tile's start: what came before leaves no bit."""
    a, b, h0 = example(parts, 5000, 3)
    for reset in (700, 2048):
        for x in a:
            x[reset] = 0
        others = [torch.cat([torch.randn(reset, 3), x[reset:]]) for x in b]
        for one, other in zip(kernel_scan(a, b, h0, False), kernel_scan(a, others, h0, False), strict=True):
            assert torch.equal(one[reset:], other[reset:]) and not torch.equal(one[:reset], other[:reset])


@interpreted
@both_numbers
@pytest.mark.parametrize("transform", [name for name in TRANSFORMS if name != "forward"])
def test_interpreted_transforms(transform, parts, fast_interpreter):
    arguments = [whole(x) for x in example(parts, 7, 3, 2)]
    ours, expected = (TRANSFORMS[transform](function)(*arguments) for function in (recurrence, by_loop))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@interpreted
def test_interpreted_empty():
    for steps, lanes in ((0, 3), (3, 0)):
        assert kernel_scan(*example(1, steps, lanes), False)[0].shape == (steps, lanes)


# ---- Compilation, which needs no GPU ----
@ordinary
@both_numbers
@both_ways
def test_the_kernel_compiles_for_hopper(parts, reverse):
    """To machine code of an H100 or H200, for few lanes and for many; a program's shared memory is below 48 KiB."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel = ppo_memory.scan_tiles
    for rows, lanes in ((16, 1), (2048, 1), (64, 32)):
        known = {"REVERSE": reverse, "ROWS": rows, "LANES": lanes}
        known |= {name: None for name in ("ai", "bi", "h0i", "hi") if parts == 1}
        types = dict.fromkeys(kernel.arg_names, "*fp32") | {"T": "i32", "N": "i32"} | dict.fromkeys(known, "constexpr")
        constants = {(kernel.arg_names.index(name),): value for name, value in known.items()}
        compiled = compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", 90, 32))
        assert compiled.asm["cubin"] and compiled.metadata.shared < 48 * 1024


# ---- The operator ----
@pytest.fixture
def stand_in():
    """Lets the operator run on CPU tensors, by the loop."""

    @kernel_scan.register_kernel("cpu")
    def _(a, b, h0, reverse):
        x, y, h = (torch.complex(*parts) if len(parts) == 2 else parts[0] for parts in (a, b, h0))
        states = by_loop(x, y, h, reverse)
        return [part.clone() for part in ([states.real, states.imag] if len(b) == 2 else [states])]

    with kernel_scan.set_kernel_enabled("cpu", True):
        yield
    kernel_scan.set_kernel_enabled("cpu", False)


@ordinary
@both_numbers
@both_ways
def test_operator_is_well_defined(stand_in, reverse, parts):
    a, b, h0 = example(parts, 6, 3, 2)
    torch.library.opcheck(kernel_scan, (a, b, h0, reverse))
    torch.library.opcheck(
        kernel_scan, ([x[:, :1].expand_as(x) for x in a], [x.mT.contiguous().mT for x in b], h0, reverse)
    )


@ordinary
@both_numbers
@pytest.mark.parametrize(
    "transform,backend", [*itertools.product(TRANSFORMS, (None, "aot_eager")), ("grad", "inductor")]
)
def test_operator_under_transforms(stand_in, transform, backend, parts):
    arguments = [whole(x) for x in example(parts, 7, 3, 2)]
    ours, expected = (TRANSFORMS[transform](function) for function in (recurrence, by_loop))
    if backend:
        torch.compiler.reset()
        ours = torch.compile(ours, fullgraph=True, backend=backend)
    torch.testing.assert_close(ours(*arguments), expected(*arguments), rtol=0, atol=1e-12)


@ordinary
@both_numbers
def test_compiled_backward(stand_in, parts):
    leaves, copies = ([whole(x).requires_grad_() for x in example(parts, 7, 3, 2)] for _ in range(2))
    torch.compiler.reset()
    torch.compile(squares(recurrence), fullgraph=True)(*leaves).backward()
    squares(by_loop)(*copies).backward()
    for leaf, copy in zip(leaves, copies, strict=True):
        torch.testing.assert_close(leaf.grad, copy.grad, rtol=0, atol=1e-12)


@ordinary
@pytest.mark.parametrize("name", ["another_script", "package.script"])
def test_the_text_in_several_modules(stand_in, name):
    """Each registers an operator of its own, and, imported again, the same anew, which frees the one before."""
    arguments = example(1, 4, 2)
    for _ in range(2):
        module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, ppo_memory.__file__))
        module.__spec__.loader.exec_module(module)
        module.kernel_scan.register_kernel("cpu")(lambda a, b, h0, reverse: [x.clone() for x in b])
        assert torch.equal(module.kernel_scan(*arguments, False)[0], arguments[1][0])
    assert_is_loop(*arguments, False)


# ---- A GPU ----
def fill(generator_seed, *shape):
    return torch.rand(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(generator_seed))


@pytest.mark.gpu
@needs_gpu
@both_numbers
@both_ways
@pytest.mark.parametrize("steps,lanes", [*SIZES, (65_536, 1), (65_536, 16), (1, 65_536), (128, 65_536), (16_384, 256)])
def test_gpu_kernel_is_the_loop(steps, lanes, reverse, parts):
    assert_is_loop(*example(parts, steps, lanes, device="cuda"), reverse, tolerance=1e-5)
    if steps * lanes < 1e5:
        assert_is_loop(*example(parts, steps, lanes, device="cuda", dtype=torch.float64), reverse, tolerance=1e-13)


@pytest.mark.gpu
@needs_gpu
@both_numbers
@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gpu_transforms(transform, mode, parts):
    arguments = [whole(x).cuda() for x in example(parts, 100, 3, 20)]
    ours, expected = (TRANSFORMS[transform](function) for function in (recurrence, by_loop))
    if mode:
        torch.compiler.reset()
        ours = torch.compile(ours, fullgraph=True, mode=mode)
    for _ in range(3):  # with "reduce-overhead", the first warms up, the second captures and the third replays
        torch.testing.assert_close(ours(*arguments), expected(*arguments), rtol=0, atol=1e-10)


@pytest.mark.gpu
@needs_gpu
def test_gpu_capture():
    """A captured forward and backward follows its inputs, resets among them."""
    arguments = [whole(x).to("cuda", torch.complex64) for x in example(2, 3000, 4, 16)]
    step = derived(squares(recurrence))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(*arguments)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step(*arguments)
    for seed in (1, 2):
        arguments[0].mul_(fill(seed, 3000, 4, 1) > 0.01)
        arguments[1].mul_(fill(seed, 3000, 4, 16))
        graph.replay()
        torch.testing.assert_close(result, step(*arguments))


@pytest.mark.gpu
@needs_gpu
def test_gpu_one_kernel_for_all_lengths():
    """Past the length of a tile, no further one is compiled."""
    kernels = ppo_memory.scan_tiles.device_caches[torch.cuda.current_device()][0]
    kernel_scan(*example(1, 2048, 1, device="cuda"), False)
    known = len(kernels)
    for steps in (2049, 3000, 4096, 10_001):
        kernel_scan(*example(1, steps, 1, device="cuda"), False)
    assert len(kernels) == known


@pytest.mark.gpu
@pytest.mark.skipif(
    "INTERPRETED or not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 4.5 * 4 * MANY[0] * MANY[1]",
    reason="needs a CUDA device with 39 GB of free memory",
)
def test_gpu_more_numbers_than_32_bits_count():
    steps, lanes = MANY
    a, b, h0 = fill(0, steps, lanes), fill(1, steps, lanes), fill(2, lanes)
    columns = [0, 1, 31, 32, lanes // 2, lanes - 17, lanes - 1]
    expected = by_loop(a[:, columns].double(), b[:, columns].double(), h0[columns].double())
    (states,) = kernel_scan([a], [b], [h0], False)
    torch.testing.assert_close(states[:, columns].double(), expected, rtol=1e-5, atol=1e-5)

"""The linear recurrence and the cells over it: ppo_memory and dqn_memory."""

import pytest
import torch
from torch.func import vmap

import ppo_memory
from ppo_memory import CELLS, linear_recurrence

LENGTHS = (1, 2, 31, 64, 1000)
LINEAR = ("mingru", "lru", "s5", "ffm")


def by_loop(a, b, h0):
    states = []
    for x, y in zip(a.expand_as(b).unbind(0), b.unbind(0), strict=True):
        h0 = x * h0 + y
        states.append(h0)
    return torch.stack(states)


def example(steps, dtype=torch.float64, batch=3, size=5):
    """Factors, some of them 0 as where an episode begins, inputs and a first state."""
    generator = torch.Generator().manual_seed(steps)
    a, b = (torch.randn(steps, batch, size, dtype=dtype, generator=generator) for _ in range(2))
    a = 0.99 * a / a.abs().clamp(min=1)
    a[torch.rand(steps, batch, generator=generator) < 0.1] = 0
    return a, b, torch.randn(batch, size, dtype=dtype, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("steps", (*LENGTHS, 3, 7, 100))
def test_the_recurrence_is_the_loop(steps, dtype):
    ours, theirs = ([x.clone().requires_grad_() for x in example(steps, dtype)] for _ in range(2))
    result, expected = linear_recurrence(*ours), by_loop(*theirs)
    cotangent = torch.randn_like(expected)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
    gradients = zip(torch.autograd.grad(result, ours, cotangent), torch.autograd.grad(expected, theirs, cotangent))
    for gradient, known in gradients:
        torch.testing.assert_close(gradient, known, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 3, 5), (4, 0, 5), (4, 3, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_no_steps_no_sequences_no_features(shape, dtype):
    inputs = [torch.ones(size, dtype=dtype, requires_grad=True) for size in (shape, shape, shape[1:])]
    result = linear_recurrence(*inputs)
    gradients = torch.autograd.grad(result, inputs, torch.ones_like(result))
    assert result.shape == shape and result.dtype == dtype
    assert [gradient.shape for gradient in gradients] == [x.shape for x in inputs]
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("are_complex", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)])
def test_numbers_of_several_types(are_complex):
    real, complex_ = example(31), example(31, torch.complex128)
    inputs = [pair[is_complex] for pair, is_complex in zip(zip(real, complex_), are_complex, strict=True)]
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    result, expected = linear_recurrence(*ours), by_loop(*theirs)
    cotangent = torch.randn_like(expected)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
    gradients = zip(torch.autograd.grad(result, ours, cotangent), torch.autograd.grad(expected, theirs, cotangent))
    for gradient, known in gradients:
        torch.testing.assert_close(gradient, known, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("steps", LENGTHS)
def test_backwards_in_time(steps, dtype):
    ours, theirs = ([x.clone().requires_grad_() for x in example(steps, dtype)] for _ in range(2))
    result = linear_recurrence(*ours, reverse=True)
    expected = by_loop(theirs[0].flip(0), theirs[1].flip(0), theirs[2]).flip(0)
    cotangent = torch.randn_like(expected)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
    gradients = zip(torch.autograd.grad(result, ours, cotangent), torch.autograd.grad(expected, theirs, cotangent))
    for gradient, known in gradients:
        torch.testing.assert_close(gradient, known, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradcheck(dtype):
    inputs = [x.requires_grad_() for x in example(7, dtype, batch=2, size=2)]
    assert torch.autograd.gradcheck(linear_recurrence, inputs) and torch.autograd.gradgradcheck(
        linear_recurrence, inputs
    )
    assert torch.autograd.gradcheck(linear_recurrence, [inputs[0][0].detach().requires_grad_(), *inputs[1:]])


@pytest.mark.parametrize("length", [2, 3, 8])
@pytest.mark.parametrize("reverse", [False, True])
def test_chunks_of_any_length(length, reverse):
    """Those of the compiled form, too, whose complex numbers are pairs."""
    for steps in (1, 5, 6, 31, 64, 100):
        a, b, h0 = example(steps, torch.complex128)
        parts = [[*torch.view_as_real(x.flip(0) if reverse and x.ndim == 3 else x).unbind(-1)] for x in (a, b, h0)]
        states = torch.complex(*ppo_memory.scan(*parts, length, reverse))
        expected = by_loop(a, b, h0)
        torch.testing.assert_close(states, expected.flip(0) if reverse else expected, rtol=0, atol=1e-12)


def test_vmap():
    a, b = (torch.randn(7, 3, 2, 4, dtype=torch.float64) for _ in range(2))
    h0 = torch.randn(3, 2, 4, dtype=torch.float64)
    each = vmap(linear_recurrence, in_dims=(1, 1, 0), out_dims=1)(a, b, h0)
    torch.testing.assert_close(each, by_loop(a, b, h0), rtol=0, atol=1e-12)


def test_long_sequences_stay_accurate():
    a = torch.full((65_536, 1, 4), 0.99999, dtype=torch.float64)
    b, h0 = torch.randn(65_536, 1, 4, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.float64)
    expected = by_loop(a, b, h0)
    torch.testing.assert_close(linear_recurrence(a, b, h0), expected, rtol=1e-10, atol=1e-10)
    single = linear_recurrence(a.float(), b.float(), h0.float())
    assert (single - expected).abs().max() < 1e-3 * expected.abs().max()


# ---- Cells ----
def cell_and_inputs(name, steps, share=0.2, batch=4, size=8):
    torch.manual_seed(steps)
    cell = CELLS[name](size).double()
    x, reset = torch.randn(steps, batch, size, dtype=torch.float64), (torch.rand(steps, batch) < share).double()
    state = torch.randn_like(cell.initial_state(batch))
    return cell, x, state, reset


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("name", CELLS)
def test_forward_is_repeated_step(name, steps):
    cell, x, state, reset = cell_and_inputs(name, steps)
    outputs, last = cell(x, state, reset)
    for t in range(steps):
        output, state = cell.step(x[t], state, reset[t])
        torch.testing.assert_close(outputs[t], output, rtol=0, atol=1e-10)
    torch.testing.assert_close(last, state, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", CELLS)
def test_gradients_are_those_of_the_loop(name):
    cell, x, state, reset = cell_and_inputs(name, 31)
    x.requires_grad_()
    inputs = [x, *cell.parameters()] + ([state.requires_grad_()] if state.numel() else [])
    outputs, _ = cell(x, state, reset)
    cotangent = torch.randn_like(outputs)
    ours = torch.autograd.grad(outputs, inputs, cotangent, allow_unused=True)
    steps = []
    for t in range(len(x)):
        output, state = cell.step(x[t], state, reset[t])
        steps.append(output)
    theirs = torch.autograd.grad(torch.stack(steps), inputs, cotangent, allow_unused=True)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", CELLS)
def test_episodes_do_not_touch(name):
    """Another first episode: the second's outputs are the same bits, and its gradient to the first is exactly 0."""
    cell, x, state, _ = cell_and_inputs(name, 40)
    reset = torch.zeros(40, 4, dtype=torch.float64)
    reset[17] = 1
    other = x.clone()
    other[:17] += 1
    outputs, others = cell(x, state, reset)[0], cell(other, 2 * state, reset)[0]
    assert torch.equal(outputs[17:], others[17:])
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(cell(x, state, reset)[0][17:].sum(), x)
    assert not gradient[:17].any() and gradient[17:].any()


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("where", ["first", "last", "everywhere", "nowhere"])
def test_resets(name, where):
    cell, x, state, reset = cell_and_inputs(name, 12)
    reset.zero_()
    reset[{"first": slice(1), "last": slice(-1, None), "everywhere": slice(None), "nowhere": slice(0)}[where]] = 1
    outputs, _ = cell(x, state, reset)
    zero = torch.zeros_like(state)
    for t in range(12):
        expected, state = cell.step(x[t], zero if reset[t, 0] else state, torch.zeros_like(reset[t]))
        torch.testing.assert_close(outputs[t], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", CELLS)
def test_two_calls_with_the_carried_state_are_one(name):
    cell, x, state, reset = cell_and_inputs(name, 50)
    outputs, last = cell(x, state, reset)
    first, middle = cell(x[:23], state, reset[:23])
    second, end = cell(x[23:], middle, reset[23:])
    torch.testing.assert_close(torch.cat([first, second]), outputs, rtol=0, atol=1e-10)
    torch.testing.assert_close(end, last, rtol=0, atol=1e-10)


@pytest.mark.parametrize("steps", LENGTHS[:4])
@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_loops_are_pytorchs(name, steps, monkeypatch):
    """The loops with gradients of their own, which the compiler takes for operators, and PyTorch's between resets."""
    cell, x, state, reset = cell_and_inputs(name, steps)
    cotangents, results = (torch.randn_like(x), torch.randn(state.shape, dtype=torch.float64)), []
    monkeypatch.setattr(ppo_memory, "MIN_MEAN_LENGTH", 0)
    assert ppo_memory.stretches(reset)
    for cell.is_looped in (False, True):
        inputs = [x.clone().requires_grad_(), state.clone().requires_grad_()]
        outputs = cell(*inputs, reset)
        results.append([*outputs, *torch.autograd.grad(outputs, [*inputs, *cell.parameters()], cotangents)])
    for expected, result in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)


def test_pytorchs_own_loops_run_where_resets_are_few():
    reset = torch.zeros(40, 2)
    assert ppo_memory.stretches(reset) == [(0, 40)]
    reset[0, 1] = reset[7, 0] = reset[7, 1] = reset[39, 1] = 1
    assert ppo_memory.stretches(reset) == [(0, 7), (7, 39), (39, 40)]
    reset[::5, 0] = 1  # ten stretches, of 4 steps
    assert ppo_memory.stretches(reset) is None and len(reset[1:].any(1).nonzero()) == 9
    assert ppo_memory.stretches(reset[:1]) == [(0, 1)]


def test_the_longest_memories_of_an_lru_go_on_learning():
    """Its factors stay below 0.999 in size, and the bound ends no gradient."""
    cell = CELLS["lru"](8).double()
    with torch.no_grad():
        cell.log_decay.copy_(torch.linspace(-9, 0, 8))
    factor, _ = cell.coefficients(torch.randn(2, 8, dtype=torch.float64))
    modulus = torch.hypot(*factor.chunk(2))
    assert modulus[0] > 0.998 and (modulus <= 0.999).all() and modulus[-1] < 0.4
    modulus.sum().backward()
    assert (cell.log_decay.grad < 0).all(), "a slower decay is a larger factor, for each of them"

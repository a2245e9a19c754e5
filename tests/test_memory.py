"""The linear recurrence and the cells over it: ppo_memory and dqn_memory."""

import functools
import math

import pytest
import torch
from torch.func import grad, grad_and_value, vmap

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("steps", [1, 6, 100])
@pytest.mark.parametrize("shapes", [((5,), (5,)), ((3, 1), (1, 5)), ((1, 1, 1), ())])
def test_factors_and_first_states_that_all_share(shapes, steps, dtype):
    generator = torch.Generator().manual_seed(0)
    a, h0 = (torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes)
    a = a / (1 + a.abs())
    b = torch.randn(steps, 3, 5, dtype=dtype, generator=generator)
    ours, theirs = ([x.clone().requires_grad_() for x in (a, b, h0)] for _ in range(2))
    result, expected = linear_recurrence(*ours), by_loop(theirs[0].expand_as(b), theirs[1], theirs[2].expand(3, 5))
    cotangent = torch.randn_like(expected)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
    gradients = zip(torch.autograd.grad(result, ours, cotangent), torch.autograd.grad(expected, theirs, cotangent))
    for gradient, known in gradients:
        torch.testing.assert_close(gradient, known, rtol=1e-12, atol=1e-12)


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_rows_so_wide_that_a_loop_is_faster(monkeypatch, dtype):
    """They make no chunks; narrow rows do, long before there are as many steps."""
    lengths, scan = [], ppo_memory.scan
    monkeypatch.setattr(ppo_memory, "scan", lambda *args: lengths.append(args[3]) or scan(*args))
    for size, expected in ((2**14, 40), (3, 8)):
        inputs = example(40, dtype, batch=1, size=size)
        torch.testing.assert_close(linear_recurrence(*inputs), by_loop(*inputs), rtol=0, atol=1e-12)
        assert lengths[0] == expected
        lengths.clear()


def test_vmap():
    a, b = (torch.randn(7, 3, 2, 4, dtype=torch.float64) for _ in range(2))
    h0 = torch.randn(3, 2, 4, dtype=torch.float64)
    each = vmap(linear_recurrence, in_dims=(1, 1, 0), out_dims=1)(a, b, h0)
    torch.testing.assert_close(each, by_loop(a, b, h0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_vmap_and_gradients(dtype):
    """Of gradients, and gradients of it."""
    examples = [example(12, dtype) for _ in range(3)]
    inputs = [torch.stack([x * (1 + i) / 3 for i, x in enumerate(each)]) for each in zip(*examples, strict=True)]

    def loss(recurrence, inputs):
        return recurrence(*inputs).abs().square().sum()

    ours = vmap(grad(functools.partial(loss, linear_recurrence)))(inputs)
    mine = grad(lambda inputs: loss(vmap(linear_recurrence), inputs))(inputs)
    theirs = [grad(functools.partial(loss, by_loop))([x[i] for x in inputs]) for i in range(3)]
    for our, own, their in zip(ours, mine, zip(*theirs, strict=True), strict=True):
        torch.testing.assert_close(our, torch.stack(their), rtol=0, atol=1e-11)
        torch.testing.assert_close(own, torch.stack(their), rtol=0, atol=1e-11)


@pytest.mark.parametrize(("parts", "reverse"), [(1, False), (2, True)])
def test_compiled_as_a_full_graph(parts, reverse):
    """As the scripts compile it: a complex number is two real ones; inside a function that differentiates."""
    a, b, h0 = example(33, size=6)
    cotangent = torch.randn_like(b)

    def loss(inputs):
        states = linear_recurrence(*inputs, parts, reverse)
        return (states * cotangent).sum(), states

    torch.compiler.reset()
    torch.compiler.allow_in_graph(linear_recurrence)
    compiled = torch.compile(grad_and_value(loss, has_aux=True), fullgraph=True)
    gradients, (value, states) = compiled((a, b, h0))
    assert_same = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    if parts == 2:
        a, b, h0 = (torch.complex(*x.chunk(2, -1)) for x in (a, b, h0))
    inputs = [x.clone().requires_grad_() for x in (a, b, h0)]
    expected = by_loop(inputs[0].flip(0), inputs[1].flip(0), inputs[2]).flip(0) if reverse else by_loop(*inputs)
    if parts == 2:
        expected = torch.cat([expected.real, expected.imag], -1)
    known = torch.autograd.grad((expected * cotangent).sum(), inputs)
    assert_same(states, expected)
    assert_same(value, (expected * cotangent).sum())
    for gradient, other in zip(gradients, known, strict=True):
        assert_same(gradient, torch.cat([other.real, other.imag], -1) if parts == 2 else other)


def test_memory_grows_as_the_number_of_steps():
    def bytes_kept(steps):
        kept = {}

        def keep(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        a, b, h0 = (x.requires_grad_() for x in example(steps))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            states = linear_recurrence(a, b, h0)
        assert states.requires_grad
        return sum(kept.values())

    assert 1.9 < bytes_kept(2000) / bytes_kept(1000) < 2.1


def test_long_sequences_stay_accurate():
    a = torch.full((65_536, 1, 4), 0.99999, dtype=torch.float64)
    b, h0 = torch.randn(65_536, 1, 4, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.float64)
    expected = by_loop(a, b, h0)
    torch.testing.assert_close(linear_recurrence(a, b, h0), expected, rtol=1e-10, atol=1e-10)
    single = linear_recurrence(a.float(), b.float(), h0.float())
    assert (single - expected).abs().max() < 1e-3 * expected.abs().max()
    turning = [(a * torch.exp(torch.tensor(0.3j))).requires_grad_(), b + 0j, h0 + 0j]
    expected, states = by_loop(*turning), linear_recurrence(*turning)
    torch.testing.assert_close(states, expected, rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad(h.abs().square().mean(), turning[0])[0] for h in (states, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-12)


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
    """Of the outputs and of the state afterwards."""
    cell, x, state, reset = cell_and_inputs(name, 31)
    x.requires_grad_()
    inputs = [x, *cell.parameters()] + ([state.requires_grad_()] if state.numel() else [])
    outputs, last = cell(x, state, reset)
    cotangent, of_last = torch.randn_like(outputs), torch.randn_like(last)

    def gradients(outputs, last):
        total = (outputs * cotangent).sum() + (last * of_last).sum()
        return torch.autograd.grad(total, inputs, allow_unused=True)

    ours = gradients(outputs, last)
    steps = []
    for t in range(len(x)):
        output, state = cell.step(x[t], state, reset[t])
        steps.append(output)
    theirs = gradients(torch.stack(steps), state)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", CELLS)
def test_an_episode_touches_no_other(name):
    """Nor another environment: whichever is changed, the others' outputs are the same bits; gradients to them are 0."""
    cell, x, state, _ = cell_and_inputs(name, 40)
    begins, reset = [[0, 9, 30], [0, 17], [0, 1, 2, 39], [0]], torch.zeros(40, 4, dtype=torch.float64)
    for env, firsts in enumerate(begins):
        reset[firsts[1:], env] = 1
    inputs = [x.requires_grad_()] + ([state.requires_grad_()] if state.numel() else [])
    outputs, _ = cell(x, state, reset)
    weighted = outputs * torch.randn_like(outputs)
    for env, firsts in enumerate(begins):
        for first, end in zip(firsts, [*firsts[1:], 40], strict=True):
            own = torch.zeros(40, 4, dtype=torch.bool)
            own[first:end, env] = True
            others, _ = cell(torch.where(own[..., None], x + 1, x), state, reset)
            assert torch.equal(outputs[~own], others[~own]) and not torch.equal(outputs[own], others[own])
            gradient, *of_state = torch.autograd.grad(weighted[own].sum(), inputs, retain_graph=True)
            assert not gradient[~own].any() and gradient[own].any()
            for of_first in of_state:
                rows = of_first.flatten(1).any(1)
                assert rows.tolist() == [row == env and first == 0 for row in range(4)]


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
def test_the_gradients_of_a_cell(name):
    """By every parameter, too, against differences."""
    cell, x, state, reset = cell_and_inputs(name, 7)
    names, parameters = zip(*cell.named_parameters(), strict=True)

    def run(x, state, *parameters):
        return torch.func.functional_call(cell, dict(zip(names, parameters, strict=True)), (x, state, reset))

    inputs = [tensor.detach().clone().requires_grad_() for tensor in (x, state, *parameters)]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("name", ["mingru", "lru", "s5", "ffm"])
def test_a_cell_over_very_many_steps(name):
    """Outputs and gradients stay finite, and the last ones are those of the steps since the last episode began."""
    torch.manual_seed(0)
    cell, steps = CELLS[name](8), 65536
    x, state, reset = torch.randn(steps, 1, 8), cell.initial_state(1), torch.zeros(steps, 1)
    reset[-1000] = 1
    outputs, last = cell(x, state, reset)
    outputs.square().mean().backward()
    assert outputs.isfinite().all() and all(p.grad.isfinite().all() and p.grad.any() for p in cell.parameters())
    expected, end = cell(x[-1000:], state, reset[-1000:])
    torch.testing.assert_close(outputs[-1000:], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, end, rtol=1e-4, atol=1e-4)


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
    """The loops with gradients of their own, which the compiler takes for operators, and PyTorch's between resets.

    An LSTM's operator takes the one or the other forwards.
    """
    cell, x, state, reset = cell_and_inputs(name, steps)
    cotangents, results = (torch.randn_like(x), torch.randn(state.shape, dtype=torch.float64)), []
    monkeypatch.setattr(ppo_memory, "MIN_MEAN_LENGTH", 0)
    monkeypatch.setattr(ppo_memory, "MIN_BATCH", 0)
    assert ppo_memory.stretches(reset)
    for cell.is_looped, looks in ((False, True), (True, True), (True, False)):
        if not looks:
            monkeypatch.setattr(ppo_memory, "stretches", lambda reset: None)
        inputs = [x.clone().requires_grad_(), state.clone().requires_grad_()]
        outputs = cell(*inputs, reset)
        results.append([*outputs, *torch.autograd.grad(outputs, [*inputs, *cell.parameters()], cotangents)])
    for expected, *others in zip(*results, strict=True):
        for result in others:
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("is_looped", [False, True])
@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_no_two_gradients_share_memory(name, is_looped):
    """Else clipping, which works in place, would scale both at once, and twice."""
    cell = ppo_memory.CELLS[name](4)
    cell.is_looped = is_looped
    outputs, state = cell(torch.randn(3, 2, 4), cell.initial_state(2), torch.ones(3, 2))
    (outputs.sum() + state.sum()).backward()
    assert len({parameter.grad.untyped_storage().data_ptr() for parameter in cell.parameters()}) == 4


@pytest.mark.parametrize(
    ("name", "batch", "resets", "is_looped", "is_own"),
    [
        *[("gru", 31, 0, False, False), ("gru", 32, 0, False, True), ("gru", 32, 0, True, False)],
        *[("gru", 32, 1, False, False), ("lstm", 2, 0, False, True), ("lstm", 2, 0, True, True)],
        *[("lstm", 2, 1, False, False), ("lstm", 2, 1, True, False)],
    ],
)
def test_whose_loop_runs_on_a_cpu(name, batch, resets, is_looped, is_own, monkeypatch):
    """Where resets are few PyTorch's GRU is faster for wide batches only; its LSTM, which oneDNN runs, is for all.

    In an operator it runs forwards. Where all steps are resets neither is.
    """
    cell, called, run = ppo_memory.CELLS[name](4), [], getattr(torch, name)
    cell.is_looped = is_looped
    monkeypatch.setattr(torch, name, lambda *inputs: called.append(name) or run(*inputs))
    cell(torch.randn(3, batch, 4), cell.initial_state(batch), torch.full((3, batch), float(resets)))
    assert called == [name] * is_own


def test_pytorchs_own_loops_run_where_resets_are_few():
    reset = torch.zeros(40, 2)
    assert ppo_memory.stretches(reset) == [(0, 40)]
    reset[0, 1] = reset[7, 0] = reset[7, 1] = reset[39, 1] = 1
    assert ppo_memory.stretches(reset) == [(0, 7), (7, 39), (39, 40)]
    reset[::5, 0] = 1  # ten stretches, of 4 steps
    assert ppo_memory.stretches(reset) is None and len(reset[1:].any(1).nonzero()) == 9
    assert ppo_memory.stretches(reset[:1]) == [(0, 1)]


def test_decays_and_periods_of_an_lru_begin_log_uniform():
    factors = torch.stack([CELLS["lru"](64).coefficients(torch.zeros(1, 64))[0] for _ in range(300)])
    real, imaginary = factors.detach().double().chunk(2, 1)
    time_constant = -1 / torch.hypot(real, imaginary).log()
    period = 2 * math.pi / torch.atan2(imaginary, real)
    # A decay is 0.001, about, and a log-uniform part of 0.0001 to 1
    for values, low, median, high in ((time_constant, 1, 1 / 0.011, 1 / 0.0011), (period, 2, 20, 200)):
        assert low * 0.99 < values.min() < low * 1.1 and high * 0.9 < values.max() < high * 1.01
        assert abs((values < median).double().mean() - 0.5) < 0.05


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


@pytest.mark.parametrize("name", ["lru", "s5", "ffm"])
@pytest.mark.parametrize("sign", [-1, 1])
@torch.no_grad()
def test_a_step_of_adam_leaves_the_longest_memories(name, sign):
    """Where all parameters move by the learning rate, time constants do by less than a hundredth."""
    torch.manual_seed(0)
    cell, time_constants = CELLS[name](64).double(), []
    for _ in range(2):
        real, imaginary = cell.coefficients(torch.zeros(1, 64, dtype=torch.float64))[0].chunk(2)
        time_constants.append(-1 / torch.hypot(real, imaginary).log())
        for parameter in cell.parameters():
            parameter.add_(sign * ppo_memory.Args.learning_rate)
    before, after = time_constants
    assert before.max() > 300 and ((after / before).log().abs() < 0.01).all()


@pytest.mark.parametrize("name", ["s5", "lru"])
def test_coefficients_are_those_of_the_papers(name):
    torch.manual_seed(0)
    x, cell = torch.randn(7, 6), CELLS[name](6)
    decay, driven = (torch.complex(*part.chunk(2, -1)) for part in cell.coefficients(x))
    inputs = torch.complex(*cell.input(x).chunk(2, -1))
    if name == "s5":  # the zero-order hold, eq. 6
        eigenvalue = torch.complex(-cell.log_decay.exp(), cell.frequency)
        expected = (eigenvalue * cell.log_step.exp()).exp()
        inputs = (expected - 1) / eigenvalue * inputs
    else:
        modulus = 0.999 * (-cell.log_decay.exp()).exp()
        expected = torch.polar(modulus, cell.phase)
        inputs = (1 - modulus**2).sqrt() * inputs
    torch.testing.assert_close(decay, expected)
    torch.testing.assert_close(driven, inputs, rtol=1e-4, atol=1e-5)


def test_mingru_s_update_gate_lets_in_what_is_new():
    """And is nearly closed at first, for memories of 2 to 1,000 steps."""
    torch.manual_seed(0)
    x, cell = torch.randn(7, 6), CELLS["mingru"](600)
    kept, new = cell.coefficients(torch.zeros(600))
    assert 0.5 <= kept.min() < 0.6 and 0.99 < kept.max() <= 0.999
    torch.testing.assert_close(new, (1 - kept) * cell.candidate.bias)
    cell = CELLS["mingru"](6)
    gate = torch.sigmoid(cell.gate(x))
    for ours, expected in zip(cell.coefficients(x), (1 - gate, gate * cell.candidate(x)), strict=True):
        torch.testing.assert_close(ours, expected)


def test_ffm_s_traces_and_gates():
    torch.manual_seed(0)
    x, cell = torch.randn(7, 6), CELLS["ffm"](6)
    decay, driven = (torch.complex(*part.chunk(2, -1)) for part in cell.coefficients(x))
    exponent = torch.complex(-cell.log_decay.exp()[:, None], cell.log_frequency.exp()[None])
    torch.testing.assert_close(decay, exponent.exp().flatten())
    inputs = cell.input(x) * torch.sigmoid(cell.input_gate(x))
    torch.testing.assert_close(driven.real.unflatten(-1, (cell.traces, -1)), inputs[..., None].expand(7, 32, 4))
    assert not driven.imag.any()
    state, gate = torch.randn(7, *cell.state_shape), torch.sigmoid(cell.output_gate(x))
    mixed = torch.nn.functional.layer_norm(cell.mix(state) * gate, (6,))
    torch.testing.assert_close(cell.readout(state, x), mixed + (1 - gate) * cell.skip(x))

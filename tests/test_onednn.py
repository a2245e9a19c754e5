"""`use_onednn`, after which oneDNN makes the large matrix products of what is compiled; its text is the same in all."""

import importlib
from pathlib import Path

import pytest
import torch
from torch._inductor import decomposition
from torch._inductor.decomposition import decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from agents import as_on, products_by_onednn
from td3_continuous_action_torchcompile import use_onednn

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")

LEANRL = Path(__file__).parent.parent / "leanrl"
SCRIPTS = sorted(path.stem for path in LEANRL.glob("*_torchcompile.py") if "def use_onednn" in path.read_text())
LINEAR, CLONE = torch.ops.mkldnn._linear_pointwise.default, torch.ops.aten.clone.default
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default}


@pytest.fixture(autouse=True)
def machine(request):
    """A Zen 5, on which it is not called yet, unless the test says which."""
    with as_on(**getattr(request, "param", {})):
        yield


@pytest.fixture
def called(machine):
    use_onednn()


def targets_of(function, *inputs):
    """What the function's graph calls as Inductor decomposes it. Its results must be the function's."""
    traced = make_fx(function, decompositions, tracing_mode="fake")(*inputs)
    torch.testing.assert_close(traced(*inputs), function(*inputs), rtol=1e-4, atol=1e-4)
    return [node.target for node in traced.graph.nodes if node.op == "call_function"]


def matrix(*shape, is_turned=False, dtype=torch.float32):
    """Random numbers, in memory row by row, or column by column."""
    made = torch.randn(*shape, dtype=dtype)
    return made.mT.contiguous().mT if is_turned else made


@pytest.mark.parametrize("b_is_turned", [False, True])
@pytest.mark.parametrize("a_is_turned", [False, True])
@pytest.mark.parametrize("batch", [(), (1,), (3,)])
def test_large_products_are_made_by_onednn_whatever_the_order_in_memory(called, batch, a_is_turned, b_is_turned):
    a, b = matrix(*batch, 64, 256, is_turned=a_is_turned), matrix(*batch, 256, 130, is_turned=b_is_turned)
    targets = targets_of(lambda a, b: torch.bmm(a, b) if batch else torch.mm(a, b), a, b)
    assert targets.count(LINEAR) == (batch or (1,))[0] and not PRODUCTS & {*targets}
    copies = a_is_turned * (batch or (1,))[0] + (batch == (1,))  # a stack of one is a copy
    assert targets.count(CLONE) == copies, "oneDNN would copy it on one core alone"


def test_parts_of_wider_matrices(called):
    wide, narrow = matrix(256, 512), matrix(256, 256)
    assert targets_of(lambda a, b: a[:, :256] @ b, wide, narrow).count(LINEAR) == 1
    assert targets_of(lambda a, b: a @ b[:, :256], narrow, wide).count(LINEAR) == 1


@pytest.mark.parametrize("dtype, rows", [(torch.float32, 31), (torch.float64, 64), (torch.bfloat16, 64)])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_small_products_and_other_numbers_are_left_alone(called, batch, dtype, rows):
    """As many as 32 rows of 256 numbers, times 256 columns, are enough."""
    a, b = matrix(*batch, rows, 256, dtype=dtype), matrix(*batch, 256, 256, dtype=dtype)
    targets = targets_of(lambda a, b: a @ b, a, b)
    assert LINEAR not in targets and len(PRODUCTS & {*targets}) == 1
    if dtype == torch.float32:
        assert LINEAR in targets_of(lambda a, b: a @ b, matrix(*batch, rows + 1, 256), b)


def test_many_products_at_once_are_left_alone(called):
    """Each would be a node of its own."""
    assert LINEAR not in targets_of(torch.bmm, matrix(9, 32, 256), matrix(9, 256, 256))


def test_inductors_own_decompositions_are_kept(called):
    """Of a product of a row and a column it makes a sum."""
    assert not PRODUCTS & {*targets_of(torch.mm, matrix(1, 30), matrix(30, 1))}
    assert not PRODUCTS & {*targets_of(torch.bmm, matrix(2, 1, 30), matrix(2, 30, 1))}


@pytest.mark.parametrize("batch", [(), (2,)])
def test_products_on_a_gpu_are_left_alone(called, batch):
    with FakeTensorMode():
        a, b = (torch.empty(*batch, 256, 256, device="cuda") for _ in range(2))
        traced = make_fx(lambda a, b: torch.bmm(a, b) if batch else torch.mm(a, b), decompositions)(a, b)
    assert len(PRODUCTS & {node.target for node in traced.graph.nodes}) == 1


@pytest.mark.parametrize(
    ("machine", "pays"),
    [
        ({}, True),
        ({"family": 30}, True),
        ({"family": 25}, False),  # Zen 3, which has no AVX-512, and Zen 4, whose units are no wider for it
        ({"family": 6}, False),
        ({"maker": "GenuineIntel"}, False),
        ({"platform": "darwin"}, False),
        ({"mkldnn": False}, False),
    ],
    indirect=["machine"],
)
def test_it_is_for_processors_whose_avx512_mkl_leaves_unused(pays, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", "a user's, ")
    use_onednn()
    own = [decompositions[product] in (decomposition.mm, decomposition.bmm) for product in PRODUCTS]
    assert own == [not pays] * 2 and torch.compiler.config.cache_key_tag == ("a user's, oneDNN 1" if pays else "none")


class Seen(Exception):
    """Ends a run at its first compilation."""


@pytest.mark.parametrize("script", SCRIPTS)
def test_main_calls_it_before_it_compiles_and_else_not(launch, monkeypatch, script):
    module, calls = importlib.import_module(script), []

    def compile(*_, **__):
        raise Seen

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(module, "use_onednn", lambda: calls.append(script))
    launch(script, "--total-timesteps", 9, "--learning-starts", 8, "--buffer-size", 9, env_id="Counter")
    assert not calls
    launch(script, "--compile", env_id="Counter", raises=Seen)
    assert calls == [script]


# ---- Compiled ----
def compiled(function):
    options = {"fallback_random": True, "cpp_wrapper": True, "cpp.vec_isa_ok": True}
    return torch.compile(function, fullgraph=True, options=options)


def test_inductor_fuses_its_products_with_nothing(called, monkeypatch, tmp_path):
    """With what follows it knows to fuse those of constant weights alone; a sum of two has compiled to an error."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    a, b, c = (matrix(128, 256) for _ in range(3))
    weights, more = matrix(256, 256), matrix(256, 256)

    def function(a, b, c):
        return a @ weights + c, (b @ weights).relu(), a @ weights + b @ more.mT, (c @ more).tanh() - a

    step = compiled(function)
    torch.testing.assert_close(step(a, b, c), function(a, b, c), rtol=1e-4, atol=1e-4)
    assert products_by_onednn(lambda: step(a, b, c)) >= 4


def test_what_was_compiled_without_it_is_not_used(monkeypatch, tmp_path):
    """Though it is of the same text; and what was compiled with it is found. A gradient has products, too."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    weights, x = torch.randn(2, 256, 256), torch.randn(32, 256)

    def loss(weights):
        return torch.vmap(lambda weight: (x @ weight).relu().square().mean())(weights).sum()

    expected = torch.func.grad_and_value(loss)(weights)

    def compile_and_call():
        """How many products oneDNN makes, and whether what was compiled came from the cache."""
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        step = compiled(torch.func.grad_and_value(loss))
        torch.testing.assert_close(step(weights), expected, rtol=1e-4, atol=1e-5)
        is_found = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] == 1
        return products_by_onednn(lambda: step(weights)), is_found

    assert compile_and_call() == (0, False)
    use_onednn()
    assert compile_and_call() == (4, False)
    assert compile_and_call() == (4, True)

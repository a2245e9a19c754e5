"""The pass that has oneDNN make a compiled graph's large matrix products; its text is the same in all scripts."""

import importlib
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from td3_continuous_action_torchcompile import OneDNNProducts

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LEANRL = Path(__file__).parent.parent / "leanrl"
SCRIPTS = sorted(path.stem for path in LEANRL.glob("*_torchcompile.py") if "class OneDNNProducts" in path.read_text())


class Checked(torch.fx.Interpreter):
    """Runs a graph whose nodes must be what their "val" says."""

    def run_node(self, node):
        result, val = super().run_node(node), node.meta.get("val")
        if node.op == "call_function":
            assert (result.shape, result.stride(), result.dtype) == (val.shape, val.stride(), val.dtype)
        return result


def targets_after_the_pass(function, *inputs):
    """What the pass leaves of the function's graph: the targets of its nodes. Its results must be the function's."""
    traced = make_fx(function, tracing_mode="fake")(*inputs)
    OneDNNProducts()(traced.graph)
    traced.graph.lint()
    torch.testing.assert_close(Checked(traced).run(*inputs), function(*inputs), rtol=1e-4, atol=1e-4)
    return [node.target for node in traced.graph.nodes if node.op == "call_function"]


def matrix(*shape, is_turned=False, dtype=torch.float32):
    """Random numbers, in memory row by row, or column by column."""
    made = torch.randn(*shape, dtype=dtype)
    return made.mT.contiguous().mT if is_turned else made


@pytest.mark.parametrize("b_is_turned", [False, True])
@pytest.mark.parametrize("a_is_turned", [False, True])
@pytest.mark.parametrize("batch", [(), (1,), (3,)])
def test_large_products_are_made_by_onednn_whatever_the_order_in_memory(batch, a_is_turned, b_is_turned):
    a, b = matrix(*batch, 64, 256, is_turned=a_is_turned), matrix(*batch, 256, 130, is_turned=b_is_turned)
    targets = targets_after_the_pass(lambda a, b: torch.bmm(a, b) if batch else torch.mm(a, b), a, b)
    assert targets.count(torch.ops.mkldnn._linear_pointwise.default) == (batch or (1,))[0]
    assert not {torch.ops.aten.mm.default, torch.ops.aten.bmm.default} & {*targets}
    assert targets.count(torch.ops.aten.clone.default) == a_is_turned * (batch or (1,))[0]


def test_parts_of_wider_matrices_are_copied():
    """Also the second one, which oneDNN takes in either order, but slowly if its rows lie apart."""
    wide, narrow = matrix(256, 512), matrix(256, 256)
    for function, inputs in (
        (lambda a, b: a[:, :256] @ b, (wide, narrow)),
        (lambda a, b: a @ b[:, :256], (narrow, wide)),
    ):
        targets = targets_after_the_pass(function, *inputs)
        assert targets.count(torch.ops.mkldnn._linear_pointwise.default) == 1
        assert targets.count(torch.ops.aten.clone.default) == 1


@pytest.mark.parametrize("shape", [(64, 130), (130,)])
def test_a_product_with_a_sum(shape):
    c, a, b = matrix(*shape), matrix(64, 256), matrix(256, 130)
    targets = targets_after_the_pass(torch.addmm, c, a, b)
    assert torch.ops.mkldnn._linear_pointwise.default in targets and torch.ops.aten.addmm.default not in targets
    targets = targets_after_the_pass(lambda c, a, b: torch.addmm(c, a, b, beta=0.5), c, a, b)
    assert torch.ops.mkldnn._linear_pointwise.default not in targets


def test_many_products_at_once_are_left_alone():
    """Each would be nodes of its own."""
    targets = targets_after_the_pass(torch.bmm, matrix(9, 32, 256), matrix(9, 256, 256))
    assert torch.ops.mkldnn._linear_pointwise.default not in targets


@pytest.mark.parametrize("dtype, rows", [(torch.float32, 31), (torch.float64, 64), (torch.bfloat16, 64)])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_small_products_and_other_numbers_are_left_alone(batch, dtype, rows):
    """As many as 32 rows of 256 numbers, times 256 columns, are enough."""
    a, b = matrix(*batch, rows, 256, dtype=dtype), matrix(*batch, 256, 256, dtype=dtype)
    targets = targets_after_the_pass(lambda a, b: a @ b, a, b)
    assert torch.ops.mkldnn._linear_pointwise.default not in targets
    if dtype == torch.float32:
        a = matrix(*batch, rows + 1, 256)
        assert torch.ops.mkldnn._linear_pointwise.default in targets_after_the_pass(lambda a, b: a @ b, a, b)


def test_products_on_a_gpu_are_left_alone():
    with FakeTensorMode():
        a, b = (torch.empty(256, 256, device="cuda") for _ in range(2))
        traced = make_fx(torch.mm)(a, b)
        OneDNNProducts()(traced.graph)
    assert torch.ops.aten.mm.default in [node.target for node in traced.graph.nodes]


@pytest.mark.parametrize(
    "change, pays",
    [
        ({}, True),
        ({"family": 30}, True),
        ({"family": 25}, False),  # Zen 4, whose units are no wider for AVX-512
        ({"maker": "GenuineIntel"}, False),
        ({"capability": "AVX2"}, False),
        ({"device": CUDA}, False),
        ({"platform": "darwin"}, False),
        ({"mkl": False}, False),
        ({"mkldnn": False}, False),
    ],
)
def test_it_is_for_processors_whose_avx512_mkl_leaves_unused(monkeypatch, change, pays):
    machine = {"maker": "AuthenticAMD", "family": 26, "capability": "AVX512", "device": CPU, "platform": "linux"}
    machine |= {"mkl": True, "mkldnn": True} | change
    for name in ("mkl", "mkldnn"):
        monkeypatch.setattr(getattr(torch.backends, name), "is_available", lambda name=name: machine[name])
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: machine["capability"])
    monkeypatch.setattr("sys.platform", machine["platform"])
    about = "processor\t: 0\nvendor_id\t: {maker}\ncpu family\t: {family}\nmodel\t\t: 2\n".format(**machine)
    monkeypatch.setattr(Path, "read_text", lambda path: about)
    assert OneDNNProducts.pays(machine["device"]) is pays


class Seen(Exception):
    """Ends a run at its first compilation."""


@pytest.mark.parametrize("pays", [False, True])
@pytest.mark.parametrize("script", SCRIPTS)
def test_main_compiles_with_it_where_it_pays(launch, monkeypatch, script, pays):
    module, seen = importlib.import_module(script), []

    def compile(step, options, **more):
        seen.append(options.get("post_grad_custom_post_pass"))
        raise Seen

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(module.OneDNNProducts, "pays", lambda device: pays)
    env_id = "Pong-v5" if "atari" in script else "Counter"
    launch(script, "--compile", env_id=env_id, raises=Seen)
    assert [type(found) for found in seen] == [module.OneDNNProducts if pays else type(None)]


def test_compiled_it_is_called_and_kept_in_the_cache(monkeypatch, tmp_path):
    """A compiled gradient has the products of both directions, and a second compilation comes from the cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    weights, x = torch.randn(2, 256, 256), torch.randn(32, 256)

    def loss(weights):
        return torch.vmap(lambda weight: (x @ weight).relu().square().mean())(weights).sum()

    seen, call = [], OneDNNProducts.__call__

    def noting(products, graph):
        call(products, graph)
        seen.append([node.target for node in graph.nodes].count(torch.ops.mkldnn._linear_pointwise.default))

    monkeypatch.setattr(OneDNNProducts, "__call__", noting)
    expected = torch.func.grad_and_value(loss)(weights)
    for _ in range(2):
        torch.compiler.reset()
        options = {"cpp_wrapper": True, "cpp.vec_isa_ok": True, "post_grad_custom_post_pass": OneDNNProducts()}
        step = torch.compile(torch.func.grad_and_value(loss), fullgraph=True, options=options)
        torch.testing.assert_close(step(weights), expected, rtol=1e-4, atol=1e-5)
        with torch.profiler.profile() as profile:
            step(weights)
        names = [event.name for event in profile.events()]
        assert names.count("mkldnn::_linear_pointwise") >= 3 and "aten::bmm" not in names
        assert "aten::contiguous" not in names  # it would copy what is not, one core alone
    assert len(seen) == 1 and seen[0] >= 3

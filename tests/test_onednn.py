"""The pass that has oneDNN make a compiled graph's large matrix products; its text is the same in all scripts."""

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from td3_continuous_action_torchcompile import OneDNNProducts

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def targets_after_the_pass(function, *inputs):
    """What the pass leaves of the function's graph: the targets of its nodes. Its results must be the function's."""
    traced = make_fx(function, tracing_mode="fake")(*inputs)
    metadata = {node.name: node.meta["val"] for node in traced.graph.nodes if "val" in node.meta}
    OneDNNProducts()(traced.graph)
    traced.graph.lint()
    traced.recompile()
    theirs, ours = function(*inputs), traced(*inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for node in traced.graph.nodes:  # of what is new, too
        if node.op == "call_function" and node.name not in metadata:
            assert isinstance(node.meta["val"], torch.Tensor)
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


def test_rows_that_are_parts_of_longer_ones():
    wide = matrix(128, 512)
    targets = targets_after_the_pass(lambda a, b: a[:, :256] @ b, wide, matrix(256, 128))
    assert torch.ops.mkldnn._linear_pointwise.default in targets


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
    "maker, capability, device, platform, pays",
    [
        ("AuthenticAMD", "AVX512", CPU, "linux", True),
        ("GenuineIntel", "AVX512", CPU, "linux", False),
        ("AuthenticAMD", "AVX2", CPU, "linux", False),
        ("AuthenticAMD", "AVX512", CUDA, "linux", False),
        ("AuthenticAMD", "AVX512", CPU, "darwin", False),
    ],
)
def test_it_is_for_processors_whose_avx512_mkl_leaves_unused(monkeypatch, maker, capability, device, platform, pays):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(Path, "read_text", lambda path: f"vendor_id\t: {maker}\n")
    assert OneDNNProducts.pays(device) is pays


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

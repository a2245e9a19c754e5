"""`use_onednn`, after which oneDNN makes the large matrix products of what is compiled; its text is the same in all."""

import functools
import importlib
from pathlib import Path

import pytest
import torch
from torch._inductor.decomposition import decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from td3_continuous_action_torchcompile import use_onednn

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")

LEANRL = Path(__file__).parent.parent / "leanrl"
SCRIPTS = sorted(path.stem for path in LEANRL.glob("*_torchcompile.py") if "def use_onednn" in path.read_text())
LINEAR, CLONE = torch.ops.mkldnn._linear_pointwise.default, torch.ops.aten.clone.default
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default}


@pytest.fixture(autouse=True)
def put_back(monkeypatch):
    """What `use_onednn` changes in the whole process is Inductor's own before each test, and as it was after it."""
    for product in PRODUCTS:
        own = decompositions[product]
        while isinstance(own, functools.partial):  # on a Zen 5 another test's run may have called it
            own = own.keywords["otherwise"]
        monkeypatch.setitem(decompositions, product, own)
    with torch.compiler.config.patch(cache_key_tag="none"):
        yield


def call_on(monkeypatch, maker="AuthenticAMD", family=26, platform="linux", mkldnn=True):
    """Calls it as on such a machine."""
    about = f"processor\t: 0\nvendor_id\t: {maker}\ncpu family\t: {family}\nmodel\t\t: 2\n"
    with monkeypatch.context() as patched:
        patched.setattr(torch.backends.mkldnn, "is_available", lambda: mkldnn)
        patched.setattr("sys.platform", platform)
        patched.setattr(Path, "read_text", lambda path, **_: about)
        use_onednn()


@pytest.fixture
def zen_5(monkeypatch):
    call_on(monkeypatch)


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
@pytest.mark.parametrize("batch", [(), (2,), (3,)])
def test_large_products_are_made_by_onednn_whatever_the_order_in_memory(zen_5, batch, a_is_turned, b_is_turned):
    a, b = matrix(*batch, 64, 256, is_turned=a_is_turned), matrix(*batch, 256, 130, is_turned=b_is_turned)
    targets = targets_of(lambda a, b: torch.bmm(a, b) if batch else torch.mm(a, b), a, b)
    assert targets.count(LINEAR) == (batch or (1,))[0] and not PRODUCTS & {*targets}
    assert targets.count(CLONE) == a_is_turned * (batch or (1,))[0], "oneDNN would copy it on one core alone"


def test_parts_of_wider_matrices(zen_5):
    wide, narrow = matrix(256, 512), matrix(256, 256)
    assert targets_of(lambda a, b: a[:, :256] @ b, wide, narrow).count(LINEAR) == 1
    assert targets_of(lambda a, b: a @ b[:, :256], narrow, wide).count(LINEAR) == 1


@pytest.mark.parametrize("dtype, rows", [(torch.float32, 31), (torch.float64, 64), (torch.bfloat16, 64)])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_small_products_and_other_numbers_are_left_alone(zen_5, batch, dtype, rows):
    """As many as 32 rows of 256 numbers, times 256 columns, are enough."""
    a, b = matrix(*batch, rows, 256, dtype=dtype), matrix(*batch, 256, 256, dtype=dtype)
    targets = targets_of(lambda a, b: a @ b, a, b)
    assert LINEAR not in targets and len(PRODUCTS & {*targets}) == 1
    if dtype == torch.float32:
        assert LINEAR in targets_of(lambda a, b: a @ b, matrix(*batch, rows + 1, 256), b)


def test_inductors_own_decompositions_are_kept(zen_5):
    """Of a product of a row and a column it makes a sum."""
    assert not PRODUCTS & {*targets_of(torch.mm, matrix(1, 30), matrix(30, 1))}
    assert not PRODUCTS & {*targets_of(torch.bmm, matrix(2, 1, 30), matrix(2, 30, 1))}


@pytest.mark.parametrize("batch", [(), (2,)])
def test_products_on_a_gpu_are_left_alone(zen_5, batch):
    with FakeTensorMode():
        a, b = (torch.empty(*batch, 256, 256, device="cuda") for _ in range(2))
        traced = make_fx(lambda a, b: torch.bmm(a, b) if batch else torch.mm(a, b), decompositions)(a, b)
    assert len(PRODUCTS & {node.target for node in traced.graph.nodes}) == 1


@pytest.mark.parametrize(
    "machine, pays",
    [
        ({}, True),
        ({"family": 30}, True),
        ({"family": 25}, False),  # Zen 3, which has no AVX-512, and Zen 4, whose units are no wider for it
        ({"family": 6}, False),
        ({"maker": "GenuineIntel"}, False),
        ({"platform": "darwin"}, False),
        ({"mkldnn": False}, False),
    ],
)
def test_it_is_for_processors_whose_avx512_mkl_leaves_unused(monkeypatch, machine, pays):
    before = {product: decompositions[product] for product in PRODUCTS}
    call_on(monkeypatch, **machine)
    assert [decompositions[product] is not before[product] for product in PRODUCTS] == [pays, pays]
    assert torch.compiler.config.cache_key_tag == ("oneDNN" if pays else "none")


class Seen(Exception):
    """Ends a run at its first compilation."""


@pytest.mark.parametrize("script", SCRIPTS)
def test_main_calls_it_before_it_compiles(launch, monkeypatch, script):
    module, calls = importlib.import_module(script), []

    def compile(*_, **__):
        raise Seen

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(module, "use_onednn", lambda: calls.append(script))
    launch(script, "--compile", env_id="Counter", raises=Seen)
    assert calls == [script]


def test_what_was_compiled_without_it_is_not_used(monkeypatch, tmp_path):
    """Though it is of the same text; and what was compiled with it is found. A gradient has products, too."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    weights, x = torch.randn(2, 256, 256), torch.randn(32, 256)

    def loss(weights):
        return torch.vmap(lambda weight: (x @ weight).relu().square().mean())(weights).sum()

    expected = torch.func.grad_and_value(loss)(weights)

    def products_of_a_call():
        """How many oneDNN makes, and whether what was compiled came from the cache."""
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        options = {"fallback_random": True, "cpp_wrapper": True, "cpp.vec_isa_ok": True}
        step = torch.compile(torch.func.grad_and_value(loss), fullgraph=True, options=options)
        torch.testing.assert_close(step(weights), expected, rtol=1e-4, atol=1e-5)
        with torch.profiler.profile() as profile:
            step(weights)
        names = [event.name for event in profile.events()]
        assert "aten::contiguous" not in names  # it would copy what is not, one core alone
        is_found = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] == 1
        return names.count("mkldnn::_linear_pointwise"), is_found

    assert products_of_a_call() == (0, False)
    call_on(monkeypatch)
    assert products_of_a_call() == (4, False)
    assert products_of_a_call() == (4, True)

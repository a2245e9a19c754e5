"""What compiled scripts capture works on the device alone: shown on the device "meta", which needs no GPU.

Tensors there have shapes and no numbers: whatever reads one back on the host raises. A mode watches all operations, as
some of them take the host's tensors along, which a captured graph would read once, and never again. Transfers are
another matter, if they are from or to what `mirrored` has made, which is pinned on a GPU: each replay makes them anew.
"""

import importlib
from unittest.mock import MagicMock

import pytest
import torch
import tyro
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import agents  # noqa: F401 - registers the toys
from pools import Counting

META = torch.device("meta")
CELLS = ("none", "stack", "gru", "lstm", "mingru", "lru", "s5", "ffm")
CONTINUOUS, LOCAL = ["--env-id", "ToyContinuous-v0"], ["--num-actors", "0"]
OFF_POLICY = [*CONTINUOUS, "--num-envs", "2", "--buffer-size", "100", "--batch-size", "16"]
RUNS = [
    ("sac_continuous_action", OFF_POLICY, 6),
    ("sac_continuous_action", [*OFF_POLICY, "--no-autotune", "--target-network-frequency", "3"], 10),
    ("td3_continuous_action", OFF_POLICY, 6),
    ("dqn", ["--buffer-size", "100"], 1),
    ("ppo", [], 2),
    ("ppo_continuous_action", CONTINUOUS, 2),
    ("ppo_atari_envpool", ["--env-id", "Scripted-v5"], 3),
    *(("ppo_memory", ["--cell", cell], 3) for cell in CELLS),
    *(("dqn_memory", ["--cell", cell, "--buffer-size", "5000"], 2) for cell in CELLS),
    ("impala_ray", LOCAL, 1),
    ("impala_ray", [*LOCAL, "--env-id", "Breakout-v5"], 1),
    ("appo_ray", LOCAL, 2),
    ("appo_ray", [*LOCAL, *CONTINUOUS], 2),
]
EAGER = [run[:2] for run in RUNS if not {"gru", "lstm"} & set(run[1])]  # these read on the host where episodes end
# Of an eager agent, the methods that work on the device
METHODS = {
    "sac_continuous_action": [("choose",), ("learn", True, True), ("learn", False, False)],
    "td3_continuous_action": [("choose",), ("learn", True), ("learn", False)],
    "dqn_memory": [("choose",), ("learn",), ("update_target",)],
    "dqn": [("learn",), ("update_target",)],
    "ppo_memory": [("choose",), ("prepare",), ("learn",)],
    "ppo": [("prepare",), ("learn",)],
    "impala_ray": [("update",)],
    "appo_ray": [("prepare",), ("update", torch.arange(8, device=META))],
}


class Reached(Exception):
    """A run is about to begin, or to warm up."""


class MetaOnly(TorchDispatchMode):
    """Raises if an operation has a tensor elsewhere, but for transfers that do not wait, from and to `pinned` ones."""

    def __init__(self, pinned):
        super().__init__()
        self.pinned = pinned

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        places = [tensor.device for tensor in tensors]
        if function is torch.ops.aten.copy_.default and len(set(places)) == 2:
            (host,) = [tensor for tensor in tensors if tensor.device != META]
            assert any(host is each for each in self.pinned), "a transfer has a tensor that is not pinned"
            assert args[2:] == (True,), "a transfer waits"
            return args[0]
        result = function(*args, **kwargs or {})
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        assert {*places, *(each.device for each in results)} <= {META}, f"{function} has a tensor of the host"
        return result


def reach(script, flags, monkeypatch, fakes):
    """What `main`, with `fakes` in place of its helpers and a GPU that is "meta", raises Reached with."""
    module = importlib.import_module(script)

    class Torch:
        device = staticmethod(lambda name: META)
        get_device_module = staticmethod(lambda device: torch.cpu)  # which has events
        __getattr__ = staticmethod(lambda name: getattr(torch, name))

    if "Breakout-v5" in flags:
        pytest.importorskip("envpool")
    for name, fake in ({"torch": Torch(), "Fleet": MagicMock(), "make_pool": Counting} | fakes).items():
        if hasattr(module, name):
            monkeypatch.setattr(module, name, fake)
    with pytest.raises(Reached) as reached, monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "Event", lambda external: torch.cpu.Event())
        module.main(tyro.cli(module.Args, args=flags))
    return reached.value.args


@pytest.mark.parametrize(("script", "flags", "count"), RUNS, ids=[" ".join([run[0], *run[1]]) for run in RUNS])
def test_captured_steps_have_all_tensors_on_the_device(script, flags, count, monkeypatch):
    def warm_up(steps, agent, run):
        raise Reached(*steps)

    pinned, mirrored = [], getattr(importlib.import_module(f"{script}_torchcompile"), "mirrored", None)

    def noting(*shape, **kind):
        host, tensor = mirrored(*shape, **kind)
        pinned.append(host)
        return host, tensor

    fakes = {"Run": MagicMock(), "warm_up": warm_up, "CudaGraphModule": lambda step, warmup: step, "mirrored": noting}
    steps = reach(f"{script}_torchcompile", ["--cudagraphs", *flags], monkeypatch, fakes)
    assert len(steps) == count
    for step in steps:
        with MetaOnly(pinned):
            step()


@pytest.mark.parametrize(("script", "flags"), EAGER, ids=[" ".join([run[0], *run[1]]) for run in EAGER])
def test_eager_agents_learn_on_the_device(script, flags, monkeypatch):
    def begin(args, device, agent, *_):
        raise Reached(agent)

    (agent,) = reach(script, flags, monkeypatch, {"Run": begin})
    for name, *arguments in next(METHODS[start] for start in METHODS if script.startswith(start)):
        getattr(agent, name)(*arguments)

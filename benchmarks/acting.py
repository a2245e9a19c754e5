"""The policy of PPO's Atari script, eager and compiled, as compile_inference.py and compile_exploration.py measure it.

These import it only when they measure, for tables.py, which imports them, has no use for torch.
"""

import importlib
import sys
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters, get_compilation_metrics, set_compilation_metrics_limit

from speed import SCRIPTS

sys.path.append(str(SCRIPTS))
atari = importlib.import_module("ppo_atari_envpool")
ACTIONS = 4  # Breakout's
# Calls that compile: on CUDA the second captures the graph, in backends and modes with one
FIRST_CALLS = {"cpu": 1, "cuda": 2}
set_compilation_metrics_limit(100_000)  # torch forgets all but the last 64, and `compilations` counts them


def explore(network: torch.nn.Module, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Logits, sampled actions, their log-probabilities and the values, as the script's agent acts.

    [B, 4, 84, 84] -> [B, actions], [B], [B], [B].
    """
    logits, value = network(observation)
    log_probs = F.log_softmax(logits, -1)
    action = (log_probs - torch.empty_like(log_probs).exponential_().log()).argmax(1)  # Gumbel-max
    return logits, action, log_probs.gather(1, action[:, None]).squeeze(1), value


def compiled(backend: str, mode: str) -> Callable:
    """`explore` compiled; graph breaks are allowed, so that they can be counted."""
    return torch.compile(explore, backend=backend, mode=mode)


class Explorer(atari.AtariPPOAgent):
    """The script's agent, which acts with `policy`: `explore` or its compiled form."""

    policy: Callable = staticmethod(explore)

    @torch.no_grad()
    def choose(self) -> None:
        """Acts on `images`, and enters what it did in the rollout's rows from `row` on."""
        _, action, log_prob, value = self.policy(self.network, self.images)
        self.action.copy_(action)
        for name, tensor in {"action": self.action, "log_prob": log_prob, "value": value}.items():
            self.batch[name][self.row + self.columns] = tensor


def compilations() -> dict[str, int]:
    """Graphs that this process has compiled so far, breaks between graphs, and compilations of what it had before."""
    recompiled = [metrics for metrics in get_compilation_metrics() if metrics.recompile_reason]
    graph_breaks = sum(counters["graph_break"].values())
    return {"graphs": counters["stats"]["unique_graphs"], "graph_breaks": graph_breaks, "recompiles": len(recompiled)}


def now(device: str) -> float:
    """Seconds on a clock that is read when the device has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def take_turns(
    seconds_of: Callable[[Callable], float], arms: Mapping[str, Callable], most: int, limit: float, least: int
) -> dict[str, list[float]]:
    """Seconds of `most` calls of each arm, one after the other; once `limit` seconds an arm are over, of `least`.

    Every second turn is in reverse order, so that none of the arms always follows the other.
    """
    seconds = {name: [] for name in arms}
    end = time.perf_counter() + limit * len(arms)
    for turn in range(most):
        if turn >= least and time.perf_counter() > end:
            break
        for name in list(arms)[:: -1 if turn % 2 else 1]:
            seconds[name].append(seconds_of(arms[name]))
    return seconds

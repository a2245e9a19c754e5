"""Eager and compiled agents side by side, with the same weights and the same replayed transitions."""

import importlib

import gymnasium as gym
import numpy as np
import torch

CPU = torch.device("cpu")


class Toy(gym.Env):
    """Spaces alone: four numbers observed, three actions of unlike bounds (or three discrete ones)."""

    def __init__(self, discrete=False):
        low, high = np.array([-1, 0, -3], np.float32), np.array([2, 0.5, -1], np.float32)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float64)
        self.action_space = gym.spaces.Discrete(3) if discrete else gym.spaces.Box(low, high)


for name, is_discrete in (("ToyContinuous-v0", False), ("ToyDiscrete-v0", True)):
    gym.register(name, Toy, kwargs={"discrete": is_discrete}, max_episode_steps=50)


def pair(script, eager_class, compiled_class, networks, **arguments):
    """An eager and a compiled agent with equal networks; `networks` names the latter's flat vectors' attributes.

    Returns (eager, compiled, batch): the batch, for the eager one, holds the transitions that `compiled.drawn` names.
    """
    eager_module, compiled_module = (importlib.import_module(script + end) for end in ("", "_torchcompile"))
    env = gym.make("ToyDiscrete-v0" if script == "dqn" else "ToyContinuous-v0", disable_env_checker=True)
    common = {"batch_size": 32, "buffer_size": 64, "cuda": False} | arguments
    torch.manual_seed(0)
    eager = getattr(eager_module, eager_class)(eager_module.Args(**common), env, CPU)
    compiled = getattr(compiled_module, compiled_class)(compiled_module.Args(**common), env, CPU)
    for ours, theirs in networks.items():
        getattr(compiled, ours).copy_(flat(getattr(eager, theirs)))

    ring, generator = compiled.ring, np.random.default_rng(0)
    env.action_space.seed(0)
    ring.start(generator.normal(size=(1, 4)))
    for n in range(60):
        observation, last = generator.normal(size=(2, 4))
        action, reward = env.action_space.sample(), generator.normal()
        ring.add(0, observation, action, reward, n % 7 == 3, last if n % 5 == 4 and n % 7 != 3 else None)
        ring.upload()
        ring.write()
    numbers = torch.randint(60, (32,))
    compiled.overlaps = True  # updates are on the batches drawn before
    compiled.drawn.copy_(numbers[None])
    batch = ring.gather(numbers)
    if script == "dqn":
        batch["action"] = batch["action"].long()
    return eager, compiled, batch, numbers


def flat(module):
    """A module's parameters as the compiled scripts keep them: a vector, or a row for each member of a ModuleList.

    Matrices are transposed.
    """
    if isinstance(module, torch.nn.ModuleList):
        return torch.stack([flat(member) for member in module])
    return torch.cat([(p.mT if p.ndim == 2 else p).detach().flatten() for p in module.parameters()])


def compile_as_main_does(step):
    torch.compiler.reset()
    options = {"fallback_random": True, "cpp_wrapper": True, "cpp.vec_isa_ok": True, "size_asserts": False}
    options["guard_filter_fn"] = torch.compiler.skip_all_guards_unsafe
    return torch.compile(step, fullgraph=True, options=options)


def assert_same(ours, theirs):
    """Equal parameters, to 2e-6 but for one in a thousand, whose gradient is so small that Adam magnifies rounding."""
    difference = (ours - theirs).abs()
    assert difference.max() < 1e-4
    assert (difference > 2e-6).float().mean() < 1e-3


def assert_bootstrap(pair, end, matters):
    """Whether shifting the target critics changes the critics' loss when all of the batch's `terminated` are `end`."""
    losses = {"eager": [], "compiled": []}
    for shift in (0.0, 0.05):
        eager, compiled, batch, _ = pair()
        batch["terminated"] = torch.full_like(batch["terminated"], end)
        with torch.no_grad():
            compiled.target_critics.add_(shift)
            for parameter in eager.target_critics.parameters():
                parameter.add_(shift)
            compiled.update_critics(batch)
        eager.update_critics(batch)
        losses["compiled"].append(compiled.losses[0].item())
        losses["eager"].append(eager.losses["qf_loss"].item())
    for without, shifted in losses.values():
        assert (abs(without - shifted) > 0.1) is matters


def assert_targets_follow(compiled):
    """After an update with learning rates of 0 only the target critics have moved, by tau = 0.25."""
    compiled.target_critics.add_(1.0)
    before = [tensor.clone() for tensor in (compiled.actor, compiled.critics, compiled.target_critics)]
    with torch.no_grad():
        compiled.update(policy_is_due=True)
    assert torch.equal(compiled.actor, before[0]) and torch.equal(compiled.critics, before[1])
    assert torch.allclose(compiled.target_critics, before[2] - 0.25, atol=1e-6)


def assert_policy_is_updated_when_due(launch, monkeypatch, script, agent_class, times):
    """With --policy-frequency 3 each third update of the critics, the first among them, is followed by `times` ones."""
    agent_class, seen = getattr(importlib.import_module(script), agent_class), []
    for name in ("update_critics", "update_actor"):
        update = getattr(agent_class, name)
        patched = lambda agent, batch, name=name, update=update: seen.append(name) or update(agent, batch)  # noqa: E731
        monkeypatch.setattr(agent_class, name, patched)
    flags = ["--total-timesteps", 120, "--learning-starts", 100, "--num-envs", 2, "--policy-frequency", 3]
    run = launch(script, *flags, "--buffer-size", 200, "--batch-size", 8)
    expected = []
    for n in range(run.summary["updates"]):
        expected += ["update_critics"] + (["update_actor"] * times if n % 3 == 0 else [])
    assert seen == expected and len(seen) > 20


def assert_same_beside_the_environments(launch, monkeypatch, script, agent_class, *more):
    """What a GPU does, here on the CPU: an update may begin before the step it belongs to, but makes the same run.

    With one environment: with more the CPU acts after each of a step's updates, and draws other random numbers.
    """
    module, ended, early = importlib.import_module(script), [], []
    waiting = getattr(module, agent_class)

    class Overlapping(waiting):
        overlaps = property(lambda self: True, lambda self, value: None)

        def act(self):
            super().act()
            self.added_before = self.ring.added

        def update(self, policy_is_due):
            early.append(self.ring.added == self.added_before)
            super().update(policy_is_due)

    flags = ["--total-timesteps", 300, "--learning-starts", 100, "--buffer-size", 120, "--batch-size", 8, *more]
    for each in (waiting, Overlapping):
        made = lambda *a, each=each: ended.append(each(*a)) or ended[-1]  # noqa: E731
        monkeypatch.setattr(module, agent_class, made)
        ended.append(launch(script, *flags))
    one, first, other, second = ended
    assert {True, False} == set(early), "updates before and after the steps that lead up to them"
    assert first.summary["updates"] == second.summary["updates"] >= 200
    assert first.episodes == second.episodes and len(first.episodes) > 5
    for name in ("actor", "critics", "target_critics", "losses"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert first.metrics[-1]["qf_loss"] == second.metrics[-1]["qf_loss"]

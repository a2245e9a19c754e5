"""Eager and compiled agents side by side, with the same weights and the same replayed transitions."""

import contextlib
import importlib
import math
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

CPU = torch.device("cpu")


class Toy(gym.Env):
    """Spaces alone: four numbers observed, three actions of unlike bounds (or three discrete ones)."""

    def __init__(self, discrete=False, low=(-1, 0, -3), high=(2, 0.5, -1), dtype=np.float32):
        low, high = np.array(low, dtype), np.array(high, dtype)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float64)
        self.action_space = gym.spaces.Discrete(3) if discrete else gym.spaces.Box(low, high, dtype=dtype)


for name, is_discrete in (("ToyContinuous-v0", False), ("ToyDiscrete-v0", True)):
    gym.register(name, Toy, kwargs={"discrete": is_discrete}, max_episode_steps=50)
BOUNDS = {"low": np.linspace(-0.9, 0.1, 40), "high": np.linspace(0.3, 3.3, 40)}  # which float32 can't hold
for bits in (32, 64):
    gym.register(f"Toy{bits}-v0", Toy, kwargs=BOUNDS | {"dtype": f"float{bits}"}, max_episode_steps=50)


def assert_orthogonal(network):
    """Every layer's weights are, scaled by 0.01 in the policy's last, 1 in the value's and √2 elsewhere; no biases."""

    def layers_of(part):
        return [m for m in part.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)]

    gains = {layers_of(network.actor)[-1]: 0.01, layers_of(network.critic)[-1]: 1.0}
    layers = layers_of(network)
    for layer in layers:
        values = torch.linalg.svdvals(layer.weight.flatten(1))
        torch.testing.assert_close(values, torch.full_like(values, gains.get(layer, math.sqrt(2))))
        assert not layer.bias.any()
    assert len(layers) >= 5


def norm_of_first_gradient(optimizer):
    """The norm of the gradient by which the first step was taken, from Adam's first moment."""
    states = getattr(optimizer, "state", None)
    moments = [state["exp_avg"] for state in states.values()] if states else [optimizer.first_moment]
    return 10 * torch.cat([moment.flatten() for moment in moments]).norm().item()


def pair(script, eager_class, compiled_class, networks, env_id="ToyContinuous-v0", device=CPU, **arguments):
    """An eager and a compiled agent with equal networks; `networks` names the latter's flat vectors' attributes.

    Returns (eager, compiled, batch): the batch holds the transitions that are drawn for the updates of both.
    """
    eager_module, compiled_module = (importlib.import_module(script + end) for end in ("", "_torchcompile"))
    env = gym.make("ToyDiscrete-v0" if script == "dqn" else env_id, disable_env_checker=True)
    common = {"batch_size": 32, "buffer_size": 64, "cuda": False} | arguments
    torch.manual_seed(0)
    ring = compiled_module.ReplayRing(compiled_module.Args(**common), env, device)
    eager = getattr(eager_module, eager_class)(eager_module.Args(**common), env, device, ring)
    with torch.no_grad():
        compiled = getattr(compiled_module, compiled_class)(compiled_module.Args(**common), env, device, ring)
    for ours, theirs in networks.items():
        getattr(compiled, ours).copy_(flat(getattr(eager, theirs)))

    generator = np.random.default_rng(0)
    env.action_space.seed(0)
    observation = generator.normal(size=4)
    for n in range(60):
        next_observation, terminated, truncated = generator.normal(size=4), n % 7 == 3, n % 5 == 4
        action, reward = env.action_space.sample(), generator.normal()
        ring.add(observation, next_observation, action, reward, terminated, truncated)
        ring.upload()
        ring.write()
        observation = generator.normal(size=4) if terminated or truncated else next_observation
    ring.drawn.copy_(torch.randint(60, (1, 32)))
    return eager, compiled, ring.gather(ring.drawn[0])


def flat(module):
    """A module's parameters as the compiled scripts keep them: a vector, or a row for each member of a ModuleList.

    Rows are filled up with zeros.
    """
    if isinstance(module, torch.nn.ModuleList):
        rows = torch.stack([flat(member) for member in module])
        return torch.nn.functional.pad(rows, (0, -rows.shape[1] % 16))
    return flattened(p.detach() for p in module.parameters())


def flattened(tensors):
    """Parameters, or what has their shapes, as a vector, in which matrices lie by rows of their longer side."""
    return torch.cat([(x.mT if x.ndim == 2 and x.shape[0] >= x.shape[1] else x).flatten() for x in tensors])


@contextlib.contextmanager
def as_on(maker="AuthenticAMD", family=26, platform="linux", mkldnn=True):
    """As on a machine like that, before `use_onednn`, whose changes to the process are put back but for a lowering."""
    from torch._inductor import decomposition  # which takes long to import

    about = f"processor\t: 0\nvendor_id\t: {maker}\ncpu family\t: {family}\nmodel\t\t: 2\n"
    read = Path.read_text

    def read_text(path, *args, **kwargs):
        return about if path == Path("/proc/cpuinfo") else read(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched, torch.compiler.config.patch(cache_key_tag="none"):
        patched.setattr(torch.backends.mkldnn, "is_available", lambda: mkldnn)
        patched.setattr("sys.platform", platform)
        patched.setattr(Path, "read_text", read_text)
        for product in ("mm", "bmm"):
            own = getattr(decomposition, product)
            patched.setitem(decomposition.decompositions, getattr(torch.ops.aten, product).default, own)
        yield


def products_by_onednn(step):
    """How many large products oneDNN makes in a call."""
    with torch.profiler.profile() as profile:
        step()
    names = [event.name for event in profile.events()]
    assert "aten::contiguous" not in names  # it would copy what is not, one core alone
    return names.count("mkldnn::_linear_pointwise")


def compile_as_main_does(step, **more):
    torch.compiler.reset()
    module = importlib.import_module(step.__module__)
    if recurrence := getattr(module, "linear_recurrence", None):
        torch.compiler.allow_in_graph(recurrence)
    options = {"fallback_random": True, "cpp_wrapper": True, "cpp.vec_isa_ok": True, "size_asserts": False}
    options["guard_filter_fn"] = lambda guards: ["_due" in guard.name for guard in guards]
    if hasattr(module, "use_onednn"):
        module.use_onednn()
    return torch.compile(step, fullgraph=True, options=options | more)


def assert_same(ours, theirs):
    """Equal parameters, to 2e-6 but for one in a thousand, whose gradient is so small that Adam magnifies rounding."""
    difference = (ours - theirs).abs()
    assert difference.max() < 1e-4
    assert (difference > 2e-6).float().mean() < 1e-3


def assert_rows_are_aligned(compiled):
    """Each critic begins at a multiple of 64 bytes, for which zeros follow it that no update moves."""
    size = sum(parameter.numel() for parameter in compiled.q_module.module.parameters())
    for critics in (compiled.critics, compiled.target_critics):
        assert critics.is_contiguous() and critics.shape[1] == size + -size % 16 > size
        assert critics[:, size:].eq(0).all() and critics[:, :size].ne(0).any(1).all()


def assert_actions_keep_to_bounds(pair):
    """Those of a policy that is at its bounds, too, as the environment compares them."""
    observation = np.random.default_rng(0).normal(size=(1000, 4)).astype(np.float32) * 1000
    for bits in (32, 64):
        for agent in pair(env_id=f"Toy{bits}-v0", num_envs=1000)[:2]:
            with torch.no_grad():
                action = agent.act(observation)
            low, high = (BOUNDS[name].astype(f"float{bits}") for name in ("low", "high"))
            assert action.dtype == low.dtype and (action >= low).all() and (action <= high).all()
            assert np.abs(action - low).min() < 1e-6 and np.abs(action - high).min() < 1e-6


def assert_bootstrap(pair, end, matters):
    """Whether shifting the target critics changes the critics' loss when all of the batch's `terminated` are `end`."""
    losses = {"eager": [], "compiled": []}
    for shift in (0.0, 0.05):
        eager, compiled, batch = pair()
        batch["terminated"] = torch.full_like(batch["terminated"], end)
        with torch.no_grad():
            compiled.target_critics.add_(shift)
            for parameter in eager.target_critics.parameters():
                parameter.add_(shift)
        for name, agent in (("eager", eager), ("compiled", compiled)):
            losses[name].append(agent.qf_loss(agent.critics, batch).item())
    for without, shifted in losses.values():
        assert (abs(without - shifted) > 0.1) is matters


def assert_targets_follow(compiled, kind):
    """After an update with learning rates of 0 only the target critics have moved, by tau = 0.25."""
    compiled.target_critics.add_(1.0)
    before = [tensor.clone() for tensor in (compiled.actor, compiled.critics, compiled.target_critics)]
    with torch.no_grad():
        compiled.learn(*kind)
    assert torch.equal(compiled.actor, before[0]) and torch.equal(compiled.critics, before[1])
    assert torch.allclose(compiled.target_critics, before[2] - 0.25, atol=1e-6)


def assert_eager_and_compiled_make_the_same_run(launch, script, num_envs):
    """Without flags the compiled script draws the same random numbers in the same order; its sums round otherwise."""
    flags = ["--total-timesteps", 120, "--learning-starts", 100, "--buffer-size", 120, "--batch-size", 8]
    one, other = (launch(script + end, *flags, "--num-envs", num_envs) for end in ("", "_torchcompile"))
    assert one.summary["updates"] == other.summary["updates"] >= 18
    assert [line["length"] for line in one.episodes] == [line["length"] for line in other.episodes]
    for ours, theirs in zip(one.made, other.made, strict=True):
        np.testing.assert_allclose(ours.actions, theirs.actions, atol=0.02)


def assert_policy_is_updated_when_due(launch, monkeypatch, script, agent_class, times):
    """With --policy-frequency 3 each third update of the critics, the first among them, is followed by `times` ones."""
    agent_class, seen = getattr(importlib.import_module(script), agent_class), []
    minimize = agent_class.minimize

    def noting(agent, name, *rest):
        seen.append(name)
        minimize(agent, name, *rest)

    monkeypatch.setattr(agent_class, "minimize", noting)
    flags = ["--total-timesteps", 120, "--learning-starts", 100, "--num-envs", 2, "--policy-frequency", 3]
    run = launch(script, *flags, "--buffer-size", 200, "--batch-size", 8)
    expected = []
    for n in range(run.summary["updates"]):
        expected += ["qf_loss"] + (["actor_loss"] * times if n % 3 == 0 else [])
    assert [name for name in seen if name != "alpha_loss"] == expected and len(expected) > 20
    assert seen.count("alpha_loss") == (expected.count("actor_loss") if script.startswith("sac") else 0)


def assert_each_row_once_an_epoch(launch, monkeypatch, script, agent_class, rows, *flags, **environment):
    """Each of the batch's rows, in an order that no other epoch has."""
    seen = []

    def learn(agent, chosen=None):
        seen.append((agent.minibatch if chosen is None else chosen).clone())

    name = "update" if script.startswith("appo") else "learn"
    monkeypatch.setattr(getattr(importlib.import_module(script), agent_class), name, learn)
    launch(script, *flags, "--num-minibatches", 4, "--update-epochs", 3, **environment)
    assert [len(chosen) for chosen in seen[:12]] == [rows // 4] * 12
    epochs = torch.cat(seen[:12]).view(3, rows)
    assert torch.equal(epochs.sort(1).values, torch.arange(rows).expand(3, rows))
    assert len(epochs.unique(dim=0)) == 3


def as_on_a_gpu(*shape, device, dtype=torch.float32):
    """Instead of a script's `mirrored`: the host's tensor is another than the device's, also on a CPU."""
    return torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype, device=device)


def assert_same_beside_the_environments(launch, monkeypatch, script, agent_class, *more):
    """An update may begin before the environments' steps that lead up to it, but makes the same run.

    Once they wait for these steps, with the memory of host and device in one, once they begin as soon as they may.
    """
    module, ended, early = importlib.import_module(script), [], []
    original = getattr(module, agent_class)

    class Waiting(original):
        must_wait = property(lambda self: True, lambda self, value: None)

    class Early(original):
        def act(self, *arguments):
            self.added_before = self.buffer.added
            return super().act(*arguments)

        def update_critics(self, *arguments):
            early.append(self.buffer.added == self.added_before)
            super().update_critics(*arguments)

    flags = ["--total-timesteps", 300, "--learning-starts", 100, "--buffer-size", 120, "--batch-size", 8, *more]
    for each in (Waiting, Early):
        made = lambda *a, each=each: ended.append(each(*a)) or ended[-1]  # noqa: E731
        monkeypatch.setattr(module, agent_class, made)
        ended.append(launch(script, *flags))
        monkeypatch.setattr(module, "mirrored", as_on_a_gpu)
    one, first, other, second = ended
    assert {True, False} == set(early), "updates before and after the steps that lead up to them"
    assert first.summary["updates"] == second.summary["updates"] >= 200
    assert first.episodes == second.episodes and len(first.episodes) > 5
    for name in ("actor", "critics", "target_critics"):
        networks = [getattr(agent, name) for agent in (one, other)]
        assert torch.equal(*(flat(each) if isinstance(each, torch.nn.Module) else each for each in networks)), name
    assert first.metrics[-1]["qf_loss"] == second.metrics[-1]["qf_loss"]


def assert_all_that_happened_is_drawn_alike(launch, monkeypatch, script, agent_class):
    """Each update draws from all transitions of its step and before, the newest as often as the oldest."""
    module, places, ends, rewards = importlib.import_module(script), [], [], []

    class Ring(module.ReplayRing):
        def add(self, observation, next_observation, action, reward, *ends):
            super().add(observation, next_observation, action, reward, *ends)
            rewards.append(reward)

    class Noting(getattr(module, agent_class)):
        def act(self, *arguments):
            self.end = self.buffer.added + 3  # when all three environments have stepped
            return super().act(*arguments)

        def update_critics(self, *arguments):
            numbers = self.buffer.drawn[self.buffer.turn.item()]
            assert numbers.min() >= 0 and numbers.max() < min(self.end, self.buffer.added)
            stored = self.buffer.storage["reward"][numbers % self.buffer.rows]
            assert torch.equal(stored, torch.tensor(rewards, dtype=torch.float32)[numbers]), "not stored yet"
            places.append((numbers.double() + 0.5) / self.end)
            oldest, newest = (part.sum().item() for part in (numbers < 3, numbers >= self.end - 3))
            ends.append((oldest, newest, len(numbers) * 3 / self.end))
            super().update_critics(*arguments)

    monkeypatch.setattr(module, agent_class, Noting)
    monkeypatch.setattr(module, "ReplayRing", Ring)
    flags = ["--num-envs", 3, "--learning-starts", 30, "--total-timesteps", 900, "--batch-size", 32]
    launch(script, *flags)
    places = torch.cat(places)
    assert len(places) == 32 * 3 * 290
    assert places.mean().item() == pytest.approx(0.5, abs=5 * (1 / 12 / len(places)) ** 0.5)
    assert places.var().item() == pytest.approx(1 / 12, abs=5 * (1 / 180 / len(places)) ** 0.5)
    *seen, expected = map(sum, zip(*ends, strict=True))
    assert seen == pytest.approx([expected] * 2, abs=5 * expected**0.5) and expected > 300


def assert_the_host_waits_for_transfers(launch, monkeypatch, script, agent_class):
    """The host writes to no memory that a transfer may still read, and reads none that one may still write to.

    A stream without a GPU: it counts what it is given, and has certainly done what the host has waited for.
    """
    module, stream = importlib.import_module(script), SimpleNamespace(given=0, done=0, fetches=[])

    class Event:
        place = 0

        def record(self):
            self.place = stream.given

        def synchronize(self):
            stream.done = max(stream.done, self.place)
            while stream.fetches and stream.fetches[0][0] <= stream.done:
                _, outbox, values = stream.fetches.pop(0)
                outbox.copy_(values)

    class Ring(module.ReplayRing):
        sent_at = 0

        def add(self, *transition):
            super().add(*transition)
            assert self.sent_at <= stream.done, "staged rows were overwritten on their way"

        def send(self):
            stream.given += 1
            self.sent_at = stream.given
            super().send()

    class Agent(getattr(module, agent_class)):
        fetched_at = 0

        def __init__(self, *arguments):
            super().__init__(*arguments)
            outbox = self.host_outbox
            self.host_outbox = SimpleNamespace(copy_=lambda *tensor, **options: self.fetch(outbox, *tensor))

        def fetch(self, outbox, tensor):
            outbox.fill_(math.nan)
            stream.given += 1
            stream.fetches.append((stream.given, outbox, tensor.clone()))
            self.fetched_at = stream.given

        def act(self, observation, updates=()):
            assert self.fetched_at <= stream.done, "observations were overwritten on their way"
            begun.append(len(updates))
            action = super().act(observation, updates)
            assert self.fetched_at <= stream.done, "actions were read before they came"
            assert stream.done == stream.given - len(updates), "the host waited for updates"
            return action

        def learn(self, *due):
            stream.given += 1
            super().learn(*due)

    begun = []
    for name, fake in (("ReplayRing", Ring), (agent_class, Agent), ("mirrored", as_on_a_gpu)):
        monkeypatch.setattr(module, name, fake)
    monkeypatch.setattr(torch.cpu, "Event", Event)
    launch(script, "--num-envs", 2, "--total-timesteps", 300, "--learning-starts", 100, "--batch-size", 8)
    assert {0, 2} == set(begun) and stream.given > 200, "updates before and after the steps"


def assert_tf32_is_an_option(launch, monkeypatch, script):
    """Products in TF32 have to be asked for, which is refused without a GPU unless nobody checks."""
    monkeypatch.setattr(importlib.import_module(script), "check_args", lambda args: None)
    try:
        for flags, expected in ((["--tf32"], True), ([], False)):
            run = launch(script, "--total-timesteps", 20, "--learning-starts", 5, "--batch-size", 4, *flags)
            assert torch.backends.cuda.matmul.allow_tf32 is expected and run.config["tf32"] is expected
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False

"""Compiled and captured runs on a CUDA device; skipped where there is none."""

import functools
import importlib

import gymnasium as gym
import numpy as np
import pytest
import torch

import agents
from pools import Counting
from ppo_memory import linear_recurrence
from test_checkpoints import assert_equal, resume
from test_memory import LENGTHS, example
from test_ppo_memory import environments_of, make_agent, play, prepare

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

AGENTS = {
    "sac_continuous_action_torchcompile": "CompiledSACAgent",
    "td3_continuous_action_torchcompile": "CompiledTD3Agent",
    "dqn_torchcompile": "CompiledDQNAgent",
}
VARIANTS = {"eager": [], "compile": ["--compile"], "cudagraphs": ["--cudagraphs"]}
VARIANTS["compile+cudagraphs"] = ["--compile", "--cudagraphs"]
ON_POLICY = ["ppo_torchcompile", "ppo_continuous_action_torchcompile"]
MEMORY = ["dqn_memory_torchcompile"]
ATARI = "ppo_atari_envpool_torchcompile"
UPDATES = {
    "dqn_torchcompile": 20,
    "dqn_memory_torchcompile": 20,
    "ppo_torchcompile": 15 * 4 * 2,
    "ppo_continuous_action_torchcompile": 15 * 10 * 2,
}


def flags_of(script):
    sizes = ["--learning-starts", 100, "--buffer-size", 200, "--batch-size", 16]
    if script.removesuffix("_torchcompile") + "_torchcompile" in ON_POLICY:
        sizes = ["--num-steps", 10, "--num-minibatches", 2]
    if "memory" in script:
        sizes += ["--slice-length", 8, "--train-frequency", 10, "--target-network-frequency", 100]
    return ["--cuda", "--total-timesteps", 300, "--num-envs", 2, "--seed", 5, *sizes]


def in_one_process(*names):
    """Parameters of a fixture whose tests stay together when several processes divide them."""
    return [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names]


@pytest.fixture(scope="module", params=in_one_process(*AGENTS, *ON_POLICY, *MEMORY))
def runs(request, launch):
    """(script, its run in each variant)."""
    script = request.param
    return script, {name: launch(script, *flags_of(script), *flags) for name, flags in VARIANTS.items()}


def test_all_variants_run(runs):
    script, variants = runs
    for name, run in variants.items():
        assert run.summary["variant"] == name and run.summary["status"] == "finished"
        assert run.summary["updates"] == UPDATES.get(script, 200)
        assert run.summary["device"].startswith("cuda") and run.summary["device_name"] == torch.cuda.get_device_name()
        assert (run.summary["warmup_seconds"] > 0) is (name != "eager")
        assert run.folder.name.split("__")[2:-2] == [flag.strip("-") for flag in VARIANTS[name]]
        assert run.summary["peak_memory_bytes"] > 0


def test_eager_reference_runs(runs, launch):
    script = runs[0].removesuffix("_torchcompile")
    assert launch(script, *flags_of(script)).summary["device"].startswith("cuda")


def test_episodes_before_learning_are_the_same(runs):
    starts = 20 if runs[0] in ON_POLICY else 100
    early = [[line for line in run.episodes if line["global_step"] <= starts] for run in runs[1].values()]
    assert len(early[0]) > starts // 20 and all(episodes == early[0] for episodes in early)


def test_losses_agree(runs):
    """To 5 % (and 0.05) at step 200, after 10 to 200 updates: all draw the same numbers."""
    lines = {name: next(line for line in run.metrics if line["global_step"] >= 200) for name, run in runs[1].items()}
    losses = [key for key in lines["eager"] if key.endswith("loss")]
    assert losses
    for name, line in lines.items():
        for loss in losses:
            assert line[loss] == pytest.approx(lines["eager"][loss], rel=5e-2, abs=5e-2), (name, loss)


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_seed_same_episodes(runs, launch, variant):
    script, variants = runs
    assert launch(script, *flags_of(script), *VARIANTS[variant]).episodes == variants[variant].episodes


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("script", [script for script in AGENTS if not script.startswith("dqn")])
def test_updates_beside_the_environments_make_the_same_run(launch, monkeypatch, script, variant):
    module = importlib.import_module(script)
    agent_class = getattr(module, AGENTS[script])

    class Waiting(agent_class):
        must_wait = property(lambda self: True, lambda self, value: None)

    flags = ["--cuda", "--total-timesteps", 600, "--learning-starts", 100, "--buffer-size", 120, "--batch-size", 8]
    flags += VARIANTS[variant]
    first = launch(script, *flags)
    monkeypatch.setattr(module, AGENTS[script], Waiting)
    second = launch(script, *flags)
    assert first.episodes == second.episodes
    assert first.summary["updates"] == second.summary["updates"] == 500


@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled and captured"])
@pytest.mark.parametrize("script", AGENTS)
@torch.no_grad()
def test_replays_read_their_input_and_draw_fresh_numbers(script, compiled):
    """A captured step sees what has been put into its tensors since, and no two replays draw alike."""
    from tensordict.nn import CudaGraphModule

    module, device = importlib.import_module(script), torch.device("cuda")
    env = gym.make("ToyDiscrete-v0" if script.startswith("dqn") else "ToyContinuous-v0", disable_env_checker=True)
    args = module.Args(buffer_size=1000, batch_size=64)
    ring = module.ReplayRing(args, env, device)
    largest = torch.zeros((), device=device)

    def step():
        ring.pick(ring.draw())
        largest.copy_(ring.sample()["reward"].abs().max())

    options = {"fallback_random": True}
    write, step = (
        CudaGraphModule(torch.compile(f, fullgraph=True, options=options) if compiled else f, warmup=3)
        for f in (ring.write, step)
    )
    for f in (write, step):
        for _ in range(5):
            f()
    for n in range(900):  # with one environment, one row each
        before, after = (torch.full((4,), float(k)).numpy() for k in (n, n + 1))
        ring.add(before, after, env.action_space.sample(), float(n), n % 7 == 3, n % 50 == 4)
        ring.upload()
        write()
    assert ring.incoming.view(torch.int32)[-1, -1].item() == 900
    stored = ring.gather(torch.arange(900, device=device))
    assert stored["reward"].tolist() == stored["observation"][:, 0].tolist() == [float(n) for n in range(900)]
    next_numbers = [float(n if n % 7 == 3 else n + 1) for n in range(900)]  # of a terminal one is nothing kept
    assert stored["next_observation"][:, 0].tolist() == next_numbers
    assert stored["terminated"].tolist() == [float(n % 7 == 3) for n in range(900)]

    draws = []
    for _ in range(1000):
        step()
        draws.append(ring.drawn[0].clone())
        assert largest.item() == ring.drawn.max().item()
    draws = torch.stack(draws)
    assert len(draws.unique(dim=0)) == 1000
    numbers = draws.double()
    assert numbers.min() >= 0 and numbers.max() < 900
    assert numbers.mean().item() == pytest.approx(449.5, abs=6)  # 64,000 of them: five standard errors
    assert numbers.std().item() == pytest.approx(259.8, abs=6)


@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled and captured"])
@pytest.mark.parametrize("script", AGENTS)
def test_captured_updates_are_those_of_the_eager_version(script, compiled):
    """From the same transitions and the same random numbers."""
    from tensordict.nn import CudaGraphModule

    algorithm = script.split("_")[0]
    tests, kind = (
        importlib.import_module(f"test_{algorithm}"),
        {"sac": (True, True), "td3": (True,), "dqn": ()}[algorithm],
    )
    eager, agent, _ = tests.pair(device=torch.device("cuda"))
    before = {name: tensor.clone() for name, tensor in agent.state_dict().items()}
    if compiled:
        for name in ("learn",) if algorithm == "dqn" else ("update_critics", "update_actor"):
            setattr(agent, name, torch.compile(getattr(agent, name), fullgraph=True, options={"fallback_random": True}))
    with torch.no_grad():
        learn = CudaGraphModule(functools.partial(agent.learn, *kind), warmup=3)
        for _ in range(5):
            learn()
        agent.load_state_dict(before)
    for n in range(3):
        torch.manual_seed(n)
        with torch.no_grad():
            learn()
        torch.manual_seed(n)
        if algorithm == "dqn":
            eager.update(agent.buffer.gather(agent.buffer.drawn[0]))
        else:
            eager.learn(*kind)
    for ours, theirs in tests.NETWORKS.items():
        difference = (getattr(agent, ours) - agents.flat(getattr(eager, theirs))).abs()
        assert difference.max() < 1e-3 and (difference > 1e-5).float().mean() < 1e-2, ours
    for name, loss in agent.losses.items():
        assert loss.item() == pytest.approx(float(eager.losses[name]), rel=1e-2, abs=1e-4), name


@pytest.mark.parametrize("script", [*AGENTS, *ON_POLICY])
def test_a_captured_run_goes_on_with_what_was_loaded(launch, monkeypatch, script):
    """The graphs are captured after the checkpoint is loaded, and learn on from it."""
    replay = [] if script in ON_POLICY else ["--save-replay"]
    flags = [*flags_of(script), *replay, "--compile", "--cudagraphs"]
    run = launch(script, *flags, raises=SystemExit, stop_after=90)
    checkpoint = torch.load(run.folder / "checkpoint.pt", weights_only=True)["parts"]["agent"]
    module, seen = importlib.import_module(script), []
    warm_up = module.warm_up

    def noting(steps, agent, run):
        warm_up(steps, agent, run)
        seen.append({name: tensor.to("cpu", copy=True) for name, tensor in agent.state_dict().items()})

    monkeypatch.setattr(module, "warm_up", noting)
    resumed = resume(script, run.folder)
    assert_equal(seen[0], {name: tensor.cpu() for name, tensor in checkpoint.items()})
    now = resumed.run.parts["agent"].state_dict()
    assert any(not torch.equal(now[name].cpu(), tensor) for name, tensor in seen[0].items())
    assert all(tensor.isfinite().all() for tensor in now.values()) and resumed.run.updates > run.summary["updates"]


@pytest.mark.parametrize("script", [script for script in AGENTS if not script.startswith("dqn")])
def test_a_captured_run_in_tf32(launch, script):
    """It has to be asked for, and is seen in a product of matrices."""
    a, b = torch.randn(2, 256, 256, device="cuda")
    try:
        for flags, is_exact in ((["--tf32"], False), ([], True)):
            run = launch(script, *flags_of(script), "--compile", "--cudagraphs", *flags)
            assert run.summary["status"] == "finished" and run.summary["updates"] == 200
            assert ((a @ b - a.double() @ b.double()).abs().max() < 1e-3) == is_exact
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False  # for the tests that follow in this process


@pytest.mark.parametrize("script", ON_POLICY)
def test_target_kl_ends_the_epochs_of_a_captured_run(launch, script):
    run = launch(script, *flags_of(script), "--compile", "--cudagraphs", "--target-kl", 1e-12)
    assert 15 * 2 <= run.summary["updates"] < UPDATES[script] / 2  # an epoch a rollout, or a few where nothing moves


@pytest.mark.parametrize("script", [script for script in AGENTS if not script.startswith("dqn")])
@torch.no_grad()
def test_two_observations_give_two_actions_from_a_captured_policy(script):
    from tensordict.nn import CudaGraphModule

    module = importlib.import_module(script)
    env = gym.make("ToyContinuous-v0", disable_env_checker=True)
    args = module.Args(buffer_size=100, batch_size=8, cudagraphs=True)
    torch.manual_seed(0)
    device = torch.device("cuda")
    ring = module.ReplayRing(args, env, device)
    agent = getattr(module, AGENTS[script])(args, env, device, ring)
    agent.exchange = CudaGraphModule(agent.exchange, warmup=3)

    def mean_action(value):
        observation = np.full((1, 4), value, np.float32)
        actions = torch.cat([torch.as_tensor(agent.act(observation)) for _ in range(400)])
        assert len(actions.unique(dim=0)) > 300  # fresh noise, and `act` gives copies
        return actions.mean(0)

    mean_action(0.0)
    difference = mean_action(-10.0) - mean_action(10.0)
    assert difference.abs().max() > 0.2


@pytest.mark.parametrize("script", [script for script in AGENTS if not script.startswith("dqn")])
@torch.no_grad()
def test_the_host_waits_for_captured_actions_but_not_for_the_update_behind_them(script):
    from tensordict.nn import CudaGraphModule

    module, device = importlib.import_module(script), torch.device("cuda")
    env = gym.make("ToyContinuous-v0", disable_env_checker=True)
    args = module.Args(buffer_size=100, batch_size=8, cudagraphs=True)
    agent = getattr(module, AGENTS[script])(args, env, device, module.ReplayRing(args, env, device))
    choose = agent.choose
    agent.choose = lambda: (torch.cuda._sleep(2_000_000), choose())
    agent.learn = lambda *due: torch.cuda._sleep(40_000_000)  # at 2 GHz some 20 ms
    graph = CudaGraphModule(functools.partial(agent.exchange, True), warmup=3)
    agent.exchange = lambda *due: graph()
    for n in range(10):
        action = agent.act(np.full((1, 4), n, np.float32), [(True,)])
        assert n < 3 or not torch.cuda.current_stream().query(), "the update was waited for"
        torch.cuda.synchronize()
        assert np.array_equal(action[0], agent.outbox[:-1].cpu().numpy()), "an action of before"


@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled and captured"])
@pytest.mark.parametrize("script", ON_POLICY)
@torch.no_grad()
def test_replays_of_ppo_see_new_rollouts_minibatches_and_learning_rates(script, compiled):
    from tensordict.nn import CudaGraphModule

    module, device = importlib.import_module(script), torch.device("cuda")
    is_continuous = "continuous" in script
    env = gym.make("ToyContinuous-v0" if is_continuous else "ToyDiscrete-v0", disable_env_checker=True)
    args = module.Args(num_envs=2, num_steps=8, num_minibatches=2, update_epochs=3)
    make = module.CompiledContinuousPPOAgent if is_continuous else module.CompiledPPOAgent
    agent = make(args, env, device)
    prepare, update = (
        CudaGraphModule(torch.compile(f, fullgraph=True) if compiled else f, warmup=3)
        for f in (agent.prepare, agent.learn)
    )
    for f in (prepare, update):
        for _ in range(5):
            f()
    advantages = []
    for n in range(5):
        agent.rollout.arrays["reward"][:] = np.arange(16).reshape(8, 2) * n
        agent.rollout.upload()
        prepare()
        advantages.append(agent.batch["advantage"].clone())
        torch.cuda.synchronize()  # as acting does in main: only then may the host's arrays be written to
    assert len(torch.stack(advantages).unique(dim=0)) == 5

    agent.optimizer.lr.fill_(0)
    before = agent.network.clone()
    for rows in torch.randperm(16, device=device).chunk(2):
        agent.minibatch.copy_(rows)
        update()
        assert torch.equal(agent.network, before)
        _, logged = agent.ppo_loss(agent.network, {name: tensor[rows] for name, tensor in agent.batch.items()})
        for name, value in logged.items():
            torch.testing.assert_close(agent.losses[name], value, rtol=1e-3, atol=1e-5)
    agent.optimizer.lr.fill_(1e-3)
    update()
    assert (agent.network - before).abs().max() > 1e-4


# ---- Atari ----
@pytest.mark.parametrize("num_envs", [1, 4])
def test_atari_variants_play_the_same_games(launch, monkeypatch, num_envs):
    monkeypatch.setattr(importlib.import_module(ATARI), "make_pool", Counting)
    sizes = ["--num-steps", 10, "--num-minibatches", 2, "--num-envs", num_envs, "--seed", 5]
    runs = {}
    for name, flags in VARIANTS.items():
        for again in range(2):
            Counting.forget()
            run = launch(ATARI, "--cuda", "--total-timesteps", 200, *sizes, *flags, env_id="Scripted-v5")
            assert run.episodes == Counting.games and run.summary["updates"] >= 200 // (10 * num_envs) * 2 * 4
            assert run.summary["status"] == "finished" and run.summary["variant"] == name
            assert again == 0 or run.episodes == runs[name].episodes
            runs[name] = run
    early = [[line for line in run.episodes if line["global_step"] <= 9 * num_envs] for run in runs.values()]
    assert (early[0] or num_envs == 1) and all(each == early[0] for each in early)  # before the first update
    lines = {name: next(line for line in run.metrics if line["global_step"] >= 100) for name, run in runs.items()}
    for name, line in lines.items():
        for loss in ("policy_loss", "value_loss", "entropy"):
            assert line[loss] == pytest.approx(lines["eager"][loss], rel=5e-2, abs=5e-2), (name, loss)


def test_atari_eager_reference_runs(launch, monkeypatch):
    script = ATARI.removesuffix("_torchcompile")
    monkeypatch.setattr(importlib.import_module(script), "make_pool", Counting)
    sizes = ["--num-steps", 10, "--num-minibatches", 2, "--num-envs", 4, "--total-timesteps", 200]
    assert launch(script, "--cuda", *sizes, env_id="Scripted-v5").summary["device"].startswith("cuda")


@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled and captured"])
@torch.no_grad()
def test_captured_acting_in_atari_sees_each_group_and_enters_its_rows(compiled):
    from tensordict.nn import CudaGraphModule

    module, device = importlib.import_module(ATARI), torch.device("cuda")
    args = module.Args(num_envs=4, num_steps=8, num_minibatches=2)
    agent = module.CompiledAtariPPOAgent(args, 6, 2, device)
    agent.choose = torch.compile(agent.choose, fullgraph=True) if compiled else agent.choose
    agent.exchange = CudaGraphModule(agent.exchange, warmup=3)
    for _ in range(5):
        agent.exchange()
    images = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 84, 84), np.uint8)
    actions = np.stack(
        [np.concatenate([agent.act(t, slice(n, n + 2), images[t, n : n + 2]).copy() for n in (0, 2)]) for t in range(8)]
    )
    kept = agent.batch["observation"].unflatten(0, (8, 4))
    assert torch.equal(kept.cpu(), torch.as_tensor(images))
    assert np.array_equal(agent.batch["action"].view(8, 4).cpu().numpy(), actions)
    assert len(np.unique(actions)) > 2 and len(agent.batch["value"].unique()) == 32
    _, value = agent.policy_and_value(agent.network, torch.as_tensor(images, device=device).flatten(0, 1))
    torch.testing.assert_close(agent.batch["value"], value, rtol=1e-2, atol=1e-2)  # whatever the order of the sums


# ---- Memory ----
PPO_MEMORY = "ppo_memory_torchcompile"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("steps", [*LENGTHS, 4096])
def test_the_recurrence_is_that_of_the_cpu(steps, dtype):
    """Its states and its gradients; factors may be 0, and the same at all steps."""
    inputs = example(steps, dtype)
    tolerance = 1e-10 if dtype in (torch.float64, torch.complex128) else 1e-4
    for factors in (inputs[0], inputs[0][0]):
        results = []
        for device in ("cpu", "cuda"):
            leaves = [x.to(device, copy=True).requires_grad_() for x in (factors, *inputs[1:])]
            states = linear_recurrence(*leaves)
            gradients = torch.autograd.grad(states, leaves, inputs[1].flip(0).to(device))
            results.append([x.detach().cpu() for x in (states, *gradients)])
        for ours, theirs in zip(*results, strict=True):
            assert (ours - theirs).abs().max() <= tolerance * (1 + theirs.abs().max())


@pytest.fixture(scope="module", params=in_one_process("lru", "ffm", "s5", "gru", "lstm", "stack", "none"))
def memory_runs(request, launch):
    """(flags, the run in each variant) of a cell, on continuous actions with some and on discrete ones with others."""
    kind = "Discrete" if request.param in ("lru", "lstm") else "Continuous"
    flags = ["--cuda", "--total-timesteps", 300, "--num-envs", 4, "--num-steps", 10, "--num-minibatches", 2]
    flags += ["--seed", 5, "--cell", request.param]
    where = {"env_id": f"Counter{kind}-v0"}
    return (flags, where), {name: launch(PPO_MEMORY, *flags, *more, **where) for name, more in VARIANTS.items()}


def test_all_variants_run_with_a_memory(memory_runs, launch):
    (flags, where), variants = memory_runs
    early, lines = [], {}
    for name, run in variants.items():
        assert run.summary["variant"] == name and run.summary["status"] == "finished"
        assert run.summary["updates"] >= 300 // 40 * 4 * 2 and run.summary["device"].startswith("cuda")
        assert (run.summary["warmup_seconds"] > 0) is (name != "eager")
        early.append([line for line in run.episodes if line["global_step"] <= 28])  # a rollout is 40, of them resets
        lines[name] = next(line for line in run.metrics if line["global_step"] >= 200)
    assert len(early[0]) > 1 and all(episodes == early[0] for episodes in early)
    for name, line in lines.items():
        for loss in ("policy_loss", "value_loss", "entropy"):
            assert line[loss] == pytest.approx(lines["eager"][loss], rel=5e-2, abs=5e-2), (name, loss)
    assert launch("ppo_memory", *flags, **where).summary["device"].startswith("cuda")


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_seed_same_episodes_with_a_memory(memory_runs, launch, variant):
    (flags, where), variants = memory_runs
    assert launch(PPO_MEMORY, *flags, *VARIANTS[variant], **where).episodes == variants[variant].episodes


@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled and captured"])
@pytest.mark.parametrize("cell", ["lru", "mingru", "s5", "ffm", "gru", "lstm", "stack"])
@torch.no_grad()
def test_captured_updates_with_a_memory_are_those_without(cell, compiled):
    """On three rollouts whose episodes begin at unlike steps; captured once, before all of them."""
    from tensordict.nn import CudaGraphModule

    envs = environments_of("CounterContinuous-v0", 4)
    envs.begin(0)
    plain, captured = (make_agent(PPO_MEMORY, envs, torch.device("cuda"), cell=cell) for _ in range(2))
    for agent in (plain, captured):
        agent.optimizer.eps = 1e-5  # with 1e-8 rounding would be magnified
    steps = [captured.learn, captured.choose]  # what main compiles
    steps = [agents.compile_as_main_does(step, cpp_wrapper=False) if compiled else step for step in steps]
    steps = [CudaGraphModule(step, warmup=3) for step in (captured.prepare, *steps)]
    for step in steps:
        for _ in range(5):
            step()
    resets = []
    for _ in range(3):
        play(plain, envs)
        resets.append(plain.rollout.arrays["input"][..., -1].tobytes())
        captured.load_state_dict(plain.state_dict())
        for name, array in captured.rollout.arrays.items():
            array[:] = plain.rollout.arrays[name]
        for name in ("log_prob", "value"):
            captured.batch[name].copy_(plain.batch[name])
        captured.state.copy_(plain.state)
        captured.first_state.copy_(plain.first_state)
        prepare(plain, envs)
        prepare(captured, envs, steps[0])
        for name, tensor in captured.batch.items():
            torch.testing.assert_close(tensor, plain.batch[name], rtol=1e-3, atol=1e-4)
        for chosen in torch.randperm(plain.args.num_envs).chunk(plain.args.num_minibatches):
            captured.minibatch.copy_(chosen)
            plain.minibatch.copy_(chosen)
            plain.learn()
            steps[1]()
        difference = (captured.network - plain.network).abs()
        assert difference.max() < 2e-4 and (difference > 1e-5).float().mean() < 1e-2
        steps[2]()
        plain.choose()
        torch.testing.assert_close(captured.state, plain.state, rtol=1e-3, atol=1e-3)
    assert len(set(resets)) == 3


# ---- Actors ----
ACTORS = [("impala_ray", "Discrete"), ("appo_ray", "Discrete"), ("appo_ray", "Continuous")]


@pytest.mark.parametrize("script, kind", ACTORS)
def test_all_variants_run_with_an_actor(launch, script, kind):
    """The eager reference, too, and the losses agree: weights, statistics, learning rates reach captured graphs."""
    flags = ["--cuda", "--total-timesteps", 300, "--num-envs", 3, "--fragment-length", 8, "--seed", 5]
    flags += ["--num-minibatches", 2] if script == "appo_ray" else []
    runs = {"reference": launch(script, *flags, env_id=f"Counter{kind}-v0")}
    for name, more in VARIANTS.items():
        runs[name] = launch(f"{script}_torchcompile", *flags, *more, env_id=f"Counter{kind}-v0")
        assert runs[name].summary["variant"] == name and (runs[name].summary["warmup_seconds"] > 0) is (name != "eager")
    for run in runs.values():
        assert run.summary["status"] == "finished" and run.summary["device"].startswith("cuda")
        assert run.summary["updates"] >= 12 and run.summary["fragments_consumed"] == run.summary["fragments_delivered"]
        assert run.metrics[0].keys() >= {"policy_loss", "value_loss", "entropy", "lag_mean"}
        if script == "impala_ray":  # what the actor did is what the learner thinks that it did
            assert all(line["approx_kl"] < 1e-4 for line in run.metrics)
            for ours, theirs in zip(run.metrics, runs["reference"].metrics, strict=True):
                assert ours["value_loss"] == pytest.approx(theirs["value_loss"], rel=5e-2, abs=5e-2)


@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled and captured"])
@torch.no_grad()
def test_captured_updates_of_asynchronous_ppo_are_those_without(compiled):
    """Over three versions of the weights and of what is normalised by, with a learning rate that changes."""
    from tensordict.nn import CudaGraphModule

    from test_appo import Played

    plain, captured = (Played("appo_ray_torchcompile", "Continuous", device="cuda", prepare=False) for _ in range(2))
    prepare, update = (
        CudaGraphModule(torch.compile(step, fullgraph=True) if compiled else step, warmup=3)
        for step in (captured.agent.prepare, captured.agent.learn)
    )
    before = {name: tensor.clone() for name, tensor in captured.agent.state_dict().items()}
    for step in (prepare, update) * 4:
        step()
    captured.agent.load_state_dict(before)
    for version in range(3):
        for played, steps in ((plain, (plain.agent.prepare, plain.agent.learn)), (captured, (prepare, update))):
            played.fill(version)
            steps[0]()
            played.agent.minibatch.copy_(torch.arange(96))
            played.agent.optimizer.lr.fill_(1e-3 / (version + 1))
            for _ in range(3):
                steps[1]()
            played.agent.follow_observations()
        torch.testing.assert_close(captured.vector(), plain.vector(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled and captured"])
@pytest.mark.parametrize("script", ["impala_ray_torchcompile", "appo_ray_torchcompile"])
@torch.no_grad()
def test_captured_updates_on_images_are_those_without(script, compiled):
    """Of three fragments, whose stacks are made on the device."""
    from tensordict.nn import CudaGraphModule

    from test_appo import images_fragment

    module, is_ppo = importlib.import_module(script), script.startswith("appo")
    names = ("prepare", "learn") if is_ppo else ("update",)
    sizes = {"num_envs": 2, "fragment_length": 6, "batch_fragments": 1}
    args = module.Args(env_id="Pong-v5", **sizes | ({"num_minibatches": 1} if is_ppo else {}))

    def make_images_agent():
        torch.manual_seed(0)
        make = module.CompiledAPPOAgent if is_ppo else module.CompiledIMPALAAgent
        agent = make(args, (4, 84, 84), 3, torch.device("cuda"))
        if is_ppo:
            agent.minibatch.copy_(torch.arange(12))
        return agent

    plain, captured = make_images_agent(), make_images_agent()
    steps = [getattr(captured, name) for name in names]
    steps = [agents.compile_as_main_does(step, cpp_wrapper=False) if compiled else step for step in steps]
    steps = [CudaGraphModule(step, warmup=3) for step in steps]
    before = {name: tensor.clone() for name, tensor in captured.state_dict().items()}
    for step in 5 * steps:
        step()
    captured.load_state_dict(before)
    for seed in range(3):
        for agent in (plain, captured):
            (agent if is_ppo else agent.batch).fill(0, images_fragment(seed))
            agent.batch.upload()
        for name, step in zip(names, steps, strict=True):
            getattr(plain, name)()
            step()
        for name, loss in plain.losses.items():  # convolutions may be in TF32, and not the same ones
            assert captured.losses[name].item() == pytest.approx(loss.item(), rel=5e-2, abs=1e-2), (seed, name)
    assert not torch.equal(captured.network, before["network"])
    assert ((captured.network - plain.network).abs() > 1e-4).float().mean() < 0.1

"""Measures what a compiled policy gains in a rollout of PPO on Atari: emulation and acting, without learning.

    python benchmarks/compile_exploration.py                           1 to 32 games side by side
    python benchmarks/compile_exploration.py --num-envs 8 --mode max-autotune --env-id Pong-v5
    python benchmarks/compile_exploration.py --result RESULT.json --plot heat_map.png

After RLlib's second benchmark of torch.compile. The agent is that of leanrl/ppo_atari_envpool.py with its data path:
one group of games, on EnvPool's threads; its policy is as compile_inference.py compiles it. Each cell (backend, mode,
number of environments) is measured `--repeats` times, each time in a fresh process, in which rollouts with the eager
and with the compiled policy take turns on the same games; medians, intervals and n/a cells are as there. Steps are the
agent's, of four frames, those in which EnvPool only resets left out.
"""

import itertools
import multiprocessing
import signal
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import tyro

from compile_inference import CompileArgs, import_acting, in_turn, run
from speed import command_line, fail


@dataclass
class Args(CompileArgs):
    num_envs: tuple[int, ...] = (1, 8, 32)
    """games side by side"""
    env_id: str = "Breakout-v5"
    """EnvPool's id of the Atari game"""
    num_steps: int = 128
    """steps of each game in a rollout"""
    num_iters: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 10
    """timed rollouts of each arm in a process"""
    burn_in: int = 2
    """rollouts of each arm before those"""
    seconds: float = 3.0
    """seconds of rollouts of each arm after which its burn-in ends early, and its timed rollouts once there are 2"""


class StepCount:
    """Counts environment steps as a run of the script does."""

    global_step = 0

    def step(self, rewards: list, *_) -> None:
        self.global_step += len(rewards)


def measure(cell: Mapping[str, object]) -> dict:
    """Rollouts with the eager and the compiled policy in turns: steps/s, and what compiling cost."""
    import torch

    from acting import FIRST_CALLS, Explorer, atari, compilations, compiled, explore, now, take_turns

    torch.set_num_threads(cell["threads"])
    torch.manual_seed(cell["repeat"])
    device, count, rates = torch.device(cell["device"]), StepCount(), {}
    args = atari.Args(num_envs=cell["num_envs"], num_steps=cell["num_steps"], env_id=cell["env_id"])
    games = atari.Emulators(args.env_id, range(args.num_envs), first=0)
    agent = Explorer(args, int(games.pool.action_space.n), args.num_envs, device)
    arms = in_turn({"eager": explore, "compiled": compiled(cell["backend"], cell["mode"])}, cell["repeat"])
    rows = itertools.cycle(range(args.num_steps))

    def rollout(policy: Callable, steps: int = args.num_steps) -> float:
        agent.policy, before, started = policy, count.global_step, now(device.type)
        for t in itertools.islice(rows, steps):
            games.pool.send(agent.act(t, games.env_ids, games.observation))
            games.receive(agent.rollout.arrays, t, count)
        seconds = now(device.type) - started
        rates.setdefault(policy, []).append((count.global_step - before) / seconds)
        return seconds

    rollout(explore, steps=1)
    compile_seconds = rollout(arms["compiled"], steps=FIRST_CALLS[device.type])
    take_turns(rollout, arms, cell["burn_in"], cell["seconds"], least=1)
    rates.clear()
    seconds = take_turns(rollout, arms, cell["num_iters"], cell["seconds"], least=2)
    figures = {name: statistics.median(rates[policy]) for name, policy in arms.items()}
    figures["speedup"] = figures["compiled"] / figures["eager"] - 1
    return figures | {"compile_seconds": compile_seconds, **compilations(), "iterations": len(seconds["eager"])}


def check_game(env_id: str) -> None:
    """Ends the program if EnvPool has no such game, with the script's own words.

    In a process of its own, as EnvPool's threads would not live on in forked ones.
    """
    atari = import_acting().atari
    process = multiprocessing.get_context("fork").Process(target=atari.make_pool, args=(env_id, [0]))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(process.exitcode)


def main(args: Args) -> None:
    if args.num_steps < 1:
        fail(f"--num-steps {args.num_steps}: must be at least 1")
    if args.result is None:
        check_game(args.env_id)
    sizes = (8,) if args.quick and args.num_envs == Args.num_envs else args.num_envs
    common = {"env_id": args.env_id, "num_steps": args.num_steps, "num_iters": args.num_iters}
    run(args, "compile_exploration", sizes, measure, burn_in=args.burn_in, seconds=args.seconds, **common)


if __name__ == "__main__":
    try:
        main(command_line(Args, __doc__))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)

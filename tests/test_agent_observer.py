"""benchmarks/agent_observer.py: its figures, its arguments, and real worlds whose processes are killed."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.rpc as rpc
import tyro
from torch import nn

from conftest import check_shared_memory, shared_memory

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import agent_observer  # noqa: E402
import tables  # noqa: E402
from agent_observer import BATCH_SIZE, CPU, METRICS, TRANSPORTS, World  # noqa: E402

AGENT, OBSERVER = 0, 1  # as the first two processes of a world start
ENDLESS = ("--episodes", "100000")


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    assert agent_observer.why_not(request.param) is None
    return request.param


@pytest.fixture
def port():
    """A free one, and none that the system gives to whoever asks for any, as Ray in the tests beside these does."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 30_000)))
            return str(probe.getsockname()[1])


def made_world(transport: str, **changes) -> World:
    settings = {"observers": 2, "batch": True, "state_size": (2, 3), "nlayers": 1, "out_features": 4}
    settings |= {"batch_timeout": None, "episodes": 1, "episode_steps": 1, "compat": False, "master": ""}
    return World(transport=transport, **settings | changes)


# ---- Figures ----
BATCHES = [(0.1, 2), (0.2, 2), (0.3, 2), (0.4, 2), (0.5, 2)]
WAITS = [0.5, 0.0004996, 0.25, 0.125, 1.0]  # in no order
# Of five values in ascending order p75 is the fourth; p90, p95 and p99 are 0.6, 0.8 and 0.96 of the way to the last
PERCENTILES = {
    METRICS[0]: (0.3, 0.4, 0.46, 0.48, 0.496),
    METRICS[1]: (6.7, 10.0, 16.0, 18.0, 19.6),  # of 4, 5, 6.667, 10 and 20
    METRICS[2]: (0.25, 0.5, 0.8, 0.9, 0.98),
    METRICS[3]: (4.0, 8.0, 1204.2, 1602.9, 1921.9),  # of 1, 2, 4, 8 and 2001.6
}


def test_percentiles_and_throughputs():
    metrics = agent_observer.metrics_of(BATCHES, WAITS, {"agent": 0.02, "observer": 0.001})
    assert {name: tuple(metrics[name].values()) for name in METRICS} == PERCENTILES
    assert list(metrics[METRICS[0]]) == ["p50", "p75", "p90", "p95", "p99"]
    assert metrics[CPU] == {"agent": 0.004, "observer": 0.0002} and metrics[BATCH_SIZE] == 2.0


def test_compat_rounds_as_the_original():
    metrics = agent_observer.metrics_of([(0.0028, 3), (0.0024, 3)], [0.00349], {"agent": 1.0}, compat=True)
    keys = ("p50", "p75", "p90", "p95")
    assert metrics == {
        METRICS[0]: dict.fromkeys(keys, 0.003),  # 2.6, 2.7, 2.76 and 2.78 ms
        METRICS[1]: dict(zip(keys, (1160, 1205, 1232, 1241))),  # 1160.7, 1205.4, 1232.1 and 1241.1
        METRICS[2]: dict.fromkeys(keys, 0.003),
        METRICS[3]: dict.fromkeys(keys, 286),  # 286.53
    }
    assert all(isinstance(value, int) for value in metrics[METRICS[1]].values())


def made_run(transport: str, world_size: int, repeat: int, wait: float) -> dict:
    metrics = agent_observer.metrics_of([(wait / 2, 2)], [wait], {"agent": 1e-5, "observer": 2e-5})
    return {"transport": transport, "world_size": world_size, "repeat": repeat, "metrics": metrics}


def made_report(runs: list[dict]) -> dict:
    report = {"batch": True, "transport": "torch_rpc,shm", "repeats": 3, "episodes": 10, "episode_steps": 100}
    report |= {"compat": False, "x_axis_name": "world_size", "batch_timeout": None}
    report["benchmark_results"] = agent_observer.medians(runs, "world_size", compat=False)
    about = {"cpu": "A Processor", "cores": 2, "torch_threads": 1, "gpu": None}
    report |= {"kind": "agent_observer", "command": "python benchmarks/agent_observer.py", "started": "2026-01-02"}
    report |= {"ended": "2026-01-02", "device": "cpu", "hardware": about, "runs": runs}
    return report | {"versions": {"python": "3.12.1", "torch": "2.13.0"}}


RUNS = [
    made_run(transport, size, repeat, wait * size)
    for repeat, waits in enumerate(((0.1, 0.05), (0.4, 0.02), (0.2, 0.04)), 1)
    for size in (4, 10)
    for transport, wait in zip(("torch_rpc", "shm"), waits)
]


def test_medians_over_repeats():
    lines = agent_observer.medians(RUNS, "world_size", compat=False)
    assert [(line["transport"], line["world_size"], line[METRICS[2]]["p95"]) for line in lines] == [
        ("torch_rpc", 4, 0.8), ("shm", 4, 0.16), ("torch_rpc", 10, 2.0), ("shm", 10, 0.4)
    ]  # fmt: skip
    assert lines[1][CPU] == {"agent": 1e-5, "observer": 2e-5} and lines[1][BATCH_SIZE] == 2
    even = agent_observer.medians([made_run("shm", 4, 1, wait) for wait in (0.001, 0.0011)], "world_size", compat=True)
    assert even[0][METRICS[3]]["p50"] == 954  # of 909.1 and 1000


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    return folder


def save(folder: Path, name: str, report: dict) -> None:
    (folder / f"agent_observer_{name}.json").write_text(json.dumps(report))


def test_readme_table(results):
    assert "No results yet" in tables.agent_observer_table(results)
    save(results, "cpu", made_report(RUNS))
    text = tables.agent_observer_table(results)
    # Turn by turn 0.5, 0.05 and 0.2 of torch RPC's latency; 0.2 is their median, and also that of the medians
    assert "| 10 | True | `shm` | 200,000 | 10 | 400,000 | 400,000 | 2 | 2.0 | 30 | 0.20 |" in text
    assert "| 4 | True | `torch_rpc` | 400,000 | 5 | 800,000 | 800,000 | 1 | 2.0 | 30 | 1.00 |" in text
    assert "Medians of 3 runs of 10 episodes of 100 steps" in text


def made_report_at(run: dict, started: str, **settings) -> dict:
    """A report without an x axis."""
    report = made_report([]) | {"runs": [run], "repeats": 1, "started": started, "world_size": 10} | settings
    del report["x_axis_name"]
    return report | {"benchmark_results": agent_observer.medians([run], None, report["compat"])}


def test_readme_table_from_several_files(results):
    save(results, "worlds", made_report(RUNS))
    run = {"transport": "shm", "repeat": 1}
    run["metrics"] = agent_observer.metrics_of([(0.001, 1)], [0.002], {"agent": 1e-5, "observer": 2e-5})
    save(results, "b_batch", made_report_at(run, "2026-01-04", batch=False))
    save(results, "a_timeout", made_report_at(run, "2026-01-05", batch_timeout=500.0))
    save(results, "later", made_report_at(run, "2026-01-03"))  # instead of world size 10 of the first
    compat = {"transport": "shm", "repeat": 1}
    compat["metrics"] = agent_observer.metrics_of([(0.001, 1)], [0.002], {"agent": 1e-5}, compat=True)
    save(results, "compat", made_report_at(compat, "2026-01-06", compat=True))
    text = tables.agent_observer_table(results)
    rows = [line.split(" | ")[:5] for line in text.splitlines() if line.startswith("| ")]
    assert rows == [
        ["| world size", "batch", "transport", "agent latency p50, µs", "agent requests/s"],
        ["| ---", "---", "---", "--:", "--:"],
        ["| 4", "True", "`torch_rpc`", "400,000", "5"],
        ["| 4", "True", "`shm`", "80,000", "25"],
        ["| 10", "True", "`shm`", "1,000", "1,000"],
        ["| 10", "False", "`shm`", "1,000", "1,000"],
        ["| 10", "True, 500 µs", "`shm`", "1,000", "1,000"],
    ]
    assert "compat" not in text and text.count("One run of 10 episodes") == 3
    save(results, "layers", made_report_at(run, "2026-01-07", nlayers=7))
    assert "| 10 | True | 7 | `shm` |" in tables.agent_observer_table(results)


def test_compat_results_alone_make_no_table(results):
    run = {"transport": "shm", "repeat": 1}
    run["metrics"] = agent_observer.metrics_of([(0.001, 1)], [0.002], {"agent": 1e-5}, compat=True)
    save(results, "compat", made_report_at(run, "2026-01-06", compat=True))
    assert "No results yet" in tables.agent_observer_table(results)


def test_reference_table(results):
    assert tables.agent_observer_reference_table(results) == "No reference."
    text = tables.agent_observer_reference_table(tables.RESULTS)
    assert "| 10 | 2 | 4,432 | 2 | 407 |" in text and "| 20 | 4 | 4,244 | 5 | 191 |" in text
    assert "On other hardware than ours" in text and "/pytorch/blob/" in text


def test_screen_has_the_original_table(capsys):
    run = {"transport": "torch_rpc", "world_size": 10}
    run["metrics"] = agent_observer.metrics_of([(0.0024, 8)], [0.002], {"agent": 1.0}, compat=True)
    agent_observer.print_report(made_report([]) | {"transport": "torch_rpc", "compat": True} | {
        "benchmark_results": agent_observer.medians([run], "world_size", compat=True)
    })  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "PyTorch distributed rpc benchmark reinforcement learning suite" and "batch : True" in lines
    heading, keys, row = lines[-3:]
    assert heading.split("  ")[0] == "world_size | agent latency (seconds)"
    assert heading.rstrip().endswith("observer latency (seconds)  observer throughput")
    assert keys.split() == ["p50", "p75", "p90", "p95"] * 4
    assert row.split() == ["10", *["0.002"] * 4, *["3333"] * 4, *["0.002"] * 4, *["500"] * 4]
    assert keys.index("p50") == heading.index("agent") == row.index("0.002")


def test_small_numbers_are_written_out(capsys):
    agent_observer.print_report(made_report([made_run("shm", 4, 1, 4e-5)]))
    assert "0.00004 " in capsys.readouterr().out


def test_plot_is_legible_on_a_phone(tmp_path, monkeypatch):
    figure_module = pytest.importorskip("matplotlib.figure")
    text = pytest.importorskip("matplotlib.text")
    (tmp_path / "report.json").write_text(json.dumps(made_report(RUNS)))
    figures, save_figure = [], figure_module.Figure.savefig
    monkeypatch.setattr(
        figure_module.Figure, "savefig", lambda self, *a, **k: figures.append(self) or save_figure(self, *a, **k)
    )
    output = tmp_path / "latency.png"
    agent_observer.main(agent_observer.Args(from_file=tmp_path / "report.json", plot=output))
    assert output.read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    assert figure.get_figwidth() <= 5.6 and len(figure.axes) == 4
    assert len({axes.get_position().x0 for axes in figure.axes}) == 1  # one below the other
    assert all(each.get_fontsize() >= 12 for each in figure.findobj(text.Text) if each.get_text())


# ---- Arguments ----
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--world-size 4,10 --nlayers 1,2", "--world-size 4,10 and --nlayers 1,2: only one"),
        ("--world-size 2", "--world-size 2: must be a whole number from 3 to 34"),
        ("--world-size 4,35", "--world-size 4,35: must be"),
        ("--batch maybe", "--batch maybe: must be True or False"),
        ("--state-size 10-0", "--state-size 10-0: must be"),
        ("--nlayers 0", "--nlayers 0: must be"),
        ("--out-features 2.5", "--out-features 2.5: must be"),
        ("--transport udp", "--transport udp: must be torch_rpc, pipe, shm, ray"),
        ("--transport shm,tcp", "--transport tcp: must be"),
        ("--repeats 0", "--repeats 0: must be above 0"),
        ("--master-port http", "--master-port http: must be"),
        ("--batch-timeout -1", "--batch-timeout -1.0: must be at least 0"),
        ("--batch-timeout 5 --batch True,False", "--batch-timeout 5.0: needs --batch True"),
        ("--output-file-path no/such/folder.json", "--output-file-path no/such/folder.json: must be"),
        ("--output-file-path /proc/report.json", "--output-file-path /proc/report.json: must be"),
        (f"--output-file-path {'x' * 255}", f"--output-file-path {'x' * 255}: must be"),
        ("--output-file-path .", "--output-file-path .: must be"),
        ("--plot no/such/folder.png", "--plot no/such/folder.png: must be"),
        ("--plot picture.svg", "--plot picture.svg: must be a PNG file"),
        ("--from-file no_such_file", "--from-file no_such_file: must be"),
    ],
)
def test_bad_input(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        agent_observer.main(tyro.cli(agent_observer.Args, args=flags.split()))
    lines = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and len(lines) == 1 and lines[0].startswith(f"error: {message}")
    assert not list(tmp_path.iterdir())


def test_states_that_are_too_large_for_shared_memory():
    world = agent_observer.World("shm", 1, True, (10**8, 10**8), 1, 2, None, 1, 1, False, "")
    with pytest.raises(agent_observer.RunFailed, match="--transport shm can't be set up"):
        agent_observer.run_world(world, 10)


def fails(capsys, function, *arguments) -> str:
    """The one line of an end with exit status 2."""
    with pytest.raises(SystemExit) as error:
        function(*arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert error.value.code == 2
    return line


@pytest.mark.parametrize("content", ["[1, 2]", '"agent_observer"', '{"kind": "speed"}', "{", b"\xff"])
def test_a_file_that_is_no_result(content, tmp_path, capsys):
    path = tmp_path / "some.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert str(path) in fails(capsys, agent_observer.main, agent_observer.Args(from_file=path))


def test_files_that_cannot_be_read_or_written(tmp_path, capsys):
    line = fails(capsys, agent_observer.main, agent_observer.Args(from_file=tmp_path))
    assert line.startswith(f"error: --from-file {tmp_path}: must be")
    gone = tmp_path / "gone" / "report.json"  # as of a folder that is removed during the measurement
    line = fails(capsys, agent_observer.write, made_report(RUNS), gone)
    assert line == f"error: --output-file-path {gone}: No such file or directory"


def test_the_list_becomes_the_x_axis():
    read = lambda **settings: agent_observer.read_arguments(agent_observer.Args(**settings))  # noqa: E731
    arguments, x_axis = read(batch="yes,False", world_size="5")
    assert x_axis == "batch" and arguments["batch"] == [True, False] and arguments["world_size"] == 5
    assert list(arguments) == ["world_size", "master_addr", "master_port", "batch", "state_size", "nlayers",
                               "out_features", "output_file_path"]  # fmt: skip
    assert read()[1] is None and read()[0]["batch"] is True


# ---- Agents ----
def connect(transport: str, world: World, monkeypatch):
    """An agent and a function that asks it as an observer, all in this process."""
    monkeypatch.setattr(agent_observer, "join_rpc", lambda *_: None)
    share, agent, observer = TRANSPORTS[transport]
    shared = share(world)
    agent = agent(world, shared)
    if transport == "torch_rpc":
        return agent, lambda row, state: agent.request_batch(row, state).wait()
    observers = [observer(world, row, shared) for row in range(world.observers)]
    return agent, lambda row, state: observers[row].ask(state)


def in_background(function, *arguments) -> list:
    """Starts `function` in a thread; its result appears in the list that is returned."""
    results = []
    threading.Thread(target=lambda: results.append(function(*arguments)), daemon=True).start()
    return results


def wait_until(condition, seconds: float = 20.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
    return found


def test_a_batch_is_answered_before_all_have_asked(transport, monkeypatch):
    agent, ask = connect(transport, made_world(transport, batch_timeout=0.001), monkeypatch)
    served = in_background(agent.serve, 1)
    action = in_background(ask, 0, torch.ones(2, 3))
    (action,) = wait_until(lambda: action)
    assert 0 <= action < 4 and [size for _, size in agent.latencies] == [1]
    if transport != "torch_rpc":  # where the end of an episode counts, whose other observer has not asked
        wait_until(lambda: served)


def test_a_batch_waits_for_all_and_each_gets_its_own_action(transport, monkeypatch):
    agent, ask = connect(transport, made_world(transport), monkeypatch)
    # Only the action that equals the state has a probability
    agent.policy = lambda states: 1e4 * nn.functional.one_hot(states[:, 0, 0].long(), 4)
    states = {row: torch.full((2, 3), row + 1.0) for row in (0, 1)}
    served = in_background(agent.serve, 2)
    answers = [in_background(ask, 1, states[1])]
    time.sleep(0.05)  # a batch that does not wait would be answered by now
    assert agent.latencies == [] and answers == [[]]
    answers.append(in_background(ask, 0, states[0]))
    wait_until(lambda: all(answers) and served)
    assert answers == [[2], [1]] and [size for _, size in agent.latencies] == [2]


def test_one_by_one_without_batch(transport, monkeypatch):
    agent, ask = connect(transport, made_world(transport, batch=False), monkeypatch)
    ask = agent.request if transport == "torch_rpc" else ask
    served = in_background(agent.serve, 2)
    answers = [in_background(ask, row, torch.ones(2, 3)) for row in (1, 0)]
    wait_until(lambda: all(answers) and served)
    assert [size for _, size in agent.latencies] == [1, 1]


def test_without_batch_latency_counts_from_when_the_agent_has_seen_the_request(monkeypatch):
    agent, _ = connect("shm", made_world("shm", batch=False), monkeypatch)
    agent.receive, agent.reply = lambda: [0, 1], lambda rows, actions: None
    agent.clock = iter((10.0, 11.0, 12.0)).__next__  # both seen, an action for each of them selected
    agent.serve(2)
    assert agent.latencies == [(1.0, 1), (2.0, 1)]


def test_no_graph_is_kept_but_in_compat(monkeypatch):
    for compat in (False, True):
        agent, ask = connect("shm", made_world("shm", observers=1, compat=compat), monkeypatch)
        agent.act([0], 0.0)
        assert agent.log_probs[0].requires_grad == compat
        answer = in_background(ask, 0, torch.ones(2, 3))
        agent.episode(1)
        assert wait_until(lambda answer=answer: answer) and len(agent.log_probs) == (2 if compat else 0)
    torch.autograd.set_detect_anomaly(False)


def test_a_name_server_cannot_hold_up_torch_rpc_for_long(monkeypatch):
    monkeypatch.setenv("RES_OPTIONS", "")  # so that it is restored
    monkeypatch.delenv("RES_OPTIONS")
    options = []
    monkeypatch.setattr(rpc, "init_rpc", lambda *_, **__: options.append(os.environ["RES_OPTIONS"]))
    monkeypatch.setattr(rpc, "TensorPipeRpcBackendOptions", lambda **_: None)
    agent_observer.join_rpc(made_world("torch_rpc"), 0, "agent")
    assert options == ["timeout:1"]


# ---- Worlds ----
def make_tcp_options() -> type:
    """Options of RPC by TCP: threads that poll shared memory yield without end, which starves other tests."""

    class TCPOptions(rpc.TensorPipeRpcBackendOptions):
        def __init__(self, **options):
            super().__init__(**options | {"_transports": ["uv"]})

    return TCPOptions


class Program:
    """The program in a process forked from this one, which has PyTorch already; Ctrl-C goes to its group."""

    def __init__(self, folder: Path, *flags: str):
        self.folder, self.report = folder, folder / "report.json"
        argv = [*flags, "--output-file-path", str(self.report)]
        self.process = agent_observer.CONTEXT.Process(target=self.run, args=(argv,))
        self.shared_memory = shared_memory()
        self.process.start()
        self.pid = self.process.pid

    def run(self, argv: list[str]) -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background ignores it
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(self.folder / name, os.O_CREAT | os.O_WRONLY), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        if {*ENDLESS} <= {*argv} and rpc.is_available():
            rpc.TensorPipeRpcBackendOptions = make_tcp_options()
        agent_observer.main(tyro.cli(agent_observer.Args, args=argv))

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def children(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def wait_for_episodes(self, processes: int) -> list[int]:
        """The agent and the observers, once the agent has worked for a while."""
        # Torch RPC waits for a second or two where a name server does not answer
        pids = wait_until(lambda: self.children() if len(self.children()) == processes else None, seconds=180)
        # The 14th field, user time, in ticks of 10 ms
        wait_until(lambda: int(Path(f"/proc/{pids[AGENT]}/stat").read_text().rsplit(")", 1)[1].split()[11]) > 15, 180)
        return pids

    def is_gone(self, pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    def left(self) -> list[int]:
        """The processes of its session, itself and what it has started, that run."""
        pids = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                state, _, _, session = path.read_text().rsplit(")", 1)[1].split()[:4]
                pids += [int(path.parent.name)] if int(session) == self.pid and state != "Z" else []
        return pids

    def check_end(self, pids: list[int], status: int, message: str) -> None:
        """It ends within 10 s with one line, of which `message` is a regular expression, and nothing of it is left."""
        self.process.join(10)
        assert self.process.exitcode == status
        (line,) = self.read("err").splitlines()
        assert re.fullmatch(f"error: {message}", line), line
        assert all(self.is_gone(pid) for pid in pids)
        check_shared_memory(self.shared_memory)


@pytest.fixture
def program(tmp_path, port):
    programs = []

    def program(*flags: str) -> Program:
        programs.append(Program(tmp_path, "--master-port", port, *flags))
        return programs[-1]

    yield program
    for each in programs:
        each.process.kill()  # whose children then end themselves
        each.process.join()


def test_end_to_end(transport, program):
    flags = ("--world-size", "4", "--batch", "True,False", "--episodes", "2", "--episode-steps", "10")
    run = program("--transport", transport, *flags)
    run.process.join(60)
    assert (run.process.exitcode, run.read("err")) == (0, "")
    report = json.loads(run.read("report.json"))
    assert report["x_axis_name"] == "batch" and "batch" not in report
    assert (report["world_size"], report["master_addr"], report["state_size"]) == (4, "127.0.0.1", "10-20-10")
    assert report["command"].startswith("python benchmarks/") and report["ended"] and "torch" in report["versions"]
    assert [line["batch"] for line in report["benchmark_results"]] == [True, False]
    for line, size in zip(report["benchmark_results"], (2, 1)):
        for name in METRICS:
            values = list(line[name].values())
            assert values == sorted(values) and values[0] > 0
        assert line[METRICS[0]]["p50"] < line[METRICS[2]]["p99"] and line[BATCH_SIZE] == size
        assert all(0 < seconds < 1 for seconds in line[CPU].values())
    assert f"{transport}, batch True, run 1: observer p50" in run.read("out")
    assert run.read("out").splitlines()[-1].startswith("False ")


def test_compat_end_to_end(program):
    run = program("--transport", "shm", "--world-size", "3", "--compat", "--episodes", "1", "--episode-steps", "3")
    run.process.join(60)
    (line,) = json.loads(run.read("report.json"))["benchmark_results"]
    assert list(line[METRICS[0]]) == ["p50", "p75", "p90", "p95"] and isinstance(line[METRICS[1]]["p50"], int)
    assert set(line) == {*METRICS, "transport"}


@pytest.mark.parametrize("who", [AGENT, OBSERVER], ids=["agent", "observer"])
def test_a_killed_process_ends_the_run(who, transport, program):
    run = program("--transport", transport, "--world-size", "4", *ENDLESS)
    pids = run.wait_for_episodes(3)
    os.kill(pids[who], signal.SIGKILL)
    run.check_end(pids, 1, rf"{transport}, run 1: {('agent', 'observer 1')[who]} was killed \(SIGKILL\)")


def test_interrupt_ends_the_run(transport, program):
    run = program("--transport", transport, "--world-size", "4", *ENDLESS)
    pids = run.wait_for_episodes(3)
    os.killpg(run.pid, signal.SIGINT)
    run.check_end(pids, 128 + signal.SIGINT, f"{transport}, run 1: stopped by Ctrl-C")


@pytest.mark.parametrize("is_at_work", [True, False], ids=["at work", "starting"])
def test_nothing_outlives_a_killed_coordinator(is_at_work, transport, program):
    run = program("--transport", transport, "--world-size", "4", *ENDLESS)
    assert run.wait_for_episodes(3) if is_at_work else wait_until(run.children)
    os.kill(run.pid, signal.SIGKILL)
    wait_until(lambda: not run.left(), seconds=10)
    check_shared_memory(run.shared_memory)


def test_what_was_measured_before_a_kill_is_kept(program):
    run = program("--transport", "shm", "--world-size", "4", "--episode-steps", "1", "--repeats", "10000")
    wait_until(lambda: run.report.exists() and run.children())
    while run.process.is_alive():  # a world that is just ending can leave nobody to kill
        with contextlib.suppress(ProcessLookupError):  # nor need the one that was found still be there
            for pid in run.children()[:1]:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    assert run.process.exitcode == 1 and "agent was killed" in run.read("err")
    report = json.loads(run.read("report.json"))
    assert report["ended"] is None and len(report["runs"]) >= 1 and report["benchmark_results"]


def test_a_process_that_hangs(program):
    run = program("--transport", "pipe", "--world-size", "4", *ENDLESS, "--timeout", "2")
    pids = run.wait_for_episodes(3)
    os.kill(pids[OBSERVER], signal.SIGSTOP)
    # The others may just have ended their episode
    names = "(agent, )?observer 1(, observer 2)?"
    run.check_end(pids, 1, rf"pipe, run 1: no answer from {names} in time \(--timeout\)")


@pytest.mark.skipif(not rpc.is_available(), reason="this build of PyTorch has no torch.distributed.rpc")
def test_an_address_in_use(program, port):
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(port)))
        other.listen()
        run = program("--transport", "torch_rpc", "--world-size", "3", "--timeout", "20")
        run.process.join(30)
    (line,) = run.read("err").splitlines()
    assert run.process.exitcode == 1 and line.startswith("error: torch_rpc, run 1: agent: ")
    assert "address already in use" in line.lower()


def test_a_transport_that_is_not_there(program, monkeypatch, capsys):
    monkeypatch.setattr(rpc, "is_available", lambda: False)
    with pytest.raises(SystemExit) as error:
        agent_observer.main(agent_observer.Args())
    assert error.value.code == 2 and "n/a, this build of PyTorch has no" in capsys.readouterr().err
    run = program("--transport", "torch_rpc,shm", "--world-size", "3", "--episodes", "1", "--episode-steps", "2")
    run.process.join(60)
    assert run.process.exitcode == 0 and "torch_rpc, run 1: n/a, this build" in run.read("out")
    assert "torch_rpc: n/a" in run.read("out").splitlines()
    assert [line["transport"] for line in json.loads(run.read("report.json"))["benchmark_results"]] == ["shm"]

"""The rule "same name, same text" holds in leanrl/, and its checker sees what it should."""

import textwrap

import pytest

import identity

ONE = '''\
"""One script."""

import math

LOW, HIGH = -5.0, 2.0  # bounds of log std
UNITS = {"fps": "steps/s"}


@dataclass
class Args:
    gamma: float = 0.99
    """discount factor"""
    env_id: str = "HalfCheetah-v4"
    """environment"""
    seed: int = 1  # a comment that stays
    """seed of
    everything"""


# Generalised advantage estimation,
# eq. 11 of the paper.
@torch.no_grad()
def gae(rewards):
    # backwards through time
    total = sum(rewards)
    return total
    # nothing is left


class Net:
    size = 64


def only_here():
    pass


def main(args):
    print(1)
'''
# What another script may have different: its own names, `main`, the order of things, defaults.
TWO = '''\
"""Another script."""

HIDDEN = 256
UNITS = {"fps": "steps/s"}
LOW, HIGH = -5.0, 2.0  # bounds of log std


@dataclass(frozen=True)
class Args:
    seed: int = 2  # another comment
    """seed of
    everything"""
    gamma: float = field(
        default=0.9,
    )
    """discount factor"""
    tau: float = 0.1
    """only here"""


class Net:
    size = 64

# Generalised advantage estimation,
# eq. 11 of the paper.
@torch.no_grad()
def gae(rewards):
    # backwards through time
    total = sum(rewards)
    return total
    # nothing is left

# about main only
def main(args):
    print(2)\
'''
EDITS = {
    "comment inside": ("gae", "# backwards through time", "# backwards"),
    "comment above": ("gae", "# eq. 11 of the paper.", "# equation 11 of the paper."),
    "comment below, still inside": ("gae", "    # nothing is left\n", ""),
    "decorator": ("gae", "@torch.no_grad()", "@torch.inference_mode()"),
    "code": ("gae", "return total", "return total + 1"),
    "class": ("Net", "size = 64", "size = 65"),
    "constant": ("UNITS", "steps/s", "1/s"),
    "constants set together": ("HIGH", "-5.0, 2.0", "-5.0, 3.0"),
    "docstring of a field": ("Args.gamma", "discount factor", "the discount"),
    "docstring over several lines": ("Args.seed", "everything", "it all"),
    "no docstring": ("Args.seed", '    """seed of\n    everything"""\n', ""),
    "type of a field": ("Args.gamma", "gamma: float", "gamma: float | None"),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "one.py").write_text(ONE)
    (tmp_path / "two.py").write_text(TWO)
    return tmp_path


def test_leanrl_keeps_the_rule():
    reports = identity.differences(identity.SCRIPTS)
    if reports:
        pytest.fail("\n\n".join(reports), pytrace=False)


def test_free_parts_may_differ(folder):
    assert identity.differences(folder) == []


@pytest.mark.parametrize("case", EDITS)
def test_a_difference_is_reported_and_repaired(folder, case):
    name, old, new = EDITS[case]
    two = folder / "two.py"
    assert old in TWO
    two.write_text(TWO.replace(old, new))

    reports = identity.differences(folder)
    if case == "constants set together":
        assert [report.split()[0] for report in reports] == ["LOW", "HIGH"]
    else:
        (report,) = reports
        assert report.startswith(f"{name} is not the same text in one.py and in two.py:")
        assert "--- one.py" in report and "+++ two.py" in report

    assert identity.fix(folder, name, "one") == ["two.py"]
    assert identity.differences(folder) == []
    assert two.read_text() == TWO  # all other text is as it was, and the repaired text is where it was
    assert (folder / "one.py").read_text() == ONE
    assert identity.fix(folder, name, "one") == []


def test_a_docstring_that_the_origin_lacks_is_taken_away(folder):
    one = folder / "one.py"
    one.write_text(ONE.replace('    """discount factor"""\n', ""))
    assert identity.fix(folder, "Args.gamma", "one.py") == ["two.py"]
    assert (folder / "two.py").read_text() == TWO.replace('    """discount factor"""\n', "")


def test_the_origin_may_be_any_of_them_and_the_majority_is_shown_first(folder):
    (folder / "three.py").write_text("def gae():\n    return 3")
    (report,) = identity.differences(folder)
    assert report.startswith("gae is not the same text in one.py, two.py and in three.py:")
    assert identity.fix(folder, "gae", "leanrl/three.py") == ["one.py", "two.py"]
    assert identity.differences(folder) == []
    assert "# Generalised" not in (folder / "one.py").read_text()


def test_line_endings_are_neither_a_difference_nor_changed(folder):
    two = folder / "two.py"
    two.write_bytes(TWO.replace("\n", "\r\n").encode())
    assert identity.differences(folder) == []
    two.write_bytes(TWO.replace("discount factor", "δ").replace("backwards", "vorwärts").replace("\n", "\r\n").encode())
    assert len(identity.differences(folder)) == 2
    identity.fix(folder, "gae", "one")
    identity.fix(folder, "Args.gamma", "one")
    assert two.read_bytes() == TWO.replace("\n", "\r\n").encode()


def test_a_long_difference_is_cut_short(folder):
    (folder / "one.py").write_text("def f():\n" + "    a = 1\n" * 100)
    (folder / "two.py").write_text("def f():\n" + "    b = 1\n" * 100)
    (report,) = identity.differences(folder)
    assert len(report.splitlines()) < identity.DIFF_LINES + 5
    assert "more lines" in report


def test_command_line(folder, capsys):
    assert identity.run(["--folder", str(folder)]) == 0
    (folder / "two.py").write_text(TWO.replace("return total", "return 0"))
    assert identity.run(["--folder", str(folder)]) == 1
    assert "gae" in capsys.readouterr().out
    assert identity.run(["--folder", str(folder), "--fix", "gae", "--from", "one"]) == 0
    assert capsys.readouterr().out == "gae: changed two.py\n"
    assert identity.run(["--folder", str(folder), "--fix", "gae", "--from", "one"]) == 0
    assert "already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--fix", "nothing", "--from", "one"], "'nothing'"),
        (["--fix", "Args.nothing", "--from", "one"], "'Args.nothing'"),
        (["--fix", "gae", "--from", "four"], "'four'"),
        (["--fix", "main", "--from", "one"], "'main'"),
        (["--fix", "Args", "--from", "one"], "Args.seed"),
        (["--fix", "gae"], "--from FILE"),
        (["--from", "one"], "--fix NAME"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_bad_requests_end_with_one_line_and_touch_nothing(folder, capsys, arguments, word):
    assert identity.run(["--folder", str(folder), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and word in captured.err
    assert (folder / "one.py").read_text() == ONE and (folder / "two.py").read_text() == TWO


def test_what_cannot_be_copied_is_said(folder, capsys):
    (folder / "two.py").write_text(
        textwrap.dedent("""\
        def gae():
            pass


        def gae():
            pass
    """)
    )
    assert len(identity.differences(folder)) == 1
    assert identity.run(["--folder", str(folder), "--fix", "gae", "--from", "one"]) == 2
    assert "two.py defines 'gae' more than once" in capsys.readouterr().err
    (folder / "two.py").write_text("def broken(:\n")
    assert identity.run(["--folder", str(folder)]) == 2
    assert "two.py, line 1" in capsys.readouterr().err

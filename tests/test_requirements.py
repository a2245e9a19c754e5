"""The scripts' PEP 723 blocks, the requirement files and the constraints say the same, and each script runs alone."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "leanrl").glob("*.py"))
REQUIREMENT_FILES = sorted((ROOT / "requirements").glob("requirements*.txt"))
# As PEP 723 has it.
BLOCK = re.compile(r"^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$", re.MULTILINE)
# Where a package is not imported under its own name.
IMPORT_NAMES = {"pyyaml": "yaml", "pillow": "PIL", "opencv-python-headless": "cv2"}

each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


def requirement_lines(path: Path) -> list[str]:
    """The requirements in a file, without comments and options."""
    lines = [line.partition(" #")[0].strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "-"))]


def block(script: Path) -> dict:
    match = BLOCK.match(script.read_text())
    assert match, f"{script.name} does not open with a PEP 723 block"
    return tomllib.loads("\n".join(line[1:].removeprefix(" ") for line in match["content"].splitlines()))


def import_names(requirement: str) -> set[str]:
    """What a requirement lets a script import: the package and its extras (mujoco in gymnasium[mujoco])."""
    parsed = Requirement(requirement)
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in {parsed.name, *parsed.extras}}


def imports(node: ast.AST, at_once: bool) -> set[str]:
    """Top-level names of the modules imported in `node`; with `at_once`, only those that merely loading it imports."""
    names = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in child.names}
        elif isinstance(child, ast.ImportFrom):
            names.add("." * child.level + (child.module or "").partition(".")[0])
        elif not (at_once and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            names |= imports(child, at_once)
    return names


def pins() -> dict[str, str]:
    found = {}
    for line in requirement_lines(ROOT / "requirements" / "constraints.txt"):
        name, equals, version = line.partition("==")
        assert equals and version, f"constraints.txt pins no exact version in the line '{line}'"
        assert canonicalize_name(name) not in found, f"constraints.txt names {name} twice"
        found[canonicalize_name(name)] = version
    return found


@each_script
def test_block_repeats_lines_of_the_requirement_files(script):
    known = {line for path in REQUIREMENT_FILES for line in requirement_lines(path)}
    head = block(script)
    assert head["requires-python"] == ">=3.11"
    unknown = [line for line in head["dependencies"] if line not in known]
    assert not unknown, f"{script.name} depends on {unknown}; the lines of requirements/*.txt are {sorted(known)}"


@pytest.mark.parametrize(
    "script", [path for path in SCRIPTS if path.stem.endswith("_torchcompile")], ids=lambda p: p.stem
)
def test_a_pair_opens_alike(script):
    """Block and docstring; the compiled script may alone need tensordict."""
    eager = script.with_stem(script.stem.removesuffix("_torchcompile"))
    heads = [path.read_text().partition("\nimport ")[0].splitlines() for path in (eager, script)]
    theirs, ours = ([line for line in head if "tensordict" not in line] for head in heads)
    assert ours == theirs
    for path in (eager, script):
        assert f"\n    python leanrl/{path.name} --env-id " in "\n".join(heads[0]), "how to run it"


@each_script
def test_block_names_what_the_script_imports_and_no_more(script):
    tree = ast.parse(script.read_text())
    dependencies = block(script)["dependencies"]
    provided = set().union(*map(import_names, dependencies))
    provided.add("triton")  # with PyTorch for CUDA; the scripts do without
    missing = imports(tree, at_once=True) - provided - sys.stdlib_module_names
    assert not missing, f"{script.name} imports {sorted(missing)}, which its PEP 723 block does not name"
    used = imports(tree, at_once=False)
    idle = [line for line in dependencies if not import_names(line) & used]
    assert not idle, f"the PEP 723 block of {script.name} names {idle}, which it never imports"


@each_script
def test_script_imports_no_other_script(script):
    others = {"leanrl", *(path.stem for path in SCRIPTS)}
    for name in imports(ast.parse(script.read_text()), at_once=False):
        assert name not in others and not name.startswith("."), f"{script.name} imports {name}: it must run alone"


@pytest.mark.parametrize("path", REQUIREMENT_FILES, ids=lambda path: path.stem)
def test_constraints_satisfy_the_ranges(path):
    pinned = pins()
    lines = requirement_lines(path)
    assert lines
    for line in lines:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"constraints.txt lacks {name}, which {path.name} asks for"
        assert requirement.specifier.contains(pinned[name]), f"constraints.txt pins {name}=={pinned[name]}, not {line}"


def test_constraints_hold_what_the_requirements_need():
    """Follows the installed packages' own requirements as far as they are the tested versions."""
    pinned = pins()
    todo = [
        Requirement(line)
        for name in ("", "-envpool", "-ray", "-bench", "-memory", "-dev")
        for line in requirement_lines(ROOT / "requirements" / f"requirements{name}.txt")
    ]
    seen = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if (name, *sorted(requirement.extras)) in seen:
            continue
        seen.add((name, *sorted(requirement.extras)))
        # torch itself says which versions its CUDA packages have.
        if name.startswith(("nvidia-", "cuda-")) or name == "triton":
            continue
        assert name in pinned, f"constraints.txt lacks {name}, needed by what is installed here"
        try:
            installed = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if installed.version.partition("+")[0] == pinned[name]:
            for line in installed.requires or []:
                child = Requirement(line)
                extras = requirement.extras or {""}
                if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in extras):
                    todo.append(child)

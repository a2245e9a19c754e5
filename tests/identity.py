"""Same name, same text: what several scripts define under one name, they define with the same text.

The scripts import nothing from each other, so a helper that several of them use is copied. This program keeps the
copies equal, comments and decorators included:

    python tests/identity.py                                  reports every difference (exit status 1 if there is one)
    python tests/identity.py --fix compute_gae --from ppo     copies the text of a function, class or constant
    python tests/identity.py --fix Args.gamma --from ppo      copies the type and docstring of an `Args` field

`main` is free to differ. So is `Args` as a whole, but its fields of one name have one type and one docstring; their
defaults may vary.
"""

import argparse
import ast
import difflib
import io
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "leanrl"
FREE = {"Args", "main"}
DIFF_LINES = 20


class UsageError(Exception):
    """A request that can't be carried out; its text is one line for the user."""


@dataclass
class Definition:
    """What one file says under one name."""

    text: str
    """What has to be the same everywhere, with neither the line ending of its last line nor an `Args` default."""
    spans: list[tuple[int, int]]
    """The half-open byte ranges of the file that hold `text`: one, or an `Args` field's type and its docstring."""


def definitions(source: bytes) -> dict[str, list[Definition]]:
    """Every definition that the rule covers, by its name (`Args.field` for a field), in the order of the file.

    Works on bytes, as a fix has to leave the rest of a file as it is, line endings included.
    Raises SyntaxError where `source` is not Python.
    """
    tree = ast.parse(source)
    # Not splitlines(), which also splits at characters that do not end a line of Python.
    lines = [line.encode() for line in io.StringIO(source.decode(), newline="")]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    found: dict[str, list[Definition]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            for name, definition in argument_fields(node, source, starts):
                found.setdefault(name, []).append(definition)
        for name in names_of(node):
            if name not in FREE:
                first, last = line_range(node, lines)
                start, end = starts[first], starts[last] - len(line_ending(lines[last - 1]))
                found.setdefault(name, []).append(Definition(source[start:end].decode(), [(start, end)]))
    return found


def names_of(node: ast.stmt) -> list[str]:
    """The names that a top-level statement defines; several for `LOW, HIGH = 0, 1`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    # Only the names that are stored to: `table[i] = x` defines neither `table` nor `i`.
    stored = [part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
    return [part.id for part in stored if isinstance(part.ctx, ast.Store)]


def line_range(node: ast.stmt, lines: list[bytes]) -> tuple[int, int]:
    """The lines of a definition, as a half-open range from 0, with the comments that belong to it."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]) - 1
    last = node.end_lineno
    while first > 0 and lines[first - 1].startswith(b"#"):
        first -= 1
    # An indented comment after the last statement of a body is still inside the body.
    if hasattr(node, "body"):
        for number in range(last, len(lines)):
            if re.match(rb"[ \t]+#", lines[number]):
                last = number + 1
            elif lines[number].strip():
                break
    return first, last


def argument_fields(node: ast.ClassDef, source: bytes, starts: list[int]):
    """Yields the name and the definition of each field of `Args`; one without a docstring has an empty second span."""

    def span(part: ast.AST) -> tuple[int, int]:
        return starts[part.lineno - 1] + part.col_offset, starts[part.end_lineno - 1] + part.end_col_offset

    for field, after in zip(node.body, [*node.body[1:], None]):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            has_docstring = (
                isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            )
            end_of_field = span(field)[1]
            spans = [span(field.annotation), span(after) if has_docstring else (end_of_field, end_of_field)]
            annotation, docstring = (source[start:end].decode() for start, end in spans)
            yield f"Args.{field.target.id}", Definition(f"{annotation}\n{docstring}", spans)


def line_ending(line: bytes) -> bytes:
    return line[len(line.rstrip(b"\r\n")) :]


def read_all(folder: Path) -> dict[Path, dict[str, list[Definition]]]:
    found = {}
    for path in sorted(folder.glob("*.py")):
        try:
            found[path] = definitions(path.read_bytes())
        except SyntaxError as error:
            raise UsageError(f"{path.name}, line {error.lineno}: {error.msg}") from error
    return found


def differences(folder: Path) -> list[str]:
    """One readable report, with a short diff, for each name whose text is not the same in every script of `folder`."""
    texts: dict[str, dict[str, str]] = {}
    for path, found in read_all(folder).items():
        for name, copies in found.items():
            # Line endings are the checkout's matter, not the text's.
            text = "\n\n".join(copy.text for copy in copies).replace("\r\n", "\n")
            texts.setdefault(name, {})[path.name] = text

    reports = []
    for name, by_file in texts.items():
        variants = [text for text, _ in Counter(by_file.values()).most_common()]
        if len(variants) > 1:
            files = [[file for file, text in by_file.items() if text == variant] for variant in variants]
            lines = [f"{name} is not the same text in {' and in '.join(', '.join(group) for group in files)}:"]
            for variant, group in zip(variants[1:], files[1:]):
                diff = list(
                    difflib.unified_diff(
                        variants[0].splitlines(), variant.splitlines(), files[0][0], group[0], n=1, lineterm=""
                    )
                )
                lines += [f"    {line}" for line in diff[:DIFF_LINES]]
                if len(diff) > DIFF_LINES:
                    lines.append(f"    ... and {len(diff) - DIFF_LINES} more lines")
            lines.append(f"    to repair: python tests/identity.py --fix {name} --from {Path(files[0][0]).stem}")
            reports.append("\n".join(lines))
    return reports


def fix(folder: Path, name: str, origin: str) -> list[str]:
    """Copies the text of `name` from the script `origin` into every other one that defines it.

    Returns the names of the files that changed; raises UsageError, with no file touched, where that can't be done.
    """
    found = read_all(folder)
    origin_path = folder / (Path(origin).stem + ".py")
    if origin_path not in found:
        raise UsageError(f"there is no script '{origin}'; there are: {', '.join(path.stem for path in found)}")
    if name in FREE:
        raise UsageError(f"'{name}' may differ between scripts; of Args, name one field, such as Args.seed")
    if name not in found[origin_path]:
        raise UsageError(f"{origin_path.name} defines no '{name}' at its top level")
    for path, names in found.items():
        if len(names.get(name, [])) > 1:
            raise UsageError(f"{path.name} defines '{name}' more than once: make that one definition first")

    wanted = found[origin_path][name][0]
    origin_source = origin_path.read_bytes()
    pieces = [origin_source[start:end] for start, end in wanted.spans]
    changed = {}
    for path, names in found.items():
        if name in names and path != origin_path and names[name][0].text != wanted.text:
            source = replaced(path.read_bytes(), names[name][0].spans, pieces)
            copies = definitions(source).get(name, [])
            if [copy.text.replace("\r\n", "\n") for copy in copies] != [wanted.text.replace("\r\n", "\n")]:
                raise UsageError(f"the text of '{name}' does not fit into {path.name} as it is: edit it by hand")
            if source != path.read_bytes():
                changed[path] = source
    for path, source in changed.items():
        path.write_bytes(source)
    return [path.name for path in changed]


def replaced(source: bytes, spans: list[tuple[int, int]], pieces: list[bytes]) -> bytes:
    """`source` with the bytes at `spans` replaced by `pieces`, in the line endings of `source`."""
    newline = b"\r\n" if b"\r\n" in source else b"\n"
    for (start, end), piece in reversed(list(zip(spans, pieces))):
        piece = piece.replace(b"\r\n", b"\n").replace(b"\n", newline)
        if start == end and piece:  # a field that had no docstring: it gets the line below
            end_of_line = source.find(newline, start)
            start = end = len(source) if end_of_line < 0 else end_of_line
            piece = newline + b"    " + piece
        elif not piece and start != end:  # and one that is to have none loses the whole line
            start = source.rfind(newline, 0, start)
        source = source[:start] + piece + source[end:]
    return source


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UsageError(message)


def run(arguments: list[str]) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fix", metavar="NAME", help="the definition or Args.field to copy")
    parser.add_argument("--from", metavar="FILE", dest="origin", help="the script whose text is copied into the others")
    parser.add_argument("--folder", type=Path, default=SCRIPTS, help="where the scripts are (default: leanrl/)")
    try:
        args = parser.parse_args(arguments)
        if (args.fix is None) != (args.origin is None):
            raise UsageError("--fix NAME and --from FILE go together")
        if args.fix is not None:
            changed = fix(args.folder, args.fix, args.origin)
            print(f"{args.fix}: {'changed ' + ', '.join(changed) if changed else 'was the same everywhere already'}")
            return 0
        reports = differences(args.folder)
    except UsageError as error:
        print(f"identity.py: {error}", file=sys.stderr)
        return 2
    print("\n\n".join(reports) if reports else "Same name, same text: no differences.")
    return 1 if reports else 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

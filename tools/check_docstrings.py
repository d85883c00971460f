"""Check that docstrings begin with a noun or a verb: the first words of modules, classes, functions and attributes.

A docstring that begins with "Of", "Those", "That", "So", "The same" or "...", or in lower case, continues a sentence
that the reader does not see. "What" and "Whether" hide the verb of a function: write "True when ..." or "Return ...".
Names that begin with an underscore are not checked, nor is anything inside them.

Usage: python tools/check_docstrings.py [ROOT]
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

CHECKED_FOLDERS = ("benchmarks", "kernels", "lora", "models", "platform", "spec_decode", "tools")
"""Folders whose docstrings keep the rule. When all do, this becomes the root."""
CONTINUATION = re.compile(r"(Of|Those|That|So|What|The same)\b|\.\.\.|…|[a-z]+(?![\w.`]| ?[\[=])")
"""First words of a docstring that continues something. Lower case is allowed for a tensor, as in `hidden [T, H]`."""
HIDDEN_VERB = re.compile(r"Whether\b")
"""First words that no docstring of a function may have."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """(line, text, whether it is a function's) of every public docstring."""
    public: list[ast.AST] = [tree]
    while public:
        node = public.pop()
        body = getattr(node, "body", [])
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            text = ast.get_docstring(node)
            if text:
                yield body[0].lineno, text, isinstance(node, Function) and not _is_property(node)
        if isinstance(node, Function):
            continue
        for statement, following in zip(body, [*body[1:], None], strict=True):
            if isinstance(statement, ast.ClassDef | Function) and not statement.name.startswith("_"):
                public.append(statement)
            text = _attribute_docstring(statement, following)
            if text:
                yield statement.lineno, text, False


def _is_property(function: Function) -> bool:
    return any(ast.unparse(decorator).endswith("property") for decorator in function.decorator_list)


def _attribute_docstring(statement: ast.stmt, following: ast.stmt | None) -> str | None:
    """The text below an assignment to public names."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or not isinstance(following, ast.Expr):
        return None
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    if all(ast.unparse(target).lstrip("(").startswith("_") for target in targets):
        return None
    value = following.value
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def check(root: Path, folders: tuple[str, ...] = CHECKED_FOLDERS) -> list[str]:
    """One line for each docstring in `folders` of `root` that breaks the rule."""
    complaints = []
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        for line, text, is_function in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            wrong = CONTINUATION.match(text) or (HIDDEN_VERB.match(text) if is_function else None)
            if wrong:
                place = f"{path.relative_to(root).as_posix()}:{line}"
                complaints.append(f"{place}: a docstring begins with {wrong.group()!r}: {text.splitlines()[0][:80]}")
    return complaints


def main(arguments: list[str]) -> int:
    """Check the tree at the given root, or at this repository's; returns the exit status."""
    complaints = check(Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent)
    print("\n".join(complaints) or "Docstrings: all begin well")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

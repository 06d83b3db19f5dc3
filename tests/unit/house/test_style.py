"""Style that ruff has no rules for.

A docstring names its subject, since a reader who meets it in an editor or in a help text may not see the line above. A
line assigns one value, since a row of names beside a row of values takes two readings. What is at a path is asked by
configs/files.py, since Python 3.14's `Path` answers False where a disk does not answer.
"""

import ast
import re

from tests.conftest import ROOT

FOLDERS = ("configs", "models", "parallelisms", "checkpoint", "trainer", "scripts")
ALONE = ("scripts/__init__.py", "scripts/entry/keel/__init__.py", "scripts/examples/")
"""Files without Keel's packages: they come before them, or are read for themselves."""
OF_PATHLIB = re.compile(r"\.(exists|is_file|is_dir|is_symlink)\(\)|Path\.(exists|is_file|is_dir|is_symlink)")
PREPOSITION = re.compile(
    r"\s*(After|As|At|Before|Beside|Between|By|For|From|In|Into|Of|On|Over|Per|Through|To|Under|With|Without)[\s,:]"
)


def first_lines(text):
    """The first lines of a module's docstrings and attribute docstrings that begin with a preposition, by line."""
    strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
    docstrings = {node.lineno: node.value for node in strings if isinstance(node, ast.Constant)}
    return {
        line: value.strip().splitlines()[0]
        for line, value in docstrings.items()
        if isinstance(value, str) and PREPOSITION.match(value)
    }


def product():
    files = [ROOT / "train.py", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
    assert len(files) > 200
    return files


def rows(text):
    """The lines with `a, b = x, y`, but not `a, b = b, a`, which needs a row."""
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
            continue
        if isinstance(node.targets[0], ast.Tuple):
            parts = (part for part in ast.walk(node.value) if isinstance(part, ast.expr))
            used = {ast.unparse(part) for part in parts}
            if not any(ast.unparse(target) in used for target in node.targets[0].elts):
                yield node.lineno


def test_each_line_assigns_one_value():
    found = [f"{path.relative_to(ROOT)}:{line}" for path in product() for line in rows(path.read_text())]
    assert not found, "\n".join(["one assignment a line:", *found])


def test_rows_are_found_and_exchanges_are_not():
    assert list(rows("a, b = f(), 2\na, b = b, a\na, b = f()\nself.a, b = 1, self.c\nx, y = y, x + 1\n")) == [1, 4]


def test_no_docstring_begins_with_a_preposition():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {first}"
        for path in product()
        for line, first in first_lines(path.read_text()).items()
    ]
    assert not found, "\n".join(["begin with the docstring's subject:", *found])


def test_all_kinds_of_docstrings_are_read():
    text = '''"""Of a module."""
x = 1
"""By name."""
class A:
    """In a class."""
    y: int
    """Offset, of a name that only begins like a preposition."""
    def f(self):
        """To\ndo."""
        self.z = 1
        """As an attribute."""
        print("With an argument")
'''
    assert list(first_lines(text).values()) == ["Of a module.", "By name.", "In a class.", "To", "As an attribute."]


def test_what_is_at_a_path_is_asked_by_configs_files():
    names = {str(path.relative_to(ROOT)): path for path in product()}
    found = [
        f"{name}:{line}"
        for name, path in names.items()
        for line, text in enumerate(path.read_text().splitlines(), 1)
        if not name.startswith(ALONE) and OF_PATHLIB.search(text.partition("#")[0]) and "`Path." not in text
    ]
    assert not found, "\n".join(["ask configs.files for what is at a path:", *found])

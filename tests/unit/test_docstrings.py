"""A docstring names its subject: a reader who meets it in an editor or in a help text may not see the line above."""

import ast
import re

from tests.conftest import ROOT

FOLDERS = ("configs", "models", "parallelisms", "checkpoint", "trainer", "scripts")
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


def test_no_docstring_begins_with_a_preposition():
    files = [ROOT / "train.py", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
    assert len(files) > 200
    found = [
        f"{path.relative_to(ROOT)}:{line}: {first}"
        for path in files
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

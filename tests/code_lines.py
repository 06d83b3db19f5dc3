"""Code lines, without blank lines, comments and docstrings: python -m tests.code_lines

Prints them for each folder at the top level, and for the product, which is everything but tests/.
"""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
_NOT_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def code_line_numbers(path: Path) -> set[int]:
    """Numbers of the lines with code."""
    source = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    return code - docstrings


def main() -> None:
    """Print the table."""
    lines = Counter[str]({"train.py": len(code_line_numbers(ROOT / "train.py"))})
    for folder in ("checkpoint", "configs", "models", "parallelisms", "scripts", "tests", "trainer"):
        for path in (ROOT / folder).rglob("*.py"):
            lines[folder] += len(code_line_numbers(path))
    print("code lines: " + ", ".join(f"{name} {n:,}" for name, n in sorted(lines.items())))
    print(f"code lines of the product: {lines.total() - lines['tests']:,}")


if __name__ == "__main__":
    main()

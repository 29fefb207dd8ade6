"""Count of statements without docstrings in folders or files: `python scripts/count_statements.py flce tests`."""

import ast
import sys
from pathlib import Path


def counts(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return not isinstance(node.value.value, str)
    return isinstance(node, ast.stmt)


for folder in map(Path, sys.argv[1:]):
    files = [folder] if folder.is_file() else folder.rglob("*.py")
    number = sum(sum(map(counts, ast.walk(ast.parse(file.read_text())))) for file in files)
    print(f"{number:7,} {folder}")

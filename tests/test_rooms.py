"""The house stays as it is planned: who imports whom, and how long files and functions may be."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import jaxrl_llm

PACKAGE = Path(jaxrl_llm.__file__).parent
FILES = {p: p.read_text() for p in PACKAGE.rglob("*.py") if not p.name.endswith("_pb2.py")}


def test_a_room_imports_only_the_rooms_before_it():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"rooms KEPT", done.stdout)


def test_every_folder_of_the_package_is_a_room():
    rooms = re.search(r"layers = \[(.*?)\]", (PACKAGE.parent / "pyproject.toml").read_text(), re.DOTALL)[1]
    there = {p.name.removesuffix(".py") for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert there - {"__init__"} == set(re.findall(r'"(\w+)"', rooms))


def test_files_and_functions_are_short_and_so_is_the_package():
    lines = {p.name: len(text.splitlines()) for p, text in FILES.items()}
    assert {name: n for name, n in lines.items() if n > 450} == {}
    functions = [
        (f"{p.name}:{node.name}", node.end_lineno - node.lineno + 1)
        for p, text in FILES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [f for f in functions if f[1] > 60] == []
    assert sum(len(text.splitlines()) for text in FILES.values()) <= 19_500

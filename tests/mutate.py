"""Break the maths one place at a time and see whether the tests notice.

    .venv/bin/python tests/mutate.py [function …]

Signs, comparisons, min and max, `where` branches, stop-gradients, sums and means, constants of denominators and ddof in
losses, filters, advantages, corrections and token weights are flipped one at a time. A mutant's code replaces that of
the living function, and the tests that reach the function run in this process until one fails. What survives must be on
the list in mutate_survivors.txt, where each line ends with the reason why it computes the same. Exit code 1 if not.

Tests that compile come last, and for them jax forgets what it compiled from unbroken code.
"""

from __future__ import annotations

import ast
import copy
import gc
import inspect
import os
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SURVIVORS = HERE / "mutate_survivors.txt"
TARGETS = ("losses", "filters", "shared", "advantages", "corrections", "token_weights")  # of objective/
FILES = [
    "test_losses.py", "test_losses_token.py", "test_losses_response.py", "test_losses_moved.py",
    "test_losses_properties.py", "test_filters.py", "test_advantages_parts.py",
    "test_advantages.py", "test_advantages_group.py", "test_advantages_token.py", "test_corrections.py",
    "test_token_weights.py", "../learner/test_edges.py",
]  # fmt: skip

OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
NAMES = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min", "argmax": "argmin", "sum": "mean"}


@dataclass(frozen=True)
class Mutant:
    module: str
    function: str
    change: str  # "before → after #occurrence", stable while other lines move
    code: types.CodeType


def variants(node: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Broken copies of one node; the flag says whether a constant was changed."""
    new = lambda **fields: ast.copy_location(type(node)(**{**dict(ast.iter_fields(node)), **fields}), node)
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPERATORS:
        yield new(op=OPERATORS[type(node.op)]())
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            if type(op) in OPERATORS:
                yield new(ops=[*node.ops[:i], OPERATORS[type(op)](), *node.ops[i + 1 :]])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert | ast.Not):
        yield node.operand
    if isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield new(attr=NAMES[node.attr])
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name == "stop_gradient":
            yield node.args[0]
        if name == "where" and len(node.args) == 3:
            yield new(args=[node.args[0], node.args[2], node.args[1]])
    if isinstance(node, ast.BinOp):
        for side in ("left", "right"):
            value = getattr(node, side)
            if isinstance(value, ast.Constant) and isinstance(value.value, int | float):
                yield new(**{side: ast.copy_location(ast.Constant(value.value + 1), value)})


def _errors_only(function: ast.FunctionDef) -> set[int]:
    """Nodes inside of argument checks and annotations: those are tested by hand, and no maths."""
    skip: list[ast.AST] = [function.args, *function.decorator_list]
    skip += [function.returns] if function.returns else []
    for node in ast.walk(function):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            skip.append(node)
        if isinstance(node, ast.If) and any(isinstance(n, ast.Raise) for n in node.body):
            skip.append(node.test)
    return {id(inner) for node in skip for inner in ast.walk(node)}


def mutants(module: str) -> Iterator[Mutant]:
    """All of a module's, by function."""
    path = HERE.parent / "jaxrl_llm" / "objective" / f"{module}.py"
    tree = ast.parse(path.read_text())
    for function in [n for n in tree.body if isinstance(n, ast.FunctionDef)]:
        skip, seen = _errors_only(function), {}
        for index, node in enumerate(ast.walk(function)):
            for broken in variants(node) if id(node) not in skip else ():
                text = f"{ast.unparse(node)} → {ast.unparse(broken)}"
                seen[text] = seen.get(text, 0) + 1
                yield Mutant(module, function.name, f"{text} #{seen[text]}", _compiled(function, index, broken, path))


def _compiled(function: ast.FunctionDef, index: int, broken: ast.AST, path: Path) -> types.CodeType:
    """Code of the function with node number `index` replaced."""
    whole = copy.deepcopy(function)
    target = list(ast.walk(whole))[index]

    class Swap(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return broken if node is target else self.generic_visit(node)

    whole = Swap().visit(whole)
    whole.decorator_list, whole.returns = [], None
    for a in [*whole.args.args, *whole.args.kwonlyargs]:
        a.annotation = None
    code = compile(ast.fix_missing_locations(ast.Module([whole], [])), str(path), "exec")
    return next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == function.name)


def living(module: str) -> dict[str, types.FunctionType]:
    """The module's functions as they were defined, beneath the type-checking wrappers of the tests."""
    path = sys.modules[f"jaxrl_llm.objective.{module}"].__file__
    found = [f for f in gc.get_objects() if isinstance(f, types.FunctionType) and f.__code__.co_filename == path]
    return {f.__code__.co_name: f for f in found if f.__qualname__ == f.__code__.co_name}


class Runner:
    """A pytest plugin: collects once, learns which test reaches which function, then runs the mutants."""

    def __init__(self, only: set[str]):
        self.only, self.survived, self.killed = only, [], 0

    def pytest_runtestloop(self, session) -> bool:
        items = session.items
        functions = {(m, n): f for m in TARGETS for n, f in living(m).items()}
        by_code = {f.__code__: key for key, f in functions.items()}
        reach: dict[tuple, list] = {key: [] for key in functions}
        print(f"{len(items)} tests, unbroken:", flush=True)
        for item in items:
            hit: set[tuple] = set()
            sys.setprofile(lambda frame, event, _, hit=hit: hit.add(by_code.get(frame.f_code)))
            start = time.perf_counter()
            passed = self.passes(item)
            sys.setprofile(None)
            if not passed:
                raise SystemExit(f"{item.nodeid} fails on unbroken code")
            for key in hit - {None}:
                reach[key].append((time.perf_counter() - start, item))
        for module in TARGETS:
            for mutant in mutants(module):
                if not self.only or mutant.function in self.only:
                    self.judge(mutant, functions[module, mutant.function], reach[module, mutant.function])
        return True

    def judge(self, mutant: Mutant, function: types.FunctionType, tests: list) -> None:
        import jax

        original, function.__code__, compiles = function.__code__, mutant.code, False
        try:
            for compiles in (False, True):
                if compiles:
                    jax.clear_caches()
                for _, item in sorted(tests, key=lambda t: t[0]):
                    if ("jit" in inspect.getsource(item.function)) == compiles and not self.passes(item):
                        self.killed += 1
                        return
            self.survived.append(mutant)
            print(f"survives: {mutant.module}.{mutant.function}: {mutant.change}", flush=True)
        finally:
            function.__code__ = original
            if compiles:
                jax.clear_caches()

    def passes(self, item) -> bool:
        from _pytest.runner import runtestprotocol

        item._initrequest()
        return all(r.passed or r.skipped for r in runtestprotocol(item, nextitem=None, log=False))


def main() -> int:
    import pytest
    from hypothesis import settings

    settings.register_profile("mutation", max_examples=8, deadline=None, database=None, derandomize=True)
    settings.load_profile("mutation")
    os.chdir(HERE.parent)
    start, runner = time.perf_counter(), Runner(set(sys.argv[1:]))
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts=", "-m", "not slow"]
    pytest.main([*options, *(str(HERE / "objective" / f) for f in FILES)], plugins=[runner])
    known = {line.partition(" | ")[0] for line in SURVIVORS.read_text().splitlines() if " | " in line}
    names = {f"{m.module}.{m.function}: {m.change}" for m in runner.survived}
    seconds = time.perf_counter() - start
    print(f"{runner.killed} killed, {len(names)} survived, {len(names & known)} of them listed, in {seconds:.0f} s")
    for name in sorted(names - known):
        print(f"not listed: {name}")
    if not runner.only:
        for name in sorted(known - names):
            print(f"listed, but no longer a survivor: {name}")
    return int(bool(names - known) or runner.killed == 0)


if __name__ == "__main__":
    sys.exit(main())

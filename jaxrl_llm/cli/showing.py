"""The commands that only print: show, algorithms."""

from __future__ import annotations

import json

import tyro

from jaxrl_llm.cli.shared import File, Method, Set, load


def show(experiment: File, set_: Set = (), algorithm: Method = None) -> None:
    """Print an experiment's whole config as JSON.

    Args:
        experiment: a Python file with CONFIG = Config(…), or a run's folder.
    """
    config = load(experiment, set_, algorithm)
    from jaxrl_llm.config import to_json

    print(json.dumps(to_json(config), indent=1))


def algorithms(name: tyro.conf.Positional[str | None] = None) -> None:
    """Print the table of methods, or one: its fields and equations.

    Args:
        name: a method of the table; all of them if left out.
    """
    from jaxrl_llm.config import named
    from jaxrl_llm.reports import catalogue

    print(catalogue.table() if name is None else catalogue.describe(name, named(name)))

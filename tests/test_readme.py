"""What README and the pages under docs/ show is what there is, and it runs."""

import dataclasses
import importlib
import json
import re
import shlex
import shutil
import sys
import tomllib
import types
import typing
from pathlib import Path

import pytest

from jaxrl_llm import cli, config
from jaxrl_llm.config import Config
from jaxrl_llm.objective.algorithms import ALGORITHMS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# docs/algorithms.md is made from the code, and tested with what makes it
PAGES = {p.name: p.read_text() for p in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
WRITTEN = {name: text for name, text in PAGES.items() if name != "algorithms.md"}
ADDING = re.findall(r"```python\n(# (\S+)\n.*?)```", PAGES["adding.md"], re.DOTALL)  # code, path

# What a run writes (perf/ in its metrics), what the reader writes, and what the first launch script makes: none of it
# is in the repository.
OF_A_RUN = {
    "config.json",
    "metrics.jsonl",
    "samples.jsonl",
    "curves.png",
    "gap.json",
    "gap.png",
    "base.json",
    "analysis.json",
    "analysis.png",
}
OF_A_RUN |= {"tensorboard/", "checkpoints/", "tokenizer/", "base/", "perf/", "runs/"}
OF_THE_READER = {"my.py", "problems.jsonl", "other.jsonl", "generation_config.json", "good.jsonl", "tpu_scripts/"}
OF_THE_READER |= {"report.json", "findings.jsonl", "OUT.dropped.jsonl"}
OF_THE_READER |= {path for _, path in ADDING}


def blocks(text: str) -> list[str]:
    return re.findall(r"```(?:\w*)\n(.*?)```", text, re.DOTALL)


def spans(text: str) -> list[str]:
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [" ".join(s.split()) for s in re.findall(r"`([^`]+)`", prose)]


def commands(text: str) -> list[list[str]]:
    """The words of every jaxrl, python and make command, without what explains it."""
    lines = [line for b in blocks(text) for line in b.replace("\\\n", " ").splitlines()] + spans(text)
    begun = re.compile(r"^(?:[A-Z_]+=\S+ +)*((?:jaxrl|python|make) .*)$")
    found = [re.split(r" +# |(?<=\S)  +(?=[a-z])", m[1])[0] for line in lines if (m := begun.match(line.strip()))]
    return [shlex.split(line) for line in found]


COMMANDS = {
    *("train", "sft", "eval", "compare", "analyse", "sample", "import", "export", "serve", "gap", "show", "algorithms"),
    "data prepare",
    "curate",
}
every_page = pytest.mark.parametrize("page", WRITTEN)


# --- your own problem ---------------------------------------------------------------------------------------------


def own_problem():
    section = README.split("## Your own problem")[1].split("\n## ")[0]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], re.search(r"`(\{\"prompt\".*?\})`", section)[1]


def test_a_problem_of_your_own_in_15_lines(tmp_path, monkeypatch, capsys):
    code, line = own_problem()
    assert len(code.strip().splitlines()) <= 15
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    (tmp_path / "my.py").write_text(code)
    first = json.loads(line)
    chain = lambda *terms: {
        "prompt": "".join(f"{'abc'[i]}{t}" for i, t in enumerate(terms)) + ":",
        "answer": str(sum(terms) % 5),
    }
    assert first == chain(3, 4, 2), "the example is right"
    problems = [first, *(chain(i, j, k) for i in range(5) for j in range(5) for k in range(5))]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXRL_CACHE", str(tmp_path / "cache"))
    small = [
        "steps=2", "prime.stages.0.batches=2", "prime.stages.1.batches=1", "algorithm.group_filter=None",
        "rollout.prompts=4", "evaluation.problems=4", "rollout.max_response_tokens=16", "model.layers=1",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["jaxrl", "train", "my.py", *(w for s in small for w in ("--set", s))])
    cli.main()
    assert "held-out accuracy" in capsys.readouterr().out
    rows = [json.loads(row) for row in (tmp_path / "runs/my/samples.jsonl").read_text().splitlines()]
    assert {r["step"] for r in rows} == {1, 2}
    assert {r["prompt"] for r in rows} <= {p["prompt"] for p in problems}
    assert {r["reward"] for r in rows} <= {0.0, 0.1, 1.0}


# --- the examples of docs/adding.md -------------------------------------------------------------------------------


def add_to_package(path: str, code: str, monkeypatch) -> None:
    """Run `code` as if it stood in the package's file `path`, at its end if there is one."""
    name = path.removesuffix(".py").replace("/", ".")
    if (ROOT / path).is_file():
        module = importlib.import_module(name)
        names = dict(vars(module))
        exec(code, names)
        for key in names.keys() - vars(module).keys() - {"__builtins__"}:
            monkeypatch.setattr(module, key, names[key], raising=False)
    else:
        module = types.ModuleType(name)
        module.__file__ = str(ROOT / path)
        monkeypatch.setitem(sys.modules, name, module)
        exec(code, vars(module))


def check_experiment(file: Path) -> None:
    lines = file.read_text()
    assert all(f"{field}:" in lines for field in ("Paper", "Claim", "Command"))
    loaded = config.load(file)
    assert config.to_json(config.from_json(json.loads(json.dumps(config.to_json(loaded))))) == config.to_json(loaded)
    task = loaded.task()
    for behaviour in task.behaviours[:1]:
        for prompt in (*task.train[:20], *task.test[:20]):
            assert task.reward(prompt, task.trace(prompt, behaviour, 0), "eos").correct


def test_the_examples_of_adding_something_run(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    monkeypatch.setattr(sys, "path", list(sys.path))
    kinds = []
    for code, path in ADDING:
        kinds.append(path.split("/")[0])
        if path.startswith("jaxrl_llm/"):
            add_to_package(path, code, monkeypatch)
        elif path.startswith("experiments/"):
            assert not (tmp_path / path).exists()
            (tmp_path / path).write_text(code)
            check_experiment(tmp_path / path)
        else:
            names = {}
            exec(code, names)
            tests = [f for name, f in names.items() if name.startswith("test_")]
            assert tests
            for test in tests:
                test()
    assert {"jaxrl_llm", "experiments", "tests"} == set(kinds)
    assert len(ADDING) == PAGES["adding.md"].count("```python"), "every example says where it belongs"


# --- links, paths, names ------------------------------------------------------------------------------------------


def slugs(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ +(.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_links_exists(page):
    folder = ROOT if page == "README.md" else ROOT / "docs"
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = folder / path if path else folder / page
        assert target.exists(), link
        assert not anchor or anchor in slugs(target.read_text()), link


FILE = re.compile(r"(?<![\w/.~-])(?:[\w.-]+/)*(?:[\w-]+\.(?:py|md|jsonl?|png|toml|txt)\b|[\w-]+/(?= |$))")


@every_page
def test_the_paths_that_a_page_names_exist(page):
    files = {p.name for folder in ("jaxrl_llm", "experiments", "tests") for p in (ROOT / folder).rglob("*.py")}
    for path in (path for span in spans(WRITTEN[page]) for path in FILE.findall(span)):
        known = path in OF_A_RUN | OF_THE_READER | files or "NAME" in path
        assert known or (ROOT / path).exists() or (ROOT / "jaxrl_llm" / path).exists(), path


@every_page
def test_the_settings_that_a_page_names_exist(page):
    fields = "|".join(f.name for f in dataclasses.fields(Config))
    for span in spans(WRITTEN[page]):
        if not re.fullmatch(rf"({fields})(\.\w+)+", span) or span.endswith(".py"):
            continue
        node = Config
        for name in span.split("."):
            hints = typing.get_type_hints(node)
            assert name in hints, span
            options = [hints[name], *typing.get_args(hints[name])]
            node = next((o for o in options if dataclasses.is_dataclass(o)), None)
            if node is None:  # a function's keyword, a tuple's index
                break


@every_page
def test_the_functions_that_a_page_names_exist(page):
    for module, name in re.findall(r"(jaxrl_llm[\w.]*):(\w+)", WRITTEN[page]):
        assert hasattr(importlib.import_module(module), name), f"{module}:{name}"


# --- commands -----------------------------------------------------------------------------------------------------


def helped(command: str, monkeypatch, capsys) -> str:
    monkeypatch.setattr(sys, "argv", ["jaxrl", command, "--help"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out = capsys.readouterr().out
    assert ended.value.code in (0, None), command
    assert re.search(rf"jaxrl {command}\b", out), f"no command {command}: the help is that of jaxrl"
    return out


def is_placeholder(word: str) -> bool:
    return bool(re.search(r"…|\bNAME\b|=[A-Z]$|^[A-Z|]+$|[\[\]]", word)) and not word.startswith("rollout.servers=")


def check_jaxrl(words: list[str], options: str) -> None:
    """Its flags are in `options`, what --help says; what it sets and the method that it names fit its experiment."""
    assert all(flag in options for flag in flags(words)), words
    after = lambda flag: [b for a, b in zip(words, words[1:], strict=False) if a == flag and not is_placeholder(b)]
    for file in (w for w in words if w.startswith("experiments/") and not is_placeholder(w)):
        config.load(ROOT / file, tuple(after("--set")), *after("--algorithm"))


def flags(words: list[str]) -> list[str]:
    return [w.strip("[]").partition("=")[0] for w in words if w.strip("[]").startswith("--")]


@every_page
def test_commands_name_what_there_is(page, monkeypatch, capsys):
    makefile = (ROOT / "Makefile").read_text()
    for words in commands(WRITTEN[page]):
        program, what, *rest = [*words[:1], " ".join(words[1:3]), *words[3:]] if words[1] == "data" else words
        if words == ["jaxrl", "--version"]:
            continue  # an option without a command: see below
        if program == "make":
            assert re.search(rf"^{re.escape(what)}:", makefile, re.MULTILINE), words
        elif program == "python" and what == "-m":
            assert importlib.util.find_spec(rest[0]), words
        elif program == "python":
            assert all(flag in (ROOT / what).read_text() for flag in flags(rest)), words
        else:
            check_jaxrl(rest, helped(what, monkeypatch, capsys))


@every_page
def test_what_is_set_can_be_set(page):
    """`--set …` by itself, for the demo or for an experiment that has what is set."""
    for span in spans(WRITTEN[page]):
        if span.startswith("--set ") and not is_placeholder(span):
            assignment = shlex.split(span)[1]
            name = "ppo" if "critic" in assignment else "lora" if "lora." in assignment else "laptop_dapo"
            if "=" in assignment and not assignment.startswith("path.to"):
                config.override(config.load(ROOT / f"experiments/{name}.py"), assignment)


def test_the_options_that_pages_name_exist(monkeypatch, capsys):
    known = "".join(helped(command, monkeypatch, capsys) for command in COMMANDS)
    known += "".join(p.read_text() for p in [Path(cli.__file__), *(ROOT / "experiments").rglob("*.py")])
    for page, text in WRITTEN.items():
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", " ".join(spans(text))):
            assert option in known, f"{page}: {option}"


def test_commands_are_found():
    found = commands(
        "```\nA=1 jaxrl train x.py \\\n    --set a=1  # why\njaxrl eval RUN   what it says\n```\n`make test`"
    )
    assert found == [["jaxrl", "train", "x.py", "--set", "a=1"], ["jaxrl", "eval", "RUN"], ["make", "test"]]
    told = {words[1] for page in WRITTEN.values() for words in commands(page) if words[0] == "jaxrl"}
    told = {"data prepare" if word == "data" else word for word in told}
    assert told - {"--version"} == COMMANDS


# --- the door -----------------------------------------------------------------------------------------------------


def test_the_door_is_short_and_leads_everywhere():
    assert len(README.splitlines()) <= 150
    missing = [name for name in PAGES if name != "README.md" and f"(docs/{name}" not in README]
    assert not missing


def test_the_house_has_every_room_in_the_order_of_imports():
    rooms = re.findall(r"^\| \[\S+\]\(jaxrl_llm/(\w+?)(?:\.py)?\) \|", README, re.MULTILINE)
    package = [p for p in (ROOT / "jaxrl_llm").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    assert set(rooms) == {p.stem for p in package} - {"__init__"}
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["type"] == "layers")
    assert rooms == layers[::-1]


def test_the_loop_is_made_of_functions_that_exist():
    loop = next(b for b in blocks(README.split("## The loop")[1]) if "fill_batch" in b)
    lines = loop.strip().splitlines()
    assert len(lines) == 7
    for line in lines:
        called, file = re.search(r"(\w+)\(", line)[1], line.split()[-1]
        assert re.search(rf"\bdef {called}\(", (ROOT / "jaxrl_llm" / file).read_text()), line


def test_the_methods_are_counted():
    assert f"the {len(ALGORITHMS)} methods" in README


def test_every_experiment_is_listed():
    listed = re.findall(r"^\| \[(\w+)\.py\]\(\.\./experiments/\1\.py\) \| \S", PAGES["experiments.md"], re.MULTILINE)
    assert sorted(listed) == sorted(p.stem for p in (ROOT / "experiments").glob("*.py"))


def test_the_glossary_is_one_screen():
    assert len(PAGES["glossary.md"].splitlines()) <= 60

"""Suites of a config: to JSON and back, changed by path, checked field by field, found beside the experiment."""

import json
from dataclasses import replace
from functools import partial

import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.config import Config, Evaluation, Rollout, Suite, override, validate
from jaxrl_llm.data import tasks
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.run import suites

TINY = ModelConfig(
    vocab_size=112, layers=1, width=16, heads=2, kv_heads=1, head_width=8, mlp_width=16, max_positions=400
)
SUITES = {
    "long": Suite(partial(tasks.chain, terms=(9, 9)), every=5, problems=7, samples=4, temperature=0.6, top_p=0.9),
    "aime24": Suite(partial(suites.benchmark, "aime24"), max_tokens=300),
}
BASE = Config(tasks.chain, ALGORITHMS["grpo"], TINY, evaluation=Evaluation(suites=SUITES))


def test_json_both_ways():
    written = json.loads(json.dumps(configs.to_json(BASE)))
    assert written["evaluation"]["suites"]["aime24"]["task"]["with"] == {"name": "aime24"}
    again = configs.from_json(written)
    assert isinstance(again.evaluation.suites["long"], Suite)
    assert configs.to_json(again) == written
    assert validate(again).evaluation.suites["long"].samples == 4


def test_a_suite_is_changed_by_path():
    changed = override(BASE, "evaluation.suites.long.samples=16", "evaluation.suites.long.task.terms=(3,4)")
    assert changed.evaluation.suites["long"].samples == 16
    assert changed.evaluation.suites["long"].task.keywords == {"terms": (3, 4)}
    assert changed.evaluation.suites["aime24"] == SUITES["aime24"]
    with pytest.raises(
        ValueError, match="evaluation.suites.long.sample: no field 'sample' in Suite; did you mean 'samples'"
    ):
        override(BASE, "evaluation.suites.long.sample=16")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("samples", 0, "at least 1"), ("problems", 0, "at least 1"), ("every", -1, "at least 0"),
        ("temperature", -0.1, "at least 0"), ("top_p", 0.0, r"a number in \(0, 1\]"), ("top_p", 1.5, "a number in"),
        ("max_tokens", 400, "at most 399, model.max_positions less a prompt"), ("max_tokens", -1, "at least 0"),
    ],
)  # fmt: skip
def test_what_a_suite_may_hold(field, value, expected):
    config = replace(BASE, evaluation=Evaluation(suites={"mine": Suite(tasks.chain, **{field: value})}))
    with pytest.raises(ValueError, match=f"evaluation.suites.mine.{field} is {value}; expected {expected}"):
        validate(config)


def test_names_tasks_and_servers():
    with pytest.raises(ValueError, match="evaluation.suites is 'a/b'; expected names of letters"):
        validate(replace(BASE, evaluation=Evaluation(suites={"a/b": SUITES["long"]})))
    with pytest.raises(ValueError, match="evaluation.suites.a.task: chain: .*'modulo'"):
        validate(replace(BASE, evaluation=Evaluation(suites={"a": Suite(partial(tasks.chain, modulo=3))})))
    remote = replace(BASE, rollout=Rollout(servers=("host:1",), max_response_tokens=96))
    with pytest.raises(ValueError, match="aime24.max_tokens is 300; expected at most 96, what the servers draw"):
        validate(remote)


def test_a_file_is_found_beside_the_experiment(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "1", "answer": "1"}')
    (tmp_path / "exp.py").write_text(
        "from functools import partial\nfrom jaxrl_llm.config import Config, Evaluation, Suite\n"
        "from jaxrl_llm.data import tasks\nfrom jaxrl_llm.models import presets\n"
        "from jaxrl_llm.objective.algorithms import ALGORITHMS\nfrom jaxrl_llm.run import suites\n"
        "mine = Suite(partial(suites.benchmark, 'mine.jsonl'))\n"
        "CONFIG = Config(tasks.chain, ALGORITHMS['grpo'], presets.NANO, evaluation=Evaluation(suites={'mine': mine}))\n"
    )
    loaded = configs.load(tmp_path / "exp.py").evaluation.suites["mine"]
    assert loaded.task.keywords == {"name": str(tmp_path / "mine.jsonl")}

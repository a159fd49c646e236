"""Tasks of prepared datasets: read lazily, split as asked, judged and checked as asked; responses as traces."""

import json
import pickle
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.config import Config, Prime, Stage
from jaxrl_llm.data import datasets, prepare, tokenizers
from jaxrl_llm.data.recipes import Recipe
from jaxrl_llm.models import presets
from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.run import sft
from jaxrl_llm.types import EOS, LENGTH, Prompt, Reward


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbered(n, start=0, **more):
    return [{"prompt": f"{i} + 1 =", "answer": str(i + 1), **more} for i in range(start, start + n)]


def graded(prompt, text):
    return float(text == prompt.answer)


def judged(prompt, text, finish):
    return Reward(0.5, text == prompt.answer, text)


def checked(answer):
    CHECKED.append(answer)
    if answer == "13":
        raise ValueError("unlucky")


CHECKED = []


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXRL_CACHE", str(tmp_path / "cache"))
    CHECKED.clear()
    return tmp_path / "cache"


@pytest.fixture
def sums(tmp_path, cache):
    """A name that `jaxrl data prepare` has made, with 30 training and 10 test problems."""
    files = {s: [write(tmp_path / f"{s}.jsonl", numbered(n, k))] for s, n, k in (("test", 10, 100), ("train", 30, 0))}
    return prepare.prepare("sums", files, Recipe(), cache / "data")


def test_a_named_dataset_with_its_own_test_side(sums):
    task = datasets.tfds_data("sums", graded)
    assert [len(task.train), len(task.test), task.test[3].text] == [30, 10, "103 + 1 ="]
    assert [p.text for p in task.train[28:]] == ["28 + 1 =", "29 + 1 ="]
    assert task.train[-1] == task.train[29]
    with pytest.raises(IndexError):
        task.train[30]
    assert task.reward(task.train[1], "2", EOS) == Reward(1.0, True)
    assert task.reward(task.train[1], "2", LENGTH) == Reward(0.0, False)


def test_a_share_is_held_out_as_of_jsonl(sums, tmp_path):
    task = datasets.tfds_data("sums", graded, split="train", test=None, held_out=0.3)
    assert len(task.test) == 10  # there is a test side
    alone = prepare.prepare("alone", {"train": [tmp_path / "train.jsonl"]}, Recipe(), tmp_path)["folder"]
    task, other = (
        datasets.tfds_data(alone, graded, held_out=0.3),
        datasets.jsonl(tmp_path / "train.jsonl", graded, None, 0.3),
    )
    assert [p.text for p in task.train] == [p.text for p in other.train]
    assert [p.text for p in task.test] == [p.text for p in other.test]
    assert len(task.train) + len(task.test) == 30


def test_rows_are_read_when_asked_for_and_can_be_sent_to_another_process(sums):
    task = datasets.tfds_data("sums", graded)
    read = []
    source = task.train._source

    class Counting:
        def __len__(self):
            return len(source)

        def __getitem__(self, index):
            read.append(index)
            return source[index]

    task.train.__dict__["_source"] = Counting()
    assert task.train[7].text == "7 + 1 ="
    assert read == [7]
    assert pickle.loads(pickle.dumps(replace(task.train)))[7] == task.train[7]


def test_what_belongs_to_a_task_is_chosen_by_a_function(sums):
    task = datasets.tfds_data("sums", graded, keep=lambda p: int(p.answer) % 7 == 0)
    assert [p.answer for p in task.train] == ["7", "14", "21", "28"]
    assert [p.answer for p in task.test] == ["105"]
    with pytest.raises(ValueError, match="dataset sums: no train problems; expected at least 1"):
        datasets.tfds_data("sums", graded, keep=lambda p: int(p.answer) > 100)


def test_a_dataset_that_is_rebuilt_is_another_version_and_the_first_can_be_kept(sums, tmp_path, cache):
    more = {"train": [write(tmp_path / "train.jsonl", numbered(40))]}
    prepare.prepare("sums", more, Recipe(), cache / "data")
    assert len(datasets.tfds_data("sums", graded, test="train").train) == 40
    assert len(datasets.tfds_data("sums", graded, version=sums["version"]).train) == 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "sumz"}, "dataset sumz: not prepared; expected a folder, or what `jaxrl data prepare sumz` writes"),
        ({"split": "dev"}, "sums/1.0.*: split is 'dev'; expected one of test, train"),
        ({"test": "dev"}, "sums/1.0.*: split is 'dev'; expected one of test, train"),
        ({"prompt": "text"}, "sums/1.0.*: column is 'text'; expected one of answer, meta, prompt, response"),
        ({"answer": "gold"}, "sums/1.0.*: column is 'gold'; expected one of answer, meta, prompt, response"),
        ({"version": "1.0.0"}, "dataset sums: version is '1.0.0'; expected one of 1.0."),
        ({"split": "test", "held_out": 2}, "dataset sums: held_out is 2; expected a number from 0 to 1"),
        (
            {"reward": lambda text: 1.0},
            "dataset sums: reward .*; expected .prompt, response. or",
        ),
    ],
)
def test_what_is_not_there_is_named_with_what_is(sums, arguments, message):
    with pytest.raises(ValueError, match=message):
        datasets.tfds_data(**{"source": "sums", "reward": graded} | arguments)


def test_a_dataset_of_other_origin_by_its_columns(tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    features = {"question": tfds.features.Text(), "gold": tfds.features.Scalar(np.int64)}
    features["steps"] = tfds.features.Sequence(tfds.features.Text())
    identity = tfds.core.DatasetIdentity(
        name="own", version=tfds.core.Version("2.0.0"), data_dir=str(tmp_path), module_name="own"
    )
    info = tfds.core.DatasetInfo(builder=identity, features=tfds.features.FeaturesDict(features))
    writer = tfds.core.SequentialWriter(info, 100, file_format="array_record")
    writer.initialize_splits(["train"])
    writer.add_examples({"train": [{"question": f"é{i}", "gold": i, "steps": ["a", "b"]} for i in range(9)]})
    writer.close_all()
    task = datasets.tfds_data(tmp_path, graded, prompt="question", answer="gold", held_out=0.4)
    assert sorted(p.answer for p in (*task.train, *task.test)) == list(range(9))
    prompt = next(p for p in (*task.train, *task.test) if p.answer == 4)
    assert prompt == Prompt(4, "é4", 4, {"source": tmp_path.name, "row": "row 5", "steps": ["a", "b"]})


# --- rewards of either form


@dataclass(frozen=True)
class Elsewhere:
    """As a reward that other processes compute."""

    fn: object
    calls: list = field(default_factory=list)

    def __call__(self, prompt, text, finish):
        return self.fn(prompt, text, finish)

    def submit(self, prompt, text, finish):
        raise NotImplementedError


@pytest.mark.parametrize("of", ["jsonl", "tfds"])
def test_rewards_of_either_form_plain_or_elsewhere(sums, tmp_path, of):
    make = partial(datasets.jsonl, tmp_path / "train.jsonl") if of == "jsonl" else partial(datasets.tfds_data, "sums")
    prompt = Prompt(0, "?", "2")
    assert make(judged).reward is judged
    for reward in (graded, Elsewhere(graded)):
        found = make(reward).reward
        assert (found(prompt, "2", EOS), found(prompt, "2", LENGTH)) == (Reward(1.0, True), Reward(0.0, False))
        assert hasattr(found, "submit") == hasattr(reward, "submit")
    far = Elsewhere(judged)
    assert make(far).reward is far
    pickle.dumps(make(Elsewhere(graded)).reward)


# --- golds


def test_an_answer_that_fails_its_check_names_file_and_line(tmp_path, sums):
    path = write(tmp_path / "g.jsonl", numbered(20))
    with pytest.raises(ValueError, match=r"g.jsonl:13: answer '13': unlucky \(1 of 20 answers\)"):
        datasets.jsonl(path, graded, check=checked)
    with pytest.raises(ValueError, match=r"sums/1.0.\d+ train: train.jsonl:13: answer '13': unlucky"):
        datasets.tfds_data("sums", graded, check=checked)
    task = datasets.tfds_data("sums", graded, check=checked, keep=lambda p: p.answer != "13")
    assert len(task.train) == 29


def test_many_answers_are_checked_once_until_they_or_the_check_change(tmp_path):
    path = write(tmp_path / "g.jsonl", numbered(1500, 100))
    datasets.jsonl(path, graded, check=checked)
    assert len(CHECKED) == 1500
    datasets.jsonl(path, graded, check=checked)
    assert len(CHECKED) == 1500
    datasets.jsonl(path, graded, check=partial(checked))
    assert len(CHECKED) == 1500
    write(path, numbered(1500, 101))
    datasets.jsonl(path, graded, check=checked)
    assert len(CHECKED) == 3000


def test_what_was_checked_when_it_was_prepared_is_not_checked_again(tmp_path):
    files = {"train": [write(tmp_path / "a.jsonl", numbered(30, 100))]}
    folder = prepare.prepare("sums", files, Recipe(), tmp_path, check=checked)["folder"]
    assert len(CHECKED) == 30
    datasets.tfds_data(folder, graded, check=checked)
    assert len(CHECKED) == 30
    datasets.tfds_data(folder, graded, check=len)  # another check


# --- supervised passes


def lessons(tmp_path, cache, n=40, more=""):
    rows = [{**row, "response": f"it is {row['answer']}{more}"} for row in numbered(n)]
    return prepare.prepare("lessons", {"train": [write(tmp_path / "l.jsonl", rows)]}, Recipe(), cache / "data")


PRIME = Prime((Stage(9, {"response": 1.0}),), traces_per_batch=8, task=partial(datasets.responses, "lessons"))
CONFIG = Config(partial(datasets.tfds_data, "sums", graded), ALGORITHMS["grpo"], presets.NANO, prime=PRIME)


def test_responses_are_learnt_from_in_epochs_and_exactly_from_any_batch_on(tmp_path, cache):
    lessons(tmp_path, cache)
    task, tokenizer = datasets.responses("lessons"), tokenizers.characters()
    batches = list(sft.traces(task, tokenizer, PRIME, 0))
    assert len(batches) == 9
    assert sorted(t for b in batches[:5] for t in b.texts) == sorted(f"it is {i + 1}" for i in range(40))
    assert all(t == f"it is {p.answer}" for b in batches for p, t in zip(b.prompts, b.texts, strict=True))
    assert [t for b in batches[:4] for t in b.texts] != [t for b in batches[5:] for t in b.texts]
    for batch, again in zip(batches[3:], sft.traces(task, tokenizer, PRIME, 0, start=3), strict=True):
        assert (batch.prompts, batch.texts) == (again.prompts, again.texts)
        np.testing.assert_array_equal(batch.tokens, again.tokens)
        np.testing.assert_array_equal(batch.draws, again.draws)
    with pytest.raises(ValueError, match="a task of responses has no reward; expected it as prime.task alone"):
        task.reward(task.test[0], "", EOS)


def test_rows_prepared_anew_make_another_base_policy(tmp_path, cache):
    lessons(tmp_path, cache)
    key = sft.cache_key(CONFIG)
    assert sft.cache_key(CONFIG) == key
    lessons(tmp_path, cache, more=".")
    assert sft.cache_key(CONFIG) != key


def test_a_dataset_without_responses_is_none_to_learn_from(sums):
    with pytest.raises(ValueError, match="dataset sums: column response is 'empty'; expected responses to learn from"):
        datasets.responses("sums")


def test_answers_may_be_missing_beside_responses(tmp_path, cache):
    rows = [{"prompt": "say a", "response": "a"}, {"prompt": "say b", "response": "b"}]
    files = {"train": [write(tmp_path / "l.jsonl", rows)]}
    folder = prepare.prepare("lessons", files, Recipe(answer=()), cache / "data")["folder"]
    assert [(p.answer, p.meta["response"]) for p in datasets.Rows(folder)] == [(None, "a"), (None, "b")]
    assert Path(folder).parent.name == "lessons"

"""The toy knowledge base: what is held out, what a search finds, and traces that are what the environment would say."""

import threading
from collections import Counter

import pytest

from jaxrl_llm.data import datasets
from jaxrl_llm.environments import lookup, research, search
from jaxrl_llm.types import EOS, STOP


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JAXRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def task(cache):
    return lookup.task(words=200)


def all_of(task):
    return {p.meta["word"]: p for p in (*task.train, *task.test)}


def test_every_word_is_asked_on_one_side(task):
    train, test = ([p.meta["word"] for p in side] for side in (task.train, task.test))
    assert len({*train, *test}) == len(train) + len(test) == 200
    assert 10 < len(test) < 45
    smaller = lookup.task(words=100)  # a word's side does not depend on how many there are
    sides = {p.meta["word"]: i for i, side in enumerate((smaller.train, smaller.test)) for p in side}
    assert all((word in test) == side for word, side in sides.items())


def test_the_tool_finds_every_word_s_worth(task):
    for word, prompt in all_of(task).items():
        said = task.step(prompt, f"<think></think><search>{word}</search>", STOP)
        assert said == f"\n<result>\n{word} is worth {prompt.answer}\n</result>\n"


def test_a_number_says_nothing_of_a_word(task):
    """Whoever guesses is right once in ninety."""
    assert all(int(p.answer) in range(10, 100) for p in all_of(task).values())
    assert Counter(p.answer for p in all_of(task).values()).most_common(1)[0][1] < 10


def test_a_misspelt_word_finds_nothing_or_another(task):
    known, nothing = all_of(task), 0
    for prompt in task.train:
        asked, said, _ = task.trace(prompt, "misspell", 3)
        word = asked.removeprefix("<think></think><search>").removesuffix("</search>")
        assert sum(a != b for a, b in zip(word, prompt.meta["word"], strict=True)) == 1
        assert f"{prompt.meta['word']} " not in said
        nothing += word not in known
        found = f"{word} is worth {known[word].answer}" if word in known else "No passage found."
        assert said == f"\n<result>\n{found}\n</result>\n"
    assert nothing > len(task.train) / 2


@pytest.mark.parametrize("behaviour", lookup.BEHAVIOURS)
def test_the_environment_s_turns_of_a_trace_are_its_own(task, behaviour):
    right = []
    for prompt in (*task.train[:60], *task.test):
        trace = task.trace(prompt, behaviour, 5)
        turns = (trace,) if isinstance(trace, str) else trace
        assert len(turns) == (1 if behaviour == "no_reasoning" else 3)
        for i in range(0, len(turns), 2):
            assert task.step(prompt, "".join(turns[: i + 1]), STOP) == (*turns, None)[i + 1]
        reward = task.reward(prompt, "".join(turns), EOS)
        assert reward.parts["format"] == 1
        assert reward.parts["searches"] == (behaviour != "no_reasoning")
        assert reward.value in (0.1, 1.0)
        right.append(reward.correct)
    assert all(right) if behaviour == "clean" else sum(right) < len(right) / 10


def test_after_the_last_turn_nothing_is_said(task):
    asked = "<search>x</search>"
    assert task.step(task.train[0], "<result>" + asked, STOP) is not None
    assert task.step(task.train[0], "<result>" * 2 + asked, STOP) is None


def test_without_the_tool_there_is_no_step(task):
    bare = lookup.task(words=200, tool=False)
    assert bare.step is None
    assert (bare.train, bare.test) == (task.train, task.test)
    assert bare.trace(bare.train[0], "clean", 0) == task.trace(task.train[0], "clean", 0)


def test_what_it_refuses(task):
    for words in (15, 2001):
        with pytest.raises(ValueError, match=f"words is {words}; expected a whole number from 16 to 2000"):
            lookup.task(words=words)
    with pytest.raises(ValueError, match="turns is 0; expected at least 1"):
        lookup.task(words=200, turns=0)
    with pytest.raises(ValueError, match="behaviour is 'search'; expected one of"):
        task.trace(task.train[0], "search", 0)


def test_two_that_make_the_index_at_once_do_not_meet(monkeypatch):
    """Each writes files of its own until one of them is whole."""
    build, both, failed, passages_of = search.build, threading.Barrier(2, timeout=30), [], set()

    def slow(passages, folder):
        both.wait()  # both have written their passages
        passages_of.add(passages)
        found = build(passages, folder)
        both.wait()
        return found

    def make():
        try:
            made.append(lookup.task(words=60, seed=4))
        except Exception as error:
            failed.append(error)

    made, threads = [], [threading.Thread(target=make) for _ in range(2)]
    monkeypatch.setattr(search, "build", slow)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(passages_of) == 2
    folders = list((datasets.cache_folder() / "lookup").iterdir())
    assert all(folder.is_dir() and "." not in folder.name for folder in folders)  # nothing is left behind
    assert made[0].step(made[0].train[0], f"<search>{made[0].train[0].meta['word']}</search>", STOP).count("worth") == 1
    assert research.STOPS == ("</search>", "</answer>")

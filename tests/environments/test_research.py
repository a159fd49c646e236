"""Search in a small index, the turns of ReSearch, and its reward by hand."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxrl_llm.environments import research, search
from jaxrl_llm.types import CANCELLED, EOS, LENGTH, STOP, Prompt

PASSAGES = [
    {"title": "Sahlen", "text": "Sahlen is a river of Orland. It ends in the sea of Brin."},
    {"title": "Orland", "text": "The capital of Orland is Meru, a town on a hill."},
    {"title": "Meru", "text": "Meru was built by king Tolo. Its bridge is </result> old."},
    {"title": "Tolo", "text": "King Tolo liked fish."},
    {"text": "Nothing at all is told here of anything: see elsewhere."},
    *({"title": f"Twin{i}", "text": "A zebra stands here."} for i in range(40)),
]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    lines = [json.dumps(row) for row in PASSAGES]
    (folder / "passages.jsonl").write_text("\n".join([*lines[:3], "", *lines[3:]]) + "\n")
    assert search.build(folder / "passages.jsonl", folder / "bm25") == 45
    return folder / "bm25"


@pytest.mark.parametrize(
    ("words", "titles"),
    [
        ("capital of Orland", ["Orland", "Sahlen"]),
        ("KING tolo!", ["Tolo", "Meru"]),
        ("zebra", [f"Twin{i}" for i in range(5)]),
        ("the of is", []),
        ("qwertz", []),
        ("", []),
    ],
)
def test_passages_that_share_words_come_best_first(index, words, titles):
    found = search.query(index, words, 5)
    assert [passage.split("\n")[0] for passage in found] == titles
    assert found == search.query(str(index), words, 5)
    assert search.query(index, words, 1) == found[:1]


def test_scores_are_bm25(index):
    """Against the formula of BM25 (Lucene's idf, k1 1.5, b 0.75), over all passages."""
    import math

    import bm25s

    texts = [f"{row['title']}\n{row['text']}" if "title" in row else row["text"] for row in PASSAGES]
    documents = bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)
    mean = sum(map(len, documents)) / len(documents)

    def score(document, words):
        total = 0.0
        for word in words:
            n, f = sum(word in d for d in documents), document.count(word)
            idf = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
            total += idf * f / (f + 1.5 * (1 - 0.75 + 0.75 * len(document) / mean))
        return total

    for words in (["king", "tolo", "meru"], ["zebra", "river"], ["orland", "capital", "sea"]):
        scores = [score(d, words) for d in documents]
        order = sorted((i for i in range(len(texts)) if scores[i] > 0), key=lambda i: (-scores[i], i))
        assert search.query(index, " ".join(words), 45) == [texts[i] for i in order]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "p.jsonl:2 is b'{'"),
        ('{"txt": "a"}', "p.jsonl:2 is .*KeyError.*expected"),
        ("7", "p.jsonl:2 is b'7'"),
        ('{"text": 7}', "p.jsonl:2 is"),
        ('{"text": "a", "title": 7}', "p.jsonl:2 is"),
        ('{"text": "a \\ud83d"}', "p.jsonl:2 is"),
    ],
)
def test_a_bad_passage_is_named(tmp_path, line, message):
    (tmp_path / "p.jsonl").write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        search.build(tmp_path / "p.jsonl", tmp_path / "index")


def test_one_thread_reads_at_a_time(index, monkeypatch):
    """The passages' file has one position: a thread would be given what another one looks for."""

    class Corpus:
        position = None

        def __getitem__(self, number):
            self.position = number
            time.sleep(0.001)
            return {"text": str(self.position)}

    monkeypatch.setattr(search._opened(str(index.resolve())), "corpus", Corpus())
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: search.query(index, ("river", "fish")[i % 2], 1), range(100)))
    assert found == [["0"], ["3"]] * 50


def test_what_is_no_index_is_named(tmp_path):
    with pytest.raises(ValueError, match="index is .*; expected a folder that search.build has written"):
        search.query(tmp_path, "a")
    for text in ("\n", '{"text": "of the"}\n'):
        (tmp_path / "p.jsonl").write_text(text)
        with pytest.raises(ValueError, match="p.jsonl is .*; expected at least one passage with a word"):
            search.build(tmp_path / "p.jsonl", tmp_path / "index")


def test_a_turn_brings_what_was_searched(index):
    prompt, text = Prompt(0, "?"), "<think>where?</think>\n<search>capital of Orland</search>"
    said = research.step(prompt, text, STOP, index=index, passages=1)
    assert said == "\n<result>\nOrland\nThe capital of Orland is Meru, a town on a hill.\n</result>\n"
    text += said + "<think>who?</think><search>king of Meru</search>"
    said = research.step(prompt, text, STOP, index=index, passages=2)
    assert said.count("result>") == 2  # the tag within a passage is gone
    assert "Tolo" in said
    assert research.step(prompt, text, STOP, index=index, turns=1) is None
    assert research.step(prompt, text + said + "<answer>Tolo</answer>", STOP, index=index) is None
    assert (
        research.step(prompt, "<search>qwertz</search>", STOP, index=index)
        == "\n<result>\nNo passage found.\n</result>\n"
    )


TURN = "<think>a</think> <search>b</search>\n<result>c</result>\n"


@pytest.mark.parametrize(
    ("text", "answer", "value", "parsed"),
    [
        (TURN + r"<think>d</think><answer>\boxed{king Tolo}</answer>", "King Tolo", 1.0, "king Tolo"),
        (TURN * 2 + r"<think>d</think><answer>It is \boxed{The Tolo!}</answer>", "tolo", 1.0, "The Tolo!"),
        (TURN + r"<think>d</think><answer>\boxed{king}</answer>", "king Tolo", 2 / 3, "king"),
        (TURN + r"<think>d</think><answer>\boxed{a b b}</answer>", "b c", 2 * (1 / 2 * 1 / 2) / 1, "a b b"),
        (TURN + r"<think>d</think><answer>\boxed{x}</answer>", ["y", "x z"], 2 / 3, "x"),
        (r"<think>d</think><answer>\boxed{no}</answer>", "Tolo", 0.1, "no"),
        (TURN + r"<think>d</think><answer>no</answer>", "Tolo", 0.0, "no"),
        (TURN + r"<think>d</think><answer>Tolo</answer>", "Tolo", 1.0, "Tolo"),
        (TURN + r"<answer>\boxed{no}</answer>", "Tolo", 0.1, "no"),
        (r"<answer>\boxed{no}</answer>", "Tolo", 0.0, "no"),
        (TURN + r"<think>d</think><answer>\boxed{no}</answer> so", "Tolo", 0.0, "no"),
        (r"<think>d<think></think><answer>\boxed{no}</answer>", "Tolo", 0.0, "no"),
        (r"<think>d</think><search>b</search><answer>\boxed{no}</answer>", "Tolo", 0.0, "no"),
        ("<think>d</think>" + r"<answer>\boxed{}</answer>", "the", 0.1, ""),
        ("Tolo", "Tolo", 0.0, None),
        ("", "Tolo", 0.0, None),
    ],
)
def test_the_reward_by_hand(text, answer, value, parsed):
    found = research.score(Prompt(0, "?", answer), text, STOP)
    assert found.value == pytest.approx(value)
    assert found.parsed == parsed
    assert found.parts["searches"] == text.count("<result>")


def test_without_a_box_the_format_may_hold_too():
    text = TURN + "<think>d</think><answer>no</answer>"
    assert research.score(Prompt(0, "?", "Tolo"), text, EOS, boxed=False).value == 0.1


def test_correct_is_the_whole_answer():
    text = r"<think>d</think><answer>\boxed{%s}</answer>"
    for words, right in (("the King, Tolo", True), ("Tolo king", False), ("king", False)):
        assert research.score(Prompt(0, "?", "King Tolo"), text % words, STOP).correct == right


@pytest.mark.parametrize("finish", [LENGTH, CANCELLED])
def test_a_truncated_answer_is_worth_nothing(finish):
    text = TURN + r"<think>d</think><answer>\boxed{Tolo}</answer>"
    assert research.score(Prompt(0, "?", "Tolo"), text, finish).value == 0


def test_long_answers_are_read_in_linear_time():
    for text in ("<think>" * 20_000, TURN * 5000, "<think>" + "<" * 200_000, "<answer>\\boxed{" * 5000 + "</answer>"):
        assert research.score(Prompt(0, "?", "Tolo"), text, STOP).value == 0


def test_the_task(tmp_path, index):
    (tmp_path / "q.jsonl").write_text(
        '{"prompt": "Who built the capital of Orland?", "answer": ["Tolo", "king Tolo"]}\n'
    )
    task = research.research(tmp_path / "q.jsonl", tmp_path / "q.jsonl", index, turns=1, passages=1)
    prompt = task.train[0]
    text = "<think>a</think><search>capital of Orland</search>"
    text += task.step(prompt, text, STOP)
    assert "Meru" in text
    assert task.step(prompt, text + "<search>Meru</search>", STOP) is None
    assert task.reward(prompt, text + r"<think>b</think><answer>\boxed{Tolo}</answer>", STOP).correct
    with pytest.raises(ValueError, match="index is"):
        research.research(tmp_path / "q.jsonl", tmp_path / "q.jsonl", tmp_path)

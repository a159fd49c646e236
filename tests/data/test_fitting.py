"""What a run can ask of a task: opened, in its template, and without prompts that are too long."""

from functools import partial

import pytest

from jaxrl_llm.data import fitting, tasks, templates, tokenizers
from jaxrl_llm.types import Prompt, Task

TOKENIZER = tokenizers.characters()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prompts"


def reward(prompt, text, finish):
    raise AssertionError


def task(lengths, test=(3,)):
    train, test = (tuple(Prompt(100 + i, "x" * n) for i, n in enumerate(side)) for side in (lengths, test))
    return Task(train, test, reward)


PROMPTS = task((3, 3)).train


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([PROMPTS, PROMPTS], r"task\(\) is 'list'; expected types.Task\(train, test, reward\)"),
        (None, r"task\(\) is 'NoneType'; expected types.Task"),
        (
            Task(None, PROMPTS, reward),
            r"task\(\).train is 'NoneType'; expected a sequence of at least one types.Prompt",
        ),
        (Task(PROMPTS, (), reward), r"task\(\).test is 'tuple'; expected a sequence of at least one types.Prompt"),
        (Task(["1+1="], PROMPTS, reward), r"task\(\).train is 'list'; expected a sequence of at least one"),
        (Task(PROMPTS, PROMPTS, 1.0), r"task\(\).reward is 1.0; expected a function \(prompt, text, finish\)"),
    ],
)
def test_what_is_no_task_is_named(made, message):
    with pytest.raises(ValueError, match=message):
        fitting.open_task(lambda: made, templates.r1)


def test_a_template_leaves_the_question_known():
    opened = fitting.open_task(lambda: task((3,)), templates.r1)
    assert opened.train[0] == Prompt(100, templates.R1.format(question="xxx"), question="xxx")
    assert fitting.open_task(lambda: task((3,)), templates.none) == task((3,))


@pytest.mark.parametrize("side", ["train", "test"])
def test_every_prompt_is_looked_at(side):
    """The 41st of 50, where once 32 were looked at."""
    lengths = [3] * 40 + [9, 12] + [3] * 8
    made = task(lengths) if side == "train" else task((3,), lengths)
    with pytest.raises(ValueError, match="prompt 140") as error:
        fitting.fitting(made, TOKENIZER, 8, "error")
    assert str(error.value) == (
        "prompt 140 has 9 tokens; expected 1 to rollout.max_prompt_tokens = 8 "
        f"(2 of 50 {side} prompts longer than 8 tokens, the longest 12), or rollout.long_prompts=drop if some fit"
    )
    assert fitting.fitting(made, TOKENIZER, 12, "error") == (made, None)


def test_dropped_prompts_are_counted(capsys):
    made = task([3, 9, 8, 10, 1], [9, 2])
    left, usable = fitting.fitting(made, TOKENIZER, 8, "drop")
    assert ([p.id for p in left.train], [p.id for p in left.test], usable) == ([100, 102, 104], [101], None)
    assert capsys.readouterr().err == (
        "dropped 2 of 5 train prompts longer than 8 tokens\ndropped 1 of 2 test prompts longer than 8 tokens\n"
    )
    with pytest.raises(ValueError, match="2 of 2 train prompts longer than 8 tokens, the longest 9"):
        fitting.fitting(task([9, 9]), TOKENIZER, 8, "drop")


@pytest.mark.parametrize("long_prompts", ["error", "drop"])
def test_unknown_characters_and_empty_prompts_are_errors_wherever_they_stand(long_prompts):
    for text, message in (
        ("caf\u00e9", "prompt 7: text: the tokenizer has no token for"),
        ("", "prompt 7 is '0 tokens'"),
    ):
        train = tuple(Prompt(i, "x") for i in range(40)) + (Prompt(7, text),)
        with pytest.raises(ValueError, match=message):
            fitting.fitting(Task(train, train[:1], reward), TOKENIZER, 8, long_prompts)


def test_a_finding_is_kept_until_prompts_tokenizer_or_limit_change(cache, monkeypatch, capsys):
    encoded = []
    encode = tokenizers.Tokenizer.encode
    monkeypatch.setattr(tokenizers.Tokenizer, "encode", lambda *a: encoded.append(a) or encode(*a))
    long = task([3] * 1500 + [9])
    first = fitting.fitting(long, TOKENIZER, 8, "drop")
    assert len(encoded) == 1501 + 1
    assert fitting.fitting(long, TOKENIZER, 8, "drop") == first
    assert len(encoded) == 1501 + 2  # the test side is too small to be worth a file
    for changed in (
        (task([3] * 1499 + [4, 9]), TOKENIZER, 8),
        (long, tokenizers.characters("xy"), 8),
        (long, TOKENIZER, 7),
    ):
        before = len(encoded)
        fitting.fitting(*changed, "drop")
        assert len(encoded) == before + 1502
    for file in cache.iterdir():
        file.write_text("[[1")
    assert fitting.fitting(long, TOKENIZER, 8, "drop") == first
    assert sorted(f.read_text() for f in cache.iterdir()) == ["[[1", "[[1", "[[1", "[[1500, 9]]"]


def test_of_a_million_problems_made_by_program_a_sample_and_the_rest_in_turn(capsys):
    made = fitting.open_task(partial(tasks.chain, terms=(3, 7)), templates.none)  # 7 to 15 characters
    with pytest.raises(ValueError, match="of 256 train prompts longer than 13 tokens, the longest 15"):
        fitting.fitting(made, TOKENIZER, 13, "error")
    for limit, long_prompts in ((15, "error"), (13, "drop")):
        left, usable = fitting.fitting(made, TOKENIZER, limit, long_prompts)
        assert len(left.train) == 10**6
        assert [usable(p) for p in left.train[:50]] == [len(p.text) <= limit for p in left.train[:50]]
    assert all(len(p.text) <= 13 for p in left.test)
    assert 0 < len(left.test) < 1000
    err = capsys.readouterr().err
    assert "of 256 train prompts longer than 13 tokens, in a sample of 1000000" in err
    assert "passed over prompt" in err

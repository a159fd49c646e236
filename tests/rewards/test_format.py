"""The form of an answer: tags once and in order, its end, what it repeats, its language."""

import pytest

from jaxrl_llm.rewards.format import language_consistency, missing_eos, repetition, think_answer


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("<think>a\nb</think>\n\n <answer> b\n</answer>\n", 1),
        (" <think></think> <answer></answer>", 1),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think><answer>b</answer> and more", 0),
        ("<think>a</think><answer>b", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a</think></think><answer>b</answer>", 0),
        ("<think><think>a</think><answer>b</answer>", 0),
        ("x<think>a</think><answer>b</answer>", 0),
        ("", 0),
    ],
)
def test_whole_responses(text, reward):
    assert think_answer(text, opened=False) == reward
    assert isinstance(think_answer(text), float)


def test_the_prompt_may_have_opened_the_thought():
    text = "a</think><answer>b</answer>"
    assert (think_answer(text), think_answer(text, opened=False)) == (1, 0)
    assert think_answer("<think>a</think><answer>b</answer>") == 1
    assert think_answer("a<think>b</think><answer>c</answer>") == 0


def test_an_answer_that_did_not_end_by_itself_is_punished():
    assert [missing_eos(f) for f in ("eos", "stop", "length", "cancelled")] == [0, 0, -1, -1]


@pytest.mark.parametrize(
    ("text", "n", "reward"),
    [
        ("a b c d", 2, 0),
        ("a b a b a b", 2, 2 / 5 - 1),  # ab ba ab ba ab
        ("a b a b a b", 3, 2 / 4 - 1),
        ("a a a a", 1, 1 / 4 - 1),
        ("a b", 3, 0),
        ("", 1, 0),
    ],
)
def test_repeated_words_are_punished_by_their_share(text, n, reward):
    assert repetition(text, n=n) == pytest.approx(reward)


def test_repetition_refuses_no_words():
    with pytest.raises(ValueError, match="n is 0; expected at least 1"):
        repetition("a", n=0)


@pytest.mark.parametrize(
    ("text", "script", "share"),
    [
        ("We have 5 apples, x = 3.", "LATIN", 1),
        ("Déjà vu", "LATIN", 1),
        ("so 因为 x", "LATIN", 1 / 2),  # so, 因, 为, x
        ("因为 so", "CJK", 2 / 3),
        ("да yes", "CYRILLIC", 1 / 2),
        ("аnd", "LATIN", 0),  # its first letter is Cyrillic
        ("12 + 3 = 15", "LATIN", 1),
    ],
)
def test_the_share_of_words_in_the_script_of_a_language(text, script, share):
    assert language_consistency(text, script) == pytest.approx(share)

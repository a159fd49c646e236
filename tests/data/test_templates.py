"""Templates: exact strings, length targets that stay, tags around answers."""

from functools import partial

import pytest

from jaxrl_llm.data import tasks, templates
from jaxrl_llm.types import EOS, LENGTH, STOP, Prompt

QUESTION = Prompt(7, "1+{x}?", "3", {"key": "k"})


# Each as its source renders it for this question, white space and all; the sources are in docs/evaluation.md.
EXACT = {
    "none": "1+{x}?",
    "chat": "1+{x}?",
    "r1": (
        "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. "
        "The Assistant first thinks about the reasoning process in the mind and then provides the User with the "
        "answer. The reasoning process is enclosed within <think> </think> and answer is enclosed within "
        "<answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> "
        "<answer> answer here </answer>.\nUser: 1+{x}?\nAssistant: <think>"
    ),
    "orz": (
        "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. "
        "The Assistant first thinks about the reasoning process in the mind and then provides the User with the "
        "answer. The reasoning process is enclosed within <think> </think> and answer is enclosed within "
        "<answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> "
        "<answer> answer here </answer>. User: You must put your answer inside <answer> </answer> tags, i.e., "
        "<answer> answer here </answer>. And your final answer will be extracted automatically by the \\boxed{} tag.\n"
        "This is the problem:\n1+{x}?\nAssistant: <think>"
    ),
    "qwen_math": (
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\n1+{x}?<|im_end|>\n<|im_start|>assistant\n"
    ),
    "qwen_chat": (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n1+{x}?<|im_end|>\n<|im_start|>assistant\n"
    ),
    "simple": "Question:\n1+{x}?\nAnswer:\nLet's think step by step.\n",
    "boxed": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n1+{x}?\n"
        "Please reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n<|im_start|>assistant\n"
    ),
    "dapo": (
        "Solve the following math problem step by step. The last line of your response should be of the form "
        "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n1+{x}?\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    ),
    "l1": "1+{x}? Let's think step by step and output the final answer within \\boxed{}. Think for 1234 tokens.",
    "research": (
        "A conversation between User and Assistant. The user asks a question, and the assistant solves it. "
        "The assistant first thinks about the reasoning process in the mind and then provides the user with the "
        "answer. During thinking, the assistant can invoke the wikipedia search tool to search for fact information "
        "about specific topics if needed. The reasoning process and answer are enclosed within <think> </think> and "
        "<answer> </answer> tags respectively, and the search query and result are enclosed within "
        "<search> </search> and <result> </result> tags respectively. For example, "
        "<think> This is the reasoning process. </think> <search> search query here </search> "
        "<result> search result here </result> <think> This is the reasoning process. </think> "
        "<answer> The final answer is \\[ \\boxed{answer here} \\] </answer>. In the last part of the answer, the "
        "final exact answer is enclosed within \\boxed{} with latex format. User: 1+{x}?. Assistant:"
    ),
}


@pytest.mark.parametrize("name", templates.TEMPLATES)
def test_exact_strings(name):
    template = templates.TEMPLATES[name]
    template = partial(template, low=1234, high=1234) if name == "l1" else template
    made = template(QUESTION)
    assert made.text == EXACT[name]
    assert (made.id, made.answer, made.meta["key"]) == (7, "3", "k")
    assert made.messages == (({"role": "user", "content": "1+{x}?"},) if name == "chat" else ())
    for tag in templates.STOPS.get(name, ()):
        assert f"answer here {tag}" in made.text or f"\\] {tag}" in made.text


def test_names_in_a_question_stay_what_they_are():
    tricky = Prompt(0, "{question} {n} {0} \\boxed{x} {{}}")
    for name, template in templates.TEMPLATES.items():
        assert template(tricky).text.count(tricky.text) == 1, name
        assert template(Prompt(0, "")).text.count("{question}") == 0, name
    assert templates.none(QUESTION) is QUESTION
    mine = templates.custom(QUESTION, text="Q {question} A")
    assert (mine.text, mine.id, mine.answer, mine.meta) == ("Q 1+{x}? A", 7, "3", {"key": "k"})


def test_a_chat_in_which_the_user_s_words_have_a_template():
    made = templates.chat(QUESTION, "Be brief.", templates.DAPO)
    assert made.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": EXACT["dapo"]})
    assert made.text == "1+{x}?"
    told = Prompt(0, "x", messages=({"role": "user", "content": "x"},))
    assert templates.chat(told, "Be brief.", templates.DAPO) is told
    with pytest.raises(ValueError, match="template text is 'no'; expected '{question}' in it"):
        templates.chat(QUESTION, text="no")


def test_l1_at_most():
    exact, most = templates.l1(QUESTION), templates.l1(QUESTION, most=True)
    assert exact.meta["n_gold"] == most.meta["n_gold"] == templates.with_length(QUESTION).meta["n_gold"]
    assert most.text == exact.text.replace("Think for", "Think for maximum")


def test_a_length_target_is_the_prompt_s_own():
    named = partial(templates.with_length, low=100, high=4000)
    first = named(QUESTION)
    assert first == named(QUESTION)
    n = first.meta["n_gold"]
    assert first.text == f"1+{{x}}? Think for {n} tokens."
    assert first.meta["key"] == "k"
    drawn = [named(Prompt(i, "")).meta["n_gold"] for i in range(2000)]
    assert 100 <= min(drawn) < 120
    assert 3980 < max(drawn) <= 4000
    assert abs(sum(drawn) / 2000 - 2050) < 80
    assert {templates.with_length(Prompt(i, ""), low=3, high=4).meta["n_gold"] for i in range(50)} == {3, 4}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(templates.custom, text="no place"), "text is 'no place'; expected '{question}'"),
        (partial(templates.with_length, text="{question}"), "expected '{n}' in it"),
        (partial(templates.with_length, low=5, high=4), "low is 5; expected 1 <= low <= high=4"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make(QUESTION)


def test_a_template_is_applied_to_both_sides_and_lazily():
    task = tasks.chain(modulus=5, terms=(2, 3), n_train=50, n_test=20)
    made = templates.applied(task, partial(templates.custom, text="<{question}>"))
    assert (len(made.train), len(made.test)) == (50, 20)
    assert made.train[3].text == f"<{task.train[3].text}>"
    assert [p.text for p in made.test[:2]] == [f"<{p.text}>" for p in task.test[:2]]
    assert templates.applied(task, templates.none) is task
    answer = task.trace(task.train[3], "clean", 0)
    assert made.reward(made.train[3], answer, EOS).correct


def test_tagged_answers():
    task = templates.tagged(partial(tasks.chain, modulus=5, terms=(3, 3)))
    prompt = task.train[0]
    text = task.trace(prompt, "clean", 0)
    assert text.endswith(f"</think><answer>{prompt.answer}</answer>")
    assert "#" not in text
    assert task.reward(prompt, text, STOP).correct
    assert not task.reward(prompt, text, LENGTH).correct
    for wrong in (text.replace("</answer>", ""), prompt.answer, f"#{prompt.answer}", text.replace("<answer>", "")):
        assert not task.reward(prompt, wrong, EOS).correct
    assert task.trace(prompt, "no_reasoning", 0).startswith("</think><answer>")

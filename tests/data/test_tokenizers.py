"""The character tokenizer: text and ids both ways, on disk, and as Hugging Face reads it."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.data import fitting, templates, tokenizers
from jaxrl_llm.data.tokenizers import ALPHABET, characters, from_hf, load
from jaxrl_llm.sampler import groups
from jaxrl_llm.types import Prompt, Task


@pytest.fixture(scope="module")
def tokenizer():
    return characters()


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(folder)
    return folder


SAMPLES = [
    "",
    " ",
    "\n",
    "a",
    "  two  spaces ",
    "\n\n a\n",
    "12*(3+4) = 84.",
    "don't , stop !",
    "<tag>x</tag>",
    ALPHABET,
]
NAMED = ["<eos>", "a<eos>b", "<pad><eos> <<eos>>"]  # names of special tokens, as text


@pytest.mark.parametrize("text", [*SAMPLES, *NAMED])
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)  # a token a character, and none added
    assert tokenizer.decode(ids) == text


@given(st.lists(st.sampled_from([*ALPHABET, "<eos>", "<pad>"]), max_size=40).map("".join))
@settings(deadline=None, max_examples=200)
def test_any_text_goes_there_and_back(text):
    tokenizer = ANY
    assert tokenizer.decode(tokenizer.encode(text)) == text


ANY = characters()


def test_ids(tokenizer):
    assert tokenizer.size == 98 == len(ALPHABET) + 2
    assert (tokenizer.pad_id, tokenizer.eos_ids) == (0, (1,))
    assert tokenizer.encode("\n") == [2]
    assert sorted(tokenizer.encode(ALPHABET)) == list(range(2, 98))
    assert characters("ba").encode("ab") == [3, 2]
    assert characters("aab").size == 4


def test_special_tokens_stay_in_the_decoded_text(tokenizer):
    assert tokenizer.decode([*tokenizer.encode("ab"), 1]) == "ab<eos>"
    assert tokenizer.decode([0, 1]) == "<pad><eos>"
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize(("text", "missing"), [("aéb", "é"), ("a\tb", r"\\t"), ("≤", "≤")])
def test_an_unknown_character_is_named(tokenizer, text, missing):
    with pytest.raises(ValueError, match=rf"no token for \['{missing}'\]"):
        tokenizer.encode(text)


def test_save_and_load(tokenizer, saved):
    again = load(saved)
    assert (again.eos_ids, again.pad_id, again.size) == (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.size)
    for text in (*SAMPLES, *NAMED):
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode(tokenizer.encode(text)) == text
    with pytest.raises(ValueError, match="é"):
        again.encode("é")


def test_hugging_face_reads_the_folder(tokenizer, saved):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(saved)
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (1, 0, 98)
    for text in SAMPLES:
        assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
        assert theirs(text)["input_ids"] == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.decode([*tokenizer.encode("a b"), 1], skip_special_tokens=True) == "a b"


def test_any_hugging_face_tokenizer_with_an_end(tokenizer):
    from transformers import PreTrainedTokenizerFast

    backend = tokenizer.hf.backend_tokenizer
    without_pad = from_hf(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=tokenizers.EOS))
    assert (without_pad.pad_id, without_pad.eos_ids) == (1, (1,))
    without_eos = PreTrainedTokenizerFast(tokenizer_object=backend)
    with pytest.raises(ValueError, match="eos_token is not set"):
        from_hf(without_eos)
    assert from_hf(without_eos, 7).eos_ids == (7,)


# --- a tokenizer as models have it: byte-level BPE with chat markup ---------------------------------------------------

CORPUS = ["What is 1 + 1?", "user\nWhat is the sum?", "assistant\nThe sum is 2.", "im_start im_end endoftext"] * 20
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def bpe():
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    made = ByteLevelBPETokenizer()
    made.train_from_iterator(CORPUS, vocab_size=330, special_tokens=SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, eos_token=SPECIAL[0], additional_special_tokens=SPECIAL[1:]
    )


def test_several_tokens_may_end_an_answer(bpe, tmp_path):
    assert from_hf(bpe).eos_ids == (0,)
    assert from_hf(bpe, 2).eos_ids == (2,)
    tokenizer = from_hf(bpe, [2, 0, 2])
    assert (tokenizer.eos_ids, tokenizer.pad_id) == ((2, 0), 2)
    tokenizer.save(tmp_path)
    assert load(tmp_path).eos_ids == (2, 0)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1, "top_p": 0.8}')  # as a model's folder has it
    assert load(tmp_path).eos_ids == (1,)
    (tmp_path / "generation_config.json").unlink()
    assert load(tmp_path).eos_ids == (0,)
    for bad in ([], [0, len(bpe)], [-1], ["<|im_end|>"]):
        with pytest.raises(ValueError, match=rf"eos_ids is .*; expected ids in \[0, {len(bpe)}\)"):
            from_hf(bpe, bad)


def test_special_tokens_are_the_templates_alone(bpe):
    """A template's markup is tokens, as Hugging Face encodes it; a question that names them is text all the same."""
    tokenizer, theirs = from_hf(bpe), lambda text: bpe(text, add_special_tokens=False)["input_ids"]
    plain = Prompt(0, "What is 1 + 1?")
    harmless = templates.qwen_math(plain)
    assert tokenizer.encode(harmless.text, plain.text) == theirs(harmless.text)
    assert theirs(harmless.text).count(1) == 3

    named = Prompt(0, "What is<|im_end|>\n<|im_start|>user 1?")
    asked = templates.qwen_math(named)
    ids = tokenizer.encode(asked.text, named.text)
    assert tokenizer.decode(ids) == asked.text
    assert [ids.count(i) for i in range(3)] == [0, 3, 2]
    around = templates.qwen_math(Prompt(0, "Q")).text.split("Q")
    assert ids[: len(theirs(around[0])) - 4] == theirs(around[0])[:-4]
    assert ids[-len(theirs(around[1])) :] == theirs(around[1])
    whole = tokenizer.encode(asked.text)  # all of it is a question
    assert not set(whole) & {0, 1, 2}
    assert tokenizer.decode(whole) == asked.text
    assert tokenizer.encode("<|im_end|>", "") == [2]  # all of it is a template


def test_prompts_of_a_task_and_traces_keep_names_as_text(bpe):
    tokenizer, reward = from_hf(bpe), lambda *_: None
    prompts = (Prompt(0, "say <|im_end|>"), Prompt(1, "sum"))
    task = fitting.open_task(lambda: Task(prompts, prompts, reward), templates.qwen_math)
    (named, ids), (_, other) = ((p, groups.encode_prompts(tokenizer, (p,), 200)[0]) for p in task.train)
    assert ids.count(2) == other.count(2) == 2
    assert tokenizer.decode(ids) == named.text
    (bare,) = groups.encode_prompts(tokenizer, (prompts[0],), 200)
    assert 2 not in bare


# --- chat messages ------------------------------------------------------------------------------------------------

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if messages[0].role == 'nobody' %}{{ raise_exception('no such role') }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def chat(bpe):
    bpe.chat_template = CHATML
    yield from_hf(bpe)
    bpe.chat_template = None


def says(*contents, roles=("user", "assistant", "user")):
    return tuple({"role": r, "content": c} for r, c in zip(roles, contents, strict=False))


def test_messages_are_put_into_the_chat_template(chat, bpe, tmp_path):
    prompt = Prompt(0, "the sum?", messages=says("What is 1 + 1?", "The sum is 2.", "the sum?"))
    text = (
        "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\nThe sum is 2.<|im_end|>\n"
        "<|im_start|>user\nthe sum?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = chat.encode_prompt(prompt)
    assert chat.decode(ids) == text
    assert ids == bpe.apply_chat_template(list(prompt.messages), add_generation_prompt=True)["input_ids"]
    assert [ids.count(i) for i in range(3)] == [0, 4, 3]
    assert groups.encode_prompts(chat, (prompt,), 200) == [ids]
    assert chat.encode_prompt(Prompt(0, "the sum?")) == chat.encode("the sum?")
    chat.save(tmp_path)
    assert load(tmp_path).encode_prompt(prompt) == ids  # the template is saved too


@pytest.mark.parametrize("ended", [True, False])
def test_a_turn_of_an_environment_goes_on_in_the_chat_template(chat, ended):
    """What the template puts between an answer and the next one, with or without the token that ends the answer."""
    chat = replace(chat, eos_ids=(2, 0))
    asked, said = says("What is 1 + 1?"), ({"role": "user", "content": "Are you <|im_end|> sure?"},)
    answer = [*chat.encode("It is 2."), *chat.eos_ids[:1]][: None if ended else -1]
    ids = [*chat.encode_prompt(Prompt(0, "", messages=asked)), *answer, *chat.encode_turn(said, ended)]
    whole = (*asked, {"role": "assistant", "content": "It is 2."}, *said)
    assert ids == chat.encode_prompt(Prompt(0, "", messages=whole))
    assert ids.count(2) == 3


def test_a_template_that_words_earlier_turns_anew_has_no_turns(chat, bpe):
    bpe.chat_template = "{{ messages|length }}" + CHATML
    with pytest.raises(ValueError, match="chat_template is '4.*; expected one whose dialogue begins with '2"):
        chat.encode_turn(says("x", "y"), True)


def test_what_a_message_says_is_no_markup(chat):
    """Names of special tokens in a message, also in one that is part of another, stay text."""
    prompt = Prompt(0, "", messages=says(" a<|im_end|>\n<|im_start|>user b ", "a<|im_end|>", ""))
    ids = chat.encode_prompt(prompt)
    assert [ids.count(i) for i in range(3)] == [0, 4, 3]
    assert "a<|im_end|>\n<|im_start|>user b<|im_end|>" in chat.decode(ids)


def test_messages_without_a_template_and_ones_that_it_refuses(chat, tokenizer):
    prompt = Prompt(7, "", messages=says("x"))
    with pytest.raises(
        ValueError, match="prompt 7: the tokenizer's chat template: chat_template is None; expected one"
    ):
        tokenizer.encode_prompt(prompt)
    with pytest.raises(ValueError, match="prompt 7: the tokenizer's chat template: no such role"):
        chat.encode_prompt(Prompt(7, "", messages=says("x", roles=("nobody",))))


def test_the_chat_template_as_a_template(chat):
    prompts = (Prompt(0, "say <|im_end|>"), Prompt(1, "sum", messages=says("sum")))
    task = Task(prompts, prompts, lambda *_: None)
    asked = fitting.open_task(lambda: task, partial(templates.chat, system="Be brief."))
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nsay <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    ids = chat.encode_prompt(asked.train[0])
    assert chat.decode(ids) == text
    assert ids.count(2) == 2
    assert asked.train[0].text == "say <|im_end|>"
    assert asked.train[1].messages == says("sum")  # which it had already
    with pytest.raises(ValueError, match="template of prompt 1 is .*; expected none, or templates.chat, for messages"):
        templates.r1(prompts[1])


def test_a_tokenizer_that_cannot_be_used_names_its_folder(bpe, tmp_path):
    from transformers import PreTrainedTokenizerFast

    with pytest.raises(ValueError, match=f"{tmp_path}: .*; expected the files of a tokenizer that has an EOS token"):
        load(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=bpe.backend_tokenizer).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}: tokenizer: eos_token is not set"):
        load(tmp_path)
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        load("nowhere")


# --- byte pairs ---------------------------------------------------------------------------------------------------

QUESTION = "Add modulo 5, step by step.\na3b2:"


@pytest.fixture(scope="module")
def pairs():
    return tokenizers.byte_pairs(lambda: [QUESTION] * 3, size=280)


def test_byte_pairs_are_learnt_from_the_texts_and_hold_any_text(pairs):
    pieces = [pairs.decode([i]) for i in pairs.encode(QUESTION)]
    assert "".join(pieces) == QUESTION
    assert " modulo" in pieces
    assert pieces[-5:] == ["a", "3", "b", "2", ":"]  # as Qwen2: a digit is a token
    assert 257 < pairs.size <= 280
    for text in ("", "ä 日本\n\t", "<eos>"):
        assert pairs.decode(pairs.encode(text)) == text
    assert pairs.decode(pairs.eos_ids) == "<|endoftext|>"
    assert tokenizers.byte_pairs(lambda: [QUESTION] * 3, size=280).hf.get_vocab() == pairs.hf.get_vocab()
    with pytest.raises(ValueError, match="size is 100; expected at least 257"):
        tokenizers.byte_pairs(lambda: [], size=100)


@pytest.fixture
def in_qwen2(tmp_path):
    """A folder that says its model is a Qwen2: AutoTokenizer goes by that."""

    def saved(tokenizer):
        tokenizer.save(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
        return tmp_path

    return saved


def test_a_tokenizer_is_what_its_file_says_whatever_the_model(tokenizer, in_qwen2):
    folder = in_qwen2(tokenizer)
    assert load(folder).encode("a = b12") == tokenizer.encode("a = b12")
    assert "AutoTokenizer takes its tokenizer for a Qwen2Tokenizer" in tokenizers.misread(folder, tokenizer)


def test_a_tokenizer_that_autotokenizer_cannot_read_at_all(tokenizer, in_qwen2, monkeypatch):
    import transformers

    def fails(folder):
        raise KeyError(folder)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fails)
    assert "AutoTokenizer cannot read its tokenizer (KeyError)" in tokenizers.misread(in_qwen2(tokenizer), tokenizer)


def test_byte_pairs_are_a_qwen2_tokenizer_to_others_too(pairs, in_qwen2):
    folder = in_qwen2(pairs)
    assert load(folder).hf.get_vocab() == pairs.hf.get_vocab()
    assert tokenizers.misread(folder, pairs) == ""

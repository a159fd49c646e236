"""The character tokenizer: text and ids both ways, on disk, and as Hugging Face reads it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.data import tokenizers
from jaxrl_llm.data.tokenizers import ALPHABET, characters, from_hf, load


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


@pytest.mark.parametrize("text", SAMPLES)
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)  # a token a character, and none added
    assert tokenizer.decode(ids) == text


@given(st.text(ALPHABET, max_size=40).filter(lambda t: "<eos>" not in t and "<pad>" not in t))
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
    for text in SAMPLES:
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
    with pytest.raises(ValueError, match="eos_token is not set"):
        from_hf(PreTrainedTokenizerFast(tokenizer_object=backend))

"""Stop strings are found where a search of the whole answer finds them, for little work."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.data import tokenizers
from jaxrl_llm.sampler import turns
from jaxrl_llm.sampler.requests import Answer, PartialAnswer, Request
from jaxrl_llm.types import CANCELLED, EOS, LENGTH, STOP


def byte_level(ids):
    """As GPT-2's kind: tokens are bytes, or pairs of bytes, and what is no UTF-8 shows as U+FFFD."""
    table = [b"a", b"b", b"\n", b"\xc3", b"\xa9", b"\xe4", b"\xbd", b"\xa0", b"\xe4\xbd", b"ab", b"a\xc3", b"", b"bab"]
    return b"".join(table[i] for i in ids).decode("utf-8", "replace")


def byte_fallback(ids):
    """As Llama's kind: words with a space, of which the first is dropped; a run of bytes is whole or all U+FFFD."""
    words, text, run = [" a", " b", "a", "b", "\n", "ab", ""], "", b""
    for i in [*ids, -1]:
        if i >= len(words):
            run += b"\xc3\xa9\xe4\xbd\xa0"[(i - len(words)) % 5 :][:1]
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += "\ufffd" * len(run)
        text, run = text + (words[i] if i >= 0 else ""), b""
    return text.removeprefix(" ")


def word_piece(ids):
    """As BERT's kind: pieces of a word are joined, words get a space between them."""
    words = ["a", "b", "##a", "##b", "ab", "##ba"]
    text = " ".join(words[i % len(words)] for i in ids)
    return text.replace(" ##", "")


class Tokenizer:
    eos_ids = (98, 99)

    def __init__(self, decode):
        self.inner, self.decoded = decode, 0

    def decode(self, ids):
        self.decoded += len(ids)
        return self.inner(ids)


def whole_search(request, tokens, calls, decode):
    """What there was before: after each call the whole answer is decoded, and then each of its new beginnings."""
    end = 0
    for size in calls:
        start, end = end, min(end + size, len(tokens))
        ended = tokens[end - 1] in Tokenizer.eos_ids
        text = tokens[: end - ended]
        holds = lambda n, text=text: any(s in decode(text[:n]) for s in request.stop)
        if holds(len(text)):
            return tokens[: next(n for n in range(min(start + 1, len(text)), len(text) + 1) if holds(n))], STOP
        if ended or end == len(tokens):
            return tokens[:end], EOS if ended else LENGTH
    raise AssertionError


def taken(request, tokens, calls, tokenizer):
    answer, end = PartialAnswer(request, 0), 0
    for size in calls:
        start, end = end, min(end + size, len(tokens))
        answer.take(tokens[start:end], [0.0] * (end - start), 0, tokenizer)
        if answer.finish != CANCELLED:
            return answer.tokens, answer.finish
    raise AssertionError


@pytest.mark.parametrize("decode", [byte_level, byte_fallback, word_piece], ids=lambda f: f.__name__)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_stop_is_that_of_a_search_in_the_whole_answer(decode, data):
    ids = st.lists(st.integers(0, 12), min_size=1, max_size=12)
    # Long stretches of one piece, so that the window moves; then pieces that may make up a stop string.
    repeats = st.lists(st.tuples(ids, st.integers(1, 12)), min_size=1, max_size=12)
    tokens = [i for piece, n in data.draw(repeats) for i in piece * n]
    end = data.draw(st.sampled_from([[], [98], [99]]))
    made = decode(data.draw(ids)).replace("\ufffd", "")
    stop = data.draw(st.lists(st.sampled_from(["\n\n", "abab", "é你", "你", made, made * 3]), min_size=1, max_size=3))
    request = Request((1,), max_tokens=len(tokens + end), stop=tuple(s for s in stop if s) or ("x",))
    size = data.draw(st.integers(1, 40))
    calls = [size] * len(tokens + end)
    got = taken(request, tokens + end, calls, Tokenizer(decode))
    assert got == whole_search(request, tokens + end, calls, decode)


def test_the_work_is_linear_in_the_answers_length():
    rng, work = np.random.default_rng(0), {}
    for n in (2048, 8192):
        tokens = rng.choice([0, 1, 3, 4, 5, 6, 7, 9], n).tolist()
        tokenizer = Tokenizer(byte_level)
        got = taken(Request((1,), max_tokens=n, stop=("\n\n", "</answer>")), tokens, [32] * n, tokenizer)
        assert got == (tokens, LENGTH)
        work[n] = tokenizer.decoded
    assert work[8192] < 4.4 * work[2048]
    assert work[8192] < 10 * 8192  # the whole answer after each call: 128 times


@pytest.mark.parametrize("eos", [98, 99])
def test_any_end_of_sequence_token_ends_an_answer(eos):
    request = Request((1,), max_tokens=9, stop=("ab",))
    assert taken(request, [0, 2, eos], [3], Tokenizer(byte_level)) == ([0, 2, eos], EOS)


LETTERS = tokenizers.characters("abcdefghijklmn")


@pytest.mark.parametrize("at_once", [1, 2, 99])
@pytest.mark.parametrize(
    ("text", "drawn", "finish", "whole"),
    [
        ("abk", "cdkee", STOP, "abkcdk"),  # the stop of the first turn ends no other
        ("abkffkh", "abc", CANCELLED, "abkffkhabc"),  # nor do those that were said
        ("abkffkh", "fa", STOP, "abkffkhf"),  # one that begins in what was said
        ("abk" + "c" * 60, "chf", STOP, "abk" + "c" * 61 + "hf"),
        ("ff", "f", STOP, "fff"),
        ("abk", "~", EOS, "abk"),
        ("abk", "f~", EOS, "abkf"),
    ],
)
def test_stop_strings_end_the_turn_that_completes_them(text, drawn, finish, whole, at_once):
    ids = np.array(LETTERS.encode(text), np.int32)
    begun = Answer(ids, ids * -1.0, ids * 0, CANCELLED)
    answer = PartialAnswer(Request((2,), max_tokens=99, stop=("ff", "k", "hf"), begun=(begun,)), 0)
    new = [*LETTERS.encode(drawn.rstrip("~")), *LETTERS.eos_ids * drawn.endswith("~")]
    while new and answer.open:
        answer.take(new[:at_once], [-1.0] * len(new[:at_once]), 0, LETTERS)
        new = new[at_once:]
    assert (answer.finish, turns.text_of(LETTERS, answer.answer())) == (finish, whole)

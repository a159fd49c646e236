"""Stop strings are found where a search of the whole answer finds them, for little work; what may be asked and said."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.data import tokenizers
from jaxrl_llm.sampler import turns
from jaxrl_llm.sampler.requests import NOTHING, Answer, PartialAnswer, Request, check, check_group
from jaxrl_llm.sampler.sampling import Sampling
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


# --- what may be asked and answered -------------------------------------------------------------------------------


def answer(tokens=(4, 5), logp=(-0.5, 0.0), versions=(3, 4), finish=CANCELLED):
    return Answer(np.array(tokens), np.array(logp, np.float32), np.array(versions), finish)


def asked(**fields):
    sampling = {k: fields.pop(k) for k in ("temperature", "top_k", "top_p") if k in fields}
    fields = {"prompt": (1, 2), "group": 1, "max_tokens": 4, **fields}
    return Request(sampling=Sampling(**sampling), **fields)


def allowed(request):
    check(request, vocab_size=10, max_prompt_tokens=3, max_tokens=8)


NAN, INF = float("nan"), float("inf")
BAD = {
    "prompt": [(), (1,) * 4, (-1,), (10,), (1.5,), (True,), ("1",), ((1,), (2,)), (2**70,), (2**31,)],
    "group": [0, -1, 2**31, 1.0, True, "1", None, 2**63],
    "max_tokens": [0, 9, -(2**63), 2.0, False, NAN],
    "temperature": [-1.0, NAN, INF, -INF, 1e-39, 5e-324, 1e-7, 1e7, 1e39, "1", None, True, -1e-9],
    "top_k": [-1, 2**31, 2**63, 1.0, True],
    "top_p": [0.0, -0.5, NAN, INF, 1.0001, 1e-39, 5e-324, "1", True],
    "seed": [-1, 2**32, 0.5, True],
    "draw": [-1, 2**32, 0.5, None],
    "budget": [-1, 2**31, 1.0],
    "stop": [("",), ("x" * 1025,), ("x",) * 65, (1,), (b"x",)],
    "begun": [
        (answer(),) * 2,
        (answer((4,)),),
        (answer(logp=(-0.5,)),),
        (answer(versions=(3,)),),
        (answer((4, -1)),),
        (answer((4, 10)),),
        (answer((4, 2**31)),),
        (answer((4.0, 5.0)),),
        (answer(logp=(-0.5, 0.1)),),
        (answer(logp=(-0.5, NAN)),),
        (answer(logp=(-INF, 0.0)),),
        (answer(logp=(INF, 0.0)),),
        (answer(versions=(3, -1)),),
        (answer(finish="done"),),
        (answer(finish=""),),
        (answer((4,) * 4, (0.0,) * 4, (0,) * 4),),
        (answer((4,) * 5, (0.0,) * 5, (0,) * 5, LENGTH),),
        (answer((), (), (), EOS),),
    ],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in BAD.items() for v in values], ids=repr)
def test_a_field_of_the_wrong_type_or_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=rf"^{field}.* is .*; expected "):
        allowed(asked(**{field: value}))


GOOD = {
    "prompt": [(0, 9), (np.int64(3),), [1, 2, 3]],
    "group": [1, np.int32(7), 2**31 - 1],
    "temperature": [0, 0.0, 1e-6, 1e6, np.float32(0.7)],
    "top_k": [0, 2**31 - 1],
    "top_p": [1, 1.0, 1e-6, 0.5],
    "seed": [0, 2**32 - 1],
    "draw": [np.int64(2**32 - 1)],
    "budget": [0, 2**31 - 1],
    "stop": [(), ("x" * 1024,) * 64],
    "begun": [(), (answer(),), (answer(finish=EOS),), (answer((4,) * 4, (0.0,) * 4, (0,) * 4, LENGTH),), (NOTHING,)],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in GOOD.items() for v in values], ids=repr)
def test_the_edges_of_what_is_allowed(field, value):
    allowed(asked(**{field: value}))


def judged(group, versions=(3, 4), cut=False, **fields):
    check_group(asked(**fields), group, vocab_size=10, versions=versions, cut=cut)


FOUR = answer((4, 5, 6, 7), (-0.5,) * 4, (3, 3, 4, 4), LENGTH)
LIES = {
    "group is '2 answers'; expected group = 1": ((answer(finish=EOS),) * 2, {}),
    "answer 0 tokens": ((answer((4, 10), finish=EOS),), {}),
    "answer 0 logp is .*nan": ((answer(logp=(-0.5, NAN), finish=EOS),), {}),
    "answer 0 logp": ((answer(logp=(-0.5, 0.01), finish=EOS),), {}),
    r"answer 0 versions is \[2, 4\]; expected 3 to 4": ((answer(versions=(2, 4), finish=EOS),), {}),
    r"answer 0 versions is \[3, 5\]": ((answer(versions=(3, 5), finish=EOS),), {}),
    "answer 0 finish is 'done'": ((answer(finish="done"),), {}),
    "answer 0 is 'length after 2 tokens'": ((answer(finish=LENGTH),), {}),
    "answer 0 is 'stop after 2 tokens'": ((answer(finish=STOP),), {}),
    "answer 0 is 'cancelled after 2 tokens'": ((answer(),), {}),
    "answer 0 is 'cancelled after 4 tokens'": ((answer((4,) * 4, (0.0,) * 4, (3,) * 4),), {"cut": True}),
    "answer 0 is '4 tokens'; expected .* at most 3": ((FOUR,), {"budget": 3}),
    "answer 0 is 'no token'": ((answer((), (), (), EOS),), {}),
    "answer 0 is '4 tokens'; expected those 2 that were begun": ((FOUR,), {"begun": (answer(logp=(-0.25, 0.0)),)}),
    "answer 0 is 'eos after 2 tokens'": ((answer(finish=EOS),), {"begun": (answer(),)}),
    "answer 0 is 'eos after 2 tokens'; .* limit 4": ((answer(finish=EOS),), {"begun": (answer(finish=LENGTH),)}),
}


@pytest.mark.parametrize("message", LIES)
def test_an_answer_that_cannot_be_is_noticed(message):
    group, options = LIES[message]
    with pytest.raises(ValueError, match=message):
        judged(group, **options)


def test_answers_that_may_be():
    judged((FOUR,))
    judged((answer(finish=STOP),), stop=("x",))
    judged((answer(),), cut=True)
    judged((NOTHING,), cut=True)
    judged((answer(),), budget=2)
    begun = (answer((4, 5), (-0.5, -0.5), (1, 1)),)
    judged((answer((4, 5, 6), (-0.5,) * 3, (1, 1, 4), EOS),), begun=begun)  # what was begun may be older
    judged((answer(versions=(1, 1), finish=EOS),), begun=(answer(versions=(1, 1), finish=EOS),))

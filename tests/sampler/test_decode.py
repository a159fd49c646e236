"""The sampling loop: the learner's log-probs, samples that depend on nothing but their keys, and every way to end."""

from collections import Counter
from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import pytest
from cases import slow

from jaxrl_llm.data import tokenizers
from jaxrl_llm.learner.batching import make_batch
from jaxrl_llm.learner.packing import Division
from jaxrl_llm.learner.train_step import make_logprobs
from jaxrl_llm.models import transformer
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.run import metrics
from jaxrl_llm.sampler import decode, slots, weights
from jaxrl_llm.sampler.groups import make_request, sample_groups
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.types import EOS, LENGTH, STOP, Prompt

TOKENIZER = tokenizers.characters("abcdefghijklmn")  # 16 ids: <pad>, <eos>, 14 letters
TEMPERATURE = 0.7
GROUP = 2
MAX_TOKENS = 40
MODEL = ModelConfig(
    vocab_size=16, layers=2, width=16, heads=4, kv_heads=2, head_width=4, mlp_width=24, qkv_bias=True, qk_norm=True
)
TEXTS = ("abc", "d", "hgfedcbaijklmnabcde", "aa", "nmlk", "bdfhj")  # 1 to 19 tokens
PROMPTS = tuple(tuple(TOKENIZER.encode(t)) for t in TEXTS)
MANY = PROMPTS * 3


def random_params(config, seed):
    """Every next token has some probability, the end-of-sequence token about 1/16 of it."""
    shapes = jax.eval_shape(partial(transformer.init, config), jax.random.key(0))
    rng = np.random.default_rng(seed)
    scale = lambda path: float(path[-1].key == "scale")
    draw = lambda path, x: (rng.normal(size=x.shape) * 0.25 + scale(path)).astype(np.float32)
    return jax.tree_util.tree_map_with_path(draw, shapes)


PARAMS = random_params(MODEL, 0)


def make(model, max_tokens=MAX_TOKENS, **fields):
    held = weights.push(model, PARAMS, None, quantized=fields.get("quantized", ""))
    return decode.LocalEngine(model, TOKENIZER, held, Sampling(TEMPERATURE), max_tokens, **fields)


@pytest.fixture(scope="module")
def engine():
    return make(MODEL)


@pytest.fixture(scope="module")
def base(engine):
    """Answers to all prompts, six at a time, each six in slots of their own."""
    parts = [generate(engine, PROMPTS, draws=range(i, i + 6)) for i in (0, 6, 12)]
    rows = [answer for part in parts for answer in answers(part)]
    assert Counter(r[2] for r in rows).keys() == {EOS, LENGTH}
    assert min(len(r[0]) for r in rows) < 5
    return rows


def requests(engine, prompts, *, seed=3, draws=None, group=GROUP):
    draws = range(len(prompts)) if draws is None else draws
    return [make_request(engine, p, group, seed=seed, draw=d) for p, d in zip(prompts, draws, strict=True)]


def generate(engine, prompts, **asked):
    return decode.generate(engine, requests(engine, prompts, **asked))


def answers(groups, tokenizer=TOKENIZER):
    """One (tokens, log-probs, finish, text) an answer."""
    rows = []
    for a in (a for group in groups for a in group):
        assert len(a.tokens) == len(a.logp) == len(a.versions) >= 1
        text = tokenizer.decode(a.tokens[:-1] if a.finish == EOS else a.tokens)
        rows.append((tuple(a.tokens.tolist()), a.logp, a.finish, text))
    return rows


def assert_same(got, expected):
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert (a[0], a[2], a[3]) == (b[0], b[2], b[3]), f"answer {i}"
        np.testing.assert_allclose(a[1], b[1], atol=1e-5)


# --- log-probs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learner():
    return cache(make_logprobs)  # (model, temperature) → a function that compiles once a shape


def gap(engine, learner, texts, seed, temperature=TEMPERATURE):
    """Largest difference between the sampler's and the learner's log-prob over the drawn tokens, and the batch."""
    prompts = tuple(Prompt(i, t) for i, t in enumerate(texts))
    sampled = sample_groups(engine, prompts, GROUP, seed=seed, draws=np.arange(len(texts)) + seed, max_prompt_tokens=19)
    batch, _ = make_batch(sampled, engine.model, Division(layout="grouped"))
    logp, _ = learner(engine.model, temperature)(jax.tree.map(np.asarray, PARAMS), batch)
    mask = np.asarray(batch.mask)
    assert mask.sum() == sampled.lengths.sum()
    return np.abs(np.where(mask, logp - batch.sampler_logp, 0)).max(), sampled


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_log_probs_are_the_learners(engine, learner, seed):
    # with two slots the columns go round
    largest, sampled = gap(replace(engine, slots=4 if seed % 2 else 12), learner, TEXTS, seed)
    assert largest < 1e-5
    assert len(set(sampled.lengths)) > 4
    assert sampled.sampler_logp.min() < -3


def test_log_probs_are_of_the_temperature(engine, learner):
    assert gap(engine, learner, TEXTS, 0, temperature=1.0)[0] > 0.1


def test_prompts_of_one_token(engine, learner):
    largest, sampled = gap(engine, learner, tuple("abcdef"), 5)
    assert sampled.prompt_lengths.tolist() == [1] * 6
    assert largest < 1e-5


def test_bfloat16_comes_near(learner):
    half = replace(MODEL, dtype="bfloat16")
    engine = make(half, 24)
    largest, _ = gap(engine, learner, TEXTS, 0)
    assert 1e-6 < largest < 0.2


# --- what a sample depends on -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "tokens_per_call"), [(1, 32), slow(4, 32), (4, 1), slow(4, 7), (5, 17), slow(6, 32), slow(6, 100)]
)
def test_slots_and_calls_change_nothing(engine, base, slots, tokens_per_call):
    few = replace(engine, slots=slots, tokens_per_call=tokens_per_call)
    assert sum(len(a[0]) for a in base) / slots > 2 * 40  # columns go round more than twice
    assert_same(answers(generate(few, MANY)), base)


def test_neighbours_change_nothing(engine, base):
    order = [16, 3, 8, 5, 0, 11]
    got = answers(generate(engine, [MANY[i] for i in order], draws=order))
    assert_same(got, [base[i * GROUP + g] for i in order for g in range(GROUP)])
    got = answers(generate(replace(engine, slots=4), [MANY[i] for i in order[:3]], draws=order[:3]))
    assert_same(got, [base[i * GROUP + g] for i in order[:3] for g in range(GROUP)])


def test_draws_seeds_and_numbers_make_samples(engine):
    draws = [7, 8, 7, 2**32 - 1, 9, 10]
    first = answers(generate(engine, [PROMPTS[0]] * 6, draws=draws))
    again = answers(generate(engine, [PROMPTS[0]] * 6, draws=draws))
    assert_same(first, again)
    tokens = [a[0] for a in first]
    assert tokens[0:2] == tokens[4:6]  # one draw, one sample
    assert len(set(tokens)) == 10  # five draws of two answers
    other = [a[0] for a in answers(generate(engine, [PROMPTS[0]] * 6, draws=draws, seed=4))]
    assert not set(tokens) & set(other)


def test_pushed_weights_are_used_without_compiling(engine, base):
    pushed = decode.push_weights(engine, random_params(MODEL, 1))
    assert pushed.version == engine.version + 1
    groups = generate(pushed, PROMPTS)
    assert {v for group in groups for a in group for v in a.versions} == {pushed.version}
    before = metrics.compilations()  # lengths, and so shapes, have been seen
    again, got = answers(generate(pushed, PROMPTS)), answers(groups)
    assert_same(again, got)
    assert all(a[0] != b[0] for a, b in zip(got, base, strict=False))
    back = decode.push_weights(pushed, PARAMS)
    assert back.version == engine.version + 2
    assert_same(answers(generate(back, PROMPTS)), base[: len(got)])
    assert metrics.compilations() == before


def test_shapes_that_were_seen_compile_nothing(engine, base):
    before = metrics.compilations()
    generate(engine, tuple(p[::-1] + (5,) for p in PROMPTS[:2]) + PROMPTS[2:], seed=11)
    assert metrics.compilations() == before


def test_each_prompt_is_prefilled_once(engine, monkeypatch):
    rows, prefill = [], slots._prefill

    def recording(config, params, prefix, *rest):
        rows.extend(tuple(r[r > 0].tolist()) for r in np.asarray(prefix))
        return prefill(config, params, prefix, *rest)

    monkeypatch.setattr(slots, "_prefill", recording)
    prompts = [p + (i + 2, 2) for i, p in enumerate(PROMPTS)]  # all different, none of one token
    generate(replace(engine, slots=4), prompts, group=GROUP)
    assert Counter(r for r in rows if r) == Counter(p[:-1] for p in prompts)


def test_a_prompt_needs_a_token(engine):
    with pytest.raises(ValueError, match="prompt is '0 tokens'; expected 1"):
        generate(engine, [(2,), (), (3,)])


# --- how an answer ends -------------------------------------------------------------------------------------------

CHAIN = replace(MODEL, layers=1, tied_head=False)


def chain(transitions, *, tokenizer=TOKENIZER, **fields):
    """An engine whose next token depends on the last one alone, with the given probabilities; "$" ends an answer."""
    index = lambda c: tokenizer.eos_ids[0] if c == "$" else tokenizer.encode(c)[0]
    table = np.full((16, 16), 1e-20)
    for last, following in transitions.items():
        for token, p in following.items():
            table[index(last), index(token)] = p
    params = random_params(CHAIN, 0)
    params["layers"]["attention"]["o"] *= 0
    params["layers"]["mlp"]["down"] *= 0
    params["embed"] = np.eye(16, dtype=np.float32)
    params["norm"]["scale"] = np.full(16, 0.25, np.float32)  # the norm of a unit vector of width 16 is 4 times it
    params["head"] = (np.log(table) * TEMPERATURE).astype(np.float32)
    made = decode.LocalEngine(CHAIN, tokenizer, weights.push(CHAIN, params, None), Sampling(TEMPERATURE), 20, **fields)
    return made, table


def run_chain(made, table, texts=("a", "ba", "c"), seed=0):
    prompts = [made.tokenizer.encode(t) for t in texts]
    rows = answers(generate(made, prompts, seed=seed), made.tokenizer)
    for i, (tokens, logp, *_) in enumerate(rows):
        before = (prompts[i // GROUP][-1], *tokens[:-1])
        np.testing.assert_allclose(logp, [np.log(table[x, y]) for x, y in zip(before, tokens, strict=True)], atol=1e-4)
    return rows


def test_end_of_sequence_as_first_token():
    made, table = chain({"a": {"$": 1.0}, "c": {"a": 0.5, "d": 0.5}, "d": {"$": 1.0}})
    rows = run_chain(made, table)
    for tokens, _, finish, text in rows[:4]:
        assert (tokens, finish, text) == ((1,), EOS, "")
    for tokens, _, finish, text in rows[4:]:
        assert finish == EOS
        assert tokens[-1] == 1
        assert text in ("a", "d")
        assert len(tokens) == 2


def test_the_limit():
    made, table = chain({"a": {"b": 1.0}, "b": {"a": 1.0}, "c": {"d": 1.0}, "d": {"d": 1.0}})
    rows = run_chain(made, table)
    assert {(len(r[0]), r[2]) for r in rows} == {(20, LENGTH)}
    assert rows[0][3] == "ba" * 10
    one = answers(generate(replace(made, max_tokens=1), [made.tokenizer.encode("a")] * 3))
    assert {(len(r[0]), r[2], r[3]) for r in one} == {(1, LENGTH, "b")}


def test_end_of_sequence_at_the_limit_is_no_truncation():
    made, table = chain({"a": {"b": 1.0}, "b": {"c": 1.0}, "c": {"$": 1.0}})
    rows = run_chain(replace(made, max_tokens=3), table, ("a", "b", "a"))
    assert [(len(r[0]), r[2], r[3]) for r in rows] == [(3, EOS, "bc")] * 2 + [(2, EOS, "c")] * 2 + [(3, EOS, "bc")] * 2
    rows = run_chain(replace(made, max_tokens=2), table, ("a", "b", "a"))
    assert [(r[2], r[3]) for r in rows] == [(LENGTH, "bc")] * 2 + [(EOS, "c")] * 2 + [(LENGTH, "bc")] * 2


def test_padding_with_the_end_of_sequence_token():
    """Token 0 pads every array here, and ends answers too: lengths and masks cannot come from token ids."""
    tokenizer = replace(TOKENIZER, eos_ids=(0,), pad_id=0)
    half = {"a": {"b": 0.5, "$": 0.5}, "b": {"b": 0.7, "$": 0.3}, "c": {"b": 1.0}}
    made, table = chain(half, tokenizer=tokenizer)
    prompts = [Prompt(i, t) for i, t in enumerate(("a", "ba", "c"))]
    sampled = sample_groups(made, tuple(prompts), GROUP, seed=1, draws=np.arange(3), max_prompt_tokens=2)
    rows = run_chain(made, table, seed=1)
    assert len({len(r[0]) for r in rows}) > 2
    mask = np.asarray(make_batch(sampled, made.model)[0].mask)
    for (tokens, _, finish, text), m, n in zip(rows, mask, sampled.lengths, strict=True):
        assert m.sum() == n == len(tokens) == len(text) + 1
        assert (tokens[-1], finish) == (0, EOS)
        assert 0 not in tokens[:-1]


STOPPING = {
    "a": {"b": 0.6, "e": 0.4},
    "b": {"c": 0.9, "a": 0.1},
    "c": {"d": 0.5, "a": 0.5},
    "d": {"$": 0.7, "a": 0.3},
    "e": {"a": 0.8, "$": 0.2},
}


@pytest.mark.parametrize("tokens_per_call", [1, 3, 32])
@pytest.mark.parametrize("stop", [("cd",), ("d",), ("bca", "ea"), ("cab", "e")])
def test_stop_strings_cut_what_would_have_been_said(stop, tokens_per_call):
    """With tokens_per_call = 32 most stops are found after the end-of-sequence token came."""
    made, table = chain(STOPPING)
    expected = []
    for tokens, _, finish, text in run_chain(made, table):
        ends = [text.find(s) + len(s) for s in stop if s in text]
        n = min(ends, default=len(tokens))  # a token is a character
        expected.append((tokens[:n], STOP if ends else finish, text[:n]))
    assert {STOP, EOS} <= {e[1] for e in expected} or "d" in stop
    made = replace(made, stop=stop, tokens_per_call=tokens_per_call)
    assert [(r[0], r[2], r[3]) for r in run_chain(made, table)] == expected


def test_any_of_several_end_of_sequence_tokens_ends_an_answer():
    """The letter n ends answers too, as <|eot_id|> does beside <|end_of_text|>."""
    n = TOKENIZER.encode("n")[0]
    tokenizer = replace(TOKENIZER, eos_ids=(1, n))
    made, table = chain({"a": {"n": 0.5, "$": 0.5}, "b": {"a": 1.0}, "c": {"a": 1.0}}, tokenizer=tokenizer)
    rows = run_chain(made, table, ("a", "ba", "c"), seed=2)
    assert {r[2] for r in rows} == {EOS}
    assert {r[0][-1] for r in rows} == {1, n}
    assert {r[3] for r in rows} == {"", "a"}  # neither is text


def test_a_stop_string_followed_by_end_of_sequence():
    made, table = chain({"a": {"b": 1.0}, "b": {"c": 1.0}, "c": {"d": 1.0}, "d": {"$": 1.0}}, stop=("bc", "d$"))
    rows = run_chain(made, table, ("a", "b", "c"))
    assert [r[2:] for r in rows] == [(STOP, "bc")] * 2 + [(EOS, "cd")] * 2 + [(EOS, "d")] * 2
    last, table = chain({"a": {"b": 1.0}, "b": {"c": 1.0}, "c": {"d": 1.0}, "d": {"$": 1.0}}, stop=("cd",))
    rows = run_chain(last, table, ("a", "b", "c"))
    assert [r[2:] for r in rows] == [(STOP, "bcd")] * 2 + [(STOP, "cd")] * 2 + [(EOS, "d")] * 2
    assert len(rows[0][0]) == 3  # the end-of-sequence token was drawn, but the answer had ended


def test_a_stop_string_ends_the_work(monkeypatch):
    made, _ = chain({"a": {"b": 1.0}, "b": {"a": 1.0}, "c": {"b": 1.0}}, stop=("bab",), tokens_per_call=4)
    calls, decode_k = [], slots._decode
    monkeypatch.setattr(slots, "_decode", lambda *args: calls.append(1) or decode_k(*args))
    rows = answers(generate(made, [TOKENIZER.encode(t) for t in ("a", "ba", "c")]))
    assert {(r[2], r[3]) for r in rows} == {(STOP, "bab")}
    assert len(calls) == 1  # 20 tokens would take five


def test_the_name_of_the_end_of_sequence_token_is_no_stop_string():
    made, table = chain({"a": {"b": 1.0}, "b": {"$": 1.0}, "c": {"$": 1.0}}, stop=(">",))
    assert [r[2:] for r in run_chain(made, table)] == [(EOS, "b")] * 4 + [(EOS, "")] * 2


@pytest.mark.slow
def test_stop_strings_with_few_slots(engine, base):
    stop = ("a", "kl", "nn", "dg")
    expected = []
    for tokens, logp, finish, text in base:
        texts = [TOKENIZER.decode(tokens[: n + 1]) for n in range(len(tokens) - (finish == EOS))]
        n = next((n + 1 for n, t in enumerate(texts) if any(s in t for s in stop)), None)
        expected.append((tokens, logp, finish, text) if n is None else (tokens[:n], logp[:n], STOP, texts[n - 1]))
    assert len({e[2] for e in expected}) > 1
    few = replace(engine, slots=4, tokens_per_call=7, stop=stop)
    assert_same(answers(generate(few, MANY)), expected)

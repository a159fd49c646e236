"""Answers of several turns: what an environment says, who has drawn which token, and what learns from it."""

import threading
from concurrent.futures import Future
from dataclasses import replace

import jax
import numpy as np
import pytest
from cases import CONFIG, PLAIN, REWARDS, rollouts_of, scored
from test_decode import MODEL, PARAMS, TEMPERATURE, TEXTS, TOKENIZER, make, requests

from jaxrl_llm import config as configs
from jaxrl_llm.config import Prime, Stage, values
from jaxrl_llm.learner import batching, learner
from jaxrl_llm.learner.packing import Division
from jaxrl_llm.learner.train_step import make_logprobs
from jaxrl_llm.objective import advantages
from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.run import sft
from jaxrl_llm.run.modes import Position
from jaxrl_llm.sampler import decode, groups, turns
from jaxrl_llm.sampler.requests import NOTHING, Answer, Request, check
from jaxrl_llm.types import CANCELLED, EOS, LENGTH, STOP, Prompt, Reward, Task

ASKED = tuple(Prompt(i, text) for i, text in enumerate(TEXTS))
WORDS = ("nmn", "mnnm")  # of the environment, and neither has the stop string


def says(prompt, text, finish):
    """One of WORDS to each answer that has stopped, at most one of them a turn."""
    said = text.count("nmn") + text.count("mnnm")
    return WORDS[said] if finish == STOP and said < len(WORDS) else None


def drawn(step, **changes):
    engine = make(MODEL, **({"slots": 12, "stop": ("f", "k")} | changes))
    asked = {"seed": 5, "draws": np.arange(len(ASKED)), "max_prompt_tokens": 40}
    return engine, groups.sample_groups(engine, ASKED, 3, **asked, step=step)


@pytest.fixture(scope="module")
def several():
    return drawn(says)[1]


def test_a_turn_is_what_the_sampler_draws_behind_the_text_so_far(several):
    """The same by hand: one request after the other, each answer alone."""
    engine, n_turns = make(MODEL, slots=3, stop=("f", "k")), set()
    for i, (request, prompt) in enumerate(
        zip(requests(engine, [TOKENIZER.encode(t) for t in TEXTS], seed=5, group=3), ASKED, strict=True)
    ):
        group, said = decode.generate(engine, [request])[0], [[] for _ in range(3)]
        for turn in range(3):
            begun = []
            for g, a in enumerate(group):
                said[g] += [False] * (len(a.tokens) - len(said[g]))
                word = says(prompt, turns.text_of(TOKENIZER, a), a.finish)
                if word is None or len(a.tokens) + len(word) >= request.max_tokens:
                    begun.append(a if word is None else replace(a, finish=LENGTH))
                    continue
                ids = TOKENIZER.encode(word)
                said[g] += [True] * len(ids)
                more = lambda x, new: np.concatenate([x, np.array(new, x.dtype)])
                columns = more(a.tokens, ids), more(a.logp, [0] * len(ids)), more(a.versions, [0] * len(ids))
                begun.append(Answer(*columns, CANCELLED))
            if all(a.finish != CANCELLED for a in begun):
                group = begun
                break
            n_turns.add(turn + 2)
            group = decode.generate(engine, [replace(request, begun=tuple(begun))])[0]
        for g, a in enumerate(group):
            row, n = i * 3 + g, len(a.tokens)
            assert several.lengths[row] == n
            assert several.finish[row] == a.finish
            assert several.tokens[row, :n].tolist() == a.tokens.tolist()
            assert several.said[row, :n].tolist() == said[g]
            np.testing.assert_allclose(several.sampler_logp[row, :n], a.logp, atol=1e-5)
    assert n_turns == {2, 3}
    assert set(several.finish) == {EOS, STOP, LENGTH}


def test_what_is_said_is_no_token_of_the_policy(several):
    assert (several.sampler_logp[several.said] == 0).all()
    assert (several.sampler_logp[several.generated] < 0).all()
    np.testing.assert_array_equal(several.n_tokens + several.said.sum(axis=1), several.lengths)
    last = several.generated[np.arange(len(several.lengths)), several.lengths - 1]
    assert last.all()  # an answer never ends in what it did not draw
    assert set((several.n_tokens - several.lengths).tolist()) == {0, -3, -7}


@pytest.mark.parametrize("layout", ["grouped", "packed"])
def test_log_probs_of_every_turn_are_the_learners(several, layout):
    batch, _ = batching.make_batch(several, MODEL, Division(layout=layout))
    logp, _ = make_logprobs(MODEL, TEMPERATURE)(jax.tree.map(np.asarray, PARAMS), batch)
    mask = np.asarray(batch.mask)
    np.testing.assert_array_equal(mask[:, : several.tokens.shape[1]], several.generated)
    assert mask.sum() == several.n_tokens.sum()
    assert np.abs(np.where(mask, logp - batch.sampler_logp, 0)).max() < 1e-5


@pytest.mark.slow
def test_turns_do_not_depend_on_the_slots(several):
    _, other = drawn(says, slots=5, tokens_per_call=4)
    for name in ("tokens", "lengths", "finish", "said", "texts"):
        np.testing.assert_array_equal(getattr(other, name), getattr(several, name))
    np.testing.assert_allclose(other.sampler_logp, several.sampler_logp, atol=1e-5)


def test_an_environment_that_says_nothing_is_none():
    _, silent = drawn(lambda prompt, text, finish: None)
    _, alone = drawn(None)
    assert silent.said is None
    assert silent.texts == alone.texts
    np.testing.assert_array_equal(silent.sampler_logp, alone.sampler_logp)


class Slow:
    """An environment that answers from another thread, and only once the sampler has gone on."""

    def __init__(self):
        self.calls = []

    def __call__(self, *of):
        raise AssertionError("is asked by submit")

    def submit(self, *of):
        future = Future()
        self.calls.append(of[0].id)
        threading.Timer(0.05, lambda: future.set_result(says(*of))).start()
        return future


def test_an_environment_in_the_background_gives_the_same(several):
    step = Slow()
    _, other = drawn(step)
    assert other.texts == several.texts
    np.testing.assert_array_equal(other.said, several.said)
    assert len(step.calls) > (several.finish != LENGTH).sum()


@pytest.mark.parametrize(("said", "message"), [("", "''"), (3, "3"), ((), r"\(\)")])
def test_what_an_environment_may_say(said, message):
    with pytest.raises(ValueError, match=f"step of prompt \\d is {message}; expected text, messages or None"):
        drawn(lambda *_: said)


def test_an_error_of_the_environment_is_raised():
    line = f"{__file__}:{test_an_error_of_the_environment_is_raised.__code__.co_firstlineno + 4}"
    raised = rf"step of prompt \d raised KeyError: 'no such page' at {line} \(prompt "
    with pytest.raises(ValueError, match=raised):
        drawn(lambda *_: {}["no such page"])


# --- what learns from it --------------------------------------------------------------------------------------------


def with_said(lengths, *spans):
    """Answers in which spans of (row, first, end) were said."""
    answers = rollouts_of(lengths)
    said = np.zeros(answers.tokens.shape, bool)
    for row, first, end in spans:
        said[row, first:end] = True
    return replace(answers, said=said)


def test_masks_weights_and_lengths_leave_it_out():
    answers = with_said([6, 4, 9, 10], (0, 2, 4), (2, 1, 3), (2, 5, 8))
    batch, _ = batching.make_batch(answers, CONFIG.model)
    assert np.asarray(batch.mask).sum(axis=1).tolist() == [4, 4, 4, 10]
    assert answers.n_tokens.tolist() == [4, 4, 4, 10]
    for norm, expected in (("token", 1 / 22), ("sequence", 1 / 16)):
        weights = np.asarray(batching.with_weights(batch, norm, 10).weights)
        assert not weights[0, 2:4].any()
        np.testing.assert_allclose(weights[0, [0, 1, 4, 5]], expected, rtol=1e-6)
    cut, _ = batching.make_batch(answers, CONFIG.model, drop_truncated=True)
    assert np.asarray(cut.mask).sum(axis=1).tolist() == [4, 4, 4, 0]


def gradient(answers, algorithm=PLAIN):
    made = learner.build(replace(CONFIG, algorithm=algorithm))
    with jax.set_mesh(made.mesh):
        state = learner.fresh_state(made)
        batch, state, _ = learner.learn_batch(made, state, scored(answers, REWARDS))
        return learner.update(made, state, batch)[1]["grad_norm"], np.asarray(batch.adv)


def test_what_is_said_has_no_part_in_the_loss_but_is_read():
    answers = with_said([6, 4, 9, 10], (0, 2, 4))
    masked, adv = gradient(answers)
    assert not adv[0, 2:4].any()
    noise = replace(answers, sampler_logp=np.where(answers.said, -9.0, answers.sampler_logp).astype(np.float32))
    assert gradient(noise)[0] == masked
    tokens = answers.tokens.copy()
    tokens[0, 2:4] = tokens[0, 2:4] % 80 + 3
    assert abs(gradient(replace(answers, tokens=tokens))[0] - masked) > 1e-6  # the tokens behind it attend to it
    assert abs(gradient(replace(answers, said=None))[0] - masked) > 1e-4


def test_a_run_of_turns_goes_through_a_checkpoint():
    tokens = np.arange(5, dtype=np.int32)
    said = np.array([False, True, True, False, False])
    group = (
        Answer(tokens, -tokens.astype(np.float32), tokens * 0, STOP, said=said),
        Answer(tokens, -tokens.astype(np.float32), tokens * 0, EOS),
    )
    at = Position(3, 7, pending=(groups.PendingPrompt(5, 1, group),))
    (back,) = Position.from_json(3, at.to_json()).pending
    np.testing.assert_array_equal(back.begun[0].said, said)
    assert back.begun[1].said is None


@pytest.mark.parametrize(
    ("setting", "name"),
    [("rollout.budget=4", "rollout.budget is 4"), ("rollout.zero_gap=True", "rollout.zero_gap is True")],
)
def test_what_does_not_go_with_an_environment(setting, name):
    task = lambda: replace(CONFIG.task(), step=says)
    config = configs.validate(values.override(replace(CONFIG, task=task), setting))
    with pytest.raises(ValueError, match=f"{name}; expected off in an environment"):
        learner.build(config)


def test_a_step_is_asked_with_three_arguments():
    task = Task(
        (Prompt(0, "1"),), (Prompt(1, "2"),), lambda prompt, text, finish: Reward(0.0, False), step=lambda text: None
    )
    with pytest.raises(ValueError, match=r"task\(\).step: <lambda>: too many positional arguments"):
        learner.build(replace(CONFIG, task=lambda: task))


def test_groups_of_other_draws_go_on_while_one_waits():
    """The engine is asked for more as long as there is something to draw; only then the environment is waited for."""
    log, futures = [], {}

    class Engine:
        tokenizer = TOKENIZER

        def sample(self, next_request, latest=None):
            while (r := next_request()) is not None:
                log.append(("draw", r.draw, len(r.begun)))
                if r.draw == 2:
                    futures[0].set_result("mn")
                done = len(r.begun) and len(r.begun[0].tokens)
                tokens = np.full(done + 2, 3, np.int32)
                yield r, (Answer(tokens, tokens * -1.0, tokens * 0, STOP),)

    class Step:
        def submit(self, prompt, text, finish):
            futures[prompt.id] = Future()
            if prompt.id or len(text) > 2:
                futures[prompt.id].set_result(None)
            return futures[prompt.id]

    asked = iter([Request((2,), draw=d) for d in range(3)])
    got = turns.sample(Engine(), Step(), lambda r: Prompt(r.draw, ""), lambda: next(asked, None))
    order = [(r.draw, len(r.begun), group[0].said) for r, group in got]
    assert log == [("draw", 0, 0), ("draw", 1, 0), ("draw", 2, 0), ("draw", 0, 1)]
    assert [o[0] for o in order] == [1, 2, 0]
    assert order[2][1] == 0  # the request as it was asked
    assert order[2][2].tolist() == [False, False, True, True, False, False]


def test_who_has_nothing_to_be_drawn_is_asked_again_while_the_environment_thinks():
    """A verdict may come, or the learner take a batch: what is then to be drawn does not wait for a slow tool."""
    slow, left = Future(), [Request((2,), draw=0)]

    class Engine:
        tokenizer = TOKENIZER

        def sample(self, next_request, latest=None):
            while (r := next_request()) is not None:
                if r.draw:
                    slow.set_result(None)
                yield r, (replace(NOTHING, tokens=np.full(1, 3, np.int32), finish=STOP),)

    Step = type("Step", (), {"submit": lambda self, prompt, *of: Future() if prompt.id else slow})
    threading.Timer(0.1, lambda: left.append(Request((2,), draw=1))).start()
    never = threading.Timer(20, slow.cancel)  # or it would not end at all
    never.start()
    got = turns.sample(Engine(), Step(), lambda r: Prompt(r.draw, ""), lambda: left.pop() if left else None)
    assert next(got)[0].draw == 0
    never.cancel()


# --- ends of turns, of which a script says what the policy draws ------------------------------------------------------


class Scripted:
    """An engine that draws what is written: texts of turns, where ~ is the end-of-sequence token; it is one version on
    at each turn, and a mixture of experts of two layers.
    """

    tokenizer = TOKENIZER

    def __init__(self, *turns):
        self.turns, self.begun = turns, []

    def sample(self, next_request, latest=None):
        while (r := next_request()) is not None:
            check(r, vocab_size=16)
            turn = len(self.begun)
            self.begun.append(r.begun)
            yield r, tuple(self.answer(r, turn, g) for g in range(r.group))

    def answer(self, r, turn, g):
        before = r.begun[g] if r.begun else replace(NOTHING, experts=np.zeros((0, 2, 1), np.uint8))
        if before.finish != CANCELLED:
            return replace(before, said=None)
        text = self.turns[turn][g]
        ids = [*TOKENIZER.encode(text.rstrip("~")), *TOKENIZER.eos_ids * text.endswith("~")]
        more = lambda x, new: np.concatenate([x, np.broadcast_to(np.array(new, x.dtype), (len(ids), *x.shape[1:]))])
        columns = more(before.tokens, ids), more(before.logp, -1.0), more(before.versions, turn)
        finish = EOS if text.endswith("~") else LENGTH if len(columns[0]) >= r.max_tokens else STOP
        return Answer(*columns, finish, None if before.experts is None else more(before.experts, 3))


def played(step, *script, max_tokens=40):
    """The answers of one group to a script, and the engine."""
    engine = Scripted(*script)
    (group,) = turns.generate(
        engine, step, [Prompt(5, "abc")], [Request((2, 3), group=len(script[0]), max_tokens=max_tokens)]
    )
    return group, engine


def once(said):
    return lambda prompt, text, finish: said if said not in text else None


def test_texts_have_no_token_that_ends_a_turn():
    heard = []

    def step(prompt, text, finish):
        heard.append((text, finish))
        return "kk" if len(text) < 6 else None

    (answer,), _ = played(step, ["ab~"], ["cd"], ["ef~"])
    assert heard == [("ab", EOS), ("abkkcd", STOP)]
    assert turns.text_of(TOKENIZER, answer) == "abkkcd"
    (answer,), _ = played(lambda *of: "kk" if len(of[1]) < 8 else None, ["ab~"], ["cd"], ["ef~"])
    assert turns.text_of(TOKENIZER, answer) == "abkkcdkkef"
    assert answer.finish == EOS
    (answer,), _ = played(once("k" * 9), ["ab~"], max_tokens=12)
    assert (answer.finish, turns.text_of(TOKENIZER, answer)) == (LENGTH, "ab")  # it was truncated, after its end


@pytest.mark.parametrize(("room", "finish", "tokens"), [(3, LENGTH, 2), (5, LENGTH, 2), (6, LENGTH, 6), (7, STOP, 6)])
def test_what_is_said_leaves_room_for_a_token(room, finish, tokens):
    (answer,), engine = played(once("kkk"), ["ab"], ["c"], max_tokens=room)
    assert (answer.finish, len(answer.tokens)) == (finish, tokens)
    assert len(engine.begun) == 1 + (tokens == 6)


def test_a_group_of_truncated_answers_is_over_at_once():
    group, engine = played(once("k"), ["abcd", "dcba"], max_tokens=4)
    assert [a.finish for a in group] == [LENGTH, LENGTH]
    assert all(a.said is None for a in group)
    assert len(engine.begun) == 1


def test_every_column_goes_on():
    group, engine = played(lambda p, text, f: "kk" if text == "ab" else None, ["ab", "b~"], ["cde", ""])
    long, short = group
    assert long.said.tolist() == [False] * 2 + [True] * 2 + [False] * 3
    assert short.said is None
    assert long.versions.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert long.logp.tolist() == [-1, -1, 0, 0, -1, -1, -1]
    assert long.experts[:, 1, 0].tolist() == [3, 3, 255, 255, 3, 3, 3]  # 255: nobody has recorded it
    assert [a.finish for a in engine.begun[1]] == [CANCELLED, EOS]
    many = groups.to_rollouts(TOKENIZER, [Prompt(5, "")], [Request((2,))], [group])
    assert many.said[1].tolist() == [False] * 7
    assert many.n_tokens.tolist() == [5, 2]
    again = groups.concatenated([replace(many, said=None), many])
    assert again.said.sum(axis=1).tolist() == [0, 0, 2, 0]


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_advantages_of_tokens_leave_it_out(kl_in):
    """With a critic, a λ by length and a KL penalty: what was said is as if it were not there."""
    penalty = {"kl": "k1", "kl_coef": 0.1, "kl_in": kl_in}
    adaptive = replace(ALGORITHMS["vapo"], nll_coef=0.0, **penalty)
    answers = with_said([6, 4, 9, 8], (0, 2, 4), (2, 1, 3), (2, 5, 8))
    keep = [np.flatnonzero(row) for row in answers.generated]
    shut = lambda x: groups._padded([row[at] for row, at in zip(x, keep, strict=True)])
    rng = np.random.default_rng(0)
    columns = {name: -rng.random(answers.tokens.shape, np.float32) for name in ("old_logp", "ref_logp", "values")}
    found = []
    for a, put in ((answers, lambda x: x), (replace(answers, lengths=answers.n_tokens, said=None), shut)):
        a = replace(a, tokens=put(a.tokens), sampler_logp=put(a.sampler_logp), versions=put(a.versions))
        batch, _ = batching.make_batch(a, CONFIG.model)
        width = ((0, 0), (0, batch.mask.shape[1] - a.tokens.shape[1]))
        batch = replace(batch, **{k: np.pad(put(v), width) for k, v in columns.items()})
        of_groups = {"kept": np.ones(2, bool), "prompt_ids": np.arange(2), "parts": np.zeros((2, 2, 0), np.float32)}
        batch, _ = learner.assign_advantages(adaptive, batch, REWARDS, a.generated, of_groups, None)
        found.append([np.asarray(x)[np.asarray(batch.mask)] for x in (batch.adv, batch.returns)])
        assert not np.asarray(batch.adv)[~np.asarray(batch.mask)].any()
    for said, never in zip(*found, strict=True):
        np.testing.assert_allclose(said, never, atol=1e-6)


def test_lengths_of_a_group_advantage_leave_it_out():
    answers = with_said([6, 4, 9, 8], (0, 2, 4), (2, 1, 3), (2, 5, 8))
    batch, _ = batching.make_batch(answers, CONFIG.model)
    seen = {}

    def watched(rewards, lengths):
        seen["lengths"] = lengths
        return advantages.opo(rewards, lengths)

    of_groups = {"kept": np.ones(2, bool), "prompt_ids": np.arange(2), "parts": np.zeros((2, 2, 0), np.float32)}
    learner.assign_advantages(replace(PLAIN, advantage=watched), batch, REWARDS, answers.generated, of_groups, None)
    assert seen["lengths"].tolist() == [[4, 4], [4, 8]]


def test_what_is_said_in_a_trace_is_not_learnt():
    asked, said = "abk", "nmn"
    trace = lambda prompt, behaviour, seed: (asked, said, "c") if behaviour == "of turns" else "abc"
    task = Task(tuple(ASKED), (), None, trace, ("of turns", "alone"))
    recipe = Prime((Stage(batches=1, mixture={"of turns": 1.0}), Stage(batches=1, mixture={"alone": 1.0})))
    several, alone = sft.traces(task, TOKENIZER, replace(recipe, traces_per_batch=2), 0)
    assert alone.said is None
    assert several.texts == ("abknmnc",) * 2
    assert several.tokens[0].tolist() == [*TOKENIZER.encode("abknmnc"), *TOKENIZER.eos_ids]
    batch, _ = batching.make_batch(several, MODEL)
    assert np.asarray(batch.mask)[0, :8].tolist() == [True] * 3 + [False] * 3 + [True] * 2
    no_end = replace(task, trace=lambda *_: (asked, said))
    with pytest.raises(ValueError, match=r"trace of prompt \d is \('abk', 'nmn'\); expected an odd number of texts"):
        next(sft.traces(no_end, TOKENIZER, replace(recipe, traces_per_batch=2), 0))

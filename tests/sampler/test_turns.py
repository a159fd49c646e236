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
from jaxrl_llm.config import values
from jaxrl_llm.learner import batching, learner
from jaxrl_llm.learner.packing import Division
from jaxrl_llm.learner.train_step import make_logprobs
from jaxrl_llm.run.modes import Position
from jaxrl_llm.sampler import decode, groups, turns
from jaxrl_llm.sampler.requests import Answer, Request
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

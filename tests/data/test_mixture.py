"""Mixtures: weights, epochs, filters, whose reward; and that hosts share a batch without a gap or an overlap."""

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest

from jaxrl_llm.data import fitting, tasks, templates, tokenizers
from jaxrl_llm.data.datasets import Subset
from jaxrl_llm.data.mixture import mixture
from jaxrl_llm.data.stream import Stream, share, turn
from jaxrl_llm.types import EOS, Prompt, Reward, Task

SIZES = {"a": 60, "b": 30, "c": 7}
WEIGHTS = {"a": 5.0, "b": 3.0, "c": 2.0}


def judged(name, prompt, text, finish):
    return Reward(float(text == prompt.answer), text == prompt.answer, name)


def task(name, n, n_test=4):
    prompts = [Prompt(i, f"{name}{i:02d}" + "x" * (i % 5), str(i), {"level": i % 5}) for i in range(n + n_test)]
    return Task(tuple(prompts[:n]), tuple(prompts[n:]), partial(judged, name))


def mixed(weights=WEIGHTS, sizes=SIZES):
    return mixture({name: partial(task, name, n) for name, n in sizes.items()}, weights)


def names(problems, indices):
    return [problems[int(i)].meta["task"] for i in indices]


def walk(stream, n, start=0, **asked):
    """Draws and indices of n prompts, one asked for after the other, as a run asks."""
    draws, indices, draw = [], [], start
    for _ in range(n):
        found, index = stream.next(draw, **asked)
        draws.append(found)
        indices.append(index)
        draw = found + 1
    return draws, indices


@pytest.mark.parametrize("weights", [(1.0,), (5.0, 3.0, 2.0), (1.0, 1e-3, 7.0, 0.3), (1 / 3, 1 / 3, 1 / 3)])
def test_turns_meet_the_weights_whatever_the_number_of_draws(weights):
    counts, shares = np.zeros(len(weights), int), np.array(weights) / sum(weights)
    for draw in range(5000):
        part, before = turn(draw, weights)
        assert before == counts[part]  # each part's own numbers are 0, 1, 2, …
        counts[part] += 1
        assert np.abs(counts - shares * (draw + 1)).max() < len(weights)


def test_the_order_is_a_function_of_the_draw_and_a_beginning_stays_one():
    stream = Stream(mixed().train, 3)
    prompts, draws, indices = stream.take(0, 500)
    assert walk(stream, 97)[1] == indices[:97].tolist()
    again = Stream(mixed().train, 3).take(123, 50)
    assert again[0] == prompts[123:173]
    assert Stream(mixed().train, 4).take(0, 500)[2].tolist() != indices.tolist()
    assert Counter(names(mixed().train, indices)) == {"a": 250, "b": 150, "c": 100}
    assert Counter(names(mixed().train, indices[:32])) == {"a": 16, "b": 10, "c": 6}


def test_each_source_has_its_own_epochs_in_a_new_order_each():
    problems = mixed().train
    indices = Stream(problems, 0).take(0, 2000)[2]
    for name, size in SIZES.items():
        own = [i for i in indices.tolist() if problems[i].meta["task"] == name]
        epochs = [own[k : k + size] for k in range(0, len(own) - size + 1, size)]
        assert len(epochs) > 10
        assert all(sorted(e) == sorted(epochs[0]) and len(set(e)) == size for e in epochs)
        assert len({tuple(e) for e in epochs}) > 10


def even(prompt):
    return prompt.meta["level"] % 2 == 0


@pytest.mark.parametrize("filtered", ["usable", "subset"])
def test_hosts_of_any_number_share_a_mixture_with_a_filter(filtered):
    """1 → 2 → 4 → 1 hosts: each source's epochs have every usable prompt once, and the weights hold."""
    problems = mixed().train
    left = [i for i in range(len(problems)) if even(problems[i])]
    stream = Stream(problems, 7, usable=even)
    if filtered == "subset":
        stream = Stream(Subset(problems, np.array(left)), 7)
    seen, draw, size = [], 0, 24
    for step, hosts in enumerate([1] * 10 + [2] * 10 + [4] * 10 + [1] * 10):
        batch = []
        for host in reversed(range(hosts)):  # each knows the step alone, and what it saw does not matter
            own = replace(stream)
            draws = range(step * size, (step + 1) * size)
            batch += [(draws[k], own.problems[own.next(draws[k])[1]]) for k in share(size, host, hosts)]
        batch.sort(key=lambda pair: pair[0])
        assert [d for d, _ in batch] == list(range(draw, draw + size))
        draw += size
        seen += [p for _, p in batch]
    assert [p.text for p in seen] == [p.text for p in stream.take(0, len(seen))[0]]
    counts = Counter(p.meta["task"] for p in seen)
    for name, weight in WEIGHTS.items():
        assert abs(counts[name] - len(seen) * weight / 10) <= len(WEIGHTS)
        own, usable = [p.id for p in seen if p.meta["task"] == name], [i for i in range(SIZES[name]) if i % 5 % 2 == 0]
        for k in range(0, len(own), len(usable)):
            epoch = own[k : k + len(usable)]
            assert len(set(epoch)) == len(epoch)
            assert set(epoch) <= set(usable)
            assert len(epoch) < len(usable) or sorted(epoch) == usable


def test_shares_of_hosts_are_disjoint_and_whole():
    for count, hosts in ((24, 4), (7, 3), (2, 5), (0, 2)):
        assert [k for host in range(hosts) for k in share(count, host, hosts)] == list(range(count))
    with pytest.raises(ValueError, match="host is 2; expected 0 to hosts - 1 = 1"):
        share(8, 2, 2)


def test_the_weights_hold_while_prompts_are_retired():
    """Half of a's prompts are always solved: those that are left come more often, and b and c no more than before."""
    problems = mixed().train
    solved = dict.fromkeys(range(30), (8, 8))
    stream = Stream(problems, 1, retire_above=0.9)
    indices = walk(stream, 1000, counts=solved)[1]
    assert not set(indices) & set(solved)
    assert Counter(names(problems, indices)) == {"a": 500, "b": 300, "c": 200}
    own = Counter(i for i in indices if i < 60)
    assert set(own) == set(range(30, 60))
    assert max(own.values()) < 3 * min(own.values())


def test_a_batch_has_distinct_prompts_also_where_a_source_is_small():
    problems, stream = mixed().train, Stream(mixed().train, 2)
    for start in (0, 40, 200):
        batch, draw = [], start
        for _ in range(60):  # 12 of c are asked for, which has 7
            found, index = stream.next(draw, in_batch=frozenset(batch))
            batch.append(index)
            draw = found + 1
        assert len(set(batch)) == 60
        assert Counter(names(problems, batch))["c"] == 7
        assert draw == start + 60


def test_a_source_of_which_nothing_is_left_gives_its_turns_to_the_others():
    stream = Stream(mixed().train, 2, usable=lambda p: p.meta["task"] != "a")
    assert set(names(stream.problems, walk(stream, 40)[1])) == {"b", "c"}
    with pytest.raises(RuntimeError, match="0 of 97 training prompts are left"):
        replace(stream, usable=lambda p: False).next(0)


def test_difficulty_and_priority_within_each_source():
    problems = mixed().train
    curriculum = Stream(problems, 0, difficulty=lambda p: p.meta["level"], total_steps=5)
    for step in range(5):
        found = walk(curriculum, 40, 40 * step, step=step)[1]
        assert Counter(names(problems, found)) == {"a": 20, "b": 12, "c": 8}
        levels = {problems[i].meta["level"] for i in found if problems[i].meta["task"] != "c"}  # 7 do not part in 5
        assert levels == {step}
    solved = dict.fromkeys(range(59), (4, 4))
    found = walk(Stream(problems, 0, prioritized=True), 400, counts=solved)[1]
    counts = Counter(names(problems, found))
    assert counts == {"a": 200, "b": 120, "c": 80}
    assert found.count(59) > 170


def test_templates_and_dropped_prompts_leave_the_parts_known(capsys):
    opened = fitting.open_task(mixed, partial(templates.custom, text="{question}!"))
    assert opened.train.parts == ((5.0, 0, 60), (3.0, 60, 30), (2.0, 90, 7))
    fitted, usable = fitting.fitting(opened, tokenizers.characters("abcx!0123456789"), 6, "drop")
    assert usable is None
    assert fitted.train.parts == ((5.0, 0, 36), (3.0, 36, 18), (2.0, 54, 5))
    assert capsys.readouterr().err.startswith("dropped 38 of 97 train prompts longer than 6 tokens")
    indices = Stream(fitted.train, 0).take(0, 300)[2]
    assert Counter(names(fitted.train, indices)) == {"a": 150, "b": 90, "c": 60}
    assert len(set(indices[:50].tolist()) & set(range(36))) == 25
    assert fitted.train[0].text == "a00!"


def test_of_a_mixture_with_a_million_problems_a_sample_is_looked_at_and_the_rest_in_turn(capsys):
    chain = partial(tasks.chain, terms=(3, 7))  # 7 to 15 characters
    made = mixture({"chain": chain, "a": partial(task, "a", 40)}, {"chain": 1.0, "a": 1.0})
    left, usable = fitting.fitting(made, tokenizers.characters(), 13, "drop")
    assert left.train is made.train
    stream = Stream(left.train, 0, usable=usable)
    prompts = stream.take(0, 80)[0]
    assert [p.text for p in prompts] == [left.train[i].text for i in walk(stream, 80)[1]]
    assert max(len(p.text) for p in prompts) == 13
    assert Counter(p.meta["task"] for p in prompts) == {"chain": 40, "a": 40}
    assert len({p.id for p in prompts if p.meta["task"] == "a"}) == 40
    assert "passed over prompt" in capsys.readouterr().err


@dataclass(frozen=True)
class Submitted:
    pool: ThreadPoolExecutor

    def __call__(self, prompt, text, finish):
        return judged("pool", prompt, text, finish)

    def submit(self, prompt, text, finish) -> Future:
        return self.pool.submit(self, prompt, text, finish)


def test_each_prompt_is_judged_by_its_own_source():
    with ThreadPoolExecutor(2) as pool:
        made = mixture({"a": partial(task, "a", 5), "b": lambda: replace(task("b", 5), reward=Submitted(pool))})
        for prompt in (*made.train, *made.test):
            name = {"a": "a", "b": "pool"}[prompt.meta["task"]]
            assert made.reward(prompt, prompt.answer, EOS) == Reward(1.0, True, name)
            assert made.reward.submit(prompt, "no", EOS).result() == Reward(0.0, False, name)


def test_an_environment_speaks_to_its_own_prompts_alone():
    env = lambda: replace(task("b", 5), step=lambda prompt, text, finish: f"{finish}: {text}")
    made = mixture({"a": partial(task, "a", 5), "b": env})
    for prompt in (*made.train, *made.test):
        said = {"a": None, "b": "eos: so"}[prompt.meta["task"]]
        assert made.step(prompt, "so", EOS) == made.step.submit(prompt, "so", EOS).result() == said
    assert mixed().step is None


def test_test_problems_of_all_sources_come_from_the_start():
    made = mixture({"a": partial(task, "a", 5, 40), "b": partial(task, "b", 5, 20)})
    assert Counter(p.meta["task"] for p in made.test[:12]) == {"a": 8, "b": 4}
    assert len({(p.meta["task"], p.id) for p in made.test}) == 60


def test_traces_are_their_own_sources():
    chain = partial(tasks.chain, n_train=20, n_test=5)
    made = mixture(
        {"short": partial(chain, terms=(3, 3)), "long": partial(chain, terms=(9, 9))}, {"short": 1, "long": 3}
    )
    prompts = Stream(made.train, 0).take(0, 8)[0]
    assert Counter(p.meta["task"] for p in prompts) == {"short": 2, "long": 6}
    for p in prompts:
        assert made.reward(p, made.trace(p, "clean", 0), EOS).correct
    assert mixture({"chain": chain, "a": partial(task, "a", 5)}).trace is None


def test_without_weights_all_prompts_count_the_same():
    indices = Stream(mixed(None).train, 0).take(0, 97)[2]
    assert sorted(indices.tolist()) == list(range(97))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1.0}, "mixture: weights is {'a': 1.0}; expected a positive number for each of a, b, c"),
        (WEIGHTS | {"c": 0.0}, "mixture: weights is .*'c': 0.0"),
        (WEIGHTS | {"d": 1.0}, "mixture: weights is .*'d': 1.0"),
        (WEIGHTS | {"c": float("nan")}, "mixture: weights is .*'c': nan"),
    ],
)
def test_wrong_weights_are_named(weights, message):
    with pytest.raises(ValueError, match=message):
        mixed(weights)


def test_each_prompt_has_the_step_and_the_reward_of_its_own_task():
    """One task says something, the other nothing; an error of a verifier stays in the future it belongs to."""

    def broken(prompt, text, finish):
        raise KeyError("the grader is down")

    side = tuple(Prompt(i, str(i)) for i in range(8))
    talks = Task(side, side, lambda p, t, f: Reward(1.0, True), step=lambda p, t, f: f"heard {t}")
    quiet = Task(side, side, broken)
    both = mixture({"talks": lambda: talks, "quiet": lambda: quiet})
    of = {name: next(p for p in both.train if p.meta["task"] == name) for name in ("talks", "quiet")}
    assert both.step(of["talks"], "x", "stop") == both.step.submit(of["talks"], "x", "stop").result() == "heard x"
    assert both.step(of["quiet"], "x", "stop") is None
    assert both.reward.submit(of["talks"], "x", "eos").result().correct
    failed = both.reward.submit(of["quiet"], "x", "eos")
    with pytest.raises(KeyError, match="the grader is down"):
        failed.result()
    assert mixture({"quiet": lambda: quiet}).step is None

"""Evaluation by a sampler that is stood in for: order, seeds, files that are gone on with, votes, baselines."""

import json
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import pytest

from jaxrl_llm.config import Suite
from jaxrl_llm.data import tokenizers
from jaxrl_llm.run import evals, suites
from jaxrl_llm.run.evals import Asked, Sample, by_problem, constant, grouped, read, rescored, sample, summary
from jaxrl_llm.sampler.requests import Answer
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.types import CANCELLED, EOS, LENGTH, Prompt, Reward

TOKENIZER = tokenizers.characters()
GOLDS = ("4", "7", "7", "1,000", "x")
PROMPTS = tuple(
    Prompt(i, f"<{i}+>", gold, {"source": "ab"[i % 2], "level": i // 2}, f"{i}+") for i, gold in enumerate(GOLDS)
)
# What the stand-in says to each problem, four answers; "~": cut short
TEXTS = (
    ("#4", "#4", "#5", "?"),
    ("#7", "#8", "#8", "#8"),
    ("#7", "#7.0", "#3", "#7~"),
    ("#1000", "#1,000", "#2", "#2"),
    ("", "?", "#y", "#x"),
)


def verdict(prompt, text, finish):
    _, mark, said = text.rpartition("#")
    said = said if mark else None
    same = said is not None and said.replace(",", "").removesuffix(".0") == prompt.answer.replace(",", "")
    return Reward(float(same), same and finish == EOS, said)


@dataclass(frozen=True)
class StandIn:
    """Answers three requests at a time, the last one first."""

    tokenizer: object = TOKENIZER
    sampling: Sampling = Sampling()
    max_tokens: int = 16
    stop: tuple = ()
    max_prompt_tokens: int = 99
    asked: list = field(default_factory=list)

    def sample(self, next_request, latest=None):
        while True:
            batch = [r for r in (next_request() for _ in range(3)) if r is not None]
            if not batch:
                return
            self.asked.extend(batch)
            for request in reversed(batch):
                yield request, tuple(map(self.answer, TEXTS[request.draw][: request.group]))

    def answer(self, text):
        ids = np.array(
            [*TOKENIZER.encode(text.rstrip("~")), *([] if "~" in text else [TOKENIZER.eos_ids[0]])], np.int32
        )
        return Answer(ids, np.zeros(len(ids), np.float32), ids * 0, LENGTH if "~" in text else EOS)


def asked(**changes):
    return Asked(Suite(None, samples=4, **changes), PROMPTS, verdict, 4, settings={"suite": "s", "step": 3})


def test_samples_in_the_problems_order_drawn_from_seeds_of_their_own():
    engine = StandIn()
    found = sample(engine, asked(), 5)
    assert [(s.problem, s.number) for s in found] == [(p, n) for p in range(5) for n in range(4)]
    assert [(r.seed, r.draw, r.group, r.max_tokens) for r in engine.asked] == [(2**31 + 5, d, 4, 16) for d in range(5)]
    assert engine.asked[0].sampling == Sampling()
    assert [s.text for s in found[8:12]] == ["#7", "#7.0", "#3", "#7"]
    assert [s.correct for s in found[8:12]] == [True, True, False, False]
    assert [s.vote for s in found[8:12]] == ["7", "7", "3", "7"]
    assert [s.tokens for s in found[8:12]] == [3, 5, 3, 2]
    assert (found[9].prompt, found[9].question, found[9].answer) == ("<2+>", "2+", "7")
    assert (found[9].meta, found[9].finish, found[11].finish) == ({"source": "a", "level": 1}, EOS, LENGTH)


def test_its_own_temperature_top_p_and_tokens():
    engine = StandIn(sampling=Sampling(0.7, top_k=3))
    sample(engine, replace(asked(temperature=0.0, top_p=0.9, max_tokens=7), stop=("#",)), 5)
    request = engine.asked[0]
    assert (request.sampling, request.max_tokens, request.stop) == (Sampling(0.0, 3, 0.9), 7, ("#",))


def test_summary_by_hand():
    found = summary(sample(StandIn(), asked(), 0))
    right = np.array([2, 1, 2, 2, 1])
    np.testing.assert_allclose(found["accuracy"], right.mean() / 4)
    np.testing.assert_allclose(found["pass@2"], np.mean([5 / 6, 1 / 2, 5 / 6, 5 / 6, 1 / 2]))
    np.testing.assert_allclose(found["pass@4"], 1)
    # 4 4 5: right; 8 8 8: wrong; 7 7 7 of which one is cut short: 2/3; 1000 1000 2 2: a tie; y x: a tie
    np.testing.assert_allclose(found["maj@4"], np.mean([1, 0, 2 / 3, 1 / 2, 1 / 2]))
    np.testing.assert_allclose(found["truncated"], 1 / 20)
    lengths = np.array([len(t.rstrip("~")) + ("~" not in t) for row in TEXTS for t in row])
    correct = np.array([s.correct for s in sample(StandIn(), asked(), 0)])
    np.testing.assert_allclose(found["length"], lengths.mean())
    np.testing.assert_allclose(found["length/correct"], lengths[correct].mean())
    np.testing.assert_allclose(found["length/wrong"], lengths[~correct].mean())
    assert list(found) == [
        "accuracy", "pass@2", "pass@4", "maj@4", "length", "length/correct", "length/wrong", "truncated",
    ]  # fmt: skip


def test_by_source_and_level():
    found = sample(StandIn(), asked(), 0)
    assert {n: sorted({s.problem for s in of}) for n, of in grouped(found, "source").items()} == {
        "a": [0, 2, 4],
        "b": [1, 3],
    }
    assert {n: sorted({s.problem for s in of}) for n, of in grouped(found, "level").items()} == {
        "0": [0, 1],
        "1": [2, 3],
        "2": [4],
    }
    assert grouped(found, "subject") == {}
    np.testing.assert_allclose(by_problem(grouped(found, "source")["b"])["accuracy"], [1 / 4, 2 / 4])


def test_a_file_that_was_cut_short_is_gone_on_with(tmp_path):
    file, whole = tmp_path / "deep" / "s.jsonl", sample(StandIn(), asked(), 0)
    assert sample(StandIn(), asked(), 0, file) == whole
    assert read(file) == ({"suite": "s", "step": 3}, sorted(whole, key=lambda s: read_order(file).index(s.problem)))
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 21
    for keep in (0, 1, 3, 5, 9, 20):  # in the middle of a problem too
        for cut in ("", lines[keep][:20]):
            file.write_text("".join(lines[:keep]) + cut if keep else "")
            engine = StandIn()
            assert sample(engine, asked(), 0, file) == whole
            assert len(engine.asked) == 5 - max(keep - 1, 0) // 4
            assert len(file.read_text().splitlines()) == 21
    engine = StandIn()
    assert sample(engine, asked(), 0, file) == whole
    assert engine.asked == []
    fewer = replace(asked(), prompts=PROMPTS[:2])
    assert sample(engine, fewer, 0, file) == whole[:8]


def read_order(file):
    return list(dict.fromkeys(json.loads(line)["problem"] for line in file.read_text().splitlines()[1:]))


def test_a_file_of_another_evaluation_is_refused(tmp_path):
    file = tmp_path / "s.jsonl"
    sample(StandIn(), asked(), 0, file)
    before = file.read_bytes()
    with pytest.raises(ValueError, match="s.jsonl is 'step: 3 → 4'; expected the same settings, or --out"):
        sample(StandIn(), replace(asked(), settings={"suite": "s", "step": 4}), 0, file)
    with pytest.raises(ValueError, match=r"problem 0 is '<0\+>'; expected 'other'"):
        sample(StandIn(), replace(asked(), prompts=(Prompt(0, "other"), *PROMPTS[1:])), 0, file)
    assert file.read_bytes() == before
    with pytest.raises(ValueError, match="no such file"):
        read(tmp_path / "none.jsonl")
    file.write_text('{"settings": {"suite": "s"}}\n{"problem": 1}\n{}\n')
    with pytest.raises(ValueError, match=r"s.jsonl:2: .*expected a line of jaxrl eval's samples"):
        read(file)
    for first in ("{}", '{"settings": {}}', '{"settings": null}', "[]"):
        file.write_text(f"{first}\n")
        with pytest.raises(ValueError, match=r"s.jsonl:1: .*expected a line"):
            read(file)


def test_of_a_file_that_was_cut_short_only_whole_problems_are_read(tmp_path):
    file = tmp_path / "s.jsonl"
    whole = sample(StandIn(), replace(asked(), settings={"suite": "s", "samples": 4}), 0, file)
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:7]))  # six answers: four, and two of a second
    (problem,) = {s.problem for s in read(file)[1]}
    assert read(file)[1] == [s for s in whole if s.problem == problem]


def test_a_reward_that_raises_names_the_prompt_and_loses_nothing_that_was_judged(tmp_path):
    def broken(prompt, text, finish):
        if prompt.id == 4:
            raise KeyError("down")
        return verdict(prompt, text, finish)

    file = tmp_path / "s.jsonl"
    with pytest.raises(ValueError, match="reward of prompt 4 raised KeyError"):
        sample(StandIn(), replace(asked(), reward=broken), 0, file)
    assert {0, 1, 2} <= {s.problem for s in read(file)[1]}


def test_judged_again(tmp_path):
    found = sample(StandIn(), asked(), 0)
    assert rescored(found, verdict) == found
    longer = lambda prompt, text, finish: Reward(float(len(text)), len(text) > 2, text[:1])
    again = rescored(found, longer)
    assert [s.text for s in again] == [s.text for s in found]
    assert [s.correct for s in again] == [len(s.text) > 2 for s in found]
    assert [s.vote for s in again] == [s.text[:1] for s in found]
    prompts = []
    rescored(found[4:8], lambda prompt, text, finish: prompts.append((prompt, finish)) or Reward(0.0, False))
    assert prompts == [(replace(PROMPTS[1], id=1), EOS)] * 4


def test_the_task_s_own_equality_decides_votes():
    class Judge:
        def __call__(self, *of):
            return verdict(*of)

        def same(self, a, b):
            return {a, b} == {"8", "7"} or a == b

    found = sample(StandIn(), replace(asked(), reward=Judge()), 0)
    assert [s.vote for s in found[4:8]] == ["7"] * 4
    assert [s.vote for s in found[:4]] == ["4", "4", "5", None]


@pytest.mark.parametrize(
    ("form", "accepted"), [("#{}", True), ("\\boxed{{{}}}", True), ("<answer>{}</answer>", True), ("!{}!", False)]
)
def test_the_best_constant_answer_is_written_as_the_reward_reads_it(form, accepted):
    judge = lambda prompt, text, finish: Reward(0.0, finish == EOS and text == form.format(prompt.answer))
    assert constant(PROMPTS, judge) == ((False, True, True, False, False) if accepted else ())
    assert constant([Prompt(0, "")], judge) == ()
    lists = [replace(p, answer=[p.answer, "other"]) for p in PROMPTS]
    in_list = lambda prompt, text, finish: judge(replace(prompt, answer=prompt.answer[0]), text, finish)
    assert constant(lists, in_list) == constant(PROMPTS, judge)


def test_a_suite_that_is_opened_has_the_problems_that_fit(capsys):
    from jaxrl_llm.data import templates
    from jaxrl_llm.types import Task

    class C:
        model = type("M", (), {"max_positions": 20})
        rollout = type("R", (), {"max_response_tokens": 8, "max_prompt_tokens": 4, "servers": ()})

    prompts = (*PROMPTS, Prompt(5, "é", "1"), Prompt(6, "1234567890123", "1"), Prompt(7, "123456789012", "7"))
    suite = Suite(lambda: Task(prompts, prompts, verdict), problems=8)
    found = evals.opened("s", suite, templates.none, TOKENIZER, C)
    assert [p.id for p in found.prompts] == [0, 1, 2, 3, 4, 7]
    assert found.longest == 12
    assert found.constant == (False, True, True, False, False, True)
    assert "s: 2 of 8 problems are left out: their prompts are longer than 12 tokens, or" in capsys.readouterr().err
    assert len(evals.opened("s", replace(suite, problems=3), templates.none, TOKENIZER, C).prompts) == 3
    assert evals.opened("s", replace(suite, max_tokens=7), templates.none, TOKENIZER, C).longest == 13
    C.rollout.servers = ("a:1",)
    assert evals.opened("s", suite, templates.none, TOKENIZER, C).longest == 4
    with pytest.raises(
        ValueError, match="suite s is 'no problem that can be asked'; expected prompts of 1 to 4 tokens"
    ):
        evals.opened("s", Suite(lambda: Task(prompts[5:], prompts[5:], verdict)), templates.none, TOKENIZER, C)


def test_a_line_has_every_field(tmp_path):
    sample(StandIn(), asked(), 0, tmp_path / "s.jsonl")
    line = json.loads((tmp_path / "s.jsonl").read_text().splitlines()[1])
    assert set(line) == set(Sample.__dataclass_fields__)
    assert Sample(**line) == Sample(**asdict(Sample(**line)))


@dataclass(frozen=True)
class Turns(StandIn):
    """Goes on behind what it has been told; its first turn is its text up to a comma."""

    def sample(self, next_request, latest=None):
        while (request := next_request()) is not None:
            begun = request.begun or (None,) * request.group
            yield request, tuple(map(self.turn, TEXTS[request.draw][: request.group], begun))

    def turn(self, text, begun):
        if begun is None:
            return self.answer(text.partition(",")[0])
        if begun.finish != CANCELLED:
            return replace(begun, said=None)
        ended = self.answer(text.partition(",")[2])
        more = lambda name: np.concatenate([getattr(begun, name), getattr(ended, name)])
        return Answer(*map(more, ("tokens", "logp", "versions")), ended.finish)


def test_an_evaluation_in_an_environment_has_its_turns(monkeypatch):
    said = lambda prompt, text, finish: "go on: " if "go on: " not in text and text.startswith("a") else None
    texts = {0: ["ab,#12", "c"], 1: ["a,#7", "ab,#9"]}
    prompts = tuple(Prompt(i, f"q{i}", str(a)) for i, a in enumerate((12, 9)))
    asked = Asked(Suite(None, problems=2, samples=2), prompts, verdict, 99, step=said)
    monkeypatch.setitem(globals(), "TEXTS", texts)
    samples = sample(Turns(max_tokens=40), asked, 0)
    assert [s.text for s in samples] == ["abgo on: #12", "c", "ago on: #7", "abgo on: #9"]
    assert [s.correct for s in samples] == [True, False, False, True]
    assert [s.tokens for s in samples] == [7, 2, 5, 6]  # what it has drawn, the ends of turns included


def test_two_suites_of_one_name_are_an_error(tmp_path):
    (tmp_path / "b").mkdir()
    files = [tmp_path / "s.jsonl", tmp_path / "b" / "s.jsonl"]
    for file in files:
        file.write_text('{"prompt": "1+1", "answer": "2"}\n')
    with pytest.raises(ValueError, match="b/s.jsonl is 'a second suite of its name'; expected another name than 's'"):
        suites.chosen([str(file) for file in files])


def test_a_gold_of_a_suite_that_cannot_be_verified_names_its_line(tmp_path):
    file = tmp_path / "s.jsonl"
    file.write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "2+2", "answer": "\\\\frac{"}\n')
    with pytest.raises(ValueError, match=r"s.jsonl:2.*\\frac\{"):
        suites.benchmark(file)

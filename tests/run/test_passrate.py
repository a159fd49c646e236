"""Pass rates for curation: an environment answers the policy, but not one that is asked for its answer at once."""

from dataclasses import replace

import jax
from cases import CONFIG

from jaxrl_llm.run import passrate, trainer
from jaxrl_llm.types import Prompt, Reward


def test_an_environment_has_its_turns_in_a_pass_rate(monkeypatch, tmp_path):
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, stop=tuple("abcdefghijklmnopqrstuvwxyz")))
    learner, told, judged = trainer.build(config), [], []

    def step(prompt, text, finish):
        told.append(prompt.text)
        return "#" if "#" not in text else None

    def reward(prompt, text, finish):
        judged.append((prompt.text, text))
        return Reward(1.0, "#" in text)

    learner = replace(learner, task=replace(learner.task, reward=reward, step=step))
    with jax.set_mesh(learner.mesh):
        state = trainer.fresh_state(learner)
    monkeypatch.setattr(trainer, "load_state", lambda run: (learner, state, 0))
    prompts = [Prompt(0, "a1b2c0:"), Prompt(1, "a much too long one of many characters"), Prompt(2, "b1c1:")]
    found = passrate.measure(tmp_path, samples=3, direct="=", direct_tokens=4)(prompts)
    assert found[1] is None
    assert len(judged) == 12
    assert all(not text.startswith("=") for _, text in judged[:6])
    assert all(text.startswith("=") for _, text in judged[6:])
    assert {text for text, _ in judged} == {prompts[0].text, prompts[2].text}
    assert set(told) <= {prompts[0].text, prompts[2].text}
    assert any("#" in text for _, text in judged[:6])
    for i in (0, 2):
        right = [["#" in text for name, text in part if name == prompts[i].text] for part in (judged[:6], judged[6:])]
        assert found[i] == {"pass_rate": sum(right[0]) / 3, "direct_rate": sum(right[1]) / 3}

"""How often the log-prob pass and the train step are compiled."""

from dataclasses import replace

import jax
import pytest
from cases import CONFIG, PLAIN, REWARDS, rollouts_of, scored

from jaxrl_llm.config import Mesh
from jaxrl_llm.learner import learner, train_step
from jaxrl_llm.objective import losses
from jaxrl_llm.objective.algorithms import Updates


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(data=2)], ids=["one device", "two"])
def test_one_compilation_for_old_reference_and_live_log_probs(monkeypatch, mesh):
    """A compilation traces the model once; the batch has other arrays at each of the three passes."""
    chosen = Updates(token_filter=losses.top_entropy, epochs=2)
    a = replace(PLAIN, kl="k3", kl_coef=0.1, updates=chosen)
    made = learner.build(replace(CONFIG, algorithm=a, mesh=mesh))
    traced, original = [], train_step.response_logprobs
    spy = lambda *args: traced.append(args) or original(*args)
    monkeypatch.setattr(train_step, "response_logprobs", spy)
    with jax.set_mesh(made.mesh):
        state = learner.fresh_state(made)
        made = replace(made, ref_params=jax.tree.map(jax.numpy.copy, state.params))
        for _ in range(2):
            batch, state, _ = learner.learn_batch(made, state, scored(rollouts_of([3, 4, 5, 6]), REWARDS))
            assert batch.old_logp is not None
            state, _ = learner.update(made, state, batch)
    assert len(traced) == 2  # the log-prob pass's trace, and the train step's

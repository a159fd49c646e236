"""The config tree: overrides by path, validation, JSON both ways, and no field that nothing reads."""

import ast
import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm import config as configs
from jaxrl_llm.config import Checkpoint, Config, Evaluation, Mesh, Prime, Rollout, Stage, override, validate, values
from jaxrl_llm.data import datasets, tasks, tokenizers
from jaxrl_llm.data.datasets import cache_folder
from jaxrl_llm.learner import learner
from jaxrl_llm.models.transformer import LoRA, ModelConfig, RopeScaling
from jaxrl_llm.objective import advantages, filters, losses
from jaxrl_llm.objective.algorithms import ALGORITHMS, Algorithm, Shaping, Term, Updates
from jaxrl_llm.rewards import length
from jaxrl_llm.types import Optimizer, Prompt, Task

ROOT = Path(__file__).parents[2]
TINY = ModelConfig(vocab_size=112, layers=1, width=16, heads=2, kv_heads=1, head_width=8, mlp_width=16)
MEMORY, SELECT = "jaxrl_llm.objective.advantages:dcpo_sas_init", "jaxrl_llm.objective.losses:select_clip_cov"
BASE = Config(
    task=partial(tasks.chain, terms=(4, 10)),
    model=TINY,
    prime=Prime((Stage(40, {"clean": 1.0}), Stage(20, {"clean": 0.5, "recheck": 0.5}))),
    algorithm=replace(
        ALGORITHMS["dapo"],
        shaping=Shaping(terms={"overlong": Term(partial(length.soft_overlong, cache_len=16))}),
        updates_per_batch=2,
    ),
)


def assign(*assignments, config=BASE):
    return override(config, *assignments)


# ---- overrides


def test_override_goes_through_dataclasses_and_leaves_the_rest_alone():
    changed = assign("rollout.prompts=16", "algorithm.kl_coef=0", "model.rope_theta=1e6", "steps=7")
    assert changed.rollout == replace(BASE.rollout, prompts=16)
    assert changed.model == replace(TINY, rope_theta=1e6)
    assert changed.steps == 7
    assert changed.prime is BASE.prime
    assert BASE.steps == 100


def test_override_of_a_partials_keyword_keeps_its_other_keywords():
    loss = assign("algorithm.loss.clip_high=0.3").algorithm.loss
    assert loss.func is losses.ppo_clip
    assert loss.keywords == {"clip_low": 0.2, "clip_high": 0.3}
    assert assign("task.terms=(3,5)").task.keywords == {"terms": (3, 5)}
    assert assign("task.terms=[3,5]").task.keywords == {"terms": (3, 5)}


def test_override_of_a_keyword_without_default_that_the_partial_has_bound():
    reward = assign("algorithm.shaping.terms.overlong.fn.cache_len=12").algorithm.shaping.terms["overlong"].fn
    assert reward(n_tokens=20, max_len=20) == -1
    assert reward.keywords == {"cache_len": 12.0}


def test_override_of_a_plain_functions_keyword_makes_a_partial():
    plain = assign("algorithm.advantage.ddof=0", config=replace(BASE, algorithm=ALGORITHMS["grpo"]))
    assert plain.algorithm.advantage.func is advantages.grpo
    assert plain.algorithm.advantage.keywords == {"ddof": 0}


def test_override_of_a_partial_with_positional_arguments_keeps_them():
    config = replace(BASE, task=partial(tasks.chain, 4, (2, 3)))
    task = assign("task.seed=9", config=config).task
    assert task.keywords == {"modulus": 4, "terms": (2, 3), "seed": 9}
    assert assign("task.modulus=6", config=config).task.keywords == {"modulus": 6, "terms": (2, 3)}


def _graded(prompt, text, *, scale: float = 1.0):
    return scale * (text == prompt.answer)


def test_override_reaches_a_partial_inside_of_a_partial():
    task = partial(datasets.jsonl, path="problems.jsonl", reward=partial(_graded, scale=0.5))
    changed = assign("task.reward.scale=2", "task.held_out=0.25", config=replace(BASE, task=task)).task
    assert changed.keywords["reward"].func is _graded
    assert changed.keywords["reward"].keywords == {"scale": 2}
    assert (changed.keywords["path"], changed.keywords["held_out"]) == ("problems.jsonl", 0.25)


def test_override_of_tuple_elements_and_mapping_keys():
    stages = assign("prime.stages.0.batches=5", "prime.stages.1.mixture.clean=0.9").prime.stages
    assert stages == (Stage(5, {"clean": 1.0}), Stage(20, {"clean": 0.9, "recheck": 0.5}))
    assert BASE.prime.stages[1].mixture["clean"] == 0.5
    assert assign("rollout.stop=('#','x')", "rollout.stop.1=;").rollout.stop == ("#", ";")


def _with_a_function(graded=_graded):
    return tasks.chain()


def test_override_of_a_function_that_is_a_keyword_without_annotation():
    config = replace(BASE, task=_with_a_function)
    assert assign("task.graded=jaxrl_llm.objective.losses:kl", config=config).task.keywords == {"graded": losses.kl}
    with pytest.raises(ValueError, match="task.graded: 5 is not valid; expected Callable"):
        assign("task.graded=5", config=config)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "assignments",
    [
        ("algorithm.loss=jaxrl_llm.objective.losses:gspo", "algorithm.norm=sequence"),
        ("algorithm.advantage=jaxrl_llm.objective.advantages:dcpo_sas", f"algorithm.memory={MEMORY}"),
        ("algorithm.loss=jaxrl_llm.objective.losses:clip_cov", f"algorithm.updates.select={SELECT}"),
        ("rollout.allow_filtered=true", "rollout.top_k=5"),
    ],
)
def test_fields_that_need_each_other_come_in_any_order(assignments, turned):
    changed = validate(
        assign(*assignments[:: -1 if turned else 1], config=replace(BASE, algorithm=ALGORITHMS["dr_grpo"]))
    )
    for assignment in assignments:
        path, _, text = assignment.partition("=")
        value = attrgetter(path)(changed)
        assert text.endswith(getattr(value, "__name__", str(value).lower()))


def test_of_two_values_for_a_field_the_last_counts_and_a_new_function_takes_the_later_keywords():
    assert assign("steps=3", "steps=5").steps == 5
    loss = assign(
        "algorithm.loss.clip_high=9", "algorithm.loss=jaxrl_llm.objective.losses:cispo", "steps=4"
    ).algorithm.loss
    assert loss is losses.cispo
    loss = assign("algorithm.loss=jaxrl_llm.objective.losses:cispo", "algorithm.loss.ratio_max=3").algorithm.loss
    assert (loss.func, loss.keywords) == (losses.cispo, {"ratio_max": 3.0})


def test_override_of_a_whole_function_by_name():
    algorithm = assign("algorithm.loss=jaxrl_llm.objective.losses:reinforce").algorithm
    assert algorithm.loss is losses.reinforce
    assert assign("algorithm.group_filter=none").algorithm.group_filter is None
    assert assign("tokenizer=jaxrl_llm.data.tokenizers:characters").tokenizer is tokenizers.characters
    assert assign("algorithm.group_filter=jaxrl_llm.objective.filters:mixed").algorithm.group_filter is filters.mixed


def test_an_int_becomes_a_float_where_one_is_wanted():
    lr = assign("optimizer.lr=1").optimizer.lr
    assert (lr, type(lr)) == (1.0, float)
    mixture = assign("prime.stages.0.mixture={'clean': 1, 'recheck': 2}").prime.stages[0].mixture
    assert [type(v) for v in mixture.values()] == [float, float]
    assert assign("rollout.allow_filtered=true").rollout.allow_filtered is True


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("algoritm.kl_coef=0.1", ["algoritm", "Config", "'algorithm'"]),
        ("rollout.promts=3", ["rollout.promts", "'promts'", "Rollout", "'prompts'"]),
        ("algorithm.loss.clip_hi=3", ["algorithm.loss.clip_hi", "ppo_clip", "'clip_high'"]),
        ("task.term=3", ["task.term", "chain", "'terms'"]),
        ("algorithm.loss=jaxrl_llm.objective.losses:reinforcement", ["'reinforcement'", "'reinforce'"]),
        ("algorithm.loss=no_such.module:f", ["no_such", "module:function"]),
        ("algorithm.correction=jaxrl_llm.objective.losses:tis", ["jaxrl_llm.objective.losses", "'tis'"]),
        ("rollout.prompts", ["rollout.prompts", "path.to.field=value"]),
        ("prime.stages.7.batches=3", ["prime.stages.7", "'7'"]),
        ("steps.more=3", ["steps.more", "100"]),
        ("rollout.prompts=many", ["rollout.prompts", "'many'", "int"]),
        ("rollout.prompts=2.5", ["rollout.prompts", "2.5", "int"]),
        ("rollout.prompts=True", ["rollout.prompts", "True", "int"]),
        ("rollout.temperature=hot", ["rollout.temperature", "'hot'", "float"]),
        ("rollout.temperature=true", ["rollout.temperature", "True", "float"]),
        ("rollout.stop=abc", ["rollout.stop", "'abc'", "tuple[str, ...]"]),
        ("rollout.stop=('a', 3)", ["rollout.stop.1", "3", "str"]),
        ("optimizer.schedule=cosin", ["optimizer.schedule", "'cosin'", "'cosine'"]),
        ("prime.stages.0.mixture={'clean': 'all'}", ["prime.stages.0.mixture.clean", "'all'", "float"]),
        ("algorithm.loss.clip_high=abc", ["algorithm.loss.clip_high", "'abc'", "float"]),
        ("algorithm.loss.dual_clip=abc", ["algorithm.loss.dual_clip", "'abc'", "float | None"]),
        ("task.terms=5", ["task.terms", "5", "Sequence[int]"]),
        ("algorithm.loss=3", ["algorithm.loss", "3", "Callable"]),
        ("rollout=3", ["rollout", "3", "Rollout"]),
        ("model=none", ["model", "None", "ModelConfig"]),
        ("algorithm.kl=k9", ["algorithm.kl", "'k9'", "k3+"]),
        ("model.lora.rank=8", ["model.lora.rank", "'rank'", "None"]),
        ("model.lora={'rnk': 8}", ["model.lora.rnk", "'rnk'", "LoRA", "'rank'"]),
        ("model.lora={'rank': 'x'}", ["model.lora.rank", "'x'", "int"]),
        ("optimizer={'lrate': 1.0}", ["optimizer.lrate", "'lrate'", "Optimizer", "'lr'"]),
    ],
)
def test_a_bad_override_names_the_field_the_value_and_what_was_expected(assignment, expected):
    with pytest.raises(ValueError, match=re.escape(expected[0])) as caught:
        assign(assignment)
    assert [e for e in expected if e not in str(caught.value)] == []


def test_a_dataclass_that_is_not_there_yet_comes_from_a_mapping():
    given = assign("model.lora={'rank': 8, 'targets': ['q', 'down']}")
    assert given.model.lora == LoRA(8, 32.0, ("q", "down"))
    assert assign("model.lora.rank=3", "model.lora.alpha=6", config=given).model.lora == LoRA(3, 6.0, ("q", "down"))
    assert assign("model.lora=none", config=given) == BASE
    assert configs.from_json(json.loads(configs.dumps(given))).model == given.model
    experts = "model.experts=4", "model.experts_per_token=2", "model.lora={'targets': ['q', 'up']}"
    with pytest.raises(ValueError, match="model.lora.targets is .* of q, k, v, o, which the model has$"):
        validate(assign(*experts))


# ---- validation

BAD = [
    *(
        (f"{name}=0", f"{name} is 0; expected at least 1")
        for name in (
            *("steps", "micro_batches", "rollout.prompts", "rollout.group_size", "rollout.max_prompt_tokens"),
            *("rollout.max_response_tokens", "rollout.tokens_per_call", "rollout.max_rounds", "mesh.data", "mesh.fsdp"),
            *("mesh.tensor", "evaluation.problems", "evaluation.samples", "checkpoint.every", "checkpoint.keep"),
            *("algorithm.updates_per_batch", "model.vocab_size", "model.layers", "model.width", "model.heads"),
            *("model.kv_heads", "model.head_width", "model.mlp_width", "model.experts_per_token", "model.expert_width"),
            "prime.stages.0.batches",
        )
    ),
    *(
        (f"{name}=-1", rf"{name} is -1(\.0)?; expected at least 0")
        for name in (
            *("rollout.slots", "rollout.top_k", "evaluation.every", "logged_samples", "seed", "optimizer.lr"),
            *(
                "optimizer.warmup",
                "optimizer.weight_decay",
                "prime.optimizer.lr",
                "model.experts",
                "model.router_aux_coef",
            ),
        )
    ),
    ("rollout.stop=('#','')", r"rollout.stop is \('#', ''\); expected texts that are not empty"),
    (
        "optimizer.lr=1e999",
        "optimizer.lr: inf is not valid; expected float|optimizer.lr is inf; expected a finite number",
    ),
    ("algorithm.loss.clip_high=1e999", "algorithm.loss.clip_high is inf; expected a finite number"),
    (
        "algorithm.shaping.terms.overlong.fn.cache_len=99",
        "shaping.terms.overlong.fn.cache_len is 99.*; expected 0 <",
    ),
    ("model.rope_theta=0", r"model.rope_theta is 0\.0; expected a positive number"),
    ("model.norm_eps=-1", r"model.norm_eps is -1\.0; expected a positive number"),
    ("rollout..prompts=3", "--set is 'rollout..prompts=3'; expected path.to.field=value"),
    ("seed=2147483648", r"seed is 2147483648; expected less than 2\^31"),
    ("rollout.temperature=0", r"rollout.temperature is 0\.0; expected a positive"),
    ("rollout.top_p=0", r"rollout.top_p is 0\.0; expected a number in \(0, 1\]"),
    ("rollout.top_p=1.5", r"rollout.top_p is 1\.5; expected a number in \(0, 1\]"),
    ("rollout.top_p=0.9", r"rollout.top_p is 0\.9; expected .*allow_filtered"),
    ("rollout.top_k=5", "rollout.top_k is 5; expected .*allow_filtered"),
    (
        "rollout.prompts=1",
        "algorithm.updates_per_batch is 2; expected at most rollout.prompts = 1: a mini-batch is of whole",
    ),
    ("learner.row_tokens=100", "learner.row_tokens is 100; expected 0, or at least 352, for rollout.max_prompt_tokens"),
    ("learner.logprob_chunk=0", "learner.logprob_chunk is 0; expected at least 1"),
    ("rollout.group_size=1", "rollout.group_size is 1; expected at least 2 for algorithm.group_filter"),
    ("model.kv_heads=3", "model.heads is 2; expected a multiple of model.kv_heads = 3"),
    ("model.attention=cudnn", "model.attention is .cudnn.; expected another one with model.dtype = float32"),
    ("model.lora={'rank': 0}", "model.lora.rank is 0; expected at least 1"),
    ("model.lora={'alpha': 0}", r"model.lora.alpha is 0\.0; expected a positive number"),
    *(
        (
            f"model.lora={{'targets': {t}}}",
            r"model.lora.targets is \(.*\); expected different ones of q, k, .*, down, which the model has$",
        )
        for t in ((), ("q", "q"), ("q", "head"))
    ),
    ("model.head_width=7", "model.head_width is 7; expected an even number"),
    ("optimizer.clip_norm=0", r"optimizer.clip_norm is 0\.0; expected a positive number"),
    ("prime.optimizer.eps=0", r"prime.optimizer.eps is 0\.0; expected a positive number"),
    ("optimizer.b2=1", r"optimizer.b2 is 1\.0; expected a number in \[0, 1\)"),
    ("prime.stages=()", r"prime.stages is \(\); expected at least one Stage"),
    ("prime.stages.1.mixture={}", "prime.stages.1.mixture is {}; expected behaviours"),
    ("prime.stages.1.mixture.clean=-0.5", "prime.stages.1.mixture is .*; expected behaviours"),
    ("prime.stages.0.mixture.clean=0", "prime.stages.0.mixture is .*; expected behaviours"),
    ("prime.traces_per_batch=0", "prime.traces_per_batch is 0; expected a positive number"),
    ("prime.stages.0=5", r"prime.stages.0: 5 is not valid; expected Stage"),
    ("tokenizer=jaxrl_llm.data.tokenizers:load", "tokenizer: load: missing a required argument: 'folder'"),
    ("prime.task=jaxrl_llm.data.datasets:jsonl", "prime.task: jsonl: missing a required argument: 'path'"),
]


@pytest.mark.parametrize(("assignment", "message"), BAD, ids=[a for a, _ in BAD])
def test_validate_names_the_field_its_value_and_what_was_expected(assignment, message):
    with pytest.raises(ValueError, match=message):
        validate(assign(assignment))


def test_a_good_config_passes_and_comes_back_itself():
    assert validate(BASE) is BASE
    for good in ("rollout.top_p=1", "evaluation.every=0", "rollout.slots=8", "prime=none", "logged_samples=0"):
        validate(assign(good))
    validate(assign("rollout.top_k=5", "rollout.top_p=0.9", "rollout.allow_filtered=True"))


@pytest.mark.parametrize("optimizer", ["optimizer", "prime.optimizer"])
@pytest.mark.parametrize("unread", ["b1=0.8", "b2=0.999", "eps=1e-7", "moments_dtype=bfloat16"])
def test_what_adafactor_does_not_read_is_not_to_be_changed(optimizer, unread):
    validate(assign(f"{optimizer}.{unread}"))
    name = re.escape(unread.partition("=")[0])
    with pytest.raises(
        ValueError, match=rf"^{optimizer}\.{name} is .*; expected .*, as it was: Adafactor does not read"
    ):
        validate(assign(f"{optimizer}.{unread}", f"{optimizer}.kind=adafactor"))
    validate(assign(f"{optimizer}.kind=adafactor", f"{optimizer}.weight_decay=0.1"))


def test_an_8_bit_reference_needs_a_reference_of_its_own():
    refused = "learner.reference_dtype is 'int8'; expected '' with LoRA, whose base is the reference, or without a KL"
    with pytest.raises(ValueError, match=refused):
        validate(assign("learner.reference_dtype=int8"))
    fine = assign("learner.reference_dtype=int8", "algorithm.kl=k3", "algorithm.kl_coef=0.1")
    validate(fine)
    with pytest.raises(ValueError, match=refused):
        validate(assign('model.lora={"rank": 2}', config=fine))


def test_slots_have_to_divide_among_the_devices_and_prompts_need_not():
    with pytest.raises(ValueError, match=r"rollout.slots is 3; expected a multiple of mesh.data × mesh.fsdp = 2"):
        validate(assign("mesh.data=2", "rollout.slots=3"))
    validate(assign("mesh.data=2", "rollout.slots=16", "rollout.prompts=33", "micro_batches=3"))
    with pytest.raises(ValueError, match=r"rollout.slots is 8; expected 0, or room for a group on each .* 2 shards"):
        validate(assign("mesh.data=2", "rollout.slots=8"))


def test_pages_have_room_for_an_answer_and_with_zero_gap_for_all():
    sizes = "rollout.max_prompt_tokens=64", "rollout.max_response_tokens=64"
    validate(assign(*sizes, "rollout.kv_tokens=128"))
    refused = r"rollout.kv_tokens is 127; expected 0, or room for an answer on each of the mesh's shards: at least 128"
    with pytest.raises(ValueError, match=refused):
        validate(assign(*sizes, "rollout.kv_tokens=127"))
    with pytest.raises(ValueError, match="at least 256"):
        validate(assign(*sizes, "rollout.kv_tokens=255", "mesh.data=2"))
    with pytest.raises(ValueError, match="room for every answer: at least 1024"):
        validate(assign(*sizes, "rollout.kv_tokens=512", "rollout.zero_gap=true", "rollout.slots=8"))


def test_the_head_is_short_only_where_the_sampler_is():
    with pytest.raises(ValueError, match="rollout.head_dtype is 'bfloat16'; expected '' or float32: the sampler comp"):
        validate(assign("rollout.head_dtype=bfloat16"))
    validate(assign("rollout.head_dtype=bfloat16", "rollout.dtype=bfloat16"))
    validate(assign("rollout.head_dtype=float32", "model.dtype=bfloat16"))


@pytest.mark.parametrize("advantage", [advantages.rloo, partial(advantages.rloo)])
def test_leave_one_out_needs_two_answers(advantage):
    config = replace(BASE, algorithm=Algorithm(advantage, losses.reinforce, "token"))
    validate(config)
    with pytest.raises(ValueError, match="rollout.group_size is 1; expected at least 2 for rloo"):
        validate(assign("rollout.group_size=1", config=config))
    grpo = Algorithm(advantages.grpo, losses.reinforce, "token")
    validate(assign("rollout.group_size=1", config=replace(config, algorithm=grpo)))


def test_a_wrong_type_that_no_override_made_is_found_too():
    for wrong, message in (
        (replace(BASE, steps="5"), "steps: '5' is not valid; expected int"),
        (replace(BASE, rollout=replace(BASE.rollout, stop="#")), "rollout.stop: '#' is not valid"),
        (replace(BASE, rollout=replace(BASE.rollout, stop=["#"])), r"rollout.stop is \['#'\]; expected a tuple"),
        (replace(BASE, optimizer=Optimizer(lr=float("nan"))), "optimizer.lr is nan; expected a finite number"),
        (
            replace(BASE, model=replace(TINY, rope_scaling=RopeScaling(factor=0.0))),
            "rope_scaling.factor is 0.0; expected",
        ),
        (replace(BASE, task=[1]), r"task: \[1\] is not valid; expected Callable"),
        (replace(BASE, task=partial(datasets.jsonl, "x", reward=3)), "task.reward: 3 is not valid; expected Callable"),
        (replace(BASE, mesh=None), "mesh: None is not valid; expected Mesh"),
        (replace(BASE, prime=Prime((Stage("5", {"clean": 1.0}),))), r"prime.stages.0.batches: '5' is not valid"),
        (replace(BASE, task=partial(tasks.chain, termz=(1, 2))), "task: chain: got an unexpected keyword .*'termz'"),
    ):
        with pytest.raises(ValueError, match=message):
            validate(wrong)


# ---- functions of an experiment, called before any device work


def _with(**fields):
    return replace(BASE, algorithm=replace(ALGORITHMS["grpo"], kl=None, kl_coef=0.0, **fields))


def _numpy(logp, mask):
    return np.where(mask, np.exp(logp), 0)


def _scalar(logp, adv, mask):
    return -(logp * adv).mean()


def _none(logp):
    pass


def _typo(logp):
    return logpp


def _by_sign(logp, adv):
    return -logp if adv.sum() > 0 else logp


BY_TOKEN = r"expected float \[B T\], here P = 2, G = 3, B = 6, T = 5"
COMPILED = ": needs the values of arrays; expected jax.numpy and no `if` on an array, as it is compiled"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (_with(loss=_scalar), rf"algorithm.loss: _scalar returns float32\[\]; {BY_TOKEN}"),
        (_with(loss=_none), rf"algorithm.loss: _none returns None; {BY_TOKEN}"),
        (_with(loss=lambda mask: mask), rf"algorithm.loss: <lambda> returns bool\[6,5\]; {BY_TOKEN}"),
        (_with(loss=lambda logp: logp.T), rf"algorithm.loss: <lambda> returns float32\[5,6\]; {BY_TOKEN}"),
        (_with(loss=_numpy), f"algorithm.loss: _numpy{COMPILED}"),
        (_with(loss=_by_sign), f"algorithm.loss: _by_sign{COMPILED}"),
        (_with(loss=_typo), "algorithm.loss: _typo: NameError: name 'logpp' is not defined"),
        (_with(correction=_scalar), rf"algorithm.correction: _scalar returns float32\[\]; {BY_TOKEN}"),
        (_with(advantage=lambda rewards: rewards[0]), r"returns float32\[3\]; expected float \[P G\] or \[P G T\]"),
        (_with(advantage=lambda rewards: rewards.T), r"returns float32\[3,2\]; expected float \[P G\]"),
        (_with(advantage=lambda rewards: rewards > 0), r"returns bool\[2,3\]; expected float \[P G\]"),
        (
            _with(advantage=lambda rewards, state: rewards, memory=lambda n_prompts: np.zeros(n_prompts)),
            r"returns float32\[2,3\]; expected float \[P G\] or \[P G T\] and the state as float32\[7\]",
        ),
        (
            _with(advantage=lambda rewards, state: (rewards, state[1:]), memory=lambda n_prompts: np.zeros(n_prompts)),
            r"returns \(float32\[2,3\], float32\[6\]\); expected .* and the state as float32\[7\]",
        ),
        (_with(token_advantage=lambda adv: adv.sum(1)), r"token_advantage: <lambda> returns float32\[6\]"),
        (_with(updates=Updates(token_filter=lambda logp: logp)), r"updates.token_filter: .* expected bool \[B T\]"),
        (_with(updates=Updates(phases=lambda mask: mask)), r"updates.phases: .* expected a tuple of bool \[B T\]"),
        (_with(updates=Updates(phases=lambda mask: ())), r"updates.phases: <lambda> returns \(\); expected a tuple"),
        (_with(group_filter=lambda correct: correct), r"group_filter: <lambda> returns bool\[2,3\]; expected bool"),
        (_with(group_filter=lambda correct: correct.al()), "group_filter: <lambda>: AttributeError: 'numpy.ndarray'"),
        (_with(shaping=Shaping(terms={"a": Term(lambda text: "good")})), "terms.a.fn: <lambda>: TypeError"),
        (_with(shaping=Shaping(terms={"a": Term(lambda n_tokens: n_tokens[0])})), r"terms.a.fn: .* returns int32\[3\]"),
        (_with(shaping=Shaping(terms={"a": Term(lambda text: 0.0, warmup=-1)})), "terms.a.warmup is -1; expected at"),
    ],
)  # fmt: skip
def test_what_a_function_returns_is_checked_before_any_work(config, message):
    with pytest.raises(ValueError, match=message) as caught:
        validate(config)
    assert "\n" not in str(caught.value)


def _no_reward():
    return Task((Prompt(0, "1"),), (Prompt(1, "2"),), None)


def _short_reward():
    return Task((Prompt(0, "1"),), (Prompt(1, "2"),), lambda prompt, text: 1.0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"task": lambda: []}, r"task\(\) is 'list'; expected types.Task\(train, test, reward\)"),
        ({"task": _no_reward}, r"task\(\).reward is None; expected a function \(prompt, text, finish\) -> Reward"),
        ({"task": _short_reward}, r"task\(\).reward: <lambda>: too many positional arguments"),
        (
            {"tokenizer": lambda: tokenizers.characters().hf},
            r"tokenizer\(\) is 'T\w+'; expected a data.tokenizers.Tokenizer",
        ),
        ({"model": replace(TINY, vocab_size=90)}, r"model.vocab_size is 90; expected at least 98 \(tokenizer\)"),
        ({"model": replace(TINY, attention="splash")}, "model.attention is .splash.; expected auto, xla on cpu"),
    ],
)
def test_what_the_task_and_the_tokenizer_are_is_known_before_a_base_policy_is_made(changed, message):
    configs.made(BASE)
    with pytest.raises(ValueError, match=message):
        learner.build(replace(BASE, **changed))


def test_functions_outside_of_jit_may_be_written_in_numpy():
    in_numpy = Shaping(
        terms={
            "a": Term(lambda n_tokens: np.where(np.asarray(n_tokens) > 3, 0.0, 1.0)),
            "b": Term(lambda text: "#" in text),
        },
        reward=lambda rewards: [float(r) for r in rewards],
    )
    validate(_with(shaping=in_numpy, group_filter=lambda correct: [0 < c.sum() < len(c) for c in correct]))


def test_one_answer_a_prompt_is_refused_where_its_advantage_is_nothing():
    alone = (
        "ppo",
        "a2c",
        "reinforce",
        "grpo",
        "raft_pp",
        "topr",
        "dcpo",
        "reinforce_pp",
    )  # raw where there is no group
    for name in (*alone, "dr_grpo", "gpg", "lite_ppo", "maxrl", "opo", "passk_grpo", "rloo", "scalerl", "opmd"):
        algorithm = replace(ALGORITHMS[name], updates_per_batch=1, group_filter=None)
        algorithm = replace(algorithm, prompts=replace(algorithm.prompts, resample=True))
        config = assign("rollout.group_size=1", config=replace(BASE, algorithm=algorithm))
        if name in alone:
            validate(config)
        else:
            with pytest.raises(
                ValueError, match="rollout.group_size is 1; expected at least 2 for .*: the advantage of"
            ):
                validate(config)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_runs_on_the_laptop_experiment_or_says_what_to_set(name):
    laptop, assignments = ROOT / "experiments" / "laptop_dapo.py", []
    values = {  # of what the message names
        "rollout.max_prompt_tokens": "512", "algorithm.shaping.terms.overlong.fn.cache_len": "16",
        "teacher": "jaxrl_llm.run.teachers:run",
    }  # fmt: skip
    for _ in range(3):
        try:
            learner.build(configs.load(laptop, tuple(assignments), name))
            return
        except ValueError as error:
            advice = re.search(r"--set ([\w.]+=\w+)", str(error))
            named = [f"{path}={value}" for path, value in values.items() if path in str(error)]
            if not advice and not named:
                raise
            assignments.append(advice[1] if advice else named[0])
    pytest.fail(f"{name} still fails with {assignments}")


# ---- JSON


def through_json(config, folder=None):
    return configs.from_json(json.loads(json.dumps(configs.to_json(config))), folder)


def unwrapped(node):
    """The config with partials, which compare by identity, as (function, keywords)."""
    if isinstance(node, partial):
        return ("partial", node.func, tuple((k, unwrapped(v)) for k, v in sorted(node.keywords.items())))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return (type(node), *((f.name, unwrapped(getattr(node, f.name))) for f in dataclasses.fields(node)))
    if isinstance(node, tuple):
        return tuple(unwrapped(v) for v in node)
    if isinstance(node, dict):
        return {k: unwrapped(v) for k, v in node.items()}
    return node


EXPERIMENT = """
from dataclasses import dataclass
from functools import partial

import helper_of_{name}
from jaxrl_llm.objective import losses
from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.config import Config, Prime, Stage
from jaxrl_llm.data import datasets, tasks
from jaxrl_llm.models.transformer import ModelConfig, RopeScaling


@dataclass(frozen=True)
class Rubric:
    weight: float
    marks: tuple = ()


def grade(prompt, text, rubric=None, bonus=None, table=None):
    return rubric.weight * (text == prompt.answer)


def halve(x, by=2):
    return x / by


CONFIG = Config(
    task=partial(
        datasets.jsonl,
        path="jaxrl_llm.objective.losses:kl",  # text that looks like a function
        reward=partial(
            grade,
            rubric=Rubric(0.5, marks=("#", None)),
            bonus=partial(halve, by=3),
            table={{"easy": (1, 2.5), "hard": helper_of_{name}.double, "none": None}},
        ),
    ),
    model=ModelConfig(112, 1, 16, 2, 1, 8, 16, rope_scaling=RopeScaling(factor=4.0)),
    algorithm=ALGORITHMS["grpo"],
    prime=Prime((Stage(3, {{"clean": 1.0, "recheck": 0.5}}),), task=helper_of_{name}.task),
)
"""
HELPER = (
    "from jaxrl_llm.data import tasks\n\ndef double(x):\n    return 2 * x\n\ndef task():\n    return tasks.chain()\n"
)


@pytest.fixture
def experiment(tmp_path, request):
    name = re.sub(r"\W", "_", request.node.name)
    file = tmp_path / f"{name}.py"
    file.write_text(EXPERIMENT.format(name=name))
    (tmp_path / f"helper_of_{name}.py").write_text(HELPER)
    return file


def test_json_round_trip_of_the_laptop_experiment():
    config = configs.load(ROOT / "experiments" / "laptop_dapo.py")
    back = through_json(config)
    assert unwrapped(back) == unwrapped(config)
    assert configs.to_json(back) == configs.to_json(config)


def test_json_round_trip_of_functions_in_an_experiment_file(experiment):
    config = configs.load(experiment)
    back = through_json(config)
    assert unwrapped(back) == unwrapped(config)
    assert configs.to_json(back) == configs.to_json(config)
    keywords = back.task.keywords["reward"].keywords
    assert back.task.keywords["path"] == "jaxrl_llm.objective.losses:kl"
    assert (keywords["rubric"].weight, keywords["rubric"].marks) == (0.5, ("#", None))
    assert (keywords["bonus"](6), keywords["table"]["hard"](4), keywords["table"]["easy"]) == (2, 8, (1, 2.5))
    assert isinstance(back.model.rope_scaling, RopeScaling)


ALONE = """
from dataclasses import replace
from functools import partial

from jaxrl_llm.config import Config
from jaxrl_llm.data import datasets
from tests.config.test_config import BASE

def grade(prompt, text):
    return 0.25

CONFIG = replace(BASE, task=partial(datasets.jsonl, path="x", reward=grade))
"""


def test_a_run_is_read_where_the_experiments_own_file_is_gone(tmp_path):
    file, run = tmp_path / "alone.py", tmp_path / "run"
    file.write_text(ALONE.replace("from tests.config.test_config import BASE", f"from {__name__} import BASE"))
    run.mkdir()
    (run / "config.json").write_text(json.dumps(configs.to_json(configs.load(file))))
    file.rename(run / file.name)  # as if only the run's folder had been copied here
    code = (
        "import sys; from jaxrl_llm import config; c = config.load(sys.argv[1]); print(c.task.keywords['reward'](0, 0))"
    )
    command = [sys.executable, "-c", code, str(run / "config.json")]
    out = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert (out.returncode, out.stdout) == (0, "0.25\n"), out.stderr


def test_two_experiments_of_one_name_stay_two(tmp_path):
    found = []
    for folder, factor in (("a", 2), ("b", 3)):
        file = tmp_path / folder / "same.py"
        file.parent.mkdir()
        file.write_text(f"FACTOR = {factor}\n\ndef reward(prompt, text):\n    return FACTOR\n")
        found.append(values.load_module(file).reward)
    task = lambda reward: replace(BASE, task=partial(datasets.jsonl, path="x", reward=reward))
    assert [through_json(task(f)).task.keywords["reward"](0, "") for f in found] == [2, 3]


def _outer():
    def inner():
        return tasks.chain()

    return inner


@pytest.mark.parametrize(
    ("config", "where"),
    [
        (replace(BASE, task=lambda: tasks.chain()), "config.task is <function"),
        (replace(BASE, task=_outer()), "config.task is <function"),
        (replace(BASE, task=partial(tasks.chain, terms=np.array([3, 5]))), r"config.task.terms is array\(\[3, 5\]\)"),
        (replace(BASE, task=partial(tasks.chain, seed=np.int64(3))), r"config.task.seed is"),
        (replace(BASE, task=partial(tasks.chain, seed={1: 2})), r"config.task.seed is {1: 2}"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(config, where):
    with pytest.raises(ValueError, match=where):
        configs.to_json(config)


def test_json_of_another_shape_is_an_error():
    data = configs.to_json(BASE)
    for wrong, message in (
        ({**data, "step": 3}, "no field 'step' in Config; did you mean 'steps'"),
        ({k: v for k, v in data.items() if k != "model"}, "missing .*'model'"),
        ([1], r"\[1\]; expected the fields of a Config"),
        ({**data, "task": "jaxrl_llm.data.tasks:chains"}, "has no 'chains'; did you mean 'chain'"),
    ):
        with pytest.raises(ValueError, match=message):
            configs.from_json(wrong)


def test_the_version_that_wrote_a_config_is_kept_beside_it_and_named_when_it_cannot_be_read():
    data = json.loads(configs.dumps(BASE))
    assert data["jaxrl_llm"] == jaxrl_llm.__version__
    assert configs.to_json(configs.from_json(data)) == configs.to_json(BASE)
    newer = {**data, "jaxrl_llm": "9.0.0"}
    assert configs.differences(newer, data) == configs.differences(newer, configs.to_json(BASE)) == []
    configs.from_json(newer)
    with pytest.raises(ValueError, match=r"no field 'quantum' in Config; .* \(written by jaxrl_llm 9.0.0, this is 0\."):
        configs.from_json({**newer, "quantum": 1})


def test_a_runs_folder_stands_for_its_config(tmp_path):
    with pytest.raises(ValueError, match="config.json is missing; expected the folder of a run"):
        configs.load(tmp_path)
    (tmp_path / "config.json").write_text(configs.dumps(BASE))
    assert configs.to_json(configs.load(tmp_path, ("steps=5",))) == configs.to_json(replace(BASE, steps=5))


def test_paths_in_an_experiment_are_relative_to_it(tmp_path, monkeypatch):
    file = tmp_path / "mine" / "alone.py"
    file.parent.mkdir()
    file.write_text(ALONE.replace("from tests.config.test_config import BASE", f"from {__name__} import BASE"))
    assert configs.load(file).task.keywords["path"] == "x"  # nothing of this name lies there
    (file.parent / "x").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    config = configs.load(Path("mine/alone.py"))
    assert config.task.keywords["path"] == str(file.parent / "x")
    assert through_json(config).task.keywords["path"] == str(file.parent / "x")
    assert configs.load(file, ("task.path=y",)).task.keywords["path"] == "y"


def test_an_empty_cache_variable_is_none(monkeypatch):
    monkeypatch.setenv("JAXRL_CACHE", "")
    assert cache_folder() == Path.home() / ".cache" / "jaxrl_llm"


def test_differences_name_the_fields_and_both_values():
    new = assign("optimizer.lr=0.5", "algorithm.loss.clip_high=0.3", "prime=none", "steps=7")
    assert configs.differences(configs.to_json(BASE), configs.to_json(BASE)) == []
    found = configs.differences(configs.to_json(BASE), configs.to_json(new))
    assert [d.split(":")[0] for d in found] == ["algorithm.loss.with.clip_high", "prime", "optimizer.lr", "steps"]
    assert found[0].endswith("0.28 → 0.3")
    assert found[3] == "steps: 100 → 7"
    assert configs.differences({"a": {"b": 1}}, {"a": {"c": 2}}) == ["a.b: 1 → None", "a.c: None → 2"]


# ---- experiment files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nCONFIG = = 3\n", r"broken.py:2: SyntaxError"),
        ("\n\nimport no_such_package\n", r"broken.py:3: ModuleNotFoundError: .*no_such_package"),
        ("def f():\n    return 1 / 0\n\nf()\n", r"broken.py:2: ZeroDivisionError"),
        ("x = 1\n", r"CONFIG is None; expected CONFIG = Config"),
        ("CONFIG = 3\n", r"CONFIG is 3; expected CONFIG = Config"),
    ],
)
def test_a_broken_experiment_is_a_value_error_that_names_the_line(tmp_path, text, message):
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        configs.load(file)


def test_an_experiment_that_failed_can_be_mended_and_loaded(tmp_path, experiment):
    text = experiment.read_text()
    experiment.write_text("raise RuntimeError('no')\n" + text)
    with pytest.raises(ValueError, match="RuntimeError: no"):
        configs.load(experiment)
    experiment.write_text(text)
    assert configs.load(experiment, ("steps=5",)).steps == 5


def test_a_missing_experiment(tmp_path):
    with pytest.raises(ValueError, match=r"gone.py: no such file"):
        configs.load(tmp_path / "gone.py")
    with pytest.raises(ValueError, match=r"gone.json"):
        configs.load(tmp_path / "gone.json")


# ---- no field that nothing reads

CONFIGS = (
    Config,
    Rollout,
    Mesh,
    Evaluation,
    Checkpoint,
    Prime,
    Stage,
    Optimizer,
    ModelConfig,
    RopeScaling,
    LoRA,
    Algorithm,
)


class Reads(ast.NodeVisitor):
    """(class, field) pairs that a module reads, the bodies of the config's own classes left out.

    The class of `x.y` is what annotates `y` in the class of `x`; that of a name is its annotation, or the class of what
    was assigned to it, of the parts of a pair that a function of the module returns too.
    """

    def __init__(self, fields, tree):
        self.fields, self.scopes, self.found = fields, [{}], set()
        functions = [
            n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and isinstance(n.returns, ast.Subscript)
        ]
        self.pairs = {n.name: n.returns.slice.elts for n in functions if isinstance(n.returns.slice, ast.Tuple)}

    def class_of(self, node):
        if isinstance(node, ast.Subscript):
            return self.class_of(node.value)
        known = next((s[ast.unparse(node)] for s in reversed(self.scopes) if ast.unparse(node) in s), None)
        if known is None and isinstance(node, ast.Attribute):
            return self.fields.get(self.class_of(node.value), {}).get(node.attr)
        return known

    def assign(self, target, value):
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for pair in zip(target.elts, value.elts, strict=True):
                self.assign(*pair)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Call):
            for name, annotation in zip(target.elts, self.pairs.get(ast.unparse(value.func), ()), strict=False):
                self.scopes[-1][ast.unparse(name)] = class_in(annotation, self.fields)
        elif isinstance(target, ast.Name | ast.Attribute):
            # what `self` gets in one method is there in the others
            scope = self.scopes[-2 if isinstance(target, ast.Attribute) and len(self.scopes) > 1 else -1]
            scope[ast.unparse(target)] = self.class_of(value)

    def visit_Attribute(self, node):
        if isinstance(node.ctx, ast.Load):
            self.found.add((self.class_of(node.value), node.attr))
        self.generic_visit(node)

    def visit_Assign(self, node):
        for target in node.targets:
            self.assign(target, node.value)
        self.generic_visit(node)

    def visit_NamedExpr(self, node):
        self.assign(node.target, node.value)
        self.generic_visit(node)

    def comprehension(self, node):
        for generator in node.generators:  # before the element, which comes first
            if isinstance(generator.target, ast.Name):
                self.assign(generator.target, generator.iter)
        self.generic_visit(node)

    visit_ListComp = visit_GeneratorExp = visit_DictComp = comprehension

    def visit_FunctionDef(self, node):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self.scopes.append({a.arg: class_in(a.annotation, self.fields) for a in arguments})
        self.generic_visit(node)
        self.scopes.pop()

    def visit_ClassDef(self, node):
        if node.name not in {c.__name__ for c in CONFIGS}:
            self.scopes.append({f"self.{f}": of for f, of in self.fields[node.name].items()})
            self.generic_visit(node)
            self.scopes.pop()


def class_in(annotation, fields):
    """The first known class that an annotation mentions."""
    if annotation is None:
        return None
    words = re.findall(r"\w+", ast.unparse(annotation))
    return next((w for w in words if w in fields), None)


def reads(sources):
    """Of all modules but those of config, where fields are declared and validated, and of the catalogue of methods."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    classes = {n.name: n for t in trees.values() for n in ast.walk(t) if isinstance(n, ast.ClassDef)}
    fields = {
        name: {s.target.id: s.annotation for s in node.body if isinstance(s, ast.AnnAssign)}
        for name, node in classes.items()
    }
    fields = {c: {f: class_in(a, fields) for f, a in annotated.items()} for c, annotated in fields.items()}
    found = set()
    for path, tree in trees.items():
        if path.parent.name != "config" and path.name != "catalogue.py":
            visitor = Reads(fields, tree)
            visitor.visit(tree)
            found |= visitor.found
    return found


def unread(sources):
    found = reads(sources)
    everything = {(c.__name__, f.name) for c in CONFIGS for f in dataclasses.fields(c)}
    return {".".join(pair) for pair in everything - found}


SOURCES = {p: p.read_text() for p in Path(jaxrl_llm.__file__).parent.rglob("*.py")}
# For people; a permission, which `validate` alone asks for
NOT_READ = {"Algorithm.paper", "Rollout.allow_filtered"}


def test_every_field_of_the_config_is_read_somewhere():
    assert unread(SOURCES) == NOT_READ


@pytest.mark.parametrize(
    ("file", "old", "new", "lost"),
    [
        ("trainer.py", "config.checkpoint.every", "config.evaluation.every", "Checkpoint.every"),
        ("trainer.py", "r.stop", "()", "Rollout.stop"),
        ("optim.py", "c.clip_norm", "1.0", "Optimizer.clip_norm"),
        ("transformer.py", "s.factor", "8.0", "RopeScaling.factor"),
        ("sft.py", ".traces_per_batch", ".stages", "Prime.traces_per_batch"),
    ],
)
def test_a_field_that_is_no_longer_read_is_found(file, old, new, lost):
    changed = {p: t.replace(old, new) if p.name == file else t for p, t in SOURCES.items()}
    assert changed != SOURCES
    assert lost in unread(changed)

"""Whether a config can be run, before any device work."""

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config.tree import Checkpoint, Config, Evaluation, Learning, Mesh, Prime, Rollout, Stage, Suite
from jaxrl_llm.config.values import coerce, hints, is_function, unbound
from jaxrl_llm.data import fitting
from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.models.shape import LoRA, ModelConfig, RopeScaling
from jaxrl_llm.objective.algorithms import Algorithm, Critic, PromptChoice, Term, Updates, call, wants
from jaxrl_llm.sampler.page_sizes import least_tokens
from jaxrl_llm.types import EOS, Optimizer, Prompt, Task, expect

# What the numbers of a node may be; None is left to its type.
RULES: tuple[tuple[str, Callable, dict[type, str]], ...] = (
    ("at least 1", lambda x: x >= 1, {
        Config: "steps micro_batches", Mesh: "data fsdp tensor", Stage: "batches", Updates: "epochs",
        Rollout: "prompts group_size max_prompt_tokens max_response_tokens tokens_per_call max_rounds "
        "prefill_tokens in_flight max_waiting",
        Evaluation: "problems samples", Suite: "problems samples", Checkpoint: "every keep",
        Algorithm: "updates_per_batch",
        ModelConfig: "vocab_size layers width heads kv_heads head_width mlp_width max_positions experts_per_token "
        "expert_width",
        Critic: "updates mini_batches", Learning: "logprob_chunk", LoRA: "rank",
    }),
    ("at least 0", lambda x: x >= 0, {
        Config: "logged_samples abort_after seed", Rollout: "slots budget max_staleness top_k kv_tokens",
        Evaluation: "every", Suite: "every temperature max_tokens", Term: "warmup", Critic: "pretrain head_std",
        Optimizer: "lr warmup weight_decay",
        Learning: "row_tokens", ModelConfig: "experts router_aux_coef",
    }),
    ("a positive number", lambda x: x > 0, {
        Rollout: "temperature deadline_s", Critic: "clip", Optimizer: "eps clip_norm", LoRA: "alpha",
        ModelConfig: "rope_theta norm_eps",
        RopeScaling: "factor low_freq_factor high_freq_factor original_max_position",
    }),
    ("a number in (0, 1]", lambda x: 0 < x <= 1, {Rollout: "top_p", Suite: "top_p", PromptChoice: "retire_above"}),
    ("a number in [0, 1]", lambda x: 0 <= x <= 1, {Critic: "gamma lam"}),
    ("a number in [0, 1)", lambda x: 0 <= x < 1, {Optimizer: "b1 b2"}),
    ("an even number", lambda x: x % 2 == 0, {ModelConfig: "head_width"}),
    ("less than 2^31", lambda x: x < 2**31, {Config: "seed"}),
)  # fmt: skip

# Of the arrays that functions are tried on: the axes all have different sizes.
SIZES = {"P": 2, "G": 3, "B": 6, "T": 5}
KINDS = {"float": jnp.floating, "bool": jnp.bool_, "number": np.generic}


def validate(config: Config) -> Config:
    """The same config. Raises ValueError that names the field, its value and what was expected."""
    r, a, m = config.rollout, config.algorithm, config.mesh
    _types(config, "")
    ways = m.data * m.fsdp
    most, longest = config.learner.row_tokens, r.max_prompt_tokens + r.max_response_tokens
    expected = f"0, or at least {longest}, for rollout.max_prompt_tokens + rollout.max_response_tokens"
    expect(most == 0 or most >= longest, "learner.row_tokens", most, expected)
    expected = f"at most rollout.prompts = {r.prompts}: a mini-batch is of whole prompts"
    expect(a.updates_per_batch <= r.prompts, "algorithm.updates_per_batch", a.updates_per_batch, expected)
    kept, expected = (
        config.learner.reference_dtype,
        "'' with LoRA, whose base is the reference, or without a KL penalty",
    )
    expect(not kept or (a.needs_reference and config.model.lora is None), "learner.reference_dtype", kept, expected)
    short = "bfloat16" in (r.dtype, config.model.dtype) and r.dtype != "float32"
    expected = "'' or float32: the sampler computes in float32"
    expect(r.head_dtype != "bfloat16" or short, "rollout.head_dtype", r.head_dtype, expected)
    _validate_sampler(r, ways)
    _validate_pages(r, ways, [suite.max_tokens for suite in config.evaluation.suites.values()])
    _validate_algorithm(a, r)
    _validate_model(config.model)
    most, expected = config.model.max_positions, "at most model.max_positions = {} less rollout.max_prompt_tokens"
    expect(longest <= most, "rollout.max_response_tokens", r.max_response_tokens, expected.format(most))
    fits = config.model.attention != "cudnn" or config.learner.layout == "grouped"
    expected = "grouped with model.attention = cudnn, which knows no segments"
    expect(fits, "learner.layout", config.learner.layout, expected)
    _validate_replay(config)
    _validate_prime(config.prime)
    if config.init is not None:
        expect(config.prime is None, "init", _name(config.init), "None with prime: either makes the base policy")
        _validate_call(config.init, "init", config.model, None)
    _validate_call(config.task, "task")
    _validate_suites(config)
    _validate_call(config.tokenizer, "tokenizer")
    expected = "a function, as jaxrl_llm.run.teachers:run, exactly when distill_coef or teacher_logp needs one"
    expect((config.teacher is not None) == a.needs_teacher, "teacher", config.teacher, expected)
    if config.teacher is not None:
        _validate_call(config.teacher, "teacher")
    return config


def made(config: Config) -> tuple[Tokenizer, Task]:
    """What the config's functions make, prompts in their template. ValueError: no tokenizer, no task with a reward."""
    tokenizer, size = config.tokenizer(), config.model.vocab_size
    expect(isinstance(tokenizer, Tokenizer), "tokenizer()", type(tokenizer).__name__, "a data.tokenizers.Tokenizer")
    expect(tokenizer.size <= size, "model.vocab_size", size, f"at least {tokenizer.size} (tokenizer)")
    task = fitting.open_task(config.task, config.algorithm.prompts.template)
    _validate_call(task.reward, "task().reward", Prompt(0, ""), "", EOS)
    if hasattr(task.reward, "ready"):  # of functions that other processes have to import
        task.reward.ready()
    if task.step is not None:
        _validate_call(task.step, "task().step", Prompt(0, ""), "", EOS)
        replay = "algorithm.updates.routing_replay", config.algorithm.updates.routing_replay
        expected = "off in an environment (task().step), whose words the sampler does not draw"
        for name, value in (*((f"rollout.{n}", getattr(config.rollout, n)) for n in ("budget", "zero_gap")), replay):
            expect(not value, name, value, expected)
    return tokenizer, task


def _validate_model(m: ModelConfig) -> None:
    expect(m.heads % m.kv_heads == 0, "model.heads", m.heads, f"a multiple of model.kv_heads = {m.kv_heads}")
    fits = m.attention != "cudnn" or m.dtype == "bfloat16"
    expect(fits, "model.attention", m.attention, f"another one with model.dtype = {m.dtype}: cuDNN takes bfloat16")
    if m.rope_scaling is not None:
        low, high = m.rope_scaling.low_freq_factor, m.rope_scaling.high_freq_factor
        expect(low < high, "model.rope_scaling.low_freq_factor", low, f"less than high_freq_factor = {high}")
    k, expected = m.experts_per_token, f"at most model.experts = {m.experts}"
    expect(not m.experts or k <= m.experts, "model.experts_per_token", k, expected)
    if m.lora is not None:
        known, targets = LoRA.targets[:4] if m.experts else LoRA.targets, m.lora.targets
        sound = targets and len(set(targets)) == len(targets) and set(targets) <= set(known)
        expect(sound, "model.lora.targets", targets, f"different ones of {', '.join(known)}, which the model has")


def _validate_replay(config: Config) -> None:
    replay, name = config.algorithm.updates.routing_replay, "algorithm.updates.routing_replay"
    expect(config.model.experts or not replay, name, replay, "'': a model without experts has no routers")
    expected = "'' or 'R2' with rollout.servers, whose answers come without their routers' choice"
    expect(replay != "R3" or not config.rollout.servers, name, replay, expected)


def _validate_sampler(r: Rollout, ways: int) -> None:
    chosen = "top_p" if r.top_p < 1 else "top_k"
    expected = "no filter, or rollout.allow_filtered=True: the sampler-learner gap would measure the filter"
    expect(r.allow_filtered or (r.top_k, r.top_p) == (0, 1), f"rollout.{chosen}", getattr(r, chosen), expected)
    expect(r.slots % ways == 0, "rollout.slots", r.slots, f"a multiple of mesh.data × mesh.fsdp = {ways}")
    expected = f"0, or room for a group on each of the mesh's {ways} shards: at least {ways * r.group_size}"
    expect(ways == 1 or r.slots == 0 or r.slots >= ways * r.group_size, "rollout.slots", r.slots, expected)
    exact = r.mode == "sync" and not r.servers and not r.budget
    expected = "False unless rollout.mode is sync, rollout.servers is empty and rollout.budget is 0"
    expect(exact or not r.zero_gap, "rollout.zero_gap", r.zero_gap, expected)
    threads_on_hosts = r.mode != "sync" and not r.servers and jax.process_count() > 1
    expected = "sync with several processes that sample themselves: threads on several hosts would wait for each other"
    expect(not threads_on_hosts, "rollout.mode", r.mode, expected)
    expected = f"below rollout.max_response_tokens = {r.max_response_tokens}, or 0"
    expect(r.budget < r.max_response_tokens, "rollout.budget", r.budget, expected)
    expect("" not in r.stop, "rollout.stop", r.stop, "texts that are not empty")
    _validate_servers(r)


def _validate_servers(r: Rollout) -> None:
    other = any(server.startswith("openai+") for server in r.servers)
    start, expected = ("openai\\+https?://", "openai+http://host:port, as others are") if other else ("", "host:port")
    for i, server in enumerate(r.servers):
        expect(re.fullmatch(rf"{start}[^/]+:\d+", server), f"rollout.servers.{i}", server, expected)
    expected = "set when rollout.servers are openai+http://, and only then"
    for name in ("servers_folder", "servers_reload"):
        expect(bool(getattr(r, name)) == other, f"rollout.{name}", getattr(r, name), expected)
    expect(r.servers_seeded or other, "rollout.servers_seeded", False, "True unless rollout.servers are openai+http://")
    expect(not other or jax.process_count() == 1, "rollout.servers", r.servers, "host:port with several processes")
    if r.servers_reload is not None:
        _validate_call(r.servers_reload, "rollout.servers_reload", "", "", 0)


def _validate_pages(r: Rollout, ways: int, evaluated: list[int]) -> None:
    """evaluated: tokens that the answers of evaluations may have."""
    answers = r.slots or r.prompts * r.group_size if r.zero_gap else ways
    least = least_tokens(r.max_prompt_tokens, max([r.max_response_tokens, *evaluated]), answers, ways)
    what = "every answer" if r.zero_gap else "an answer on each of the mesh's shards"
    enough = r.kv_tokens == 0 or r.kv_tokens >= least
    expect(enough, "rollout.kv_tokens", r.kv_tokens, f"0, or room for {what}: at least {least}")


def _validate_algorithm(a: Algorithm, r: Rollout) -> None:
    if r.group_size == 1:
        expect(a.group_filter is None, "rollout.group_size", 1, "at least 2 for algorithm.group_filter")
        expected = f"at least 2 for {unbound(a.advantage)[0].__name__}: the advantage of one answer alone is 0"
        expect(a.needs_teacher or _one_answer_suffices(a), "rollout.group_size", 1, expected)
    resample, template = a.prompts.resample, a.prompts.template
    expect(resample or a.group_filter, "algorithm.prompts.resample", resample, "True without algorithm.group_filter")
    expected = "None if algorithm.prompts.prioritized: one order of prompts"
    expect(not a.prompts.prioritized or r.difficulty is None, "rollout.difficulty", r.difficulty, expected)
    _validate_call(template, "algorithm.prompts.template", Prompt(0, ""))
    if any(wants(fn, "n_gold") for fn in (a.shaping.reward, *(term.fn for term in a.shaping.terms.values()))):
        expected = "one that sets meta['n_gold'], for algorithm.shaping"
        expect("n_gold" in template(Prompt(0, "?")).meta, "algorithm.prompts.template", template, expected)
    if a.critic is not None:
        parts, expected = a.critic.mini_batches, f"at most rollout.prompts = {r.prompts}"
        expect(parts <= r.prompts, "algorithm.critic.mini_batches", parts, expected)
    _validate_functions(a, r.max_response_tokens)


def _validate_functions(a: Algorithm, max_len: int) -> None:
    """Raises ValueError, with field and function, for one that raises or returns another dtype or shape than is due.

    max_len: the most tokens of a response.
    """
    plain = {"max_len": max_len, "text": "", "n_prompts": 7, "beta": 0.0}
    names = ("logp", "old_logp", "sampler_logp", "teacher_logp", "adv", "values", "kl", "entropy", "log_router_ratio")
    tokens = plain | dict.fromkeys(names, _array("B T")) | dict.fromkeys(("mask", "selected"), _array("B T", bool))
    tokens |= {"rewards": _array("B" if a.critic is None else "B T"), "key": jax.eval_shape(lambda: jax.random.key(0))}
    rows = plain | {"rewards": _array("B"), "correct": _array("B", bool), "n_gold": _array("B")}
    rows |= {"n_tokens": _array("B", np.int32)}
    memory = None if a.memory is None else _called(a.memory, "memory", rows)
    groups = plain | {"rewards": _array("P G"), "correct": _array("P G", bool), "state": memory}
    groups |= dict.fromkeys(("n_tokens", "lengths"), _array("P G", np.int32))
    groups["parts"] = jax.ShapeDtypeStruct((SIZES["P"], SIZES["G"], len(a.shaping.parts or ())), np.float32)
    groups |= {"mask": _array("P G T", bool), "prompt_ids": _array("P", np.int32), "kept": _array("P", bool)}
    for names, given, expected in (
        ("loss correction token_advantage", tokens, "float [B T]"),
        ("updates.select updates.token_filter", tokens, "bool [B T]"),
        ("updates.phases", tokens, "a tuple of bool [B T]"),
        ("advantage", groups, "float [P G] or [P G T]"),
        ("shaping.reward", rows, "number [B]"),
        ("group_filter", groups, "bool [P]"),
    ):
        for name in names.split():
            if (fn := attrgetter(name)(a)) is not None:
                _check(a, fn, name, given, expected)
    answer = plain | {"finish": EOS, "n_tokens": 1, "n_gold": 1, "rewards": 0.0}
    groups |= {"n_gold": groups["n_tokens"]}
    for name, term in a.shaping.terms.items():
        given, expected = (answer | {"correct": True}, "number []") if term.of_answer else (groups, "number [P G]")
        if not wants(term.fn, "prompt"):  # what it would do with a prompt that is not the task's says nothing
            _check(a, term.fn, f"shaping.terms.{name}.fn", given, expected)


def _check(a: Algorithm, fn: Callable, name: str, given: dict[str, Any], expected: str) -> None:
    out = _called(fn, name, given)
    checked = (out,)
    if name == "updates.phases":
        checked = out if isinstance(out, tuple | list) else ()
    elif name == "advantage" and a.memory is not None:
        state = _shown(given["state"])
        expected += f" and the state as {state}"
        checked = out[:1] if isinstance(out, tuple) and len(out) == 2 and _shown(out[1]) == state else ()
    elif name == "token_advantage" and isinstance(out, tuple):
        checked = out[:1]  # the second are returns
    if not checked or not all(_is(x, expected) for x in checked):
        sizes = ", ".join(f"{axis} = {n}" for axis, n in SIZES.items())
        raise ValueError(f"algorithm.{name}: {_name(fn)} returns {_shown(out)}; expected {expected}, here {sizes}")


def _one_answer_suffices(a: Algorithm) -> bool:
    """Whether an answer alone in its group can have an advantage: of a right and a wrong one, each drawn twice, any."""
    given = {"lengths": np.full((2, 1), 3), "mask": np.ones((2, 1, 3), bool), "prompt_ids": np.arange(2)}
    given |= {"kept": np.ones(2, bool), "state": a.memory and call(a.memory, {"n_prompts": 2})}
    for rewards in np.array([[[1.0], [0.0]], [[0.0], [1.0]]], np.float32):
        try:
            parts = np.repeat(rewards[:, :, None], len(a.shaping.parts or ()), axis=2)
            adv = call(a.advantage, given | {"rewards": rewards, "parts": parts})
        except ValueError:
            return False
        if a.memory is not None:
            adv, given["state"] = adv
        if np.any(np.nan_to_num(adv)):
            return True
    return False


def _array(axes: str, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct([SIZES[axis] for axis in axes.split()], dtype)


def _is(x: Any, expected: str) -> bool:
    """Whether x has the kind, and one of the shapes in brackets, that the text names."""
    shapes = [tuple(SIZES[axis] for axis in axes.split()) for axes in re.findall(r"\[([A-Z ]*)\]", expected)]
    kind = next(kind for name, kind in KINDS.items() if name in expected)
    return hasattr(x, "dtype") and x.shape in shapes and jnp.issubdtype(x.dtype, kind)


def _shown(out: Any) -> str:
    if hasattr(out, "dtype"):
        return f"{out.dtype}[{','.join(map(str, out.shape))}]"
    return str(jax.tree.map(_shown, out)).replace("'", "")


def _name(fn: Callable) -> str:
    return getattr(unbound(fn)[0], "__name__", repr(fn))


def _called(fn: Callable, name: str, given: dict[str, Any]) -> Any:
    """The shapes of what fn returns. It is traced; one that runs outside of jit may need arrays' values: zeros."""
    arrays = {k: v for k, v in given.items() if not isinstance(v, int | float | str)}
    try:
        if name != "group_filter":
            try:
                return jax.eval_shape(lambda arrays: call(fn, given | arrays), arrays)
            except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError) as error:
                if not name.startswith("shaping."):
                    why = "needs the values of arrays; expected jax.numpy and no `if` on an array, as it is compiled"
                    raise ValueError(why) from error
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), arrays)
        return jax.eval_shape(lambda: np.asarray(call(fn, given | zeros)))
    except Exception as error:  # whatever a function of an experiment may raise
        text = str(error).partition("\n")[0]
        text = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
        keyword, names_it, _ = text.partition(" is ")
        if names_it and keyword in inspect.signature(fn).parameters:
            raise ValueError(f"algorithm.{name}.{text} ({_name(fn)})") from error
        raise ValueError(f"algorithm.{name}: {_name(fn)}: {text}") from error


def _validate_suites(config: Config) -> None:
    r = config.rollout
    room = r.max_response_tokens if r.servers else config.model.max_positions - 1
    for name, suite in config.evaluation.suites.items():
        where = f"evaluation.suites.{name}"
        expect(re.fullmatch(r"[\w.-]+", name), "evaluation.suites", name, "names of letters, digits, '_', '-' and '.'")
        _validate_call(suite.task, f"{where}.task")
        expected = f"at most {room}, {'what the servers draw' if r.servers else 'model.max_positions less a prompt'}"
        expect(suite.max_tokens <= room, f"{where}.max_tokens", suite.max_tokens, expected)


def _validate_prime(prime: Prime | None) -> None:
    if prime is None:
        return
    expect(prime.stages, "prime.stages", prime.stages, "at least one Stage(…)")
    for i, stage in enumerate(prime.stages):
        weights = list(stage.mixture.values())
        sound = min(weights, default=-1) >= 0 and sum(weights) > 0
        expect(sound, f"prime.stages.{i}.mixture", stage.mixture, "behaviours with weights, none below 0, not all 0")
    expect(prime.traces_per_batch > 0, "prime.traces_per_batch", prime.traces_per_batch, "a positive number")
    if prime.task is not None:
        _validate_call(prime.task, "prime.task")


def _validate_call(make: Callable, name: str, *arguments: Any) -> None:
    """`make` can be called with the arguments; a function that it has bound, with as many as its annotation says."""
    bound = make if isinstance(make, partial) else partial(make)
    fn = bound.func
    try:
        inspect.signature(fn).bind(*bound.args, *arguments, **bound.keywords)
    except TypeError as error:
        raise ValueError(f"{name}: {getattr(fn, '__name__', fn)}: {error}") from error
    for keyword, value in unbound(bound)[1].items():
        hint = hints(fn).get(keyword)
        if is_function(hint):
            coerce(hint, value, f"{name}.{keyword}")
            taken = next(iter(typing.get_args(hint)), None)
            if isinstance(taken, list):
                _validate_call(value, f"{name}.{keyword}", *taken)


def _types(node: Any, path: str) -> None:
    known = typing.get_type_hints(type(node))
    if isinstance(node, Optimizer) and node.kind == "adafactor":
        for name in ("b1", "b2", "eps", "moments_dtype"):
            value, default = getattr(node, name), getattr(Optimizer(), name)
            expect(value == default, f"{path}{name}", value, f"{default!r}, as it was: Adafactor does not read it")
    for f in dataclasses.fields(node):
        value, where = getattr(node, f.name), f"{path}{f.name}"
        coerce(known[f.name], value, where)
        expect(not isinstance(value, list), where, value, "a tuple")  # --set takes a list for it: it makes a tuple
        for expected, holds, numbers in RULES:
            if value is not None and f.name in numbers.get(type(node), "").split():
                expect(holds(value), where, value, expected)
        if dataclasses.is_dataclass(value):
            _types(value, f"{where}.")
        inside = value if isinstance(value, Mapping) else dict(enumerate(value)) if isinstance(value, tuple) else {}
        for name, inner in inside.items():
            if dataclasses.is_dataclass(inner):
                _types(inner, f"{where}.{name}.")

"""From sampled answers to what a step learns from."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from jaxrl_llm.arrays import AnyArray, Batch, ModelInput, Routing, Rows
from jaxrl_llm.learner import packing
from jaxrl_llm.learner.packing import Division
from jaxrl_llm.models.shape import ModelConfig
from jaxrl_llm.objective.token_weights import token_weights
from jaxrl_llm.parallel import sharding
from jaxrl_llm.parallel.sharding import constrain
from jaxrl_llm.types import LENGTH, Rollouts, expect

WHOLE = Division()


def make_batch(
    rollouts: Rollouts,
    model: ModelConfig,
    cut: Division = WHOLE,
    critic_mini_batches: int = 0,
    *,
    drop_truncated: bool = False,
    kept: Bool[np.ndarray, "P"] | None = None,
    mesh: Mesh | None = None,
) -> tuple[Batch, dict[str, float]]:
    """Answers as the arrays of their updates, on the mesh, with advantages 0, and the metrics of their packing.

    `mask` comes from the sampler's lengths and finish reasons, never from token ids; what an environment has said is
    masked out. `drop_truncated`: so are answers that reached the token limit (DAPO's overlong filtering). `kept`: so
    are groups that are False. critic_mini_batches: into which the critic's updates cut the batch, 0 without a critic.
    Prompts are filled up until mini-batches and shards divide them. Raises ValueError as `packing.plan` does.
    """
    group, prompts = rollouts.group_size, len(rollouts.prompts)
    unit = math.lcm(cut.mini_batches, critic_mini_batches or 1) * cut.shards // math.gcd(cut.shards, group)
    rows = -(-prompts // unit) * unit * group

    def laid_out(mini_batches: int) -> tuple[Rows, dict[str, float]]:
        division = replace(cut, mini_batches=mini_batches)
        planned = packing.plan(rollouts.prompt_lengths - 1, rollouts.lengths, model, division)
        laid = packing.lay_out(rollouts, planned, division, rows // mini_batches)
        return _placed(laid, mesh), packing.statistics(planned, rollouts)

    of_policy, statistics = laid_out(cut.mini_batches)
    of_critic = laid_out(critic_mini_batches)[0] if critic_mini_batches else None
    length = of_policy.inputs.layout.length
    more = lambda x: ((0, rows - len(x)), (0, max(0, length - x.shape[1])), *((0, 0),) * (x.ndim - 2))
    fit = lambda x: np.pad(x[:, :length], more(x))
    mask = np.arange(length) < rollouts.lengths[:, None]
    routing = None
    if (experts := rollouts.experts) is not None:
        none = np.iinfo(experts.dtype).max
        routing = Routing(sampler=np.where(fit(mask)[..., None, None], fit(experts), none))
    if rollouts.said is not None:
        mask &= ~fit(rollouts.said)[: len(mask)]
    if drop_truncated:
        mask &= (rollouts.finish != LENGTH)[:, None]
    if kept is not None:
        mask &= np.repeat(kept, group)[:, None]
    logp = np.where(mask, fit(rollouts.sampler_logp)[: len(mask)], 0).astype(np.float32)
    arrays = {"mask": fit(mask), "adv": np.zeros((rows, length), np.float32), "sampler_logp": fit(logp)}
    arrays |= {"valid": np.arange(rows) < len(mask), "routing": routing}
    return Batch(of_policy, **placed(arrays, mesh), critic_rows=of_critic, group_size=group), statistics


def placed(arrays: AnyArray | dict[str, AnyArray], mesh: Mesh | None) -> Array | dict[str, Array]:
    """Arrays of answers [B,…] on the mesh, split over the axes that share a batch."""
    return jax.device_put(arrays, None if mesh is None else sharding.batch_sharding(mesh))


def _placed(rows: Rows, mesh: Mesh | None) -> Rows:
    if mesh is None:
        return jax.device_put(rows)
    inputs = jax.device_put(rows.inputs, sharding.batch_sharding(mesh, axis=2))
    return Rows(inputs, jax.device_put(rows.where, sharding.replicated(mesh)))


def with_advantages(batch: Batch, adv: Float[AnyArray, "P G"] | Float[AnyArray, "B T"]) -> Batch:
    """The batch with an advantage per answer spread over its tokens, or one per token. ValueError on other shapes."""
    adv, tokens = jnp.asarray(adv, jnp.float32), batch.mask.shape
    groups = tokens[0] // batch.group_size, batch.group_size
    expect(adv.shape in (groups, tokens), "adv.shape", adv.shape, f"{groups} or {tokens}")
    return replace(batch, adv=jnp.where(batch.mask, adv if adv.shape == tokens else adv.reshape(-1, 1), 0.0))


def with_weights(
    batch: Batch,
    norm: str,
    max_len: float | None,
    *,
    nll: bool = False,
    phase: Bool[AnyArray, "B T"] | None = None,
    phase_weights: str = "batch",
) -> Batch:
    """The batch with its token weights, computed over all of it before it is split into micro-batches.

    `nll`: adds `nll_weights`, 1/Σ n over correct responses. `phase`: only these tokens have weight; denominators count
    the tokens of the whole batch, or of the phase (`phase_weights`).
    """
    counted = batch.mask & phase if phase is not None and phase_weights == "phase" else batch.mask
    in_phase = lambda weights: weights if phase is None else jnp.where(phase, weights, 0.0)
    of = {"group_size": batch.group_size, "max_len": max_len, "row_valid": batch.valid}
    weights = in_phase(token_weights(counted, norm, **of))
    nll_weights = in_phase(token_weights(batch.mask & batch.correct[:, None], "token")) if nll else None
    return replace(batch, weights=weights, nll_weights=nll_weights)


def mini_batches(batch: Batch, rows: Rows) -> list[Batch]:
    """The batch cut into the mini-batches of `rows`, with whole prompts in each: one takes every U-th prompt."""
    parts = rows.where.shape[0]
    arrays = replace(batch, rows=None, critic_rows=None)
    if parts > 1:
        split = jax.tree.map(lambda x: split_answers(x, parts, batch.group_size), arrays)
    cut = lambda tree, u: jax.tree.map(lambda x: x[u], tree)
    of_part = lambda u: jax.tree.map(lambda x: x[u : u + 1], rows)
    return [replace(arrays if parts == 1 else cut(split, u), rows=of_part(u)) for u in range(parts)]


def split_answers(x: Array, parts: int, group_size: int) -> Array:
    """[B,…] → [parts, B/parts, …], a prompt's answers in one part; a part takes every parts-th prompt."""
    if parts == 1:
        return x[None]
    y = x.reshape(-1, parts, group_size, *x.shape[1:]).swapaxes(0, 1)
    return y.reshape(parts, -1, *x.shape[1:])


def in_order(x: Array, rows: Rows, group_size: int) -> Array:
    """What was computed answer by answer, [U·M, D·b, …], as [B,…], 0 where the batch is only filled up: the
    inverse of cutting and packing.
    """
    parts = rows.where.shape[0]
    flat = x.reshape(parts, -1, *x.shape[2:])
    back = rows.where.reshape(*rows.where.shape, *(1,) * (x.ndim - 2))
    y = jnp.take_along_axis(flat, back, axis=1, mode="fill", fill_value=0)
    y = y.reshape(parts, -1, group_size, *x.shape[2:]).swapaxes(0, 1)
    return y.reshape(-1, *x.shape[2:])


def micro_batches(batch: Batch) -> tuple[ModelInput, Batch]:
    """A batch's rows, and its arrays in their order: leading axes [U·M]. Where a row has no answer, they are 0."""
    at, merged = batch.rows.inputs.answers, lambda x: x.reshape(-1, *x.shape[2:])

    def one(x: Array) -> Array:
        there = at.reshape(len(at), -1, *(1,) * (x.ndim - 1))
        y = jnp.take_along_axis(split_answers(x, len(at), batch.group_size), there, axis=1, mode="fill", fill_value=0)
        return constrain(y.reshape(-1, at.shape[2], *x.shape[1:]), None, "batch")

    return jax.tree.map(merged, batch.rows.inputs), jax.tree.map(one, replace(batch, rows=None, critic_rows=None))

"""Samplers in other processes, seen from the learner: the same `sample` and `pushed` as the engine in this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxrl_llm import weights
from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.sampler.client import Client
from jaxrl_llm.sampler.requests import Group, More, Request
from jaxrl_llm.sampler.sampling import Sampling


@dataclass(frozen=True)
class Remote:
    """Servers (`jaxrl serve`), and how they draw unless a request says otherwise."""

    client: Client
    model: ModelConfig  # as the servers compute it
    tokenizer: Tokenizer
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...] = ()
    quantized: str = ""  # int8 or int4: how pushed weights are kept
    version: int = 0  # of the weights pushed last
    bytes: int = 0  # of them, to each server

    def sample(self, more: More, latest: Callable | None = None) -> Iterator[tuple[Request, Group]]:
        """Groups as they are done. The servers change to pushed weights by themselves, between two of their calls."""
        return self.client.sample(more)

    def pushed(self, params: Any, version: int | None = None) -> Remote:
        """The same servers with the learner's parameters, one version on."""
        version = self.version + 1 if version is None else version
        held = weights.push(self.model, params, None, version=version, quantized=self.quantized)
        self.client.push(named(held.params), version)
        return replace(self, version=version, bytes=held.bytes)

    def close(self) -> None:
        self.client.close()


def named(params: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, on the host."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return dict(zip([jax.tree_util.keystr(p) for p, _ in leaves], jax.device_get([x for _, x in leaves]), strict=True))

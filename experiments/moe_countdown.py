"""RSPO on Countdown with a mixture of experts: 4 mini-batches, a sampler in int8, routers that disagree.

Paper:   RSPO, 2510.23027; routing replay R2 in 2507.18071 (GSPO), R3 in 2510.11370.
Claim:   the papers: on a mixture of experts the router ratio steadies GMPO, and replay narrows the sampler's gap.
Command: jaxrl train experiments/moe_countdown.py
         with replay:  --set algorithm.updates.routing_replay=R2 (or R3)
         as GMPO:      --set algorithm.loss=jaxrl_llm.objective.losses:gmpo
"""

from dataclasses import replace

from countdown_grpo import CONFIG as BASE

from jaxrl_llm.models import presets
from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    model=replace(presets.NANO, experts=8, experts_per_token=2, expert_width=128),
    algorithm=replace(ALGORITHMS["rspo"], updates_per_batch=4),  # 8 in the row
    rollout=replace(BASE.rollout, dtype="int8"),
    micro_batches=2,
)

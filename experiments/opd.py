"""On-policy distillation: the policy writes, a trained teacher's whole distribution corrects every token.

Paper:   GKD, 2306.13649, with answers of the policy's own alone and the reverse KL.
Claim:   the policy comes as close to its teacher as RL did, in fewer steps; no reward is used.
Command: jaxrl train experiments/opd.py     (first its teacher: jaxrl train experiments/laptop_dapo.py)
"""

from dataclasses import replace
from functools import partial

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.run import teachers

CONFIG = replace(
    BASE,
    algorithm=ALGORITHMS["opd"],
    teacher=partial(teachers.run, folder="runs/laptop_dapo"),
)

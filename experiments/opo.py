"""OPO: exactly on policy, with the baseline of least variance: rewards weighted by length.

Paper:   On-policy RL with optimal reward baseline, 2505.23585.
Claim:   the paper: better and steadier on mathematics with no reference model and no regulariser, lower policy shift,
         higher entropy.
Command: jaxrl train experiments/opo.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(BASE, algorithm=ALGORITHMS["opo"])

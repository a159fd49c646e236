"""REINFORCE: the reward times the gradient of the answer's log-probability, no baseline.

Paper:   Williams 1992, Machine Learning 8.
Claim:   the paper: the average update lies along the gradient of the expected reward, without that gradient ever being
         computed.
Command: jaxrl train experiments/reinforce.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(BASE, algorithm=ALGORITHMS["reinforce"])

"""What a run is: one tree of frozen dataclasses, its validation, its JSON, and changes by path."""

from jaxrl_llm.config.files import differences, dumps, from_json, load, named, to_json
from jaxrl_llm.config.tree import Checkpoint, Config, Evaluation, Learning, Mesh, Prime, Rollout, Stage, Suite
from jaxrl_llm.config.validation import made, validate
from jaxrl_llm.config.values import override

__all__ = [
    "Checkpoint", "Config", "Evaluation", "Learning", "Mesh", "Prime", "Rollout", "Stage", "Suite",
    "differences", "dumps", "from_json", "load", "made", "named", "override", "to_json", "validate",
]  # fmt: skip

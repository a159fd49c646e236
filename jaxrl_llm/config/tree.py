"""One tree of frozen dataclasses: what a run is.

Functions are configuration: a field may hold a function or a `functools.partial`, and a path may go on into the
partial's keywords (`algorithm.loss.clip_high=0.3`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxrl_llm.data import tokenizers
from jaxrl_llm.models.shape import ModelConfig
from jaxrl_llm.objective.algorithms import Algorithm
from jaxrl_llm.types import Optimizer


@dataclass(frozen=True)
class Stage:
    """Part of the supervised stage: so many batches of traces, behaviours drawn with these weights."""

    batches: int
    mixture: Mapping[str, float]


@dataclass(frozen=True)
class Prime:
    """Supervised training that makes the base policy."""

    stages: tuple[Stage, ...]
    traces_per_batch: int = 64
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=2e-3, schedule="cosine", warmup=20))
    task: Callable | None = None  # None: the run's own


@dataclass(frozen=True)
class Rollout:
    prompts: int = 32  # P, per batch
    group_size: int = 8  # G
    max_prompt_tokens: int = 256
    max_response_tokens: int = 96  # the end-of-sequence token included
    long_prompts: Literal["error", "drop"] = "error"  # what to do about longer prompts: see data/fitting.py
    temperature: float = 1.0
    top_k: int = 0  # 0: no filter. A filter makes sampler and learner differ, so it has to be allowed:
    top_p: float = 1.0
    allow_filtered: bool = False
    stop: tuple[str, ...] = ()
    slots: int = 0  # answers decoded at once; 0: those of a batch
    tokens_per_call: int = 32
    # What the sampler computes in, "": as the learner; int8 and int4: how it keeps its weights.
    dtype: Literal["", "float32", "bfloat16", "int8", "int4"] = ""
    head_dtype: Literal["", "float32", "bfloat16"] = ""  # of its last product, summed in float32; "": as the learner's
    kv_dtype: Literal["", "float32", "bfloat16", "int8"] = ""  # of its keys and values; "": as it computes
    # How keys and values are kept: a ring for each answer, or pages, which bound memory in tokens (sampler/pages.py);
    # auto: the ring on a CPU, and for answers of up to a thousand tokens with their prompt.
    cache: Literal["auto", "ring", "pages"] = "auto"
    kv_tokens: int = 0  # that the pages hold; 0: as many as the device has room for, at most those of all slots
    prefill_tokens: int = 4096  # of prompts that go through the model in one call, with pages
    zero_gap: bool = False  # old log-probs from the sampler's own kernels: equal to those recorded, bit for bit
    mode: Literal["sync", "ahead", "async"] = "sync"  # see modes.py
    max_staleness: int = 1  # updates that an answer may be old, with mode="async"
    budget: int = 0  # tokens that an answer may grow by before others have their turn; 0: no bound
    # host:port of samplers (jaxrl serve), or openai+http://host:port of other engines; none: sample in this process
    servers: tuple[str, ...] = ()
    servers_ca: str | None = None  # file with the certificate that signed theirs; None: no TLS
    servers_folder: str = ""  # of other engines alone, see docs/engines.md: where they find new weights,
    servers_reload: Callable | None = None  # (url, folder, version) -> None: has the engine take them,
    servers_seeded: bool = True  # whether it takes a seed for each request
    deadline_s: float = 600.0  # of one call to a server; unfinished answers come back before, and go on
    in_flight: int = 32  # groups that a server is asked for at once
    max_waiting: int = 256  # groups that a server takes from all of its clients, queued ones included
    max_rounds: int = 10  # of sampling before a group filter gives up
    difficulty: Callable | None = None  # Prompt → number: a curriculum, one pass from the easiest to the hardest


@dataclass(frozen=True)
class Mesh:
    data: int = 1
    fsdp: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class Learning:
    """How the learner computes; nothing of it but an 8-bit reference changes a number beyond rounding."""

    layout: Literal["auto", "grouped", "packed"] = "auto"  # of a row of the model; auto: the one with fewer operations
    row_tokens: int = 0  # that a row may have at most; 0: grouped rows any number, packed ones the longest answer's
    logprob_chunk: int = 1024  # tokens of a device whose logits exist at once
    reference_dtype: Literal["", "int8"] = ""  # of the reference policy's matrices; "": as it computes


@dataclass(frozen=True)
class Suite:
    """Problems to evaluate on besides the held-out ones, and how their answers are drawn; None: as in training."""

    task: Callable  # () -> types.Task, whose test side is asked; run/suites.py makes them of benchmarks
    every: int = 0  # steps; 0: whenever the held-out problems are
    problems: int = 512  # the first ones
    samples: int = 1  # answers per problem
    temperature: float | None = None  # 0: greedy
    top_p: float | None = None
    max_tokens: int = 0  # per answer; 0: rollout.max_response_tokens


@dataclass(frozen=True)
class Evaluation:
    every: int = 10  # steps; 0: only before and after
    problems: int = 512  # of the held-out split
    samples: int = 1  # answers per problem, drawn like the training ones
    suites: Mapping[str, Suite] = field(default_factory=dict)  # by the name that their metrics have


@dataclass(frozen=True)
class Checkpoint:
    every: int = 20  # steps
    keep: int = 2


@dataclass(frozen=True)
class Config:
    task: Callable  # () -> types.Task
    algorithm: Algorithm
    model: ModelConfig
    tokenizer: Callable = tokenizers.characters  # () -> Tokenizer
    prime: Prime | None = None  # None: random parameters, unless
    init: Callable | None = None  # (ModelConfig, Mesh) -> parameters to start from: see models/hf.py
    # () → (ModelConfig, Tokenizer, mesh → parameters): the policy to distil from, see run/teachers.py
    teacher: Callable | None = None
    optimizer: Optimizer = Optimizer()
    rollout: Rollout = Rollout()
    mesh: Mesh = Mesh()
    learner: Learning = Learning()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    steps: int = 100  # batches of rollouts
    micro_batches: int = 1
    seed: int = 0
    logged_samples: int = 4  # a step, into samples.jsonl
    compile_cache: str = "auto"  # folder of XLA's compiled programs; auto: in the project's cache, "": none
    abort_after: int = 10  # steps in a row that do not change policy or critic, as nothing was finite; 0: never

    @property
    def total_steps(self) -> int:
        """Batches of rollouts, those from which only the critic learns included."""
        return self.steps + (0 if self.algorithm.critic is None else self.algorithm.critic.pretrain)

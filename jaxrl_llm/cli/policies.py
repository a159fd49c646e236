"""The commands that use a policy, take one in and give one away: sample, serve, import, export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import tyro

from jaxrl_llm.cli.shared import File, Set, load, use_devices


def sample(run: File, problem: tyro.conf.Positional[str], n: int = 1, seed: int = 0) -> None:
    """Print answers of a run's newest checkpoint to your problem.

    Args:
        run: the run's folder.
        problem: the prompt, as the policy shall see it.
        n: answers to draw.
        seed: other seeds draw other answers.
    """
    use_devices(load(run))
    import jax

    from jaxrl_llm.run import trainer
    from jaxrl_llm.sampler import groups
    from jaxrl_llm.types import Prompt

    learner, engine, _ = trainer.load_policy(run)
    limit = learner.config.rollout.max_prompt_tokens
    with jax.set_mesh(learner.mesh):
        answers = groups.sample_groups(
            engine, (Prompt(0, problem),), n, seed=seed, draws=[0], max_prompt_tokens=limit, step=learner.task.step
        )
    for text, finish in zip(answers.texts, answers.finish, strict=True):
        print(text if finish == "eos" else f"{text}  [{finish}]")


def serve(
    source: File, set_: Set = (), host: str = "127.0.0.1", port: int = 9000,
    cert: str | None = None, key: str | None = None, metrics_port: int | None = None, http_port: int | None = None,
    weights: Path | None = None, unwatched: bool = False,
) -> None:  # fmt: skip
    """Serve a sampler to learners, and to clients of OpenAI's API.

    A learner finds it by `--set 'rollout.servers=["host:port"]'`. The token that callers must bring is $JAXRL_TOKEN,
    and who pushes weights brings $JAXRL_PUSH_TOKEN in its place; without both it listens on loopback alone.

    Args:
        source: an experiment file, whose learner will send weights, or a run's folder, for its newest checkpoint.
        host: address to listen on.
        port: port to listen on.
        cert: PEM file of its certificate, for TLS.
        key: PEM file of the certificate's key.
        metrics_port: of /metrics (Prometheus), /healthz and /readyz; none if left out.
        http_port: of OpenAI's /v1/completions and /v1/models; none if left out.
        weights: folder below which /update_weights_from_disk may find weights; none if left out.
        unwatched: serve in this process, which is not started again when it dies.
    """
    config = load(source, set_)
    from jaxrl_llm.serving import process as serving

    listen = {"host": host, "port": port, "cert": cert, "key": key, "metrics_port": metrics_port}
    listen |= {"http_port": http_port, "weights": weights}
    if not unwatched:  # the devices are left to the process that is watched
        sys.exit(serving.watch(source, set_, **listen))
    use_devices(config)
    serving.work(source, set_, **listen)


def import_(
    source: tyro.conf.Positional[str],
    prompt: str = "The capital of France is",
    tokens: int = 16,
    out: Path | None = None,
) -> None:
    """Check a Hugging Face checkpoint; print an experiment from it.

    Args:
        source: a folder, or OWNER/NAME of the Hugging Face hub.
        prompt: what it shall continue.
        tokens: how far.
        out: a Python file for the experiment, which is printed if left out.
    """
    use_devices()
    from jaxrl_llm.run import tryout

    if out is not None and out.exists():
        raise ValueError(f"--out {out}: there already; expected a new file")
    print(*tryout.try_checkpoint(source, prompt, tokens), sep="\n")
    text = tryout.experiment(source, out)
    if out is None:
        print(f"\n{text}", end="")
    else:
        out.write_text(text)
        print(f"experiment {out}")


def export(run: File, out: File, step: int | None = None, dtype: Literal["bfloat16", "float32"] = "bfloat16") -> None:
    """Write a run's policy as a folder in Hugging Face format.

    Args:
        run: the run's folder.
        out: the folder to be made.
        step: of the checkpoint; the newest if left out.
        dtype: of the weights.
    """
    use_devices(load(run))
    from jaxrl_llm.data import tokenizers
    from jaxrl_llm.models import hf, lora
    from jaxrl_llm.run import trainer

    learner, state, step = trainer.load_state(run, step)
    model = learner.config.model
    params = lora.merged(model, learner.whole(state.params), dtype)
    hf.export(params, lora.without(model), learner.tokenizer, out, dtype)
    if warning := tokenizers.misread(out, learner.tokenizer):
        print(warning, file=sys.stderr)
    print(f"{out}: {run} at step {step}, {model.n_params:,} parameters in {dtype}")

"""Truncated importance sampling: what a coarse sampler costs, and what the correction gives back.

Paper:   Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
Claim:   with a coarse sampler, learning without correction is worse; with TIS it is as with an exact sampler.
Command: python experiments/figures/tis.py [--seeds 5] [--out runs/tis]

A run a seed and arm on the laptop task; a folder that holds a finished run is not run again. At the end the learner's
policy is evaluated by an exact float32 sampler. Writes tis.json, tis.md and tis.png.
"""

import json
from dataclasses import replace
from pathlib import Path

import jax
import matplotlib
import numpy as np
import tyro

from jaxrl_llm import config as configs
from jaxrl_llm.config import Config
from jaxrl_llm.run import trainer

matplotlib.use("Agg")
import matplotlib.pyplot as plt

EXPERIMENT = Path(__file__).parent.parent / "laptop_dapo.py"
# Five times laptop_dapo's rate and no filter: at its own settings no sampler makes a difference that can be seen.
COMMON = ("steps=120", "evaluation.every=0", "optimizer.lr=1e-4", "algorithm.group_filter=none")
CORRECTION = "algorithm.correction=jaxrl_llm.objective.corrections:"
INT4 = ("rollout.dtype=int4",)
ARMS = {
    "float32": (),
    "int8": ("rollout.dtype=int8", "rollout.kv_dtype=int8"),
    "int4": INT4,
    "int4 + TIS": (*INT4, CORRECTION + "tis"),
    "int4 + sequence TIS": (*INT4, CORRECTION + "tis_sequence"),
}
COLORS = dict(zip(ARMS, ("#1b2430", "#2f6bd8", "#d0475a", "#e0a030", "#2a9d6a"), strict=True))
PROBLEMS = 1000  # all that are held out, for the accuracy at the end


def run(config: Config, folder: Path) -> list[dict[str, float]]:
    """The metrics of a run, which is made or finished if need be."""
    log = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if not rows or rows[-1]["step"] < config.steps:
        trainer.train(config, folder, resume=any((folder / "checkpoints").glob("[0-9]*")))
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    return rows


def exact_accuracy(folder: Path) -> float:
    """Held-out accuracy of the learner's policy itself."""
    learner, state, _ = trainer.load_state(folder)
    rollout = replace(learner.config.rollout, dtype="", kv_dtype="")
    evaluation = replace(learner.config.evaluation, problems=PROBLEMS)
    learner = replace(learner, config=replace(learner.config, rollout=rollout, evaluation=evaluation))
    with jax.set_mesh(learner.mesh):
        return trainer.evaluate_policy(learner, trainer.make_engine(learner, state.params))["eval/accuracy"]


def measured(folder: Path, rows: list[dict[str, float]]) -> dict[str, list[float]]:
    """Curves of one run, and numbers at its end."""
    steps = [r for r in rows if r["step"] > 0]
    kept = folder / "exact.json"
    if not kept.exists():
        kept.write_text(json.dumps(exact_accuracy(folder)))
    curve = lambda name: [r[name] for r in steps]
    return {
        "accuracy": [json.loads(kept.read_text())],
        "train": curve("accuracy"),
        "entropy": curve("entropy"),
        "gap/max": curve("gap/max"),
        "gap/mean": curve("gap/mean"),
    }


def table(found: dict[str, list[dict[str, list[float]]]]) -> str:
    """A row an arm: accuracy of each seed, its mean difference to float32's of the same seed, entropy and gap."""
    exact = {arm: np.array([s["accuracy"][0] for s in seeds]) for arm, seeds in found.items()}
    heads = ["sampler", *(f"seed {i}" for i in range(len(exact["float32"])))]
    heads += ["against float32, points", "entropy, last 10 steps", "mean gap", "max gap"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for arm, seeds in found.items():
        over = lambda name, part=slice(None), seeds=seeds: np.mean([np.mean(s[name][part]) for s in seeds])
        cells = [arm, *(f"{x:.1%}" for x in exact[arm]), f"{100 * np.mean(exact[arm] - exact['float32']):+.1f}"]
        cells += [f"{over('entropy', slice(-10, None)):.4f}", f"{over('gap/mean'):.1e}", f"{over('gap/max'):.2g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(found: dict[str, list[dict[str, list[float]]]], path: Path) -> None:
    """Each seed's accuracy at the end; then training accuracy, entropy and the largest gap, means over the seeds."""
    figure, axes = plt.subplots(1, 4, figsize=(16, 4), dpi=100, layout="constrained")
    titles = {
        "train": "Accuracy of the samples in training",
        "entropy": "Entropy, nats per token",
        "gap/max": "Largest |Δ probability|",
    }
    for i, (arm, seeds) in enumerate(found.items()):
        exact = [s["accuracy"][0] for s in seeds]
        axes[0].scatter([i] * len(seeds), exact, color=COLORS[arm], alpha=0.7, s=40)
        axes[0].annotate(f"{np.mean(exact):.1%}", (i, 1.005), ha="center", fontsize=9, color=COLORS[arm])
    axes[0].set_xticks(range(len(found)), [arm.replace(" + ", "\n+ ") for arm in found], fontsize=8)
    axes[0].set_title("Accuracy at the end, a dot a seed", loc="left", fontsize=11, fontweight="bold", pad=14)
    for ax, (name, title) in zip(axes[1:], titles.items(), strict=True):
        for arm, seeds in found.items():
            mean = np.array([s[name] for s in seeds]).mean(axis=0)
            ax.plot(np.arange(1, len(mean) + 1), mean, color=COLORS[arm], label=arm, linewidth=1.6)
        ax.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=14)
        ax.set_xlabel("step")
    for ax in axes:
        ax.grid(axis="y", color="#e6e9ee")
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    axes[2].set_yscale("log")
    axes[3].set_yscale("log")
    axes[1].legend(frameon=False, fontsize=9)
    figure.savefig(path)


def main(seeds: int = 5, out: Path = Path("runs/tis"), arms: tuple[str, ...] = tuple(ARMS)) -> None:
    """Run what is missing, then the table and the picture.

    Args:
        seeds: runs of each arm.
        out: folder of the runs and of the results.
        arms: which of them, float32 among them.
    """
    found: dict[str, list] = {arm: [] for arm in arms}
    for seed in range(seeds):
        for arm in arms:
            config = configs.load(EXPERIMENT, (*COMMON, f"seed={seed}", *ARMS[arm]))
            folder = out / f"{arm.replace(' + ', '_').replace(' ', '_')}-{seed}"
            found[arm].append(measured(folder, run(config, folder)))
    (out / "tis.json").write_text(json.dumps(found))
    (out / "tis.md").write_text(table(found) + "\n")
    picture(found, out / "tis.png")
    print(table(found))


if __name__ == "__main__":
    tyro.cli(main)

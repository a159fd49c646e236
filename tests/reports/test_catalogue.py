"""The table and the page that describe the methods say what the code says, and the page is up to date."""

import inspect
import re
from dataclasses import fields, replace

import pytest

from jaxrl_llm.objective import advantages, corrections, losses
from jaxrl_llm.objective.algorithms import ALGORITHMS, Algorithm, Critic, PromptChoice, Shaping, Term, Updates
from jaxrl_llm.objective.token_weights import NORMS
from jaxrl_llm.reports import catalogue, latex

PAGE = catalogue.page()
TABLE = catalogue.table()
EQUATIONS = re.findall(r"^```math\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_page_is_up_to_date():
    stale = f"docs/algorithms.md is stale; renew it with: {catalogue.COMMAND}"
    assert catalogue.PAGE.read_text(encoding="utf-8") == PAGE, stale


@pytest.mark.parametrize("module", [losses, advantages, corrections])
def test_every_public_function_has_a_section(module):
    short = module.__name__.split(".")[-1]
    public = [n for n, f in inspect.getmembers(module, callable) if getattr(f, "__module__", "") == module.__name__]
    public = [n for n in public if n[0].islower()]
    assert len(public) > 8
    for name in public:
        assert PAGE.count(f"\n### `{short}.{name}`\n") == 1, name


def section(title):
    return PAGE.split(f"\n### `{title}`\n")[1].split("\n#")[0]


def test_a_section_has_summary_equation_defaults_source_and_methods():
    text = section("losses.cispo")
    assert text.strip().startswith("The policy gradient weighted by a capped, detached ratio")
    equation = (
        r"x = -\mathrm{sg}[\mathrm{clip}(r, \mathrm{ratio\_min}, \mathrm{ratio\_max})] \cdot A \cdot \mathrm{logp}"
    )
    assert f"```math\n{equation}\n```" in text
    assert "[2506.13585](https://arxiv.org/abs/2506.13585)" in text
    assert "Defaults: `ratio_max=5`, `ratio_min=0`.  \nMethods: `cispo`, `scalerl`." in text
    assert "Methods: `ppo`, `a2c`, `orz`, `vapo`." in section("losses.value_loss")
    assert "`grpo`" in section("losses.kl")
    assert "`dapo`" not in section("losses.kl")
    assert "Methods" not in section("corrections.veto")


def test_what_rows_use_of_other_modules_has_a_section_too():
    for title in ("length.l1_max", "filters.lopti_phases", "filters.mixed", "templates.r1", "format.think_answer"):
        assert section(title).strip()
    for norm in NORMS:
        users = [n for n, a in ALGORITHMS.items() if a.norm == norm]
        assert f"Methods: {', '.join(f'`{n}`' for n in users)}." in section(norm)


def test_every_row_is_in_table_and_page_with_its_paper():
    lines = TABLE.splitlines()
    assert len(lines) == len(ALGORITHMS) + 1
    for line, (name, a) in zip(lines[1:], ALGORITHMS.items(), strict=True):
        assert line.split()[0] == name
        assert line.endswith(a.paper.split(",")[0])
        linked = f"[{a.paper}](https://arxiv.org/abs/{a.paper})" if a.paper[0].isdigit() else a.paper
        assert f"\n| `{name}` | {linked} | " in PAGE


def test_lines_fit_and_columns_stay_apart():
    for line in TABLE.splitlines():
        assert len(line) <= 120
    for line in TABLE.splitlines()[1:]:
        name, a = line.split()[0], ALGORITHMS[line.split()[0]]
        loss = getattr(a.loss, "func", a.loss).__name__
        assert re.search(rf"  {loss}(\([^)]+\))?  +{a.norm}(\(1\))?  ", line), name


def test_rows_of_the_table_by_hand():
    rows = {line.split()[0]: re.split(r" {2,}", line) for line in TABLE.splitlines()}
    assert rows["grpo"] == ["grpo", "grpo", "ppo_clip", "sequence", "KL 0.04·k3", "2402.03300"]
    assert rows["rloo"] == ["rloo", "rloo", "reinforce", "constant(1)", "KL 0.05·k1 in reward", "2402.14740"]
    assert rows["a2c"] == ["a2c", "gae(lam=1)", "reinforce", "token", "critic", "1602.01783"]
    assert rows["reinforce"] == ["reinforce", "raw", "reinforce", "constant(1)", "Williams 1992"]
    # signed reward and updates per batch do not fit; clip_low is its default
    assert rows["dapo"][2:5] == ["ppo_clip(clip_high=0.28)", "token", "mixed, signed reward, +2"]
    assert rows["olmo3"][4] == "tis, varied, retire above 0.875"
    assert rows["ar"][1] == "grpo → reweight"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("grpo", []),
        ("dr_grpo", ["advantage `dr_grpo`", "norm `constant`", "no KL", "updates per batch `8`"]),
        ("rloo", ["advantage `rloo`", "loss `reinforce`", "norm `constant(1)`", "KL `0.05·k1 in reward`"]),
        ("gspo", ["loss `gspo`", "no KL", "updates per batch `4`"]),
        ("simplerl_zoo", ["norm `token`", "KL `0.0001·k3`", "entropy coef `0.001`", "updates per batch `4`"]),
        (
            "dapo",
            [
                "loss `ppo_clip(clip_high=0.28)`", "norm `token`", "no KL", "signed reward",
                "group filter `mixed`", "updates per batch `16`", "term overlong `soft_overlong(cache_len=4096)`",
            ],
        ),
        (
            "scalerl",
            [
                "advantage `scalerl`", "loss `cispo`", "norm `prompt`", "no KL", "bypass", "group filter `varied`",
                "retire above `0.9`", "no resample",
            ],
        ),
        (
            "orz",
            [
                "advantage `raw`", "token advantage `gae(lam=1)`", "norm `token`", "no KL",
                "whiten", "critic `updates=12, mini_batches=12`", "template `r1`",
            ],
        ),
    ],
)  # fmt: skip
def test_differences_from_grpo_by_hand(name, words):
    assert catalogue.differences(ALGORITHMS[name], ALGORITHMS["grpo"]) == words
    if words:
        assert f" | {'; '.join(words)} |\n" in PAGE


def test_every_field_makes_a_difference():
    """A field that `differences` overlooked would hide what a method does."""
    base = ALGORITHMS["grpo"]
    other = {"norm": "token", "norm_length": 3, "kl": "k1", "kl_in": "reward", "phase_weights": "phase"}
    inner = [(group, f) for group in catalogue.GROUPS for f in fields(getattr(base, group))]
    for group, f in [*((None, f) for f in fields(Algorithm) if f.name not in catalogue.GROUPS), *inner]:
        holder = base if group is None else getattr(base, group)
        value = getattr(holder, f.name)
        if f.name in (
            "paper",
            "critic",
            "memory",
            "select",
            "parts",
        ):  # but for the first: they need a function that asks
            continue
        if f.name == "terms":
            changed = {"mine": Term(lambda text: 0.0)}
        elif isinstance(value, bool):
            changed = not value
        elif isinstance(value, int | float):
            changed = value + 1
        elif f.name == "retire_above":
            changed = 0.5
        elif f.name in other:
            changed = other[f.name]
        else:
            changed = lambda adv=None: None
        holder = replace(holder, **{f.name: changed})
        other_row = holder if group is None else replace(base, **{group: holder})
        assert len(catalogue.differences(other_row, base)) == 1, f.name


def test_every_field_is_listed_with_its_default():
    for cls in (Algorithm, Shaping, PromptChoice, Updates, Critic):
        text = PAGE.split(f"## Fields of `{cls.__name__}`")[1].split("\n## ")[0]
        assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == [f.name for f in fields(cls)]
    assert "| `resample` | `True` | sample until P groups pass" in PAGE
    assert "| `lam` | `1` | λ of the returns it learns" in PAGE


def test_a_row_in_full():
    text = catalogue.describe("opmd", ALGORITHMS["opmd"])
    assert text.startswith("opmd  https://arxiv.org/abs/2501.12599\n\n  advantage          opmd\n")
    assert re.search(r"^  optimizer_reset    True$", text, re.MULTILINE)
    assert "epochs" not in text
    assert "\nlosses.opmd(logp, old_logp, adv, mask, tau=0.1)\n  Kimi k1.5's policy mirror descent" in text
    assert "\n      x = −A · Σ_t logp + (τ/2) · (Σ_t d)²\n" in text
    assert "\nlength.kimi_length(" in text
    assert "\nlosses.kl(" not in text
    assert "templates.none" not in text  # a field that was not chosen
    assert "\nlosses.kl(" in catalogue.describe("rloo", ALGORITHMS["rloo"])


# --- equations ----------------------------------------------------------------------------------------------------


def test_equations_are_balanced_ascii_and_of_known_commands():
    assert len(EQUATIONS) > 55
    assert PAGE.count("\n```") == 2 * len(re.findall(r"^```(?:math|text)$", PAGE, re.MULTILINE))
    functions = {"min", "max", "exp", "log", "sqrt", "tfrac", "sum"}
    signs = {"cdot", "le", "ge", "ne", "in", "leftarrow", "ldots", "quad", "begin", "end", "mathrm", "mathbf", "text"}
    greek = {"alpha", "beta", "gamma", "delta", "kappa", "lambda", "pi", "rho", "sigma", "tau", "varphi"}
    closing = {"}": "{", ")": "(", "]": "["}
    for equation in EQUATIONS:
        assert equation.isascii(), equation
        assert set(re.findall(r"\\([A-Za-z]+)", equation)) <= functions | signs | greek, equation
        assert equation.count(r"\begin{aligned}") == equation.count(r"\end{aligned}") == (equation.count("\n") > 1)
        opened = []
        for character in equation:
            if character in closing.values():
                opened.append(character)
            elif character in closing:
                assert opened.pop() == closing[character], equation
        assert not opened, equation
        # outside of \text and \mathrm no word is left, which would be set as a product of letters
        bare = re.sub(r"\\(text|mathrm|begin|end)\{[^}]*\}|\\[A-Za-z]+", " ", equation)
        assert not re.search(r"[A-Za-z]{2,}", bare), equation


@pytest.mark.parametrize(
    ("text", "tex"),
    [
        ("R·1[t = last] − beta·kl_t", r"R \cdot \mathbf{1}[t = \mathrm{last}] - \mathrm{beta} \cdot \mathrm{kl}_t"),
        ("low = ½·√max(1 − beta/q, 0)", r"\mathrm{low} = \tfrac{1}{2} \cdot \sqrt{\max(1 - \mathrm{beta}/q, 0)}"),
        ("x / √(var + (1 + q)) >= 2", r"x / \sqrt{\mathrm{var} + (1 + q)} \ge 2"),
        ("k3 = e^(−u) − 1 + e^old_logp + u²", r"k_3 = e^{-u} - 1 + e^{\mathrm{old\_logp}} + u^2"),
        ("Σ_{t'≥t} r_t' + Σ mask", r"\sum_{t'\ge t} r_{t'} + \sum \mathrm{mask}"),
        ("γλ·V_{t+1} <= π_old", r"\gamma\lambda \cdot V_{t+1} \le \pi_{\mathrm{old}}"),
        ("R_max − mean_group R", r"R_{\max} - \mathrm{mean}_{\mathrm{group}}\, R"),
        ("c = 1 if A > 0 else old_logp", r"c = 1 \text{ if } A > 0 \text{ else } \mathrm{old\_logp}"),
        ("0 in a group of beta tokens, a = 1", r"0 \text{ in a group of beta tokens}, a = 1"),
        ("exp(mean_t d'),  d", r"\exp(\mathrm{mean}_t\, d'),\quad d"),
        ("A = the smaller of x", r"A = \text{the smaller of } x"),
        ("11[t] and τa", r"11[t] \text{ and } \tau a"),
    ],
)  # fmt: skip
def test_latex_by_hand(text, tex):
    assert latex.latex(text, {"beta", "old_logp", "mask"}) == tex

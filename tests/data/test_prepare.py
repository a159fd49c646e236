"""Prepared datasets: what is read, what is refused with file and line, what is written, and that all or nothing is."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jaxrl_llm.data import datasets, prepare, recipes, rows
from jaxrl_llm.data.recipes import Recipe

PLAIN = Recipe(check="")


def write(path, lines):
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return path


def numbered(n, start=0):
    return [{"prompt": f"{i} + 1 =", "answer": str(i + 1), "hard": i % 3} for i in range(start, start + n)]


def made(tmp_path, lines=None, recipe=PLAIN, files=None, **settings):
    files = files or {"train": [write(tmp_path / "a.jsonl", lines)]}
    return prepare.prepare("sums", files, recipe, tmp_path / "root", **settings)


def prompts(report, split="train"):
    return list(datasets.Rows(report["folder"], split))


def whole_number(answer):
    if not answer.isdigit():
        raise ValueError("no digits")


# --- what is kept


def test_what_is_written_is_read_back_in_order_with_all_columns(tmp_path):
    lines = [{"prompt": "é?\u2028", "answer": "x", "level": "5"}, {"prompt": "1+1", "answer": 2, "source": "book"}]
    lines += [{"prompt": "which", "answer": ["a", "b"], "response": "a, as"}]
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    found = prompts(made(tmp_path, [*lines, {"prompt": told, "answer": "y"}]))
    assert [(p.id, p.text, p.answer) for p in found] == [
        (0, "é?\u2028", "x"), (1, "1+1", 2), (2, "which", ["a", "b"]), (3, "hi", "y"),
    ]  # fmt: skip
    assert found[0].meta == {"level": "5", "source": "sums", "row": "a.jsonl:1"}
    assert found[1].meta == {"origin": "book", "source": "sums", "row": "a.jsonl:2"}
    assert found[2].meta["response"] == "a, as"
    assert list(found[3].messages) == told


def test_columns_of_the_names_of_ours_stay_apart(tmp_path):
    told = [{"role": "assistant", "content": "It is 4."}]
    row = {"question": "2+2", "gold": "4", "answer": "as 2+2=4", "messages": told, "response": "4!", "row": 9}
    recipe = Recipe(check="", answer=("gold",), response=("trace",))
    (found,) = prompts(made(tmp_path, [row], recipe))
    assert (found.text, found.answer, found.messages) == ("2+2", "4", ())
    own = {"origin_answer": "as 2+2=4", "origin_messages": told, "origin_response": "4!", "origin_row": 9}
    assert found.meta == own | {"source": "sums", "row": "a.jsonl:1"}


def test_who_may_read_the_root_may_read_the_rows(tmp_path):
    folder = Path(made(tmp_path, numbered(1))["folder"])
    assert folder.stat().st_mode == folder.parent.stat().st_mode


@pytest.mark.parametrize("split", ["all", "a b", "x/y", "train[:9]", ""])
def test_a_split_that_could_not_be_read(tmp_path, split):
    with pytest.raises(ValueError, match=r"split is .*; expected a word, and not all"):
        made(tmp_path, files={split: [write(tmp_path / "a.jsonl", numbered(1))]})
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("name", "answer"), [("aime24", float("inf")), ("amc", float("nan")), ("minerva", "[{[]: 1}]")]
)
def test_a_recipe_takes_any_value_for_an_answer(name, answer):
    found = prepare.examine({"problem": "Q", "answer": answer}, recipes.RECIPES[name], {})
    assert found["answer"] == answer if isinstance(answer, str) else found.reason == "empty answer"


def test_many_rows_in_several_batches_keep_their_order(tmp_path):
    found = prompts(made(tmp_path, numbered(2500)))
    assert [p.text for p in found] == [f"{i} + 1 =" for i in range(2500)]


def test_parquet_and_arrow_say_the_same_as_jsonl(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.Table.from_pylist(numbered(30))
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    with pa.OSFile(str(tmp_path / "f.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pa.OSFile(str(tmp_path / "s.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "f.arrow", "s.arrow"):
        assert [row for _, row in rows.read(tmp_path / name)] == numbered(30)
        assert [number for number, _ in rows.read(tmp_path / name)] == list(range(1, 31))
    found = prompts(made(tmp_path, files={"train": [tmp_path / "a.parquet"]}))
    assert found[29].meta == {"hard": 2, "source": "sums", "row": "a.parquet:row 30"}


def test_a_json_file_may_be_one_array_and_columns_paths_into_it(tmp_path):
    pairs = [[{"value": f"q{i}"}, {"ground_truth": {"value": str(i)}}] for i in range(3)]
    (tmp_path / "a.json").write_text(" " + json.dumps(pairs))
    recipe = Recipe(prompt=("0.value",), answer=("1.ground_truth.value",))
    found = prompts(made(tmp_path, recipe=recipe, files={"train": [tmp_path / "a.json"]}))
    assert [(p.text, p.answer) for p in found] == [("q0", "0"), ("q1", "1"), ("q2", "2")]


def test_files_are_split_by_their_names(tmp_path):
    for name in ("train-00000-of-2.jsonl", "dev.jsonl", "sub/test.jsonl", "contest.jsonl", "notes.txt"):
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_text("{}\n")
    found = {split: [p.name for p in paths] for split, paths in rows.files(tmp_path / "d").items()}
    assert found == {
        "train": ["contest.jsonl", "train-00000-of-2.jsonl"], "validation": ["dev.jsonl"], "test": ["test.jsonl"],
    }  # fmt: skip
    assert list(rows.files(tmp_path / "d", split="test")) == ["test"]
    (tmp_path / "notes").mkdir()
    with pytest.raises(ValueError, match="notes.*expected files that end in .jsonl, .json, .parquet, .arrow"):
        rows.files(tmp_path / "notes")


# --- what is refused

BAD = [
    (b'{"prompt": "a\xff", "answer": "1"}', r"not UTF-8 \(byte 13 of the line is 0xff\)"),
    (b'{"prompt": "a", ', "not JSON"),
    (b"3", r"not an object \(3; expected columns"),
    ({"text": "a", "answer": "1"}, r"no column problem or question or prompt \(there are text, answer\)"),
    ({"prompt": "a"}, r"no column answer \(there are prompt\)"),
    ({"prompt": "  ", "answer": "1"}, "empty prompt"),
    ({"prompt": None, "answer": "1"}, "empty prompt"),
    ({"prompt": 7, "answer": "1"}, r"prompt is not text \(7\)"),
    ({"prompt": ["a"], "answer": "1"}, r"prompt is not text \(\['a'\]\)"),
    ({"prompt": "a", "answer": ""}, "empty answer"),
    ({"prompt": "a", "answer": []}, "empty answer"),
    ({"prompt": "a", "answer": None}, "empty answer"),
    (b'{"prompt": "a", "answer": NaN}', r"empty answer \(nan\)"),
    (b'{"prompt": "a", "answer": [1, -1e999]}', r"empty answer \(\[1, -inf\]\)"),
    ({"prompt": "a", "answer": {"x": 1}}, "answer is not text"),
    (rb'{"prompt": "half \ud83d", "answer": "1"}', "not UTF-8 .half a character in the prompt"),
    ({"prompt": "a", "answer": "one"}, r"answer does not parse \('one': no digits\)"),
    ({"prompt": "a", "answer": "1", "response": ""}, "empty response"),
    ({"prompt": "1 + 1 =", "answer": "2"}, r"duplicate prompt \(that of .*a\.jsonl:3\)"),
    ({"prompt": "1 + 1 =", "answer": "9"}, r"duplicate prompt \(that of .*a\.jsonl:3, with another answer\)"),
    ({"prompt": "b", "answer": "1", "id": "k"}, r"duplicate id \('k', of .*a\.jsonl:1\)"),
]


@pytest.mark.parametrize(("bad", "message"), BAD, ids=[m[:24] for _, m in BAD])
def test_a_row_at_fault_is_an_error_with_file_and_line_or_a_counted_skip(tmp_path, bad, message):
    lines = [{"prompt": "x", "answer": "0", "id": "k"}, b"", *numbered(2)[1:], bad, *numbered(20)[2:]]
    with pytest.raises(ValueError, match=rf"(?:19|20) of 2. rows of train are left .*a\.jsonl:4: {message}") as error:
        made(tmp_path, lines, check=whole_number)
    assert str(error.value).endswith("expected rows without a fault, or --bad skip")
    assert not (tmp_path / "root" / "sums").exists()
    report = made(tmp_path, lines, check=whole_number, bad="skip")
    (finding,) = map(json.loads, (Path(report["folder"]) / "findings.jsonl").read_text().splitlines())
    assert finding["row"] == f"{tmp_path}/a.jsonl:4"
    assert report["rows"]["train"] == {"kept": 20, finding["reason"]: 1}
    assert len(prompts(report)) == 20


def test_a_test_problem_is_not_trained_on(tmp_path):
    files = {s: [write(tmp_path / f"{s}.jsonl", numbered(5, k))] for s, k in (("test", 0), ("train", 3))}
    with pytest.raises(ValueError, match=r"3 of 5 rows of train .*train.jsonl:1: duplicate prompt \(that of .*test.js"):
        made(tmp_path, files=files)


def test_each_split_may_count_its_ids_from_the_same_number(tmp_path):
    lines = lambda start: [row | {"id": i} for i, row in enumerate(numbered(3, start))]
    files = {s: [write(tmp_path / f"{s}.jsonl", lines(k))] for s, k in (("test", 0), ("train", 10))}
    assert made(tmp_path, files=files)["rows"] == {"test": {"kept": 3}, "train": {"kept": 3}}


def test_rows_that_are_not_utf8_in_a_parquet_file(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = pa.array([b"a", b"b\xff", b"c"]).view(pa.binary()).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": texts, "answer": ["1", "2", "3"]}), tmp_path / "a.parquet")
    report = made(tmp_path, files={"train": [tmp_path / "a.parquet"]}, bad="skip")
    assert [p.text for p in prompts(report)] == ["a", "c"]
    assert '"reason": "not UTF-8"' in (Path(report["folder"]) / "findings.jsonl").read_text()


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_damaged_file(tmp_path, name):
    (tmp_path / name).write_bytes(b"PAR1 nothing of the kind")
    with pytest.raises(ValueError, match=rf"{name}: cannot be read after row 0 .*expected {name[2:]}"):
        made(tmp_path, files={"train": [tmp_path / name]})


def test_an_empty_file_and_a_file_of_empty_lines(tmp_path):
    for lines in ([], [b"", b"  "]):
        with pytest.raises(ValueError, match="a.jsonl is '0 rows'; expected at least one"):
            made(tmp_path, lines)
    assert not (tmp_path / "root" / "sums").exists()


def test_a_dataset_whose_answers_all_fail(tmp_path):
    for bad in ("error", "skip"):
        with pytest.raises(ValueError, match=r"0 of 9 rows of train are left \(9 × answer does not parse\).*a.jsonl:1"):
            made(tmp_path, [{**row, "answer": "many"} for row in numbered(9)], bad=bad, check=whole_number)


def test_a_hub_id_without_network(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="nobody/nothing: no such folder, and not downloaded"):
        rows.files("nobody/nothing")
    with pytest.raises(ValueError, match="nothing: no such folder; expected a folder, or OWNER/NAME"):
        rows.files("nothing")


# --- how it is kept


def test_the_same_rows_are_the_same_version_and_others_another(tmp_path):
    first, again = made(tmp_path, numbered(9)), made(tmp_path, numbered(9))
    assert first == again
    second = made(tmp_path, numbered(10))
    assert second["version"] != first["version"]
    assert len(datasets.Rows(str(datasets.prepared("sums", root=tmp_path / "root")))) == 10
    old = datasets.prepared("sums", first["version"], root=tmp_path / "root")
    assert len(datasets.Rows(str(old))) == 9
    report = json.loads((old / "report.json").read_text())
    assert (report["rows"], report["files"]) == ({"train": {"kept": 9}}, [f"{tmp_path}/a.jsonl"])
    with pytest.raises(ValueError, match=f"version is '1.0.7'; expected one of .*{first['version']}"):
        datasets.prepared("sums", "1.0.7", root=tmp_path / "root")


def test_licence_and_source_are_kept(tmp_path):
    report = made(tmp_path, numbered(3), Recipe(licence="MIT", source="2110.14168", hub="openai/gsm8k"))
    assert [report[k] for k in ("licence", "source", "hub", "checked")] == ["MIT", "2110.14168", "openai/gsm8k", ""]
    assert "MIT" in (Path(report["folder"]) / "dataset_info.json").read_text()


def test_what_fails_leaves_the_dataset_that_was_there(tmp_path):
    first = made(tmp_path, numbered(9))
    with pytest.raises(ValueError, match="empty prompt"):
        made(tmp_path, [*numbered(3000), {"prompt": "", "answer": "1"}])
    assert sorted(p.name for p in (tmp_path / "root" / "sums").iterdir()) == [".lock", first["version"], "current"]


def test_a_folder_of_others_is_left_alone(tmp_path):
    (tmp_path / "root" / "sums").mkdir(parents=True)
    (tmp_path / "root" / "sums" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="0 rows"):
        made(tmp_path, [])
    assert [p.name for p in (tmp_path / "root" / "sums").iterdir()] == ["mine.txt"]


def test_a_preparation_that_is_killed_leaves_nothing_half_made(tmp_path):
    write(tmp_path / "a.jsonl", numbered(3000))
    code = """
        import os, signal, sys
        from pathlib import Path
        from jaxrl_llm.data import prepare, recipes
        def check(answer):
            if answer == "2500":
                print("here", flush=True); signal.pause()
        here = Path(sys.argv[1])
        prepare.prepare("sums", {"train": [here / "a.jsonl"]}, recipes.Recipe(), here / "root", check=check)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()}) as process:
        assert process.stdout.readline() == b"here\n"
        with pytest.raises(ValueError, match="is being prepared; expected one preparation at a time"):
            made(tmp_path, numbered(9))
        process.send_signal(signal.SIGKILL)
    with pytest.raises(ValueError, match="not prepared; expected a folder, or what `jaxrl data prepare sums` writes"):
        datasets.prepared("sums", root=tmp_path / "root")
    report = made(tmp_path, numbered(9))
    names = sorted(p.name for p in (tmp_path / "root" / "sums").iterdir())
    assert names == [".lock", report["version"], "current"]


def test_no_tensorflow_and_no_jax_is_imported(tmp_path):
    write(tmp_path / "a.jsonl", numbered(3))
    code = """
        import sys
        from pathlib import Path
        from jaxrl_llm.data import datasets, prepare, recipes
        assert not {"tensorflow_datasets", "pyarrow", "grain"} & set(sys.modules)
        here = Path(sys.argv[1])
        report = prepare.prepare("sums", {"train": [here / "a.jsonl"]}, recipes.Recipe(), here / "root")
        print(datasets.Rows(report["folder"])[2].text, {"tensorflow", "jax"} & set(sys.modules))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert out.stdout == "2 + 1 = set()\n"


def test_what_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(RuntimeError, match=r"tensorflow_datasets is not there .*pip install 'jaxrl_llm\[data\]'"):
        rows.needed("tensorflow_datasets")


# --- recipes


@pytest.mark.parametrize(
    ("name", "row", "prompt", "answer"),
    [
        ("gsm8k", {"question": "Q", "answer": "so 2*<<2*3=6>>6\n#### 1,600"}, "Q", "1600"),
        ("gsm8k", {"problem": "Q", "answer": "18"}, "Q", "18"),
        ("math", {"problem": "Q", "level": "Level 4", "solution": r"\boxed{1}, $\boxed{\sqrt{2}}$."}, "Q", r"\sqrt{2}"),
        ("math", {"problem": "Q", "level": "Level 3", "solution": r"thus $\boxed 7$."}, "Q", "7"),
        ("orz57k", {"0": {"value": "Q"}, "1": {"ground_truth": {"value": "3"}}}, "Q", "3"),
        ("deepscaler", {"problem": "Q", "answer": "3", "solution": ""}, "Q", "3"),
        ("asdiv", {"body": "Two.", "question": "Sum?", "answer": "9 (apples)"}, "Two. Sum?", "9"),
        ("asdiv", {"body": None, "question": "Sum?", "answer": "9"}, "Sum?", "9"),
        ("aime24", {"problem": "Q", "answer": 204, "id": 60}, "Q", "204"),
        ("amc", {"problem": "Q", "answer": 142.0}, "Q", "142"),
        ("minerva", {"problem": "Q", "answer": "['9.6\\n']"}, "Q", "9.6"),
        ("minerva", {"question": "Q", "answer": "['x', 'y']"}, "Q", ["x", "y"]),
        ("olympiadbench", {"question": "Q", "final_answer": ["$2$"]}, "Q", "$2$"),
        ("olympiadbench", {"problem": "Q", "answer": "[1, 2]"}, "Q", "[1, 2]"),
    ],
)  # fmt: skip
def test_the_columns_of_recipes(name, row, prompt, answer):
    found = prepare.examine(row, recipes.RECIPES[name], {})
    assert found["prompt"] == prompt
    assert (found["answer"] if isinstance(answer, str) else json.loads(found["answer"])) == answer


def test_math_is_levels_3_to_5_and_says_them():
    row = {"problem": "Q", "solution": r"\boxed{1}", "type": "Algebra"}
    found = [prepare.examine(row | {"level": f"Level {n}"}, recipes.RECIPES["math"], {}) for n in (1, 2, 3, 5, "?")]
    assert [isinstance(f, rows.Bad) for f in found] == [True, True, False, False, True]
    assert json.loads(found[3]["meta"]) == {"level": 5, "type": "Algebra", "subject": "Algebra"}


def test_dapo_is_each_problem_once_without_the_request_around_it(tmp_path):
    text = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
    row = lambda i: {"prompt": [{"role": "user", "content": text.format(f"Find {i}.")}], "data_source": "math_dapo"}
    lines = [row(i % 5) | {"reward_model": {"ground_truth": str(i % 5), "style": "rule"}} for i in range(500)]
    report = made(tmp_path, lines, recipes.RECIPES["dapo17k"])
    assert report["rows"]["train"] == {"kept": 5, "repeated": 495}
    assert [(p.text, p.answer) for p in prompts(report)] == [(f"Find {i}.", str(i)) for i in range(5)]
    assert (Path(report["folder"]) / "findings.jsonl").read_text() == ""


def test_every_recipe_names_where_it_is_from_and_is_loaded_by_name(tmp_path):
    for name, recipe in recipes.RECIPES.items():
        assert "/" in recipe.hub, name
        assert recipe.source, name
    files = {s: [write(tmp_path / f"{s}.jsonl", numbered(4, k))] for s, k in (("test", 0), ("train", 9))}
    prepare.prepare("gsm8k", files, recipes.RECIPES["gsm8k"], tmp_path)
    assert [p.answer for p in recipes.load("gsm8k", root=tmp_path)] == ["1", "2", "3", "4"]
    assert recipes.load("gsm8k", "train", tmp_path)[0].meta == {"hard": 0, "source": "gsm8k", "row": "train.jsonl:1"}
    with pytest.raises(ValueError, match="`jaxrl data prepare math`"):
        recipes.load("math", root=tmp_path)
    with pytest.raises(ValueError, match="recipe is 'gsm9k'; .*did you mean 'gsm8k'"):
        recipes.load("gsm9k")


DATA = os.environ.get("JAXRL_DATA")


@pytest.mark.skipif(not DATA, reason="needs $JAXRL_DATA, a folder of problem files")
@pytest.mark.parametrize("name", ["gsm8k", "asdiv", "aime24", "amc", "math500", "minerva", "olympiadbench"])
def test_recipes_read_real_files(tmp_path, name):
    files = {}
    for path in sorted(Path(DATA).glob(f"{name}*.jsonl")):
        for split, paths in rows.files(path, split=recipes.RECIPES[name].split).items():
            files.setdefault(split, []).extend(paths)
    report = prepare.prepare(name, files, recipes.RECIPES[name], tmp_path)
    lines = sum(len(p.read_bytes().splitlines()) for paths in files.values() for p in paths)
    assert sum(counts["kept"] for counts in report["rows"].values()) == lines

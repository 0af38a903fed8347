"""What bad input gets: an error before any training step that says what was asked, found and what to change."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import Result, rows, shoal, write_job

from shoal.launch.lock import lock_folder

pytestmark = pytest.mark.ranks

ONE = ("--workers", 1, "--global-batch", 8, "--steps", 3)
TWO = ("--workers", 2, "--global-batch", 8, "--steps", 3)

#: name -> (words after ``train tiny.py``, texts that the error must hold)
CASES: dict[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    "a mistyped field": (("widht=3",), ("no field 'widht'", "did you mean 'width'?")),
    "a value of the wrong type": (("width=wide",), ("width = 'wide'", "expected int")),
    "a setting of the wrong type": (("--steps", "many"), ("steps = 'many'", "int")),
    "a setting given as a field": (("steps=3",), ("'steps' is a setting of the run", "--steps 3")),
    "a word without =": (("width",), ("'width' is not an override", "field=value")),
    "a batch that cannot be cut": (
        ("--workers", 2, "--global-batch", 10, "--micro-batch", 4),
        ("global batch 10 cannot be cut over 2 workers x micro-batch 4", "use a global batch of 8 or 16"),
    ),
    "no workers": (("--workers", 0), ("--workers 0", "at least 1")),
    "all contradictions together": (
        ("widht=3", "lr=fast", "--precision", "fp12", "--clip", -1, "--workers", 2, "--global-batch", 10,
         "--micro-batch", 4),
        ("'widht'", "lr = 'fast'", "precision = 'fp12'", "clip = -1.0", "global batch 10 cannot be cut"),
    ),
    "too little data": (
        (*TWO, "size=5", "--short-windows", "drop"), ("5 samples", "8", "short"),
    ),
    "no weights to begin from": ((*ONE, "--init-from", "nothing"), ("nothing does not exist", "no good")),
    "another job's folder": (
        ("{second}", *ONE, "--resume", "--out", "{old}"),
        ("holds a run of tiny.Job", "second.Job"),
    ),
    "a folder with a run": ((*ONE, "--out", "{old}"), ("holds a run of tiny.Job already", "--resume")),
    "a folder in use": ((*ONE, "--out", "{used}"), ("in use by process", "--out")),
    "another model's checkpoint": (
        (*ONE, "--resume", "--out", "{other}", "width=9"),
        ("of another model", "0.weight", "[8, 4]", "[9, 4]"),
    ),
    "another seed on resume": (
        (*ONE, "--resume", "--out", "{old}", "--seed", 5), ("seed was 0, asked for 5", "These may change"),
    ),
    "a loss that is no scalar": ((*TWO, "fault=vector"), ("loss must be a scalar", "(4, 1)", "shoal.Loss(sum, count)")),
    "a negative count": ((*TWO, "fault=negative"), ("negative or not finite", "-8", "shoal.Loss(sum, count)")),
    "an infinite count": ((*ONE, "fault=infinite"), ("negative or not finite", "inf")),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job, a job of another name, a folder that holds a run, and its copies."""
    folder = tmp_path_factory.mktemp("bad_input")
    path = write_job(folder)
    shutil.copy(path, folder / "second.py")
    (folder / "empty.py").write_text("WIDTH = 3\n")
    old = shoal("train", path, *ONE, "--out", "old", cwd=folder)
    assert old.status == 0, old.err
    shutil.copytree(folder / "old", folder / "other")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Result]:
    """Every case's command, two at a time."""
    places = {"{old}": "old", "{other}": "other", "{used}": "used"}

    def run(name: str) -> Result:
        words = [places.get(str(word), word) for word in CASES[name][0]]
        file = "second.py" if words[0] == "{second}" else "tiny.py"
        words = words[1:] if words[0] == "{second}" else words
        out = [] if "--out" in words else ["--out", name.replace(" ", "_")]
        return shoal("train", file, *words, *out, cwd=folder)

    with lock_folder(folder / "used"), ThreadPoolExecutor(2) as pool:
        return dict(zip(CASES, pool.map(run, CASES), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_before_any_step(name: str, results: dict[str, Result], folder: Path) -> None:
    """https://github.com/Azure/azureml-assets/pull/1331 (contradictory options: all of them in one report)."""
    result = results[name]
    assert result.status == 1, result.err
    for text in CASES[name][1]:
        assert text in result.err
    assert "Traceback" not in result.err
    assert result.err.count("error: ") == 1, "the cause stands there once"
    out = folder / name.replace(" ", "_")
    assert rows(out) == []
    assert not list(out.glob("checkpoints/step-*"))


def test_a_refused_run_changes_nothing_in_a_folder_with_a_run(results: dict[str, Result], folder: Path) -> None:
    assert results and len(rows(folder / "old")) == 3
    assert (folder / "old" / "checkpoints" / "step-3").is_dir()
    assert (folder / "other" / "checkpoints" / "step-3").is_dir()


@pytest.mark.parametrize(
    ("file", "said"), [("empty.py", "empty.py has no Job; write one"), ("none.py", "none.py: no such file")]
)
def test_a_file_without_a_job_is_refused(file: str, said: str, folder: Path) -> None:
    result = shoal("train", file, cwd=folder)
    assert result.status == 1
    assert said in result.err and "Traceback" not in result.err


def test_numbers_that_are_not_finite_skip_the_step_and_too_many_stop_the_run(folder: Path) -> None:
    """One such step is skipped on all ranks and counted; a row of them ends the run, naming a parameter."""
    with ThreadPoolExecutor(2) as pool:
        once = pool.submit(
            shoal, "train", "tiny.py", *TWO, "fault=nan once", "at=2", "--out", "once", "--json", cwd=folder
        )
        always = pool.submit(
            shoal, "train", "tiny.py", *TWO, "--steps", 9, "fault=nan", "--max-skips", 4, "--out", "always", cwd=folder
        )
    result = once.result()
    assert result.status == 0, result.err
    assert result.summary["skipped"] == 1 and result.summary["steps"] == 3
    for rank in range(2):
        assert [row["step"] for row in rows(folder / "once", "skip", rank)] == [2]
        assert "not finite" in rows(folder / "once", "skip", rank)[0]["reason"]
    result = always.result()
    assert result.status == 1
    assert "4 steps in a row were skipped" in result.err and "0.weight" in result.err
    assert len(rows(folder / "always", "skip")) >= 3
    assert not list((folder / "always" / "checkpoints").glob("step-*"))


def test_checkpoint_commands_refuse_a_folder_without_a_run(folder: Path) -> None:
    commands = (("list", "nothing"), ("verify", "nothing"), ("export", "nothing", "--to", "exported"))
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda words: shoal("checkpoint", *words, cwd=folder), commands))
    for result in found:
        assert result.status == 1
        assert result.err.startswith("error: nothing holds no run") and "Traceback" not in result.err

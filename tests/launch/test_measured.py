"""Measuring from a command and from Python, alone and in a world: what is printed, written, drawn and kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.harness import run_ranks
from tests.launch.measuring import tiny

import shoal
import shoal.launch.measure as module
from shoal.cli.measure import command
from shoal.cluster import Cluster, find
from shoal.core.errors import ConfigError, WorkerFailure

SCRIPT = Path(__file__).with_name("measuring.py")


def call(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run([sys.executable, str(SCRIPT), *words], cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.ranks
def test_the_command_prints_a_page_writes_a_file_draws_and_keeps(tmp_path, monkeypatch):
    done = call(tmp_path, "--workers", "2", "-o", "c.toml", "--plot", "c.html", "--json")
    assert done.returncode == 0, done.stderr
    *page, last = done.stdout.splitlines()
    cluster = Cluster.read(tmp_path / "c.toml")
    assert Cluster.parse(json.loads(last), "json") == cluster == find(str(tmp_path / "c.toml"))
    assert page[0] == f"{cluster.name}: 1 node(s) of 2 device(s)" and page[0].startswith("measured: 1 x 2 ")
    assert sum(line.split()[:2] == ["all_reduce", "2"] for line in page) == 1
    assert "of 1 thread(s)" in page[-1] and done.stderr == ""
    assert "<svg" in (tmp_path / "c.html").read_text()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = module.kept(2)
    assert kept is not None and kept.cluster == cluster
    assert module.kept(1) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.html", "c.toml", "cache"]


@pytest.mark.ranks
def test_in_a_world_all_ranks_get_the_cluster_and_the_first_one_writes(tmp_path):
    def body(rank):
        os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", XDG_CACHE_HOME=str(tmp_path / "cache"))
        found = shoal.measure(sizes=tiny(), out=tmp_path / f"{rank}.toml", folder=tmp_path)
        with pytest.raises(ConfigError, match="--workers 4 in a world of 2 ranks; leave --workers out"):
            shoal.measure(workers=4, sizes=tiny())
        return found

    one, two = run_ranks(body, 2)
    assert one == two and (one.nodes, one.devices_per_node) == (2, 1) and one.inside is None
    assert one.between.name == "gloo between machines"
    assert [path.name for path in tmp_path.iterdir()] == ["0.toml"]  # another grid than usual is not kept


@pytest.mark.unit
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            {"out": "gone/c.toml"},
            "gone/c.toml cannot be written: No such file or directory; name a file in a folder that is there",
        ),
        (
            {"plot": "gone/c.svg"},
            "gone/c.svg cannot be written: No such file or directory; name a file in a folder that is there",
        ),
        ({"folder": "gone"}, "--folder gone is no folder; name one on the disk that checkpoints go to"),
        ({"plot": "c.png"}, "c.png is no kind of picture that is drawn; end the name in .svg or .html"),
        ({"workers": 0}, "--workers 0; at least 1"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(flags, text, capsys, monkeypatch):
    monkeypatch.setattr(module, "run_workers", None)
    with pytest.raises(SystemExit) as ended:
        command(**flags)
    said = capsys.readouterr()
    assert (ended.value.code, said.err, said.out) == (1, f"error: {text}\n", "")


@pytest.mark.unit
def test_workers_that_failed_are_not_taken_for_a_measurement(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "run_workers", lambda *args, **kwargs: 3)
    with pytest.raises(WorkerFailure, match="measuring ended with status 3; the cause is on stderr, above"):
        shoal.measure(workers=2, out=tmp_path / "c.toml")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.unit
@pytest.mark.parametrize(
    ("home", "found"),
    [("/x/y", "/x/y/shoal/clusters"), ("rel", "~/.cache/shoal/clusters"), ("", "~/.cache/shoal/clusters")],
)
def test_the_cache_is_the_users(home, found, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert module.cache_folder() == Path(found).expanduser()


@pytest.mark.unit
def test_a_fingerprint_tells_workers_and_machines_apart():
    one = module.fingerprint("cpu", 2)
    assert one == module.fingerprint("cpu", 2) and torch.__version__ == one["torch"]
    assert one != module.fingerprint("cpu", 4) and one != module.fingerprint("cpu", 2, nodes=2)


@pytest.mark.unit
def test_a_user_without_a_home_has_nothing_kept_and_is_told_what_to_set(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert module.kept(2) is None and module.kept_quickly(2) is None
    with pytest.raises(ConfigError, match="this user has no home folder; set XDG_CACHE_HOME to a folder"):
        module.cache_folder()

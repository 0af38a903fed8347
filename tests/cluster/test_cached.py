"""Measurements are kept by what they depend on."""

import pytest
from test_facts import CLUSTER

from shoal.cluster.cached import load, path_of, save
from shoal.core.errors import ConfigError

pytestmark = pytest.mark.unit

PRINT = {"devices": "d", "workers": "2"}


def test_what_was_kept_comes_back(tmp_path):
    assert load(tmp_path / "new", PRINT) is None
    path = save(tmp_path / "new", PRINT, CLUSTER)
    kept = load(tmp_path / "new", PRINT)
    assert kept is not None and kept.cluster == CLUSTER and kept.path == path
    assert path.read_text().startswith("# devices: d\n# workers: 2\n")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [path.name]


def test_another_machine_has_another_file(tmp_path):
    save(tmp_path, PRINT, CLUSTER)
    assert load(tmp_path, {**PRINT, "workers": "4"}) is None
    assert path_of(tmp_path, dict(reversed(PRINT.items()))) == path_of(tmp_path, PRINT)


def test_a_damaged_file_is_refused_with_what_to_do(tmp_path):
    path = save(tmp_path, PRINT, CLUSTER)
    path.write_text(path.read_text()[:100])
    with pytest.raises(ConfigError, match=r"the kept measurement is damaged: .*; delete .*toml, or run shoal measure"):
        load(tmp_path, PRINT)


def test_a_folder_that_takes_no_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be kept in .*file/x: Not a directory; set XDG_CACHE_HOME"):
        save(tmp_path / "file" / "x", PRINT, CLUSTER)


def test_a_folder_that_is_closed_to_this_user_has_nothing_kept(tmp_path, monkeypatch):
    save(tmp_path, PRINT, CLUSTER)

    def closed(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.stat", closed)
    assert load(tmp_path, PRINT) is None

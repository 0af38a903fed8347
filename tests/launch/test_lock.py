"""An output folder belongs to one run at a time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shoal.core.errors import ConfigError
from shoal.launch.lock import lock_folder

pytestmark = pytest.mark.unit
HOLD = "import sys, pathlib; from shoal.launch.lock import lock_folder; l = lock_folder(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"  # noqa: E501


def test_a_folder_in_use_is_refused_naming_the_process(tmp_path):
    with lock_folder(tmp_path), pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        lock_folder(tmp_path)
    lock_folder(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_refused_plainly(tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match="cannot be made or written to .*; use another --out"):
            lock_folder(out)


def test_a_killed_holder_leaves_the_folder_free(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=f"in use by process {holder.pid}"):
        lock_folder(tmp_path)
    holder.kill()
    holder.communicate()
    lock_folder(tmp_path).close()

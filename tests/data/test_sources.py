"""Text as samples: nothing lost, nothing twice, tokens made once."""

import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest

from shoal.core.errors import DataError
from shoal.data.sources.stdlib import stdlib_files
from shoal.data.sources.text import TextBytes

pytestmark = pytest.mark.unit


def files_of(folder, *contents):
    paths = [folder / f"{number}.txt" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def test_bytes_of_all_files_are_one_stream(tmp_path):
    data = TextBytes(files_of(tmp_path, b"abcde", b"", b"fg", b"hijklmn"), 4)
    assert [(bytes(x.tolist()), bytes(y.tolist())) for x, y in data] == [
        (b"abcd", b"bcde"),
        (b"efgh", b"fghi"),
        (b"ijkl", b"jklm"),
    ]


def test_a_fingerprint_follows_the_content(tmp_path):
    first = TextBytes(files_of(tmp_path, b"abc", b"def"), 2).fingerprint()
    assert TextBytes(files_of(tmp_path, b"abc", b"def"), 2).fingerprint() == first
    assert TextBytes(files_of(tmp_path, b"abcd", b"ef"), 2).fingerprint() != first
    assert TextBytes(files_of(tmp_path, b"abc", b"deg"), 2).fingerprint() != first


def test_text_that_cannot_serve_is_refused(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        TextBytes([tmp_path / "missing"], 4)
    with pytest.raises(DataError, match="no files"):
        TextBytes([], 4)
    files = files_of(tmp_path, b"abcd")
    with pytest.raises(DataError, match="samples of 4 bytes .* hold 4 bytes"):
        TextBytes(files, 4)
    with pytest.raises(DataError, match="samples of 0 bytes"):
        TextBytes(files, 0)
    data = TextBytes(files, 3)
    os.truncate(files[0], 2)
    with pytest.raises(DataError, match="the file has shrunk"):
        data[0]


def test_held_out_library_files_are_apart():
    train, held_out = stdlib_files(False), stdlib_files(True)
    assert train == sorted(train) and not set(train) & set(held_out)
    assert 0.02 < len(held_out) / len(train) < 0.1


def test_tokens_are_made_once_and_mapped(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from shoal.data.sources.tokens import TextTokens

    words = {"?": 0, "a": 1, "b": 2, "c": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    files = files_of(tmp_path, b"a b c", b"c b a x")
    data = TextTokens(files, tokenizer, 3, tmp_path / "cache")
    assert [(x.tolist(), y.tolist()) for x, y in data] == [([1, 2, 3], [2, 3, 3]), ([3, 2, 1], [2, 1, 0])]
    made = data.path.stat().st_mtime_ns
    again = TextTokens(files, tokenizer, 2, tmp_path / "cache")
    assert again.path == data.path and data.path.stat().st_mtime_ns == made
    with pytest.raises(DataError, match="byte 0 is not UTF-8"):
        TextTokens(files_of(tmp_path, b"\xff"), tokenizer, 3, tmp_path / "cache")
    with pytest.raises(DataError, match="tokenizer .* no such file"):
        TextTokens(files, tmp_path / "none.json", 3, tmp_path / "cache")


class SlowTokenizer:
    """Bytes as tokens; says that it began and goes on when told."""

    def __init__(self, folder, name):
        self.folder, self.name = folder, name

    def get_vocab_size(self):
        return 256

    def to_str(self):
        return "the same for all"

    def encode(self, text, add_special_tokens):
        (self.folder / f"{self.name} writes").touch()
        wait_for(lambda: (self.folder / "go on").exists())
        return SimpleNamespace(ids=list(text.encode()))


def wait_for(true, timeout_s=20):
    end_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def builder(folder, name, files):
    """A process that makes the token file; started, and past its imports."""
    pytest.importorskip("tokenizers")
    from shoal.data.sources.tokens import TextTokens

    def build():
        (folder / f"{name} begins").touch()
        data = TextTokens(files, SlowTokenizer(folder, name), 3, folder / "cache")
        (folder / f"{name} found").write_bytes(bytes(np.fromfile(data.path, np.uint16).tolist()))

    process = multiprocessing.get_context("fork").Process(target=build, daemon=True)
    process.start()
    wait_for((folder / f"{name} begins").exists)
    return process


def test_of_two_builders_one_writes_the_tokens_and_the_other_waits(tmp_path):
    files = files_of(tmp_path, b"abcdefgh", b"ijkl")
    first = builder(tmp_path, "first", files)
    wait_for((tmp_path / "first writes").exists)
    second = builder(tmp_path, "second", files)
    time.sleep(0.3)  # long enough to read what is there, or to write
    assert not (tmp_path / "second writes").exists() and not (tmp_path / "second found").exists()
    (tmp_path / "go on").touch()
    for process in (first, second):
        process.join(20)
        assert process.exitcode == 0
    assert (tmp_path / "first found").read_bytes() == (tmp_path / "second found").read_bytes() == b"abcdefghijkl"
    assert not (tmp_path / "second writes").exists()


def test_a_builder_that_was_killed_leaves_no_half_file(tmp_path):
    files = files_of(tmp_path, b"abcdefgh", b"ijkl")
    first = builder(tmp_path, "first", files)
    wait_for((tmp_path / "first writes").exists)
    second = builder(tmp_path, "second", files)
    os.kill(first.pid, signal.SIGKILL)
    wait_for((tmp_path / "second writes").exists)
    (tmp_path / "go on").touch()
    second.join(20)
    assert (tmp_path / "second found").read_bytes() == b"abcdefghijkl"
    assert [path.suffix for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"] == [".uint16"]

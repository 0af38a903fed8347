"""Text as samples: nothing lost, nothing twice, tokens made once."""

import os

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

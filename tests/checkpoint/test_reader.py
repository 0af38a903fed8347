"""Finding the newest good checkpoint, and refusing everything else by name."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file
from saving import assert_holds, names, newest, save, state, writers

from shoal.checkpoint import Reader, checkpoints, compare, newest_good
from shoal.checkpoint.layout import MANIFEST, plan_file, read_header, seal
from shoal.core.errors import CheckpointError

pytestmark = pytest.mark.unit


@pytest.fixture
def two(tmp_path):
    group = writers(tmp_path, 2)
    save(group, 1, state(1.0))
    save(group, 2, state(2.0))
    return tmp_path


def test_read_is_bit_equal_for_every_kind_of_tensor(two):
    assert_holds(two / "step-2", 2, state(2.0))
    strided = torch.zeros(3, 8)[:, ::2]
    Reader(two / "step-2").read_into("model/embed", strided)
    assert torch.equal(strided, state(2.0)["model/embed"])


def test_shards_are_plain_safetensors_files(two):
    found = {}
    for path in (two / "step-2").glob("*.safetensors"):
        found.update(load_file(path))
    assert found.keys() == state().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state(2.0).items())


def test_each_flipped_or_missing_byte_is_found_and_the_older_taken(two):
    """Every file, at its start, middle and end: flipped, cut by one byte, removed."""
    for path in sorted((two / "step-2").iterdir()):
        content = path.read_bytes()
        damages: list[bytes | None] = [None, content[:-1], b""]
        for at in (0, 8, len(content) // 2, len(content) - 1):
            damages.append(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        for damage in damages:
            path.unlink() if damage is None else path.write_bytes(damage)
            found, skipped = newest_good(two)
            assert found.step == 1 and [bad.step for bad in skipped] == [2]
            assert path.name in skipped[0].problem
            path.write_bytes(content)
    assert newest(two) == 2


def test_torn_size_is_seen_without_reading_contents(two):
    path = next((two / "step-2").glob("*.safetensors"))
    path.write_bytes(path.read_bytes() + b"x")
    problem = checkpoints(two, verify=False)[0].problem
    assert "bytes," in problem and "were written" in problem


def test_renamed_checkpoint_is_refused(two):
    (two / "step-2").rename(two / "step-7")
    assert checkpoints(two)[0].problem == f"{MANIFEST} is of step 2"


def test_nothing_in_a_checkpoint_is_unpickled(two):
    """https://github.com/huggingface/transformers/pull/43140"""
    marker = two / "executed"

    class Evil:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    for path in sorted((two / "step-2").iterdir()):
        content = path.read_bytes()
        path.write_bytes(pickle.dumps(Evil()))
        assert newest(two) == 1
        with pytest.raises(CheckpointError):
            reader = Reader(two / "step-2")
            for name in reader.names():
                reader.read(name)
        assert not marker.exists()
        path.write_bytes(content)
    assert len(names(two / "step-2")) == 3


def test_tensors_are_put_together_from_pieces(tmp_path):
    """The format holds parts of tensors, so that ranks may each write their own."""
    whole = torch.arange(24.0).reshape(4, 6)
    pieces = []
    for part, (rows, columns) in enumerate([((0, 4), (0, 2)), ((0, 1), (2, 6)), ((1, 4), (2, 6))]):
        data = whole[slice(*rows), slice(*columns)].contiguous()
        layout = plan_file({"w": (tuple(data.shape), data.dtype)}, {})
        (tmp_path / f"part-{part}").write_bytes(layout.header + data.numpy().tobytes())
        offsets = [rows[0], columns[0]]
        pieces.append({"file": f"part-{part}", "key": "w", "offsets": offsets, "shape": list(data.shape)})
    entry = {"dtype": "F32", "shape": [4, 6], "pieces": pieces}
    manifest = {"format": 1, "step": 1, "ranks": 3, "values": {}, "files": {}, "tensors": {"w": entry}}
    (tmp_path / MANIFEST).write_bytes(seal(manifest))
    assert torch.equal(Reader(tmp_path).read("w"), whole)


def test_another_model_is_told_by_names_and_shapes(two):
    reader = Reader(two / "step-2")
    expected = {
        name.removeprefix("model/"): (tuple(tensor.shape), tensor.dtype)
        for name, tensor in state().items()
        if name.startswith("model/")
    }
    expected = {f"model/{name}": facts for name, facts in expected.items()}
    assert compare(reader, expected, "model/") is None
    expected["model/embed"] = ((3, 5), torch.float32)
    expected["model/head"] = ((1,), torch.float32)
    del expected["model/norm"]
    text = compare(reader, expected, "model/")
    assert text == (
        "it lacks head; it has norm, which the model has not; embed is [3, 4] float32, the model's is [3, 5] float32"
    )


def _manifest(path, **changes) -> None:
    body = json.loads((path / MANIFEST).read_text())["body"]
    (path / MANIFEST).write_bytes(seal({**body, **changes}))


def test_unreadable_parts_are_named(two):
    path = two / "step-2"
    reader = Reader(path)
    with pytest.raises(CheckpointError, match=r"holds no tensor 'model/heart'; it holds 5: model/embed"):
        reader.read("model/heart")
    with pytest.raises(CheckpointError, match=r"cannot read 'model/embed' .* into \(2,\).*saved as \(3, 4\)"):
        reader.read_into("model/embed", torch.zeros(2))
    with pytest.raises(CheckpointError, match=f"cannot read the checkpoint .*{MANIFEST} is missing"):
        Reader(two / "step-9")
    _manifest(path, format=99)
    assert "is of format 99, this Shoal reads 1" in checkpoints(two)[0].problem
    _manifest(path, format=1, files={"../../secret": {"size": 1, "crc32": 1}})
    assert "lies outside its folder" in checkpoints(two)[0].problem


def test_shard_that_disagrees_with_its_manifest_is_refused(two):
    path = two / "step-2"
    reader = Reader(path)
    entry = dict(reader._tensors["model/embed"])
    shard = path / entry["pieces"][0]["file"]
    _, body = read_header(shard)
    start = plan_file({"model/embed": ((2, 2), torch.float32)}, {})
    shard.write_bytes(start.header + bytes(16))
    with pytest.raises(CheckpointError, match="does not hold 'model/embed' as its manifest says"):
        reader.read("model/embed")
    shard.write_bytes(plan_file({"model/embed": ((3, 4), torch.float32)}, {}).header + bytes(8))
    with pytest.raises(CheckpointError, match="holds 8 bytes of 'model/embed', 48 were asked"):
        Reader(path).read("model/embed")
    shard.write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="no safetensors file: its header would end beyond"):
        Reader(path).read("model/embed")
    shard.write_bytes((5).to_bytes(8, "little") + b"{nope")
    with pytest.raises(CheckpointError, match="no safetensors file: its header is not JSON"):
        Reader(path).read("model/embed")
    shard.write_bytes((2).to_bytes(8, "little") + b"[]")
    with pytest.raises(CheckpointError, match="no safetensors file: its header is no JSON object"):
        Reader(path).read("model/embed")
    shard.unlink()
    with pytest.raises(CheckpointError, match="cannot read 'model/embed'.*No such file"):
        Reader(path).read("model/embed")


def test_no_folder_holds_no_checkpoint(tmp_path):
    assert newest_good(tmp_path / "none") == (None, [])

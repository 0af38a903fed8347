"""Saved by ranks that hold parts, read by ranks that hold other parts."""

from __future__ import annotations

import json
import re

import pytest
import torch
from tests.checkpoint.layouts import LAYOUTS, held, save_held, whole_state
from tests.checkpoint.saving import writers

from shoal.checkpoint import Part, Piece, Reader, boxes, newest_good
from shoal.checkpoint.boxes import Box, flaw
from shoal.checkpoint.layout import MANIFEST, read_header, seal, size_bytes
from shoal.checkpoint.pieces import to_write
from shoal.core.errors import CheckpointError

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def whole():
    return whole_state()


@pytest.mark.parametrize("here", LAYOUTS)
def test_saved_in_one_layout_is_exactly_equal_in_every_other(tmp_path, whole, here):
    mesh = LAYOUTS[here]
    save_held(tmp_path, 3, [held(whole, mesh, rank) for rank in range(mesh.size)])
    found, skipped = newest_good(tmp_path)
    assert found and not skipped
    reader = Reader(found.path)
    assert reader.names() == sorted(whole)
    for name, tensor in whole.items():
        assert reader.dtype(name) == tensor.dtype and reader.shape(name) == tuple(tensor.shape)
        assert torch.equal(reader.read(name), tensor), name
    for there in LAYOUTS.values():
        seen = 0
        for rank in range(there.size):
            for name, piece in held(whole, there, rank).items():
                for part in piece.parts:
                    target = torch.zeros_like(part.tensor)  # of the same strides
                    reader.read_into(name, target, part.offsets)
                    assert torch.equal(target, part.tensor), (str(there), rank, name, part.box)
                    seen += part.tensor.nbytes
        assert seen >= sum(tensor.nbytes for tensor in whole.values())


@pytest.mark.parametrize("here", LAYOUTS)
def test_each_byte_is_written_once_and_by_all_who_hold_it_alike(tmp_path, whole, here):
    mesh = LAYOUTS[here]
    every = [held(whole, mesh, rank) for rank in range(mesh.size)]
    save_held(tmp_path, 3, every)
    written = []
    for path in sorted((tmp_path / "step-3").glob("*.safetensors")):
        written.append(path.stat().st_size - read_header(path)[1])
    assert len(written) == mesh.size
    assert sum(written) == sum(tensor.nbytes for tensor in whole.values())
    for rank, pieces in enumerate(every):
        parts = [part for piece in pieces.values() for part in piece.parts]
        fair = sum(part.tensor.nbytes / len(part.holders) for part in parts)
        largest: dict = {}
        for part in parts:
            if len(part.holders) > 1:
                largest[part.holders] = max(largest.get(part.holders, 0), part.tensor.nbytes)
        assert abs(written[rank] - fair) <= sum(largest.values()), (rank, written, fair)


def test_a_tensor_larger_than_all_others_is_written_by_all_who_hold_it():
    """An embedding of most of the bytes would keep one rank writing while the others wait."""
    tensors = {"embed": torch.empty(40_000, 64), "one row": torch.empty(1, 1, 300_000)}
    tensors.update({f"t{index}": torch.empty(index + 1, 7) for index in range(23)})
    pieces = {name: Piece.whole(tensor) for name, tensor in tensors.items()}
    for ranks in (1, 2, 3, 8):
        shares = [to_write(pieces, rank, ranks) for rank in range(ranks)]
        loads = [sum(size_bytes(tuple(slab.tensor.shape), slab.tensor.dtype) for slab in share) for share in shares]
        assert sum(loads) == sum(tensor.nbytes for tensor in tensors.values())
        assert max(loads) <= 1.05 * sum(loads) / ranks, loads
        for name, tensor in tensors.items():
            parts = [Box(slab.offsets, tuple(slab.tensor.shape)) for s in shares for slab in s if slab.name == name]
            assert flaw(Box.whole(tensor.shape), parts) is None
            assert len(parts) == 1 or tensor.nbytes > 64 << 10


def test_ranks_that_share_several_parts_with_different_others_agree():
    """In groups that overlap, each part still has one writer: no rank counts what only others know of."""
    rows, columns = torch.randn(9, 5), torch.randn(6, 4)
    every = []
    for rank in range(4):
        parts = {"all": Piece.whole(torch.ones(3))}
        line, place = divmod(rank, 2)
        parts["rows"] = Piece.of((18, 5), [(rows, (9 * line, 0))], holders=(2 * line, 2 * line + 1))
        parts["columns"] = Piece.of((6, 8), [(columns, (0, 4 * place))], holders=(place, place + 2))
        if rank in (1, 2):
            parts["pair"] = Piece.whole(torch.zeros(2), holders=(1, 2))
        every.append(parts)
    slabs = [slab for rank in range(4) for slab in to_write(every[rank], rank, 4)]
    assert sorted((slab.name, slab.offsets) for slab in slabs) == [
        ("all", (0,)), ("columns", (0, 0)), ("columns", (0, 4)), ("pair", (0,)), ("rows", (0, 0)), ("rows", (9, 0)),
    ]  # fmt: skip


def test_a_gap_or_an_overlap_is_refused_before_the_save_is_published(tmp_path):
    tensor = torch.arange(12.0).reshape(6, 2)
    cases = {
        "nothing holds [2:4, 0:2]": [(tensor[:2], (0, 0)), (tensor[4:], (4, 0))],
        "2 pieces hold [3:4, 0:2]": [(tensor[:4], (0, 0)), (tensor[3:], (3, 0))],
        "nothing holds [0:2, 1:2]": [(tensor[:2, :1], (0, 0)), (tensor[2:], (2, 0))],
    }
    for problem, parts in cases.items():
        every = [{"w": Piece.of((6, 2), [part], holders=(rank,))} for rank, part in enumerate(parts)]
        error = save_held(tmp_path, 3, every)[0].error()
        assert f"cannot save 'w' of shape [6, 2]: {problem}; the ranks' parts must make up the whole" in str(error)
        assert newest_good(tmp_path)[0] is None
    mine_alone = [{"w": Piece.whole(tensor, holders=(rank,))} for rank in range(2)]
    assert "2 pieces hold [0:6, 0:2]" in str(save_held(tmp_path, 3, mine_alone)[0].error())


def test_ranks_that_mean_different_tensors_by_one_name_are_refused(tmp_path):
    every = [{"w": Piece.of((4, 2), [(torch.zeros(2, 2 + rank), (2 * rank, 0))], (rank,))} for rank in range(1)]
    every.append({"w": Piece.of((4, 3), [(torch.zeros(2, 3), (2, 0))], (1,))})
    error = save_held(tmp_path, 3, every)[0].error()
    assert "'w': shard-00001-of-00002.safetensors holds a part of F32 [4, 3], other ranks of F32 [4, 2]" in str(error)


def test_parts_that_are_not_as_they_say_are_refused(tmp_path):
    writer = writers(tmp_path, 2)[0]
    for match, piece in {
        r"'w': a part of shape \[2, 2\] at \[3, 0\] does not lie in the whole of shape \[4, 2\]": Piece.of(
            (4, 2), [(torch.zeros(2, 2), (3, 0))]
        ),
        r"'w': a part of shape \[2\] at \[0\] does not lie in": Piece.of((4, 2), [(torch.zeros(2), (0,))]),
        r"'w': it has parts of torch.float32 and of torch.float64": Piece(
            (4,), (Part(torch.zeros(2), (0,)), Part(torch.zeros(2).double(), (2,)))
        ),
        r"'w': rank 0 has a part that only ranks \[1\] are said to hold": Piece.whole(torch.zeros(2), (1,)),
    }.items():
        with pytest.raises(CheckpointError, match=match):
            writer.begin(1, {"w": piece}, {})


@pytest.fixture
def parts(tmp_path, whole):
    """A checkpoint by four ranks, and a way to change what its manifest says of a tensor."""
    save_held(tmp_path, 3, [held(whole, LAYOUTS["shard=4"], rank) for rank in range(4)])
    path = tmp_path / "step-3" / MANIFEST

    def change(edit) -> Reader:
        body = json.loads(path.read_text())["body"]
        edit(body["tensors"]["model/embed.weight"]["pieces"])
        path.write_bytes(seal(body))
        return Reader(tmp_path / "step-3")

    return change


def test_a_gap_is_refused_by_name_and_what_lies_beside_it_read(parts, whole):
    reader = parts(lambda pieces: pieces.pop(1))
    with pytest.raises(CheckpointError, match=r"cannot read 'model/embed.weight' .*: nothing holds \[16:32, 0:8\]"):
        reader.read("model/embed.weight")
    with pytest.raises(CheckpointError, match=r"nothing holds \[31:32, 2:3\]"):
        reader.read_region("model/embed.weight", (31, 2), (2, 1))
    expected = whole["model/embed.weight"][40:60, 2:5]
    assert torch.equal(reader.read_region("model/embed.weight", (40, 2), (20, 3)), expected)


def test_an_overlap_is_refused_by_name(parts):
    def double(pieces) -> None:
        pieces[0]["offsets"] = [8, 0]

    reader = parts(double)
    with pytest.raises(CheckpointError, match=r"'model/embed.weight' .*: nothing holds \[0:8, 0:8\]"):
        reader.read("model/embed.weight")
    with pytest.raises(CheckpointError, match=r"'model/embed.weight' .*: 2 pieces hold \[16:20, 0:8\]"):
        reader.read_region("model/embed.weight", (16, 0), (4, 8))


def test_regions_outside_the_tensor_are_refused(parts):
    reader = parts(lambda pieces: None)
    for offsets, shape in (((60, 0), (2, 8)), ((-1, 0), (2, 8)), ((0,), (2,)), ((0, 0, 0), (1, 1, 1))):
        with pytest.raises(CheckpointError, match=r"into the region .*it was saved as \(61, 8\) torch.float32"):
            reader.read_region("model/embed.weight", offsets, shape)
    with pytest.raises(CheckpointError, match=r"torch.float64: it was saved as \(61, 8\) torch.float32"):
        reader.read_into("model/embed.weight", torch.zeros(2, 8).double(), (0, 0))
    assert reader.read_region("model/embed.weight", (61, 0), (0, 8)).shape == (0, 8)


def test_only_the_bytes_of_the_region_are_read(tmp_path, monkeypatch):
    wide, tall = torch.randn(6, 40_000), torch.randn(300, 4, 50)
    save_held(tmp_path, 1, [{"wide": Piece.whole(wide), "tall": Piece.whole(tall)}])
    read, plain = [], boxes._filled

    def counted(file, target) -> bool:
        read.append(target.nbytes)
        return plain(file, target)

    monkeypatch.setattr(boxes, "_filled", counted)
    reader = Reader(tmp_path / "step-1")
    assert torch.equal(reader.read_region("wide", (1, 100), (3, 50)), wide[1:4, 100:150])
    assert read == [200] * 3  # rows are far apart
    read.clear()
    assert torch.equal(reader.read_region("wide", (2, 0), (4, 40_000)), wide[2:])
    assert read == [4 * 160_000]
    read.clear()
    assert torch.equal(reader.read_region("tall", (100, 1, 3), (50, 2, 40)), tall[100:150, 1:3, 3:43])
    assert len(read) == 1 and read[0] < 50 * 800  # what lies between is read over, in one go


def test_reading_holds_no_second_copy_of_a_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(boxes, "CHUNK_BYTES", 4096)
    tensor = torch.randn(64, 33, 9)
    save_held(tmp_path, 1, [{"w": Piece.whole(tensor)}])
    asked, empty = [], torch.empty

    def counted(*shape, **kwargs):
        made = empty(*shape, **kwargs)
        asked.append(made.nbytes)
        return made

    monkeypatch.setattr(boxes.torch, "empty", counted)
    for offsets, shape in (((0, 0, 0), (64, 33, 9)), ((3, 1, 2), (40, 30, 5)), ((5, 0, 8), (59, 33, 1))):
        strided = torch.zeros(*shape, 2)[..., 0]
        Reader(tmp_path / "step-1").read_into("w", strided, offsets)
        box = Box(offsets, shape)
        assert torch.equal(strided, box.of(tensor))
    assert asked and max(asked) <= 4096


def test_every_filling_and_every_flaw_of_a_small_region_is_told():
    """Against counting: random boxes over a small grid."""
    generator = torch.Generator().manual_seed(1)

    def number(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    whole, seen = Box.whole((4, 3)), set()
    for _ in range(3000):
        count = torch.zeros(4, 3, dtype=torch.int)
        given = [Box((0, 0), (number(4), 3)), Box((number(4), 0), (number(4) + 1, number(3) + 1))]
        given += [Box((number(4), number(3)), (number(3), number(3))) for _ in range(number(3))]
        for box in given:
            count[box.offsets[0] : box.ends[0], box.offsets[1] : box.ends[1]] += 1
        text = flaw(whole, given)
        assert (text is None) == bool((count == 1).all()), (given, text)
        if text:
            (low, high), (left, right) = re.findall(r"(\d+):(\d+)", text)
            told = 0 if text.startswith("nothing") else int(text.split()[0])
            assert (count[int(low) : int(high), int(left) : int(right)] == told).all(), (given, text)
        seen.add(text is None)
    assert seen == {True, False}


def test_two_parts_of_one_name_and_a_tensor_named_like_a_part_are_kept_apart(tmp_path):
    pieces = {
        "w": Piece.of((4,), [(torch.ones(1), (0,)), (torch.full((3,), 2.0), (1,))], (0,)),
        "w@0": Piece.whole(torch.full((2,), 3.0)),
        "w@1": Piece.whole(torch.full((3,), 4.0)),
    }
    save_held(tmp_path, 1, [pieces])
    reader = Reader(tmp_path / "step-1")
    assert reader.read("w").tolist() == [1, 2, 2, 2]
    assert reader.read("w@0").tolist() == [3, 3] and reader.read("w@1").tolist() == [4, 4, 4]

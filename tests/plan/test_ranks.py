"""Ranks and coordinates are each other's reverse; groups cut the world; the tables in docs/mesh.md are right."""

import re
from math import comb
from pathlib import Path

import pytest

from shoal.core.errors import ConfigError
from shoal.plan.mesh import AXES, Mesh
from shoal.plan.ranks import (
    Coordinates,
    coordinates,
    data_rank,
    data_ranks,
    factorisations,
    group,
    groups,
    rank_of,
    rank_stages,
    stage_rank,
)

pytestmark = pytest.mark.unit

MESH = Mesh(pipeline=2, replicate=3, shard=2, context=2, tensor=2)
TEXTBOOK = Mesh(pipeline=8, replicate=4, tensor=2)
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "mesh.md").read_text()


def test_each_rank_has_its_own_coordinates_and_they_lead_back():
    places = [coordinates(MESH, rank) for rank in range(MESH.size)]
    assert places == sorted(set(places))  # the last axis runs fastest, the first one slowest
    assert [rank_of(MESH, **place._asdict()) for place in places] == list(range(48))
    assert Coordinates._fields == AXES


def test_an_axis_that_is_not_named_counts_zero():
    assert rank_of(TEXTBOOK, pipeline=3, tensor=1) == 25
    assert rank_of(TEXTBOOK) == 0


def test_a_group_holds_the_ranks_that_differ_along_its_axes_only():
    assert group(TEXTBOOK, "tensor", 25) == (24, 25)
    assert group(TEXTBOOK, "replicate", 25) == (25, 27, 29, 31)
    assert group(TEXTBOOK, "pipeline", 25) == (1, 9, 17, 25, 33, 41, 49, 57)
    assert group(TEXTBOOK, ("tensor", "replicate"), 25) == tuple(range(24, 32))
    assert group(TEXTBOOK, (), 25) == (25,)


@pytest.mark.parametrize("axes", ["shard", ("replicate", "shard"), ("tensor", "pipeline"), AXES, ()])
def test_groups_cut_the_world_and_each_member_names_the_same_group(axes):
    found = groups(MESH, axes)
    assert sorted(rank for members in found for rank in members) == list(range(MESH.size))
    assert found == sorted(found)
    assert all(group(MESH, axes, rank) == members for members in found for rank in members)


def test_ranks_that_differ_in_replicate_or_shard_read_other_samples_and_no_others_do():
    assert data_ranks(MESH) == 6
    assert {data_rank(MESH, rank) for rank in range(MESH.size)} == set(range(6))
    for members in groups(MESH, ("pipeline", "context", "tensor")):
        assert len({data_rank(MESH, rank) for rank in members}) == 1
    for members in groups(MESH, ("replicate", "shard")):
        assert [data_rank(MESH, rank) for rank in members] == list(range(6))


@pytest.mark.parametrize("schedule", ["1f1b", "looped-bfs", "interleaved-1f1b", "interleaved-zero-bubble"])
def test_stages_go_round_and_round_the_ranks(schedule):
    assert [stage_rank(schedule, stage, 3, 2) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert rank_stages(schedule, 1, 3, 2) == (1, 4)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_stages_of_v_schedules_go_down_and_up_again(schedule):
    assert [stage_rank(schedule, stage, 3, 2) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert rank_stages(schedule, 0, 3, 2) == (0, 5)


def test_eight_workers_make_twenty_meshes():
    meshes = factorisations(8)
    assert len(meshes) == len({str(mesh) for mesh in meshes}) == comb(3 + 3, 3) == 20
    assert all(mesh.size == 8 and mesh.context == 1 for mesh in meshes)
    assert len(factorisations(12, AXES)) == comb(2 + 4, 4) * 5  # 12 = 2 x 2 x 3
    assert factorisations(7, ["tensor"]) == [Mesh(tensor=7)]
    assert factorisations(1) == [Mesh()]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: coordinates(TEXTBOOK, 64), "rank 64 is not on the mesh pipeline=8.*ranks 0 to 63; give one of those"),
        (lambda: coordinates(TEXTBOOK, -1), "rank -1 is not on the mesh"),
        (lambda: rank_of(TEXTBOOK, tensor=2), "tensor 2 is not on the mesh .*: tensor goes from 0 to 1"),
        (lambda: rank_of(TEXTBOOK, tenser=1), "no axis 'tenser'; did you mean 'tensor'"),
        (
            lambda: group(TEXTBOOK, ["tensor", "tensor"], 0),
            "axis 'tensor' is named twice in tensor, tensor; name it once",
        ),
        (lambda: groups(TEXTBOOK, "data"), "no axis 'data'.*the axes are pipeline, replicate, shard, context, tensor"),
        (
            lambda: stage_rank("1f1b", 8, 4, 2),
            "stage 8 was asked for; pipeline=4 with 2 chunks a rank has stages 0 to 7",
        ),
        (lambda: factorisations(0), "meshes of 0 ranks were asked for; a world has at least 1"),
        (lambda: factorisations(8, ["shards"]), "no axis 'shards'; did you mean 'shard'"),
    ],
)
def test_what_is_not_on_the_mesh_is_refused_by_name_and_number(call, said):
    with pytest.raises(ConfigError, match=said):
        call()


def test_the_worked_table_of_64_devices_is_right():
    rows = re.findall(r"^\| stage (\d) \|(.+)\|$", PAGE, re.MULTILINE)
    columns = re.search(r"^\| pipeline \|(.+)\|$", PAGE, re.MULTILINE)
    assert columns is not None
    heads = [tuple(map(int, re.findall(r"\d+", head))) for head in columns[1].split("|")]
    table = {
        int(rank): Coordinates(pipeline=int(stage), replicate=replica, tensor=half)
        for stage, cells in rows
        for (replica, half), rank in zip(heads, cells.split("|"), strict=True)
    }
    assert table == {rank: coordinates(TEXTBOOK, rank) for rank in range(64)}


def test_the_groups_and_stages_that_the_page_names_are_right():
    named = re.findall(r"^\| rank 25's (\w+) group \| ([\d, ]+) \|", PAGE, re.MULTILINE)
    assert {axis: group(TEXTBOOK, axis, 25) for axis in ("pipeline", "replicate", "tensor")} == {
        axis: tuple(map(int, ranks.split(","))) for axis, ranks in named
    }
    held = re.findall(r"^\| (round|V) \| (.+) \|$", PAGE, re.MULTILINE)
    assert {shape: [tuple(map(int, cell.split(","))) for cell in cells.split("|")] for shape, cells in held} == {
        "round": [rank_stages("interleaved-1f1b", rank, 4, 2) for rank in range(4)],
        "V": [rank_stages("zbv", rank, 4, 2) for rank in range(4)],
    }

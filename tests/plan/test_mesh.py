"""A mesh is read from words, fills up to the workers there are, or says by name and number why not."""

import pytest

from shoal.core.errors import ConfigError
from shoal.plan.mesh import AXES, Mesh

pytestmark = pytest.mark.unit


def test_axes_that_are_not_named_are_one_and_the_size_is_the_product():
    mesh = Mesh.parse("pipeline=2, tensor=3")
    assert (mesh, mesh.size) == (Mesh(pipeline=2, tensor=3), 6)
    assert tuple(mesh.degrees) == AXES


def test_what_is_left_of_the_workers_goes_to_replicate():
    assert Mesh.parse("pipeline=2,tensor=2", workers=12) == Mesh(pipeline=2, replicate=3, tensor=2)
    assert Mesh.parse("pipeline=2", workers=2) == Mesh(pipeline=2)
    assert Mesh.parse("replicate=2,shard=2", workers=4) == Mesh(replicate=2, shard=2)
    assert Mesh.parse("", workers=4) == Mesh(replicate=4)


@pytest.mark.parametrize(
    "mesh", [Mesh(), Mesh(tensor=2), Mesh(pipeline=8, replicate=4, tensor=2), Mesh(shard=3, context=2)]
)
def test_a_mesh_prints_what_it_can_be_read_from(mesh):
    assert Mesh.parse(str(mesh)) == mesh


def test_only_axes_that_split_are_printed():
    assert (str(Mesh(tensor=2, pipeline=4)), str(Mesh())) == ("pipeline=4,tensor=2", "replicate=1")


@pytest.mark.parametrize(
    ("asked", "workers", "said"),
    [
        ("pipelin=2", None, "--mesh: no axis 'pipelin'; did you mean 'pipeline'.*the axes are pipeline, replicate"),
        ("tensor=2,tensor=4", None, r"tensor is given twice \(2 and 4\); give it once"),
        ("tensor", None, "'tensor' is no axis=degree; write for example pipeline=2,tensor=2"),
        ("tensor=", None, "'tensor=' is no axis=degree"),
        ("tensor=0", None, "tensor = '0'.*greater than or equal to 1"),
        ("tensor=two", None, "tensor = 'two'.*valid integer"),
        ("pipeline=2,tensor=3", 8, "pipeline=2,tensor=3 makes 6 ranks, and there are 8 workers.*start 6 or 12 workers"),
        ("tensor=4", 2, "tensor=4 makes 4 ranks, and there are 2 workers.*no multiple of 4; start 4 workers"),
        ("tensor=4", 0, "there are 0 workers.*start 4 workers"),
        (
            "replicate=2,tensor=2",
            8,
            "there are 8 workers; leave replicate out, so that it takes what is left, or start 4",
        ),
    ],
)
def test_what_makes_no_mesh_is_refused_by_name_and_number(asked, workers, said):
    with pytest.raises(ConfigError, match=said):
        Mesh.parse(asked, "--mesh", workers)


def test_a_table_is_read_like_words():
    assert Mesh.parse({"tensor": 2}, "plan.toml: mesh", workers=4) == Mesh(replicate=2, tensor=2)
    with pytest.raises(ConfigError, match="plan.toml: mesh: no field 'tensr' in Mesh; did you mean 'tensor'"):
        Mesh.parse({"tensr": 2}, "plan.toml: mesh")

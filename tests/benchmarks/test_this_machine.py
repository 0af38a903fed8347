"""The comparison of predicted with measured steps: its figures by hand, and its plans through a file."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cluster.facts import Cluster, Device, Link

pytestmark = pytest.mark.unit
FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "this_machine.py"
DEVICE = Device(
    name="d", kernels="cpu", memory_bytes=10**10, flops_per_s={"fp32": 5e10}, matmul_share=1, attention_share=0.5,
    memory_bytes_per_s=1e10, memory_share=0.5, launch_s=1e-5,
)  # fmt: skip
CLUSTER = Cluster(name="c", device=DEVICE, devices_per_node=4, inside=Link(bytes_per_s=1e9, latency_s=1e-4))


@pytest.fixture(scope="module")
def machine():
    spec = importlib.util.spec_from_file_location("this_machine", FILE)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["this_machine"] = made
    sys.path.insert(0, str(FILE.parent))
    spec.loader.exec_module(made)
    yield made
    sys.path.remove(str(FILE.parent))
    del sys.modules["this_machine"]


def test_tau_counts_pairs_in_order(machine):
    assert machine.tau([(1, 10), (2, 20), (3, 30)]) == 1
    assert machine.tau([(1, 30), (2, 20), (3, 10)]) == -1
    assert machine.tau([(1, 10), (2, 30), (3, 20)]) == pytest.approx(1 / 3)
    assert machine.tau([(1, 10), (1, 20), (2, 30)]) == pytest.approx(2 / (2 * 3) ** 0.5)


def test_regret_is_of_the_plan_that_was_said_to_be_fastest(machine):
    def row(plan, said, took):
        return {
            "model": "m", "world": 2, "link": "l", "plan": plan, "predicted_s": said, "measured_s": took,
            "error": said / took - 1, "parts": {},
        }  # fmt: skip

    (found,) = machine.groups([row("a", 1.0, 1.2), row("b", 1.1, 1.0), row("c", 2.0, 1.0)])
    assert (found["chosen"], found["best"], found["plans"]) == ("a", "b", 3)
    assert found["regret"] == pytest.approx(0.2)
    assert (found["median_error"], found["worst_error"]) == (pytest.approx(1 / 6), pytest.approx(1.0))


def test_every_plan_comes_back_from_a_file_with_its_price(machine):
    sketch = machine.sketch_of("deep")
    search = machine.searches({"deep": sketch}, CLUSTER, 32)["deep"]
    made = list(machine.candidates(search))
    assert len({machine.label(machine.told(one)) for one in made}) == len(made) > 12
    for one in made:
        again = machine.heard(json.loads(json.dumps(machine.told(one))), search)
        assert machine.cost(search, again) == machine.cost(search, one)
        assert machine.cost(search, one).step_s > 0


def test_without_rights_it_says_what_is_needed(machine, monkeypatch):
    def refused(*command, **more):
        return subprocess.CompletedProcess(command, 1, "", "Operation not permitted")

    monkeypatch.setattr(machine.subprocess, "run", refused)
    said = "not permitted; run as root, with iproute2, or --links loopback"
    with pytest.raises(SystemExit, match=said), machine.joined(1e6):
        raise AssertionError("it was joined")

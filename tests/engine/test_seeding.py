"""Seeding each micro-batch: the same numbers as torch's own, and nothing that stays or costs."""

import traceback

import pytest
import torch

from shoal.engine.randomness import key, seed_all

pytestmark = pytest.mark.unit


def test_seeding_gives_the_numbers_that_torch_gives():
    seed_all(3, 1, 4)
    found = torch.rand(4), torch.nn.functional.dropout(torch.ones(8))
    torch.manual_seed(key(3, 1, 4))
    assert torch.equal(found[0], torch.rand(4)) and torch.equal(found[1], torch.nn.functional.dropout(torch.ones(8)))


def test_seeding_queues_nothing_for_devices_that_are_not_there(monkeypatch):
    """Each micro-batch left a call and its formatted stack behind for every kind of device."""

    def formatted(*_):
        raise AssertionError("a stack was formatted")

    def queued():
        return sum(len(getattr(module, "_queued_calls", ())) for module in (torch.cuda, torch.xpu, torch.mtia))

    before = queued()
    monkeypatch.setattr(traceback, "format_stack", formatted)
    for number in range(100):
        seed_all(0, number)
    assert queued() == before

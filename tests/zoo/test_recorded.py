"""The construction of every family is replayed bitwise, so that none is built whole."""

from __future__ import annotations

import pytest
import torch
from tests.zoo.families import FAMILIES

from shoal.data.randomness import undisturbed
from shoal.engine.recorded import record, replay, view


@pytest.mark.unit
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_replayed_with_the_same_weights(family):
    make, seed, found = FAMILIES[family].model, lambda: torch.manual_seed(5), {}
    with undisturbed(torch.float64):
        recording = record(make, seed)
        names = {id(tensor): name for name, tensor in recording.model.named_parameters()}
        places = {names[id(param)]: recording.place(param) for param in recording.model.parameters()}

        def ready(storage, flat):
            found.update({name: view(flat, place) for name, place in places.items() if place.storage == storage})

        replay(recording, seed, ready, {place.storage for place in places.values()})
        seed()
        wanted = dict(make().named_parameters())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], param) for name, param in wanted.items())

"""What a pipeline sends and receives is posted where torch posts it, early on the CPU, and nobody waits for himself."""

from __future__ import annotations

import pytest
from test_schedule import CELLS

from shoal.core.errors import ConfigError
from shoal.plan.flight import _flights, enough
from shoal.plan.messages import AHEAD, Message, received_early, with_messages
from shoal.plan.schedule import SCHEDULES, Action, action_lists, conflicts, parts

pytestmark = pytest.mark.unit


def words(entries):
    return [str(entry) for entry in entries]


def receives(entries):
    return [entry for entry in entries if isinstance(entry, Message) and entry.kind.startswith("RECV")]


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_stand_where_torch_puts_them(name):
    for cell in [cell for cell in CELLS if cell[0] == name]:
        check(action_lists(*cell), cell)
        forwards = [[part for action in of for part in parts(action) if part.kind == "F"] for of in action_lists(*cell)]
        check(forwards, cell)  # as an evaluation


def check(lists, cell):
    from torch.distributed.pipelining import schedules

    place = {part.stage: rank for rank, of in enumerate(lists) for action in of for part in parts(action)}
    theirs = schedules._add_send_recv(
        {rank: [schedules._Action.from_str(str(action)) for action in of] for rank, of in enumerate(lists)},
        place.__getitem__, len(place),
    )  # fmt: skip
    assert list(map(words, with_messages(lists))) == [words(theirs[rank]) for rank in range(cell[1])], cell


def unused(entries):
    """The most receives that are posted and not used yet."""
    posted = most = 0
    got = set()
    for entry in entries:
        if isinstance(entry, Message):
            if entry.kind.startswith("RECV"):
                got.add((entry.kind[-1] == "F", entry.stage, entry.micro))
                posted += 1
                most = max(most, posted)
            continue
        for part in parts(entry):
            posted -= part.kind != "W" and (part.kind == "F", part.stage, part.micro) in got
    return most


@pytest.mark.parametrize("name", SCHEDULES)
def test_receives_that_are_posted_early_keep_their_order_and_are_never_late_or_many(name):
    for cell in [cell for cell in CELLS if cell[0] == name]:
        for entries in with_messages(action_lists(*cell)):
            early, theirs = received_early(entries), receives(entries)
            assert receives(early) == theirs
            received = set(theirs)
            assert [e for e in early if e not in received] == [e for e in entries if e not in received]
            at, before = ({entry: place for place, entry in enumerate(of)} for of in (early, entries))
            assert all(at[entry] <= before[entry] for entry in theirs), cell
            assert unused(early) <= max(AHEAD, unused(entries)), cell
            assert received_early(entries, 0) == entries


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rank_that_waits_until_each_message_is_through_waits_for_nobody_who_waits_for_it(name, early):
    """Sends that are awaited before the step's end must not close a ring of ranks, however few may be under way."""
    for cell in [cell for cell in CELLS if cell[0] == name]:
        lists = [received_early(entries) if early else entries for entries in with_messages(action_lists(*cell))]
        at, posted = [0] * len(lists), set()
        moved = True
        while moved:
            moved = False
            for rank, entries in enumerate(lists):
                while at[rank] < len(entries):
                    entry = entries[at[rank]]
                    if isinstance(entry, Message):
                        forward = entry.kind[-1] == "F"
                        if entry.kind.startswith("RECV"):
                            posted.add((forward, entry.stage, entry.micro))
                        elif (forward, entry.stage + (1 if forward else -1), entry.micro) not in posted:
                            break
                    at[rank] += 1
                    moved = True
        assert at == list(map(len, lists)), cell


def test_lists_that_wait_for_each_other_are_refused():
    with pytest.raises(ConfigError, match="lists wait for each other; use another schedule"):
        with_messages([[Action(0, "B", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]])


def states(found):
    """Per rank, what differs."""
    return [
        {(each.heads[head], tuple(counts)) for head, counts in zip(each.head, each.counts, strict=True)}
        for each in found
    ]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_fewer_micro_batches_tell_what_is_in_flight_of_many(name, early):
    """Memory is worked out from a step of the same states."""
    cells = [(name, p, c, m) for p in (2, 3) for c in (1, 2, 3) for m in range(20, 33) if not conflicts(name, p, c, m)]
    short = 0
    for _, pipeline, chunks, micro_batches in cells:
        fewer = enough(name, pipeline, micro_batches)
        short += micro_batches - fewer
        few, many = (states(_flights(name, pipeline, chunks, count, early)) for count in (fewer, micro_batches))
        assert few == many, (pipeline, chunks, micro_batches)
    assert short > 0 or name in ("gpipe", "looped-bfs")

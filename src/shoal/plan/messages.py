"""Where a pipeline's ranks send and receive, beside what they compute, for every list of actions, without torch.

The order is that of ``torch.distributed.pipelining``: a rank sends as soon as it has computed, and the other posts its
receive at that very moment of a play in which every rank takes one action a turn. So between any two ranks messages
are posted in one order on both sides (NCCL runs them in turn), and every entry's needs were played before it: a rank
may even stand still until a message is through, and none waits for itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from shoal.core.errors import ConfigError
from shoal.plan.schedule import Action, Overlap, parts

#: Messages under way that a rank keeps; with one more it waits until the oldest is through. (torch's own 1F1B keeps
#: one: who has more to send than that waits for the link anyway.)
UNDER_WAY = 4
#: Receives that a rank on the CPU posts ahead: see ``received_early``.
AHEAD = 8


class Message(NamedTuple):
    """What stage ``stage`` sends or receives for a micro-batch: values of a forward (F) or gradients (B)."""

    stage: int
    kind: Literal["SEND_F", "RECV_F", "SEND_B", "RECV_B"]
    micro: int

    def __str__(self) -> str:
        """As torch writes and reads it, for example ``2SEND_F0``."""
        return f"{self.stage}{self.kind}{self.micro}"


Entry = Action | Overlap | Message
Entries = list[Entry]


def with_messages(lists: Sequence[Sequence[Action | Overlap]]) -> list[Entries]:
    """Each rank's list with its sends and receives. Stages on one rank hand over without any.

    Raises ConfigError where the lists wait for each other.
    """
    place = {part.stage: rank for rank, actions in enumerate(lists) for action in actions for part in parts(action)}
    last = len(place) - 1
    forwards: list[set[int]] = [set() for _ in place]  # micro-batches that are through, by stage
    backwards: list[set[int]] = [set() for _ in place]
    found: list[Entries] = [[] for _ in lists]
    waiting = {rank: deque(actions) for rank, actions in enumerate(lists) if actions}
    while waiting:
        moved = False
        for rank in list(waiting):
            entry = waiting[rank][0]
            pair = parts(entry)
            for stage, kind, micro in pair:
                if kind == "F":
                    if stage and micro not in forwards[stage - 1]:
                        break
                elif kind != "W" and stage != last and micro not in backwards[stage + 1]:
                    break
            else:
                moved = True
                found[rank].append(entry)
                waiting[rank].popleft()
                if not waiting[rank]:
                    del waiting[rank]
                for stage, kind, micro in pair:
                    if kind == "F":
                        forwards[stage].add(micro)
                        if stage < last and place[stage + 1] != rank:
                            found[rank].append(Message(stage, "SEND_F", micro))
                            found[place[stage + 1]].append(Message(stage + 1, "RECV_F", micro))
                    elif kind != "W":
                        backwards[stage].add(micro)
                        if stage and place[stage - 1] != rank:
                            found[rank].append(Message(stage, "SEND_B", micro))
                            found[place[stage - 1]].append(Message(stage - 1, "RECV_B", micro))
        if not moved:
            raise ConfigError("the pipeline's lists wait for each other; use another schedule")
    return found


def received_early(entries: Sequence[Entry], ahead: int = AHEAD) -> Entries:
    """The list with receives posted as soon as fewer than ``ahead`` are posted and not used yet, in their order, and
    none later than it was.

    Gloo sends once the receiver has said that it is ready, in the stream in which it sends itself: behind a forward's
    values on a slow link, so that gradients would only start to come back when these have gone. (NCCL runs what goes
    between two ranks in turn: a receive that is posted early would hold up the sends.)
    """
    receives = deque(entry for entry in entries if isinstance(entry, Message) and entry.kind[:4] == "RECV")
    posted: set[tuple[bool, int, int]] = set()
    found: Entries = []

    def post() -> None:
        stage, kind, micro = entry = receives.popleft()
        posted.add((kind == "RECV_F", stage, micro))
        found.append(entry)

    for entry in entries:
        if isinstance(entry, Message) and entry.kind[:4] == "RECV":
            if receives and receives[0] == entry:  # else it was posted before
                post()
            continue
        while receives and len(posted) < ahead:
            post()
        found.append(entry)
        if not isinstance(entry, Message):
            posted -= {(part.kind == "F", part.stage, part.micro) for part in parts(entry) if part.kind != "W"}
    return found

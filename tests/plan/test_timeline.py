"""A step's timeline: ends when the step does, no rank does two things at once, and both files hold it."""

import json
import re
from xml.etree import ElementTree

import pytest

from shoal.cluster.presets import preset
from shoal.plan.candidate import Candidate, States
from shoal.plan.mesh import Mesh
from shoal.plan.shapes import Shape, Split
from shoal.plan.time import Prices
from shoal.plan.timeline import spans, text, to_trace
from shoal.plan.transformer import profile

pytestmark = pytest.mark.unit
MADE = profile(Shape("gpt <8>", 8, 1024, 16, 16, 4096, 32000), 512, Split(tensor=2))
PRICES = Prices(MADE, preset("h100", 16))
PLANS = [
    Candidate(Mesh(shard=8, tensor=2), 1, 2, states=States(2, 0, 4, 12), shard_level=1, precision="bf16"),
    Candidate(Mesh(pipeline=4, replicate=2, tensor=2), 1, 8, (0, 3, 5, 7), "1f1b", precision="bf16"),
    Candidate(Mesh(pipeline=2, replicate=4, tensor=2), 1, 4, (0, 3, 5, 7), "interleaved-zero-bubble", 2),
]


@pytest.mark.parametrize("candidate", PLANS, ids=lambda plan: plan.schedule or "no pipeline")
def test_spans_end_with_the_step_and_no_rank_does_two_things_at_once(candidate):
    found = spans(PRICES, candidate)
    assert max(span.end_s for span in found) == pytest.approx(PRICES.price(candidate).step_s)
    for rank in range(candidate.mesh.pipeline):
        mine = sorted((span.start_s, span.end_s) for span in found if span.rank == rank)
        assert all(second[0] >= first[1] - 1e-12 for first, second in zip(mine, mine[1:], strict=False))
    for span in found:
        if span.kind in "FBIW":
            assert sum(span.parts.values()) == pytest.approx(span.end_s - span.start_s)


def test_a_trace_is_chromes_format():
    found = spans(PRICES, PLANS[1])
    events = json.loads(to_trace(found))["traceEvents"]
    whole = [event for event in events if event["ph"] == "X"]
    assert len(whole) == len(found)
    assert {event["tid"] for event in whole} == {0, 1, 2, 3}
    first = next(event for event in whole if event["name"] == "forward, stage 0, micro-batch 0")
    assert first["ts"] == 0 and first["dur"] == pytest.approx(1e6 * (found[0].end_s - found[0].start_s))
    assert sum(event["args"]["compute_s"] for event in whole if event["cat"] in "FB") > 0


@pytest.mark.parametrize("ending", [".html", ".svg"])
def test_a_picture_is_whole_in_itself_and_names_every_span(ending):
    found = spans(PRICES, PLANS[1])
    picture = text(found, "a < b", ending)
    spanned = re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)" height="\d+" fill="#\w+" stroke', picture)
    assert len(spanned) == picture.count("</title></rect>") == len(found)
    assert max(float(x) + float(width) for x, width in spanned) == pytest.approx(70 + 1200, abs=0.5)
    assert "a &lt; b" in picture and "backward, stage 3, micro-batch 7" in picture
    assert not re.search(r"src=|href=|http(?!://www.w3.org/2000/svg)", picture)
    drawn = ElementTree.fromstring(picture[picture.index("<svg") : picture.index("</svg>") + 6])
    assert float(drawn.attrib["width"]) > 70 + 1200

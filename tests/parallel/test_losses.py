"""Losses of logits whose classes are divided over a tensor group: exact, without whole logits on any rank."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.harness import RankFailed, run_ranks
from tests.tensor_training import Case, built, found_roles
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.blueprint.split import Split
from shoal.models import GPT
from shoal.parallel.tensor.apply import apply
from shoal.parallel.tensor.moves import Group, take
from shoal.parallel.tensor.part import marked

pytestmark = pytest.mark.ranks

CLASSES = 61
BOTH = (False, True)


def values():
    """Logits [2, 5, K], targets [2, 5] of which some are 3, weights of the classes."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, CLASSES, generator=generator, dtype=torch.float64) * 5
    targets = torch.randint(0, CLASSES, (2, 5), generator=generator)
    targets[0, 1] = targets[1, 2] = 3
    return logits, targets, torch.rand(CLASSES, generator=generator, dtype=torch.float64)


def divided(logits: Tensor, degree: int, rank: int) -> tuple[Tensor, Group]:
    """The logits as a part, and their group."""
    group, split = Group(dist.group.WORLD, degree, rank), Split(logits.dim() - 1, (logits.shape[-1],))
    return marked(take(logits, split, group), split, group), group


FORMS = {
    "rows": lambda x, targets, **given: F.cross_entropy(x.flatten(0, 1), targets.flatten(), **given),
    "classes second": lambda x, targets, **given: F.cross_entropy(x.transpose(1, 2), targets, **given),
    "log-probabilities": lambda x, targets, label_smoothing, **given: F.nll_loss(
        F.log_softmax(x, -1).view(-1, CLASSES), targets.view(-1), **given
    ),
}


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("form", list(FORMS))
def test_cross_entropy_of_divided_classes_is_torchs_own(form, degree):
    logits, targets, weights = values()

    def rank(rank):
        for smoothing, ignored, reduction, weighted in itertools.product(
            (0.0, 0.1), (-100, 3), ("mean", "sum", "none"), BOTH
        ):
            given = {"ignore_index": ignored, "reduction": reduction, "weight": weights if weighted else None}
            whole, mine = (logits.clone().requires_grad_() for _ in range(2))
            part, group = divided(mine, degree, rank)
            wanted = FORMS[form](whole, targets, label_smoothing=smoothing, **given)
            found = FORMS[form](part, targets, label_smoothing=smoothing, **given)
            assert type(found) is Tensor
            scale = torch.linspace(1, 2, wanted.numel(), dtype=torch.float64).view(wanted.shape)
            for loss in (wanted, found):
                (loss * scale).sum().backward()
            torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(mine.grad, whole.grad, rtol=1e-12, atol=1e-14)
            assert not group.gathers
        return True

    assert all(run_ranks(rank, degree))


def test_what_no_rule_covers_is_gathered_and_exact():
    """Probabilities as targets, softmax along the classes, the largest logit."""
    logits, *_ = values()
    asked = {
        "cross_entropy": lambda x: F.cross_entropy(x[0], torch.full((5, CLASSES), 1 / CLASSES).double()),
        "softmax": lambda x: x.softmax(-1).pow(2).sum(),
        "argmax": lambda x: x.argmax(-1).double().sum(),
    }

    def rank(rank):
        for name, ask in asked.items():
            part, group = divided(logits, 2, rank)
            torch.testing.assert_close(ask(part), ask(logits), rtol=1e-13, atol=0)
            assert name in group.gathers
        return True

    assert all(run_ranks(rank, 2))


def test_half_precision_is_summed_as_torch_does():
    logits, targets, _ = values()

    def rank(rank):
        for autocast in BOTH:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                low = logits.to(torch.bfloat16)
                found = FORMS["rows"](divided(low, 2, rank)[0], targets)
                wanted = FORMS["rows"](low, targets)
            assert found.dtype is wanted.dtype
            torch.testing.assert_close(found, wanted, rtol=1e-6 if autocast else 8e-3, atol=0)
        return True

    assert all(run_ranks(rank, 2))


def test_a_target_that_is_no_class_is_refused():
    logits, targets, _ = values()
    targets[0, 0] = CLASSES

    def rank(rank):
        FORMS["rows"](divided(logits, 2, rank)[0], targets)

    with pytest.raises(RankFailed, match="a target is none of the 61 classes, which are divided over the tensor axis"):
        run_ranks(rank, 2)


class Largest(TorchDispatchMode):
    """How many elements the largest tensor has that any operation or collective gives."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():  # below autograd a part is its own values
            result = func(*args, **(kwargs or {}))
        found = (t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor))
        self.elements = max(self.elements, *(t.numel() for t in found), 0)
        return result


VOCABULARY, TOKENS = 1009, (4, 16)


def tokens():
    return {"ids": torch.randint(0, VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("loss", ["in the job", "in the model"])
def test_no_rank_ever_has_whole_logits(loss):
    """Forward and backward of a GPT with a prime vocabulary: the largest tensor is a rank's half of the logits."""

    class Loses(GPT):
        def forward(self, ids):
            return F.cross_entropy(super().forward(ids).flatten(0, 1).float(), ids.flatten(), ignore_index=5)

    inside = loss == "in the model"
    case = Case(
        lambda: (Loses if inside else GPT)(VOCABULARY, 8, 1, 2, 16),
        tokens,
        (lambda output: output)
        if inside
        else lambda output: F.cross_entropy(output.flatten(0, 1), tokens()["ids"].flatten()),
    )

    def rank(rank):
        blueprint, found = found_roles(case, 2)
        model = built(case)
        apply(model, blueprint, found, init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)))
        with Largest() as largest:
            case.loss(model(**case.inputs())).backward()
        return largest.elements

    whole, half = (TOKENS[0] * TOKENS[1] * size for size in (VOCABULARY, VOCABULARY // 2))
    for elements in run_ranks(rank, 2):
        assert half <= elements <= half + TOKENS[0] * TOKENS[1] < whole

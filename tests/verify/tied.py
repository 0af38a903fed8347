"""A tiny tied language model with uneven counts, and faults that the engine of a job of several ranks can be given."""

import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.models import GPT

VOCABULARY, LENGTH = 61, 8


def rows(size):
    import torch

    generator = torch.Generator().manual_seed(1)
    samples = []
    for number in range(size):
        tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
        targets = tokens[1:].clone()
        targets[1 + number % LENGTH :] = -100
        samples.append((tokens[:-1], targets))
    return samples


class Dropping(GPT):
    """Also drops between blocks, by a function, and in a form that verify switches off."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.alpha = nn.AlphaDropout(0.1)

    def forward(self, ids):
        x = self.drop(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        for block in self.blocks:
            x = F.dropout(block(x), 0.2, self.training)
        return self.head(self.alpha(self.norm(x)))


class Grouped(nn.Module):
    """Attention whose query heads share one key-value head."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.out = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width // heads),
            nn.Linear(width, width),
        )

    def forward(self, x):
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (part.unsqueeze(1) for part in self.kv(x).chunk(2, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Narrow(nn.LayerNorm):
    """Works in float32, as many models' norms do."""

    def forward(self, x):
        import torch

        return super().forward(x.to(torch.float32).float()).type_as(x)


class Shifted(nn.LayerNorm):
    """One number added to all features, which the norm takes away: its gradient is zero but for rounding."""

    def __init__(self, width):
        import torch

        super().__init__(width)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return super().forward(x + self.shift)


class Running(nn.LayerNorm):
    """Keeps a mean of what it saw, and adds it to what it sees next."""

    mean = 0.0

    def forward(self, x):
        found = super().forward(x + self.mean)
        self.mean = x.detach().mean((0, 1))
        return found


class Alternating(GPT):
    """Leaves out its last block in every second forward."""

    calls = 0

    def forward(self, ids):
        self.calls += 1
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks[: len(self.blocks) - self.calls % 2]:
            x = block(x)
        return self.head(self.norm(x))


class Noisy(nn.Linear):
    """Adds noise of its own."""

    def forward(self, x):
        import torch

        return super().forward(x) + 0.01 * torch.randn(16)


class Job(shoal.Job):
    """``fault``: a method of Faults, put in where there are several ranks."""

    tied: bool = True
    dropout: float = 0.0
    fault: str = ""
    grouped: bool = False
    narrow: bool = False
    shifted: bool = False
    running: bool = False
    alternating: bool = False
    noisy: bool = False
    broken: bool = False
    infinite: bool = False

    def model(self):
        kind = Dropping if self.dropout else Alternating if self.alternating else GPT
        made = kind(VOCABULARY, 16, 2, 2, LENGTH, self.dropout, tied=self.tied)
        if self.grouped:
            made.blocks[1].attention = Grouped(16, 2)
        if self.narrow:
            made.blocks[0].norm_feed = Narrow(16)
        if self.shifted:
            made.blocks[0].norm_feed = Shifted(16)
        if self.running:
            made.blocks[0].norm_feed = Running(16)
        if self.noisy:
            made.blocks[1].feed[2] = Noisy(64, 16)
        if self.broken:
            raise ValueError("too narrow")
        return made

    def data(self):
        return rows(24)

    def loss(self, output, targets):
        total = F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        if self.infinite:
            total = total * float("inf")
        return shoal.Loss(total, (targets != -100).sum())

    def optimizer(self, model):
        import torch

        if self.fault and dist.get_world_size() > 1:
            getattr(Faults, self.fault.replace("-", "_"))(model)
        return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-14 if self.shifted else 1e-8)


class Faults:
    """Each changes the engine in this process, as a bug in it would."""

    @staticmethod
    def dropped_reduction(model):
        from shoal.parallel.replicate.buckets import GradientBuckets

        def launch(self, bucket):
            ranks, self.ranks = self.ranks, 1
            right(self, bucket)
            self.ranks = ranks

        right, GradientBuckets._launch = GradientBuckets._launch, launch

    @staticmethod
    def summed_twice(model):
        from shoal.parallel.replicate.buckets import GradientBuckets

        def finish(self):
            right(self)
            for bucket in self.buckets:
                dist.all_reduce(bucket.flat, group=self.group)

        right, GradientBuckets.finish = GradientBuckets.finish, finish

    @staticmethod
    def halved_gradient(model):
        change_gradient("blocks.0.feed.0.weight", lambda gradient: gradient.mul_(0.5))

    @staticmethod
    def part_of_a_gradient(model):
        change_gradient("blocks.1.attention.qkv.weight", lambda gradient: gradient[16:32].mul_(2))

    @staticmethod
    def tiny_error(model):
        change_gradient("blocks.0.feed.0.weight", lambda gradient: gradient.mul_(1 + 1e-7))

    @staticmethod
    def wrong_sign(model):
        change_gradient("blocks.0.norm_feed.weight", lambda gradient: gradient.neg_())

    @staticmethod
    def wrong_divisor(model):
        from shoal.engine import step

        def judge(run, values):
            verdict = right(run, values)
            return verdict._replace(factor=verdict.factor / run.ranks)

        right, step.judge = step.judge, judge

    @staticmethod
    def wrong_count(model):
        from shoal.engine import step

        def judge(run, values):
            return right(run, [values[0], values[1] * 2, *values[2:]])

        right, step.judge = step.judge, judge

    @staticmethod
    def swapped_micro_batches(model):
        from shoal.engine import forward

        def padded(micros, number):
            found = right(micros, number)
            if dist.get_rank() == dist.get_world_size() - 1:
                found[0], found[1] = found[1], found[0]
            return found

        right, forward.padded = forward.padded, padded

    @staticmethod
    def untied(model):
        from shoal.engine import parts

        parts.ties = lambda *args: {}

    @staticmethod
    def missing_key_value_sum(model):
        from shoal.parallel.tensor import part

        def on_parts(*given):
            enter, outcome = part.enter, given[-2]
            if outcome.how == "attention" and outcome.local:  # key-value heads that every rank has whole
                part.enter = lambda tensor, *more: tensor
            try:
                return right(*given)
            finally:
                part.enter = enter

        right, part._on_parts = part._on_parts, on_parts

    @staticmethod
    def bias_added_twice(model):
        from shoal.parallel.tensor import part

        def row(*given):
            found, outcome = given[-3:-1]
            bias = [tensor for tensor, target in zip(found, outcome.targets, strict=True) if target is None]
            return sum(bias, right(*given))

        right, part._row = part._row, row

    @staticmethod
    def other_rate(model):
        from shoal.engine.optimizer import NamedOptimizer

        def step(self, factor):
            for group in self.optimizer.param_groups:
                group["lr"] *= 1.5
            return right(self, factor)

        right, NamedOptimizer.step = NamedOptimizer.step, step

    @staticmethod
    def crash(model):
        raise ValueError("this layout goes wrong")

    @staticmethod
    def killed(model):
        import os
        import signal

        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()


def change_gradient(name, change):
    from shoal.parallel.replicate.buckets import GradientBuckets

    def finish(self):
        right(self)
        for own, param in self.parameters:
            if own == name:
                change(self._view[id(param)])

    right, GradientBuckets.finish = GradientBuckets.finish, finish

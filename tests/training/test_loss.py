"""The fused loss against a plain one: full logits, softmax over the allowed ids, autograd, fp64."""

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from eagle3lib.training import bench_loss, fused
from eagle3lib.training.fused import HeadLoss, head_loss, plan_chunks
from eagle3lib.training.kinds import KINDS
from eagle3lib.training.loss import (
    step_scale,
)

STEPS = 5
VOCAB, DRAFT, WIDTH, TARGET_WIDTH, STATES, POSITIONS = 97, 61, 24, 40, 50, 33


class Case:
    """Hidden states of three steps, a head, and labels with holes; all on one seed."""

    def __init__(self, seed=0, dtype=torch.float64, steps=3, scale=1.0):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        # The drafter's own norm is fp32 throughout; it comes in below.
        self.norm = torch.nn.RMSNorm(WIDTH, 1e-5, dtype=torch.float64)
        with torch.no_grad():
            self.norm.weight.copy_(normal(WIDTH).abs() + 0.5)
        self.hidden = [normal(POSITIONS, WIDTH) * 3 for _ in range(steps)]
        self.weight = normal(DRAFT, WIDTH) * 0.3 * scale
        self.states = normal(STATES, TARGET_WIDTH)
        self.full_head = normal(VOCAB, TARGET_WIDTH) * 0.2 * scale
        self.ids = torch.randperm(VOCAB, generator=generator)[:DRAFT].sort().values
        self.rows = torch.randint(0, STATES, (steps, POSITIONS), generator=generator)
        self.rows[torch.rand(steps, POSITIONS, generator=generator) < 0.3] = -1
        self.rows[:, 5:9] = -1
        self.token = torch.randint(0, DRAFT, (steps, POSITIONS), generator=generator)
        self.step_scale = [0.5**k / POSITIONS for k in range(steps)]
        self.to(dtype)

    def to(self, dtype):
        """Rounded: the plain loss then starts from the same rounded numbers."""
        self.norm.to(dtype)
        self.hidden = [h.to(dtype).requires_grad_() for h in self.hidden]
        self.weight = self.weight.to(dtype).requires_grad_()
        self.states, self.full_head = self.states.to(dtype), self.full_head.to(dtype)

    def spec(self, kind, temperature=1.0, mass=True, **changes):
        logits = self.states.double() @ self.full_head.double().T / temperature
        values = {
            "kind": kind, "temperature": temperature, "teacher": self.rows, "token": self.token,
            "scale": self.step_scale, "norm": self.norm, "states": self.states,
            "draft_head": self.full_head[self.ids],
            "full_logsumexp": logits.logsumexp(-1) if mass else None,
        }  # fmt: skip
        return HeadLoss(**(values | changes))

    def leaves(self):
        return [*self.hidden, self.weight, self.norm.weight]

    def fused(self, kind, **options):
        """(loss, gradients, sums)"""
        loss, sums = head_loss(self.spec(kind, **options), self.hidden, self.weight)
        return loss.detach(), torch.autograd.grad(loss, self.leaves()), sums

    def plain(self, kind, temperature=1.0, mass=True):
        """The same from full logits in fp64."""
        leaves = [leaf.detach().double().requires_grad_() for leaf in self.leaves()]
        hidden, weight, gain = leaves[:-2], leaves[-2], leaves[-1]
        loss, sums = torch.zeros((), dtype=torch.float64), []
        head = self.full_head.double()
        for rows, token, h, scale in zip(
            self.rows, self.token, hidden, self.step_scale, strict=True
        ):
            used = rows >= 0
            x = F.rms_norm(h[used], (WIDTH,), gain, 1e-5)
            logits = x @ weight.T
            z = self.states.double()[rows[used]] @ head.T / temperature
            p = (z.softmax(-1) if mass else z[:, self.ids].softmax(-1))[
                :, self.ids if mass else slice(None)
            ]
            log_q = (logits / temperature).log_softmax(-1)
            each = plain_kind(kind, p, log_q, token[used])
            loss = loss + scale * each.sum()
            right = (logits.argmax(-1) == token[used]).sum()
            sums.append([each.sum(), torch.minimum(p, log_q.exp()).sum(), right])
            sums[-1] = [float(value.detach()) for value in sums[-1]]
        return (
            loss.detach(),
            torch.autograd.grad(loss, leaves),
            torch.tensor(sums, dtype=torch.float64),
        )


def plain_kind(kind, p, log_q, token):
    """[R], by the definitions."""
    q, inner = log_q.exp(), p / p.sum(-1, keepdim=True)
    alpha = torch.minimum(p, q).sum(-1)
    kl = (inner * (inner.log() - log_q)).sum(-1)
    weight = (-3 * alpha).exp().detach()
    return {
        "kl": kl,
        "ce": F.nll_loss(log_q, token, reduction="none"),
        "rkl": (q * (log_q - inner.log())).sum(-1),
        # what lies outside the draft vocabulary is drafted with no probability at all
        "tv": ((p - q).abs().sum(-1) + 1 - p.sum(-1)) / 2,
        "lk": -alpha.log(),
        "hybrid": weight * kl + (1 - weight) * (1 - alpha),
    }[kind]


def error(found, expected):
    """Of the norm, relative."""
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("mass", [True, False], ids=["whole", "renormalised"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_its_definition(kind, temperature, mass):
    case = Case()
    options = {"temperature": temperature, "mass": mass}
    loss, gradients, sums = case.fused(kind, **options, buffer_bytes=1)
    expected_loss, expected, expected_sums = case.plain(kind, **options)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-10)
    for found, wanted in zip(gradients, expected, strict=True):
        assert error(found, wanted) < 1e-10
    assert torch.allclose(sums, expected_sums, rtol=1e-10)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 0.002), (torch.bfloat16, 0.02)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("way", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_lower_precision_is_near(kind, way, dtype, bound, monkeypatch):
    """Of fp64 that starts from the same rounded numbers, gradients that jump included."""
    case = Case(dtype=dtype)
    if way == "gpu":
        as_on_a_gpu(monkeypatch)
    loss, gradients, _ = case.fused(kind)
    expected_loss, expected, _ = case.plain(kind)
    assert float(loss) == pytest.approx(float(expected_loss), rel=bound)
    for found, wanted in zip(gradients, expected, strict=True):
        assert found.dtype == dtype
        assert error(found, wanted) < bound


@pytest.mark.parametrize("way", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", ["tv", "lk"])
def test_a_gradient_that_jumps_needs_exact_logits(kind, way, monkeypatch):
    """A drafter near its target has many tokens near p = q: with the upper bits of the normed
    state alone, some percent of the gradient are wrong."""
    sizes = "--draft-vocab 4096 --hidden 576 --steps 1 --check-positions 64"
    options = bench_loss.parse(["--kind", kind, *sizes.split()])
    options.dtype = torch.bfloat16
    if way == "gpu":
        as_on_a_gpu(monkeypatch)
    exact = max(bench_loss.errors(options).values())
    monkeypatch.setattr(fused, "JUMPS", frozenset())
    assert exact < 0.005 < 0.01 < max(bench_loss.errors(options).values())


def as_on_a_gpu(monkeypatch):
    """Its parts, buffers and layout of the head's gradient, without the compiler; products of
    narrow factors have a wide result."""

    def wide(x):
        return x.float() if x.dtype.itemsize < 4 else x

    monkeypatch.setattr(fused, "_on_cpu", lambda weight: False)
    monkeypatch.setattr(fused, "_compiled", lambda function: function)
    monkeypatch.setattr(fused, "_product", lambda x, weight: wide(x) @ wide(weight).T)
    monkeypatch.setattr(fused, "_add_product", lambda total, g, x: total.addmm_(wide(g).T, wide(x)))


def test_autocast_multiplies_in_bf16_and_returns_what_it_was_given():
    case = Case(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss, gradients, _ = case.fused("kl")
    exact, whole = case.plain("kl")[:2], case.fused("kl")[1]
    assert float(loss) == pytest.approx(float(exact[0]), rel=0.02)
    for found, fp32, wanted in zip(gradients, whole, exact[1], strict=True):
        assert found.dtype == torch.float32
        assert error(fp32, wanted) < 1e-4 < error(found, wanted) < 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_change_nothing(kind):
    """From one base position at a time to all of them."""
    case = Case()
    sizes = [1, 30_000, 1 << 30]
    results = [case.fused(kind, buffer_bytes=size) for size in sizes]
    counts = [len(plan_chunks(case.spec(kind), 700, 500, size)) for size in sizes]
    assert counts[0] > counts[1] > counts[2] == 1
    for loss, gradients, sums in results[1:]:
        assert float(loss) == pytest.approx(float(results[0][0]), rel=1e-12)
        assert torch.allclose(sums, results[0][2], rtol=1e-12)
        for found, wanted in zip(gradients, results[0][1], strict=True):
            assert error(found, wanted) < 1e-12


@pytest.mark.parametrize("budget", [1, 9_000, 20_000, 50_000])
def test_chunks_keep_to_their_budget(budget):
    """Every row once, its own teacher row, and no chunk too large unless it is one position."""
    case = Case(seed=3)
    spec = case.spec("kl", teacher=torch.arange(33) + torch.arange(3)[:, None])
    for at in (case.rows, spec.teacher):
        spec = case.spec("kl", teacher=at)
        seen = torch.full_like(at, -1)
        for chunk in plan_chunks(spec, 700, 500, budget):
            bases = torch.cat([base for _, base in chunk.rows])
            assert torch.equal(
                chunk.step, torch.cat([torch.full((len(b),), k) for k, b in chunk.rows])
            )
            seen[chunk.step, bases] = chunk.teacher[chunk.own]
            assert torch.equal(chunk.token, spec.token[chunk.step, bases])
            cost = 700 * len(chunk.own) + 500 * len(chunk.teacher)
            assert cost <= budget or len(bases.unique()) == 1
        assert torch.equal(seen, at)


@pytest.mark.parametrize("kind", KINDS)
def test_the_way_of_a_gpu_is_the_same(kind, monkeypatch):
    case = Case()
    expected = case.fused(kind)
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(fused, "_PARTS", 1 << 40)
    monkeypatch.setattr(fused, "_PART_ROWS", 4)
    for size in (1, 60_000, 1 << 30):
        found = case.fused(kind, buffer_bytes=size)
        assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-12)
        for a, b in zip(found[1], expected[1], strict=True):
            assert error(a, b) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_positions_without_a_label_change_nothing(kind):
    case, spoilt = Case(), Case()
    unused = set(range(STATES)) - set(case.rows[case.rows >= 0].tolist())
    assert unused
    with torch.no_grad():
        spoilt.states[list(unused)] = torch.nan
        for rows, h in zip(spoilt.rows, spoilt.hidden, strict=True):
            h[rows < 0] = torch.nan
    spoilt.token[spoilt.rows < 0] = 10**6
    before, after = case.fused(kind), spoilt.fused(kind)
    assert torch.equal(before[0], after[0])
    for a, b in zip(before[1], after[1], strict=True):
        assert torch.equal(a, b)
    for rows, gradient in zip(case.rows, after[1], strict=False):
        assert not gradient[rows < 0].any()
        assert gradient[rows >= 0].any(-1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_are_one(kind):
    """Positions split in two, both scaled by the counts of all: sums of losses and gradients."""
    case = Case()
    whole = case.fused(kind)
    first, second = case.rows.clone(), case.rows.clone()
    first[:, 17:], second[:, :17] = -1, -1
    parts = [case.fused(kind, teacher=rows) for rows in (first, second)]
    assert float(parts[0][0] + parts[1][0]) == pytest.approx(float(whole[0]), rel=1e-12)
    for a, b, both in zip(parts[0][1], parts[1][1], whole[1], strict=True):
        assert error(a + b, both) < 1e-12


def test_scale_is_the_weighted_mean_of_the_means():
    assert step_scale([4, 2, 0], [1.0, 0.5, 0.5]) == [1 / 2 / 4, 1 / 4 / 2, 1 / 4]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_learn_from_is_zero(kind):
    """EAGLE PR 99: a batch without a counted position divided by zero."""
    case = Case()
    loss, gradients, sums = case.fused(kind, teacher=torch.full_like(case.rows, -1))
    assert float(loss) == 0
    assert not sums.any()
    for gradient in gradients:
        assert not gradient.any()


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "ce"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_drafter_that_is_the_target_has_nothing_to_learn(kind, temperature):
    case = Case(steps=1)
    case.rows[0] = torch.arange(POSITIONS)
    case.norm.weight.data.fill_(1.0)
    with torch.no_grad():  # unit mean square: the norm changes nothing
        states = F.rms_norm(case.states[:, :WIDTH], (WIDTH,), eps=0.0)
        case.hidden[0].copy_(states[:POSITIONS])
        case.norm.eps = 0.0
    case.states, case.full_head = states, torch.zeros(VOCAB, WIDTH, dtype=torch.float64)
    case.full_head[case.ids] = case.weight.detach()
    loss, gradients, sums = case.fused(kind, temperature=temperature, mass=False)
    assert float(loss) == pytest.approx(0, abs=1e-12)
    assert float(sums[0, 1]) == pytest.approx(POSITIONS, rel=1e-12)
    for gradient in gradients:
        assert float(gradient.abs().max()) < 1e-12


def test_no_overlap_is_finite():
    """exp(-200) is 0 in fp32: -log sum min(p, q) is then large, its gradient 0, neither NaN."""
    case = Case(dtype=torch.float32, scale=200.0)
    for kind in KINDS:
        loss, gradients, sums = case.fused(kind)
        assert torch.isfinite(loss)
        assert torch.isfinite(sums).all()
        assert all(torch.isfinite(g).all() for g in gradients)


def test_gradients_are_spent_once():
    """Backward multiplies in place: a second one would be wrong, so it is refused."""
    case = Case()
    loss, _ = head_loss(case.spec("kl"), case.hidden, case.weight)
    (3 * loss).backward(retain_graph=True)
    once = case.fused("kl")[1]
    assert error(case.weight.grad, 3 * once[-2]) < 1e-12
    with pytest.raises(RuntimeError, match="one backward"):
        loss.backward()


def test_without_gradients_none_are_made():
    case = Case()
    with torch.no_grad():
        loss, _ = head_loss(case.spec("kl"), case.hidden, case.weight)
    assert not loss.requires_grad
    assert float(loss) == pytest.approx(float(case.fused("kl")[0]), rel=1e-12)
    case.weight.requires_grad_(False)  # a frozen head: the states still learn
    case.norm.requires_grad_(False)
    loss, _ = head_loss(case.spec("kl"), case.hidden, case.weight)
    loss.backward()
    assert case.weight.grad is None
    assert error(case.hidden[0].grad, Case().fused("kl")[1][0]) < 1e-12


# Memory

MEASURE = """
import json, resource, sys
import torch
from eagle3lib.training import bench_loss, fused
from eagle3lib.training.fused import HeadLoss, head_loss
torch.set_num_threads(1)

def run(vocab, positions, steps, width=8, buffer_bytes=32 << 20):
    hidden = [torch.randn(positions, width, requires_grad=True) for _ in range(steps)]
    weight = torch.randn(vocab, width, requires_grad=True)
    spec = HeadLoss(
        kind="hybrid", temperature=1.0, norm=torch.nn.RMSNorm(width), buffer_bytes=buffer_bytes,
        teacher=torch.arange(positions) + torch.arange(steps)[:, None], scale=[1.0] * steps,
        token=torch.zeros(steps, positions, dtype=torch.int64),
        states=torch.randn(positions + steps, width), draft_head=torch.randn(vocab, width),
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss, _ = head_loss(spec, hidden, weight)
    loss.backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024

run(1000, 10, 4)  # loads what is loaded once
print(json.dumps([run(151_936, 128, 4), sorted({m.split(".")[0] for m in sys.modules})]))
"""


def test_full_logits_never_exist():
    """The logits of 512 rows of 151,936 would be 311 MB; the buffers are 32."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True
    )
    extra_bytes, modules = json.loads(done.stdout)
    gradients, tiles = 2 * 151_936 * 8 * 4, 8 * 151_936 * 4
    assert extra_bytes < (32 << 20) + gradients + tiles + (8 << 20)
    assert not {"pydantic", "transformers"} & set(modules), "the GPU bench has torch alone"


# The bench


@pytest.mark.parametrize("kind", KINDS)
def test_bench_measures_and_checks(kind, capsys):
    """Its own plain reference agrees, so its errors on another machine mean something."""
    bench_loss.main(
        ["--draft-vocab", "200", "--positions", "20", "--steps", "3", "--hidden", "16",
         "--dtype", "float64", "--repeats", "1", "--kind", kind, "--check-positions", "9"]
    )  # fmt: skip
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert made["flop"] == 6 * 60 * 200 * 16 + 2 * 22 * 200 * 16
    assert made["seconds"] > 0
    assert max(made["gradient_errors"].values()) < 1e-10

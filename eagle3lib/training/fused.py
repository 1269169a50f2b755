"""The loss over the drafter's head, walked over in chunks: the full logits never exist.

A chunk holds some base positions and the rows that count of all steps there. Its teacher's logits
are made once for all steps (step k at p needs the target's state at p + 1 + k, so they overlap);
its gradients are made at once too, as in fused linear losses, so that nothing of a chunk outlives
it. Kept are the gradients of the hidden states, of the norm and, in fp32, of the head.

Memory beyond inputs and gradients: about ``buffer_bytes``, whatever the vocabulary, positions and
steps. Cost: 6 D H FLOP per row that counts, 2 D H per teacher row.

Kinds whose gradient jumps (``kinds.JUMPS``) get logits as exact as fp32 from bf16 too: the rounding
of the normed state alone would put too many tokens on the wrong side. A GPU multiplies the state's
upper and lower eight bits apart (2 D H more per row); on a CPU, whose bf16 products have no fp32
result, all products of these kinds are fp32. Imports torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from eagle3lib.target.transfer import upload
from eagle3lib.training.kinds import JUMPS, SCRATCHES, TeacherRows, drafter_rows, teacher_rows

# The head's gradient is read and written whole once a chunk: much smaller chunks are bound by that,
# larger ones gain little. A GPU run of 8,192 positions at D = 151,936 still fits in 1 GB with this,
# the 470 MB of the hidden states' gradients (H = 4,096, 7 steps, bf16) among them.
BUFFER_BYTES = 512 << 20
# Each part is some launches by the host, which take a small drafter longer than the arithmetic: a
# large GPU gets this share of its memory, 2.2 GB of an H200.
_GPU_SHARE = 64
# CUDA makes fp32 logits in so many parts of a buffer, but of no fewer rows than keep a matrix
# product from being bound by reading the head.
_PARTS, _PART_ROWS = 8, 256
# Eager elementwise work on the CPU stays in a core's cache.
_TILE_BYTES = 512 << 10
# The norm and its backward hold about so many fp32 copies of a row's state.
_STATE_COPIES = 8


@dataclass(frozen=True)
class Chunk:
    """Rows that count, by step, then base position. Index tensors live where the states do."""

    rows: list[tuple[int, Tensor]]  # (step, base positions) of each step that has some
    teacher: Tensor  # [U]: rows of the target's states
    own: Tensor  # [R]: row -> place in ``teacher``
    token: Tensor  # [R]: draft id of the target's greedy token
    step: Tensor  # [R]

    def to(self, device: torch.device) -> Chunk:
        rows = [(step, upload(base, device)) for step, base in self.rows]
        rest = (self.teacher, self.own, self.token, self.step)
        return Chunk(rows, *(upload(index, device) for index in rest))


@dataclass(frozen=True)
class HeadLoss:
    """All of a loss but what it is differentiated by."""

    kind: str
    temperature: float
    teacher: Tensor  # [T, P], CPU: row of ``states`` that a step's label is made of, -1: no loss
    token: Tensor  # [T, P], CPU: draft id of the target's greedy token there
    scale: Sequence[float]  # [T]: what one position of a step counts in the loss
    norm: nn.Module  # the drafter's norm before its head
    states: Tensor  # [N, Ht]: the target's, after its norm
    draft_head: Tensor  # [D, Ht]: rows of the target's head
    full_logsumexp: Tensor | None = None  # [N], of the logits / T of the target's whole head
    buffer_bytes: int = BUFFER_BYTES


def buffer_bytes_on(device: torch.device) -> int:
    """What the loss may use there for a chunk."""
    if device.type != "cuda":
        return BUFFER_BYTES
    return max(BUFFER_BYTES, torch.cuda.get_device_properties(device).total_memory // _GPU_SHARE)


def head_loss(spec: HeadLoss, hidden: Sequence[Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, sums [T, 3] over the rows of a step: loss, alpha, right; fp64, without gradients).

    ``hidden``: T times [P, H], before the norm; ``weight`` [D, H]. The loss is the sum over steps
    of scale times the sum of position losses. Matrix products run in the dtype of autocast where it
    is on, else in that of ``weight``; everything elementwise in fp32 (fp64 stays fp64).
    """
    norm = [p for p in spec.norm.parameters() if p.requires_grad]
    made: tuple[Tensor, Tensor] = _HeadLoss.apply(
        spec, torch.is_grad_enabled(), len(norm), weight, *norm, *hidden
    )
    return made


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, spec: HeadLoss, wanted: bool, norms: int, weight: Tensor, *rest: Tensor
    ) -> tuple[Tensor, Tensor]:
        compute = _compute_dtype(weight)
        with torch.autocast(weight.device.type, enabled=False):
            walk = _Walk(spec, compute, wanted, weight, rest[:norms], rest[norms:])
            sums = walk.run()
        ctx.gradients = walk.gradients() if wanted else None
        scale = upload(torch.tensor(spec.scale, dtype=torch.float64), weight.device)
        ctx.mark_non_differentiable(sums)
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        return (sums[:, 0] * scale).sum().to(wide), sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss are spent: it has one backward")
        gradients, ctx.gradients = ctx.gradients, None
        return (None, None, None, *(g if g is None else g.mul_(grad) for g in gradients))


def _compute_dtype(weight: Tensor) -> torch.dtype:
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


class _Walk:
    """One pass over all chunks, with the buffers that they share."""

    def __init__(
        self,
        spec: HeadLoss,
        compute: torch.dtype,
        wanted: bool,
        weight: Tensor,
        norm: Sequence[Tensor],
        hidden: Sequence[Tensor],
    ):
        self.spec, self.wanted = spec, wanted
        self.norm, self.hidden, self.weight = norm, hidden, weight
        self.on_cpu = _on_cpu(weight)
        self.exact = spec.kind in JUMPS and compute.itemsize < 4
        self.compute = torch.float32 if self.exact and self.on_cpu else compute
        self.wide = torch.float64 if compute == torch.float64 else torch.float32
        self.head = weight.detach().to(self.compute)
        self.teacher_head = spec.draft_head.to(self.compute)
        self.chunks = [c.to(weight.device) for c in plan_chunks(spec, *self._sizes())]
        self.scale = upload(torch.tensor(spec.scale, dtype=self.wide), weight.device)
        self.of_norm = [torch.zeros_like(p, dtype=self.wide) for p in norm]
        self.of_hidden = [torch.zeros_like(h) if wanted else None for h in hidden]
        self.of_head = None
        if wanted and weight.requires_grad:
            # [H, D] on the CPU: a product of that layout runs half as fast again in bf16.
            shape = tuple(reversed(weight.shape)) if self.on_cpu else tuple(weight.shape)
            self.of_head = torch.zeros(shape, dtype=self.wide, device=weight.device)
        self._make_buffers()

    def _sizes(self) -> tuple[int, int, int]:
        """Bytes of a row, of a teacher row, and of what a chunk may use of ``buffer_bytes``."""
        size, (vocab, width) = self.compute.itemsize, self.weight.shape
        row = vocab * size + _STATE_COPIES * width * self.wide.itemsize
        part = 0 if self.on_cpu else self._part_rows() * vocab * self.wide.itemsize
        return row, vocab * self.wide.itemsize, self.spec.buffer_bytes - part

    def _part_rows(self) -> int:
        row = self.weight.shape[0] * self.wide.itemsize
        return max(_PART_ROWS, self.spec.buffer_bytes // (_PARTS * row))

    def _make_buffers(self) -> None:
        """The CPU's are made once: the kernel would hand out, and clear, fresh pages for each."""
        if not self.on_cpu:
            return
        vocab = self.weight.shape[0]
        rows = max((len(c.own) for c in self.chunks), default=0)
        kept = max((len(c.teacher) for c in self.chunks), default=0)
        self.logits = self.head.new_empty(rows, vocab)
        self.table = torch.empty(kept, vocab, dtype=self.wide)
        tile = min(rows, max(1, _TILE_BYTES // (self.wide.itemsize * vocab)))
        self.scratch = [torch.empty(tile, vocab, dtype=self.wide) for _ in range(SCRATCHES)]
        if self.of_head is not None:
            self.product = self.head.new_empty(self.of_head.shape)

    def run(self) -> Tensor:
        """Sums [T, 3] over rows of (loss, alpha, right), fp64; the gradients as a side effect."""
        steps, device = len(self.hidden), self.weight.device
        sums = torch.zeros(steps, 3, dtype=torch.float64, device=device)
        for chunk in self.chunks:
            values = self._chunk(chunk)
            which = chunk.step == torch.arange(steps, device=device)[:, None]
            sums += which.to(torch.float64) @ values.to(torch.float64)
        return sums

    def gradients(self) -> list[Tensor | None]:
        """Of the head, the norm's weights and the hidden states, in the dtypes of these."""
        of_head = self.of_head
        if of_head is not None:
            of_head = of_head.T.contiguous() if self.on_cpu else of_head
            of_head = of_head.to(self.weight.dtype)
        of_norm = [g.to(p.dtype) for g, p in zip(self.of_norm, self.norm, strict=True)]
        return [of_head, *of_norm, *self.of_hidden]

    def _chunk(self, chunk: Chunk) -> Tensor:
        """[R, 3]: loss, alpha, right."""
        picked = [self.hidden[step].detach().index_select(0, base) for step, base in chunk.rows]
        leaf = torch.cat(picked).requires_grad_(self.wanted)
        with torch.set_grad_enabled(self.wanted):
            normed = self._normed(leaf)
        x = normed.detach()
        gradient, factor, values = self._rows(chunk, x, self._teacher(chunk))
        if self.wanted:
            factor = (factor * self.scale[chunk.step])[:, None]
            of_normed = torch.mm(gradient, self.head) * factor
            found = torch.autograd.grad(normed, (leaf, *self.norm), of_normed.to(normed.dtype))
            self._keep(chunk, found)
            if self.of_head is not None:
                self._add_to_head(gradient, (x * factor).to(self.compute))
        return values

    def _normed(self, leaf: Tensor) -> Tensor:
        if not self.exact:
            return self.spec.norm(leaf)
        wide = {name: p.to(self.wide) for name, p in self.spec.norm.named_parameters()}
        return functional_call(self.spec.norm, wide, (leaf.to(self.wide),))

    def _teacher(self, chunk: Chunk) -> TeacherRows:
        spec, count = self.spec, len(chunk.teacher)
        states = spec.states.index_select(0, chunk.teacher).to(self.compute)
        whole = spec.full_logsumexp
        whole = None if whole is None else whole.index_select(0, chunk.teacher)
        if not self.on_cpu:
            logits = _product(states, self.teacher_head)
            make = _compiled(teacher_rows)
            made: TeacherRows = make(spec.kind, logits, whole, spec.temperature, logits)
            return made
        # The drafter's logits come later: the buffer is free, and has a row for each of these.
        logits = torch.mm(states, self.teacher_head.T, out=self.logits[:count])
        parts = []
        for a, b, scratch in self._tiles(count):
            sums = None if whole is None else whole[a:b]
            table = self.table[a:b]
            parts.append(
                teacher_rows(spec.kind, logits[a:b], sums, spec.temperature, table, scratch)
            )
        _, log_mass, negentropy = zip(*parts, strict=True)
        return TeacherRows(self.table[:count], torch.cat(log_mass), torch.cat(negentropy))

    def _rows(self, chunk: Chunk, x: Tensor, teacher: TeacherRows) -> tuple[Tensor, Tensor, Tensor]:
        """(gradient by the logits [R, D] but for its factor [R], that factor, values [R, 3])."""
        spec, count, found = self.spec, len(x), []
        upper = x.to(self.compute)
        if self.on_cpu:
            gradient = torch.mm(upper, self.head.T, out=self.logits[:count])
            for a, b, scratch in self._tiles(count):
                rows = gradient[a:b]  # takes the place of the logits
                labels = (teacher, chunk.own[a:b], chunk.token[a:b])
                found.append(
                    drafter_rows(spec.kind, rows, *labels, spec.temperature, rows, scratch)
                )
        else:
            gradient, work = upper.new_empty(count, len(self.head)), _compiled(drafter_rows)
            for a, b in _spans(count, self._part_rows()):
                logits = _product(upper[a:b], self.head)
                if self.exact:
                    lower = (x[a:b] - upper[a:b]).to(self.compute)
                    _add_product(logits, lower.T, self.head.T)
                labels = (teacher, chunk.own[a:b], chunk.token[a:b])
                found.append(work(spec.kind, logits, *labels, spec.temperature, gradient[a:b]))
        loss, factor, alpha, right = (torch.cat(part) for part in zip(*found, strict=True))
        return gradient, factor, torch.stack((loss, alpha, right.to(loss.dtype)), dim=1)

    def _tiles(self, count: int) -> Iterator[tuple[int, int, list[Tensor]]]:
        for a, b in _spans(count, len(self.scratch[0])):
            yield a, b, [tensor[: b - a] for tensor in self.scratch]

    def _keep(self, chunk: Chunk, found: Sequence[Tensor]) -> None:
        of_leaf, *of_norm = found
        sizes = [len(base) for _, base in chunk.rows]
        for (step, base), part in zip(chunk.rows, of_leaf.split(sizes), strict=True):
            self.of_hidden[step].index_copy_(0, base, part)
        for total, part in zip(self.of_norm, of_norm, strict=True):
            total.add_(part)

    def _add_to_head(self, gradient: Tensor, x: Tensor) -> None:
        if not self.on_cpu:
            _add_product(self.of_head, gradient, x)
        elif self.compute == self.wide:
            self.of_head.addmm_(x.T, gradient)
        else:
            self.of_head.add_(torch.mm(x.T.contiguous(), gradient, out=self.product))


def _on_cpu(weight: Tensor) -> bool:
    return weight.device.type == "cpu"


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T [R, D] with an fp32 result of bf16 factors: logits rounded to eight bits would
    be wrong by some percent (speculators PR 788)."""
    if x.dtype.itemsize < 4:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return torch.mm(x, weight.T)


def _add_product(total: Tensor, gradient: Tensor, x: Tensor) -> None:
    if x.dtype.itemsize < 4:
        torch.addmm(total, gradient.T, x, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(gradient.T, x)


def _spans(count: int, size: int) -> list[tuple[int, int]]:
    return [(a, min(a + size, count)) for a in range(0, count, size)]


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Fused elementwise passes; row counts differ from chunk to chunk, so they are dynamic."""
    fast = torch.compile(function)

    def call(*args: Any) -> Any:
        for tensor in torch.utils._pytree.tree_leaves(args):
            if isinstance(tensor, Tensor):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return fast(*args)

    return call


def plan_chunks(
    spec: HeadLoss, row_bytes: int, teacher_bytes: int, buffer_bytes: int
) -> list[Chunk]:
    """Cut base positions into chunks that cost at most ``buffer_bytes``, but hold one at least.

    On the CPU throughout: sizes must be known without waiting for a GPU.
    """
    steps, positions = spec.teacher.shape
    counted = spec.teacher >= 0
    if not counted.any():
        return []
    base = torch.arange(positions).expand(steps, -1)
    first_use = torch.full((int(spec.teacher.max()) + 1,), positions)
    first_use.scatter_reduce_(0, spec.teacher[counted], base[counted], "amin")
    fresh = torch.bincount(first_use, minlength=positions)[:positions]
    spent = (counted.sum(0) * row_bytes + fresh * teacher_bytes).cumsum(0)
    # A chunk may end a position late, and makes up to T - 1 rows of the chunk before again.
    slack = steps * row_bytes + 2 * steps * teacher_bytes
    index = (spent - 1).clamp(min=0) // max(1, buffer_bytes - slack)
    ends = index.unique_consecutive(return_counts=True)[1].cumsum(0).tolist()
    spans = zip([0, *ends[:-1]], ends, strict=True)
    return [_cut(spec, a, b) for a, b in spans if bool(counted[:, a:b].any())]


def _cut(spec: HeadLoss, start: int, stop: int) -> Chunk:
    teacher = spec.teacher[:, start:stop]
    step, base = (teacher >= 0).nonzero(as_tuple=True)
    needed, own = teacher[step, base].unique(return_inverse=True)
    rows = [(k, base[step == k] + start) for k in range(len(teacher)) if bool((step == k).any())]
    return Chunk(rows, needed, own, spec.token[:, start:stop][step, base], step)

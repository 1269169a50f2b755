"""Will a training fit? An estimate in bytes before it starts, so that it is refused with the
largest batch that fits and not killed an hour later.

    fixed       weights (fp32, and their copy in the dtype of the products), gradients, optimizer,
                the target's head and embedding
    a token     states (two batches: one used, one read ahead), step-0 keys
    a position  activations of every step, gradients of its hidden states
    loss        one chunk of logits (``fused.py``), whatever the vocabulary
    attention   on a CPU alone: scores of every step, padded to the longest conversation

A part holds no less than one stretch of base positions (``data.py``) and the states of all tokens
before it: what does not fit then is the longest conversation, and its largest length is named.

Counted from the code of the unroll and of the loss. A GPU's compiled pieces keep about half of what
eager ones keep: 8 x 4,096 tokens of an 8B Llama's shape, 40 % prompt, 7 steps, were estimated at 50
GB and peaked at 39 GB on one (with its target's head left out, as that run had none).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from eagle3lib.drafter.config import DrafterConfig
from eagle3lib.drafter.model import Drafter
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.params import TrainParams
from eagle3lib.training.data import STRETCH, Entries, Stretch, bases_of, share_out
from eagle3lib.training.fused import BUFFER_BYTES, buffer_bytes_on

_SLACK = 1.15  # allocator, libraries, what is made and freed within one operation


@dataclass(frozen=True)
class Need:
    """Bytes of one process."""

    fixed_bytes: int
    batch_bytes: int  # of its largest part
    update_tokens: int  # tokens of an update whose parts are all as large
    longest_tokens: int = 0  # the longest conversation
    # Bytes of the largest last stretch of conversations cut to so many tokens: one part holds it.
    stretch_bytes: Callable[[int], int] = lambda tokens: 0

    @property
    def total_bytes(self) -> int:
        return int(_SLACK * (self.fixed_bytes + self.batch_bytes))


def estimate(
    drafter: Drafter,
    cfg: TrainParams,
    updates: list[Entries],
    world: int,
    head_numbers: int,
    device: torch.device,
) -> Need:
    """Bytes that one process needs; ``head_numbers``: numbers of the target's tensors it holds."""
    on_gpu, buffer = device.type == "cuda", buffer_bytes_on(device)
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in drafter.parameters() if not p.requires_grad)
    size = 2 if cfg.precision == "bfloat16" else 4
    copied = size * (trained + frozen) if size == 2 else 0
    moments = 8  # AdamW: two fp32 numbers; Muon has one, of most weights
    kept = (4 + 4 + moments) * trained // (world if cfg.sharding == "fsdp" else 1)
    fixed = kept + 4 * frozen + copied + 4 * head_numbers
    parts = world * cfg.accumulate
    shares = (share for update in updates for share in share_out(update, parts, cfg.steps))
    sizes = [(part_bytes(drafter.config, cfg, share, on_gpu, buffer), share) for share in shares]
    batch, largest = max(sizes, key=lambda found: found[0])
    tokens = sum(e.tokens for e in largest)
    if cfg.states == "live":  # the target's weights are there already
        forward = drafter.config.target_hidden_size * 12 + drafter.config.intermediate_size * 4
        batch += 4 * forward * min(tokens, cfg.target_batch_tokens)
    lengths = {(e.tokens, bases_of(e).count) for update in updates for e in update}
    longest = max(tokens for tokens, _ in lengths)

    def stretch_bytes(most: int) -> int:
        cut = ((min(tokens, most), bases - max(0, tokens - most)) for tokens, bases in lengths)
        lasts = (_last_stretch(tokens, bases) for tokens, bases in cut if bases > 0)
        parts = (part_bytes(drafter.config, cfg, [last], on_gpu, buffer) for last in lasts)
        return max(parts, default=0)

    return Need(fixed, batch, tokens * parts, longest, stretch_bytes)


def _last_stretch(tokens: int, bases: int) -> Stretch:
    """Of a conversation with so many base positions, cut as finely as any is."""
    bases = min(STRETCH, bases)
    return Stretch("", "", "", "", 0, tokens, tokens - 1 - bases, None, bases=bases)


def part_bytes(
    c: DrafterConfig,
    cfg: TrainParams,
    part: Entries,
    on_gpu: bool = False,
    buffer_bytes: int = BUFFER_BYTES,
) -> int:
    """Bytes of the forward and backward of one part of an update."""
    if not part:
        return 0
    size = 2 if cfg.precision == "bfloat16" else 4
    tokens = sum(e.tokens for e in part)
    spans = [bases_of(e).count for e in part]
    positions, longest = sum(spans), max(e.tokens for e in part)
    queries = c.num_attention_heads * c.head_dim
    keys = 2 * c.num_key_value_heads * c.head_dim
    width = len(c.slots) * c.target_hidden_size
    token = 2 * 4 * (width + c.target_hidden_size) + size * (8 * c.hidden_size + 4 * keys)
    mlp = 0 if cfg.recompute else 4 * c.intermediate_size
    if on_gpu:
        step = size * (8 * c.hidden_size + 4 * queries + 2 * keys + mlp)
        scores = 0
    else:  # eager norms keep their input in fp32, attention its scores
        step = size * (14 * c.hidden_size + 6 * queries + 4 * keys + mlp) + 24 * c.hidden_size
        scores = len(part) * c.num_attention_heads * max(spans) * longest * (4 + 4 + size)
    rows = positions * cfg.steps
    logits = rows * (size * c.draft_vocab_size + 32 * c.hidden_size)
    logits += 4 * positions * c.draft_vocab_size  # the teacher's, of all steps at once
    loss = min(buffer_bytes, logits) + rows * size * c.hidden_size
    return tokens * token + rows * step + loss + cfg.steps * scores


def check_memory(need: Need, available_bytes: int, cfg: TrainParams, device: torch.device) -> None:
    """Raise ``UserError`` where the estimate is larger than what is free, with what would fit."""
    if need.total_bytes <= available_bytes:
        return
    room = available_bytes / _SLACK - need.fixed_bytes
    if room <= 0:
        fits = "no batch: weights and optimizer alone do not; shard them over more processes"
    elif need.stretch_bytes(need.longest_tokens) > room:
        # However many parts: one must hold the states of the longest conversation.
        length = bisect_right(range(need.longest_tokens), room, key=need.stretch_bytes) - 1
        fits = f"max_tokens_per_row: {length:,}, the longest here has {need.longest_tokens:,}"
        if not need.stretch_bytes(length):
            fits = "no batch: beside weights and optimizer not one position of a conversation does"
    else:
        # Attention grows faster than the batch, so a part cut by this factor surely fits.
        factor = need.batch_bytes / room
        parts, tokens = -int(-cfg.accumulate * factor // 1), int(need.update_tokens / factor)
        fits = f"accumulate: {parts} (same result), or batch_tokens: {tokens:,}"
    raise UserError(
        f"a process of this training needs about {need.total_bytes / 2**30:.2f} GiB, and "
        f"{available_bytes / 2**30:.2f} GiB are free on {device}",
        expected=f"what fits is {fits}",
        next="set it in the profile, or free memory; recompute: true saves MLP activations",
    )


def available_bytes(device: torch.device, processes: int) -> int:
    """Free memory for one process: of its GPU, or its share of this machine's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return psutil.virtual_memory().available // processes

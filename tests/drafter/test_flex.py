"""The GPU's attention is the reference's: forward everywhere, gradients where there is a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from eagle3lib.drafter import flex
from eagle3lib.drafter.attention import Attention, chain_attention
from eagle3lib.drafter.rows import PackedRows

_STEPS = 4
_SHAPES = {"grouped heads": (8, 2, 32, 32), "latent heads": (4, 4, 48, 32)}  # heads, kv, dk, dv


def _rows() -> PackedRows:
    """Blocks of 128 that hold parts of several conversations, and one that no query looks at."""
    lengths, prompts = (300, 37, 513, 9, 2), (5, 30, 200, 3, 1)
    return PackedRows.pack([torch.zeros(n, dtype=torch.int64) for n in lengths], list(prompts))


def _run(attention: Attention, rows: PackedRows, shape: str, device: str) -> list[Tensor]:
    """Outputs of every step, then the gradients of all that went in."""
    heads, kv, dk, dv = _SHAPES[shape]
    generator = torch.Generator().manual_seed(0)

    def made(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device).requires_grad_(device != "cpu")

    tokens, base = len(rows.token_ids), len(rows.base)
    keys, values = made(tokens, kv, dk), made(tokens, kv, dv)
    steps = [(made(base, heads, dk), made(base, kv, dk), made(base, kv, dv)) for _ in range(_STEPS)]
    weights = [made(base, heads * dv).detach() for _ in range(_STEPS)]
    attend = attention(dk**-0.5, rows.to(device), keys, values)
    outputs = [attend(*one, step) for step, one in enumerate(steps)]
    if device == "cpu":  # flex_attention has no backward there
        return [out.detach() for out in outputs]
    torch.stack([(o * w).sum() for o, w in zip(outputs, weights, strict=True)]).sum().backward()
    inputs = [keys, values, *(t for one in steps for t in one)]
    return [o.detach() for o in outputs] + [t.grad for t in inputs if t.grad is not None]


@pytest.mark.parametrize("shape", _SHAPES)
def test_flex_is_the_reference_forward(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_flex", lambda: flex_attention)  # compiling takes longer than this
    monkeypatch.setattr(flex, "_merge", lambda: flex._merge_chain)
    with torch.no_grad():
        expected = _run(chain_attention, _rows(), shape, "cpu")
        found = _run(flex.flex_chain_attention, _rows(), shape, "cpu")
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", _SHAPES)
def test_flex_is_the_reference_with_gradients(shape: str) -> None:
    expected = _run(chain_attention, _rows(), shape, "cuda")
    found = _run(flex.flex_chain_attention, _rows(), shape, "cuda")
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)

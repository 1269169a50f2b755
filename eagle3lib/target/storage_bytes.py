"""What hidden states take on disk in each format. Free of torch: a plan asks before it loads any.

    full     numbers of the capture's dtype
    fp8      e4m3, one fp32 scale a state and token
    compact  integers in groups of 32 numbers that share a bf16 scale: 6 bits for the slots, 8 for
             the last state

In every format the last state is stored only where it can teach (``states.first_taught``), so its
share of the bytes is the share of answer tokens.
"""

from __future__ import annotations

FORMATS = ("full", "fp8", "compact")
FP8_SCALE_BYTES = 4
# A slot is an input of the drafter, which learns to see through noise; the last state makes the
# labels, so its error is an error of what is taught.
SLOT_BITS, LAST_BITS = 6, 8
GROUP, GROUP_SCALE_BYTES = 32, 2


def bytes_per_token(
    hidden: int,
    state_format: str,
    *,
    slots: int = 3,
    answer_share: float = 1.0,
    number_bytes: int = 2,
) -> float:
    """Mean bytes of a token's states; ``answer_share`` of the tokens are answer tokens.

    Full and bf16 at a share of 1: ``(slots + 1) * hidden * 2``, the layout of other tools, which
    keep every last state. Raises ``ValueError`` for an unknown format.
    """
    if state_format == "full":
        return (slots + answer_share) * hidden * number_bytes
    if state_format == "fp8":
        return (slots + answer_share) * (hidden + FP8_SCALE_BYTES)
    if state_format == "compact":
        scales = hidden / GROUP * GROUP_SCALE_BYTES
        slot, last = (hidden * bits / 8 + scales for bits in (SLOT_BITS, LAST_BITS))
        return slots * slot + answer_share * last
    raise ValueError(f"no storage format {state_format!r}")

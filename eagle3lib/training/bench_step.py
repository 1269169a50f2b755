"""How fast a training update is on this machine, as a share of what its matrix units can do.

    python -m eagle3lib.training.bench_step --rows 4 --tokens 4096       # a drafter for an 8B Llama

Random states of the given shape go through the very ``unroll``, loss and optimizer that training
uses. The matrix peak is measured in the same process, before and after. The last line of the output
is one JSON object.

Counting rule: only the multiply-adds that the method needs, two operations each.

    part                        positions                        forward + backward, per position
    fc                          all tokens                       4 * slots*Ht*H   (states need no gradient)
    keys, values                all tokens; base at steps >= 1   6 * 2H * (kv*dk + kv*dv)
    queries, output, MLP        base, every step                 6 * (2H*heads*dk + heads*dv*H + 3*H*I)
    head                        positions with a loss            6 * H * D
    teacher                     tokens that some step needs      2 * Ht * D
    attention                   pairs of query and visible key   6 * heads * (dk + dv)

What is not counted: recomputation (flash attention's second product of queries and keys), casts,
norms, rotary, softmax, the optimizer, and work on padding.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from eagle3lib.drafter.align import label_exists, teacher_index
from eagle3lib.drafter.config import DrafterConfig
from eagle3lib.drafter.model import Drafter, PackedRows

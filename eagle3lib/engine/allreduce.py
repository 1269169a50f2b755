"""Two ranks sum a tensor: run by torchrun from :mod:`eagle3lib.engine.preflight`, torch alone.

torchrun --standalone --nproc-per-node 2 allreduce.py nccl|gloo
"""

from __future__ import annotations

import os
import sys


def main() -> int:
    import torch
    import torch.distributed as dist

    backend, rank = sys.argv[1], int(os.environ["RANK"])
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    # 16 MiB: small messages take another path than those of a model's layers.
    tensor = torch.full((4 * 2**20,), float(rank + 1), device=device)
    for _ in range(2):
        dist.all_reduce(tensor)
    right = 6.0  # (1 + 2), and both ranks' 3 once more
    wrong = bool((tensor != right).any())
    dist.destroy_process_group()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())

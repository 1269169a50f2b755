"""Run by vLLM's own Python: which temperature does a drafted token get where 0.7 is asked for?

Prints one JSON object on its last line: ``alone``, as vLLM comes, and ``with_plugins``, as a server
started in this environment has it; both null on a GPU, where another kernel runs.
"""

from __future__ import annotations

import json

ASKED = 0.7


def read() -> float:
    import torch
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    junk = torch.full((3,), -1.0)  # what the allocator hands out again, should nobody write it
    del junk
    cumulated = torch.tensor([3], dtype=torch.int32)
    return float(expand_batch_to_tokens(torch.tensor([ASKED]), cumulated, 3, 0, 1)[0])


def ask() -> dict[str, float | None]:
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    if not current_platform.is_cpu():
        return {"alone": None, "with_plugins": None}
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    alone = read()
    load_general_plugins()
    current_platform.register_triton_kernel_overrides()
    return {"alone": alone, "with_plugins": read()}


if __name__ == "__main__":
    print(json.dumps(ask()))

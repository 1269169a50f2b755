"""What each phase needs: bytes of hidden states in each storage format, memory, disk, hours."""

from __future__ import annotations

from typing import Any

from eagle3lib.lab.params import PlanParams
from eagle3lib.plan.quantisation import quantisation_of
from eagle3lib.plan.shape import Shape
from eagle3lib.plan.step import Setting
from eagle3lib.target.storage_bytes import bytes_per_token

FORMATS = ("bf16", "fp8", "compact")
# What an engine holds beside weights and cache on a GPU: context, graphs, activations, workspace.
_GPU_RUNTIME_BYTES, _CPU_RUNTIME_BYTES = 4e9, 2**30
# vLLM's gpu_memory_utilization; its CPU server holds the weights twice while it loads.
_GPU_USABLE, _CPU_LOAD_COPIES = 0.9, 2
# Adam in fp32: weight, gradient and two moments, four bytes each.
_TRAIN_BYTES_PER_PARAMETER = 16


def state_bytes(hidden: int, storage: str, answer_share: float = 1.0) -> float:
    """Bytes of one token's hidden states; ``answer_share`` of the tokens are trained on.

    bf16 at a share of 1: ``4 * H * 2``, every last state kept as other tools do (Kimi-K2.5: 57,344;
    Llama-3.1-8B at 2,048 tokens: 67 MB a conversation). stream: 0. See ``target/storage_bytes.py``.
    """
    if storage == "stream":
        return 0.0
    state_format = "full" if storage == "bf16" else storage
    return bytes_per_token(hidden, state_format, answer_share=answer_share)


def answer_share(cfg: PlanParams) -> float:
    return 1 / (1 + cfg.prompt_tokens_per_answer_token)


def captured_tokens(cfg: PlanParams) -> int:
    return int(cfg.answer_tokens * (1 + cfg.prompt_tokens_per_answer_token))


def storage_table(cfg: PlanParams, shape: Shape) -> list[dict[str, Any]]:
    """Each format's bytes a token and for the whole data set."""
    lines = []
    for name in FORMATS:
        size = state_bytes(shape.hidden, name, answer_share(cfg))
        lines.append(
            {
                "storage": name,
                "bytes_per_token": round(size),
                "total_bytes": round(size * captured_tokens(cfg)),
                "of_bf16": round(size / state_bytes(shape.hidden, "bf16"), 3),
            }
        )
    return lines


def training_flops_per_token(setting: Setting, steps: int, share: float, context: int) -> float:
    """6 FLOPs a trained weight and use, the layer used once a training-time-test step; head and
    teacher only at the ``share`` of tokens that are trained on; attention over the context."""
    d, shape = setting.drafter, setting.shape
    trained = d.fuse_parameters + steps * (d.layer_parameters + share * d.head_parameters)
    attention = 12 * steps * shape.heads * shape.head_dim * context / 2
    return 6 * trained + 2 * share * d.head_parameters + attention


def throughputs(cfg: PlanParams, setting: Setting) -> dict[str, float]:
    """Tokens per second of generation, capture and training, measured ones first.

    Generation decodes at the largest batch of the plan that fits; capture is a prefill without the
    head; training runs on as many devices as all copies of the target do. Measured speeds are
    those of the whole machine.
    """
    reached = setting.device.flops_per_s * setting.device.compute_share * setting.devices
    batch = max(1, min(cfg.batches()[-1], most_sequences(cfg, setting)))
    prefill = 2 * (setting.shape.product_parameters - setting.shape.vocab * setting.shape.hidden)
    flops = training_flops_per_token(setting, cfg.steps, answer_share(cfg), cfg.context_tokens)
    return {
        "generate": cfg.generate_tokens_per_s or cfg.copies * batch / setting.step_s(batch),
        "capture": cfg.capture_tokens_per_s or cfg.copies * reached / prefill,
        "train": cfg.train_tokens_per_s or cfg.copies * reached / flops,
    }


def usable_bytes(setting: Setting) -> float:
    """Memory of one device that a phase may fill."""
    share = 1.0 if setting.device.is_cpu else _GPU_USABLE
    return share * setting.device.memory_bytes


def cache_bytes_per_token(setting: Setting) -> float:
    """Key-value cache of a token on one device."""
    return setting.shape.kv_bytes_per_token() / setting.kv_shares()


def serve_bytes(cfg: PlanParams, setting: Setting, sequences: int) -> float:
    """Memory of one device that serves ``sequences`` conversations of the greatest length."""
    cpu = setting.device.is_cpu
    weights = setting.weights.total / setting.devices * (_CPU_LOAD_COPIES if cpu else 1)
    cache = sequences * cfg.max_model_len * cache_bytes_per_token(setting)
    return weights + cache + (_CPU_RUNTIME_BYTES if cpu else _GPU_RUNTIME_BYTES)


def most_sequences(cfg: PlanParams, setting: Setting) -> int:
    """Conversations of the greatest length that fit at once; below 1 the target does not fit."""
    free = usable_bytes(setting) - serve_bytes(cfg, setting, 0)
    return int(free // (cfg.max_model_len * cache_bytes_per_token(setting)))


def benchmark_bytes(cfg: PlanParams, setting: Setting, sequences: int) -> float:
    """Memory of one device that serves the target with its drafter: on a CPU both arms at once, on
    GPUs, which a second copy would not fit, one arm at a time."""
    drafter = 2 * setting.drafter.trained_parameters / setting.devices
    return (2 if setting.device.is_cpu else 1) * serve_bytes(cfg, setting, sequences) + drafter


def train_bytes(cfg: PlanParams, setting: Setting) -> float:
    """Memory of one device that trains the drafter on one conversation of the greatest length:
    optimizer state, the target's embedding and head, and every step's logits and activations.
    Each process that streams its states holds the whole target."""
    shape, drafter = setting.shape, setting.drafter
    size = quantisation_of(shape).element_bytes
    frozen = (1 if shape.tied else 2) * shape.vocab * shape.hidden * size
    frozen = setting.weights.total if cfg.storage == "stream" else frozen
    logits = 2 * 4 * min(cfg.draft_vocab_size, shape.vocab)  # fp32 logits and their gradient
    layer = 2 * (12 * shape.hidden + 3 * drafter.mlp_size)
    activations = cfg.max_model_len * cfg.steps * (logits + layer)
    return _TRAIN_BYTES_PER_PARAMETER * drafter.trained_parameters + frozen + activations


def phases_table(cfg: PlanParams, setting: Setting) -> list[dict[str, Any]]:
    """Every costly phase: tokens, tokens per second, hours, memory of one device, disk."""
    speed, tokens = throughputs(cfg, setting), captured_tokens(cfg)
    serving = serve_bytes(cfg, setting, cfg.batches()[-1])
    benchmark = benchmark_bytes(cfg, setting, cfg.batches()[-1])
    states = tokens * state_bytes(setting.shape.hidden, cfg.storage, answer_share(cfg))
    passes = cfg.epochs if cfg.storage == "stream" else 1  # what isn't kept is made again
    checkpoint = 12 * setting.drafter.trained_parameters  # weights and both moments, fp32
    lines = [
        ("generate answers", cfg.answer_tokens, speed["generate"], serving, 8 * tokens),
        ("capture states", tokens * passes, speed["capture"], serve_bytes(cfg, setting, 1), states),
        ("train the drafter", tokens * cfg.epochs, speed["train"], train_bytes(cfg, setting),
         2 * checkpoint),
        ("serve both arms", 0, 0.0, benchmark, 2 * setting.drafter.trained_parameters),
    ]  # fmt: skip
    return [
        {
            "phase": name,
            "tokens": count,
            "tokens_per_s": round(per_s, 1),
            "hours": round(count / per_s / 3600, 4) if per_s else 0.0,
            "memory_bytes": round(memory),
            "disk_bytes": round(disk),
        }
        for name, count, per_s, memory, disk in lines
    ]

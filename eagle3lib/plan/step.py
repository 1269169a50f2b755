"""What a decode step is made of, and from it the cost of a verify round in plain steps.

One step of ``b`` sequences with ``t`` tokens each (1 in a plain step, K + 1 in a verify step):

    read      weights that every step reads, the experts that b*t tokens touch, the sequences' keys
              and values; over the bandwidth of all devices
    compute   2 FLOPs a weight and token, and attention over the context
    wait      two all-reduces a layer: 2 * layers * (latency + 2 (g-1)/g * b*t*H*2 bytes / link)
    layers    a fixed time a layer: its kernels start one after another, however little they read
    host      what the engine does between two steps

    step  = max(read, compute) + wait + layers + host
    round = step(K + 1 tokens) + K draft steps;   cost = round / step(1 token)

A drafter pays where its acceptance length is above ``cost``: speed-up = acceptance length / cost
(measure/accounting.py has the same arithmetic for measured arms). Distinct experts among E, k a
token, for T independent tokens: E * (1 - (1 - k/E)^T). Real routing is more alike than that, so
large batches read a little less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from eagle3lib.plan.gpus import Device
from eagle3lib.plan.quantisation import WeightBytes, quantisation_of, weight_bytes
from eagle3lib.plan.shape import Shape

_ACTIVATION_BYTES = 2


@dataclass(frozen=True)
class DrafterShape:
    """A Llama-type drafter of one layer in the target's own width."""

    shape: Shape
    draft_vocab_size: int
    intermediate_size: int = 0  # width of its MLP, 0 is the target's

    @property
    def layer_parameters(self) -> int:
        s = self.shape
        narrow = s.heads if s.is_mla else s.kv_heads
        attention = 2 * s.hidden * s.head_dim * (s.heads + 2 * narrow)
        return attention + s.heads * s.head_dim * s.hidden + 3 * s.hidden * self.mlp_size

    @property
    def mlp_size(self) -> int:
        return self.intermediate_size or self.shape.need("intermediate_size")

    @property
    def fuse_parameters(self) -> int:
        return 3 * self.shape.hidden**2

    @property
    def head_parameters(self) -> int:
        return min(self.draft_vocab_size, self.shape.vocab) * self.shape.hidden

    @property
    def trained_parameters(self) -> int:
        return self.fuse_parameters + self.layer_parameters + self.head_parameters


def distinct_experts(experts: int, per_token: int, tokens: float) -> float:
    """Expected number of different experts that ``tokens`` independent tokens choose."""
    return experts * (1 - (1 - per_token / experts) ** tokens) if experts else 0.0


@dataclass(frozen=True)
class Setting:
    """Target, drafter and devices of a cost model."""

    shape: Shape
    weights: WeightBytes
    drafter: DrafterShape
    device: Device
    devices: int
    context_tokens: int
    host_s: float = 0.0  # between any two forwards, the drafter's too
    round_extra_s: float = 0.0  # a round's overhead beyond the model, from a measured cost
    element_bytes: int = 2  # of the cache and the drafter, as served

    @classmethod
    def of(cls, shape: Shape, device: Device, *, devices: int, draft_vocab_size: int,
           context_tokens: int, host_s: float = 0.0) -> Setting:  # fmt: skip
        weights = weight_bytes(shape, quantisation_of(shape))
        drafter = DrafterShape(shape, draft_vocab_size)
        return cls(shape, weights, drafter, device, devices, context_tokens, host_s)

    def at_the_limit(self) -> Setting:
        """The same on devices that reach their data sheet and wait for nothing: the roofline."""
        ideal = replace(
            self.device, bandwidth_share=1.0, compute_share=1.0, collective_s=0.0, layer_s=0.0,
            link_bytes_per_s=float("inf"),
        )  # fmt: skip
        return replace(self, device=ideal, host_s=0.0, round_extra_s=0.0)

    def step_bytes(self, batch: float, tokens: int = 1) -> dict[str, float]:
        """Bytes of each part that each device reads in one target step."""
        shape = self.shape
        touched = distinct_experts(shape.experts, shape.experts_per_token, batch * tokens)
        return {
            "weights": self.weights.always / self.devices,
            "experts": touched * len(shape.expert_layers) * self.weights.expert / self.devices,
            "keys and values": batch * self.kv_read_bytes(),
        }

    def step_flops(self, batch: float, tokens: int = 1) -> float:
        """FLOPs of each device in one target step."""
        per_token = 2 * self.shape.product_parameters + self._attention_flops()
        return batch * tokens * per_token / self.devices

    def step_parts(self, batch: float, tokens: int = 1) -> dict[str, float]:
        """Seconds of each part of one target step; ``compute`` is what it takes beyond reading."""
        read = self.step_bytes(batch, tokens)
        parts = {name: self._read_s(size) for name, size in read.items()}
        computing = self._compute_s(self.step_flops(batch, tokens))
        parts["compute"] = max(0.0, computing - sum(parts.values()))
        parts["collectives"] = 2 * self.shape.layers * self._collective_s(batch * tokens)
        parts["layers"] = self.shape.layers * self.device.layer_s
        parts["host"] = self.host_s
        return parts

    def step_s(self, batch: float, tokens: int = 1) -> float:
        return sum(self.step_parts(batch, tokens).values())

    def draft_bytes(self, batch: float, tokens: int = 1) -> float:
        """Bytes that each device reads in one forward of the drafter; the first of a round reads
        the fused states of all the round's ``tokens`` and the fusing matrix."""
        d = self.drafter
        first = d.fuse_parameters if tokens > 1 else 0
        keys = self.shape.heads if self.shape.is_mla else self.shape.kv_heads
        cache = batch * self.context_tokens * 2 * keys * self.shape.head_dim
        numbers = d.layer_parameters + d.head_parameters + first + cache
        return numbers * self.element_bytes / self.devices

    def draft_flops(self, batch: float, tokens: int = 1) -> float:
        d = self.drafter
        first = d.fuse_parameters if tokens > 1 else 0
        per_sequence = 2 * (tokens * (d.layer_parameters + first) + d.head_parameters)
        return batch * per_sequence / self.devices

    def draft_s(self, batch: float, tokens: int = 1) -> float:
        """One forward of the drafter."""
        read_s = self._read_s(self.draft_bytes(batch, tokens))
        computing_s = self._compute_s(self.draft_flops(batch, tokens))
        # Two all-reduces of the layer, and the gathered head.
        waiting = 3 * self._collective_s(batch * tokens) + self.device.layer_s
        return max(read_s, computing_s) + waiting + self.host_s

    def round_bytes(self, batch: float, steps: int) -> dict[str, float]:
        """Bytes of each part that each device reads in a verify round of ``steps`` drafts."""
        drafter = self.draft_bytes(batch, steps + 1) + (steps - 1) * self.draft_bytes(batch)
        return self.step_bytes(batch, steps + 1) | {"drafter": drafter}

    def round_flops(self, batch: float, steps: int) -> float:
        drafter = self.draft_flops(batch, steps + 1) + (steps - 1) * self.draft_flops(batch)
        return self.step_flops(batch, steps + 1) + drafter

    def round_parts(self, batch: float, steps: int) -> dict[str, float]:
        """Seconds of a verify round of ``steps`` drafts: the target's parts, and the drafter."""
        parts = self.step_parts(batch, steps + 1)
        parts["drafter"] = self.draft_s(batch, steps + 1) + (steps - 1) * self.draft_s(batch)
        parts["host"] += self.round_extra_s
        return parts

    def round_cost(self, batch: float, steps: int) -> float:
        """A round in plain steps, and so the acceptance length from which speculation pays."""
        return sum(self.round_parts(batch, steps).values()) / self.step_s(batch)

    def kv_read_bytes(self) -> float:
        """Bytes of one sequence's cache that each device reads in a step.

        Latent attention keeps one latent for all heads, so every device holds and reads all of it;
        so do devices beyond the number of key heads. Layers with a window read the window only.
        """
        shape = self.shape
        per_layer = shape.kv_bytes_per_token(self.element_bytes) / shape.layers
        slid, window = shape.sliding
        seen = (shape.layers - slid) * self.context_tokens
        seen += slid * min(window, self.context_tokens)
        return per_layer * seen / self.kv_shares()

    def kv_shares(self) -> int:
        """Over how many devices the cache is divided."""
        return 1 if self.shape.is_mla else min(self.devices, self.shape.kv_heads)

    def _attention_flops(self) -> float:
        """Of one token over the context: scores and values; absorbed latents are wider."""
        s = self.shape
        if s.is_mla:
            wide = 2 * s.need("kv_lora_rank") + s.need("qk_rope_head_dim")
        else:
            wide = 2 * s.head_dim
        return 2.0 * s.layers * s.heads * wide * self.context_tokens

    def _collective_s(self, tokens: float) -> float:
        if self.devices == 1:
            return 0.0
        moved = 2 * (self.devices - 1) / self.devices
        moved *= tokens * self.shape.hidden * _ACTIVATION_BYTES
        return self.device.collective_s + moved / self.device.link_bytes_per_s

    def _read_s(self, bytes_of_a_device: float) -> float:
        share = self.device.bandwidth_share * self.device.bandwidth_bytes_per_s
        return bytes_of_a_device / share

    def _compute_s(self, flops_of_a_device: float) -> float:
        return flops_of_a_device / self.device.flops_per_s / self.device.compute_share


def acceptance_length(per_step: float, steps: int) -> float:
    """1 + a + a^2 + ... + a^K: tokens a round when each step is accepted with probability ``a``
    given the ones before (perf: constant conditional acceptance)."""
    return sum(per_step**k for k in range(steps + 1))


def calibrated(setting: Setting, steps: int, measured_cost: float) -> Setting:
    """The same setting with a measured round cost (batch 1) explained by overhead of the round."""
    missing = (measured_cost - setting.round_cost(1, steps)) * setting.step_s(1)
    return replace(setting, round_extra_s=missing)


def round_costs(setting: Setting, batches: list[int], steps: list[int],
                per_step: float) -> list[dict[str, Any]]:  # fmt: skip
    """One line a batch size and K: step and round (ms), cost, and the speed-up that ``per_step``
    acceptance would bring."""
    lines = []
    for batch in batches:
        for k in steps:
            cost = setting.round_cost(batch, k)
            tau = acceptance_length(per_step, k)
            lines.append(
                {
                    "batch": batch,
                    "K": k,
                    "plain_step_ms": round(1e3 * setting.step_s(batch), 3),
                    "round_ms": round(1e3 * sum(setting.round_parts(batch, k).values()), 3),
                    "round_cost": round(cost, 3),
                    "acceptance_length": round(tau, 3),
                    "speedup": round(tau / cost, 3),
                    "pays": tau > cost,
                }
            )
    return lines

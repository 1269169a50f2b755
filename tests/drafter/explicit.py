"""A second drafter, written differently: fp64, every position at once, one dense mask a step.

Entry (p, j) is step j at position p. It may read the key of entry (q, 0) for q <= p, and those of
(p, i) for 1 <= i <= j. Rotary embeddings are products of complex numbers; YaRN is its paper's
formula (arXiv 2309.00071), its mscale DeepSeek-V2's.
"""

import math

import torch
import torch.nn.functional as F

D = torch.float64


def frequencies(rope, width):
    """(radians a position for every pair, factor on the turned part)"""
    theta, pair = rope["rope_theta"], torch.arange(width // 2, dtype=D)
    plain = theta ** (-2 * pair / width)
    if rope["rope_type"] == "default":
        return plain, 1.0

    def dimension(rotations):
        turns = rope["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(dimension(rope.get("beta_fast", 32))), 0)
    high = min(math.ceil(dimension(rope.get("beta_slow", 1))), width - 1)
    share = ((pair - low) / (high - low)).clamp(0, 1)
    if "mscale" in rope:
        size = mscale(rope, rope["mscale"]) / mscale(rope, rope["mscale_all_dim"])
    else:
        size = mscale(rope, 1.0)
    return plain * (1 - share) + plain / rope["factor"] * share, size


def mscale(rope, weight):
    return 0.1 * weight * math.log(rope["factor"]) + 1.0


def turned(x, positions, rope, *, pairs):
    """x [N, heads, d]; ``pairs``: neighbours turn together, else the two halves do."""
    radians, size = frequencies(rope, x.shape[-1])
    angle = positions.to(D)[:, None] * radians
    rotation = torch.polar(torch.full_like(angle, size), angle)[:, None]
    if pairs:
        z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * rotation
        return torch.view_as_real(z).flatten(-2)
    z = torch.complex(*x.chunk(2, -1)) * rotation
    return torch.cat((z.real, z.imag), -1)


class Explicit:
    def __init__(self, drafter):
        self.c = drafter.config
        self.w = {
            k: v.to(D) if v.is_floating_point() else v for k, v in drafter.state_dict().items()
        }

    def norm(self, x, name):
        return F.rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.c.rms_norm_eps)

    def linear(self, x, name):
        return x @ self.w[f"{name}.weight"].T

    def attention_linear(self, x, name):
        return self.linear(x, f"midlayer.self_attn.{name}")

    def fuse(self, states):
        c = self.c
        if c.norm_before_fc:
            states = self.norm(states, "input_norm")
        if c.fc_norm:
            parts = states.split(c.target_hidden_size, -1)
            states = torch.cat([self.norm(x, f"fc_norm.{i}") for i, x in enumerate(parts)], -1)
        return self.linear(states, "fc")

    def qkv(self, mixed, positions):
        """[N, heads, .] each: key heads are repeated to the query heads."""
        c, rope, heads = self.c, self.c.rope_parameters, self.c.num_attention_heads
        if c.mla is None:
            q, k, v = (
                self.attention_linear(mixed, f"{n}_proj").unflatten(-1, (-1, c.head_dim))
                for n in "qkv"
            )
            q, k = (turned(x, positions, rope, pairs=False) for x in (q, k))
            groups = heads // k.shape[1]
            return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        nope = c.mla.qk_nope_head_dim
        if c.mla.q_lora_rank is None:
            q = self.attention_linear(mixed, "q_proj")
        else:
            latent = self.attention_linear(mixed, "q_a_proj")
            q = self.attention_linear(
                self.norm(latent, "midlayer.self_attn.q_a_layernorm"), "q_b_proj"
            )
        q = q.unflatten(-1, (heads, -1))
        down = self.attention_linear(mixed, "kv_a_proj_with_mqa")
        latent, shared = down[:, : c.mla.kv_lora_rank], down[:, c.mla.kv_lora_rank :]
        up = self.attention_linear(
            self.norm(latent, "midlayer.self_attn.kv_a_layernorm"), "kv_b_proj"
        )
        up = up.unflatten(-1, (heads, -1))
        q = torch.cat((q[..., :nope], turned(q[..., nope:], positions, rope, pairs=True)), -1)
        shared = turned(shared[:, None], positions, rope, pairs=True).expand(-1, heads, -1)
        return q, torch.cat((up[..., :nope], shared), -1), up[..., nope:]

    def scale(self):
        c = self.c
        if c.mla is None:
            return c.head_dim**-0.5
        scale = (c.mla.qk_nope_head_dim + c.mla.qk_rope_head_dim) ** -0.5
        weight = c.rope_parameters.get("mscale_all_dim")
        return scale * mscale(c.rope_parameters, weight) ** 2 if weight else scale

    def run(self, tokens, states, steps):
        """Outputs before ``norm`` of every step, [T - 1, K, H], fed the true tokens."""
        count = len(tokens) - 1
        place = torch.arange(count)
        hidden, keys, values, masks, made = self.fuse(states.to(D)[:count]), [], [], [], []
        for step in range(steps):
            token = tokens[(place + 1 + step).clamp(max=count)]
            normed = self.norm(hidden, "midlayer.hidden_norm")
            embedded = self.norm(self.w["embed_tokens.weight"][token], "midlayer.input_layernorm")
            q, k, v = self.qkv(torch.cat((embedded, normed), -1), place + step)
            keys, values = [*keys, k], [*values, v]
            masks.append(place[:, None] >= place if step == 0 else place[:, None] == place)
            scores = torch.einsum("phd,nhd->hpn", q, torch.cat(keys)) * self.scale()
            scores = scores.masked_fill(~torch.cat(masks, 1), -math.inf)
            read = torch.einsum("hpn,nhd->phd", scores.softmax(-1), torch.cat(values)).flatten(1)
            residual = normed if self.c.norm_before_residual else hidden
            residual = residual + self.attention_linear(read, "o_proj")
            x = self.norm(residual, "midlayer.post_attention_layernorm")
            inner = F.silu(self.linear(x, "midlayer.mlp.gate_proj"))
            inner = inner * self.linear(x, "midlayer.mlp.up_proj")
            output = residual + self.linear(inner, "midlayer.mlp.down_proj")
            made.append(output)
            hidden = self.norm(output, "norm") if self.c.norm_output else output
        return torch.stack(made, 1)

    def logits(self, outputs):
        return self.linear(self.norm(outputs, "norm"), "lm_head")

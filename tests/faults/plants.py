"""How each fault of the catalogue is planted, by its number: here what is measured, what the engine
does and what the checkpoint holds, in ``plants_training`` the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from plant import BENCH, EXPORT, Inapplicable, Plant
from plants_training import TRAINING_PLANTS

from eagle3lib.diagnose.served import Setting
from eagle3lib.diagnose.variants import drafter_change
from eagle3lib.drafter.model import Drafter
from eagle3lib.lab.files import read_json
from eagle3lib.measure.arms import PLAIN, RequestRow


def _steps(by: int) -> Callable[[Plant], None]:
    return lambda p: p.record(
        change=lambda s: replace(s, steps=s.steps + by) if s.steps + by > 0 else None
    )


def _engine(label: str) -> Callable[[Plant], None]:
    return lambda p: p.record(label)


def _counters(factor: float) -> Callable[[Plant], None]:
    return lambda p: p.counters(lambda c: {k: round(v * factor) for k, v in c.items()})


def _mean_of_requests(rows: list[RequestRow], _: float) -> float:
    own = [1 + sum(r.accepted or []) / len(r.accepted or [0]) for r in rows]
    return sum(own) / len(own)


def _looping(p: Plant, every: int = 1) -> None:
    chosen = set(list(dict.fromkeys(r.prompt for r in _requests(p)))[::every])

    def loop(r: RequestRow) -> RequestRow:
        if r.prompt not in chosen:
            return r
        some = r.answer_token_ids[:8]
        return replace(r, answer_token_ids=(some * 9)[: max(len(r.answer_token_ids), 60)])

    p.requests(loop)
    p.record()


def _sampled(p: Plant) -> None:
    p.json(f"{BENCH}/metrics.json", lambda m: m | {"temperature": 1.0})


def _user_text(p: Plant, r: RequestRow) -> list[int]:
    """The prompt without its header and generation prompt."""
    ids = r.prompt_token_ids
    return ids[max(1, len(ids) // 3) : -4] if len(ids) > 12 else ids[1:-1]


def _other_template(p: Plant, ids: list[int]) -> list[int]:
    """[INST] in place of the target's own markers: what another family's template looks like."""
    inner = ids[max(1, len(ids) // 4) : -5] or ids[1:]
    vocab = p.target.vocab_size
    opening, closing = [7 % vocab, 9 % vocab, 11 % vocab], [12 % vocab, 13 % vocab]
    return opening + inner + closing


def _random_prompts(p: Plant) -> None:
    low, high = 3, p.target.vocab_size - 1
    made: dict[str, list[int]] = {}

    def ids(r: RequestRow) -> list[int]:
        return made.setdefault(r.prompt, [p.random.randint(low, high) for _ in range(24)])

    p.ask(ids)
    p.rows(lambda r: replace(r, prompt_token_ids=made.get(r.id, r.prompt_token_ids)))


def _unequal(p: Plant) -> None:
    def halve(servers: dict[str, Any]) -> None:
        servers[PLAIN]["threads"] = max(1, servers[PLAIN]["threads"] // 2)
        for arm in servers:
            if arm != PLAIN:
                servers[arm]["threads"] = 2 * servers[PLAIN]["threads"]

    p.json(f"{BENCH}/servers.json", halve)


def _two_versions(p: Plant) -> None:
    def name(servers: dict[str, Any]) -> None:
        for arm, server in servers.items():
            server["engine"] = "0.31.0" if arm == PLAIN else "0.32.0"

    p.json(f"{BENCH}/servers.json", name)


def _middle_slot(p: Plant) -> None:
    def later(s: Setting) -> Setting:
        slots = list(s.slots)
        slots[len(slots) // 2] += 1
        return replace(s, slots=tuple(slots))

    p.record(change=later)


def _layer_in_four_bits(p: Plant) -> None:
    def round_layer(d: Drafter) -> None:
        for name, weight in d.midlayer.named_parameters():
            if weight.ndim == 2 and "norm" not in name:
                scale = weight.abs().amax(-1, keepdim=True) / 7
                weight.copy_((weight / scale).round() * scale)

    p.record(change=drafter_change(round_layer))


def _two_late(p: Plant) -> None:
    def late(s: Setting) -> Setting | None:
        return replace(s, chain=(0, *[2] * (s.steps - 1))) if s.steps > 1 else None

    p.record(change=late)


def _lost_rounds(p: Plant) -> None:
    p.requests(
        lambda r: r if r.accepted is None or len(r.accepted) < 9 else replace(
            r, accepted=r.accepted[: len(r.accepted) // 3],
            drafted=(r.drafted or [])[: len(r.accepted) // 3],
        )
    )  # fmt: skip
    p.count()


def _trained_prompts(p: Plant) -> None:
    asked = {r.prompt for r in _requests(p)}
    p.rows(lambda r: replace(r, split="train", kept_apart="") if r.id in asked else r)


def _requests(p: Plant) -> list[RequestRow]:
    from eagle3lib.measure.arms import read_requests

    return read_requests(p.folder / BENCH)


def _nothing(p: Plant) -> None:
    p.requests(
        lambda r: r if r.accepted is None else replace(
            r, accepted=[0] * (len(r.answer_token_ids) - 1),
            drafted=[p.benchmark()["num_speculative_tokens"]] * (len(r.answer_token_ids) - 1),
        )
    )  # fmt: skip
    p.count()


def _export_then_record(change: Callable[[Plant, dict[str, torch.Tensor]], None]) -> Any:
    def planted(p: Plant) -> None:
        p.export(lambda t: change(p, t))
        p.record()

    return planted


def _absolute(p: Plant) -> None:
    def absolute(t: dict[str, torch.Tensor]) -> None:
        t["d2t"] = t["d2t"] + torch.arange(len(t["d2t"]))

    p.export(absolute)


def _rebuilt_map(p: Plant) -> None:
    vocab = p.other_map()
    p.export(lambda t: t.update(d2t=vocab.d2t, t2d=vocab.t2d))
    p.record()


def _no_map(p: Plant) -> None:
    p.record("draft ids as target ids")
    p.export(lambda t: [t.pop(k) for k in ("d2t", "t2d")] and None)


def _random_embeddings(p: Plant, t: dict[str, torch.Tensor]) -> None:
    like = p.head.embedding
    t["embed_tokens.weight"] = torch.randn(
        like.shape, generator=torch.Generator().manual_seed(1)
    ).to(t["fc.weight"].dtype) * like.float().std().to(t["fc.weight"].dtype)


def _first_rows(p: Plant, t: dict[str, torch.Tensor]) -> None:
    t["lm_head.weight"] = p.head.head[: len(t["d2t"])].to(t["lm_head.weight"].dtype).clone()


def _columns_reversed(p: Plant, t: dict[str, torch.Tensor]) -> None:
    parts = t["fc.weight"].chunk(len(_ids(p)), dim=1)
    t["fc.weight"] = torch.cat(parts[::-1], dim=1).contiguous()


def _rows_off(p: Plant, t: dict[str, torch.Tensor]) -> None:
    t["embed_tokens.weight"] = p.head.embedding.roll(1, 0).to(t["fc.weight"].dtype).clone()


def _norms_of_ones(p: Plant, t: dict[str, torch.Tensor]) -> None:
    for name, value in t.items():
        if "norm" in name:
            t[name] = torch.ones_like(value)


def _random_mlp(p: Plant, t: dict[str, torch.Tensor]) -> None:
    for name, value in t.items():
        if ".mlp." in name:
            t[name] = torch.randn_like(value) * 0.02


def _config_then_record(**changes: Any) -> Callable[[Plant], None]:
    def planted(p: Plant) -> None:
        before = _config(p)
        if all(before.get(name) == value for name, value in changes.items()):
            raise Inapplicable(str(changes))
        p.config(**changes)
        p.record()

    return planted


def _config(p: Plant) -> dict[str, Any]:
    return read_json(p.folder / EXPORT / "drafter" / "config.json")


def _ids(p: Plant) -> list[int]:
    return list(_config(p)["eagle_aux_hidden_state_layer_ids"])


def _one_later(p: Plant) -> None:
    later = [i + 1 for i in _ids(p)]
    p.config(
        eagle_aux_hidden_state_layer_ids=later,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [i - 1 for i in later],
                      "use_aux_hidden_state": True},
    )  # fmt: skip
    p.record()


def _conflict(p: Plant) -> None:
    p.config(eagle_config={"eagle_aux_hidden_state_layer_ids": [i + 2 for i in _ids(p)],
                           "use_aux_hidden_state": True})  # fmt: skip


def _rope(theta: float | None = None, **scaling: Any) -> Callable[[Plant], None]:
    def planted(p: Plant) -> None:
        before = _config(p)["rope_parameters"]
        rope = before | scaling | ({"rope_theta": theta} if theta else {})
        if rope == before:
            raise Inapplicable(f"rope_theta is {theta}")
        p.config(rope_parameters=rope, rope_theta=rope["rope_theta"])
        p.record()

    return planted


def _short_table(p: Plant) -> None:
    longest = max(len(r.prompt_token_ids) + len(r.answer_token_ids) for r in _requests(p))
    p.config(max_position_embeddings=longest // 2)


PLANTS: dict[str, Callable[[Plant], None]] = {
    "F01": _steps(-1),
    "F02": _steps(1),
    "F03": _counters(3.0),
    "F04": _counters(1.5),
    "F05": lambda p: p.reported(_mean_of_requests),
    "F06": lambda p: p.reported(lambda rows, length: length - 1),
    "F07": _looping,
    "F08": _sampled,
    "F09": lambda p: p.ask(lambda r: _user_text(p, r)),
    "F10": lambda p: p.ask(lambda r: _other_template(p, r.prompt_token_ids)),
    "F11": _unequal,
    "F12": _lost_rounds,
    "F13": _random_prompts,
    "F14": _trained_prompts,
    "F15": _engine("slots +1"),
    "F16": _engine("slots -1"),
    "F17": _engine("slots in reverse"),
    "F18": _engine("draft steps one position late"),
    "F19": _engine("draft steps at the base position"),
    "F20": _engine("state of p - 1"),
    "F21": _engine("token x[p] enters"),
    "F22": _engine("draft ids as target ids"),
    "F23": _engine("offsets read as ids"),
    "F24": _engine("embeddings are zeros"),
    "F25": _engine("rotary base 10,000"),
    "F26": _engine("norm_output the other way"),
    "F27": _engine("norm_before_residual the other way"),
    "F28": _engine("hidden_norm skipped"),
    "F29": _engine("prompt's draft keys lost"),
    "F30": _engine("four bits"),
    "F31": _engine("second rank's half lost"),
    "F32": _engine("states are zeros"),
    "F33": lambda p: p.record("states are zeros", later_half=True),
    "F34": _nothing,
    "F35": _absolute,
    "F36": _rebuilt_map,
    "F37": _no_map,
    "F38": _export_then_record(_random_embeddings),
    "F39": lambda p: p.config(tie_word_embeddings=True),
    "F40": _export_then_record(_first_rows),
    "F41": _export_then_record(_norms_of_ones),
    "F42": _one_later,
    "F43": _conflict,
    "F44": _rope(10_000.0),
    "F45": _rope(rope_type="linear", factor=4.0),
    "F46": _short_table,
    "F47": _config_then_record(norm_output=True),
    "F48": _export_then_record(_random_mlp),
    "F49": lambda p: p.cut(p.folder / EXPORT / "drafter" / "model.safetensors"),
    "F73": lambda p: p.record(change=lambda s: replace(s, state_shift=-1)),
    "F74": _middle_slot,
    "F75": _layer_in_four_bits,
    "F76": _export_then_record(_columns_reversed),
    "F77": _config_then_record(norm_before_residual=True),
    "F81": _two_versions,
    "F82": lambda p: _looping(p, every=2),
    "F84": _two_late,
    "F85": _export_then_record(_rows_off),
    "F86": _counters(0.6),
    **TRAINING_PLANTS,
}  # fmt: skip

"""A whole run of a small random target: seconds, a few MB. ``Kind`` says of which one and how.

The target prefers some tokens (its head's rows fall off as ranks of words do), has a chat template
and a rotary base of its own, so that every fault of the catalogue can show. Its drafter is trained
on the held-out answers as well: text of a random target can't be generalised from, and a drafter
that is never accepted shows no fault. Rounds are the simulator's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3lib.data.rows import SERVED, AnswerRow, is_looping
from eagle3lib.data.template import load_chat_template, thinking_arguments
from eagle3lib.drafter.checkpoint import write_drafter
from eagle3lib.drafter.vocab import build_vocab_map, count_tokens
from eagle3lib.lab.files import read_json, read_jsonl, write_json, write_text
from eagle3lib.lab.params import TrainParams
from eagle3lib.measure.arms import OWN, PLAIN, RequestRow
from eagle3lib.target.capture import capture
from eagle3lib.target.folder import Target
from eagle3lib.target.model import DTYPES
from eagle3lib.training.checkpoints import Folders
from eagle3lib.training.loop import Trainer
from eagle3lib.training.start import trained_drafter

sys.path.insert(0, str(Path(__file__).parents[1] / "target"))

from tiny import save_target

VOCAB = 320
MARKERS = ("user", "assistant", "system", "tool", "think", "tools")  # ids 3 to 8
_RANK_POWER = 0.25  # of 1 / rank, by which rows of the target's head shrink
_TRAINED, _HELD_OUT = 20, 10  # rows
_LOUD = 4.0  # a target that is decided, as trained ones are: about one nat a token
_TEMPLATE = (
    "<s> {% if tools %}tools {{ tools | length }} </s> {% endif %}"
    "{% for m in messages %}{{ m.role }} {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% if enable_thinking %}think {% endif %}{% endif %}"
)


@dataclass(frozen=True)
class Kind:
    """A kind of run. ``family``: one of ``tests/target/tiny.py``, or "ten", our own Llama."""

    name: str = "plain"
    family: str = "ten"
    slots: tuple[int, ...] = (2, 5, 7)
    steps: int = 3  # K
    dtype: str = "float32"
    draft_vocab: int = 160
    answer: int = 40  # tokens
    asked: int = 14  # tokens of a prompt's text
    turns: int = 1
    temperature: float = 0.0  # of the training answers
    thinking: tuple[str, ...] = ()  # by turns: "on", "off"
    system: str = ""
    tools: bool = False
    cjk: bool = False
    answers_from: str = SERVED
    ties: bool = False  # rounds are drafted in float32 where they are replayed in bfloat16
    warm: bool = False  # the training starts from the drafter of a training before
    training: dict[str, Any] = field(default_factory=dict)


def save_small_target(folder: Path, kind: Kind) -> Path:
    """The target of ``kind`` as a Hugging Face folder, its head and tokenizer made word-like."""
    save_target(folder, "llama" if kind.family == "ten" else kind.family)
    if kind.family == "ten":
        _ten_layers(folder)
    _prefer_some(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    words = ["<unk>", "<s>", "</s>", *MARKERS]
    words += [chr(0x4E00 + i) if kind.cjk else f"w{i}" for i in range(len(words), VOCAB)]
    tokenizer["model"]["vocab"] = {word: i for i, word in enumerate(words)}
    write_text(folder / "tokenizer.json", json.dumps(tokenizer))
    for name in folder.glob("*chat_template*"):
        name.unlink()
    config = read_json(folder / "tokenizer_config.json")
    write_json(folder / "tokenizer_config.json", config | {"chat_template": _TEMPLATE})
    return folder


def _ten_layers(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=10,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        rms_norm_eps=1e-5, initializer_range=0.15, tie_word_embeddings=False, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # a final norm of ones would hide a forgotten or doubled norm
        model.model.norm.weight.uniform_(0.2, 3.0)
    model.save_pretrained(folder)


def _prefer_some(folder: Path) -> None:
    """Shrink the rows of ``lm_head`` by a shuffled rank; a tied head stays as it is."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    heads = [name for name in tensors if name.endswith("lm_head.weight")]
    for name in heads:
        rank = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(8)) + 1.0
        rank[: 3 + len(MARKERS)] = VOCAB  # markers and the stop token come from the template
        scale = rank.pow(-_RANK_POWER)[:, None]
        tensors[name] = (tensors[name].float() * scale * _LOUD).to(tensors[name].dtype)
    if heads:
        save_file(tensors, path, {"format": "pt"})


def small_run(
    folder: Path, target: Target, model: Any, greedy: Any, kind: Kind | None = None
) -> Path:
    """Write the run into ``folder`` and return it; its requests have no record of rounds yet."""
    kind = kind or Kind()
    rows = _answers(target, model, greedy, kind)
    data = folder / "01_generate_data"
    write_json(data / "inputs.json", {"params": {"temperature": kind.temperature}})
    write_text(data / "answers.jsonl", "".join(json.dumps(asdict(r)) + "\n" for r in rows))
    states = folder / "02_capture_hidden_states" / "states"
    capture(target, rows, states, slots=kind.slots, dtype=kind.dtype, batch_tokens=2048,
            shard_rows=8)  # fmt: skip
    counts = count_tokens(r.answer_token_ids for r in rows)
    vocab = build_vocab_map(counts, target.vocab_size, kind.draft_vocab, forced=[2])
    vocab_file = folder / "03_build_vocab_map" / "vocab_map.safetensors"
    vocab.save(vocab_file)
    place = folder / "04_train_drafter"
    if kind.warm:
        _train(folder / "before", target, states, vocab_file, kind, {})
        _write(folder / "warm", folder / "before" / "checkpoints" / "best", target, kind)
        _train(place, target, states, vocab_file, kind, {"warm_start": str(folder / "warm")})
    else:
        _train(place, target, states, vocab_file, kind, {})
    _split(states, lambda e: e["id"] in {r.id for r in rows if r.split == "heldout"})
    _write(folder / "05_export_drafter" / "drafter", place / "checkpoints" / "best", target, kind)
    held = [r for r in rows if r.split == "heldout"]
    _benchmark(folder / "06_benchmark_serving", held, model, greedy, kind)
    write_json(folder / "manifest.json", {"target": {"name": str(target.folder)}})
    return folder


def _write(folder: Path, checkpoint: Path, target: Target, kind: Kind) -> None:
    folder.mkdir(parents=True)
    write_drafter(folder, trained_drafter(checkpoint, target), DTYPES[kind.dtype], target.config,
                  for_sglang=False)  # fmt: skip


def _answers(target: Target, model: Any, greedy: Any, kind: Kind) -> list[AnswerRow]:
    """Thirty answers that don't loop, to prompts that the target itself would say."""
    generator = torch.Generator().manual_seed(4)
    rows: list[AnswerRow] = []
    while len(rows) < _TRAINED + _HELD_OUT:
        row = _answer(len(rows), target, model, greedy, kind, generator)
        if not is_looping(row.answer_token_ids):
            rows.append(row)
    return rows


def _answer(
    i: int, target: Target, model: Any, greedy: Any, kind: Kind, generator: torch.Generator
) -> AnswerRow:
    way = kind.thinking[i % len(kind.thinking)] if kind.thinking else "default"
    thinks = thinking_arguments({"on": True, "off": False}.get(way))
    template = load_chat_template(target.folder, target.stop_ids(), thinks)
    tools = [{"type": "function", "function": {"name": "w99"}}] * kind.tools
    messages = [{"role": "system", "content": kind.system}] if kind.system else []
    for turn in range(kind.turns):
        role = "tool" if kind.tools and turn % 2 else "user"
        here = template.render(
            [*messages, {"role": role, "content": "|"}], prompt=False, tools=tools or None
        )
        opening = torch.randint(9, VOCAB - 20, (2,), generator=generator).tolist()
        before = template.ids(here.split("|")[0]) + opening
        text = template.decode(opening + greedy(model, before, kind.asked + i % 5))
        messages = [*messages, {"role": role, "content": text}]
        prompt = template.ids(template.render(messages, prompt=True, tools=tools or None))
        if turn < kind.turns - 1:
            said = template.decode(greedy(model, prompt, 8))
            messages += [{"role": "assistant", "content": said}]
    split = "train" if i < _TRAINED else "heldout"
    heat = kind.temperature if split == "train" else 0.0
    answer = (
        sampled(model, prompt, kind.answer, heat, generator)
        if heat else greedy(model, prompt, kind.answer)
    )  # fmt: skip
    return AnswerRow(
        f"row-{i:02d}", "workload", split, messages, prompt, answer, template.decode(answer),
        "length", tools=tools, reasoning_kind="complete" if way == "on" else "missing",
        sampling={"thinking": way} if kind.thinking else {}, token_ids_from=kind.answers_from,
    )  # fmt: skip


@torch.no_grad()
def sampled(
    model: Any, ids: list[int], tokens: int, heat: float, generator: torch.Generator
) -> list[int]:
    made = list(ids)
    for _ in range(tokens):
        logits = model(torch.tensor([made]), use_cache=False).logits[0, -1].float() / heat
        made.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    return made[len(ids) :]


def _train(
    place: Path, target: Target, states: Path, vocab: Path, kind: Kind, more: dict[str, Any]
) -> None:
    _split(states, lambda e: False)
    place.mkdir(parents=True)
    settings = {"epochs": 30, "batch_tokens": 345, "steps": max(4, kind.steps),
                "precision": "float32", "learning_rate": 4e-3, "checkpoint_every": 30,
                "num_speculative_tokens": kind.steps}  # fmt: skip
    params = TrainParams(target=str(target.folder), **(settings | kind.training | more))
    Trainer(params, target, Folders(place, states, vocab)).run()
    evaluations = [r for r in read_jsonl(place / "metrics.jsonl") if r["kind"] == "evaluation"]
    write_json(place / "inputs.json", {"params": params.model_dump(mode="json")})
    write_json(
        place / "metrics.json",
        {"trained_tokens": _TRAINED * kind.answer, "num_speculative_tokens": kind.steps,
         "heldout": {}, "baselines": evaluations[0]["baselines"]},
    )  # fmt: skip


def _split(states: Path, heldout: Callable[[dict[str, Any]], bool]) -> None:
    index = read_json(states / "index.json")
    for entry in index["conversations"]:
        entry["split"] = "heldout" if heldout(entry) else "train"
    write_json(states / "index.json", index)


def _benchmark(folder: Path, rows: list[AnswerRow], model: Any, greedy: Any, kind: Kind) -> None:
    """Requests without a record yet: ``Plant.record`` fills it in."""
    requests = [
        RequestRow(arm, r.set, r.id, 0, r.prompt_token_ids, r.answer_token_ids, "length", 1.0,
                   [] if arm == OWN else None, [] if arm == OWN else None)
        for r in rows for arm in (PLAIN, OWN)
    ]  # fmt: skip
    write_text(folder / "requests.jsonl", "".join(json.dumps(asdict(r)) + "\n" for r in requests))
    write_json(folder / "servers.json", {PLAIN: {"threads": 2}, OWN: {"threads": 2}})
    lines = [{"arm": arm, "set": "workload"} for arm in (PLAIN, OWN)]
    write_json(
        folder / "metrics.json",
        {"dtype": kind.dtype, "num_speculative_tokens": kind.steps, "temperature": 0.0,
         "arms": lines, "counters": {OWN: {}}},
    )  # fmt: skip

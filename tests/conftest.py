"""What the tests share: a random Llama target of 10 layers in a Hugging Face folder, its own greedy
answers with their captured states, and random drafters. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3lib.data.rows import AnswerRow, is_looping
from eagle3lib.drafter.config import DrafterConfig
from eagle3lib.drafter.model import Drafter
from eagle3lib.drafter.vocab import build_vocab_map, count_tokens
from eagle3lib.target.capture import capture
from eagle3lib.target.folder import Target, open_target
from eagle3lib.target.model import load_target

VOCAB = 300
# The tests share two cores with whatever else runs; tiny matrices gain nothing from threads.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """What is tested may have raised their number for the tests after it."""
    torch.set_num_threads(1)


def save_tiny_target(folder: Path, seed: int = 0) -> Path:
    """A random Llama whose weights are large enough that its greedy answers wander."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=10,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        rms_norm_eps=1e-5, initializer_range=0.15, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # a final norm of ones would hide a forgotten or doubled norm
        model.model.norm.weight.uniform_(0.2, 3.0)
    model.save_pretrained(folder)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return open_target(str(save_tiny_target(tmp_path_factory.mktemp("targets") / "tiny")))


@pytest.fixture(scope="session")
def tiny_model(tiny_target: Target) -> Any:
    return load_target(tiny_target, "float32")


@pytest.fixture(scope="session")
def make_row() -> Callable[..., AnswerRow]:
    return answer_row


def answer_row(index: int, prompt: list[int], answer: list[int], **changes: Any) -> AnswerRow:
    row = {
        "id": f"row-{index:02d}", "set": "workload", "split": "train", "messages": [], "text": "",
        "prompt_token_ids": prompt, "answer_token_ids": answer, "finish_reason": "length",
        "looping": is_looping(answer),
    }  # fmt: skip
    return AnswerRow(**(row | changes))


@torch.no_grad()
def greedy_answer(model: Any, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(tokens):
        following = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat((ids, following), dim=1)
    return ids[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def tiny_rows(tiny_model: Any) -> list[AnswerRow]:
    """Eight training rows, three held-out ones, and one whose answer has a single token."""
    generator = torch.Generator().manual_seed(1)

    def prompt(length: int) -> list[int]:
        return [1, *torch.randint(3, VOCAB, (length - 1,), generator=generator).tolist()]

    rows = []
    for index in range(11):
        asked = prompt(4 + index % 4)
        answer = greedy_answer(tiny_model, asked, 12 + 3 * (index % 5))
        split, name = ("train", "workload") if index < 8 else ("heldout", "workload")
        name = "general" if index == 10 else name
        rows.append(answer_row(index, asked, answer, split=split, set=name, looping=False))
    asked = prompt(6)
    rows.append(answer_row(11, asked, greedy_answer(tiny_model, asked, 1)))
    return rows


@pytest.fixture(scope="session")
def tiny_states(
    tiny_target: Target, tiny_rows: list[AnswerRow], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The rows' states in fp32, at the default slots, in shards of five rows. Read only."""
    folder = tmp_path_factory.mktemp("captured") / "states"
    capture(tiny_target, tiny_rows, folder, slots=(2, 5, 7), dtype="float32", batch_tokens=64,
            shard_rows=5)  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def tiny_vocab(tiny_rows: list[AnswerRow], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft vocabulary of 48 ids: it leaves some tokens of the answers out."""
    path = tmp_path_factory.mktemp("vocab") / "vocab_map.safetensors"
    counts = count_tokens(row.answer_token_ids for row in tiny_rows if row.trained)
    build_vocab_map(counts, VOCAB, 48, forced=[2]).save(path)
    return path


@pytest.fixture(scope="session")
def random_drafter() -> Callable[..., Drafter]:
    """``random_drafter(seed, draft_vocab_size=..., **config)``: fp32, nothing zero, nothing one."""

    def make(seed: int = 0, draft_vocab_size: int = VOCAB, **changes: Any) -> Drafter:
        sizes: dict[str, Any] = {
            "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            "max_position_embeddings": 256, "vocab_size": VOCAB, "target_hidden_size": 64,
            "draft_vocab_size": draft_vocab_size, "slots": (2, 5, 7),
        }  # fmt: skip
        drafter = Drafter(DrafterConfig(**(sizes | changes)))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in drafter.parameters():
                if parameter.ndim == 1:
                    parameter.uniform_(0.5, 1.5, generator=generator)
                else:
                    parameter.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5, generator=generator)
        order = torch.randperm(VOCAB, generator=generator)[: drafter.config.draft_vocab_size]
        vocab = build_vocab_map(count_tokens([order.tolist()]), VOCAB, len(order))
        drafter.d2t.copy_(vocab.d2t)
        drafter.t2d.copy_(vocab.t2d)
        return drafter.eval()

    return make

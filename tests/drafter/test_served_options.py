"""The options as vLLM serves them: its rounds are the simulator's, in fp32, on its own answers.

A drafter with every option on is trained on six answers until it drafts most of them; any option
that the engine read differently would part the rounds.
"""

import pytest
import torch

from eagle3lib.data.template import load_chat_template
from eagle3lib.diagnose.live import LiveTarget
from eagle3lib.diagnose.material import foreign_material
from eagle3lib.diagnose.phase import replay_sets
from eagle3lib.diagnose.replay import compare_counts
from eagle3lib.drafter.checkpoint import set_vocab, write_drafter
from eagle3lib.drafter.config import OPTIONS, DrafterConfig
from eagle3lib.drafter.model import Drafter, PackedRows, unroll
from eagle3lib.drafter.vocab import build_vocab_map, count_tokens
from eagle3lib.engine.client import Client
from eagle3lib.engine.config import EngineConfig
from eagle3lib.engine.launch import EngineServer
from eagle3lib.measure.arms import OWN, RequestRow
from eagle3lib.target.folder import open_target
from eagle3lib.target.forward import forward_states
from eagle3lib.target.model import TargetHead, load_target
from eagle3lib.training.loss import Teacher, draft_ids, label_steps, step_scale, ttt_loss

pytestmark = [pytest.mark.long, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, TOKENS, UPDATES = 3, 40, 60
QUESTIONS = (
    "Name three fruits.", "Write a Python function that adds two numbers.", "What is the moon?",
    "Count from one to ten.", "Why is the sky blue?", "Say good morning in French.",
)  # fmt: skip


def trained(target, head, rows, states, slots):
    """A drafter with every option that has learnt these rows by heart, or nearly."""
    prompts = [n for _, n in rows]
    packed = PackedRows.pack([ids for ids, _ in rows], prompts)
    counts = count_tokens(ids[n:].tolist() for ids, n in rows)
    vocab = build_vocab_map(counts, target.vocab_size, 512, target.stop_ids())
    config = DrafterConfig.for_target(
        target.config,
        512,
        slots=slots,
        intermediate_size=1024,  # not the target's
        **dict.fromkeys(OPTIONS, True),
    )
    torch.manual_seed(0)
    drafter = Drafter(config)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.02)
            elif "norm" in name:  # norms of ones would hide one that is left out
                parameter.uniform_(0.6, 1.4)
        drafter.embed_tokens.weight.copy_(head.embedding)
        drafter.lm_head.weight.copy_(head.head[vocab.target_ids])
        drafter.norm.weight.copy_(head.norm)
    drafter.embed_tokens.weight.requires_grad_(False)
    set_vocab(drafter, vocab)
    slots_states = torch.cat([s[:, :-1].flatten(1) for s in states])
    normed = head.normed(torch.cat([s[:, -1] for s in states]))
    greedy = (normed @ head.head.T).argmax(-1)
    labels = label_steps(packed, greedy, draft_ids(drafter.t2d), STEPS)
    teacher = Teacher(normed, head.head[vocab.target_ids])
    scale = step_scale(labels.positions, [1.0] * STEPS)
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(UPDATES):
        made = unroll(drafter, packed, slots_states, STEPS, feed="truth")
        loss, _ = ttt_loss(drafter, made, labels, teacher, scale)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
    return drafter.eval()


def test_vllms_rounds_are_the_simulators_with_every_option_on(tmp_path):
    target = open_target("smollm2-135m-instruct")
    head, model = TargetHead(target), load_target(target, "float32")
    template = load_chat_template(target.folder, target.stop_ids())
    asked = [[{"role": "user", "content": q}] for q in QUESTIONS]
    rows = []
    for messages in asked:
        prompt = torch.tensor([template.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )])  # fmt: skip
        with torch.no_grad():
            whole = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False)[0]
        rows.append((whole, prompt.shape[1]))
    slots = (2, 15, 27)
    states = [forward_states(model, [ids.tolist()], slots)[0] for ids, _ in rows]
    folder = tmp_path / "drafter"
    folder.mkdir()
    write_drafter(folder, trained(target, head, rows, states, slots), torch.float32)

    engine = EngineConfig(
        target.folder, "float32", 512, max_num_seqs=1, drafter=folder, num_speculative_tokens=STEPS
    )
    served = []
    with EngineServer(engine, log=tmp_path / "vllm.log") as server:
        client = Client(server.url)
        for i, messages in enumerate(asked):
            a = client.chat(messages, max_tokens=TOKENS, temperature=0.0)
            assert a.rounds is not None
            served.append(RequestRow(OWN, "workload", str(i), 0, a.prompt_token_ids,
                                     a.answer_token_ids, a.finish_reason, 0.0, a.rounds.accepted,
                                     a.rounds.drafted))  # fmt: skip
    material = foreign_material(LiveTarget(target, "float32"), folder, served, STEPS)
    found = compare_counts(replay_sets(material)["workload"], STEPS, "float32")
    print(found)
    assert found["rounds_equal"] == found["rounds_compared"] > 20
    assert found["engine"]["acceptance_length"] > 1.5, "too few accepted to tell anything"

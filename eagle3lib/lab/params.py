"""Parameters: the one place that owns type, default and help of everything a user can set.

``eagle3 notebooks`` writes the notebooks' ``parameters`` cells from these models, a profile
(``params/NAME.yaml``) holds ``common:`` and one section a phase, and the command line overrides
both. The defaults are the demo: SmolLM2-135M-Instruct with vLLM on a CPU.

Types stay what papermill's parameter cells can hold: str, int, float, bool, list.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from eagle3lib.lab.benchmark_params import BenchmarkParams
from eagle3lib.lab.phase_params import ENGINE_SETTINGS, Dtype, PhaseParams
from eagle3lib.lab.plan_params import PlanParams

Loss = Literal["kl", "ce", "rkl", "tv", "lk", "hybrid"]
States = Literal["disk", "live"]
PromptFormat = Literal["auto", "messages", "conversations", "prompt", "instruction", "text"]


class GenerateParams(PhaseParams):
    PHASE: ClassVar[str] = "01_generate_data"
    FREE: ClassVar[tuple[str, ...]] = (
        "server",
        "engine",
        "engine_settings",
        "concurrency",
        "max_reject_share",
        "timeout_s",
    )
    GROWING: ClassVar[tuple[str, ...]] = (
        "answer_tokens",
        "answers_per_prompt",
        "heldout_workload",
        "heldout_general",
    )
    FILES: ClassVar[tuple[str, ...]] = ("workload", "general", "answers")

    workload: str = Field(
        "params/prompts/python_tasks.jsonl", description="prompts that the drafter is to be good at"
    )
    general: str = Field(
        "params/prompts/general.jsonl", description="prompts of another kind, reported beside it"
    )
    answers: str = Field(
        "", description="conversations answered by others to train on, empty asks the target"
    )
    prompt_format: PromptFormat = Field(
        "auto", description="auto, messages, conversations, prompt, instruction or text"
    )
    max_prompt_chars: int = Field(
        200_000, ge=1, description="a prompt of more characters is rejected"
    )
    near_duplicate_similarity: float = Field(
        0.0, ge=0, le=1, description="from this similarity on two prompts are one, 0 is off"
    )
    answer_tokens: int = Field(
        15_000, ge=1, description="stop after so many training answer tokens"
    )
    heldout_workload: int = Field(40, ge=1, description="held-out prompts of the workload")
    heldout_general: int = Field(20, ge=0, description="held-out prompts of the general set")
    max_new_tokens: int = Field(96, ge=4, description="longest answer, in tokens")
    temperature: float = Field(0.0, ge=0, le=2, description="sampling temperature, 0 is greedy")
    answers_per_prompt: int = Field(
        1, ge=1, description="answers to each training prompt, more than 1 needs a temperature"
    )
    thinking: Literal["default", "on", "off", "mixed"] = Field(
        "default", description="default (as the chat template has it), on, off or mixed"
    )
    thinking_share: float = Field(
        0.5, ge=0, le=1, description="share of conversations with thinking on, of mixed"
    )
    train_on_cut: bool = Field(
        False, description="train on answers that max_new_tokens cut off too"
    )
    train_before_loop: bool = Field(
        False, description="train on a looping answer up to its loop, with train_on_cut"
    )
    concurrency: int = Field(16, ge=1, le=1024, description="requests in flight at once")
    timeout_s: float = Field(600.0, gt=0, description="longest wait for one answer, in seconds")
    dtype: Dtype = Field(
        "bfloat16", description="bfloat16, float32, or auto for the fast one here, as served"
    )
    max_model_len: int = Field(1024, ge=16, description="longest conversation served, in tokens")
    engine: Literal["vllm", "sglang"] = Field("vllm", description="vllm or sglang, when one starts")
    engine_settings: str = Field("", description=ENGINE_SETTINGS)
    trust_remote_code: bool = Field(
        False, description="run the code that a tokenizer brings with it, Kimi's does"
    )
    max_reject_share: float = Field(
        0.2, ge=0, le=1, description="stop when a larger share of the rows was rejected"
    )
    server: str = Field(
        "", description="addresses of running servers, parted by commas, empty starts one"
    )

    @field_validator("answers_per_prompt")
    @classmethod
    def _greedy_answers_are_all_the_same(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("temperature") == 0:
            raise ValueError("answers_per_prompt above 1 needs a temperature above 0")
        return value

    @field_validator("thinking", mode="before")
    @classmethod
    def _yaml_reads_on_as_true(cls, value: Any) -> Any:
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    def servers(self) -> list[str]:
        """Addresses of parameter ``server``, each once."""
        named = (part.strip().rstrip("/") for part in self.server.split(","))
        return list(dict.fromkeys(part for part in named if part))


class CaptureParams(PhaseParams):
    PHASE: ClassVar[str] = "02_capture_hidden_states"
    FREE: ClassVar[tuple[str, ...]] = (
        "device",
        "engine_settings",
        "batch_tokens",
        "min_teacher_agreement",
    )
    UPSTREAM: ClassVar[tuple[str, ...]] = ("01_generate_data",)

    states: States = Field(
        "disk", description="disk, or live (a few are stored as a proof, training makes its own)"
    )
    dtype: Dtype = Field(
        "bfloat16", description="bfloat16, float32 or auto, of the target and the states"
    )
    source: Literal["transformers", "vllm", "sglang"] = Field(
        "transformers", description="transformers in this process, or vllm or sglang, as a server"
    )
    engine_settings: str = Field("", description=ENGINE_SETTINGS)
    device: str = Field("auto", description="auto, cpu, cuda or cuda:1, for source transformers")
    trust_remote_code: bool = Field(
        False, description="run the Python files of the target's folder; read them before"
    )
    batch_tokens: int = Field(2048, ge=1, description="tokens in one forward, padding included")
    slots: str = Field(
        "", description="captured states by HF index, such as 2,15,27, empty is 2, n//2, n-3"
    )
    shard_rows: int = Field(64, ge=1, description="conversations in one shard file")
    state_format: Literal["full", "fp8", "compact"] = Field(
        "full", description="full (as dtype), fp8, or compact (6-bit slots, 8-bit last state)"
    )
    min_teacher_agreement: float = Field(
        0.9, ge=0, le=1, description="least share of greedy answer tokens that the states must give"
    )


class VocabParams(PhaseParams):
    PHASE: ClassVar[str] = "03_build_vocab_map"
    FILES: ClassVar[tuple[str, ...]] = ("warm_start",)
    UPSTREAM: ClassVar[tuple[str, ...]] = ("01_generate_data",)

    draft_vocab_size: int = Field(
        4096, ge=0, description="tokens that the drafter can propose, 0 chooses by the curve"
    )
    num_speculative_tokens: int = Field(
        3, ge=1, le=16, description="K of the estimate that the curve chooses by"
    )
    warm_start: str = Field(
        "", description="folder of a drafter to go on from, its vocabulary map is kept"
    )

    @field_validator("draft_vocab_size")
    @classmethod
    def _few_tokens_are_no_vocabulary(cls, value: int) -> int:
        if 0 < value < 8:
            raise ValueError("0 (chosen by the curve), or at least 8 tokens")
        return value


class TrainParams(PhaseParams):
    PHASE: ClassVar[str] = "04_train_drafter"
    FREE: ClassVar[tuple[str, ...]] = (
        "accumulate",
        "recompute",
        "checkpoint_every_s",
        "max_minutes",
        "target_batch_tokens",
        "device",
        "sharding",
        "processes",
        "nodes",
        "rendezvous",
        "tracker",
    )
    FILES: ClassVar[tuple[str, ...]] = ("warm_start",)
    UPSTREAM: ClassVar[tuple[str, ...]] = (
        "01_generate_data",
        "02_capture_hidden_states",
        "03_build_vocab_map",
    )

    states: States = Field(
        "disk", description="disk (of phase 02), or live, made by the target as they are needed"
    )
    target_batch_tokens: int = Field(
        32768, ge=1, description="tokens in one forward of the target, for live states"
    )
    epochs: int = Field(12, ge=1, description="passes over the training answers")
    steps: int = Field(
        4, ge=1, le=16, description="training-time-test steps, 7 is the general choice"
    )
    step_weight: float = Field(
        0.8, gt=0, le=1, description="weight of a step's loss over the one before"
    )
    loss: Loss = Field("kl", description="kl, ce, rkl, tv, lk or hybrid, see training/kinds.py")
    loss_temperature: float = Field(
        1.0, gt=0, description="sampling temperature that the loss is of, target and drafter alike"
    )
    batch_tokens: int = Field(
        1300, ge=1, description="tokens in one optimizer update, over all processes"
    )
    accumulate: int = Field(
        1, ge=1, description="parts that each process cuts its share of an update into, for memory"
    )
    max_tokens_per_row: int = Field(
        0, ge=0, description="longer conversations are cut at the end and counted, 0 is never"
    )
    recompute: bool = Field(
        False, description="compute MLP activations again in the backward, for memory"
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="adamw, or muon for the hidden matrices with adamw for the rest"
    )
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate")
    warmup_share: float = Field(0.05, ge=0, le=1, description="share of all updates that warm up")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay of matrices")
    max_grad_norm: float = Field(1.0, gt=0, description="gradient clipping, global norm")
    precision: Dtype = Field(
        "bfloat16", description="bfloat16, float32 or auto, of the products, weights stay float32"
    )
    warm_start: str = Field(
        "", description="folder of a drafter to start from, empty starts from the target's head"
    )
    drafter_kind: Literal["auto", "llama", "mla"] = Field(
        "auto", description="auto (the target's kind of attention), llama or mla"
    )
    intermediate_size: int = Field(
        0, ge=0, description="width of the drafter's MLP, 0 is the target's"
    )
    fc_norm: bool = Field(False, description="EAGLE 3.1: norm every slot before fc")
    norm_output: bool = Field(False, description="EAGLE 3.1: feed the normed state back")
    norm_before_fc: bool = Field(False, description="norm the slots together before fc")
    norm_before_residual: bool = Field(False, description="the residual is the normed state")
    replace_vocab_map: bool = Field(
        False, description="give a warm start the map of phase 03 in place of its own"
    )
    checkpoint_every: int = Field(1, ge=1, description="epochs between evaluations")
    checkpoint_every_s: float = Field(
        300.0, ge=0, description="seconds between checkpoints within an epoch"
    )
    max_minutes: float = Field(
        0.0, ge=0, description="stop at a checkpoint after so long, to be run again, 0 is never"
    )
    num_speculative_tokens: int = Field(3, ge=1, le=16, description="K of the evaluations")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto (a GPU where there is one), cpu or cuda"
    )
    sharding: Literal["none", "fsdp"] = Field(
        "none", description="none (a copy of the weights a process) or fsdp (FSDP2)"
    )
    processes: int = Field(1, ge=1, description="training processes on this machine, one a GPU")
    rendezvous: str = Field(
        "", description="HOST:PORT of this machine as the other nodes reach it, empty for one node"
    )
    nodes: int = Field(1, ge=1, description="machines, each with as many processes")
    tracker: Literal["none", "trackio", "tensorboard", "wandb"] = Field(
        "none", description="none, trackio, tensorboard or wandb, beside metrics.jsonl"
    )
    seed: int = Field(0, ge=0, description="seed of weights and of the order of rows")

    @field_validator("intermediate_size")
    @classmethod
    def _a_warm_start_has_its_own_width(cls, value: int, info: ValidationInfo) -> int:
        if value and info.data.get("warm_start"):
            raise ValueError("a warm start keeps the width of its checkpoint: leave it at 0")
        return value

    @field_validator("nodes")
    @classmethod
    def _nodes_must_find_each_other(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and not re.fullmatch(r"[^\s:]+:\d+", info.data.get("rendezvous", "")):
            raise ValueError("nodes above 1 needs rendezvous as HOST:PORT of this machine")
        return value


class ExportParams(PhaseParams):
    PHASE: ClassVar[str] = "05_export_drafter"
    FREE: ClassVar[tuple[str, ...]] = ("max_logit_difference", "ask_engines")
    UPSTREAM: ClassVar[tuple[str, ...]] = ("04_train_drafter",)

    dtype: Dtype = Field(
        "bfloat16", description="bfloat16, float32 or auto, of the exported weights"
    )
    max_logit_difference: float = Field(
        0.0, ge=0, description="largest difference in logits after the reload, same dtype"
    )
    serve_with: Literal["both", "vllm"] = Field(
        "both", description="both engines or vllm alone, which can be told more"
    )
    max_shard_mib: int = Field(0, ge=0, description="largest weights file in MiB, 0 for one file")
    ask_engines: bool = Field(True, description="ask the installed engines what they will read")
    base_model: str = Field(
        "", description="Hub id of the target in the model card, where target is a folder"
    )
    licence: str = Field(
        "", description="licence in the model card, such as apache-2.0, none if empty"
    )


class DiagnoseParams(PhaseParams):
    PHASE: ClassVar[str] = "07_diagnose_acceptance"
    # The export is the benchmark's upstream, unless a drafter from elsewhere was measured.
    UPSTREAM: ClassVar[tuple[str, ...]] = ("06_benchmark_serving",)

    tolerance: float = Field(
        0.01,
        gt=0,
        lt=1,
        description="relative difference of pooled acceptance length that is agreement",
    )
    good_acceptance_length: float = Field(
        1.5, ge=1, description="acceptance length from which the drafter is called good"
    )


PHASES: dict[str, type[PhaseParams]] = {
    model.PHASE: model
    for model in (
        PlanParams,
        GenerateParams,
        CaptureParams,
        VocabParams,
        TrainParams,
        ExportParams,
        BenchmarkParams,
        DiagnoseParams,
    )
}

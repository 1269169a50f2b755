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
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.phase_params import Dtype, PhaseParams, hub_id, numbers_of, resolve

__all__ = [
    "PHASES",
    "ROOT",
    "BenchmarkParams",
    "Dtype",
    "PhaseParams",
    "hub_id",
    "numbers_of",
    "resolve",
]

PromptFormat = Literal["auto", "messages", "conversations", "prompt", "instruction", "text"]


class PlanParams(PhaseParams):
    PHASE: ClassVar[str] = "00_plan"

    answer_tokens: int = Field(15_000, ge=1, description="answer tokens that are to be generated")
    prompt_tokens_per_answer_token: float = Field(
        0.6, ge=0, description="prompt tokens captured for each answer token"
    )
    max_model_len: int = Field(1024, ge=16, description="longest conversation served, in tokens")
    context_tokens: int = Field(512, ge=0, description="tokens already there in a decode step")
    batch_sizes: str = Field(
        "1,8,32", description="sequences decoded at once, rising, parted by commas"
    )
    num_speculative_tokens: int = Field(3, ge=1, le=16, description="K, drafted tokens per round")
    acceptance_per_step: float = Field(
        0.6, gt=0, lt=1, description="hoped-for acceptance of a step given those before it"
    )
    draft_vocab_size: int = Field(4096, ge=8, description="tokens that the drafter can propose")
    storage: Literal["bf16", "fp8", "compact", "stream"] = Field(
        "bf16", description="bf16, fp8, compact, or stream (nothing stored)"
    )
    epochs: int = Field(12, ge=1, description="passes over the training answers")
    steps: int = Field(
        4, ge=1, le=16, description="training-time-test steps, 7 is the general choice"
    )
    gpu: str = Field("auto", description="auto, cpu, or a name of the GPU table (eagle3 plan)")
    gpus: int = Field(1, ge=1, description="GPUs that one copy of the target is spread over")
    copies: int = Field(1, ge=1, description="copies of the target that work side by side")
    memory_gb: float = Field(0.0, ge=0, description="memory of one GPU, 0 takes the table's")
    bandwidth_gb_per_s: float = Field(
        0.0,
        ge=0,
        description="of one GPU's memory, 0 is the table's or measured",
    )
    tflops: float = Field(0.0, ge=0, description="dense bf16, of one GPU, 0 takes the table's")
    link_gb_per_s: float = Field(
        0.0, ge=0, description="interconnect in one direction, 0 takes the table's"
    )
    collective_us: float = Field(
        0.0, ge=0, description="latency of one all-reduce, 0 takes the table's"
    )
    bandwidth_share: float = Field(
        0.0, ge=0, le=1, description="share that decoding reaches, 0 is 0.65 (CPU 0.35)"
    )
    compute_share: float = Field(
        0.0, ge=0, le=1, description="share of the TFLOP/s reached, 0 is 0.43 (CPU 0.95)"
    )
    layer_us: float = Field(
        0.0, ge=0, description="fixed time of a layer's kernels, 0 is 20 (CPU 0)"
    )
    host_ms: float = Field(0.0, ge=0, description="host time before each forward, milliseconds")
    measured_round_cost: float = Field(
        0.0, ge=0, description="as benchmarked at batch 1 and K, 0 predicts it"
    )
    generate_tokens_per_s: float = Field(
        0.0, ge=0, description="measured speed of generation, 0 estimates"
    )
    capture_tokens_per_s: float = Field(
        0.0, ge=0, description="measured speed of capture, 0 estimates"
    )
    train_tokens_per_s: float = Field(
        0.0, ge=0, description="measured speed of training, 0 estimates"
    )
    disk_free_gb: float = Field(0.0, ge=0, description="disk for the states, 0 looks here")

    @field_validator("batch_sizes", mode="before")
    @classmethod
    def _one_batch_size_is_a_number_in_yaml(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) else value

    @field_validator("batch_sizes")
    @classmethod
    def _batch_sizes_rise(cls, value: str) -> str:
        if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", value):
            raise ValueError("batch_sizes are whole numbers parted by commas")
        sizes = [int(part) for part in value.split(",")]
        if sizes[0] < 1 or sizes != sorted(set(sizes)):
            raise ValueError("batch_sizes are rising numbers from 1 on")
        return value

    def batches(self) -> list[int]:
        """The numbers of parameter ``batch_sizes``."""
        return [int(part) for part in self.batch_sizes.split(",")]


class GenerateParams(PhaseParams):
    PHASE: ClassVar[str] = "01_generate_data"
    FREE: ClassVar[tuple[str, ...]] = ("server", "concurrency", "max_reject_share", "timeout_s")
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
    concurrency: int = Field(16, ge=1, le=1024, description="requests in flight at once")
    timeout_s: float = Field(600.0, gt=0, description="longest wait for one answer, in seconds")
    dtype: Dtype = Field("bfloat16", description="bfloat16 or float32, as served")
    max_model_len: int = Field(1024, ge=16, description="longest conversation served, in tokens")
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
    FREE: ClassVar[tuple[str, ...]] = ("batch_tokens", "min_teacher_agreement")
    UPSTREAM: ClassVar[tuple[str, ...]] = ("01_generate_data",)

    dtype: Dtype = Field(
        "bfloat16", description="bfloat16 or float32, of the target and the states"
    )
    batch_tokens: int = Field(2048, ge=1, description="tokens in one forward, padding included")
    shard_rows: int = Field(64, ge=1, description="conversations in one shard file")
    min_teacher_agreement: float = Field(
        0.9, ge=0, le=1, description="least share of greedy answer tokens that the states must give"
    )


class VocabParams(PhaseParams):
    PHASE: ClassVar[str] = "03_build_vocab_map"
    UPSTREAM: ClassVar[tuple[str, ...]] = ("01_generate_data",)

    draft_vocab_size: int = Field(4096, ge=8, description="tokens that the drafter can propose")


class TrainParams(PhaseParams):
    PHASE: ClassVar[str] = "04_train_drafter"
    UPSTREAM: ClassVar[tuple[str, ...]] = ("02_capture_hidden_states", "03_build_vocab_map")

    epochs: int = Field(12, ge=1, description="passes over the training answers")
    steps: int = Field(
        4, ge=1, le=16, description="training-time-test steps, 7 is the general choice"
    )
    step_weight: float = Field(
        0.8, gt=0, le=1, description="weight of a step's loss over the one before"
    )
    batch_rows: int = Field(8, ge=1, description="conversations in one optimizer step")
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate of AdamW")
    warmup_share: float = Field(0.05, ge=0, le=1, description="share of all updates that warm up")
    weight_decay: float = Field(0.01, ge=0, description="AdamW weight decay of matrices")
    max_grad_norm: float = Field(1.0, gt=0, description="gradient clipping, global norm")
    precision: Dtype = Field("bfloat16", description="bfloat16 or float32, of the matrix products")
    checkpoint_every: int = Field(1, ge=1, description="epochs between checkpoints and evaluations")
    num_speculative_tokens: int = Field(3, ge=1, le=16, description="K of the evaluations")
    processes: int = Field(1, ge=1, description="training processes on this machine, one a GPU")
    seed: int = Field(0, ge=0, description="seed of weights and of the order of rows")


class ExportParams(PhaseParams):
    PHASE: ClassVar[str] = "05_export_drafter"
    FREE: ClassVar[tuple[str, ...]] = ("max_logit_difference",)
    UPSTREAM: ClassVar[tuple[str, ...]] = ("04_train_drafter",)

    dtype: Dtype = Field("bfloat16", description="bfloat16 or float32, of the exported weights")
    max_logit_difference: float = Field(
        0.0, ge=0, description="largest difference in logits after the reload, same dtype"
    )


class DiagnoseParams(PhaseParams):
    PHASE: ClassVar[str] = "07_diagnose_acceptance"
    UPSTREAM: ClassVar[tuple[str, ...]] = ("05_export_drafter", "06_benchmark_serving")

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

"""Parameters of the plan: what is wanted, and the machine it is wanted on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from eagle3lib.lab.phase_params import PhaseParams

# What the plan takes from the phases that it plans, where a profile gives it no value of its own.
_FOLLOWS = {
    "answer_tokens": "01_generate_data",
    "max_model_len": "01_generate_data",
    "draft_vocab_size": "03_build_vocab_map",
    "epochs": "04_train_drafter",
    "steps": "04_train_drafter",
    "num_speculative_tokens": "06_benchmark_serving",
}
_STORAGE = {"full": "bf16", "fp8": "fp8", "compact": "compact"}


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

    @classmethod
    def followed(cls, phases: Mapping[str, PhaseParams]) -> dict[str, tuple[Any, str]]:
        """Parameter -> value and phase, of what the other phases' parameters decide otherwise than
        the defaults do: a plan of other numbers than what is run would be of no use."""
        found = {n: (getattr(phases[phase], n), phase) for n, phase in _FOLLOWS.items()}
        if not found["draft_vocab_size"][0]:  # chosen by the curve, or a warm start's
            del found["draft_vocab_size"]
        capture = "02_capture_hidden_states"
        kept: Any = phases[capture]
        live = getattr(phases["04_train_drafter"], "states", "disk") == "live"
        storage = "stream" if live else _STORAGE[kept.state_format]
        found["storage"] = (storage, "04_train_drafter" if live else capture)
        return {n: f for n, f in found.items() if f[0] != cls.model_fields[n].default}

    def batches(self) -> list[int]:
        """The numbers of parameter ``batch_sizes``."""
        return [int(part) for part in self.batch_sizes.split(",")]

"""Parameters: the one place that owns type, default and help of everything a user can set.

``eagle3 notebooks`` writes the notebooks' ``parameters`` cells from these models, a profile
(``params/NAME.yaml``) holds ``common:`` and one section a phase, and the command line overrides
both. The defaults are the demo: SmolLM2-135M-Instruct with vLLM on a CPU.

Types stay what papermill's parameter cells can hold: str, int, float, bool, list.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.machine import ROOT

Dtype = Literal["bfloat16", "float32"]
PromptFormat = Literal["auto", "messages", "conversations", "prompt", "instruction", "text"]
_FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".txt", ".gz", ".zst")


class PhaseParams(BaseModel):
    """What every phase takes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    PHASE: ClassVar[str] = ""
    UPSTREAM: ClassVar[tuple[str, ...]] = ()
    FILES: ClassVar[tuple[str, ...]] = ()  # fields that name input files
    FREE: ClassVar[tuple[str, ...]] = ()  # fields that don't decide the result: no rerun
    GROWING: ClassVar[tuple[str, ...]] = ()  # more of it continues what is there

    run: str = Field("demo", description="name of the run; its folder is outputs/RUN")
    target: str = Field(
        "smollm2-135m-instruct",
        description="smollm2-135m-instruct, a local folder, or a Hub id",
    )

    @field_validator("run")
    @classmethod
    def _run_is_a_folder_name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value) or value == "examples":
            raise ValueError("a run's name is letters, digits, '.', '_', '-', and not 'examples'")
        return value

    @classmethod
    def from_notebook(cls, namespace: dict[str, Any]) -> Self:
        """Read the values of a notebook's ``parameters`` cell (and of what was injected after
        it)."""
        missing = [name for name in cls.model_fields if name not in namespace]
        if missing:
            raise UserError(
                f"the parameters cell lacks: {', '.join(missing)}",
                expected=f"every field of {cls.__name__}",
                where=f"notebooks/{cls.PHASE}.ipynb",
                next="eagle3 notebooks",
            )
        return cls.checked(
            {name: namespace[name] for name in cls.model_fields}, "the parameters cell"
        )

    @classmethod
    def checked(cls, values: dict[str, Any], source: str) -> Self:
        """Validate; every problem becomes a line of one ``UserError`` that names the parameter."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            lines = [_explain(cls, problem) for problem in error.errors()]
            raise UserError(
                "\n".join(lines), where=source, next=f"eagle3 params {cls.PHASE}"
            ) from None

    def input_files(self) -> dict[str, Path]:
        """Parameter name -> path of the input files and folders named by parameters (relative to
        the repository); what comes from the Hub has none."""
        named = {field: getattr(self, field) for field in self.FILES}
        return {f: resolve(value) for f, value in named.items() if value and not hub_id(value)}


def resolve(path: str) -> Path:
    """A path of the parameters: absolute, or relative to the repository."""
    given = Path(path).expanduser()
    return given if given.is_absolute() else ROOT / given


def hub_id(value: str) -> str:
    """``ORG/NAME`` of a data set on the Hub, "" where ``value`` names a path.

    ``hub:`` in front says so; without it ``ORG/NAME`` is taken for the Hub's when no such path is
    there and no ending says that a file is meant.
    """
    name = value.removeprefix("hub:")
    if name != value:
        return name
    looks_like_one = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", value)
    if not looks_like_one or Path(value).suffix in _FILE_SUFFIXES or resolve(value).exists():
        return ""
    return value


def _explain(cls: type[PhaseParams], problem: Any) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = ", ".join(cls.model_fields)
        return f"unknown parameter {name!r} of {cls.PHASE}; known are: {known}"
    return f"parameter {name!r} of {cls.PHASE}: found {problem['input']!r}; {problem['msg']}"


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


class BenchmarkParams(PhaseParams):
    PHASE: ClassVar[str] = "06_benchmark_serving"
    GROWING: ClassVar[tuple[str, ...]] = ("workload_prompts", "general_prompts", "repeats")
    UPSTREAM: ClassVar[tuple[str, ...]] = ("01_generate_data", "05_export_drafter")

    num_speculative_tokens: int = Field(3, ge=1, le=16, description="K, drafted tokens per round")
    workload_prompts: int = Field(16, ge=1, description="held-out prompts of the workload")
    general_prompts: int = Field(8, ge=0, description="held-out prompts of the general set")
    repeats: int = Field(3, ge=1, description="times that every prompt is asked of every arm")
    max_new_tokens: int = Field(96, ge=4, description="longest answer, in tokens")
    dtype: Dtype = Field("bfloat16", description="bfloat16 or float32, as served")
    max_model_len: int = Field(1024, ge=16, description="longest conversation served, in tokens")
    compile: bool = Field(False, description="let the engine compile its graphs, slow to start")
    reference_drafter: str = Field("", description="folder of a known-good drafter, a second arm")


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

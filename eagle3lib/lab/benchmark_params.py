"""Parameters of the benchmark: the headline, the sweeps around it, the gates."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from eagle3lib.lab.phase_params import ENGINE_SETTINGS, Dtype, PhaseParams, numbers_of


class BenchmarkParams(PhaseParams):
    PHASE: ClassVar[str] = "06_benchmark_serving"
    FILES: ClassVar[tuple[str, ...]] = ("reference_drafter", "drafter")
    FREE: ClassVar[tuple[str, ...]] = ("price_per_hour", "lossless_alpha", "trust_remote_code")
    GROWING: ClassVar[tuple[str, ...]] = (
        "workload_prompts",
        "general_prompts",
        "repeats",
        "bench_serve",
    )
    UPSTREAM: ClassVar[tuple[str, ...]] = ("01_generate_data", "05_export_drafter")

    num_speculative_tokens: int = Field(3, ge=1, le=16, description="K, drafted tokens per round")
    workload_prompts: int = Field(16, ge=1, description="held-out prompts of the workload")
    general_prompts: int = Field(8, ge=0, description="held-out prompts of the general set")
    repeats: int = Field(3, ge=1, description="times that every prompt is asked of every arm")
    max_new_tokens: int = Field(96, ge=4, description="longest answer, in tokens")
    dtype: Dtype = Field(
        "bfloat16", description="bfloat16, float32, or auto for the fast one here, as served"
    )
    max_model_len: int = Field(1024, ge=16, description="longest conversation served, in tokens")
    compile: bool = Field(False, description="let the engine compile its graphs, slow to start")
    trust_remote_code: bool = Field(
        False, description="run the Python files of the target's folder; read them before"
    )
    vllm_settings: str = Field("", description=ENGINE_SETTINGS)
    sglang_settings: str = Field("", description=ENGINE_SETTINGS)
    drafter: str = Field("", description="folder to measure in place of the one of phase 05")
    reference_drafter: str = Field("", description="known-good, a second arm")
    reference_acceptance_length: float = Field(
        1.2, ge=1, description="least of the reference drafter, its gate"
    )
    own_acceptance_length: float = Field(
        1.0, ge=1, description="least of the own drafter, its gate, 1 is none"
    )
    engines: str = Field("vllm", description="vllm, sglang or both, parted by commas")
    concurrency: str = Field("1", description="requests in flight, a sweep parted by commas")
    more_speculative_tokens: str = Field("", description="other K to measure, parted by commas")
    temperatures: str = Field("0", description="sampling temperatures, parted by commas")
    context_tokens: str = Field(
        "", description="prompts filled up to so many tokens, a sweep parted by commas"
    )
    side_by_side: bool = Field(
        True, description="all servers up at once, false measures in A-B-A blocks"
    )
    lossless_samples: int = Field(
        200, ge=20, description="samples of one prompt and arm at each temperature above 0"
    )
    lossless_alpha: float = Field(
        0.01, gt=0, lt=0.5, description="false alarm rate of the test that sampling is lossless"
    )
    bench_serve: bool = Field(
        False, description="the headline once more under vllm bench serve, a second opinion"
    )
    price_per_hour: float = Field(0.0, ge=0, description="of the machine, 0 tells no cost")

    def upstream(self) -> tuple[str, ...]:
        return self.UPSTREAM[:1] if self.drafter else self.UPSTREAM

    @field_validator(
        "concurrency", "more_speculative_tokens", "temperatures", "context_tokens", mode="before"
    )
    @classmethod
    def _one_number_is_a_list_too(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        return str(int(value) if isinstance(value, float) and value.is_integer() else value)

    @field_validator("engines")
    @classmethod
    def _engines_are_known(cls, value: str) -> str:
        named = numbers_of(value, str)
        if not named or set(named) - {"vllm", "sglang"} or len(set(named)) < len(named):
            raise ValueError("vllm, sglang, or vllm,sglang")
        return value

    @field_validator("concurrency", "more_speculative_tokens", "temperatures", "context_tokens")
    @classmethod
    def _numbers_parted_by_commas(cls, value: str, info: ValidationInfo) -> str:
        kind = float if info.field_name == "temperatures" else int
        try:
            found = numbers_of(value, kind)
        except ValueError:
            raise ValueError("numbers parted by commas") from None
        least = 0 if kind is float else 1
        if any(not least <= n < 10**9 for n in found) or len(set(found)) < len(found):
            raise ValueError(f"numbers from {least} on, each once")
        if not found and info.field_name in ("concurrency", "temperatures"):
            raise ValueError("one number at least")
        return value

    @field_validator("side_by_side")
    @classmethod
    def _blocks_need_the_baseline_twice(cls, value: bool, info: ValidationInfo) -> bool:
        if not value and info.data.get("repeats", 2) < 2:
            raise ValueError("A-B-A blocks measure the baseline twice: repeats must be 2 or more")
        return value

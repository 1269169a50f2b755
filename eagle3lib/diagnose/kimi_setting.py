"""What a replay of the Kimi-shaped pipeline is made of, and the clock that its steps share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from eagle3lib.engine.config import EngineConfig
from eagle3lib.lab.params import TrainParams
from eagle3lib.target.folder import Target, open_target
from eagle3lib.target.kimi_shaped import Size
from eagle3lib.target.model import best_device
from eagle3lib.training.small_target import TargetTraining

Kind = Literal["llama", "mla"]
Told = dict[str, Any]
KINDS: tuple[Kind, ...] = ("llama", "mla")
# Several engines on one GPU: each is told its cache, none measures what the others left free.
ENGINE_FLAGS: dict[str, tuple[str, ...]] = {
    "vllm": ("--language-model-only", "--kv-cache-memory-bytes", str(2 * 2**30)),
    # Marlin's INT4 kernels are compiled with nvcc at first use, Triton's by Triton itself.
    "sglang": ("--skip-server-warmup", "--mm-attention-backend", "sdpa",
               "--max-total-tokens", "65536", "--moe-runner-backend", "triton"),
}  # fmt: skip
# Of a GPU. vLLM wants it to be free when it starts, beside other servers, though its cache is told;
# SGLang takes it of what is free, and its cache is told too.
_MEMORY_SHARE = {"vllm": 0.3, "sglang": 0.5}
_MODEL_LEN = 1024  # tokens of prompt and answer, as served
_SIZE, _TRAINING = Size(), TargetTraining(150.0)
_DRAFTER = TrainParams(epochs=6, steps=5, batch_tokens=16_000, checkpoint_every=3)


@dataclass(frozen=True)
class Bench:
    """What a replay is made of; the defaults are those of one H200."""

    work: Path
    rows: Path | None = None
    of: str = "smollm2-135m-instruct"  # whose tokenizer, template and answers
    size: Size = _SIZE
    training: TargetTraining = _TRAINING
    int4: bool = True
    dtype: str = "bfloat16"
    prompts: int = 3000
    heldout: int = 16
    max_new_tokens: int = 128
    concurrency: int = 128
    draft_vocab_size: int = 8192
    steps: int = 3  # K
    drafter: TrainParams = _DRAFTER
    engines: tuple[str, ...] = ("vllm", "sglang")
    kinds: tuple[Kind | None, ...] = (None, *KINDS)  # arms of each engine; None: without a drafter
    flags: dict[str, tuple[str, ...]] = field(default_factory=lambda: ENGINE_FLAGS)
    fallback: bool = True  # an engine that does not start is tried with other settings
    starts_at_once: int = 3
    minutes: float = 0.0  # for all steps of this process, 0 is no limit
    answer_s: float = 60.0  # to ask the target in; what is answered by then is enough
    start_s: float = 180.0  # to be ready in, a server
    train_s: float = 200.0  # for both drafters, compiling included
    ask_s: float = 120.0  # for the held-out prompts of an arm
    began_s: float = field(default_factory=time.monotonic)

    def left_s(self) -> float:
        return 60 * self.minutes + self.began_s - time.monotonic() if self.minutes else float("inf")

    def drafter_folder(self, kind: Kind) -> Path:
        return self.work / f"drafter-{kind}"

    @property
    def folder(self) -> Path:
        """The target that is served."""
        return self.work / ("target-int4" if self.int4 else "target")

    def served(self) -> Target:
        return open_target(str(self.folder))

    def engine(self, engine: str, drafter: Path | None, most: int = 8) -> EngineConfig:
        sglang = engine == "sglang"
        return EngineConfig(
            self.folder,
            self.dtype,
            max_model_len=min(_MODEL_LEN, self.size.positions),
            max_num_seqs=most,
            drafter=drafter,
            num_speculative_tokens=self.steps,
            engine="sglang" if sglang else "vllm",
            attention_backend="triton" if sglang else None,
            trust_remote_code=True,
            memory_share=_MEMORY_SHARE[engine] if best_device() != "cpu" else None,
            extra_flags=self.flags.get(engine, ()),
        )

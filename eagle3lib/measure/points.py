"""What is measured: the headline, and the sweeps around it, one point for each setting.

The first engine, K, concurrency and temperature are the headline. K and concurrency are crossed
(the best K differs by load); temperature and context length are varied alone. The baseline is
measured anew at every point, K included: a machine drifts, so each arm has its own beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.params import BenchmarkParams
from eagle3lib.lab.phase_params import numbers_of

_SEPARATOR = "Some other texts, not part of the task:"


@dataclass(frozen=True)
class Point:
    """``steps`` is K, drafted tokens per round; SGLang's flag counts the root as well."""

    engine: str = "vllm"
    steps: int = 3
    concurrency: int = 1
    temperature: float = 0.0
    context_tokens: int = 0  # 0: the prompts as they are

    @property
    def label(self) -> str:
        words = [self.engine, f"K={self.steps}", f"{self.concurrency} at once"]
        words += [f"T={self.temperature:g}"] if self.temperature else []
        words += [f"context {self.context_tokens}"] if self.context_tokens else []
        return ", ".join(words)


def points_of(cfg: BenchmarkParams) -> list[Point]:
    """Every point of the parameters, the headline first.

    Raises ``UserError`` for a context that ``max_model_len`` can't hold with its answer.
    """
    loads = numbers_of(cfg.concurrency, int)
    heats: list[float] = numbers_of(cfg.temperatures, float)
    contexts = numbers_of(cfg.context_tokens, int)
    more = numbers_of(cfg.more_speculative_tokens, int)
    steps = dict.fromkeys([cfg.num_speculative_tokens, *more])
    if contexts and max(contexts) + cfg.max_new_tokens > cfg.max_model_len:
        raise UserError(
            f"context_tokens {max(contexts)} and max_new_tokens {cfg.max_new_tokens} exceed "
            f"max_model_len {cfg.max_model_len}",
            next="raise max_model_len",
        )
    out: list[Point] = []
    for engine in numbers_of(cfg.engines, str):
        out += [Point(engine, k, load, heats[0]) for k in steps for load in loads]
        first = next(iter(steps))
        out += [Point(engine, first, loads[0], heat) for heat in heats[1:]]
        out += [Point(engine, first, loads[0], heats[0], length) for length in contexts]
    return out


def groups_of(points: Sequence[Point]) -> list[tuple[str, int, list[Point]]]:
    """(engine, K, its points): what one start of the servers can measure."""
    keys = dict.fromkeys((p.engine, p.steps) for p in points)
    return [(e, k, [p for p in points if (p.engine, p.steps) == (e, k)]) for e, k in keys]


def filled_messages(
    messages: list[dict[str, Any]], texts: Sequence[tuple[str, int]], wanted_tokens: int
) -> list[dict[str, Any]]:
    """The conversation with other texts before its first user message, up to ``wanted_tokens``.

    ``texts``: (text, tokens) of other answers; they repeat when they are too few. The length is
    met to within one text; the prompt tokens that the server counts are recorded.
    """
    at = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if at is None or not isinstance(messages[at]["content"], str) or not texts:
        raise UserError(
            "a context sweep needs prompts with a user message of plain text, and other answers",
            next="leave context_tokens empty for this data",
        )
    fitting = [(text, tokens) for text, tokens in texts if 0 < tokens <= wanted_tokens]
    parts: list[str] = []
    held = 0
    while fitting and held + fitting[len(parts) % len(fitting)][1] <= wanted_tokens:
        text, tokens = fitting[len(parts) % len(fitting)]
        parts.append(text)
        held += tokens
    filler = "\n\n".join([_SEPARATOR, *parts])
    changed = messages[at] | {"content": f"{filler}\n\n{messages[at]['content']}"}
    return [*messages[:at], changed, *messages[at + 1 :]]

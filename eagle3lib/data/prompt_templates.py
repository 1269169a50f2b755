"""Templates over real material: functions and prose of pinned wheels, words, maths generators.

Every piece of material is used once, so that no function is explained in one prompt and tested in
another: such twins would stand on both sides of the train and held-out split.
"""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from eagle3lib.data.prompt_sources import Ask, Wheels
from eagle3lib.lab.errors import UserError

VERSION = 1  # of the templates: raise it when any of them changes
MATERIAL = {
    "sympy": "BSD-3-Clause", "django": "BSD-3-Clause", "networkx": "BSD-3-Clause",
    "nltk": "Apache-2.0", "twisted": "MIT", "transformers": "Apache-2.0", "sqlalchemy": "MIT",
    "faker": "MIT", "textual": "MIT", "celery": "BSD-3-Clause", "scrapy": "BSD-3-Clause",
    "inspect-evals": "MIT",
}  # fmt: skip
_CODE = (
    "Explain what this Python function does, step by step.",
    "Write unit tests with pytest for this function.",
    "Write a docstring for this function: what it takes, returns and raises.",
    "Find possible bugs in this function and say how you would fix them.",
    "Rewrite this function so that it is easier to read.",
    "Add type hints to this function.",
    "Translate this Python function to JavaScript.",
    "What are the edge cases of this function? List them with examples.",
    "Review this code as a senior engineer would.",
    "How could this function be made faster? Show the new code.",
)
_IMPLEMENT = "Here are a signature and a docstring. Write the function."
_SUMMARIES = (
    "Summarise this text in two sentences.",
    "Give the main points of this text as a list.",
    "Explain this text to a beginner.",
    "Write three quiz questions about this text, with their answers.",
    "What is this text about? Answer in one short paragraph, then name the key terms.",
)
_TRANSLATIONS = tuple(
    f"Translate this text to {language}."
    for language in ("French", "German", "Spanish", "Italian", "Portuguese")
)
_REWRITINGS = (
    "Rewrite this text in plain English.",
    "Rewrite this text in a more formal tone.",
    "Make this text shorter without losing information.",
    "Rewrite this text as an e-mail to a colleague.",
    "Improve the style of this text, and say what you changed.",
)
_WRITINGS = (
    "Write a short story about a {a} {n} and a {m}.",
    "Explain to a child what a {n} is, with an example that has a {m} in it.",
    "Write a poem about a {a} {n}.",
    "Describe a {a} {n} in detail, as for a catalogue.",
    "What do a {n} and a {m} have in common, and how do they differ?",
    "Give me five ideas for a gift for someone who likes the words {n} and {m}.",
    "Write a dialogue between two friends about a {a} {n}.",
    "Plan a weekend workshop on the theme '{n} and {m}', hour by hour.",
    "Write a product review of a {a} {n}.",
    "How would you {v} a {n}? Give clear steps.",
    "Write a news article with the headline: {a} {n} found near {m}.",
    "Use the words {n}, {m}, {a} and {v} in four sentences, and explain each of the words.",
    "Write an advertisement for a {a} {n} that can {v}.",
    "Give arguments for and against a rule that every {n} must have a {m}.",
)
_MATHS = (
    "advanced_geometry", "base_conversion", "basic_arithmetic", "bitwise_arithmetic",
    "calendar_arithmetic", "chain_sum", "complex_arithmetic", "count_primes", "countdown",
    "decimal_arithmetic", "decimal_chain_sum", "dice", "fraction_simplification", "gcd",
    "intermediate_integration", "lcm", "leg_counting", "number_filtering", "number_format",
    "number_sequence", "number_sorting", "polynomial_equations", "polynomial_multiplication",
    "power_function", "prime_factorization", "products", "propositional_logic", "simple_equations",
    "simple_geometry", "simple_integration", "time_intervals", "family_relationships", "aiw",
    "knights_knaves", "syllogism", "letter_counting", "jugs", "coin_flip", "zebra_puzzles",
    "list_functions", "word_sorting", "caesar_cipher", "spell_backward", "course_schedule",
)  # fmt: skip
_MATHS_SCRIPT = """
import json, sys, reasoning_gym
for name in sys.argv[2:]:
    for row in reasoning_gym.create_dataset(name, size=int(sys.argv[1]), seed=1):
        print(json.dumps([name, row["question"]]))
"""


def code_and_prose(wheels: Wheels, caps: dict[str, int], seed: int = 0) -> Iterator[Ask]:
    """Functions of 6 to 45 lines and paragraphs of docstrings; of each kind, at most its cap."""
    draw = random.Random(seed)
    functions: list[tuple[str, str, str]] = []
    paragraphs: list[tuple[str, str, str]] = []
    for name, licence in MATERIAL.items():
        label = wheels.label(name)
        for tree, source in _modules(wheels, name):
            functions += [(label, licence, text) for text in _functions(tree, source)]
            paragraphs += [(label, licence, text) for text in _paragraphs(tree)]
    for material in (functions, paragraphs):
        material[:] = dict.fromkeys(material)
        draw.shuffle(material)
    for i, (label, licence, text) in enumerate(functions[: caps["code"]]):
        yield _of_function(label, licence, text, i)
    start = 0
    for kind, templates in (
        ("summaries", _SUMMARIES), ("translation", _TRANSLATIONS), ("rewriting", _REWRITINGS)
    ):  # fmt: skip
        for i, (label, licence, text) in enumerate(paragraphs[start : start + caps[kind]]):
            ask = templates[i % len(templates)]
            yield Ask((f"{ask}\n\n{text}",), kind, label, licence, ask)
        start += caps[kind]


def _modules(wheels: Wheels, name: str) -> Iterator[tuple[ast.Module, str]]:
    archive = wheels.open(name)
    for path in sorted(archive.namelist()):
        if path.endswith(".py") and "/test" not in path and "/locale/" not in path:
            try:
                source = archive.read(path).decode()
                with warnings.catch_warnings(action="ignore"):
                    yield ast.parse(source), source
            except (SyntaxError, UnicodeDecodeError):  # a template or a sample of bad code
                continue


def _functions(tree: ast.Module, source: str) -> Iterator[str]:
    lines = source.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and 6 <= (node.end_lineno or 0) - node.lineno <= 45:
            block = lines[node.lineno - 1 : node.end_lineno]
            cut = node.col_offset
            yield "\n".join(line[cut:] if not line[:cut].strip() else line for line in block)


def _paragraphs(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            for part in (ast.get_docstring(node) or "").split("\n\n"):
                text = " ".join(part.split())
                prose = text[:1].isupper() and text[-1:] in ".!" and ">>>" not in text
                if prose and 120 <= len(text) <= 1800 and ":param" not in text:
                    yield text


def _of_function(label: str, licence: str, text: str, number: int) -> Ask:
    ask = [*_CODE, _IMPLEMENT][number % (len(_CODE) + 1)]
    if ask is _IMPLEMENT:
        node = ast.parse(text).body[0] if _parses(text) else None
        first = node.body[0] if isinstance(node, ast.FunctionDef) else None
        if node and first and ast.get_docstring(node) and first.end_lineno:  # type: ignore[arg-type]
            text = "\n".join(text.split("\n")[: first.end_lineno])
        else:
            ask = _CODE[number % len(_CODE)]
    return Ask((f"{ask}\n\n```python\n{text}\n```",), "code", label, licence, ask)


def _parses(text: str) -> bool:
    try:
        return bool(ast.parse(text).body)
    except SyntaxError:
        return False


def writing(wheels: Wheels, count: int, seed: int = 0) -> Iterator[Ask]:
    """Requests to write and explain, each about words of its own draw."""
    draw = random.Random(seed)
    archive = wheels.open("wonderwords")

    def words(name: str) -> list[str]:
        found = archive.read(f"wonderwords/assets/{name}list.txt").decode().split("\n")
        return [w.strip() for w in found if w.strip().isalpha() and len(w) > 2]

    bad = set(words("profanity"))
    nouns, adjectives, verbs = (
        [w for w in words(name) if w not in bad] for name in ("noun", "adjective", "verb")
    )
    label = wheels.label("wonderwords")
    for i in range(count):
        template = _WRITINGS[i % len(_WRITINGS)]
        n, m = draw.sample(nouns, 2)
        text = template.format(n=n, m=m, a=draw.choice(adjectives), v=draw.choice(verbs))
        yield Ask((text,), "chat", label, "MIT", template)


def maths(folder: Path, label: str, each: int) -> Iterator[Ask]:
    """``each`` questions of every generator, run out of ``folder`` in a process of its own."""
    command = [sys.executable, "-c", _MATHS_SCRIPT, str(each), *_MATHS]
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=1200, check=False
    )
    if done.returncode:
        raise UserError(
            f"the maths generators failed: {done.stderr.strip()[-300:]}",
            where=folder,
            next="make prompts",
        )
    for line in done.stdout.split("\n"):
        if line:
            name, question = json.loads(line)
            yield Ask((question.strip(),), "maths", label, "Apache-2.0", name)

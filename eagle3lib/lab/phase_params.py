"""What the parameters of every phase share: strict reading, messages, paths, lists in texts."""

from __future__ import annotations

import html
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
)

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.machine import ROOT, multiplies_in_bfloat16


def _settled(dtype: Any) -> Any:
    if dtype != "auto":
        return dtype
    return "bfloat16" if multiplies_in_bfloat16() else "float32"


# "auto" is settled where the parameters are read, so that manifests and artefacts hold the answer.
Dtype = Annotated[Literal["bfloat16", "float32"], BeforeValidator(_settled)]
# What `eagle3 run` tells a notebook: JSON of parameter -> where its value comes from.
SOURCES_VARIABLE = "EAGLE3_PARAMETER_SOURCES"
# Begins the source of a value that was taken from another phase's parameters.
FOLLOWING = "as in "
ENGINE_SETTINGS = "NAME-and-value words, see eagle3 serve --settings"
# Folders of outputs/ that are tracked; `make clean` keeps them.
SHIPPED = ("examples", "reference")
_FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".txt", ".gz", ".zst")


class NotebookParams(BaseModel):
    """What every notebook takes. ``PHASE`` is its name in notebooks/, without the ending."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    PHASE: ClassVar[str] = ""

    run: str = Field("demo", description="name of the run; its folder is outputs/RUN")
    # Parameter -> file and section, or the command line; what is missing is a default.
    _sources: dict[str, str] = PrivateAttr(default_factory=dict)
    # What was given where the machine settled the value ("auto").
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @field_validator("run")
    @classmethod
    def _run_is_a_folder_name(cls, value: str) -> str:
        if problem := run_name_problem(value):
            raise ValueError(problem)
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
        read = cls.checked(
            {name: namespace[name] for name in cls.model_fields}, "the parameters cell"
        )
        told = os.environ.get(SOURCES_VARIABLE)
        changed = [n for n, field in cls.model_fields.items() if getattr(read, n) != field.default]
        return read.told(json.loads(told) if told else dict.fromkeys(changed, "this notebook"))

    @classmethod
    def checked(cls, values: dict[str, Any], source: str) -> Self:
        """Validate; every problem becomes a line of one ``UserError`` that names the parameter."""
        try:
            read = cls.model_validate(values)
            read._given.update({k: v for k, v in values.items() if getattr(read, k) != v == "auto"})
            return read
        except ValidationError as error:
            lines = [_explain(cls, problem) for problem in error.errors()]
            raise UserError(
                "\n".join(lines), where=source, next=f"eagle3 params {cls.PHASE}"
            ) from None

    def told(self, sources: dict[str, str]) -> Self:
        """The same parameters, knowing where their values come from."""
        self._sources.clear()
        self._sources.update(sources)
        return self

    @property
    def sources(self) -> dict[str, str]:
        """Parameter -> file and section, or the command line; what is missing is a default."""
        return dict(self._sources)

    def following(self) -> set[str]:
        """Parameters that nobody gave: they follow another phase's."""
        return {n for n, source in self._sources.items() if source.startswith(FOLLOWING)}

    def as_given(self, name: str) -> Any:
        """A value as it was written, which the machine has not settled: it holds on others too."""
        return self._given.get(name, getattr(self, name))

    def table(self) -> list[dict[str, str]]:
        """Each parameter with its value, where that comes from, and its help."""
        return [
            {
                "parameter": name,
                "value": json.dumps(getattr(self, name), ensure_ascii=False),
                "from": self._sources.get(name, "default"),
                "help": field.description or "",
            }
            for name, field in type(self).model_fields.items()
        ]

    def _repr_html_(self) -> str:
        """The table, folded, so that a notebook's answer stays in sight."""
        lines = self.table()
        changed = sum(line["from"] != "default" for line in lines)
        cells = [[html.escape(text) for text in line.values()] for line in lines]
        head = "".join(f"<th>{name}</th>" for name in lines[0])
        body = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in cells)
        return (
            f"<details><summary>{len(lines)} parameters, {changed} set, the others defaults"
            f"</summary><table><tr>{head}</tr>{body}</table></details>"
        )


class PhaseParams(NotebookParams):
    """What every phase takes."""

    UPSTREAM: ClassVar[tuple[str, ...]] = ()
    FILES: ClassVar[tuple[str, ...]] = ()  # fields that name input files
    FREE: ClassVar[tuple[str, ...]] = ()  # fields that don't decide the result: no rerun
    GROWING: ClassVar[tuple[str, ...]] = ()  # more of it continues what is there

    target: str = Field(
        "smollm2-135m-instruct",
        description="smollm2-135m-instruct, a local folder, or a Hub id",
    )

    def upstream(self) -> tuple[str, ...]:
        """The phases that this one reads, with these parameters."""
        return self.UPSTREAM

    def input_files(self) -> dict[str, Path]:
        """Parameter name -> path of the input files and folders named by parameters (relative to
        the repository); what comes from the Hub has none."""
        named = {field: getattr(self, field) for field in self.FILES}
        return {f: resolve(value) for f, value in named.items() if value and not hub_id(value)}


def run_name_problem(name: str) -> str:
    """Why ``name`` can't be a run's; "" where it can."""
    if name in SHIPPED:
        return f"outputs/{name} comes with the repository: no run may have its name"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        return "a run's name is letters, digits, '.', '_' and '-', a letter or digit first"
    return ""


def resolve(path: str) -> Path:
    """A path of the parameters: absolute, or relative to the repository."""
    given = Path(path).expanduser()
    return given if given.is_absolute() else ROOT / given


def numbers_of(text: str, kind: type[Any]) -> list[Any]:
    """What a parameter lists, parted by commas. Raises ``ValueError`` for what is no ``kind``."""
    return [kind(part.strip()) for part in text.split(",") if part.strip()]


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


def _explain(cls: type[NotebookParams], problem: Any) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = ", ".join(cls.model_fields)
        return f"unknown parameter {name!r} of {cls.PHASE}; known are: {known}"
    return f"parameter {name!r} of {cls.PHASE}: found {problem['input']!r}; {problem['msg']}"

"""Where a plan finds a target's config: a folder, a file, the Hub, or the shapes that are shipped.

No weights are needed, and none are fetched.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import hash_json, read_json
from eagle3lib.plan.shape import Shape
from eagle3lib.target import smollm2
from eagle3lib.target.folder import check_target_folder, open_target

CONFIGS = Path(__file__).with_name("configs")
_SMALL_FILES = ("config.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
# What a template writes around reasoning, by the tokens of public reasoning models.
_REASONING = ("<think>", "◁think▷", "<|channel|>analysis", "<|channel|>", "[THINK]", "<seed:think>")


@dataclass(frozen=True)
class Source:
    """A target as a plan sees it. ``folder`` is None where only a shipped shape is known."""

    name: str
    shape: Shape
    origin: str
    folder: Path | None
    fingerprint: str

    def chat_template(self) -> str:
        """The template's text, "" where no tokenizer file is there or none has one."""
        if self.folder is None:
            return ""
        plain = self.folder / "chat_template.jinja"
        if plain.exists():
            return plain.read_text(encoding="utf-8")
        for name in ("chat_template.json", "tokenizer_config.json"):
            path = self.folder / name
            found = read_json(path).get("chat_template") if path.exists() else None
            if isinstance(found, list):  # several, by name
                found = next((t["template"] for t in found if t.get("name") == "default"), None)
            if found:
                return str(found)
        return ""

    def reasoning_markers(self) -> list[str]:
        """Markers of reasoning that the chat template or the added tokens name."""
        texts = [self.chat_template()]
        path = self.folder / "tokenizer_config.json" if self.folder else None
        if path and path.exists():
            added = read_json(path).get("added_tokens_decoder") or {}
            texts += [str(token.get("content", "")) for token in added.values()]
        found = [m for m in _REASONING if any(m in text for text in texts)]
        return [m for m in found if not any(m != other and m in other for other in found)]


def open_source(name: str) -> Source:
    """The config of a built-in name, a folder, a ``config.json``, or a Hub id.

    A folder with whole weights has the fingerprint that later phases bind a run to; one without has
    that of its config. Raises ``UserError`` for what is not there, and, where the Hub can't be
    reached and no shape is shipped, for a Hub id.
    """
    path = Path(name).expanduser()
    if name == smollm2.NAME:
        return _of_folder(name, smollm2.smollm2_folder())
    if path.is_dir():
        return _of_folder(name, path.resolve())
    if path.is_file() and path.suffix == ".json":
        return _of_config(name, _checked(path), str(path), None)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise UserError(
            f"no target {name!r}",
            expected=f"{smollm2.NAME}, a folder, a config.json, or a Hub id ORG/NAME",
            where=path,
            next="set parameter 'target'",
        )
    return _of_hub(name)


def shipped_config(hub_id: str) -> dict[str, Any]:
    """The public shape of ``hub_id`` that the lab ships, {} where it ships none."""
    path = CONFIGS / f"{hub_id.replace('/', '--')}.json"
    return read_json(path) if path.exists() else {}


def _of_folder(name: str, folder: Path) -> Source:
    if not (folder / "config.json").exists():
        raise UserError(
            "the target's folder has no config.json",
            expected="a Hugging Face model folder",
            where=folder,
            next="download or copy the model again",
        )
    raw = _checked(folder / "config.json")
    if not check_target_folder(folder):
        return Source(name, Shape(raw), str(folder), folder, open_target(str(folder)).fingerprint)
    return _of_config(name, raw, str(folder), folder)


def _of_config(name: str, raw: dict[str, Any], origin: str, folder: Path | None) -> Source:
    return Source(name, Shape(raw), origin, folder, hash_json(raw))


def _checked(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"not readable as JSON: {error}", where=path) from None
    if not isinstance(raw, dict):
        raise UserError("a config is a JSON object", where=path)
    return raw


def _of_hub(name: str) -> Source:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_SMALL_FILES), etag_timeout=10))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).split("\n")[0]
        shipped = shipped_config(name)
        if shipped:
            origin = f"the public shape shipped with the lab (the Hub: {reason})"
            return _of_config(name, shipped, origin, None)
        raise UserError(
            f"the Hub has no config of {name!r} for us: {reason}",
            expected="a public or permitted model id, or one whose shape is shipped",
            where=f"shipped: {', '.join(_shipped_names())}",
            next="hf auth login, or give a folder with the target's config.json",
        ) from None
    return _of_folder(name, folder)


def _shipped_names() -> list[str]:
    return sorted(path.stem.replace("--", "/") for path in CONFIGS.glob("*.json"))

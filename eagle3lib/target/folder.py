"""Find a target, check that its folder is whole, and read what its config says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lib.data.template import stop_ids_of
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import hash_file, hash_json, read_json
from eagle3lib.lab.finding import Finding, raise_errors
from eagle3lib.lab.run import check_run_target
from eagle3lib.target import smollm2
from eagle3lib.target.weights import file_problem, weight_files

_MEDIA_KEYS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "media_placeholder_token_id",
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")


@dataclass(frozen=True)
class Target:
    """A Hugging Face folder that was checked. ``config`` is the text model's configuration, over
    the keys of the multimodal wrapper where there is one."""

    name: str
    folder: Path
    config: dict[str, Any]
    fingerprint: str
    wrapper: str = ""  # architecture of the multimodal wrapper, "" for a plain text model

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def hidden_size(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def media_ids(self) -> set[int]:
        """Token ids that stand for images or video in a prompt; empty for a text model."""
        found = (self.config.get(key) for key in _MEDIA_KEYS) if self.wrapper else ()
        return {value for value in found if isinstance(value, int)}

    def stop_ids(self) -> list[int]:
        """End-of-text and end-of-turn ids that the model's files name."""
        return list(stop_ids_of(self.folder, self.config))


def open_target(name: str) -> Target:
    """``smollm2-135m-instruct``, a local folder, or a Hub id (downloaded by huggingface-hub).

    Raises ``UserError`` with every problem of the folder: no config, no tokenizer, no weights, a
    shard that is missing or cut short.
    """
    folder = _find(name)
    raise_errors(check_target_folder(folder))
    raw = read_json(folder / "config.json")
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return Target(name, folder, raw, _fingerprint(folder))
    wrapper = str((raw.get("architectures") or [raw.get("model_type", "unknown")])[0])
    return Target(name, folder, {**raw, **text}, _fingerprint(folder), wrapper)


def target_of_run(folder: Path) -> Target:
    """The target that a run is bound to. Raises ``UserError`` when it changed since."""
    target = open_target(read_json(folder / "manifest.json")["target"]["name"])
    check_run_target(folder.name, target.name, target.fingerprint)
    return target


def _find(name: str) -> Path:
    if name == smollm2.NAME:
        return smollm2.smollm2_folder()
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise UserError(
            f"no target {name!r}",
            expected=f"{smollm2.NAME}, a folder, or a Hub id ORG/NAME",
            where=path,
            next="set parameter 'target'",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "README.md"]
        found = Path(snapshot_download(name, allow_patterns=patterns))
        if not any(found.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=["pytorch_model*.bin"])
        return found
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(
            f"the Hub has no {name!r} for us: {reason}",
            expected="a public or permitted model id",
            next="hf auth login, or download it and give the folder",
        ) from None


def _fingerprint(folder: Path) -> str:
    """Of config, tokenizer and weights (large shards by size and both ends)."""
    names = ("config.json", *_TOKENIZERS, "tokenizer_config.json", "chat_template.jinja")
    files = [folder / n for n in names if (folder / n).exists()] + weight_files(folder)
    return hash_json({f.name: hash_file(f) for f in files})


def check_target_folder(folder: Path) -> list[Finding]:
    """What a target's folder must hold before anything is started with it."""

    def error(code: str, title: str, evidence: str, where: Path) -> Finding:
        return Finding(
            code, "error", title, evidence, "download or copy the model again", str(where)
        )

    if not (folder / "config.json").exists():
        return [
            error(
                "target-config",
                "the target's folder has no config.json",
                "a Hugging Face model folder",
                folder,
            )
        ]
    findings = []
    config = read_json(folder / "config.json")
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    missing = [
        k for k in ("num_hidden_layers", "hidden_size", "vocab_size") if k not in (text or {})
    ]
    if missing:
        findings.append(
            error(
                "target-config",
                f"the target's config lacks {', '.join(missing)}",
                "a decoder-only language model",
                folder / "config.json",
            )
        )
    if not any((folder / name).exists() for name in _TOKENIZERS):
        findings.append(
            error(
                "target-tokenizer",
                "the target's folder has no tokenizer",
                f"one of {', '.join(_TOKENIZERS)}",
                folder,
            )
        )
    shards = weight_files(folder)
    if not shards:
        findings.append(
            error(
                "target-weights",
                "the target's folder has no weights",
                "*.safetensors, or pytorch_model*.bin",
                folder,
            )
        )
    for shard in shards:
        problem = file_problem(shard)
        if problem:
            findings.append(error("target-shard", f"{shard.name} {problem}", "a whole file", shard))
    return findings

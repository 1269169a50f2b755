"""Images in a prompt: what the target's own vision tower puts in the place of their tokens.

In a prompt's ids an image is as many placeholder tokens as the tower makes features of it; the
features take the place of those tokens' embeddings and positions count on, so rows are packed as
always. The pictures themselves are in the row's messages, in their order: parts of type
``image_url`` (a data URL, an address or a path) or ``image``.

A picture is shrunk, never enlarged, padded at the right and below with black to a multiple of
patch_size x merge_kernel_size, scaled and cut into patches [3, p, p], as Kimi-K2.5's processor does
(transformers 5.19, ``image_processing_kimi_k25.py``, which needs torchvision; resized by Pillow).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from eagle3lib.data.rows import AnswerRow
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.target.folder import Target
from eagle3lib.target.states import StateEntry, StateStore

# Wrappers whose features replace placeholders one by one at plain positions (Qwen's have 3-D ones).
SHOWN = ("kimi_k25",)
_PARTS = ("image_url", "image")
# Kimi-K2.5's, where the folder's preprocessor_config.json does not say.
_DEFAULTS = {"patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 16384,
             "patch_limit_on_one_side": 512, "image_mean": [0.5] * 3,
             "image_std": [0.5] * 3}  # fmt: skip


def picture_names(messages: list[dict[str, Any]]) -> list[str]:
    """Where the pictures of a conversation are, in their order."""
    parts = [
        part
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, dict) and part.get("type") in _PARTS
    ]
    names = [part[part["type"]] for part in parts]
    return [name["url"] if isinstance(name, dict) else str(name) for name in names]


def shows_images(target: Target, ids: Iterable[int]) -> bool:
    """Whether token ids hold placeholders of images or video; never, for a text model."""
    return not target.media_ids.isdisjoint(ids)


def check_text(target: Target, ids: Iterable[int], name: str = "this conversation") -> None:
    """Raise ``UserError`` for ids that show images, before a forward of the text model alone makes
    states of their placeholders. ``name``: of the conversation, for the message."""
    ids = list(ids)
    if not shows_images(target, ids):
        return
    shown = [i for i, token in enumerate(ids) if token in target.media_ids]
    raise UserError(
        f"{name} shows images: {len(shown)} of its {len(ids)} tokens, the first at {shown[0]}",
        expected="text alone: nothing shows an image to the target here, and the states of its "
        "placeholders are not those that the engine had",
        where=target.folder,
        next="leave it out; phase 02 captures it with source=transformers, which shows the images",
    )


def check_media(target: Target, rows: list[AnswerRow], *, shown: bool) -> None:
    """Raise ``UserError`` for prompts with images where none can be shown to the target (``shown``
    is false, or its kind is not among ``SHOWN``) or theirs are missing, and for answers that hold
    placeholders: nothing is taught at an image's tokens, and a drafter must never propose one."""
    in_answers = [r.id for r in rows if shows_images(target, r.answer_token_ids)]
    if in_answers:
        raise UserError(
            f"{len(in_answers)} answers hold image tokens, the first is {in_answers[0]}",
            expected=f"none of {sorted(target.media_ids)} among the tokens that are trained on",
            where=target.folder,
            next="leave those answers out of phase 01",
        )
    with_images = [r for r in rows if shows_images(target, r.prompt_token_ids)]
    if not with_images:
        return
    kind = read_json(target.folder / "config.json").get("model_type")
    if not shown or kind not in SHOWN:
        raise UserError(
            f"{len(with_images)} prompts hold images or video, the first is {with_images[0].id}",
            expected="text-only prompts: the states at image tokens would be those of placeholders",
            where=target.folder,
            next="capture with source=transformers and states=disk, which shows the images"
            if kind in SHOWN
            else "leave those prompts out of phase 01: images are shown to "
            f"{', '.join(SHOWN)} alone, this is {kind}",
        )
    lacking = [r.id for r in with_images if not picture_names(r.messages)]
    if lacking:
        raise UserError(
            f"{len(lacking)} prompts hold image tokens without an image, the first is {lacking[0]}",
            expected="messages with a part of type image_url or image for each",
            where=target.folder,
            next="capture rows whose messages are those that the server got",
        )


def text_entries(store: StateStore, entries: list[StateEntry], media: set[int]) -> list[StateEntry]:
    """Conversations without tokens of ``media``: of the others a forward of the text model makes
    other states than were captured. Ids are read where there are such tokens at all."""
    if not media:
        return entries
    return [e for e in entries if media.isdisjoint(store.token_ids(e).tolist())]


def image_size(width: int, height: int, cfg: dict[str, Any]) -> tuple[int, int, int, int]:
    """(width, height) that an image is shrunk to, and (width, height) with its padding."""
    patch, side = cfg["patch_size"], cfg["patch_limit_on_one_side"] * cfg["patch_size"]
    patches = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(cfg["in_patch_limit"] / patches), side / width, side / height)
    w, h = (min(side, max(1, int(size * scale))) for size in (width, height))
    factor = patch * cfg["merge_kernel_size"]
    return w, h, -(-w // factor) * factor, -(-h // factor) * factor


def patches_of(image: Any, cfg: dict[str, Any]) -> tuple[Float[Tensor, "P 3 p p"], list[int]]:
    """The patches of a picture, row by row, and their grid (time, height, width)."""
    from PIL import Image

    w, h, whole_w, whole_h = image_size(*image.size, cfg)
    shrunk = image.convert("RGB").resize((w, h), Image.Resampling.BICUBIC)
    pixels = np.zeros((whole_h, whole_w, 3), dtype=np.float32)
    pixels[:h, :w] = np.asarray(shrunk, dtype=np.float32) / 255
    scaled = (pixels - np.float32(cfg["image_mean"])) / np.float32(cfg["image_std"])
    p = cfg["patch_size"]
    cut = torch.from_numpy(scaled).reshape(whole_h // p, p, whole_w // p, p, 3)
    grid = [1, whole_h // p, whole_w // p]
    return cut.permute(0, 2, 4, 1, 3).reshape(-1, 3, p, p).contiguous(), grid


def open_picture(name: str) -> Any:
    """The picture of a data URL, an address or a path."""
    from transformers import image_utils

    client: Any = image_utils.httpx  # of transformers' own choice; its errors are no OSError
    # IndexError: a data URL without a comma.
    unreadable = OSError, ValueError, IndexError, client.HTTPError, client.InvalidURL
    try:
        return image_utils.load_image(name)
    except unreadable as error:
        shown = name if len(name) < 80 else f"{name[:60]}..."
        raise UserError(
            f"an image can't be read: {error}".split("\n")[0][:300],
            expected="a data URL, an address or a path of a picture",
            where=shown,
            next="leave that prompt out of phase 01",
        ) from None


def processor_settings(folder: Path) -> dict[str, Any]:
    path = folder / "preprocessor_config.json"
    told = read_json(path).get("media_proc_cfg") or {} if path.exists() else {}
    return _DEFAULTS | {key: told[key] for key in _DEFAULTS if key in told}


@torch.no_grad()
def embedded(
    model: Any, target: Target, ids: Int64[Tensor, " N"], names: list[str]
) -> Float[Tensor, "N H"]:
    """The embeddings of one row, with the features of its pictures ``names`` in the places of their
    tokens. Raises ``UserError`` where these are more or fewer."""
    device = next(model.parameters()).device
    marked = torch.isin(ids, torch.tensor(sorted(target.media_ids)))
    embeddings = model.get_input_embeddings()(ids.masked_fill(marked, 0).to(device))
    if not marked.any():
        return embeddings
    cfg = processor_settings(target.folder)
    patches, grids = zip(*(patches_of(open_picture(name), cfg) for name in names), strict=True)
    pixels = torch.cat(patches).to(device, embeddings.dtype)
    grid = torch.tensor(grids, device=device)
    features = torch.cat(model.get_image_features(pixels, grid, return_dict=True).pooler_output)
    if len(features) != int(marked.sum()):
        raise UserError(
            f"{len(names)} images make {len(features)} features for {int(marked.sum())} tokens",
            expected="as many placeholder tokens in a prompt as features of its images",
            where=target.folder / "preprocessor_config.json",
            next="capture rows whose ids are those that the server told: it writes out each image's"
            " placeholders",
        )
    embeddings[marked.to(device)] = features.to(embeddings.dtype)
    return embeddings

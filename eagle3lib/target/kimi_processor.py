"""The processor of a Kimi-shaped model, copied into its folder: text alone.

Engines load it from there when they start (``trust_remote_code``), so nothing of this package is
used here. The vision tower is random: an image is refused.
"""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import AutoTokenizer
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature
from transformers.processing_utils import ProcessorMixin

_TEXT_ALONE = "this model's vision tower is random: it takes text alone"


class KimiShapedVisionProcessor(BaseImageProcessor):
    """Knows its settings, ``media_proc_cfg``, and refuses images."""

    def __init__(self, media_proc_cfg: dict[str, Any] | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.media_proc_cfg = dict(media_proc_cfg or {})
        self.num_frames_per_chunk = self.media_proc_cfg.get("temporal_merge_kernel_size", 4)

    def media_tokens_calculator(self, media: Any) -> int:
        raise NotImplementedError(_TEXT_ALONE)

    def preprocess(self, medias: Any, *_: Any, **kwargs: Any) -> BatchFeature:
        raise NotImplementedError(_TEXT_ALONE)


class KimiShapedProcessor(ProcessorMixin):
    """A tokenizer with the vision processor beside it, under the names that engines ask for."""

    attributes: ClassVar[list[str]] = []

    def __init__(self, tokenizer: Any, image_processor: Any):
        self.tokenizer, self.image_processor = tokenizer, image_processor
        self.media_processor = image_processor
        self.chat_template = tokenizer.chat_template

    @classmethod
    def from_pretrained(cls, folder: Any, *_: Any, **kwargs: Any) -> KimiShapedProcessor:
        told, _rest = KimiShapedVisionProcessor.get_image_processor_dict(folder)
        settings = told.get("media_proc_cfg")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return cls(tokenizer, KimiShapedVisionProcessor(media_proc_cfg=settings))

    def __call__(self, text: Any = None, **kwargs: Any) -> BatchFeature:
        return BatchFeature(dict(self.tokenizer(text, **kwargs)))

"""Images in the prompts of a Kimi-shaped target, through transformers' own class of it."""

import base64
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from tiny import save_target
from transformers import AutoTokenizer

from eagle3lib.diagnose.evidence import collect
from eagle3lib.diagnose.live import LiveTarget
from eagle3lib.diagnose.material import Material
from eagle3lib.drafter.align import base_positions, base_span, label_exists, label_index
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.params import CaptureParams
from eagle3lib.measure.replace_offline import offline_pairs
from eagle3lib.target.capture import InProcess, capture
from eagle3lib.target.engine import FromVllm
from eagle3lib.target.folder import open_target
from eagle3lib.target.images import (
    check_text,
    image_size,
    open_picture,
    patches_of,
    picture_names,
    processor_settings,
    shows_images,
)
from eagle3lib.target.kimi_shaped import MEDIA_TOKEN, Size, new_text_tower, save_kimi_shaped
from eagle3lib.target.layer_stats import pick_entries
from eagle3lib.target.model import TargetHead, load_target
from eagle3lib.target.phase import _layer_findings
from eagle3lib.target.sglang_source import FromSglang
from eagle3lib.target.states import StateStore
from eagle3lib.target.stream import LiveStates

SIZE = Size(hidden=128, layers=5, heads=4, q_lora_rank=64, dense_width=128, expert_width=64,
            experts=8, active=4, positions=512)  # fmt: skip
SLOTS = (2, 1, 4)
SETTINGS = {"slots": SLOTS, "dtype": "float32", "batch_tokens": 256, "shard_rows": 8}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target whose vision tower is random and large enough to be seen."""
    folder = tmp_path_factory.mktemp("kimi")
    of = open_target(str(save_target(folder / "of", "llama")))
    model = new_text_tower(SIZE, of).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(5.0)
    return open_target(str(save_kimi_shaped(model, SIZE, of, folder / "target", torch.float32)))


@pytest.fixture(scope="module")
def image_id(target):
    [media] = target.media_ids
    return media


def picture(seed, width=56, height=28):
    """A data URL of noise."""
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=draw, dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.fixture(scope="module")
def rows(image_id, make_row):
    """Of text alone, of one image of 2 tokens, of two images of 2 and 4."""

    def asked(*urls):
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": "w7"}]}]

    one, two = [image_id] * 2, [image_id] * 4
    return [
        make_row(0, [1, 17, 230, 4], [9, 8, 7]),
        make_row(1, [1, 17, *one, 230, 4], [9, 8, 7, 61], messages=asked(picture(1))),
        make_row(2, [1, *one, 17, *two, 4, 5], [99, 61, 9, 3, 7],
                 messages=asked(picture(2), picture(3, 56, 56))),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def store(target, rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    capture(target, rows, folder, **SETTINGS)
    return StateStore(folder)


def whole_model(target, row):
    """transformers' own forward of the whole wrapper, pictures in, states out."""
    model = load_target(target, "float32", vision=True)
    model.config.image_token_id = model.model.config.image_token_id = max(target.media_ids)
    shown, cfg = {}, processor_settings(target.folder)
    if names := picture_names(row.messages):
        opened = [Image.open(io.BytesIO(base64.b64decode(n.split(",")[1]))) for n in names]
        patches, grids = zip(*(patches_of(image, cfg) for image in opened), strict=True)
        shown = {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
    ids = torch.tensor([row.prompt_token_ids + row.answer_token_ids])
    with torch.no_grad():
        made = model(input_ids=ids, output_hidden_states=True, use_cache=False, **shown)
    return model, made


def test_states_are_those_of_transformers_with_the_images_shown(target, rows, store):
    """In one batch with a row of text; ``last`` goes through the head to the logits."""
    for entry, row in zip(store.entries, rows, strict=True):
        model, made = whole_model(target, row)
        found = store.row(entry)
        expected = torch.cat([made.hidden_states[slot][0] for slot in SLOTS], dim=1)
        torch.testing.assert_close(found.slots, expected, atol=2e-4, rtol=1e-4)
        first = entry.first_taught
        normed = model.get_decoder().norm(found.last[first:])
        close = {"atol": 1e-3, "rtol": 1e-3}
        torch.testing.assert_close(model.lm_head(normed), made.logits[0, first:], **close)


def test_another_image_changes_what_comes_after_it_alone(target, rows, store, tmp_path):
    row = rows[1]
    part = {"type": "image_url", "image_url": {"url": picture(9)}}
    other = SimpleNamespace(**vars(row))
    other.messages = [{"role": "user", "content": [part]}]
    with InProcess(target, SLOTS, "float32", 256) as source:
        ids = [row.prompt_token_ids + row.answer_token_ids]
        here, there = (source.states(ids, [picture_names(r.messages)])[0] for r in (row, other))
    # As a share of the state. An expert's product has other rows beside it, so what is the same is
    # rounded otherwise (4e-7, with either kind of kernels of a CPU); the image itself makes 3e-2.
    changed = ((here - there).norm(dim=2) / here.norm(dim=2)).amax(1)
    assert changed[:2].max() < 1e-5 and changed[2:].min() > 1e-3, changed


def test_text_alone_is_the_text_tower(target, rows, store, tmp_path):
    capture(target, rows[:1], tmp_path, **SETTINGS)
    alone, beside = StateStore(tmp_path), store
    found = [s.row(s.entries[0]).slots for s in (alone, beside)]
    torch.testing.assert_close(*found, atol=2e-4, rtol=1e-4)


def test_nothing_is_taught_at_the_tokens_of_an_image(store, image_id):
    """No token that a drafter learns to draft, and none that enters a step, is one of an image."""
    for row in store.rows(store.entries):
        base = base_positions(base_span(row.entry.prompt_tokens, row.entry.tokens))
        for step in range(3):
            there = label_exists(base, step, torch.full_like(base, row.entry.tokens))
            assert there.any() or step > 0
            taught = label_index(base[there], step)
            assert not (row.token_ids[torch.cat((taught, taught - 1))] == image_id).any()


def test_the_layer_check_takes_rows_without_images(target, store, rows, tmp_path):
    cfg = CaptureParams(target=str(target.folder), dtype="float32")
    assert _layer_findings(store, cfg, target) == []
    capture(target, rows[1:], tmp_path, **SETTINGS)
    [finding] = _layer_findings(StateStore(tmp_path), cfg, target)
    assert finding.severity == "warning" and "shows images" in finding.title


def test_the_explorer_looks_at_conversations_without_images(target, rows, tmp_path):
    """Its forward is the text model's alone."""
    held = [type(row)(**(vars(row) | {"split": "heldout"})) for row in rows]
    capture(target, held, tmp_path / "some", **SETTINGS)
    store = StateStore(tmp_path / "some")
    assert [e.id for e in pick_entries(store, 9, target.media_ids)] == [held[0].id]
    assert len(pick_entries(store, 9, set())) == 3
    capture(target, held[1:], tmp_path / "none", **SETTINGS)
    with pytest.raises(UserError, match="without images"):
        pick_entries(StateStore(tmp_path / "none"), 9, target.media_ids)


def test_a_forward_of_text_alone_refuses_images(target, tiny_target, rows, monkeypatch):
    """By name, and before it loads anything; a text model's ids never show one."""
    monkeypatch.setattr("eagle3lib.diagnose.live.load_target", lambda *_: pytest.fail("loaded"))
    text, one, _ = (row.prompt_token_ids + row.answer_token_ids for row in rows)
    assert [shows_images(target, ids) for ids in (text, one)] == [False, True]
    assert not shows_images(tiny_target, one)
    check_text(target, text)
    with pytest.raises(UserError, match="row-01 shows images: 2 of its 10 tokens, the first at 2"):
        check_text(target, one, "row-01")
    with pytest.raises(UserError, match="this conversation shows images"):
        LiveTarget(target, "float32")(one, SLOTS)
    with pytest.raises(UserError, match="row-01 shows images"):
        offline_pairs(rows, target, Path(), Path(), dtype="float32", steps=3)


def test_stored_states_of_images_are_not_laid_beside_those_of_text(target, store):
    """The rest of what a diagnosis asks of stored states it asks of all rows."""
    material = Material(target, TargetHead(target), LiveTarget(target, "float32"), store=store)
    evidence = collect(material)
    assert material.problems == [] and evidence.broken_states == []
    assert [(row.id, row.fits) for row in evidence.stored] == [("row-00", "as stored")]


@pytest.mark.parametrize("engine", [FromVllm, FromSglang])
def test_engines_are_shown_no_images(target, rows, tmp_path, engine):
    source = engine(target, SLOTS, "float32", tmp_path / "work", 64)
    with pytest.raises(UserError, match=r"(?s)2 prompts hold images.*row-01.*source=transformers"):
        capture(target, rows, tmp_path / "states", source=source, **SETTINGS)
    with pytest.raises(UserError, match="states=disk"):
        LiveStates(target, rows, slots=SLOTS, dtype="float32", batch_tokens=64)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda r, i: {"messages": []}, "1 prompts hold image tokens without an image.*row-01"),
        (lambda r, i: {"answer_token_ids": [9, i, 7]}, "1 answers hold image tokens.*row-01"),
        (lambda r, i: {"prompt_token_ids": [1, i, 4]}, "1 images make 2 features for 1 tokens"),
        (lambda r, i: {"messages": [{"role": "user", "content": [
            {"type": "image", "image": "/nowhere.png"}]}]}, "image can't be read"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(target, rows, image_id, tmp_path, change, named):
    row = type(rows[1])(**(vars(rows[1]) | change(rows[1], image_id)))
    with pytest.raises(UserError, match=f"(?s){named}"):
        capture(target, [row], tmp_path, **SETTINGS)


@pytest.mark.parametrize(
    "name", ["http://127.0.0.1:9/a.png", "http://[", "data:image/png", "data:image/png;base64,AAAA"]
)
def test_a_picture_that_is_not_there_is_told(name):
    """Nobody listens at the first address; the HTTP client has errors of its own."""
    with pytest.raises(UserError, match="an image can't be read"):
        open_picture(name)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((56, 28), (56, 28, 56, 28)),
        ((57, 1), (57, 1, 84, 28)),  # padded, never enlarged
        ((2240, 1120), (224, 112, 224, 112)),  # at most 16 patches a side
        ((230, 230), (224, 224, 224, 224)),
    ],
)
def test_sizes_of_shrunk_and_padded_images(target, size, expected):
    cfg = processor_settings(target.folder)
    assert cfg["patch_limit_on_one_side"] == 16
    assert image_size(*size, cfg) == expected


def test_patches_are_the_pixels_row_by_row(target):
    cfg = processor_settings(target.folder)
    pixels = torch.arange(28 * 40 * 3).remainder(251).to(torch.uint8).reshape(28, 40, 3)
    patches, grid = patches_of(Image.fromarray(pixels.numpy()), cfg)
    assert (grid, patches.shape) == ([1, 2, 4], (8, 3, 14, 14))
    scaled = (pixels.float() / 255 - 0.5) / 0.5
    torch.testing.assert_close(patches[1], scaled[:14, 14:28].permute(2, 0, 1))
    torch.testing.assert_close(patches[4], scaled[14:, :14].permute(2, 0, 1))
    assert (patches[3] == -1).all(), "black at the right"


def test_the_placeholder_is_a_token_of_the_tokenizer(target, image_id):
    tokenizer = AutoTokenizer.from_pretrained(target.folder)
    known = tokenizer.get_vocab()
    assert known.get(MEDIA_TOKEN, max(known.values())) == image_id

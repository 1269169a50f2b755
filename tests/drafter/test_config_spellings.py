"""Spellings of a drafter's config that mean the same, and maps that mean nothing."""

import json

import pytest
import torch

from eagle3lib.drafter.read_config import check_config_file, read_drafter_config
from eagle3lib.drafter.rope import rope_parameters
from eagle3lib.drafter.vocab import check_offsets
from eagle3lib.lab.errors import UserError

ROPES = {
    "default": ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
    "both, the same": (
        {"rope_theta": 7, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}},
        {"rope_type": "default", "rope_theta": 7.0},
    ),
    "old yarn": (
        {"rope_theta": 7, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_type": "yarn", "rope_theta": 7.0, "factor": 4.0},
    ),
    "no scaling": (
        {"rope_theta": 7, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 7.0}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "expected"), ROPES.values(), ids=ROPES)
def test_rotary_settings_in_every_spelling(config, expected):
    assert rope_parameters(config) == expected


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "no rope_theta"),  # the classes' default of 10,000 was taken in silence
        ({"rope_theta": 7, "rope_parameters": {"rope_theta": 8}}, "rope_theta is 8.0.* is 7.0"),
        (
            {"rope_parameters": {"rope_theta": 8, "rope_type": "yarn"},
             "rope_scaling": {"type": "linear"}},
            "rope_parameters.rope_type is yarn, rope_scaling.rope_type is linear",
        ),
        ({"rope_theta": 7, "rope_scaling": {"type": "a", "rope_type": "b"}}, "two types"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "not one set"),
        ({"rope_theta": 7, "rope_parameters": {"partial_rotary_factor": 0.5}}, "50%"),
    ],
)  # fmt: skip
def test_odd_rotary_settings_are_refused(config, named):
    with pytest.raises(UserError, match=rf"(?s){named}.*drafter/config\.json"):
        rope_parameters(config, "drafter/config.json")


@pytest.mark.parametrize(
    ("ids", "slots", "told"),
    [
        ([1, 29, 57], (2, 30, 58), True),
        ([2, 30, 58], (2, 30, 58), True),  # as public drafters for Kimi have them
        ([3, 31, 57], (4, 32, 58), True),
    ],
)
def test_nested_layer_ids_alone_are_read_and_told(random_drafter, tmp_path, ids, slots, told):
    config = random_drafter().config.as_hf_config("float32")
    config.pop("eagle_aux_hidden_state_layer_ids")
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_drafter_config(tmp_path, 61).slots == slots
    findings = check_config_file(config, 61, "x")
    assert [(f.code, f.severity) for f in findings] == [("layer-ids-nested", "warning")] * told


OFFSETS = torch.tensor([0, 0, 3, 3, 3, 7])


@pytest.mark.parametrize(
    ("d2t", "vocab", "title", "severity"),
    [
        (OFFSETS, 300, None, None),
        (torch.zeros(6, dtype=torch.int64), 6, None, None),
        (OFFSETS + torch.arange(6), 15, "absolute", "error"),  # 12 + 5 is beyond the vocabulary
        (OFFSETS + torch.arange(6), 300, "or absolute", "warning"),  # can't be told
        (torch.arange(0, 200, 2), 300, "absolute", "error"),
        (torch.arange(0, 200, 2), 600, "or absolute", "warning"),
        (OFFSETS.flip(0), 300, "falls", "error"),
        (OFFSETS - 1, 300, "falls", "error"),
        (OFFSETS, 12, "target id 12", "error"),
    ],
)
def test_what_d2t_alone_tells(d2t, vocab, title, severity):
    findings = check_offsets(d2t, vocab, "file")
    assert [f.severity for f in findings] == ([severity] if severity else [])
    assert all(title in f.title for f in findings)

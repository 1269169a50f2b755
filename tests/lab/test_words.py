"""Sizes and times as people read them."""

import pytest

from eagle3lib.lab.words import duration_text, interval_text, known_text, size_text, time_text


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (828e9, "828.0 GB"), (2.5e15, "2500.0 TB")],
)
def test_sizes_are_decimal(count, text):
    assert size_text(count) == text


@pytest.mark.parametrize(
    "seconds, text",
    [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (47 * 3600, "47:00:00"),
     (76 * 3600 + 61, "3 d 4:01:01"), (48 * 3600, "2 d 0:00:00")],
)  # fmt: skip
def test_a_time_has_hours_and_days_only_where_it_needs_them(seconds, text):
    assert duration_text(seconds) == text


def test_an_interval_without_bounds_says_why():
    assert interval_text({"low": 1.204, "high": 1.3}) == "1.20 to 1.30"
    assert interval_text({"low": None, "high": None}) == "too few prompts"


def test_times_are_told_to_the_minute():
    assert time_text("2026-12-01T03:04:05+00:00") == "2026-12-01 03:04 UTC"
    assert time_text("") == ""


def test_a_number_that_is_not_known_is_a_word_without_a_unit():
    assert known_text(1.2345, unit="x") == "1.23x"
    assert known_text(0.0, 3) == "0.000"
    assert known_text(None, unit="x") == "unknown"

"""What parameters say of a drafter."""

import pytest

from eagle3lib.drafter.config import chosen_slots
from eagle3lib.lab.errors import UserError


def test_slots_may_be_chosen():
    assert chosen_slots("", 30) == (2, 15, 27)
    assert chosen_slots("1, 15,28, 29", 30) == (1, 15, 28, 29)
    for wrong in ("15,2,27", "2,2,27", "0,15,27", "2,15,31", "two"):
        with pytest.raises(UserError, match="slots"):
            chosen_slots(wrong, 30)

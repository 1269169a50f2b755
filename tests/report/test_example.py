"""Examples that are kept in the repository are for strangers."""

from pathlib import Path

from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.run import outputs_root
from eagle3lib.report.page import forget_machine


def test_an_example_shows_no_path_of_this_machine(tmp_path):
    page = tmp_path / "reports" / "06.html"
    page.parent.mkdir()
    page.write_text(f"<p>{outputs_root()}/demo {ROOT}/params {Path.home()}/.cache</p>")
    forget_machine(tmp_path)
    assert page.read_text() == "<p>outputs/demo ./params ~/.cache</p>"

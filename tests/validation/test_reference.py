from __future__ import annotations

from validation import reference
from validation.records import MEANING, Outcome


def test_the_page_says_what_the_code_says():
    text = reference.PAGE.read_text(encoding="utf-8")
    assert text == reference.page(), "python -m validation.reference writes it"


def test_nothing_is_left_without_a_meaning():
    assert MEANING.keys() == {*Outcome}
    assert "| None |" not in reference.page()
    assert "|  |  |" not in reference.page().replace("| never |  |", "")

"""The table of support says what is true: every family in it runs, in the way it says, and agrees with eager."""

import re
from pathlib import Path

import pytest

from anyrig.ops.cpu import native
from tests.models.families import FAMILIES, check

TABLE = Path(__file__).parents[2] / "docs" / "support.md"


def rows():
    found = re.findall(r"^\| (\w+) \| .* \| (fused|paged|transformers) \|", TABLE.read_text("utf-8"), re.MULTILINE)
    return dict(found)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.model_type)
def test_family_agrees_with_an_eager_forward_and_runs_as_the_table_says(family):
    if native.module() is None and rows()[family.model_type] == "fused":
        pytest.skip(f"CPU kernels: {native.why_not()}")
    verdict = check(family)
    assert verdict.difference < 1e-4
    assert verdict.tier == rows()[family.model_type]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.model_type)
def test_family_agrees_when_it_runs_module_by_module(family):
    if rows()[family.model_type] == "fused":
        verdict = check(family, fused=False)
        assert verdict.tier == "paged" and verdict.difference < 1e-4


def test_the_table_lists_exactly_these_families():
    assert set(rows()) == {family.model_type for family in FAMILIES}

"""The table of docs/testing.md and the tests agree."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "testing.md"
ROW = re.compile(r"\| ([A-Z]{2}-\d\d) \| (.+) \| (.+) \|")
NAMED = re.compile(r"`(\S+?\.py)::(\w+)`")
ID = re.compile(r"\b(?:PC|PR|HM|RC|FK|PS|BM|SM|DT|SC|KN|GR|SE)-\d\d\b")


def rows() -> dict[str, list[tuple[str, str]]]:
    """Each row's tests, as (file, function)."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in PAGE.read_text().splitlines():
        if match := ROW.fullmatch(line):
            assert match[1] not in found, f"{match[1]} has two rows"
            found[match[1]] = NAMED.findall(match[2])
    return found


def ids_in(file: str) -> dict[str, set[str]]:
    """Of each test of a file, the IDs that its name, docstring or parameters carry."""
    tree = ast.parse((TESTS / file).read_text())
    module = set(ID.findall(ast.get_docstring(tree) or ""))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            name = re.sub(r"^test_([a-z]{2})_(\d\d)_.*", r"\1-\2", node.name).upper()
            text = f"{name} {ast.get_docstring(node) or ''}"
            comments = ast.get_source_segment((TESTS / file).read_text(), node) or ""
            found[node.name] = module | set(ID.findall(text)) | set(ID.findall(comments))
    return found


@pytest.mark.parametrize(("bug", "tests"), rows().items())
def test_each_row_names_tests_that_are_there_and_carry_its_id(
    bug: str, tests: list[tuple[str, str]]
) -> None:
    assert tests
    for file, name in tests:
        carried = ids_in(file)
        assert name in carried, f"{file} has no {name}"
        assert bug in carried[name], f"{name} does not say {bug}"


def test_each_id_that_a_test_carries_has_a_row() -> None:
    known = rows()
    for file in TESTS.rglob("test_*.py"):
        for name, carried in ids_in(str(file.relative_to(TESTS))).items():
            assert carried <= set(known), f"{file.name}::{name}: {carried - set(known)}"


def test_no_row_is_missing() -> None:
    kinds = {"PC": 9, "PR": 3, "HM": 3, "RC": 5, "FK": 4, "PS": 3, "BM": 5, "SM": 8, "DT": 4,
             "SC": 5, "KN": 6, "GR": 8, "SE": 5}  # fmt: skip
    found = [bug[:2] for bug in rows()]
    assert {kind: found.count(kind) for kind in kinds} == kinds

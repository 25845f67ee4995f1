"""The README's tables say what a file of test results says, and no more."""

import xml.etree.ElementTree as ElementTree

import pytest
import readme_tables
import test_zoo
from zoo import Case


def results(path, cases, failed=(), refused=()):
    """A junit file as pytest writes it for these cases."""
    suite = ElementTree.Element("testsuite")
    for case in cases:
        test = ElementTree.SubElement(suite, "testcase", name=str(case))
        found = {**case._asdict(), "fallbacks": 0}
        if case in refused:
            found["refused"] = "pass 1 of 9, data_parallel: the batch\n  why: rows mix\n  fix: none"
        properties = ElementTree.SubElement(test, "properties")
        for name, value in found.items():
            ElementTree.SubElement(properties, "property", name=name, value=str(value))
        if case in failed:
            ElementTree.SubElement(test, "failure")
    ElementTree.SubElement(suite, "testcase", name="one that records nothing")
    ElementTree.ElementTree(suite).write(path)
    return str(path)


MATRIX = test_zoo.QUICK + test_zoo.WITHOUT_ZERO + test_zoo.WITH_ZERO + test_zoo.CONTEXT
MATRIX += test_zoo.EXPERTS + test_zoo.WITHOUT_EXPERTS + test_zoo.PIPELINES
ON, WITH_EXPERTS = (each[2:] for each in readme_tables.OTHERS.values())
OTHERS = [Case(kind, *ON) for kind in ("olmo", "jetmoe")] + [Case("olmoe", *WITH_EXPERTS)]


def cells(text, *start, table=0):
    """The row of a table that starts with these cells; the cells after them. ``table``: which, of
    several that have such a row."""
    rows = [[c.strip() for c in r.strip("|").split("|")] for r in text.splitlines()]
    return [row[len(start) :] for row in rows if row[: len(start)] == list(start)][table]


@pytest.fixture
def everything(tmp_path):
    path = results(
        tmp_path / "results.xml",
        MATRIX + OTHERS,
        failed=[
            Case("llama", "dp=4", zero=2),
            Case("gpt2", "tp=2", sequence_parallel=False),
            Case("bloom", "cp=4", context="ulysses"),
            Case("gpt_oss", "ep=4", auxiliary=True),
            Case("bert", "pp=4", schedule="zb"),
            Case("gpt2", "pp=2,dp=2", zero=2),
        ],
        refused=[Case("jetmoe", *ON), *test_zoo.SCANS],
    )
    return readme_tables.tables(path)


def test_the_full_matrix_fills_all_tables(everything):
    assert "?" not in everything
    assert cells(everything, "glm4") == [
        *("yes / yes", "yes / yes", "yes", "yes / yes"),
        *(["yes / yes / yes"] * 7),
        "yes",
        "0",
    ]


def test_a_failure_shows_where_it_is(everything):
    assert cells(everything, "llama")[4:6] == ["yes / NO / yes", "yes / yes / yes"]
    assert cells(everything, "gpt2")[0] == "yes / NO"
    assert cells(everything, "bloom")[7] == "yes / yes / NO"


def test_mixtures_have_a_table_of_their_own(everything):
    assert cells(everything, "mixtral", table=1) == ["yes / yes"] * 6
    assert cells(everything, "gpt_oss", table=1)[:2] == ["yes / yes", "yes / NO"]
    assert cells(everything, "deepseek_v3", table=1) == ["yes"] * 6


def test_schedules_have_a_table_of_their_own(everything):
    assert cells(everything, "llama", table=1) == [*(["yes / yes"] * 4), "yes"]
    assert cells(everything, "bert", table=1)[2] == "yes / NO"
    assert cells(everything, "mixtral", table=2)[0] == "yes / yes"


def test_what_is_refused_says_so(everything):
    assert cells(everything, "mamba")[6:11] == ["refused"] * 5


def test_combinations_are_counted(everything):
    whole = "data + tensor + sequence parallel"
    for strategies, meshes, want in (
        ("data parallel", "dp=4", "24 of 24"),
        ("tensor parallel", "tp=2 and tp=4", "47 of 48"),
        ("data parallel, ZeRO 2, accumulation", "dp=4", "23 of 24"),
        (f"{whole}, ZeRO 3, accumulation", "dp=2,tp=2", "24 of 24"),
        (f"{whole}, ZeRO 3, accumulation, recompute", "dp=2,tp=2", "4 of 4"),
        ("context parallel, ring", "cp=2 and cp=4", "46 of 48"),
        ("context parallel, ulysses", "cp=2 and cp=4", "45 of 48"),
        ("context parallel, ZeRO 3, accumulation, ring", "cp=2", "23 of 24"),
        ("expert parallel", "ep=2 and ep=4", "8 of 8"),
        ("expert parallel, loss of routers", "ep=2 and ep=4", "5 of 6"),
        ("context + expert parallel", "cp=2,ep=2", "4 of 4"),
        ("expert parallel, ZeRO 3, accumulation", "ep=2", "4 of 4"),
        ("data parallel over ep, without experts", "ep=2 and dp=2,ep=2", "40 of 40"),
        ("pipeline", "pp=2", "24 of 24"),
        ("pipeline of 4 layers, zb", "pp=2 and pp=4", "7 of 8"),
        ("pipeline of 4 layers, interleaved", "pp=2", "4 of 4"),
        ("pipeline, gpipe, loss of routers", "pp=2", "3 of 3"),
        ("pipeline + data parallel, ZeRO 2, accumulation", "pp=2,dp=2", "3 of 4"),
        ("pipeline + tensor + sequence parallel", "pp=2,tp=2", "4 of 4"),
        ("pipeline + expert parallel, ZeRO 3, accumulation", "pp=2,ep=2", "4 of 4"),
    ):
        assert cells(everything, strategies, meshes) == [want]


def test_other_models_are_counted_and_the_refused_named(everything):
    assert "Of the 2 other causal" in everything and "build, 1 agree" in everything
    assert "build, 1 have all their experts cut and agree on `ep=2`." in everything
    assert "* `jetmoe`: the batch (rows mix)" in everything


def test_what_was_not_run_is_a_question_and_not_counted(tmp_path):
    path = results(tmp_path / "results.xml", [Case("llama", "dp=4", zero=3)])
    text = readme_tables.tables(path)
    assert cells(text, "llama")[4:6] == ["? / ? / yes", "? / ? / ?"]
    assert cells(text, "data parallel, ZeRO 3, accumulation", "dp=4") == ["1 of 24"]
    assert cells(text, "data parallel, ZeRO 2, accumulation", "dp=4") == ["? of 24"]


def test_what_was_not_run_again_stays_as_it_was(everything, tmp_path):
    cases = [Case(kind, "cp=4", context="ulysses") for kind in readme_tables.TYPES]
    path = results(tmp_path / "results.xml", cases, refused=[cases[2]])
    text = readme_tables.tables(path, everything)
    assert cells(text, "llama")[:5] == cells(everything, "llama")[:5]
    assert cells(text, "llama")[7] == "? / ? / yes"
    assert cells(text, "context parallel, ring", "cp=2 and cp=4") == ["46 of 48"]
    assert cells(text, "context parallel, ulysses", "cp=2 and cp=4") == ["23 of 48"]
    assert "Of the 2 other causal" in text and "* `jetmoe`" in text

"""The command line: what it prints, where, and its exit codes."""

import pytest

from autoshard.cli import DEFAULT_TABLES, main

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return (self.down(torch.relu(self.up(x))) ** 2).mean()

def build():
    return Net(), {"x": torch.ones(4, 8)}

def raises():
    return helper()

def helper():
    return nn.Linear("a", 2)

def leaves():
    raise SystemExit(7)

def indivisible():
    return nn.Linear(7, 5), {"input": torch.ones(4, 7)}
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return str(path)


def test_inspect_prints_tables_and_tells_of_its_progress(model, capsys):
    assert main(["inspect", model, "--mesh", "tp=2"]) == 0
    out, err = capsys.readouterr()
    assert [name for name in DEFAULT_TABLES if f"# {name}" not in out] == []
    assert "axes" in DEFAULT_TABLES
    assert "capturing Net" in err and "emitting" in err


@pytest.mark.parametrize(("style", "mark"), [("github", "|--"), ("html", "<td"), ("tsv", "\t")])
def test_tables_in_other_formats(model, style, mark, capsys):
    assert main(["inspect", model, "--mesh", "tp=2", "--table", "params", "--format", style]) == 0
    assert mark in capsys.readouterr().out


def test_groups_of_nodes(model, capsys):
    nodes = ["--mesh", "dp=2,tp=2", "--ranks-per-node", "2"]
    assert main(["inspect", model, *nodes, "--table", "groups", "--table", "params"]) == 0
    out = capsys.readouterr().out
    assert "crosses nodes" in out and "0 2; 1 3" in out and "# params" in out
    assert main(["inspect", model, *nodes]) == 0
    assert "crosses nodes" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["inspect", model, "--mesh", "tp=2", "--ranks-per-node", "0"])


@pytest.mark.parametrize(("name", "words"), [("raises", "nn.Linear"), ("leaves", "SystemExit: 7")])
def test_what_the_users_code_raises(model, name, words, capsys):
    assert main(["inspect", f"{model}:{name}", "--mesh", "tp=2"]) == 2
    err = capsys.readouterr().err
    assert words in err and f"in {name}" in err and "fix:" in err
    assert "linear.py" not in err and "cli.py" not in err


def test_a_file_that_does_not_run(model, capsys):
    with open(model, "a") as file:
        file.write("\n1 / 0\n")
    assert main(["verify", model, "--mesh", "tp=2"]) == 2
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err and "1 / 0" in err


def test_verify_prints_a_count_or_everything(model, capsys):
    assert main(["verify", model, "--mesh", "dp=2,tp=2", "--steps", "3"]) == 0
    short = capsys.readouterr().out
    assert main(["verify", model, "--mesh", "dp=2,tp=2", "--steps", "3", "--all"]) == 0
    long = capsys.readouterr().out
    assert len(short.splitlines()) < len(long.splitlines())
    assert "equal to one device" in short and "equal to one device" in long
    assert "gradient up.weight" in long


def test_an_error_of_our_own_is_no_mismatch(model, capsys, monkeypatch):
    monkeypatch.setattr("autoshard.cli.verify", lambda *_, **__: 1 / 0)
    assert main(["verify", model, "--mesh", "tp=2"]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_strict(model, command, capsys):
    assert main([command, f"{model}:indivisible", "--mesh", "tp=2", "--strict"]) == 2
    assert "fix:" in capsys.readouterr().err


ATTENDS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids):
        x = self.embed(ids).unflatten(-1, (2, 4)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return (self.head(y.transpose(1, 2).flatten(2)) ** 2).mean()

def build():
    return Net(), {"ids": torch.arange(24).view(2, 12) % 16}
"""


@pytest.mark.parametrize("way", ["ring", "ulysses", "allgather"])
def test_context_parallel(way, tmp_path, capsys):
    path = tmp_path / "attends.py"
    path.write_text(ATTENDS)
    options = ["--mesh", "cp=2", "--context-parallel", way]
    assert main(["verify", str(path), *options]) == 0
    assert "equal to one device" in capsys.readouterr().out
    assert main(["inspect", str(path), *options, "--table", "axes"]) == 0
    assert f"attention by {way}" in capsys.readouterr().out


def test_version_and_help(capsys):
    for arguments in (["--version"], ["inspect", "--help"], ["verify", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "autoshard " in out and "Exit codes" in out and "axes, params" in out

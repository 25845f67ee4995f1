"""Training over a slow link between two hosts (network namespaces, see `two_hosts`)."""

import os
import statistics

import pytest
import two_hosts

SMALL = ["--width", "128", "--layers", "2", "--steps", "3", "--rate-mbit", "50"]


@pytest.fixture
def able():
    if reason := two_hosts.lacking():
        pytest.skip(reason)


def left_behind() -> list[str]:
    """Namespaces of this process; others may be testing too."""
    names = two_hosts.run("ip", "netns", "list").split()
    return [name for name in names if name.startswith(f"autoshard-{os.getpid()}-")]


@pytest.mark.slow
def test_inner_axes_belong_inside_of_a_host(able, capsys):
    """The same mesh, with dp over the link or tp: equal losses, other bytes, other times."""
    inside, across = two_hosts.main(["dp=2,tp=2", "dp=2,tp=2@alternate", *SMALL])
    for found in (inside, across):
        assert found["measured"] == pytest.approx(found["gloo"], rel=0.1)
    assert inside["losses"] == pytest.approx(across["losses"], rel=1e-4)
    assert across["losses"][-1] < across["losses"][0]
    assert across["table"][0] > 2 * inside["table"][0]
    slow, quick = (statistics.median(found["seconds"]) for found in (across, inside))
    assert slow > quick
    assert "0 2 | 1 3" in capsys.readouterr().out
    assert left_behind() == []


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dp=4", "dp=2,tp=2"])
def test_bytes_over_the_link_with_zero(able, case):
    (found,) = two_hosts.main([case, *SMALL, "--zero", "1"])
    assert found["measured"] == pytest.approx(found["gloo"], rel=0.1)


@pytest.mark.slow
def test_hosts_are_removed_after_a_failure(able):
    with pytest.raises(RuntimeError, match="dp.*a process ended with"):
        two_hosts.main(["dp=3,tp=2", *SMALL])
    assert left_behind() == []


def test_what_lacks_is_named(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "ip or tc" in two_hosts.lacking()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "root" in two_hosts.lacking()


def test_cases_say_which_ranks_a_host_has():
    assert [two_hosts.Case.parse("tp=4").ranks(host) for host in (0, 1)] == [[0, 1], [2, 3]]
    alternate = two_hosts.Case.parse("dp=2,tp=2@alternate")
    assert [alternate.ranks(host) for host in (0, 1)] == [[0, 2], [1, 3]]
    with pytest.raises(two_hosts.argparse.ArgumentTypeError, match="alternate"):
        two_hosts.Case.parse("tp=4@rack")


def test_rings_and_pairs_that_cross_the_link():
    nodes, alternate = two_hosts.Case("tp=4"), two_hosts.Case("dp=2,tp=2", "alternate")
    ring, pairs = two_hosts.ring_crossings, two_hosts.pair_crossings
    for host in (0, 1):
        assert [ring(g, nodes, host) for g in ([0, 1, 2, 3], [0, 1], [0, 2])] == [1, 0, 1]
        assert [pairs(g, nodes, host) for g in ([0, 1, 2, 3], [0, 1], [0, 2])] == [4, 0, 1]
        assert [ring(g, alternate, host) for g in ([0, 1, 2, 3], [0, 1], [0, 2])] == [2, 1, 0]

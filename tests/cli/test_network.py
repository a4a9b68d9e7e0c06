"""fxsched network: the network between ranks, as a file."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import fxsched
from fxsched.cli.main import main
from fxsched.cli.network_command import _network, _table
from fxsched.transport.speeds import _rounds
from tests.torchrun import torchrun


def test_two_ranks_of_one_host(tmp_path: Path) -> None:
    file = tmp_path / "net.json"
    printed = torchrun(2, "fxsched", "network", str(file)).stdout
    assert "1 host, 2 ranks" in printed and f"wrote {file}" in printed
    network = fxsched.Network.load(file)
    assert network.hosts == ((0, 1),)
    assert network.inside == network.between
    assert 1e7 < network.inside.bandwidth < 1e12
    assert 1e-7 < network.inside.message + network.inside.latency < 0.1


@pytest.mark.parametrize("count", range(1, 9))
def test_each_pair_of_hosts_measures_once_and_no_host_twice_at_a_time(
    count: int,
) -> None:
    hosts = [[2 * i, 2 * i + 1] for i in range(count)]
    inside, *between = _rounds(hosts)
    assert inside == [(2 * i, 2 * i + 1) for i in range(count)]
    for pairs in between:
        assert len({*itertools.chain(*pairs)}) == 2 * len(pairs)
    every = sorted(itertools.chain(*between))
    assert every == sorted(itertools.combinations([host[0] for host in hosts], 2))


def test_a_slow_pair_is_named() -> None:
    hosts = [[0, 1], [2], [3], [4]]
    usual = fxsched.Rate(1e9, 1e-4)
    leaders = itertools.combinations((0, 2, 3, 4), 2)
    rates = {pair: usual for pair in leaders} | {(0, 1): fxsched.Rate(4e9, 1e-5)}
    rates[2, 4] = fxsched.Rate(1e8, 1e-4)
    made = _network(hosts, rates)
    assert (made.inside, made.between) == (fxsched.Rate(4e9, 1e-5), usual)
    text = _table(made, rates)
    assert "4 hosts, 5 ranks" in text
    assert text.count("slower") == 1
    assert "between ranks 2 and 4 messages are 10.0 times slower" in text


def test_without_torchrun_it_says_how_to_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["network", str(tmp_path / "net.json")])
    assert "start it on each host as torchrun --nproc-per" in capsys.readouterr().err

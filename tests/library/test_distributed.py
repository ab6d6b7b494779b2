"""Several processes add up, gather and agree as one; a process that fails ends the job."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from molaplace.distributed import Team, check_sampler, join, shard
from molaplace.errors import MolaWarning, OptionError

ROOT = Path(__file__).resolve().parents[2]
SIZE = 3


def process(rank, path):
    """Everything that processes do together; an assertion that fails on one rank fails the test."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=SIZE)
    team = Team()
    assert (team.rank, team.size, team.first) == (rank, SIZE, rank == 0)
    check_rows(team)
    check_documents(team)
    pair = dist.new_group([0, 2])
    if rank != 1:
        inner = Team(pair)
        assert (inner.rank, inner.size) == (rank // 2, 2)
        assert inner.collect(rank) == [0, 2]
        assert inner.gather(torch.tensor([rank])).tolist() == [0, 2]
        assert inner.sum([torch.tensor(rank)])[0] == 2
    dist.barrier()
    dist.destroy_process_group()


def check_rows(team):
    for dtype in (torch.float64, torch.bfloat16, torch.bool):
        whole = torch.arange(24).reshape(6, 2, 2).to(dtype)
        parts = [whole[:4], None, whole[4:]]
        assert torch.equal(team.gather(parts[team.rank]), whole)
        parts = [whole[:0], whole, None]
        assert torch.equal(team.gather(parts[team.rank]), whole)
    assert team.gather(torch.empty(0, 3)).shape == (0, 3)
    assert team.gather(torch.arange(6).reshape(2, 3).t()).tolist() == [[0, 3], [1, 4], [2, 5]] * SIZE
    with pytest.raises(OptionError, match="none"):
        team.gather(None)
    with pytest.raises(OptionError, match="same dtype and row shape"):
        team.gather(torch.zeros(2, 3 + team.rank))


def check_documents(team):
    assert team.collect({"rank": team.rank}) == [{"rank": rank} for rank in range(SIZE)]
    assert team.share(f"of {team.rank}") == "of 0"
    team.agree({"structure": "kron", "precision": [1.0]}, "fit")
    structure = "diag" if team.rank == 2 else "kron"
    with pytest.raises(OptionError, match=r"fit: structure differs .* rank 2 .*: expected 'kron', got 'diag'"):
        team.agree({"precision": 1.0, "structure": structure}, "fit")
    with pytest.raises(OptionError, match=r"tune: rule differs .* rank 1 .*: expected None, got 'nll'"):
        team.agree({"rule": "nll"} if team.rank else {}, "tune")
    assert team.shard(list(range(7))) == [[0, 1], [2, 3], [4, 5, 6]][team.rank]


def test_processes_work_together(tmp_path):
    torch.multiprocessing.spawn(process, (tmp_path / "meeting",), SIZE)


SCRIPT = """
import sys
import weakref
import torch
from molaplace.distributed import join
with join() as team:
    group = weakref.ref(torch.distributed.group.WORLD)
    torch.optim.SGD([torch.ones(1)])  # imports much of torch
    assert team.sum([torch.tensor(1.0)])[0] == team.size
    if team.rank == 1 and sys.argv[1] == "fail":
        raise ValueError("a mistake in the script")
    team.collect(None)
assert group() is None, "threads of the group may abort the process at exit"
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["succeed", "fail"])
def test_torchrun_ends_all_when_one_fails(how, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, tmp_path / "script.py", how], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode == 0) == (how == "succeed"), done.stderr
    assert ("a mistake in the script" in done.stderr) == (how == "fail")


def test_one_process_without_torchrun(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join() as team:
        assert (team.rank, team.size, team.first) == (0, 1, True)
        assert (team.shard([1, 2, 3]), team.collect(5), team.share(5)) == ([1, 2, 3], [5], 5)
        team.agree({"a": 1}, "fit")
        assert team.sum([torch.ones(2)])[0].tolist() == [1, 1]
        assert team.gather(torch.ones(2, 1)).shape == (2, 1)
    with pytest.raises(OptionError, match=r"no process group.*torchrun"):
        Team()


class Squares(Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return torch.tensor([float(index)] * 3), index % 4


class TestShard:
    @pytest.mark.parametrize("size", [1, 2, 3, 5, 20])
    @pytest.mark.parametrize("count", [0, 1, 7, 11])
    def test_each_datum_once_in_order(self, count, size):
        for whole in (list(range(count)), torch.arange(count), np.arange(count), TensorDataset(torch.arange(count))):
            parts = [shard(whole, rank, size) for rank in range(size)]
            joined = [int(item[0] if isinstance(item, tuple) else item) for part in parts for item in part]
            assert joined == list(range(count))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1

    def test_what_cannot_be_divided(self):
        pair = torch.ones(2, 3), torch.ones(2)
        for whole, words in (
            (DataLoader(Squares(), batch_size=3), "shard its dataset"),
            (pair, "TensorDataset"),
            (iter([1]), r"list_iterator.*islice"),
            ({"a": 1}, "got dict"),
        ):
            with pytest.raises(OptionError, match=words):
                shard(whole, 0, 2)

    @pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), ("0", 2)])
    def test_ranks(self, rank, size):
        with pytest.raises(OptionError, match="rank must be"):
            shard([1], rank, size)

    def test_samplers_that_repeat_data(self):
        sampler = DistributedSampler(Squares(), num_replicas=4, rank=0, shuffle=False)
        with pytest.warns(MolaWarning, match="repeats data"):
            check_sampler(DataLoader(Squares(), sampler=sampler))
        check_sampler(DataLoader(Squares(), sampler=DistributedSampler(Squares(), num_replicas=11, rank=0)))

"""Several processes find what one finds, fail together and never hang; an interrupted fit goes on where it was."""

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset
from typer.testing import CliRunner

import mola
from mola import sums
from mola.app.cli import app
from mola.app.jobs.evaluate import run_evaluate
from mola.app.jobs.folder import open_posterior
from mola.compare.evaluation import evaluation_document
from mola.errors import StorageError
from mola.laplace import Kron, base
from mola.saving import storage
from mola.sums import START, batch_checksum
from tests.closeness import assert_close
from tests.conftest import make_problem
from tests.forked_python import run_team
from tests.own_work import make_desk
from tests.team_script import Counted, batches, data, inputs, laws, networks

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 300
"""Seconds after which processes count as hanging; they take a few on a machine that has nothing else to do."""


def run(size, what, folder, **environment):
    """Start so many processes, wait for all, give their exit codes and what they wrote to stderr."""
    return run_team(size, ["-m", "tests.team_script", what, folder], folder, cwd=ROOT, timeout=LIMIT, **environment)


@pytest.fixture(scope="module")
def alone():
    """What one process finds."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with pytest.warns(mola.MolaWarning):  # tuning by the threshold: these networks are not overconfident
        found = laws(None)
    torch.set_default_dtype(before)
    return found


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_team_does_what_one_process_does(size, alone, tmp_path):
    codes, errors = run(size, "everything", tmp_path)
    assert codes == [0] * size, errors
    found = [load_file(tmp_path / f"everything-{rank}-of-{size}.safetensors") for rank in range(size)]
    told = [json.loads((tmp_path / f"everything-{rank}-of-{size}.json").read_text()) for rank in range(size)]
    check_laws(found, alone)
    check_refusals([one["refusals"] for one in told], size)
    check_resumed([one["resumed"] for one in told])
    assert all(all(one["documents"]) for one in told)
    assert not (tmp_path / f"kept-{size}").exists()


def check_laws(found, expected):
    for name, one in expected.items():
        for other in found[1:]:
            assert torch.equal(other[name], found[0][name]), f"{name} differs between ranks"
        kind = "search" if name.endswith(("stacking", "ensemble")) else "float64"  # weights found by stacking
        assert_close(found[0][name], one, kind, scale=max(1.0, float(one.abs().max())), name=name)
    assert len(expected) > 300


WORDS = {
    "nan": ("DataError", "rank {last} of {size}, fit: batch 1 of the training loader, models[0]: features are NaN"),
    "network": ("OptionError", "rank {last} is not doing the same work as rank 0: models[1] is another network"),
    "count": ("OptionError", "rank {last} is not doing the same work as rank 0: models: expected 2, got 3"),
    "classes": ("OptionError", "rank {last} is not doing the same work as rank 0: models[0] is another network"),
    "structure": ("OptionError", "structure: expected {{'name': 'kron'}}, got {{'name': 'diag'}}"),
    "precision": ("OptionError", "prior_precision: expected [1.0, 1.0], got [2.0, 2.0]"),
    "head": ("HeadError", "rank {last} of {size}, fit: models[0] (Sequential): head='0' was given"),
    "labels": ("DataError", "the batches of rank 0 have labels, those of rank {last} have none"),
    "validation": ("OptionError", "validation data: expected False, got True"),
    "not a loader": ("DataError", "rank {last} of {size}, fit: the training loader: expected an iterable of batches"),
    "foreign": ("DistributedError", "rank {last} of {size}, fit: OSError: the disk is full"),
    "average": ("OptionError", "a running average depends on the order of the batches"),
    "no data": ("DataError", "the training loader is empty"),
    "rule": ("OptionError", "rank {last} is not doing the same work as rank 0: rule is Evidence"),
    "no validation": ("DataError", "the validation loader is empty on every rank"),
    "no inputs": ("DataError", "the prediction loader is empty on every rank"),
    "changed": ("HeadError", "rank {last} of {size}, tune: models[0]: layers other than head"),
    "odd inputs": ("DataError", "rank {last} of {size}, predict: batch 0 of the prediction loader, models[0]"),
}


def check_refusals(told, size):
    for name, (kind, words) in WORDS.items():
        expected = words.format(last=size - 1, size=size)
        for rank, one in enumerate(told):
            if name == "foreign" and rank == size - 1:
                assert one[name] == ["OSError", "the disk is full"]  # where it happened, it is what it was
                continue
            assert one[name][0] == kind, (name, rank, one[name])
            assert expected in one[name][1], (name, rank)
            assert one[name] == told[0][name] or name == "average", (name, rank)  # which both notice by themselves
    assert [one["after all"] for one in told] == [[pytest.approx(40.0)]] * size


def check_resumed(resumed):
    for one in resumed:
        assert one["kept"]
        assert one["same"]
    assert resumed[-1]["passes"] == 1  # all its batches but the last were in the sums
    assert all(one["passes"] < one["batches"] for one in resumed)


@pytest.mark.parametrize(("size", "what"), [(3, "killed1"), (2, "killed0"), (2, "left1")])
def test_a_process_that_ends_ends_all(size, what, tmp_path):
    begin = time.monotonic()
    codes, errors = run(size, what, tmp_path)
    assert time.monotonic() - begin < LIMIT
    victim = int(what[-1])
    for rank in range(size):
        assert codes[rank] != 0, rank
        if rank == victim:
            continue
        words = {
            "killed1": "DistributedError: lost touch with the other processes during fit: one of them has ended",
            "killed0": "DistributedError: lost touch with the other processes during fit: one of them has ended",
            "left1": "DistributedError: rank 1 ended: ValueError: a mistake in the script",
        }[what]
        assert words in errors[rank], errors[rank]


@pytest.mark.slow  # what it says of mola, the test above says too
def test_a_rank_that_ends_because_another_did_passes_that_on():
    """So that the processes that are left say the same line, and no rank is named that did nothing wrong."""

    def told(error):
        team = mola.Team.__new__(mola.Team)
        team.size, team.rank, team._store = 2, 0, torch.distributed.HashStore()
        team.close(error)
        return team._store.get("ended").decode()

    assert told(mola.DistributedError("lost touch with the other processes")) == "lost touch with the other processes"
    assert told(ValueError("a mistake")) == "rank 0 ended: ValueError: a mistake"


def test_torchrun_ends_all_when_one_is_killed(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.team_script", "killed1", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode != 0
    assert "local_rank: 1" in done.stderr
    assert "-9" in done.stderr


@pytest.mark.slow  # torchrun starts Python and torch three times; what processes do together is tested above, forked
@pytest.mark.filterwarnings("ignore::mola.errors.MolaWarning")
def test_the_command_under_torchrun(tmp_path, monkeypatch):
    """`torchrun -m mola fit`: pictures and arrays divided, one folder written, one process that speaks.

    The commands after it are given to processes that have met once: to start each with torchrun takes five times as long.
    """
    desk = make_desk(tmp_path, "own_networks_for_teams")
    (tmp_path / "train" / "dog" / "zz.png").write_bytes(b"\x89PNG")
    options = ["fit", "--network", f"{desk.module}:build", "--weights", *desk.weights(2), "--train", "train"]
    options += ["--val", "val.npz", "--mixing", "stacking", "--batch-size", "5", "--workers", "0", "--json"]
    options += ["--checkpoint", "kept", "--output"]
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}
    several = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "mola"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    single = CliRunner().invoke(app, [*options, "one"])
    assert single.exit_code == 3, single.output
    command = [*several, *options, "two"]
    done = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "two" / "posterior.json").exists()
    assert not (tmp_path / "kept").exists()
    one, two = json.loads(single.stdout), json.loads(done.stdout)  # one document: one process printed
    assert two["result"]["train_count"] == one["result"]["train_count"] == 36
    assert two["left_out"] == one["left_out"]
    assert list(two["left_out"]["train"]) == ["dog/zz.png"]
    assert_close(two["result"]["prior_precision"], one["result"]["prior_precision"])
    for who in ("networks", "posterior"):
        assert_close(two["result"]["validation"][who], one["result"]["validation"][who], scale=1.0)
    scores = [each["result"]["validation"]["outlier_threshold"] for each in (one, two)]
    assert_close(scores[1], scores[0], "difference", scale=1.0)
    inputs, _ = desk.inputs("test")
    posteriors = [mola.load(tmp_path / name, desk.networks(2)) for name in ("one", "two")]
    assert_close(posteriors[0](inputs), posteriors[1](inputs))
    evaluate = ["evaluate", "two", "--test", "test", "--ood", "strange", "--output", "report", "--json"]
    pictures, arrays = (
        ["predict", "two", given, "--probabilities", "--json", "--output", output]
        for given, output in (("test", "two-pictures.csv"), ("test.npz", "two-arrays.jsonl"))
    )
    strict, nothing = (
        ["predict", "two", "test", "--strict", "--output", "strict.csv"],
        ["predict", "two", "nothing", "--output", "nothing.csv"],
    )
    alone = evaluation_document(run_evaluate(open_posterior("two"), "test", ["strange"]))
    (tmp_path / "nothing").mkdir()
    for bad, content in (("test/cat/bad", b"\x89PNG"), ("test/dog/zz", b"none either"), ("nothing/bad", b"\x89PNG")):
        (tmp_path / f"{bad}.png").write_bytes(content)
    evaluated, *predicted = run_commands([evaluate, pictures, arrays, strict, nothing], tmp_path, **path)
    check_evaluation(tmp_path, evaluated, alone)
    check_predictions(tmp_path, *predicted)
    (wrong,) = CliRunner(env={"WORLD_SIZE": "2"}).invoke(app, ["info", "two"]).exception.args
    assert "mola info works in one process, and torchrun started 2" in wrong
    assert "fit, evaluate, predict, demo, train and bench can be shared" in wrong


def run_commands(commands, folder, **environment):
    """What two processes say and write, one command after the other."""
    (folder / "commands.json").write_text(json.dumps(commands))
    codes, errors = run(2, "commands", folder, **environment)
    assert codes == [0, 0], errors
    told = [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(2)]
    return [{part: one[part] + other[part] for part in one} for one, other in zip(*told, strict=True)]


def check_predictions(root, pictures, arrays, strict, nothing):
    """`torchrun -m mola predict`: the rows of one process, in their order, for pictures and for arrays, bad ones included."""
    for given, output, done in (("test", "pictures.csv", pictures), ("test.npz", "arrays.jsonl", arrays)):
        command = ["predict", "two", given, "--probabilities", "--json", "--output", f"one-{output}"]
        single = CliRunner().invoke(app, command)
        assert done["codes"] == [0, 0], done["stderr"]  # torchrun takes any other for a crash
        assert single.exit_code == (3 if given == "test" else 0), single.output
        one, two = json.loads(single.stdout), json.loads(done["stdout"])
        assert (two["count"], two["labels"], two["left_out"]) == (one["count"], one["labels"], one["left_out"])
        assert one["count"] == 18
        for name in ("confidence", "entropy", "epistemic", "outlying"):
            assert_close(two[name], one[name], "difference" if name == "epistemic" else "float32", scale=1.0, name=name)
        assert (root / f"two-{output}.toml").exists()
        rows = [read_rows(root / f"{who}-{output}") for who in ("one", "two")]
        one, two = ([[row.get(key) for key in ("name", "class", "error")] for row in some] for some in rows)
        assert two == one
        assert sum(bool(error) for *_, error in one) == (2 if given == "test" else 0)
        for mine, theirs in zip(*rows, strict=True):
            if not mine.get("error"):
                assert_close(float(mine["ood_score"]), float(theirs["ood_score"]), "difference", scale=1.0)
    assert strict["codes"] == nothing["codes"] == [1, 1]
    assert "bad.png" in strict["stderr"]
    assert "--strict leaves nothing out" in strict["stderr"]
    assert "nothing holds no input that can be used. The first: bad.png" in nothing["stderr"]
    assert not any((root / f"{name}.csv").exists() for name in ("strict", "nothing"))


def read_rows(path):
    text = path.read_text()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return list(csv.DictReader(text.splitlines()))


def check_evaluation(root, done, alone):
    assert done["codes"] == [0, 0], done["stderr"]
    shared = json.loads(done["stdout"])
    assert (root / "report" / "index.html").exists()
    assert shared["count"] == alone["count"] == 18
    for method, one in alone["methods"].items():
        assert_close(shared["methods"][method]["scores"], one["scores"], scale=1.0, name=method)
        found, expected = (each["outside"]["strange"] for each in (shared["methods"][method], one))
        assert_close(found["confidence"], expected["confidence"])
        assert list(found["scores"]) == list(expected["scores"])
        for score, other in expected["scores"].items():
            for name in ("auroc", "auroc_error", "fpr95"):
                assert found["scores"][score][name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), (
                    method,
                    score,
                    name,
                )
        assert_close(shared["methods"][method]["errors"], one["errors"], scale=1.0, name=method)
        assert shared["methods"][method]["classes"].keys() == one["classes"].keys()
    assert {name: found["best"] for name, found in shared["leads"].items()} == {
        name: list(found["best"]) for name, found in alone["leads"].items()
    }


class TestAlone:
    """A team of one process, and none."""

    def test_joining_without_torchrun(self, monkeypatch):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        problem = make_problem()
        with mola.join() as team:
            assert (team.rank, team.size, team.first) == (0, 1, True)
            assert team.shard([1, 2, 3]) == [1, 2, 3]
            together = mola.fit(problem.network, problem.loader, team=team, progress=False)
            predicted = together.predict(problem.loader, team=team)
        alone = mola.fit(problem.network, problem.loader, progress=False).predict(problem.loader)
        assert_close(predicted.probs, alone.probs, "float64")

    def test_half_an_environment(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        with pytest.raises(mola.OptionError, match=r"WORLD_SIZE is 2.*MASTER_ADDR.*torchrun"), mola.join():
            pass

    def test_a_team_without_a_group(self):
        with pytest.raises(mola.OptionError, match=r"no process group.*torchrun.*mola.join"):
            mola.Team()


class Squares(Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return torch.tensor([float(index)] * 3), index % 4


class Endless(IterableDataset):
    def __iter__(self):
        yield 1


class TestShard:
    @pytest.mark.parametrize("world", [1, 2, 3, 5, 20])
    @pytest.mark.parametrize("count", [0, 1, 7, 11])
    def test_each_datum_once_in_order(self, count, world):
        for whole in (list(range(count)), torch.arange(count), np.arange(count), TensorDataset(torch.arange(count))):
            parts = [mola.shard(whole, rank, world) for rank in range(world)]
            joined = [int(one[0] if isinstance(one, tuple) else one) for part in parts for one in part]
            assert joined == list(range(count))
            sizes = [len(part) for part in parts]
            assert max(sizes) - min(sizes) <= 1

    def test_loaders_keep_their_settings(self):
        loader = DataLoader(Squares(), batch_size=3)
        parts = [mola.shard(loader, rank, 2) for rank in range(2)]
        assert all(part.batch_size == 3 for part in parts)
        labels = torch.cat([y for part in parts for _, y in part])
        assert labels.tolist() == [index % 4 for index in range(11)]

    @pytest.mark.parametrize(
        ("whole", "words"),
        [
            (
                DataLoader(Squares(), batch_size=3, shuffle=True),
                r"RandomSampler.*order of its own.*mola\.shard\(dataset",
            ),
            (DataLoader(Squares(), batch_size=3, drop_last=True), r"drop_last"),
            (DataLoader(Endless()), r"reads a stream"),
            ((torch.ones(2, 3), torch.ones(2)), r"pair of tensors.*TensorDataset"),
            (iter([1]), r"list_iterator.*islice"),
            ({"a": 1}, r"got dict"),
        ],
    )
    def test_what_cannot_be_divided(self, whole, words):
        with pytest.raises(mola.OptionError, match=words):
            mola.shard(whole, 0, 2)

    @pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0), ("0", 2)])
    def test_ranks(self, rank, world):
        with pytest.raises(mola.OptionError, match="expected a rank"):
            mola.shard([1], rank, world)

    def test_samplers_that_repeat_data_are_told(self):
        sampler = DistributedSampler(Squares(), num_replicas=4, rank=0, shuffle=False)
        with pytest.warns(mola.MolaWarning, match=r"repeats 1 of 11 data.*mola\.shard"):
            mola.distributed.check_sampler(DataLoader(Squares(), sampler=sampler))
        even = DistributedSampler(Squares(), num_replicas=11, rank=0, shuffle=False)
        mola.distributed.check_sampler(DataLoader(Squares(), sampler=even))


class PowerFailureError(Exception):
    pass


def interrupted(loader, after):
    """A loader that ends the fit after so many batches."""
    yield from loader[:after]
    raise PowerFailureError


def exactly(first, second):
    for one, other in zip(first.components, second.components, strict=True):
        one, other = one.curvature.factors, other.curvature.factors
        assert (one.count, one.log_likelihood) == (other.count, other.log_likelihood)
        for name, tensor in one.saved().items():
            assert torch.equal(tensor, other.saved()[name]), name
    for one, other in zip(first.components, second.components, strict=True):
        one, other = one.curvature.classes.tensors(), other.curvature.classes.tensors()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


class TestResuming:
    @pytest.fixture(autouse=True)
    def _small_sums(self, monkeypatch):
        """Sums are made of at most 256 rows: some batches are gathered, others come alone."""
        monkeypatch.setattr(base, "GATHERED", (256, 256, 2**19))

    @pytest.fixture
    def loader(self):
        rows, sizes = data(3, 1500), [100, 100, 300, 50, 50, 200, 400, 300]
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        return [next(batches(rows[start : start + size], size)) for start, size in zip(starts, sizes, strict=True)]

    @pytest.mark.parametrize("after", [0, 1, 3, 5, 8])
    def test_to_the_same_bits(self, structure, loader, after, tmp_path):
        whole = mola.fit(networks(2), loader, structure=structure, progress=False)
        with pytest.raises(PowerFailureError):
            mola.fit(
                networks(2),
                interrupted(loader, after),
                structure=structure,
                progress=False,
                checkpoint=tmp_path / "kept",
                checkpoint_every=1,
            )
        resumed = mola.fit(networks(2), iter(loader), structure=structure, progress=False, checkpoint=tmp_path / "kept")
        exactly(resumed, whole)
        assert not (tmp_path / "kept").exists()

    def test_a_checkpoint_of_an_older_version_goes_on_without_distances(self, loader, tmp_path):
        """It has no sums for distances of the data that it has seen."""
        with pytest.raises(PowerFailureError):
            mola.fit(networks(2), interrupted(loader, 5), progress=False, checkpoint=tmp_path, checkpoint_every=1)
        place = tmp_path / "rank-0-of-1"
        document, tensors = storage.read(place, sums.KIND, sums.SCHEMA)
        older = {name: one for name, one in tensors.items() if sums.CLASSES not in name}
        assert len(older) < len(tensors)
        storage.write(place, document, older, kind=sums.KIND)
        with pytest.warns(mola.MolaWarning, match="the checkpoint has no class sums"):
            resumed = mola.fit(networks(2), loader, progress=False, checkpoint=tmp_path)
        whole = mola.fit(networks(2), loader)
        assert not resumed.has_distances
        assert torch.equal(resumed(inputs()), whole(inputs()))
        with pytest.raises(mola.OptionError, match=r"no distances from the training classes.*Fit again"):
            resumed.with_distance_exponent(1.0)

    def test_running_averages_go_on_too(self, loader, tmp_path):
        options = {"structure": Kron(running_average=0.9), "progress": False}
        whole = mola.fit(networks(1), loader, **options)
        with pytest.raises(PowerFailureError):
            mola.fit(networks(1), interrupted(loader, 5), **options, checkpoint=tmp_path, checkpoint_every=2)
        exactly(mola.fit(networks(1), loader, **options, checkpoint=tmp_path), whole)

    def test_from_the_last_checkpoint_not_from_zero(self, loader, tmp_path):
        network = Counted(*make_problem(seed=0).network)
        with pytest.raises(PowerFailureError):
            mola.fit(network, interrupted(loader, 7), progress=False, checkpoint=tmp_path, checkpoint_every=1)
        Counted.passes = 0
        mola.fit(network, loader, progress=False, checkpoint=tmp_path)
        assert Counted.passes == 1

    def test_images_with_empty_margins_are_told_apart(self, tmp_path):
        """Without labels, and with sizes at which evenly spaced numbers are all of the margin."""
        images = torch.zeros(512, 1, 28, 28)
        images[:, :, 4:24, 4:24] = torch.rand(512, 1, 20, 20, generator=torch.Generator().manual_seed(0))
        network, loader = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 3)), list(images.split(64))
        options = {"structure": "diag", "progress": False, "checkpoint": tmp_path}
        with pytest.raises(PowerFailureError):
            mola.fit(network, interrupted(loader, 6), **options, checkpoint_every=1)
        with pytest.raises(StorageError, match="count some data twice"):
            mola.fit(network, loader[::-1], **options)
        exactly(mola.fit(network, loader, **options), mola.fit(network, loader, structure="diag", progress=False))

    @pytest.mark.parametrize(
        "kind", [torch.float16, torch.bfloat16, torch.uint8, torch.int16, torch.bool, torch.complex128]
    )
    def test_trails_of_all_types_of_numbers(self, kind):
        given = torch.zeros(5000, dtype=kind)
        other = given.clone()
        other[7] = 1
        assert batch_checksum(START, given) == batch_checksum(START, given.clone())
        assert batch_checksum(START, [given.view(50, 100).T]) != batch_checksum(START, [other.view(50, 100).T])

    def test_again_after_the_last_batch(self, loader, tmp_path):
        """Tuning failed after the whole pass: nothing of the pass is done again."""
        network = Counted(*make_problem(seed=0).network)
        with pytest.raises(PowerFailureError):
            mola.fit(network, loader, interrupted(loader, 1), progress=False, checkpoint=tmp_path)
        Counted.passes = 0
        resumed = mola.fit(network, loader, progress=False, checkpoint=tmp_path)
        assert Counted.passes == 0
        exactly(resumed, mola.fit(network, loader, progress=False))

    def test_messages_count_batches_of_the_loader(self, loader, tmp_path):
        with pytest.raises(PowerFailureError):
            mola.fit(networks(1), interrupted(loader, 7), progress=False, checkpoint=tmp_path, checkpoint_every=1)
        loader[7] = (loader[7][0] * float("nan"), loader[7][1])
        with pytest.raises(mola.DataError, match="batch 7 of the training loader"):
            mola.fit(networks(1), loader, progress=False, checkpoint=tmp_path)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda given: given | {"models": [make_problem(seed=7).network]}, r"another fit: models\[0\] is another"),
            (lambda given: given | {"models": networks(2)}, r"another fit: models: expected 1, got 2"),
            (lambda given: given | {"structure": "diag"}, r"another fit: structure: expected.*kron.*got.*diag"),
            (
                lambda given: given | {"train_loader": given["train_loader"][::-1]},
                r"not those in the checkpoint.*order",
            ),
            (lambda given: given | {"train_loader": given["train_loader"][:2]}, r"sums of 5 batches.*has only 2"),
        ],
    )
    def test_other_fits_are_refused(self, loader, change, words, tmp_path):
        given = {"models": networks(1), "train_loader": interrupted(loader, 6), "checkpoint": tmp_path}
        with pytest.raises(PowerFailureError):
            mola.fit(**given, progress=False, checkpoint_every=1)
        with pytest.raises(mola.StorageError, match=words):
            mola.fit(**change(given | {"train_loader": loader}), progress=False)

    def test_other_numbers_of_processes_are_refused(self, loader, tmp_path):
        (tmp_path / "rank-1-of-3").mkdir()
        with pytest.raises(mola.StorageError, match=r"by 3 processes, got 1.*Start 3 processes, or delete"):
            mola.fit(networks(1), loader, progress=False, checkpoint=tmp_path)

    def test_damaged_checkpoints_are_refused(self, loader, tmp_path):
        with pytest.raises(PowerFailureError):
            mola.fit(networks(1), interrupted(loader, 6), progress=False, checkpoint=tmp_path, checkpoint_every=1)
        with pytest.raises(mola.StorageError, match="fit-checkpoint"):
            mola.load(tmp_path / "rank-0-of-1", networks(1))
        (tensors,) = (tmp_path / "rank-0-of-1").glob("*.safetensors")
        tensors.write_bytes(tensors.read_bytes()[:-8])
        with pytest.raises(mola.StorageError, match="truncated or corrupt"):
            mola.fit(networks(1), loader, progress=False, checkpoint=tmp_path)

    @pytest.mark.parametrize("every", [0, -1, 1.5, True])
    def test_how_often(self, loader, every, tmp_path):
        with pytest.raises(mola.OptionError, match="checkpoint_every must be a whole number"):
            mola.fit(networks(1), loader, progress=False, checkpoint=tmp_path, checkpoint_every=every)

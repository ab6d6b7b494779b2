"""One process of several: `tests/library/test_team.py` and `tests/cli/test_torchrun.py` compare what they write."""

import io
import json
import os
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import molaplace as mola
from molaplace.__main__ import main as mola_command
from tests.conftest import CLOSED_FORM_LINKS, STRUCTURES, make_problem

LINKS = (*CLOSED_FORM_LINKS, "mc")
RULE = mola.rules.Score("nll", grid=[0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0])
CAREFUL = mola.rules.Distance(price=0.1, rule=RULE)


def inputs():
    return make_problem(seed=9, count=40).inputs


def networks(count):
    return [make_problem(seed=seed).network for seed in range(count)]


def data(seed, count=41):
    problem = make_problem(seed=seed, count=count)
    return [(problem.inputs[k], problem.labels[k]) for k in range(count)]


def batches(rows, size=7):
    """A generator, which can be read only once."""
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        yield torch.stack([x for x, _ in some]), torch.stack([y for _, y in some])


def targets(rows):
    """The same with a number for each output, near what one of the networks says."""
    network = networks(1)[0]
    for x, y in batches(rows):
        with torch.no_grad():
            outputs = network(x)
        yield x, outputs + 0.3 * torch.sin(7 * y[:, None] + 3 * outputs)


def labelled(rows):
    """The same with four labels each, 0 or 1, some of them missing, and some data without any."""
    for x, y in batches(rows):
        labels = torch.stack([(y + k) % 2 for k in range(4)], 1).double()
        labels[y == 3, 1] = torch.nan
        labels[(x[:, 0] > 1.5)] = torch.nan
        yield x, labels


def divisions(rows, team):
    """Ways to divide the data: evenly, very unevenly, and with a rank that has none."""
    size = 1 if team is None else team.size
    bounds = {
        "even": [len(rows) * k // size for k in range(size + 1)],
        "uneven": [0, 3, 38, 41] if size == 3 else [0, 3, 41],
        "empty rank": [0, 0, 41] if size == 2 else [0, 20, 20, 41],
    }
    return {name: rows if team is None else rows[b[team.rank] : b[team.rank + 1]] for name, b in bounds.items()}


class Found(dict):
    """Tensors by name."""

    def note(self, key, thing=None, *fields, **values):
        """Keep fields of a posterior or a prediction, and other values."""
        for name, value in {**{name: getattr(thing, name) for name in fields}, **values}.items():
            value = value() if callable(value) and not isinstance(value, torch.Tensor) else value
            self[f"{key}/{name}"] = torch.as_tensor(value, dtype=torch.float64).contiguous()


def positions(found, team):
    """What must not depend on the number of processes if networks have outputs at many positions."""
    generator = torch.Generator().manual_seed(6)
    torch.manual_seed(6)
    network = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1))
    images = torch.randn(9, 2, 5, 6, generator=generator)
    maps = torch.randint(3, (9, 5, 6), generator=generator)
    maps[1] = -100
    maps[7, :3] = -100
    own = slice(None)
    if team is not None:
        own = slice([0, 2, 5][team.rank], [2, 5, 9][team.rank] if team.rank < team.size - 1 else 9)
    train = [(images[k : k + 1], maps[k : k + 1]) for k in range(9)[own]]
    val = [(images[own], maps[own])]
    for used in ("all", "average"):
        posterior = mola.fit(network, train, val, positions=used, rule=RULE, team=team, progress=False)
        found.note(f"positions {used}", posterior, "log_evidence", **{"lambda": posterior.prior_precision})
        found.note(f"positions {used}", posterior.predict([images[own]], team=team), "probs", "distance", "label")


def from_features(shard, team):
    """A posterior from the features of this process's shard, which may be empty."""
    network = networks(1)[0]
    rows = torch.stack([x for x, _ in shard]) if shard else torch.empty(0, 3)
    labels = torch.tensor([int(y) for _, y in shard], dtype=torch.int64)
    with torch.no_grad():
        features = network[:-1](rows)
        outputs = network(rows)
    return mola.fit_features(features, outputs, labels, network[-1], team=team)


def laws(team):
    """Everything that must not depend on the number of processes; None for one process alone."""
    results = Found()
    shared = {"progress": False, "team": team}
    positions(results, team)
    held = divisions(data(4), team)
    strange = divisions(data(5), team)
    for division, shard in divisions(data(3), team).items():
        val = held[division]
        for structure in STRUCTURES:
            key = f"{division}/{structure}"
            posterior = mola.fit(networks(2), batches(shard), structure=structure, **shared)
            for index, component in enumerate(posterior.components):
                results.note(f"{key}/{index}", **component.layer.sums.tensors, count=component.layer.sums.count)
            added = posterior.add(batches(val), **shared)
            results.note(f"{key}/added", added, "log_evidence", probs=added(inputs()))
            results.note(f"{key}/removed", probs=added.without(batches(val), **shared)(inputs()))
            tuned = posterior.tune(batches(val), rule=RULE, **shared)
            curve = tuned.tuning.curve
            results.note(key, posterior, "log_evidence", nll=curve["nll"], ece=curve["ece"])
            results.note(
                key, **{"lambda": tuned.prior_precision}, **{link: tuned.with_link(link)(inputs()) for link in LINKS}
            )
            fields = ("probs", "mutual_information", "ood_score", "logit_mean", "logit_variance")
            results.note(f"{key}/predict", tuned.predict(batches(val), team=team), *fields)
        of_features = from_features(shard, team)
        results.note(f"{division}/from features", of_features, "log_evidence")
        exposure = mola.rules.Outliers(list(batches(strange[division])), grid=RULE.grid)
        chosen = posterior.tune(batches(val), rule=exposure, **shared)
        results.note(division, outliers=chosen.tuning.curve["objective"])
        careful = posterior.tune(batches(val), rule=CAREFUL, **shared)
        scales = [list(scale) for scale in careful.reference.scales]
        results.note(f"{division}/distance", careful, "distance_exponent", scales=scales)
        careful = careful.with_distance_exponent(1.5).with_temperature(0.8)
        fields = ("probs", "mutual_information", "ood_score", "far_field", "distance")
        results.note(f"{division}/distance", careful.predict(batches(val), team=team), *fields)
        results.note(division, threshold=posterior.tune(batches(val), rule="threshold", **shared).prior_precision)
        default = posterior.tune(batches(val), **shared)
        results.note(f"{division}/calibrated", nll=default.tuning.curve["nll"], probs=default(inputs()))
        evidence = posterior.tune(rule=mola.rules.Evidence(), **shared).prior_precision
        stacked = posterior.reweight(batches(val), **shared).weights
        plain = mola.ensemble(networks(2))
        ensemble = plain.reweight(batches(val), **shared).weights
        results.note(division, **{"by evidence": evidence}, stacking=stacked, ensemble=ensemble)
        results.note(f"{division}/plain", plain.predict(batches(val), team=team), "probs")

        several = mola.fit(networks(2), labelled(shard), likelihood="bernoulli", **shared)
        key = f"{division}/bernoulli"
        results.note(key, several, "log_evidence", **several.components[0].layer.sums.tensors)
        several = several.tune(labelled(val), rule=CAREFUL, **shared)
        stacked = several.reweight(labelled(val), **shared).weights
        results.note(key, several, "distance_exponent", **{"lambda": several.prior_precision}, stacking=stacked)
        fields = ("probs", "label", "mutual_information", "ood_score", "distance")
        results.note(key, several.predict(labelled(val), team=team), *fields)

        key = f"{division}/gaussian"
        numbers = mola.fit(networks(2), targets(shard), structure="kron-exact", likelihood="gaussian", **shared)
        results.note(key, numbers, "noise", "log_evidence")
        numbers = numbers.tune(targets(val), rule="distance", **shared)
        results.note(f"{key}/tuned", numbers, "noise", "distance_exponent", **{"lambda": numbers.prior_precision})
        results.note(key, numbers.predict(targets(val), team=team), "mean", "variance", "ood_score", "distance")
    return dict(results)


class Counted(nn.Sequential):
    """A network that counts its passes."""

    passes = 0

    def forward(self, inputs):
        type(self).passes += 1
        return super().forward(inputs)


def drawn_alike(team):
    """Whether every rank draws the same positions of its images, the same on all ranks, in a fit or from validation data."""
    generator = torch.Generator().manual_seed(7)
    network = nn.Conv2d(2, 3, 1)
    batches = [(torch.randn(4, 2, 20, 20, generator=generator), torch.randint(3, (4, 20, 20), generator=generator))]
    posterior = mola.fit(network, batches, positions=5, team=team, progress=False)
    alone = mola.fit(network, batches, positions=5, progress=False)
    sums, sums_alone = (mixture.components[0].layer.sums.tensors["gram"] for mixture in (posterior, alone))
    held_out = posterior.read(batches, "validation loader", labelled=True, team=team)
    parts = held_out.outputs[0].chunk(team.size)
    return {
        "alike in the fit": torch.allclose(sums, team.size * sums_alone),
        "alike in validation data": torch.equal(parts[0], parts[1]),
    }


def resumed(team, folder):
    """A fit that ends early on every rank, each after another number of batches, and goes on."""
    shard = list(batches(team.shard(data(3, 3600)), 300))
    network = Counted(*make_problem(seed=0).network)

    def interrupted():
        yield from shard[: 2 + team.rank]
        raise OSError("the power is gone")

    def sums(posterior):
        return posterior.components[0].layer.sums.tensors

    whole = mola.fit(network, shard, progress=False, team=team)
    options = {"progress": False, "team": team, "checkpoint": folder, "checkpoint_every": 1}
    try:
        mola.fit(network, interrupted(), **options)
    except OSError:
        is_kept = (Path(folder) / f"rank-{team.rank}-of-{team.size}").is_dir()
    Counted.passes = 0
    again = mola.fit(network, shard, **options)
    same = all(torch.equal(tensor, sums(again)[name]) for name, tensor in sums(whole).items())
    return {"kept": is_kept, "passes": Counted.passes, "batches": len(shard), "same": same}


def commands(folder):
    """The commands of a list one after the other, by processes that have met once: the codes, and what each says."""
    os.chdir(folder)
    torch.distributed.init_process_group("gloo")
    reports = []
    for options in json.loads(Path("commands.json").read_text()):
        stdout = io.StringIO()
        stderr = io.StringIO()
        codes = []
        sys.argv = ["molaplace", *options]
        with redirect_stdout(stdout), redirect_stderr(stderr):
            try:
                mola_command()
            except SystemExit as end:
                codes = [int(end.code or 0)]
        reports.append({"codes": codes, "stdout": stdout.getvalue(), "stderr": stderr.getvalue()})
    Path(f"told-{torch.distributed.get_rank()}.json").write_text(json.dumps(reports))
    torch.distributed.destroy_process_group()


def main(output):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore", mola.errors.MolaWarning)
    with mola.distributed.join() as team:
        place = Path(output) / f"{team.rank}-of-{team.size}"
        save_file(laws(team), f"{place}.safetensors")
        reports = resumed(team, Path(output) / "kept") | drawn_alike(team)
        Path(f"{place}.json").write_text(json.dumps(reports))


if __name__ == "__main__":
    {"commands": commands, "laws": main}[sys.argv[1]](sys.argv[2])

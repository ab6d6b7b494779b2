"""One process of several: `tests/library/test_team.py` and `tests/app/test_torchrun.py` compare what they write."""

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

import mola
from mola.__main__ import main as mola_command
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
    start = [0, 3, 38, 41] if team is None or team.size == 3 else [0, 3, 41]
    bounds = {
        "even": [len(rows) * k // (team.size if team else 1) for k in range((team.size if team else 1) + 1)],
        "uneven": start,
        "empty rank": [0, 0, 41] if team is not None and team.size == 2 else [0, 20, 20, 41],
    }
    return {name: rows if team is None else rows[b[team.rank] : b[team.rank + 1]] for name, b in bounds.items()}


def positions(team):
    """What must not depend on the number of processes where networks have outputs at many positions."""
    found = {}
    generator = torch.Generator().manual_seed(6)
    torch.manual_seed(6)
    network = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1))
    images, maps = torch.randn(9, 2, 5, 6, generator=generator), torch.randint(3, (9, 5, 6), generator=generator)
    maps[1], maps[7, :3] = -100, -100
    own = (
        slice(None)
        if team is None
        else slice([0, 2, 5][team.rank], [2, 5, 9][team.rank] if team.rank < team.size - 1 else 9)
    )
    train = [(images[k : k + 1], maps[k : k + 1]) for k in range(9)[own]]
    for used in ("all", "average"):
        posterior = mola.fit(
            network, train, [(images[own], maps[own])], positions=used, rule=RULE, team=team, progress=False
        )
        said = posterior.predict([images[own]], team=team)
        found[f"positions {used} lambda"] = torch.tensor(posterior.prior_precision)
        found[f"positions {used} evidence"] = posterior.log_evidence()
        found[f"positions {used} probs"] = said.probs.contiguous()
        found[f"positions {used} distance"] = said.distance.contiguous()
        found[f"positions {used} label"] = said.label.double()
    return found


def laws(team):
    """Everything that must not depend on the number of processes; None for one process alone."""
    found = positions(team)
    train, val, outliers = data(3), data(4, 41), data(5, 41)
    held, strange = divisions(val, team), divisions(outliers, team)
    for division, shard in divisions(train, team).items():
        for structure in STRUCTURES:
            posterior = mola.fit(networks(2), batches(shard), structure=structure, progress=False, team=team)
            key = f"{division}/{structure}"
            for index, component in enumerate(posterior.components):
                sums = component.layer.sums
                found[f"{key}/{index}/count"] = torch.tensor(float(sums.count))
                found |= {f"{key}/{index}/{name}": one for name, one in sums.tensors.items()}
            found[f"{key}/evidence"] = posterior.log_evidence()
            tuned = posterior.tune(batches(held[division]), rule=RULE, progress=False, team=team)
            found[f"{key}/curve"] = torch.tensor(tuned.tuning.curve["nll"])
            found[f"{key}/ece"] = torch.tensor(tuned.tuning.curve["ece"])
            found[f"{key}/lambda"] = torch.tensor(tuned.prior_precision)
            found |= {f"{key}/probs/{link}": tuned.with_link(link)(inputs()) for link in LINKS}
            prediction = tuned.predict(batches(held[division]), team=team)
            for name in ("probs", "mutual_information", "ood_score", "logit_mean", "logit_variance"):
                found[f"{key}/predict/{name}"] = getattr(prediction, name)
        exposure = mola.rules.Outliers(list(batches(strange[division])), grid=RULE.grid)
        chosen = posterior.tune(batches(held[division]), rule=exposure, progress=False, team=team)
        found[f"{division}/outliers"] = torch.tensor(chosen.tuning.curve["objective"])
        careful = posterior.tune(batches(held[division]), rule=CAREFUL, progress=False, team=team)
        found[f"{division}/distance/exponent"] = torch.tensor(careful.distance_exponent)
        found[f"{division}/distance/scales"] = torch.tensor([list(scale) for scale in careful.scaling.reference.scales])
        careful = careful.with_distance_exponent(1.5).with_temperature(0.8)
        prediction = careful.predict(batches(held[division]), team=team)
        for name in ("probs", "mutual_information", "ood_score", "far_field", "distance"):
            found[f"{division}/distance/{name}"] = getattr(prediction, name)
        threshold = posterior.tune(batches(held[division]), rule="threshold", progress=False, team=team)
        found[f"{division}/threshold"] = torch.tensor(threshold.prior_precision)
        default = posterior.tune(batches(held[division]), progress=False, team=team)
        found[f"{division}/calibrated"] = torch.tensor(default.tuning.curve["nll"])
        found[f"{division}/calibrated/probs"] = default(inputs())
        found[f"{division}/by evidence"] = torch.tensor(
            posterior.tune(rule=mola.rules.Evidence(), progress=False, team=team).prior_precision
        )
        stacked = posterior.reweight(batches(held[division]), progress=False, team=team)
        found[f"{division}/stacking"] = stacked.weights
        plain = mola.ensemble(networks(2))
        found[f"{division}/ensemble"] = plain.reweight(batches(held[division]), progress=False, team=team).weights
        found[f"{division}/ensemble/probs"] = plain.predict(batches(held[division]), team=team).probs
        several = mola.fit(networks(2), labelled(shard), likelihood="bernoulli", progress=False, team=team)
        key = f"{division}/bernoulli"
        found[f"{key}/evidence"] = several.log_evidence()
        found |= {f"{key}/{name}": one for name, one in several.components[0].layer.sums.tensors.items()}
        several = several.tune(labelled(held[division]), rule=CAREFUL, progress=False, team=team)
        found[f"{key}/lambda"] = torch.tensor(several.prior_precision)
        found[f"{key}/exponent"] = torch.tensor(several.distance_exponent)
        found[f"{key}/stacking"] = several.reweight(labelled(held[division]), progress=False, team=team).weights
        prediction = several.predict(labelled(held[division]), team=team)
        for name in ("probs", "label", "mutual_information", "ood_score", "distance"):
            found[f"{key}/{name}"] = getattr(prediction, name)
        options = {"structure": "kron-exact", "likelihood": "gaussian", "progress": False, "team": team}
        numbers = mola.fit(networks(2), targets(shard), **options)
        found[f"{division}/gaussian/noise"] = numbers.noise
        found[f"{division}/gaussian/evidence"] = numbers.log_evidence()
        numbers = numbers.tune(targets(held[division]), rule="distance", progress=False, team=team)
        found[f"{division}/gaussian/lambda"] = torch.tensor(numbers.prior_precision)
        found[f"{division}/gaussian/exponent"] = torch.tensor(numbers.distance_exponent)
        found[f"{division}/gaussian/chosen"] = numbers.noise
        said = numbers.predict(targets(held[division]), team=team)
        for name in ("mean", "variance", "ood_score", "distance"):
            found[f"{division}/gaussian/{name}"] = getattr(said, name)
    return {name: tensor.contiguous() for name, tensor in found.items()}


class Counted(nn.Sequential):
    """A network that counts its passes."""

    passes = 0

    def forward(self, inputs):
        type(self).passes += 1
        return super().forward(inputs)


def resumed(team, folder):
    """A fit that ends early on every rank, each after another number of batches, and goes on."""
    shard, network = list(batches(team.shard(data(3, 3600)), 300)), Counted(*make_problem(seed=0).network)

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
        kept = (Path(folder) / f"rank-{team.rank}-of-{team.size}").is_dir()
    Counted.passes = 0
    again = mola.fit(network, shard, **options)
    same = all(torch.equal(one, sums(again)[name]) for name, one in sums(whole).items())
    return {"kept": kept, "passes": Counted.passes, "batches": len(shard), "same": same}


def commands(folder):
    """The commands of a list one after the other, by processes that have met once: the codes, and what each says."""
    os.chdir(folder)
    torch.distributed.init_process_group("gloo")
    told = []
    for options in json.loads(Path("commands.json").read_text()):
        said, complained, codes = io.StringIO(), io.StringIO(), []
        sys.argv = ["mola", *options]
        with redirect_stdout(said), redirect_stderr(complained):
            try:
                mola_command()
            except SystemExit as end:
                codes = [int(end.code or 0)]
        told.append({"codes": codes, "stdout": said.getvalue(), "stderr": complained.getvalue()})
    Path(f"told-{torch.distributed.get_rank()}.json").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()


def main(output):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore", mola.errors.MolaWarning)
    with mola.distributed.join() as team:
        place = Path(output) / f"{team.rank}-of-{team.size}"
        save_file(laws(team), f"{place}.safetensors")
        Path(f"{place}.json").write_text(json.dumps(resumed(team, Path(output) / "kept")))


if __name__ == "__main__":
    {"commands": commands, "laws": main}[sys.argv[1]](sys.argv[2])

"""One process of a team: what `tests/library/test_distributed.py` starts several of, and what they write is compared there."""

import io
import json
import os
import signal
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import mola
from mola.__main__ import main as mola_command
from mola.laplace import Kron, base
from tests.conftest import CLOSED_FORM_LINKS, STRUCTURES, make_problem

LINKS = (*CLOSED_FORM_LINKS, "mc")
RULE = mola.ValidationScore("nll", grid=[0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0])
CAREFUL = mola.Distance(price=0.1, rule=RULE)


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
            # The sums of each network are its own, however many there are: three with one structure.
            for count in (2, 3) if structure == STRUCTURES[-1] else (2,):
                posterior = mola.fit(networks(count), batches(shard), structure=structure, progress=False, team=team)
                key = f"{division}/{structure}/{count}"
                for index, component in enumerate(posterior.components):
                    factors = component.curvature.factors
                    found[f"{key}/{index}/count"] = torch.tensor(float(factors.count))
                    found |= {f"{key}/{index}/{name}": one for name, one in factors.saved().items()}
                found[f"{key}/evidence"] = posterior.log_evidence()
                if count == 3:
                    continue
                tuned = posterior.tune(batches(held[division]), RULE, progress=False, team=team)
                found[f"{key}/curve"] = torch.tensor(tuned.tuning.curve["nll"])
                found[f"{key}/ece"] = torch.tensor(tuned.tuning.curve["ece"])
                found[f"{key}/lambda"] = torch.tensor(tuned.prior_precision)
                found |= {f"{key}/probs/{link}": tuned.with_link(link)(inputs()) for link in LINKS}
                prediction = tuned.predict(batches(held[division]), team=team)
                for name in ("probs", "mutual_information", "ood_score", "logit_mean", "logit_variance"):
                    found[f"{key}/predict/{name}"] = getattr(prediction, name)
        exposure = mola.OutlierExposure(list(batches(strange[division])), grid=RULE.grid)
        chosen = posterior.tune(batches(held[division]), exposure, progress=False, team=team)
        found[f"{division}/outliers"] = torch.tensor(chosen.tuning.curve["objective"])
        for index, component in enumerate(posterior.components):
            classes = component.curvature.classes.tensors()
            found |= {f"{division}/classes/{index}/{name}": one for name, one in classes.items()}
        careful = posterior.tune(batches(held[division]), CAREFUL, progress=False, team=team)
        found[f"{division}/distance/exponent"] = torch.tensor(careful.distance_exponent)
        found[f"{division}/distance/usual"] = torch.tensor([list(scale) for scale in careful.cooling.usual.scales])
        careful = careful.with_distance_exponent(1.5).with_temperature(0.8)
        prediction = careful.predict(batches(held[division]), team=team)
        for name in ("probs", "mutual_information", "ood_score", "far_field", "distance"):
            found[f"{division}/distance/{name}"] = getattr(prediction, name)
        threshold = posterior.tune(batches(held[division]), progress=False, team=team)
        found[f"{division}/threshold"] = torch.tensor(threshold.prior_precision)
        found[f"{division}/evidence"] = torch.tensor(
            posterior.tune(rule=mola.Evidence(), progress=False, team=team).prior_precision
        )
        stacked = posterior.reweight(batches(held[division]), progress=False, team=team)
        found[f"{division}/stacking"] = stacked.weights
        plain = mola.ensemble(networks(2))
        found[f"{division}/ensemble"] = plain.reweight(batches(held[division]), progress=False, team=team).weights
        found[f"{division}/ensemble/probs"] = plain.predict(batches(held[division]), team=team).probs
        for structure in STRUCTURES:
            options = {"structure": structure, "likelihood": "bernoulli", "progress": False, "team": team}
            several = mola.fit(networks(2), labelled(shard), **options)
            key = f"{division}/bernoulli/{structure}"
            found[f"{key}/evidence"] = several.log_evidence()
            found |= {f"{key}/{name}": one for name, one in several.components[0].curvature.factors.saved().items()}
        several = several.tune(labelled(held[division]), CAREFUL, progress=False, team=team)
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
        numbers = numbers.tune(targets(held[division]), "distance", progress=False, team=team)
        found[f"{division}/gaussian/lambda"] = torch.tensor(numbers.prior_precision)
        found[f"{division}/gaussian/exponent"] = torch.tensor(numbers.distance_exponent)
        found[f"{division}/gaussian/chosen"] = numbers.noise
        said = numbers.predict(targets(held[division]), team=team)
        for name in ("mean", "variance", "ood_score", "distance"):
            found[f"{division}/gaussian/{name}"] = getattr(said, name)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def refusals(team):
    """What goes wrong on one rank, as every rank is told; after each, the team works on."""
    shard, last = list(batches(team.shard(data(3)))), team.rank == team.size - 1
    changed = networks(2)
    with torch.no_grad():
        changed[1][0].weight[0, 0] += 1e-3
    broken = [(x.clone(), y) for x, y in shard]
    broken[1][0][2, 0] = float("nan")

    def fails():
        yield shard[0]
        message = "the disk is full"
        raise OSError(message)

    good = {"models": networks(2), "train_loader": shard}
    wrong = {
        "nan": {"train_loader": broken},
        "network": {"models": changed},
        "count": {"models": networks(3)},
        "classes": {"models": [make_problem(classes=5).network] * 2},
        "structure": {"structure": "diag"},
        "precision": {"prior_precision": 2.0},
        "head": {"head": "0"},
        "labels": {"train_loader": [x for x, _ in shard]},
        "validation": {"val_loader": shard},
        "not a loader": {"train_loader": shard[0]},
        "foreign": {"train_loader": fails()},
    }
    alike = {"average": {"structure": Kron(running_average=0.9)}, "no data": {"train_loader": []}}
    told = {}

    def attempt(name, call):
        try:
            call()
        except Exception as error:
            told[name] = [type(error).__name__, str(error)]
        else:
            told[name] = ["nothing", ""]

    for name, options in (wrong | alike).items():
        given = good | (options if last or name in alike else {})
        attempt(name, lambda given=given: mola.fit(**given, progress=False, team=team))
    posterior = mola.fit(**good, progress=False, team=team)
    rule = mola.Evidence() if last else mola.ConfidenceThreshold()
    attempt("rule", lambda: posterior.tune(None if last else shard, rule, progress=False, team=team))
    if last:
        with torch.no_grad():
            posterior.networks[0][0].weight[0, 0] += 1.0
    attempt("changed", lambda: posterior.tune(rule=mola.Evidence(), progress=False, team=team))
    if last:
        with torch.no_grad():
            posterior.networks[0][0].weight[0, 0] -= 1.0
    posterior = mola.fit(**good, progress=False, team=team)
    attempt("no validation", lambda: posterior.tune([], progress=False, team=team))
    attempt("no inputs", lambda: posterior.predict([], team=team))
    attempt("odd inputs", lambda: posterior.predict([torch.ones(2, 8)] if last else [x for x, _ in shard], team=team))
    told["after all"] = [float(posterior(inputs()).sum())]
    return told


def documents(team):
    """Documents of any length reach rank 0, and rank 0's reach all; processes of a group of one's own can be a team too."""
    right = []
    with team.work("talking"):
        for length in (0, 1, 1_000_000):
            own = {"rank": team.rank, "text": "\N{SNOWMAN}" * length}
            everyone = [{**own, "rank": rank} for rank in range(team.size)]
            right.append(team.collect(own) == (everyone if team.first else None))
            right.append(team.share(own) == everyone[0])
    members = [0, team.size - 1]
    group = torch.distributed.new_group(members)
    for factor in map(float, range(1, 9)):  # one after the other
        if team.rank in members:
            part = mola.Team(group)
            with part.work("adding"):
                (total,) = part.sum([torch.tensor([factor * team.rank])])
                rows = part.rows(torch.full((team.rank, 2), team.rank, dtype=torch.bfloat16))
            right += [total.item() == factor * members[1], rows.tolist() == [[members[1]] * 2] * members[1]]
            part.close()
    # A team that is closed leaves no group behind.
    before = len(torch.distributed.distributed_c10d._world.pg_map)
    for _ in range(3):
        mola.Team().close()
    right.append(len(torch.distributed.distributed_c10d._world.pg_map) == before)
    return right


class Counted(nn.Sequential):
    """A network that counts its passes."""

    passes = 0

    def forward(self, inputs):
        type(self).passes += 1
        return super().forward(inputs)


def resumed(team, folder):
    """A fit that ends early on the last rank, and goes on."""
    shard, network = list(batches(team.shard(data(3, 3600)), 300)), Counted(*make_problem(seed=0).network)

    def interrupted():
        yield from shard[:-1]
        message = "the power is gone"
        raise OSError(message)

    base.GATHERED = (256, 256, 2**19)  # every batch is summed by itself
    whole = mola.fit(network, shard, progress=False, team=team)
    options = {"progress": False, "team": team, "checkpoint": folder, "checkpoint_every": 1}
    try:
        mola.fit(network, interrupted() if team.rank == team.size - 1 else shard, **options)
    except (OSError, mola.DistributedError):
        kept = (Path(folder) / f"rank-{team.rank}-of-{team.size}").is_dir()
    Counted.passes = 0
    again = mola.fit(network, shard, **options)
    same = all(
        torch.equal(one, again.components[0].curvature.factors.tensors()[name])
        for name, one in whole.components[0].curvature.factors.tensors().items()
    )
    return {"kept": kept, "passes": Counted.passes, "batches": len(shard), "same": same}


def deadly():
    """Data whose reading ends this process."""
    yield torch.ones(3, 3), torch.zeros(3, dtype=torch.int64)
    os.kill(os.getpid(), signal.SIGKILL)


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


def main(what, output):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore", mola.MolaWarning)
    with mola.join() as team:
        place = Path(output) / f"{what}-{team.rank}-of-{team.size}"
        if what == "everything":
            save_file(laws(team), f"{place}.safetensors")
            Path(f"{place}.json").write_text(
                json.dumps(
                    {
                        "documents": documents(team),
                        "refusals": refusals(team),
                        "resumed": resumed(team, Path(output) / f"kept-{team.size}"),
                    }
                )
            )
            return
        victim = int(what[-1])
        shard = list(batches(team.shard(data(3))))
        if what.startswith("left") and team.rank == victim:
            message = "a mistake in the script"
            raise ValueError(message)
        mola.fit(networks(1), deadly() if team.rank == victim else shard, progress=False, team=team).eval()


if __name__ == "__main__":
    if sys.argv[1] == "commands":
        commands(sys.argv[2])
    else:
        main(*sys.argv[1:])

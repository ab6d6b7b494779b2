"""Random calls against an independent closed form.

`make fuzz`, or

    python benchmarks/fuzz.py [--calls 10000] [--seed 0] [--quick] [--case 1234]

Each call draws networks, data and options at random: structure, link, precision of the numbers, feature scales from 1e-30 to
1e25, batch sizes from 1, forms of loaders, rules, weights. What comes back is compared with `tests/reference/closed_form.py`,
numpy in float64 that knows nothing of the library. One call in five is hostile: wrong shapes, NaN, strings, numbers out of range.

A call fails if it is
  wrong     a result that the closed form does not have, within what rounding explains: the closed form is computed again with all
            numbers moved by a few roundings, and the result may be off by some times as much;
  foreign   an error that is no MolaError, or a warning that is no MolaWarning;
  refused   a good call that was refused (at feature scales that float32 cannot square, a refusal is an answer);
  accepted  a hostile call that was not refused;
  changed   a call that changed a network, the data or the posterior.

Fails if one does, and says how to repeat it: `--case` runs one call, with its traceback. Writes benchmarks/results/fuzz.json.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
import traceback
import warnings
from typing import Any

import numpy as np
import record
import torch
from fuzz_calls import GOOD, WrongError
from fuzz_hostile import ATTACKS
from fuzz_scenes import Scene, draw
from tqdm.auto import tqdm

import mola

CALLS, QUICK = 10_000, 150
HOSTILE = 0.2
"""Share of the calls."""
FAILURES = ("wrong", "foreign", "refused", "accepted", "changed")
KEPT = 50
"""Failures that are written down with their words."""


class AcceptedError(Exception):
    """A hostile call was not refused."""


class ChangedError(Exception):
    """A call changed what it was given."""


class Untouched:
    """Networks and data, which no call may change."""

    def __init__(self, scene: Scene) -> None:
        self.networks, self.modes = scene.networks, [network.training for network in scene.networks]
        self.tensors = [
            *(p for network in scene.networks for p in network.parameters()),
            scene.inputs,
            scene.test,
            scene.labels,
        ]
        self.before = [tensor.detach().clone() for tensor in self.tensors]
        self.random = torch.get_rng_state()

    def check(self) -> None:
        for tensor, before in zip(self.tensors, self.before, strict=True):
            if not torch.equal(tensor.detach().nan_to_num(), before.nan_to_num()):
                message = "a network or the data"
                raise ChangedError(message)
        if [network.training for network in self.networks] != self.modes:
            message = "a network's mode"
            raise ChangedError(message)
        if not torch.equal(torch.get_rng_state(), self.random):
            message = "torch's random state"
            raise ChangedError(message)


def hostile(scene: Scene, name: str) -> None:
    """A call that must be refused, and must leave the posterior as it is."""
    scene.link = "probit" if scene.link == "mc" else scene.link
    posterior = scene.fit(weights="uniform")
    before = posterior(scene.test)
    try:
        with torch.random.fork_rng():  # attacks make networks
            found = ATTACKS[name](scene, posterior)
    except mola.MolaError as error:
        if not torch.equal(posterior(scene.test).nan_to_num(), before.nan_to_num()):
            message = "the posterior"
            raise ChangedError(message) from error
        return
    message = f"gave a {type(found).__name__}"
    raise AcceptedError(message)


def run(seed: int) -> tuple[str, str, str]:
    """One call: its kind, how it went, and what there is to say."""
    rng = np.random.default_rng([seed, 1])
    attack = rng.random() < HOSTILE
    scene = draw(seed, small=attack)
    untouched = Untouched(scene)
    names = list(GOOD)
    shares = np.array(list(GOOD.values()))
    call = names[int(rng.choice(len(names), p=shares / shares.sum()))]
    name = str(rng.choice(list(ATTACKS))) if attack else call.__name__.removeprefix("call_")
    if name == "double":  # which moves the networks, as it should
        untouched.before, untouched.tensors = [], []
    kind = f"hostile {name}" if attack else name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", mola.MolaWarning)
            torch.manual_seed(seed)
            untouched.random = torch.get_rng_state()
            if attack:
                hostile(scene, name)
                outcome = "refused rightly"
            else:
                outcome = "right" if call(scene) else "unsettled"
        untouched.check()
    except mola.MolaError as error:
        return (
            kind,
            "declined" if scene.extreme else "refused",
            f"{type(error).__name__}: {error}\n{traceback.format_exc()}",
        )
    except WrongError as error:
        return kind, "wrong", f"{error}; {'; '.join(scene.told)}\n{traceback.format_exc()}"
    except AcceptedError as error:
        return kind, "accepted", f"{error}; {'; '.join(scene.told)}"
    except ChangedError as error:
        return kind, "changed", f"{error}; {'; '.join(scene.told)}"
    except Exception as error:
        return kind, "foreign", f"{type(error).__name__}: {error}; {'; '.join(scene.told)}\n{traceback.format_exc()}"
    return kind, outcome, ""


def campaign(calls: int, seed: int) -> dict[str, Any]:
    """So many calls, and what came of them."""
    outcomes: collections.Counter[str] = collections.Counter()
    by_kind: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    failures: list[dict[str, Any]] = []
    began = time.monotonic()
    for case in tqdm(range(seed, seed + calls), desc="fuzz", disable=None):
        kind, outcome, words = run(case)
        outcomes[outcome] += 1
        by_kind["hostile" if kind.startswith("hostile") else kind][outcome] += 1
        if outcome in FAILURES:
            failures.append({"case": case, "kind": kind, "outcome": outcome, "words": words.split("\n")[0]})
    return {
        "calls": calls,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "outcomes": {name: outcomes[name] for name in (*FAILURES, "right", "unsettled", "declined", "refused rightly")},
        "kinds": [{"kind": kind, **counts} for kind, counts in sorted(by_kind.items())],
        "failures": failures[:KEPT],
        "failed": len(failures),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=CALLS, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first call; the others count on")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} calls; writes no file")
    parser.add_argument("--case", type=int, help="run one call, and show its traceback")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.case is not None:
        kind, outcome, words = run(options.case)
        print(f"case {options.case}: {kind}: {outcome}\n{words}")
        return int(outcome in FAILURES)
    found = campaign(QUICK if options.quick else options.calls, options.seed)
    for row in found["kinds"]:
        print(f"{row['kind']:>16}  " + ", ".join(f"{count} {name}" for name, count in row.items() if name != "kind"))
    for one in found["failures"]:
        print(
            f"FAILED {one['kind']}: {one['outcome']}: {one['words']}\n  python benchmarks/fuzz.py --case {one['case']}"
        )
    print(
        f"{found['calls']} calls in {found['seconds']:.0f} s: "
        + ", ".join(f"{n} {name}" for name, n in found["outcomes"].items())
    )
    if not options.quick:
        record.write("fuzz", {"environment": record.environment()} | found)
    return int(found["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())

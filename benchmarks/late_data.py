"""Measure what a last layer learns from data that arrive late, if only the posterior over the old data is kept.

    python benchmarks/late_data.py [--activations FOLDER] [--data FOLDER] [--runs 3]

A head is trained on the features of old data. Then a class, corruptions or a domain arrive. The head stays as it is, takes one Newton
step with the posterior over the old data as its prior, moves to the mode that such steps with a line search approach, or is trained
again: on the late data alone, or on all data. Old data are read only for the last of these. FOLDER holds activations of ResNet-20s,
which `python -m molaplace_lab bench cifar10` stores; without it, the CIFAR-10 rows of the record stay. CLINC150 is read from `--data`.
The results are stored in benchmarks/results/late_data.json.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import record
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import cross_entropy

import molaplace as mola
from molaplace.structures.eigen import EigenCurvature
from molaplace.structures.full import FullCurvature

NAME = "late_data"
PRIOR_PRECISION = 1.0

DOMAINS = {
    "banking": "account_blocked balance bill_balance bill_due freeze_account interest_rate min_payment order_checks pay_bill pin_change "
    "report_fraud routing spending_history transactions transfer",
    "travel": "book_flight book_hotel car_rental carry_on exchange_rate flight_status international_visa lost_luggage plug_type timezone "
    "translate travel_alert travel_notification travel_suggestion vaccines",
    "kitchen and dining": "accept_reservations calories cancel_reservation confirm_reservation cook_time food_last how_busy "
    "ingredient_substitution ingredients_list meal_suggestion nutrition_info recipe restaurant_reservation restaurant_reviews "
    "restaurant_suggestion",
}
"""Three of the ten domains of CLINC150 (Larson et al., 2019) and their 15 intents; the data file does not name domains."""


@dataclass(frozen=True)
class Rows:
    """Features (n, P), ending with the constant 1, and labels (n,)."""

    phi: Tensor
    labels: Tensor

    def __getitem__(self, chosen: Tensor | slice) -> "Rows":
        return Rows(self.phi[chosen], self.labels[chosen])

    def __add__(self, other: "Rows") -> "Rows":
        return Rows(torch.cat([self.phi, other.phi]), torch.cat([self.labels, other.labels]))


@dataclass(frozen=True)
class Case:
    """Old and late data of one run."""

    name: str
    classes: int
    structure: str
    old: Rows
    late: Rows
    old_test: Rows
    late_test: Rows


def with_constant(features: Tensor) -> Tensor:
    return torch.cat([features.double(), torch.ones(len(features), 1, dtype=torch.float64)], 1)


# --- heads ------------------------------------------------------------------------------------------------------------


def minimised(start: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the minimiser of a convex loss by L-BFGS."""
    weights = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([weights], max_iter=200, tolerance_grad=1e-4, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss(weights)
        value.backward()
        return value

    optimiser.step(closure)
    return weights.detach()


def log_loss(weights: Tensor, rows: Rows) -> Tensor:
    return cross_entropy(rows.phi @ weights.T, rows.labels, reduction="sum")


def trained(rows: Rows, start: Tensor, centre: Tensor) -> Tensor:
    """Return the mode of the posterior with a normal prior around `centre`."""
    return minimised(
        start, lambda weights: log_loss(weights, rows) + PRIOR_PRECISION / 2 * (weights - centre).square().sum()
    )


def precision_times(posterior: mola.MoLA) -> Callable[[Tensor], Tensor]:
    """Return the product of the posterior precision over the old data with weights (C, P)."""
    curvature = posterior.components[0].layer.curvature
    if isinstance(curvature, FullCurvature):

        def by_hessian(weights: Tensor) -> Tensor:
            coordinates = torch.einsum("cp,cpm->m", weights, curvature.vectors)
            return torch.einsum("cpm,m->cp", curvature.vectors, curvature.values * coordinates)

        hessian = by_hessian
    else:
        assert isinstance(curvature, EigenCurvature)
        left, right, spectrum = curvature.left, curvature.feature_factor.vectors, curvature.spectrum

        def by_factors(weights: Tensor) -> Tensor:
            return left @ (spectrum * (left.T @ weights @ right)) @ right.T

        hessian = by_factors
    return lambda weights: hessian(weights) + PRIOR_PRECISION * weights


def newton_step(weights: Tensor, rows: Rows, centre: Tensor, precision: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the weights after a Newton step on the late data, with the posterior over the old data as the prior."""
    probs = torch.softmax(rows.phi @ weights.T, 1)
    indicators = torch.nn.functional.one_hot(rows.labels, probs.shape[1])
    gradient = (probs - indicators).T @ rows.phi + precision(weights - centre)

    def hessian(direction: Tensor) -> Tensor:
        change = rows.phi @ direction.T
        change = probs * (change - (probs * change).sum(1, keepdim=True))
        return change.T @ rows.phi + precision(direction)

    return weights - conjugate_gradients(hessian, gradient)


def conjugate_gradients(product: Callable[[Tensor], Tensor], target: Tensor) -> Tensor:
    solution = torch.zeros_like(target)
    residual = target.clone()
    direction = residual
    size = residual.square().sum()
    for _ in range(300):
        if float(size) <= 1e-10 * float(target.square().sum()):
            break
        image = product(direction)
        rate = size / (direction * image).sum()
        solution = solution + rate * direction
        residual = residual - rate * image
        previous = size
        size = residual.square().sum()
        direction = residual + size / previous * direction
    return solution


# --- runs -------------------------------------------------------------------------------------------------------------


def measured(weights: Tensor, case: Case) -> dict[str, float]:
    columns = {}
    for name, rows in (("old", case.old_test), ("late", case.late_test), ("all", case.old_test + case.late_test)):
        logits = rows.phi @ weights.T
        columns[f"{name}_accuracy"] = float((logits.argmax(1) == rows.labels).double().mean())
        columns[f"{name}_nll"] = float(cross_entropy(logits, rows.labels))
    return columns


def heads(case: Case) -> Iterator[tuple[str, Tensor, float]]:
    """Yield the name, the weights and the seconds of each way to learn from the late data."""
    zeros = torch.zeros(case.classes, case.old.phi.shape[1], dtype=torch.float64)
    head = trained(case.old, zeros, zeros)
    yield "head of the old data", head, 0.0
    start = time.process_time()
    posterior = mola.fit_features(
        case.old.phi[:, :-1],
        case.old.phi @ head.T,
        case.old.labels,
        (head[:, :-1], head[:, -1]),
        structure=case.structure,
        distances=False,
    )
    precision = precision_times(posterior)
    weights = newton_step(head, case.late, head, precision)
    yield "one Newton step", weights, time.process_time() - start
    weights = minimised(
        head,
        lambda current: log_loss(current, case.late) + ((current - head) * precision(current - head)).sum() / 2,
    )
    yield "mode of the old posterior and the late data", weights, time.process_time() - start
    start = time.process_time()
    yield "trained on the late data alone", trained(case.late, head, head), time.process_time() - start
    start = time.process_time()
    yield "trained on all data", trained(case.old + case.late, head, zeros), time.process_time() - start


def late_classes(name: str, structure: str, parts: tuple[Rows, Rows], chosen: Tensor, count: int) -> Case:
    train, test = parts
    old = ~torch.isin(train.labels, chosen)
    tested = torch.isin(test.labels, chosen)
    late = train[~old]
    order = torch.randperm(len(late.labels), generator=torch.Generator().manual_seed(0))[:count]
    return Case(name, int(test.labels.max()) + 1, structure, train[old], late[order], test[~tested], test[tested])


def cifar10_cases(activations: Path, runs: int) -> Iterator[Case]:
    for folder in sorted(activations.iterdir()):
        sets = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                name = file.metadata()["set"]
                if name in ("train", "test", "severity 5") and file.get_slice("features").get_shape()[1] == 64:
                    sets[name] = Rows(with_constant(file.get_tensor("features")), file.get_tensor("labels"))
        if len(sets) < 3 or runs == 0:
            continue
        runs -= 1
        train = sets["train"][torch.arange(0, 50_000, 2)]
        label = torch.tensor([3 * runs])
        for count in (100, 2_500):
            yield late_classes(f"CIFAR-10, a class, {count}", "full", (train, sets["test"]), label, count)
        shifted = sets["severity 5"]
        arriving, remaining = shifted[torch.arange(0, 8_000, 2)], shifted[torch.arange(1, 8_000, 2)]
        for count in (100, 4_000):
            yield Case(f"CIFAR-10, corruptions, {count}", 10, "full", train, arriving[:count], sets["test"], remaining)


def clinc_cases(data: Path | None, runs: int) -> Iterator[Case]:
    from molaplace_lab.data.clinc150 import embed, load_clinc150

    requests = load_clinc150(data)
    train, test = (
        Rows(with_constant(embed(requests[part].sentences)), torch.tensor(requests[part].labels))
        for part in ("train", "test")
    )
    for intents in list(DOMAINS.values())[:runs]:
        labels = torch.tensor([requests["train"].intents.index(intent) for intent in intents.split()])
        for count in (150, 1_500):
            yield late_classes(f"CLINC150, a domain, {count}", "kron-exact", (train, test), labels, count)


def summary(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return means over runs, with standard errors of the accuracies."""
    means = []
    for case, head in dict.fromkeys((row["case"], row["head"]) for row in rows):
        chosen = [row for row in rows if (row["case"], row["head"]) == (case, head)]
        values = {name: [float(row[name]) for row in chosen] for name in chosen[0] if name not in ("case", "head")}
        mean = {name: round(statistics.fmean(numbers), 4) for name, numbers in values.items()}
        error = statistics.stdev(values["all_accuracy"]) / len(chosen) ** 0.5 if len(chosen) > 1 else 0.0
        means.append({"case": case, "head": head, "runs": len(chosen), **mean, "all_accuracy_error": round(error, 4)})
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--activations", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    if options.activations is None:
        rows += [row for row in record.read(NAME)["runs"] if row["case"].startswith("CIFAR-10")]
    images = () if options.activations is None else cifar10_cases(options.activations, options.runs)
    for cases in (images, clinc_cases(options.data, options.runs)):
        for case in cases:
            for head, weights, seconds in heads(case):
                rows.append({"case": case.name, "head": head, **measured(weights, case), "seconds": seconds})
                print(rows[-1], flush=True)
            record.write(NAME, {"environment": record.environment(), "summary": summary(rows), "runs": rows})


if __name__ == "__main__":
    main()

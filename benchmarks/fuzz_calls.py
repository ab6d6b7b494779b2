"""Good calls, and whether they say what the closed form says. Used by `fuzz.py`."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from fuzz_scenes import DRAWS, LINKS, Scene, as_given, dense
from torch import Tensor

import mola

UNSETTLED = 0.02
"""Where rounding explains a difference of more than this, the closed form has no say."""
PAIRS, SLACK = 2, 30
"""How often the closed form is computed with other roundings, up and down, and how many times as far as these a result may be off."""


class WrongError(Exception):
    """A result differs from the closed form."""


def wrong(message: str) -> NoReturn:
    raise WrongError(message)


def compare(
    scene: Scene,
    what: str,
    found: Any,
    expected: Callable[[dense.Mixture], np.ndarray],
    reference: dense.Mixture,
    *,
    rounding: dense.Rounding | None = None,
    relative: bool = False,
) -> bool:
    """Whether the closed form had a say; raises `WrongError` where it says something else.

    Args:
        scene: where the numbers are from.
        what: is compared.
        found: (..., n, C), (n,) or (K,).
        expected: the same from the closed form.
        reference: the closed form.
        rounding: that may have happened; None is the network's and its posterior's.
        relative: judge differences beside the size of the numbers.
    """
    given = found
    found = np.asarray(found.detach().double() if isinstance(found, Tensor) else found, dtype=np.float64)
    try:
        with np.errstate(all="ignore"):
            exact = expected(reference)
            moved = [
                expected(reference.shaken(noise, rounding or scene.rounding))
                for noise in dense.noises(scene.rng, PAIRS)
            ]
    except (dense.NoAnswerError, np.linalg.LinAlgError):
        return False
    if found.shape != exact.shape:
        wrong(f"{what}: shape {found.shape}, expected {exact.shape}")
    if not np.isfinite(exact).all():
        return False  # beyond float64 itself
    largest = (
        torch.finfo(dtype).max if (dtype := getattr(given, "dtype", None)) in (torch.float32, torch.float64) else np.inf
    )
    beyond = np.isposinf(found) & (exact > 0.9 * largest)  # infinity is what is left of such a number in float32
    found = np.where(beyond, exact, found)
    if not np.isfinite(found).all():
        wrong(f"{what}: not finite where the closed form is {exact.ravel()[~np.isfinite(found).ravel()][:3]}")
    # Below the smallest normal number of the posterior's precision, digits go.
    least = 1e-295 if scene.rounding.arithmetic < 1e-10 else 1e-30
    size = np.maximum(np.abs(exact), least) if relative else np.maximum(np.abs(exact), 1.0)
    explained = np.max([np.abs(one - exact) for one in moved], axis=0)
    if exact.ndim > 1:  # of a row: roundings of one class move the others
        explained = np.broadcast_to(explained.max(-1, keepdims=True), exact.shape)
        size = np.broadcast_to(size.max(-1, keepdims=True), exact.shape) if relative else size
    tolerance = SLACK * explained + 64 * (rounding or scene.rounding).arithmetic * size
    settled = np.isfinite(tolerance) & (tolerance <= UNSETTLED * size)
    off = np.abs(found - exact)
    if (settled & (off > tolerance)).any():
        place = np.unravel_index(np.argmax(np.where(settled, off / tolerance, 0)), off.shape)
        wrong(
            f"{what}{list(map(int, place))}: {found[place]!r}, the closed form says {exact[place]!r} +- {tolerance[place]:.1g}"
        )
    return bool(settled.any())


def spread_is_settled(scene: Scene, reference: dense.Mixture, seen: tuple[list[np.ndarray], list[np.ndarray]]) -> bool:
    """Whether rounding leaves the covariances of the logits as they are, or nearly.

    Where features of 1e22 stand beside the constant 1, it does not: what is left of the small eigenvalues is noise, and a link that
    is asked about it answers much the same, whatever it is.
    """
    for component, *pair in zip(reference.components, *seen, strict=True):
        exact = component.moments(*pair)
        size = np.abs(exact.contrast).max(axis=(1, 2), keepdims=True)
        shaken = [component.shaken(noise, scene.rounding).moments(*pair) for noise in dense.noises(scene.rng, PAIRS)]
        most = UNSETTLED if reference.link == "mc" else 0.5
        if not all((np.abs(one.contrast - exact.contrast) <= most * size).all() for one in shaken):
            return False
    return True


def check_probabilities(scene: Scene, probs: Tensor, reference: dense.Mixture) -> bool:
    numbers = probs.double().numpy()
    if not np.isfinite(numbers).all() or (numbers < 0).any() or np.abs(numbers.sum(1) - 1).max() > 1e-5:
        wrong(f"probabilities that are none: {numbers[~(np.abs(numbers.sum(1) - 1) <= 1e-5)][:1]}")
    seen = scene.test_seen()
    try:
        with np.errstate(all="ignore"):
            if reference.link == "mc" and not spread_is_settled(scene, reference, seen):
                return False
    except (dense.NoAnswerError, np.linalg.LinAlgError):
        return False
    if reference.link != "mc":
        try:
            return compare(scene, "probs", probs, lambda one: one.probabilities(*seen), reference)
        except WrongError:
            if scene.wild and not spread_is_settled(scene, reference, seen):
                return False
            raise
    total, spread = np.zeros_like(numbers), np.zeros_like(numbers)
    for weight, component, *pair in zip(reference.mixing, reference.components, *seen, strict=True):
        try:
            moments = component.moments(*pair)
            if not np.isfinite(moments.contrast).all():
                return False
            mean, deviation = dense.monte_carlo(moments, scene.rng, DRAWS)
        except (dense.NoAnswerError, np.linalg.LinAlgError):
            return False
        total, spread = total + weight * mean, spread + weight * deviation
    off = np.abs(numbers - total)
    allowed = 8 * spread / DRAWS**0.5 + 20 / DRAWS + 64 * scene.rounding.logits
    if (off > allowed).any():
        place = np.unravel_index(np.argmax(off / allowed), off.shape)
        wrong(
            f"mc probs{list(map(int, place))}: {numbers[place]:.5f}, other draws say {total[place]:.5f} +- {allowed[place]:.5f}"
        )
    return True


def check_same(what: str, first: Tensor, second: Tensor, scene: Scene, factor: float = 1e3) -> None:
    """The same up to what other batch sizes do to a network's sums."""
    eps = torch.finfo(scene.dtype).eps
    scale = first.double().abs().max().clamp_min(1e-300) if first.numel() else torch.tensor(1.0)
    off = (first.double() - second.double()).abs().max() if first.numel() else torch.tensor(0.0)
    if first.shape != second.shape or not bool(off <= factor * eps * scale):
        wrong(
            f"{what}: {tuple(first.shape)} and {tuple(second.shape)}, {float(off):.3g} apart beside {float(scale):.3g}"
        )


# --- good calls: each says whether the closed form had a say ------------------------------------------------------------


def call_directly(scene: Scene) -> bool:
    posterior = scene.fit()
    inputs = scene.pick([scene.test, {"input": scene.test}, (scene.test,)])
    return check_probabilities(scene, posterior(inputs), scene.reference())


def call_predict(scene: Scene) -> bool:
    posterior, reference, seen = scene.fit(), scene.reference(), scene.test_seen()
    prediction = posterior.predict(scene.test)
    settled = check_probabilities(scene, prediction.probs, reference)
    for k, network in enumerate(scene.networks):
        with torch.no_grad():
            check_same("logit_mean", prediction.logit_mean[k], network(scene.test), scene)
    compare(
        scene, "logit_variance", prediction.logit_variance, lambda one: one.variance(*seen), reference, relative=True
    )
    compare(scene, "ood_score", prediction.ood_score, lambda one: one.outlier_score(*seen), reference, relative=True)
    probs = prediction.probs.double().numpy()
    if np.abs(prediction.entropy.double().numpy() - dense.entropy(probs)).max() > 1e-5:
        wrong("entropy")
    if not torch.equal(prediction.label, prediction.probs.argmax(1)):
        wrong("label")
    if not torch.equal(prediction.confidence, prediction.probs.amax(1)):
        wrong("confidence")
    information = prediction.mutual_information
    if not bool(((information >= 0) & (information <= prediction.entropy + 1e-6)).all()):
        wrong(f"mutual_information {information.tolist()} beside entropies {prediction.entropy.tolist()}")
    return settled


def call_batches(scene: Scene) -> bool:
    """`predict` over a loader, `predict_batches` and `predict_proba` say what a plain call says."""
    posterior = scene.fit()
    whole = posterior(scene.test)
    loader = scene.loader(scene.test, scene.pick([None, scene.test_labels]))
    prediction = posterior.predict(loader)
    # Links divide by what may be very small: differences in a network's sums grow by no more than this on plain data.
    factor = 1e7 if scene.dtype == torch.float64 else 64 if scene.exact_features else 1e4
    if not scene.extreme:
        check_same("predict over a loader", prediction.probs, whole, scene, factor)
    if scene.dtype not in (torch.float16, torch.bfloat16):
        array = posterior.predict_proba(scene.test.numpy())
        check_same("predict_proba", torch.from_numpy(array), whole, scene, factor)
    return check_probabilities(scene, prediction.probs, scene.reference())


def call_evidence(scene: Scene) -> bool:
    scene.labelled = True
    posterior = scene.fit()
    rounding = dense.Rounding(scene.rounding.features, scene.rounding.logits, dense.EPS)
    return compare(
        scene,
        "log_evidence",
        posterior.log_evidence(),
        lambda one: one.log_evidence(),
        scene.reference(),
        rounding=rounding,
        relative=True,
    )


def call_with(scene: Scene) -> bool:
    """The same mixture at another prior precision, with other weights, with another link."""
    posterior = scene.fit()
    link = scene.pick(LINKS)
    precision = [float(one) for one in 10.0 ** scene.rng.uniform(-8, 8, size=len(scene.networks))]
    if scene.chance(0.5):
        precision = [precision[0]] * len(precision)
    weights = scene.rng.dirichlet(np.ones(len(scene.networks)))
    steps = [
        lambda one: one.with_link(mola.MonteCarlo(samples=DRAWS) if link == "mc" else link),
        lambda one: one.with_prior_precision(as_given(scene, precision)),
        lambda one: one.with_weights(weights),
    ]
    for step in scene.rng.permutation(3):
        posterior = steps[step](posterior)
    return check_probabilities(
        scene, posterior(scene.test), scene.reference(precision=precision, weights=weights, link=link)
    )


def held_out(scene: Scene) -> tuple[Tensor, Tensor]:
    return torch.cat([scene.test, scene.inputs]), torch.cat([scene.test_labels, scene.labels])


def call_tune(scene: Scene) -> bool:
    """Every candidate scores what the closed form says, and the choice is the best of them."""
    if scene.link == "mc":
        scene.link = "probit"
    name = scene.pick(["threshold", "confidence", "brier threshold", "nll", "brier", "ece", "outliers"])
    posterior = scene.fit()
    inputs, labels = held_out(scene)
    grid = (
        None
        if scene.link.startswith("probit") and scene.chance(0.2)
        else [float(g) for g in np.logspace(-4, 4, int(scene.rng.integers(1, 9)))]
    )
    goal = float(scene.rng.uniform(0.05, 1))
    outliers = inputs * 3
    rule: Any = {
        "threshold": lambda: mola.ConfidenceThreshold(grid=grid),
        "confidence": lambda: mola.ConfidenceThreshold(goal, grid=grid),
        "brier threshold": lambda: mola.ConfidenceThreshold(goal, brier=1.2, grid=grid),
        "outliers": lambda: mola.OutlierExposure(scene.loader(outliers, None), grid=grid),
    }.get(name, lambda: mola.ValidationScore(name, grid=grid))()
    if grid is None and name in ("threshold", "nll", "brier", "ece") and scene.chance(0.5):
        rule = name
    tuned = posterior.tune(scene.loader(inputs, labels), rule, progress=False)
    scene.told.append(f"rule {rule!r}")
    curve, chosen = tuned.tuning.curve, tuned.prior_precision[0]
    if tuned.prior_precision != (chosen,) * len(scene.networks) or chosen not in curve["prior_precision"]:
        wrong(f"chose {tuned.prior_precision}, not of the grid")
    reference = scene.reference()
    pairs = [scene.seen(network, inputs) for network in scene.networks]
    seen = [features for features, _ in pairs], [logits for _, logits in pairs]
    strange = [scene.seen(network, outliers) for network in scene.networks]
    outside = [features for features, _ in strange], [logits for _, logits in strange]
    rounding = dense.Rounding(scene.rounding.features, scene.rounding.logits, dense.EPS)

    def table(one: dense.Mixture) -> dict[str, np.ndarray]:
        rows = []
        for candidate in candidates:
            at = one.at(candidate)
            row = at.scores(*seen, labels.numpy())
            if name == "outliers":
                far = at.scores(*outside, None)
                row |= {"outlier_confidence": far["confidence"], "objective": row["nll"] + 0.25 * far["uniform"]}
            rows.append(row)
        return {key: np.array([row[key] for row in rows]) for key in rows[0]}

    # A grid may have grown to hundreds of candidates: the chosen one, its neighbours, the ends and some others.
    every = list(curve["prior_precision"])
    at = every.index(chosen)
    some = sorted(
        {
            0,
            len(every) - 1,
            at,
            max(at - 1, 0),
            min(at + 1, len(every) - 1),
            *map(int, scene.rng.integers(len(every), size=4)),
        }
    )
    candidates = [every[index] for index in some]
    try:
        with np.errstate(all="ignore"):
            exact = table(reference)
            moved = [table(reference.shaken(noise, rounding)) for noise in dense.noises(scene.rng, PAIRS)]
    except (dense.NoAnswerError, np.linalg.LinAlgError):
        return False
    settled = False
    allowed = {}
    for key, values in exact.items():
        explained = np.max([np.abs(one[key] - values) for one in moved], axis=0)
        size = np.maximum(np.abs(values), 1)
        allowed[key] = SLACK * explained + 1e-9 * size
        if key == "ece":
            continue  # jumps where a confidence crosses the edge of a bin; the choice is judged below
        found = np.array(curve[key])[some]
        fine = np.isfinite(values) & (allowed[key] <= UNSETTLED * size)
        off = np.abs(found - values)
        if (fine & ~(off <= allowed[key])).any():
            worst = int(np.argmax(np.where(fine, off / allowed[key], 0)))
            if scene.wild and not spread_is_settled(scene, reference.at(candidates[worst]), seen):
                return False
            said = f"the closed form says {values[worst]!r} +- {allowed[key][worst]:.1g}"
            wrong(f"{key} at {candidates[worst]:.3g}: {found[worst]!r}, {said}")
        settled |= bool(fine.any())
    _check_choice(name, rule, tuned, exact, allowed, some.index(at), list(seen[1]), labels.numpy(), goal)
    moved_to = tuned.with_link(scene.link)
    if moved_to.prior_precision != tuned.prior_precision:
        wrong("another link changes the prior precision")
    return settled


def _check_choice(
    name: str,
    rule: Any,
    tuned: mola.MoLA,
    exact: dict[str, np.ndarray],
    allowed: dict[str, np.ndarray],
    at: int,
    logits: list[np.ndarray],
    labels: np.ndarray,
    goal: float,
) -> None:
    """That the chosen candidate is the one that the rule names, on the curve that is written down and in the closed form."""
    curve = {key: np.array(values) for key, values in tuned.tuning.curve.items()}
    chosen = list(curve["prior_precision"]).index(tuned.prior_precision[0])
    score = {"nll": "nll", "brier": "brier", "ece": "ece", "outliers": "objective"}.get(name)
    if score is not None:
        if curve[score][chosen] != curve[score].min():
            wrong(f"{score} {curve[score][chosen]!r} was chosen, the smallest is {curve[score].min()!r}")
        if score != "ece" and (exact[score] + allowed[score] < exact[score][at] - allowed[score][at]).any():
            wrong(f"{score}: another candidate is better")
        return
    threshold = goal
    if name == "threshold":
        threshold = max(np.mean([(one.argmax(1) == labels).mean() for one in logits]) - 0.01, 1 / logits[0].shape[1])
    margin = 1e-9
    meets = curve["confidence"] >= threshold - margin
    surely = curve["confidence"] >= threshold + margin
    if name == "brier threshold":
        meets, surely = meets & (curve["brier"] <= 1.2 + margin), surely & (curve["brier"] <= 1.2 - margin)
    if surely[:chosen].any():
        wrong(f"a smaller prior precision than the chosen meets the threshold {threshold:.4f}")
    if not meets[chosen] and (surely.any() or chosen != len(meets) - 1):
        wrong(f"the chosen prior precision does not meet the threshold {threshold:.4f}")


def call_tune_evidence(scene: Scene) -> bool:
    scene.labelled = True
    posterior = scene.fit()
    shared = scene.chance(0.5)
    tuned = posterior.tune(rule=mola.Evidence(shared=shared), progress=False)
    reference, factors = scene.reference(), (0.8, 1.25)
    try:
        with np.errstate(all="ignore"):
            best = np.array(
                [one.at(p).log_evidence() for one, p in zip(reference.components, tuned.prior_precision, strict=True)]
            )
            for factor in factors:
                beside = [
                    one.at(p * factor).log_evidence()
                    for one, p in zip(reference.components, tuned.prior_precision, strict=True)
                ]
                gain = np.array(beside) - best
                gain = gain.sum() if shared else gain
                if not np.isfinite(gain).all():
                    return False
                rounding = 1e-9 * (1 + np.abs(best).max()) * (1 if scene.dtype == torch.float64 else 1e3)
                ends = [p <= 1.01e-16 or p >= 0.99e16 for p in tuned.prior_precision]
                if np.any(gain > rounding) and not any(ends):
                    wrong(
                        f"evidence at {tuned.prior_precision}: {factor} times as much has {np.max(gain):.3g} nats more"
                    )
    except (dense.NoAnswerError, np.linalg.LinAlgError):
        return False
    return True


def call_reweight(scene: Scene) -> bool:
    if scene.link == "mc":
        scene.link = "probit"
    posterior = scene.fit()
    inputs, labels = held_out(scene)
    stacked = posterior.reweight(scene.loader(inputs, labels), progress=False)
    weights = stacked.weights.numpy()
    if (weights < 0).any() or abs(weights.sum() - 1) > 1e-9:
        wrong(f"weights {weights}")
    pairs = [scene.seen(network, inputs) for network in scene.networks]
    seen = [features for features, _ in pairs], [logits for _, logits in pairs]

    def gap(one: dense.Mixture) -> float:
        members = one.members(*seen)
        return dense.stacking_gap(members[:, np.arange(len(labels)), labels.numpy()].T, weights)

    reference = scene.reference()
    rounding = dense.Rounding(scene.rounding.features, scene.rounding.logits, dense.EPS)
    try:
        with np.errstate(all="ignore"):
            gaps = [
                gap(reference),
                *(gap(reference.shaken(noise, rounding)) for noise in dense.noises(scene.rng, PAIRS)),
            ]
    except (dense.NoAnswerError, np.linalg.LinAlgError):
        return False
    if not np.isfinite(gaps).all():
        return False
    tolerance = 1e-6 + SLACK * (max(gaps) - min(gaps))
    if tolerance > UNSETTLED:
        return False
    if gaps[0] > tolerance:
        wrong(f"stacking: other weights may gain {gaps[0]:.3g} nats")
    return True


def call_files(scene: Scene) -> bool:
    posterior = scene.fit()
    before = posterior.predict(scene.test)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "first"
        posterior.save(place)
        if scene.chance(0.5):
            posterior.save(place)
        moved = place.rename(Path(folder) / "second")
        loaded = mola.load(moved, scene.networks if len(scene.networks) > 1 else scene.networks[0])
        after = loaded.predict(scene.test)
    for name in ("probs", "mutual_information", "ood_score", "logit_mean", "logit_variance"):
        if not torch.equal(getattr(before, name), getattr(after, name)):
            off = float((getattr(before, name) - getattr(after, name)).abs().max())
            wrong(f"loaded: {name} is off by {off:.3g}")
    return check_probabilities(scene, after.probs, scene.reference())


def call_sample(scene: Scene) -> bool:
    count = 3000
    posterior = scene.fit()
    drawn = posterior.sample(count, generator=torch.Generator().manual_seed(int(scene.rng.integers(2**31))))
    reference = scene.reference()
    shares = np.bincount(drawn.component.numpy(), minlength=len(scene.networks)) / count
    if np.abs(shares - reference.mixing).max() > 6 * 0.5 / count**0.5:
        wrong(f"components drawn {shares}, weights {reference.mixing}")
    for k, component in enumerate(reference.components):
        own = [drawn.weights[index].numpy() for index in np.flatnonzero(drawn.component.numpy() == k)]
        if len(own) < 200:
            continue
        with np.errstate(all="ignore"):
            try:
                variance = np.diag(component.covariance()).reshape(component.weights.shape)
                shaken = [
                    np.diag(component.shaken(noise, scene.rounding).covariance())
                    for noise in dense.noises(scene.rng, PAIRS)
                ]
            except (dense.NoAnswerError, np.linalg.LinAlgError):
                return False
        if np.abs(np.array(shaken) / variance.ravel() - 1).max() > UNSETTLED:
            return False
        deviations = (np.stack(own) - component.weights) / np.sqrt(variance)
        if not np.isfinite(deviations).all() or (np.sqrt(variance) < 1e-12 * np.abs(component.weights)).any():
            return False  # float64 itself does not hold the sum
        if np.abs(deviations.mean(0)).max() > 7 / len(own) ** 0.5:
            wrong(
                f"weights drawn around {np.abs(deviations.mean(0)).max():.3g} standard deviations off the trained ones"
            )
        if np.abs((deviations**2).mean(0) - 1).max() > 10 * (2 / len(own)) ** 0.5:
            wrong(f"weights drawn with a variance {(deviations**2).mean(0).ravel()[:3]} times the closed form's")
    return True


def call_bound(scene: Scene) -> bool:
    scene.link = "probit"
    posterior = scene.fit()
    bound, confidence = posterior.confidence_bound(scene.test), posterior(scene.test).amax(1)
    if bool((confidence.double() > bound + 64 * scene.rounding.arithmetic).any()):
        wrong(f"confidence {float(confidence.max())} above its bound {float(bound.min())}")
    lemma = posterior.confidence_bound(scene.test, lemma=True)
    if lemma.shape != (len(scene.networks), len(scene.test)):
        wrong(f"lemma of shape {tuple(lemma.shape)}")
    label = posterior(scene.test).argmax(1).numpy()
    return compare(
        scene,
        "confidence_bound",
        bound,
        lambda one: np.einsum("k,kc->c", one.mixing, np.stack([part.bounds() for part in one.components]))[label],
        scene.reference(),
        rounding=dense.Rounding(scene.rounding.features, scene.rounding.logits, dense.EPS),
    )


def call_ensemble(scene: Scene) -> bool:
    weights = scene.weights if not isinstance(scene.weights, str) else "uniform"
    plain = mola.ensemble(scene.networks, weights)
    probs = np.stack([dense.softmax(scene.seen(network, scene.test)[1]) for network in scene.networks])
    mixing = np.full(len(probs), 1 / len(probs)) if isinstance(weights, str) else weights
    expected = np.einsum("k,knc->nc", mixing, probs)
    off = np.abs(plain(scene.test).double().numpy() - expected).max()
    if not off <= 64 * scene.rounding.arithmetic:
        wrong(f"the ensemble is off by {off:.3g}")
    prediction = plain.predict(scene.test)
    if (
        np.abs(
            prediction.mutual_information.numpy()
            - (dense.entropy(expected) - np.einsum("k,kn->n", mixing, dense.entropy(probs)))
        ).max()
        > 1e-4
    ):
        wrong("mutual information of the ensemble")
    return True


def call_double(scene: Scene) -> bool:
    """A posterior that is moved to float64 is the same one: what was summed in float32 stays, what is asked is answered exactly."""
    posterior, reference = scene.fit(), scene.reference()
    if scene.dtype != torch.float32 or scene.extreme or not scene.exact_features or scene.link == "mc":
        return check_probabilities(scene, posterior(scene.test), reference)
    found = posterior.double()(scene.test.double())
    rounding = dense.Rounding(0.0, torch.finfo(torch.float32).eps, dense.EPS)
    scene.test = scene.test.double()
    seen = scene.test_seen()
    return compare(scene, "probs", found, lambda one: one.probabilities(*seen), reference, rounding=rounding)


def call_export(scene: Scene) -> bool:
    posterior = scene.fit()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        graph = torch.export.export(posterior.eval(), (scene.test,), strict=False).module()
        found = graph(scene.test)
    return check_probabilities(scene, found, scene.reference())


GOOD: dict[Callable[[Scene], bool], float] = {
    call_directly: 22,
    call_predict: 18,
    call_batches: 8,
    call_evidence: 7,
    call_with: 7,
    call_tune: 14,
    call_tune_evidence: 2,
    call_reweight: 5,
    call_files: 6,
    call_sample: 3,
    call_bound: 4,
    call_ensemble: 2,
    call_double: 2,
    call_export: 0.2,
}

r"""Links, which map Gaussian logits to probabilities by approximating :math:`\int \mathrm{softmax}(f)\, N(f; m, S)\, df`.

The softmax ignores a shift common to all logits, but the paper's `Probit` link does not. `Probit` uses the full variance of each
logit, including the part along the hidden direction. Every other link uses only the centred covariance. `MonteCarlo` converges to
the integral and serves as the reference for the other links (docs/links.md).
"""

from molaplace.errors import OptionError
from molaplace.likelihoods import Likelihood
from molaplace.links.base import Link
from molaplace.links.bridge import Bridge
from molaplace.links.mean_field import MeanField
from molaplace.links.monte_carlo import MonteCarlo
from molaplace.links.probit import CentredProbit, Probit
from molaplace.options import resolve

__all__ = ["LINKS", "Bridge", "CentredProbit", "Link", "MeanField", "MonteCarlo", "Probit", "as_link"]

LINKS: dict[str, type[Link]] = {kind.name: kind for kind in (Probit, CentredProbit, MeanField, Bridge, MonteCarlo)}


def as_link(link: str | Link, likelihood: Likelihood | None = None) -> Link:
    """Return the link with the given name, or the given link itself. Raise `OptionError` if it does not apply to the likelihood."""
    chosen = resolve(link, Link, LINKS, "link")  # type: ignore[type-abstract]
    # Regression does not use a link, so the default is accepted.
    if likelihood is None or chosen.applies_to(likelihood) or (chosen == Probit() and not likelihood.classification):
        return chosen
    known = ", ".join(name for name, kind in LINKS.items() if kind().applies_to(likelihood))
    raise OptionError(
        f"link {chosen.name!r} does not apply to likelihood {likelihood.name!r}. The applicable links are: "
        f"{known or 'none, because the predictive distribution is exact'}. Leave out link= to use the default."
    )

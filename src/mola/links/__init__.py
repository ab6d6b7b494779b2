r"""From a Gaussian over logits to probabilities: :math:`\int \mathrm{softmax}(f)\, N(f; m, S)\, df`, approximately.

The softmax ignores a shift common to all logits. `Probit` (the paper's) does not: it divides each logit by its full variance, the part
in the hidden direction included. Every other link uses only the centred covariance. `MonteCarlo` converges to the integral and is
the reference for the others (docs/links.md).
"""

from mola.errors import OptionError
from mola.likelihoods import Likelihood
from mola.links.base import Link
from mola.links.bridge import Bridge
from mola.links.mean_field import MeanField
from mola.links.monte_carlo import MonteCarlo
from mola.links.probit import CentredProbit, Probit
from mola.options import resolve

__all__ = ["LINKS", "Bridge", "CentredProbit", "Link", "MeanField", "MonteCarlo", "Probit", "as_link"]

LINKS: dict[str, type[Link]] = {kind.name: kind for kind in (Probit, CentredProbit, MeanField, Bridge, MonteCarlo)}


def as_link(link: str | Link, likelihood: Likelihood | None = None) -> Link:
    """Return the link of that name with its defaults, or the link itself; `OptionError` if it does not apply to the likelihood."""
    chosen = resolve(link, Link, LINKS, "link")  # type: ignore[type-abstract]
    # A regression has no links: the default is not used there.
    if likelihood is None or chosen.applies_to(likelihood) or (chosen == Probit() and not likelihood.classification):
        return chosen
    known = ", ".join(name for name, kind in LINKS.items() if kind().applies_to(likelihood))
    raise OptionError(
        f"link {chosen.name!r} does not apply to likelihood {likelihood.name!r}. Its links: "
        f"{known or 'none, since its predictive distribution is exact'}. Leave link= out for the default."
    )

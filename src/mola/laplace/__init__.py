"""Features to factors, factors and a prior to a posterior, a posterior to the moments of the logits."""

from mola.laplace.base import SPARE as SPARE
from mola.laplace.base import Candidate as Candidate
from mola.laplace.base import Factors as Factors
from mola.laplace.base import FeatureSpread as FeatureSpread
from mola.laplace.base import Posterior as Posterior
from mola.laplace.base import Spectrum as Spectrum
from mola.laplace.base import Structure as Structure
from mola.laplace.base import check_precision as check_precision
from mola.laplace.diag import Diag as Diag
from mola.laplace.distance import ClassDistance as ClassDistance
from mola.laplace.distance import ClassGeometry as ClassGeometry
from mola.laplace.distance import ClassSums as ClassSums
from mola.laplace.distance import Scale as Scale
from mola.laplace.full import Full as Full
from mola.laplace.kron import Kron as Kron
from mola.laplace.kron_diag import KronDiag as KronDiag
from mola.laplace.kron_exact import KronExact as KronExact
from mola.laplace.moments import LogitMoments as LogitMoments
from mola.laplace.moments import Spread as Spread
from mola.laplace.moments import in_range as in_range
from mola.laplace.moments import or_nan as or_nan
from mola.options import resolve

STRUCTURES: dict[str, type[Structure]] = {kind.name: kind for kind in (Kron, KronExact, KronDiag, Diag, Full)}


def as_structure(structure: str | Structure) -> Structure:
    """The structure of that name, or the structure itself."""
    return resolve(structure, Structure, STRUCTURES, "structure")  # type: ignore[type-abstract]

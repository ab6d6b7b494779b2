"""The 19 corruptions of CIFAR-10-C at 5 severities, made afresh from their published parameters.

`corrupt` does the work; one file holds each family. Frost without the original's photographs is synthetic.
"""

from mola.lab.corruptions.catalogue import (
    CORRUPTIONS,
    PAPER_CORRUPTIONS,
    SEVERITIES,
    SYNTHETIC,
    USUAL_CORRUPTIONS,
    corrupt,
)

__all__ = ["CORRUPTIONS", "PAPER_CORRUPTIONS", "SEVERITIES", "SYNTHETIC", "USUAL_CORRUPTIONS", "corrupt"]

"""The 19 corruptions of CIFAR-10-C at 5 severities, generated from their published parameters; frost has a synthetic texture.

`corrupt` applies them; each family has its own file.
"""

from mola.lab.corruptions.catalogue import CORRUPTIONS, PAPER_CORRUPTIONS, SEVERITIES, corrupt

__all__ = ["CORRUPTIONS", "PAPER_CORRUPTIONS", "SEVERITIES", "corrupt"]

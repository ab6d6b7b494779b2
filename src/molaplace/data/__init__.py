"""Data by name: folders of images, arrays, CSV files, functions and digits.

`open_dataset` opens them, `Preprocessing` says how their inputs are prepared, and `Loader` reads them in batches for `mola.fit`.
"""

from molaplace.data.dataset import Dataset, Loader, SkippedInputs
from molaplace.data.opening import open_dataset
from molaplace.data.preprocessing import Preprocessing

__all__ = ["Dataset", "Loader", "Preprocessing", "SkippedInputs", "open_dataset"]

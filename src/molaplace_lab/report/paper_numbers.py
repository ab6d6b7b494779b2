"""Numbers from the paper (arXiv 2111.03577), shown in reports next to our own.

Mean confidence (MMC) and AUROC are given in %. Means and standard errors were computed over five runs. The paper calls MultiSWAG
"MSWAG".
"""

from __future__ import annotations

from molaplace_lab.report.runs import RunMean

NETWORKS = {"mnist": "LeNet", "cifar10": "WRN-16-4", "imagenet": "WRN-50-2"}
"""Network architectures used in the paper, by suite."""

RUNS = 5


def _row(text: str, names: tuple[str, ...]) -> dict[str, RunMean]:
    numbers = [float(number) for number in text.split()]
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return {name: RunMean(mean, error, RUNS) for name, (mean, error) in zip(names, pairs, strict=True)}


def _columns(*sets: str) -> tuple[str, ...]:
    return ("test MMC", *(f"{name} {kind}" for name in sets for kind in ("MMC", "AUROC")))


_CIFAR10 = _columns("SVHN", "LSUN", "CIFAR-100")
_MNIST = _columns("FMNIST", "EMNIST", "KMNIST")

OUTLIERS: dict[str, dict[str, dict[str, RunMean]]] = {
    "cifar10": {
        "MAP": _row("97.2 0.0  77.5 2.9 91.7 1.2  71.7 0.8 94.3 0.3  79.2 0.1 90.0 0.1", _CIFAR10),
        "DE": _row("96.1 0.0  62.8 0.7 95.4 0.2  59.2 0.5 96.0 0.1  70.7 0.1 91.3 0.1", _CIFAR10),
        "SWAG": _row("95.1 0.4  69.3 4.0 91.6 1.3  62.2 2.3 94.0 0.7  73.0 0.4 88.2 0.5", _CIFAR10),
        "MultiSWAG": _row("94.5 0.2  57.0 1.2 95.6 0.5  56.3 1.0 95.6 0.3  65.5 0.5 91.1 0.1", _CIFAR10),
        "LLLA": _row("94.1 0.2  60.5 4.0 93.6 1.1  54.5 1.5 95.4 0.3  64.8 0.6 90.8 0.1", _CIFAR10),
        "MoLA": _row("93.8 0.1  52.3 0.7 96.2 0.2  48.3 0.5 96.9 0.1  61.2 0.2 92.0 0.0", _CIFAR10),
    },
    "mnist": {
        "MAP": _row("99.4 0.0  64.1 0.5 99.0 0.0  83.6 0.3 93.7 0.3  77.4 0.3 97.1 0.1", _MNIST),
        "DE": _row("99.2 0.0  55.2 0.4 99.3 0.0  75.8 0.2 95.2 0.0  66.0 0.3 98.4 0.0", _MNIST),
        "SWAG": _row("99.4 0.0  64.6 0.2 99.0 0.0  84.2 0.2 93.6 0.2  78.6 0.3 97.1 0.1", _MNIST),
        "MultiSWAG": _row("99.3 0.0  55.6 0.4 99.3 0.0  76.1 0.3 95.2 0.0  66.3 0.3 98.5 0.0", _MNIST),
        "LLLA": _row("98.2 0.0  48.2 0.5 99.2 0.0  71.5 0.3 94.4 0.2  63.3 0.4 97.5 0.1", _MNIST),
        "MoLA": _row("98.3 0.0  44.0 0.5 99.5 0.0  67.4 0.2 95.7 0.1  56.8 0.4 98.5 0.0", _MNIST),
    },
}
"""Published numbers by suite, method and column, such as "SVHN MMC" or "SVHN AUROC"."""

VARIANTS: dict[str, dict[tuple[str, str], tuple[float, ...]]] = {
    "cifar10": {
        ("diag", "mc"): (-0.1638, -0.4414, -0.7372, -1.1301, -1.4034, -1.5961),
        ("diag", "probit"): (-0.1695, -0.4596, -0.7387, -1.1065, -1.3422, -1.5578),
        ("kron", "mc"): (-0.1659, -0.4438, -0.7413, -1.1211, -1.3482, -1.4852),
        ("kron", "probit"): (-0.1593, -0.4272, -0.7044, -1.0664, -1.2827, -1.4484),
        ("full", "mc"): (-0.1691, -0.4417, -0.7238, -1.0822, -1.2752, -1.4083),
        ("full", "probit"): (-0.1584, -0.4253, -0.7041, -1.0762, -1.3116, -1.4996),
    }
}
"""Published log-likelihoods of LLLA at severities 0 to 5, by suite, structure and link."""

CURVES: dict[str, dict[str, dict[str, tuple[float, ...]]]] = {
    "imagenet": {
        "log_likelihood": {
            "MAP": (-0.918, -1.619, -2.194, -2.826, -3.738, -4.834),
            "DE": (-0.809, -1.428, -1.944, -2.507, -3.336, -4.365),
            "LLLA": (-0.891, -1.595, -2.137, -2.717, -3.536, -4.489),
            "MoLA": (-0.801, -1.424, -1.933, -2.486, -3.293, -4.284),
        },
        "ece": {
            "MAP": (0.0798, 0.0888, 0.1079, 0.1317, 0.1605, 0.1896),
            "DE": (0.0294, 0.0149, 0.0139, 0.0291, 0.0550, 0.0903),
            "LLLA": (0.0258, 0.0302, 0.0268, 0.0248, 0.0339, 0.0640),
            "MoLA": (0.0263, 0.0293, 0.0224, 0.0104, 0.0238, 0.0593),
        },
    }
}
"""Published curves at severities 0 to 5, by suite, metric and method. The paper's other figures give no numbers."""

COST_SETTING = "WRN-16-4, five components, CIFAR-10 test set, one RTX 2080 Ti"

COST: dict[str, tuple[float | None, float, float]] = {
    "MAP": (None, 1.17, 11.0),
    "LLLA": (42.58, 1.14, 12.0),
    "SWAG": (1310.81, 21.90, 440.0),
    "DE": (None, 3.80, 55.0),
    "MoLA": (155.70, 4.04, 58.0),
    "MultiSWAG": (6718.42, 114.48, 2200.0),
}
"""Published fitting and prediction times, in seconds, and memory use, in megabytes, by method."""

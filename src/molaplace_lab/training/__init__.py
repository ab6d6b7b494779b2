"""Training for benchmarks: networks, ensembles, SWAG and MIMO. The same seed gives the same weights, even after interruptions."""

from molaplace.perceptrons import mlp
from molaplace_lab.training.loop import DivergedError, TrainingCheckpoint, member_seeds, train, train_ensemble
from molaplace_lab.training.mimo import train_mimo
from molaplace_lab.training.recipe import RECIPES, Labelled, Recipe, Shuffled, digits_mlp, train_mlps
from molaplace_lab.training.swag import fit_multi_swag, fit_swag

__all__ = [
    "RECIPES",
    "DivergedError",
    "Labelled",
    "Recipe",
    "Shuffled",
    "TrainingCheckpoint",
    "digits_mlp",
    "fit_multi_swag",
    "fit_swag",
    "member_seeds",
    "mlp",
    "train",
    "train_ensemble",
    "train_mimo",
    "train_mlps",
]

"""Training: networks and ensembles with a recipe. The same seed gives the same weights, even after interruptions."""

from molaplace.demo import LabelledData
from molaplace.perceptrons import mlp
from molaplace_lab.training.adapters import ShuffledByLength, adapted_encoder, package_versions, token_ids
from molaplace_lab.training.loop import (
    DivergedError,
    Loader,
    TrainingCheckpoint,
    derived_seeds,
    member_seeds,
    remaining_epochs,
    seeded,
    train,
    train_ensemble,
    train_epoch,
)
from molaplace_lab.training.recipe import LOSSES, RECIPES, Recipe, Shuffled, train_mlps

__all__ = [
    "LOSSES",
    "RECIPES",
    "DivergedError",
    "LabelledData",
    "Loader",
    "Recipe",
    "Shuffled",
    "ShuffledByLength",
    "TrainingCheckpoint",
    "adapted_encoder",
    "derived_seeds",
    "member_seeds",
    "mlp",
    "package_versions",
    "remaining_epochs",
    "seeded",
    "token_ids",
    "train",
    "train_ensemble",
    "train_epoch",
    "train_mlps",
]

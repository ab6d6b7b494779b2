"""Train classifiers for benchmarks and the demo, the same seed giving the same network. `mola` never trains yours."""

from mola.training.loop import train as train
from mola.training.loop import train_ensemble as train_ensemble
from mola.training.mlps import train_mlps as train_mlps
from mola.training.recipe import RECIPES as RECIPES
from mola.training.recipe import Recipe as Recipe

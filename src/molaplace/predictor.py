"""The base of everything that predicts: posteriors, ensembles and mixtures of other predictors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from molaplace.distributed import Team
from molaplace.errors import DataError, OptionError, located
from molaplace.likelihoods import Likelihood
from molaplace.network import Inputs, batch_count, check_inputs, invalid_inputs, named_batches
from molaplace.numerics import seed_from
from molaplace.options import one_of
from molaplace.prediction import Prediction, RegressionPrediction

INVALID = ("raise", "mark")
"""What `predict` may do with inputs that are NaN or infinite."""


class Predictor(nn.Module, ABC):
    """A module that maps inputs to probabilities (n, C) or, for regression, to means (n, D)."""

    likelihood: Likelihood
    """Likelihood of the predictions."""
    weights: Tensor
    """Mixture weights (K,)."""
    fingerprint: str | None = None
    """Short digest of the predictor and its settings, which its predictions carry; None if unknown."""

    def __call__(self, inputs: Any = None, generator: torch.Generator | None = None, **keywords: Any) -> Any:
        """Return what `forward` returns. `posterior(**batch)` is the same as `posterior(batch)`, as for the networks themselves."""
        if keywords:
            inputs = keywords if inputs is None else {"inputs": inputs, **keywords}
        return super().__call__(inputs, generator=generator)

    @abstractmethod
    def forward(self, inputs: Inputs, generator: torch.Generator | None = None) -> Tensor:
        """Return probabilities (n, C) or means (n, D) for one batch."""

    def check_unchanged(self) -> None:
        """Raise `OptionError` if the predictor is known to belong to other weights than its networks now have."""

    @abstractmethod
    def predict_batch(self, inputs: Inputs, seed: int | None = None) -> Any:
        """Predict one batch; links that draw samples use `seed`."""

    def predict_batches(
        self,
        inputs: Any,
        *,
        generator: torch.Generator | None = None,
        invalid: str = "raise",
        progress: bool = False,
        required: bool = True,
    ) -> Iterator[Any]:
        """Predict batch by batch, in bounded memory.

        The arguments have the same meaning as in `predict`. If `required` is False, there may be no batch at all.
        """
        seed = seed_from(generator)
        one_of(invalid, INVALID, "invalid")
        for name, batch in _batches(inputs, progress=progress, required=required):
            with located(name):
                if invalid == "mark":
                    prediction = self._predict_marked(batch, seed)
                else:
                    prediction = self.predict_batch(batch, seed).cpu()
                    check_inputs(batch)
            yield prediction

    def _predict_marked(self, inputs: Inputs, seed: int | None) -> Any:
        inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
        invalid = invalid_inputs(inputs)
        if invalid is None:
            return self.predict_batch(inputs, seed).cpu()
        while True:
            valid = (~invalid).nonzero().flatten()

            def select(value: Any, size: int = len(invalid), rows: Tensor = valid) -> Any:
                is_column = isinstance(value, Tensor) and value.dim() > 0 and len(value) == size
                return value[rows.to(value.device)] if is_column and len(rows) < size else value

            try:
                return self.predict_batch(tree_map(select, inputs), seed).cpu().with_invalid(invalid.cpu())
            except DataError as error:  # outputs that are not finite, one network at a time
                if not error.rows:
                    raise
                invalid[valid[list(error.rows)]] = True

    def predict(
        self,
        inputs: Any,
        *,
        generator: torch.Generator | None = None,
        invalid: str = "raise",
        progress: bool = False,
        team: Team | None = None,
    ) -> Any:
        """Predict probabilities and uncertainty for one batch, or for all batches of a loader.

        Args:
            inputs: one batch or an iterable of batches; any labels are ignored. A batch is a tensor, a tuple of the networks'
                positional arguments, or a mapping of their keyword arguments.
            generator: source of random numbers for links that draw samples; by default, the link's seed is used.
            invalid: what to do if an input, or a network's output for it, is NaN or infinite: "raise" an error that names the rows, or
                "mark" these inputs and answer the others. Marked inputs have NaN fields, the label -1 and an infinite outlier score.
            progress: whether to show a progress bar if stderr is a terminal.
            team: processes that predict together. Each process reads its own shard and returns the predictions of all processes,
                ordered by rank.

        Returns:
            A `Prediction` or, for regression, a `RegressionPrediction`, in main memory. For a single batch, costly fields are computed
            when the first of them is read.
        """
        single_process = team is None or team.size == 1
        predictions = self.predict_batches(
            inputs, generator=generator, invalid=invalid, progress=progress, required=single_process
        )
        if single_process and _is_batch(inputs):
            return next(predictions)
        kind: Any = Prediction if self.likelihood.classification else RegressionPrediction
        parts = [prediction.computed() for prediction in predictions]
        return kind.concatenate(parts) if team is None or single_process else kind.gather(parts, team)

    def predict_proba(self, inputs: Any) -> np.ndarray[Any, Any]:
        """Return probabilities (n, C) as a NumPy array. The inputs may be a NumPy array or anything that `predict` accepts."""
        if not self.likelihood.classification:
            raise OptionError(
                "a regression model has no class probabilities. Use predict(inputs), whose result has mean, interval(0.9) and "
                "log_prob."
            )
        if isinstance(inputs, np.ndarray):
            # Copy the array in native byte order, because torch accepts neither read-only arrays nor other byte orders.
            native = np.array(inputs, dtype=inputs.dtype.newbyteorder("="), order="C")
            if native.dtype.kind not in "biufc":
                raise DataError(
                    f"expected a numeric array, got {native.dtype}. Convert it, for example with array.astype(float)."
                )
            inputs = torch.from_numpy(native)
            parameter = next(self.parameters(), None)
            if parameter is not None and inputs.is_floating_point():
                inputs = inputs.to(parameter.dtype)
        with torch.no_grad():
            return torch.cat([self(batch).cpu() for _, batch in _batches(inputs)]).numpy()


def _is_batch(inputs: Any) -> bool:
    # A tensor, tuple or mapping is one batch; anything else is an iterable of batches.
    return isinstance(inputs, (Tensor, tuple, Mapping)) or hasattr(inputs, "keys")


def _batches(inputs: Any, *, progress: bool = False, required: bool = True) -> Iterator[tuple[str, Inputs]]:
    # Yield the name and the inputs of each batch.
    if _is_batch(inputs):
        yield "the inputs", inputs
        return
    if isinstance(inputs, np.ndarray):
        raise DataError(
            "expected a tensor, got a NumPy array. Use predict_proba(array), or predict(torch.from_numpy(array))."
        )
    total = batch_count(inputs)
    # With several processes, the shard of this process may be empty.
    for name, batch in named_batches(
        (), inputs, "prediction loader", labelled=False, progress=progress, total=total, required=required
    ):
        yield name, batch.inputs

"""Mixtures of last-layer Laplace approximations. One class, `MoLA`, covers MAP, deep ensembles, last-layer Laplace and MoLA."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from molaplace import bounds
from molaplace.distributed import Team
from molaplace.errors import BoundError
from molaplace.laplace_mixture import LaplaceMixture
from molaplace.likelihoods import Members, RegressionPredictive
from molaplace.network import Captured, Inputs, Rows, captured_arrays, one_batch
from molaplace.outliers import (
    COMBINED,
    DISTANCE,
    FAR_FIELD,
    MAX_PROBABILITY,
    NORM,
    VARIANCE,
    OutlierTerms,
    far_field_score,
    outlier_score,
)
from molaplace.prediction import Prediction, RegressionPrediction
from molaplace.rules.held_out import HeldOut, feature_scales, with_scores
from molaplace.settings import Reference
from molaplace.structures.base import LayerCurvature
from molaplace.uncertainty import num_draws


class MoLA(LaplaceMixture):
    """A mixture of last-layer Laplace approximations, created by `mola.fit`, `mola.ensemble` or `mola.load`.

    Calling the mixture returns probabilities (n, C) or, for regression, means (n, D). `predict` returns a `Prediction`.
    """

    @property
    def is_dense(self) -> bool:
        """True if the networks have dense outputs, i.e. one output for each pixel or token."""
        head = self.components[0].head
        return head is not None and head.dense_axes > 0

    # --- predict ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predict_batch(self, inputs: Inputs, seed: int | None = None) -> Any:
        """Predict one batch; links that draw samples use `seed`."""
        captured = self.capture(inputs)
        captured.check_finite()
        captured.check_logits(self.networks, inputs, self.likelihood)
        return self.make_prediction(captured.copied(), seed)

    def predict_from_features(self, features: Any, outputs: Any) -> Any:
        """Return the prediction that `predict` would return, given features and outputs that have already been computed.

        They may be NumPy arrays. `DataError` is raised if the features do not give the outputs through the last layer.

        Args:
            features: inputs (n, P) of the last layer, or a list with those of each network.
            outputs: outputs (n, C) of the last layer, before any softmax, or a list with those of each network.
        """
        heads = [component.head for component in self.components]
        with torch.no_grad():
            return self.make_prediction(captured_arrays(heads, features, outputs, self.likelihood).copied())

    def make_prediction(self, captured: Captured, seed: int | None = None) -> Any:
        """Predict from captured features and outputs.

        They are kept, because in classification the fields are computed when they are read, each group with what it needs.
        """
        layout = captured.layout
        shared: dict[str, Any] = {
            "likelihood": self.likelihood,
            "axis": layout.axis if layout.sizes else -1,
            "ood_score_name": self.ood_score_name,
            "fingerprint": self.fingerprint,
        }
        if not self.likelihood.classification:
            fields = self.by_rows(captured, self._regression_fields)
            return RegressionPrediction(fields, weights=self.weights, **shared)
        groups: dict[tuple[str, ...], Callable[[Rows], dict[str, Tensor]]] = {
            ("probs",): lambda rows: {"probs": self.distribution_of(self.project(rows), seed=seed).point()},
            ("logit_mean", "logit_variance"): self._logit_fields,
            ("ood_score", "distance", "far_field"): self._outlier_fields,
            ("mutual_information",): partial(self._information_fields, seed=seed),
        }
        if self.settings.uses_distance:
            groups["aleatoric",] = partial(self._aleatoric_fields, seed=seed)
        classes = captured.outputs[0].shape[-1]
        row_size = classes * num_draws(classes)  # for the epistemic share
        pending = {names: partial(self.by_rows, captured, compute, row_size) for names, compute in groups.items()}
        prediction = Prediction({}, pending=pending, **shared)
        if layout.sizes:
            _ = prediction.probs  # dense features are not copied, and the caller may reuse their memory
        return prediction

    def _logit_fields(self, rows: Rows) -> dict[str, Tensor]:
        spreads = zip(rows.outputs, self.spreads(self.project(rows, distances=False)), strict=True)
        variances = [torch.zeros_like(means) if spread is None else spread.variance() for means, spread in spreads]
        return {"logit_mean": torch.stack(list(rows.outputs), 1), "logit_variance": torch.stack(variances, 1)}

    def _information_fields(self, rows: Rows, *, seed: int | None) -> dict[str, Tensor]:
        information, _ = self._information_and_rest(self.members(self.project(rows)), seed)
        return {"mutual_information": information}

    def _aleatoric_fields(self, rows: Rows, *, seed: int | None) -> dict[str, Tensor]:
        # The entropy that distance adds is epistemic, because nearby data would remove it.
        near = replace(self.settings, distance_exponent=0.0)
        _, rest = self._information_and_rest(self.members(self.project(rows, distances=False), near), seed)
        return {"aleatoric": rest}

    def _information_and_rest(self, members: Members, seed: int | None) -> tuple[Tensor, Tensor]:
        # Return the mutual information between the label and the weights, and the rest of the entropy.
        likelihood: Any = self.likelihood
        total = likelihood.predictive(members, self.link, seed).entropy()
        information = total * likelihood.epistemic_share(members, seed or 0)
        return information, total - information

    def _outlier_fields(self, rows: Rows) -> dict[str, Tensor]:
        fields = {}
        logs = self.distances_and_norms(rows) if self.has_distances else None
        if logs is not None and self.reference is not None:
            fields["distance"] = self.reference.log_distance(logs[0], self.weights.to(logs[0])).exp()
        if self.ood_score_name == MAX_PROBABILITY:
            distribution: Any = self.distribution_of(self.project(rows))
            return fields | {"ood_score": distribution.outlier_score()}
        fields["far_field"] = self._far_field(rows)
        if self.ood_score_name == FAR_FIELD or logs is None or self.reference is None:
            return fields | {"ood_score": fields["far_field"]}
        reference = self.reference.score_at(self.weights)
        assert reference is not None  # `ood_score_name` is COMBINED only if there are reference scores
        terms = self._outlier_terms(rows.outputs, fields["far_field"], logs)
        return fields | {"ood_score": outlier_score(terms, reference)}

    def _regression_fields(self, rows: Rows) -> dict[str, Tensor]:
        projected = self.project(rows, distances=self.has_distances)
        logs = projected.logs
        mixture = self.likelihood.predictive(self.members(projected), self.link)
        assert isinstance(mixture, RegressionPredictive)
        fields = {
            "component_mean": mixture.means,
            "component_variance": mixture.variances,
            "component_noise": mixture.noises,
        }
        weights = self.weights.to(rows.outputs[0])
        if logs is not None and self.reference is not None:
            distance = self.reference.log_distance(logs[0], weights).exp()
            return fields | {"distance": distance, "ood_score": self.reference.log_departure(*logs, weights)}
        if self.ood_score_name == NORM:
            return fields | {"ood_score": weights @ self._norms(rows).log()}
        return fields | {"ood_score": mixture.disagreement()}

    # --- outlier scores ---------------------------------------------------------------------------------------------

    @property
    def ood_score_name(self) -> str:
        """Name of the outlier score used in predictions: the best one available."""
        if self.components[0].layer is None:
            return MAX_PROBABILITY if self.likelihood.classification else VARIANCE
        if not self.likelihood.classification:
            return DISTANCE if self.has_distances else NORM
        return FAR_FIELD if self.reference is None or self.reference.score is None else COMBINED

    def _norms(self, rows: Rows) -> Tensor:
        norms = []
        for component, phi in zip(self.components, rows.phi, strict=True):
            layer = component.on(phi.device)
            assert layer is not None
            assert isinstance(layer.curvature, LayerCurvature)
            norms.append(layer.curvature.feature_factor.mahalanobis(phi))
        return torch.stack(norms)

    def _far_field(self, rows: Rows) -> Tensor:
        means = torch.stack(list(rows.outputs))
        return far_field_score(means, self._norms(rows), self.weights.to(means), self.likelihood)  # type: ignore[arg-type]

    def _outlier_terms(self, outputs: Sequence[Tensor], far_field: Tensor, logs: tuple[Tensor, Tensor]) -> OutlierTerms:
        assert self.reference is not None  # mixtures with distances have a reference
        likelihood: Any = self.likelihood
        factors = (-2 * self.reference.log_excess(logs[1])).exp()[..., None]
        energies = [likelihood.energy(logits * factor) for logits, factor in zip(outputs, factors, strict=True)]
        by_network = torch.stack(energies)
        weights = self.weights.to(by_network)
        departure = self.reference.log_departure(*logs, weights)
        return OutlierTerms(far_field, weights @ by_network, departure, by_network)

    # --- tune -------------------------------------------------------------------------------------------------------

    def reference_on(self, data: HeldOut) -> Reference | None:
        """Return the typical distances, norms and outlier scores of the validation data, or None without distances."""
        if not self.has_distances:
            return None
        logs = [self.distances_and_norms(rows) for rows in data.chunks()]
        distances, norms = (torch.cat(columns, 1) for columns in zip(*logs, strict=True))
        reference = feature_scales(distances, norms, self.distances)
        if not self.likelihood.classification:
            return reference
        far_field = torch.cat([self._far_field(rows) for rows in data.chunks()])
        posterior = self.with_parts(reference=reference)
        return with_scores(reference, posterior._outlier_terms(data.outputs, far_field, (distances, norms)))

    # --- new data ---------------------------------------------------------------------------------------------------

    def add(
        self,
        train_loader: Iterable[Any],
        *,
        team: Team | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 100,
        progress: bool = True,
    ) -> MoLA:
        """Return the posterior with more training data, which are read once. The old data are not read again.

        The result is the posterior that a fit to all the data would give, because its sums are additive. The networks do not learn
        from the new data, and the settings are kept although they were chosen for the old data: `stale` is then True until the next
        `tune`.

        Args:
            train_loader: new training data, in the same form as for `mola.fit`. Data that are already included are counted twice.
            team: processes that share the pass; each reads its own shard.
            checkpoint: folder in which intermediate sums are saved, as for `mola.fit`.
            checkpoint_every: number of batches between checkpoints.
            progress: whether to show a progress bar when stderr is a terminal.
        """
        from molaplace import new_data

        return new_data.added(
            self,
            train_loader,
            team=team,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            progress=progress,
        )

    def without(self, loader: Iterable[Any], *, team: Team | None = None, progress: bool = True) -> MoLA:
        """Return the posterior without some of its training data, which are read once; the other data are not read again.

        The networks still remember the removed data, so this is no unlearning. `DataError` is raised if the data cannot have been
        in the fit, for example because more data of a class would be removed than there are. Not every such mistake can be detected.

        Args:
            loader: training data to remove, with their labels.
            team: processes that share the pass; each reads its own shard.
            progress: whether to show a progress bar when stderr is a terminal.
        """
        from molaplace import new_data

        return new_data.removed(self, loader, team=team, progress=progress)

    def __add__(self, other: MoLA) -> MoLA:
        """Return this posterior with the training data of both: the sums are added, and no data are read.

        Both posteriors must have the same networks and options. The settings, link and weights of this posterior are kept.
        """
        if not isinstance(other, MoLA):
            return NotImplemented
        from molaplace import new_data

        return new_data.merged(self, other)

    # --- bounds -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def confidence_bound(self, inputs: Inputs, *, lemma: bool = False) -> Tensor:
        """Return an upper bound on the confidence in the predicted class of each input, based on the paper's theorem.

        The bound holds only for the probit link. Other links raise `BoundError`.

        Args:
            inputs: one batch.
            lemma: whether to return each component's bound (the paper's lemma) instead of the mixture's bound.

        Returns:
            Bounds of shape (n,), or (n, K) if `lemma` is True; for multi-label data, (n, C) or (n, K, C).
        """
        self._require_bounds()

        def compute(rows: Rows) -> dict[str, Tensor]:
            mixture, components = bounds.confidence_bounds(
                self.members(self.project(rows)), rows.phi, self._trained_weights(rows), self.link, self.settings
            )
            by_input = components.transpose(0, 1)  # (m, K) or, for multi-label data, (m, K, C)
            return {"bound": mixture, "component_bound": by_input[..., None] if by_input.dim() == 2 else by_input}

        captured = self.capture(one_batch(inputs))
        captured.check_finite()  # otherwise the bound would be finite even though there is no prediction
        bounds_of_rows = self.by_rows(captured, compute)
        if not lemma:
            return bounds_of_rows["bound"]
        components = bounds_of_rows["component_bound"]
        if not self.likelihood.mutually_exclusive:
            return components
        channels_first = captured.layout.sizes and captured.layout.axis == 1
        return components.squeeze(2 if channels_first else -1)

    @torch.no_grad()
    def far_field_limit(self, inputs: Inputs) -> Tensor:
        """Return the probabilities (n, C) that `posterior(delta * inputs)` approaches as delta grows without bound.

        The limit is exact for bias-free ReLU networks, whose features scale with the input. Other networks raise `BoundError`. With
        a distance exponent, the limit is 1/C, except at inputs where all features of a network are 0, because such features
        remain 0 at every multiple of the input.
        """
        self._require_bounds()
        near = self.capture(one_batch(inputs))
        far = self.capture(tree_map_only(Tensor, bounds.scaled, inputs))
        outputs = near.outputs[0]
        if self.is_dense:
            raise BoundError(
                "the far-field limit is not defined for dense outputs. Use posterior.confidence_bound(inputs), whose bound holds "
                "everywhere."
            )
        rows = near.rows_at()
        limit = bounds.far_field_limit(
            self.members(self.project(rows)),
            rows.phi,
            self._trained_weights(rows),
            [0 if component.head is None else component.head.inputs for component in self.components],
            far.rows_at().phi,
            self.settings,
        )
        return limit.to(torch.promote_types(outputs.dtype, torch.float32)).to(outputs.device)

    def _trained_weights(self, rows: Rows) -> list[Tensor]:
        layers = [component.on(phi.device) for component, phi in zip(self.components, rows.phi, strict=True)]
        return [layer.weights for layer in layers if layer is not None]

    def _require_bounds(self) -> None:
        if not self.likelihood.classification:
            raise BoundError(
                "a regression model has no confidence to bound. Far from the training data, its standard deviation grows without "
                "bound."
            )
        bounds.require_probit(self.link)

    # --- files ------------------------------------------------------------------------------------------------------

    def save(
        self,
        directory: str | Path,
        *,
        networks: bool = False,
        build: str | Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        example: Any = None,
        preparation: Mapping[str, Any] | None = None,
        validation: tuple[Any, Tensor] | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Save the posterior to a folder: sums, settings, weights, link, reference, and a checksum of each network.

        With its networks, the folder is complete: `mola.load(directory)`, the commands and `mola.hub` open it.

        Args:
            directory: folder to write to. If the folder already contains a posterior, that posterior remains readable until the new
                one is complete. Files that molaplace did not write are never replaced or removed.
            networks: whether to save the networks, too: in the format of transformers if they are from there, else as weights.
            build: function that builds a network of the same architecture, such as "package.module:build", or a name for each network.
                Whoever opens the folder must trust it (`trust=True`, `--trust`) or pass the function. Not needed for transformers.
            classes: names of the outputs.
            example: a batch of inputs. Their shapes are saved, because the command `molaplace export` needs them.
            preparation: how the commands prepare images: "resize", "crop", "mode", "mean" and "std", as in `molaplace fit`.
            validation: a prediction for validation data, and their labels. The commands compute alarms and guarantees from their scores.
            overwrite: whether to write even if the folder contains other files but no posterior. The user's files are kept, and anything
                else that molaplace has saved there is replaced.

        Returns:
            The folder, which can be passed to `mola.load(directory, networks)`, or to `mola.load(directory)` if it contains networks.
        """
        from molaplace.saving.bundle import save_bundle, with_contents

        contents, columns = with_contents(self, classes, example, preparation, validation)
        return save_bundle(self, directory, contents, columns, networks=networks, build=build, overwrite=overwrite)

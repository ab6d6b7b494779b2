"""Fitting to features and outputs from elsewhere gives the posterior that a fit to the networks gives."""

import numpy as np
import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.errors import DataError, OptionError
from molaplace.features import head_networks
from tests.library.problems import close, data, features_of, loader, networks

pytestmark = pytest.mark.filterwarnings("ignore:.*have no training data")

FIELDS = ("probs", "mutual_information", "ood_score", "distance", "logit_variance")


def batches(seed, count):
    inputs, labels = data(seed, count)
    return inputs.double(), labels


INPUTS, LABELS = batches(1, 60)
QUERY, QUERY_LABELS = batches(2, 30)


def activations(members, inputs):
    with torch.no_grad():
        return [features_of(member, inputs) for member in members], [member(inputs) for member in members]


def layers(members):
    return [member[-1] for member in members]


def same_predictions(actual, expected, members):
    features, outputs = activations(members, QUERY)
    prediction = actual.predict_from_features(features, outputs)
    reference = expected.predict(QUERY)
    for field in FIELDS:
        torch.testing.assert_close(getattr(prediction, field), getattr(reference, field), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(actual(tuple(features)), expected(QUERY), rtol=1e-10, atol=1e-12)


class TestSamePosterior:
    def test_as_a_fit_to_the_networks(self, structure):
        members = networks(2)
        expected = mola.fit(members, loader(INPUTS, LABELS, 13), structure=structure)
        features, outputs = activations(members, INPUTS)
        actual = mola.fit_features(features, outputs, LABELS, layers(members), structure=structure)
        for component, other in zip(actual.components, expected.components, strict=True):
            sums = component.layer.sums
            others = other.layer.sums
            assert (sums.count, sums.tensors.keys()) == (others.count, others.tensors.keys())
            assert sums.log_likelihood == pytest.approx(others.log_likelihood, rel=1e-12)
            for name, tensor in sums.tensors.items():
                torch.testing.assert_close(tensor, others.tensors[name], rtol=1e-12, atol=1e-12)
        same_predictions(actual, expected, members)

    @pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
    def test_other_likelihoods(self, likelihood):
        members = networks(2)
        targets = nn.functional.one_hot(LABELS, 4).double()
        targets[::5, 1] = torch.nan if likelihood == "bernoulli" else 0.3
        expected = mola.fit(members, loader(INPUTS, targets, 13), likelihood=likelihood)
        features, outputs = activations(members, INPUTS)
        actual = mola.fit_features(features, outputs, targets, layers(members), likelihood=likelihood)
        assert close(actual(tuple(activations(members, QUERY)[0])), expected(QUERY))
        torch.testing.assert_close(actual.log_evidence(), expected.log_evidence())
        if likelihood == "gaussian":
            torch.testing.assert_close(actual.noise, expected.noise)

    def test_from_numpy_in_one_piece_in_batches_and_from_a_file(self, tmp_path):
        members = networks(1)
        expected = mola.fit(members, loader(INPUTS, LABELS, 13))
        (features,), (outputs,) = activations(members, INPUTS)
        head = (members[0][-1].weight.detach().numpy(), members[0][-1].bias.detach().numpy())
        arrays = [features.numpy(), outputs.numpy(), LABELS.numpy()]
        np.save(tmp_path / "features.npy", arrays[0])
        mapped = np.load(tmp_path / "features.npy", mmap_mode="r")
        splits = [np.array_split(array, 4) for array in arrays]
        for actual in (
            mola.fit_features(*arrays, head),
            mola.fit_features(mapped, *arrays[1:], [head]),
            mola.fit_features(zip(*splits, strict=True), heads=head),
        ):
            same_predictions(actual, expected, members)
            prediction = actual.predict_from_features(*(array[:3] for array in arrays[:2]))
            assert close(prediction.probs, expected(INPUTS[:3]), 1e-10)

    def test_many_rows_are_read_in_parts(self, monkeypatch):
        members = networks(1)
        (features,), (outputs,) = activations(members, INPUTS)
        expected = mola.fit_features(features, outputs, LABELS, members[0][-1])
        monkeypatch.setattr(mola.features, "ROWS_AT_ONCE", 7)
        actual = mola.fit_features(features, outputs, LABELS, members[0][-1])
        assert close(actual(features), expected(features))

    def test_without_labels(self):
        members = networks(1)
        (features,), (outputs,) = activations(members, INPUTS)
        expected = mola.fit(members, [INPUTS])
        same_predictions(mola.fit_features(features, outputs, heads=members[0][-1]), expected, members)
        same_predictions(mola.fit_features([(features, outputs)], heads=members[0][-1]), expected, members)

    @pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")  # untrained networks
    def test_tuning_evaluation_and_new_data_take_features(self, tmp_path):
        members = networks(2)
        validation = loader(QUERY, QUERY_LABELS, 11)
        of_features = [(tuple(features_of(member, x) for member in members), y) for x, y in validation]
        features, outputs = activations(members, INPUTS)
        expected = mola.fit(members, loader(INPUTS, LABELS, 13), validation)
        actual = mola.fit_features(features, outputs, LABELS, layers(members), of_features)
        for name, value in vars(expected.settings).items():
            assert getattr(actual.settings, name) == pytest.approx(value), name
        table = mola.evaluate(actual, of_features)
        assert str(table) == str(mola.evaluate(expected, validation))
        assert close(actual.add(of_features)(of_features[0][0]), expected.add(validation)(validation[0][0]), 1e-9)
        loaded = mola.load(actual.save(tmp_path / "posterior"), head_networks(layers(members)))
        assert torch.equal(loaded(of_features[0][0]), actual(of_features[0][0]))
        posterior = mola.fit_features(features[0], outputs[0], LABELS, members[0][-1])
        assert torch.autograd.functional.jacobian(posterior, features[0][:1]).abs().max() > 0
        assert np.allclose(posterior.predict_proba(features[0].numpy()), posterior(features[0]).detach().numpy())


class TestRefused:
    @pytest.fixture
    def arrays(self):
        member = networks(1)[0]
        (features,), (outputs,) = activations([member], INPUTS)
        return member[-1], features, outputs

    def test_features_that_do_not_give_the_outputs(self, arrays):
        layer, features, outputs = arrays
        wrong = features.clone()
        wrong[17] *= 1.1
        for rows in (wrong, features.flip(0), features.relu(), 2 * features):
            with pytest.raises(DataError, match="do not give the outputs"):
                mola.fit_features(rows, outputs, LABELS, layer)
        with pytest.raises(DataError, match="row 17"):
            mola.fit_features(wrong, outputs, LABELS, layer)
        with pytest.raises(DataError, match="do not give the outputs"):
            mola.fit_features(features, outputs, LABELS, (layer.weight, None))
        with pytest.raises(DataError, match="before the softmax"):
            mola.fit_features(features, outputs.softmax(1), LABELS, layer)
        posterior = mola.fit_features(features, outputs, LABELS, layer)
        with pytest.raises(DataError, match="do not give the outputs"):
            posterior.predict_from_features(wrong, outputs)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_rounding_is_accepted(self, arrays, dtype):
        layer, features, _ = arrays
        layer = layer.to(dtype)
        with torch.no_grad():
            outputs = layer(features.to(dtype))
        mola.fit_features(features.to(dtype), outputs, LABELS, layer)
        mola.fit_features(features.to(dtype).double(), outputs, LABELS, layer)

    def test_shapes(self, arrays):
        layer, features, outputs = arrays
        with pytest.raises(DataError, match="takes 6 features"):
            mola.fit_features(features[:, :5], outputs, LABELS, layer)
        with pytest.raises(DataError, match="Pass as many rows"):
            mola.fit_features(features[:-1], outputs, LABELS, layer)
        with pytest.raises(DataError, match="label for each"):
            mola.fit_features(features, outputs, LABELS[:-1], layer)
        with pytest.raises(DataError, match=r"\(outputs, features\)"):
            mola.fit_features(features, outputs, LABELS, (layer.weight.T, None))
        with pytest.raises(OptionError, match=r"kernel\.T"):
            mola.fit_features(features, outputs, LABELS, (layer.weight.T, layer.bias))
        with pytest.raises(OptionError, match="list of 2 arrays"):
            mola.fit_features(features, outputs, LABELS, [layer, layer])
        with pytest.raises(DataError, match="has 5 outputs"):
            mola.fit_features([features] * 2, [outputs] * 2, LABELS, [layer, nn.Linear(6, 5)])

    def test_missing_arguments(self, arrays):
        layer, features, outputs = arrays
        with pytest.raises(OptionError, match="outputs"):
            mola.fit_features(features, None, LABELS, layer)
        with pytest.raises(OptionError, match="heads"):
            mola.fit_features(features, outputs, LABELS)
        with pytest.raises(OptionError, match=r"heads\[0\]"):
            mola.fit_features(features, outputs, LABELS, [layer.weight])
        with pytest.raises(DataError, match="batch 1"):
            mola.fit_features([(features, outputs, LABELS), features], heads=layer)
        with pytest.raises(DataError, match=r"batch 1.*labels"):
            mola.fit_features([(features, outputs, LABELS), (features, outputs)], heads=layer)
        with pytest.raises(DataError, match="is empty"):
            mola.fit_features([], heads=layer)

    def test_values_that_are_not_finite_and_labels_out_of_range(self, arrays):
        layer, features, outputs = arrays
        wrong = features.clone()
        wrong[3, 2] = torch.nan
        with pytest.raises(DataError, match="NaN"):
            mola.fit_features(wrong, layer(wrong).detach(), LABELS, layer)
        with pytest.raises(DataError, match=r"features are NaN or infinite for 1 of 60 rows \(row 3\)"):
            mola.fit_features(wrong, outputs, LABELS, layer)
        with pytest.raises(DataError, match="labels must lie"):
            mola.fit_features(features, outputs, LABELS + 1, layer)
